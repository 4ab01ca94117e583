"""Which model a command works on, and the plan that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FileError, UsageError, did_you_mean

if TYPE_CHECKING:
    from finitune.generation.settings import Settings
    from finitune.models.anima.load import AnimaParts
    from finitune.precision.plan import PrecisionPlan
    from finitune.progress import Progress
    from finitune.report import Report

SHIPPED = ("pico-anima",)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """MODEL: `pico-anima`, a diffusers folder, or a DiT file together with its Qwen3 and VAE files."""

    model: str
    qwen3: Path | None = None
    vae: Path | None = None
    tokenizers: Path | None = None


def load_model(choice: ModelChoice) -> AnimaParts:
    """The parts of the chosen model, as stored; raises UsageError or FileError where the choice names none."""
    from finitune.models.anima.load import load_folder, load_three_files
    from finitune.models.pico import folder as pico_folder

    if choice.model in SHIPPED:
        return load_folder(pico_folder())
    path = Path(choice.model)
    if path.is_dir():
        return load_folder(path)
    if not path.exists():
        raise FileError(
            f"{choice.model}: no such model, folder or file.{did_you_mean(choice.model, SHIPPED)}",
            code="MODEL-NOT-FOUND",
            subject=choice.model,
            remedy="MODEL is pico-anima, a diffusers folder, or the DiT file with --qwen3 FILE and --vae FILE.",
        )
    missing = [option for option, given in (("--qwen3", choice.qwen3), ("--vae", choice.vae)) if given is None]
    if missing:
        from finitune.files.sniff import check_safetensors

        check_safetensors(path)
        raise UsageError(
            f"{path.name} is one file of three: {' and '.join(missing)} missing",
            code="MODEL-FILES-MISSING",
            subject=choice.model,
            remedy=f"finitune ... {path.name} --qwen3 qwen_3_06b_base.safetensors --vae qwen_image_vae.safetensors",
        )
    tokenizers = choice.tokenizers or path.parent
    return load_three_files(dit=path, qwen3=choice.qwen3, vae=choice.vae, tokenizers=tokenizers)


def display_name(choice: ModelChoice) -> str:
    """The model's name in reports and picture files: without the folders of this machine."""
    return choice.model if choice.model in SHIPPED else Path(choice.model).name


def default_size(choice: ModelChoice) -> str:
    """The size that the model draws best."""
    return "64x64" if choice.model in SHIPPED else "1024x1024"


def plan_for(
    choice: ModelChoice,
    parts: AnimaParts,
    settings: Settings,
    path: Path | None,
    report: Report,
    progress: Progress | None,
) -> PrecisionPlan:
    """The plan to run with: the given file, the shipped one, or one made now on this very prompt."""
    from finitune.generation.planning import calibrate, plan_model
    from finitune.models.pico import plan_file
    from finitune.precision.plan import PrecisionPlan
    from finitune.report import Level

    shipped = plan_file() if choice.model in SHIPPED and plan_file().exists() else None
    chosen = path or shipped
    if chosen:
        plan = PrecisionPlan.load(chosen)
        plan.check_fingerprint(parts.fingerprint, str(chosen.name))
        report.add(Level.NOTE, "PLAN-LOADED", chosen.name, f"plan of {_lines(plan)} lines: {plan.calibration}")
        return plan
    calls, _ = calibrate(parts, [settings], progress)
    plan = plan_model(parts, display_name(choice), calls, progress=progress)
    report.add(
        Level.NOTE,
        "PLAN-MADE",
        display_name(choice),
        f"no plan was given: one of {_lines(plan)} lines was made on this prompt",
        remedy=f"Keep one that is proved on more prompts: finitune plan {choice.model} --out plan.toml",
    )
    return plan


def _lines(plan: PrecisionPlan) -> int:
    return sum(len(component.lines) for component in plan.components.values())
