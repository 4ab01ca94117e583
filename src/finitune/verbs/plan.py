"""finitune plan: the smallest fp16 plan of a checkpoint, and its certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finitune.errors import FileError, UsageError
from finitune.files.sniff import read_utf8_text
from finitune.generation.draw import DrawnPictures
from finitune.generation.planning import calibrate_model, certify_model_plan, draw_in_precision, make_model_plan
from finitune.generation.settings import PictureSettings, parse_picture_size
from finitune.models.loaded import LoadedModel
from finitune.numerics.compare import psnr_db, relative_l2
from finitune.precision.certificate import PlanCertificate
from finitune.precision.plan import PrecisionPlan
from finitune.progress import Progress
from finitune.report import Level, Report, Table
from finitune.verbs.shared.model import (
    format_model_name,
    get_default_picture_size,
    get_default_plan_path,
    load_model,
    write_plan,
)
from finitune.verbs.shared.options import ModelChoice, OutPath

DEFAULT_CALIBRATION_PROMPTS = ("red apple", "smiling cat face with heart-shaped eyes")


@dataclass(frozen=True, kw_only=True)
class Request(ModelChoice):
    """What to plan, on which prompts, and where to write the plan."""

    out: OutPath = None
    """The plan file to write."""
    headroom_bits: float = 2
    """Powers of two to keep free above the largest measured magnitude."""
    prompts: Path | None = None
    """A text file with one calibration prompt a line."""
    steps: int = 28
    """Number of denoising steps for each prompt."""
    seed: int = 0
    """Seed of the noise."""
    size: str | None = None
    """WIDTHxHEIGHT in pixels; the model's own size if left out."""

    def pictures(self) -> list[PictureSettings]:
        """The calibration pictures: one per prompt, seeds counted up from `seed`."""
        width, height = parse_picture_size(self.size or get_default_picture_size(self))
        prompts = read_prompt_file(self.prompts) if self.prompts else DEFAULT_CALIBRATION_PROMPTS
        return [
            PictureSettings(prompt=prompt, steps=self.steps, seed=self.seed + i, width=width, height=height)
            for i, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True)
class PlanProof:
    """A plan with its certificates by component, and the same pictures drawn in fp32, in bf16 and by the plan."""

    plan: PrecisionPlan
    certificates: dict[str, PlanCertificate]
    drawings: dict[str, DrawnPictures]
    denoiser: str

    def figures(self) -> dict[str, object]:
        """The whole run's errors and the denoiser's certificate, as named figures."""
        certificates = self.certificates.values()
        return {
            **self.plan.proof["run"],
            **self.certificates[self.denoiser].figures(),
            "headroom_bits_min": min(c.headroom_bits_min for c in certificates),
            "droppable_lines": sum(c.droppable_lines for c in certificates),
            "lines": sum(c.lines for c in certificates),
        }


def run(request: Request, progress: Progress | None = None) -> Report:
    """Measure, plan, prove, write the plan and read it back."""
    with Report("plan") as report:
        if not 0 <= request.headroom_bits <= 10:
            raise UsageError(
                f"--headroom-bits: {request.headroom_bits} is not in 0 .. 10",
                code="HEADROOM-OUT-OF-RANGE",
                subject="--headroom-bits",
                remedy="2 bits, the default, leave a factor of 4 over everything that was measured.",
            )
        pictures = request.pictures()
        parts = load_model(request)
        report.findings.extend(parts.notes)
        proof = plan_and_prove(parts, format_model_name(request), pictures, request.headroom_bits, progress)
        report.figures.update(proof.figures())
        report.tables.extend(build_proof_tables(proof))
        judge_plan_proof(report, proof, request.headroom_bits)
        out = request.out or get_default_plan_path(request)
        report.artifacts["plan"] = str(write_plan(out if report.ok else out.with_suffix(".suspect.toml"), proof.plan))
    return report


def plan_and_prove(
    parts: LoadedModel,
    name: str,
    pictures: Sequence[PictureSettings],
    headroom_bits: float,
    progress: Progress | None = None,
) -> PlanProof:
    """The plan of all components, its certificates, and the same pictures drawn in fp32, bf16 and by the plan."""
    calls, reference = calibrate_model(parts, pictures, progress)
    plan = make_model_plan(parts, name, calls, headroom_bits, progress)
    certificates = certify_model_plan(parts, plan, calls, progress)
    drawings = {
        "fp32": reference,
        "bf16": draw_in_precision(parts, "bf16", pictures, progress=progress),
        "planned-half": draw_in_precision(parts, "planned-half", pictures, plan, progress),
    }
    proof = {"run": compute_fp32_distances(drawings), **{name: c.figures() for name, c in certificates.items()}}
    return PlanProof(replace(plan, proof=proof), certificates, drawings, parts.denoiser)


def compute_fp32_distances(drawings: dict[str, DrawnPictures]) -> dict[str, object]:
    """How far the plan's and bf16's latents and pictures are from fp32's: the worst picture counts."""
    reference = drawings["fp32"]
    figures: dict[str, object] = {}
    for prefix, drawing in (("", drawings["planned-half"]), ("bf16_", drawings["bf16"])):
        latents = zip(drawing.latents, reference.latents, strict=True)
        pixels = zip(drawing.pixels.float(), reference.pixels.float(), strict=True)
        figures[f"{prefix}rel_l2_vs_fp32"] = max(relative_l2(ours, theirs) for ours, theirs in latents)
        figures[f"{prefix}psnr_vs_fp32"] = min(psnr_db(ours, theirs, 255.0) for ours, theirs in pixels)
    return figures


def judge_plan_proof(report: Report, proof: PlanProof, headroom_bits: float) -> None:
    """Every promise of a plan that this one does not keep, as an error."""
    remedy = "Use --precision current-half, which needs no plan, and report this model."
    for name, certificate in proof.certificates.items():
        if not certificate.finite:
            report.add(Level.ERROR, "PLAN-NOT-FINITE", name, "the planned run is not finite", remedy=remedy)
        if certificate.headroom_bits_min < headroom_bits:
            bits = certificate.headroom_bits_min
            message = f"only {bits:.2f} bits of headroom were left"
            report.add(Level.ERROR, "PLAN-HEADROOM", name, message, remedy=remedy, asked=headroom_bits, left=bits)
        if certificate.droppable_lines:
            message = f"{certificate.droppable_lines} lines could be dropped"
            report.add(Level.WARNING, "PLAN-NOT-MINIMAL", name, message, remedy="Report this model.")
        if certificate.rounded_weights:
            message = f"{certificate.rounded_weights} weights, the tiniest, are not exact in fp16"
            report.add(Level.NOTE, "WEIGHTS-ROUNDED", name, message)
    run = proof.plan.proof["run"]
    if not run["rel_l2_vs_fp32"] < run["bf16_rel_l2_vs_fp32"]:
        ours, theirs = run["rel_l2_vs_fp32"], run["bf16_rel_l2_vs_fp32"]
        message = f"the plan is further from fp32 ({ours:.2e}) than bf16 is ({theirs:.2e})"
        report.add(Level.ERROR, "PLAN-WORSE-THAN-BF16", proof.plan.model, message, remedy=remedy)


def build_proof_tables(proof: PlanProof) -> list[Table]:
    lines = [
        (
            component,
            line.site,
            line.out if line.kind == "product" else "island",
            "measured" if line.exponent is None else str(line.exponent),
            line.reason,
        )
        for component, plan in proof.plan.components.items()
        for line in plan.lines
    ]
    certificates = [
        (
            name,
            str(c.lines),
            f"{c.headroom_bits_min:.2f}",
            f"{c.exact_rel_l2:.1e}",
            f"{c.step_rel_l2:.1e} / {c.bf16_step_rel_l2:.1e}",
            f"{c.site_sqnr_db_median:.0f} / {c.bf16_site_sqnr_db_median:.0f}",
            f"{c.half_flops_share:.2%}",
            f"{c.bytes_over_raw_half:.3f}",
        )
        for name, c in proof.certificates.items()
    ]
    columns = ("component", "lines", "headroom", "algebra", "error / bf16's", "SQNR dB / bf16's", "fp16 FLOPs", "bytes")
    return [
        Table("plan", ("component", "site", "writes", "exponent", "reason"), tuple(lines)),
        Table("certificate", columns, tuple(certificates)),
    ]


def read_prompt_file(path: Path) -> list[str]:
    """The prompts of a UTF-8 text file, one per line; raises FileError where there are none."""
    prompts = [line.strip() for line in read_utf8_text(path).splitlines() if line.strip()]
    if not prompts:
        raise FileError(
            f"{path}: no prompts in it",
            code="PROMPTS-EMPTY",
            subject=str(path),
            remedy="One prompt per line, UTF-8.",
        )
    return prompts
