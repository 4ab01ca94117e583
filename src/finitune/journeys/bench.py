"""finitune bench: measure the ways to compute one thing here, and say which to take.

`attention`: torch's back ends, those of other packages that are installed, and finitune's own, at the head counts and
token counts of a model. A pass is every attention of the model once: what a step of drawing spends on attention, or,
with the gradients, a step of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from finitune.device.hardware import DeviceFacts, read_facts
from finitune.device.measuring.attention import BY_ITSELF, Backend, half_backends, installed_backends, sdpa_backends
from finitune.device.measuring.attention_bench import Layer, Pass, measure
from finitune.errors import FinituneError, UsageError, did_you_mean
from finitune.files.writer import write_text
from finitune.generation.settings import parse_size
from finitune.journeys.model import choose_device
from finitune.progress import Progress, Silent
from finitune.report import Finding, Level, Report, Table

BAR = "attention"
CPU_WITHIN_S = 8.0
GPU_WITHIN_S = 120.0
OWN = "finitune"
WORTH = 0.8
"""Only what takes less than this share of the time of torch's own choice is worth choosing by hand."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure, at which model's sizes; `out` is the Markdown file to write."""

    what: Literal["attention"] = "attention"
    model: str = "anima"
    size: str = "1024x1024"
    device: str = "auto"
    out: Path = Path("finitune-out/bench-attention.md")


def anima(tokens: int) -> list[Layer]:
    """28 blocks of 16 heads of 128: self-attention, and 512 text tokens."""
    return [Layer("self", 28, 16, tokens, tokens, 128), Layer("cross", 28, 16, tokens, 512, 128)]


def sdxl(tokens: int) -> list[Layer]:
    """Heads of 64: 10 transformer layers of 10 heads at 1/16 of the picture's side, 60 of 20 heads at 1/32; 77 text
    tokens (diffusers' UNet2DConditionModel)."""
    return [
        Layer("self, 1/16", 10, 10, tokens, tokens, 64),
        Layer("self, 1/32", 60, 20, tokens // 4, tokens // 4, 64),
        Layer("cross, 1/16", 10, 10, tokens, 77, 64),
        Layer("cross, 1/32", 60, 20, tokens // 4, 77, 64),
    ]


def flux(tokens: int) -> list[Layer]:
    """19 double and 38 single blocks of 24 heads of 128, over picture and 512 text tokens together."""
    return [Layer("joint", 57, 24, tokens + 512, tokens + 512, 128)]


MODELS: dict[str, Callable[[int], list[Layer]]] = {"anima": anima, "sdxl": sdxl, "flux": flux}
"""Each model's attentions, by the number of tokens: one for 16 x 16 pixels."""


def run(request: Request, progress: Progress | None = None) -> Report:
    """Measure, report each back end and which to choose, and write the table as Markdown, to be pasted."""
    report = Report("bench")
    try:
        _bench(request, report, progress or Silent())
    except FinituneError as error:
        return report.fail(error)
    return report


def _bench(request: Request, report: Report, progress: Progress) -> None:
    layers = layers_of(request)
    device = torch.device(choose_device(request.device))
    backends = [*sdpa_backends(device), *installed_backends(), *half_backends()]

    def heard(one: Pass) -> None:
        progress.say(BAR, f"{one.backend}, {one.dtype}")
        progress.advance(BAR)

    progress.start(BAR, None)
    try:
        within_s = CPU_WITHIN_S if device.type == "cpu" else GPU_WITHIN_S
        divisor, measured = measure(backends, layers, device, within_s, heard)
    finally:
        progress.finish(BAR)
    tell(report, request, measured, backends, divisor)
    facts = read_facts(device.index or 0)
    write_text(request.out, markdown(report, f"{_machine(facts, device.type)}, {request.model} at {request.size}"))
    report.artifacts["markdown"] = str(request.out)


def layers_of(request: Request) -> list[Layer]:
    """The attentions of the asked model at the asked size; raises UsageError for a model or size that is none."""
    if request.model not in MODELS:
        raise UsageError(
            f"--model {request.model}: its attention is not known.{did_you_mean(request.model, MODELS)}",
            code="BENCH-MODEL",
            subject="--model",
            remedy=f"One of {', '.join(MODELS)}.",
        )
    width, height = parse_size(request.size)
    if width < 32 or height < 32:
        raise UsageError(
            f"--size {request.size}: too small for a pass to have tokens",
            code="BENCH-SIZE",
            subject="--size",
            remedy="Give a picture's size, such as 1024x1024.",
        )
    return MODELS[request.model]((width // 16) * (height // 16))


def tell(report: Report, request: Request, measured: Sequence[Pass], backends: Sequence[Backend], divisor: int) -> None:
    """Put the table, what is wrong, and which to choose, into the report."""
    table = table_of(measured)
    report.tables.append(table)
    report.figures |= {"model": request.model, "size": request.size, table.title: table.as_dicts()}
    if divisor > 1:
        report.figures["tokens_cut_by"] = divisor
        report.add(
            Level.NOTE,
            "BENCH-TOKENS-CUT",
            "tokens",
            f"a CPU would take minutes, so there are {divisor} times fewer tokens than at {request.size}: times are "
            "comparable with each other only",
            divisor=divisor,
        )
    report.findings += [_broken(backend) for backend in backends if backend.attend is None]
    report.findings += [_wrong(one) for one in measured if one.error is not None and not one.right]
    cautions = {backend.name: backend.caution for backend in backends}
    for purpose, gradients in (("generate", False), ("train", True)):
        if choices := chosen(measured, gradients=gradients):
            report.figures[f"choice_to_{purpose}"] = {dtype: choice.name for dtype, choice in choices.items()}
            report.findings.append(_advice(choices, purpose, cautions))


@dataclass(frozen=True)
class Choice:
    """A back end to choose in one dtype: its name, its milliseconds a pass, and torch's own choice's."""

    name: str
    pass_ms: float
    own_choice_ms: float | None

    @property
    def why(self) -> str:
        """In a few words."""
        if self.name == BY_ITSELF:
            return "nothing that is right is faster by a fifth"
        if self.own_choice_ms is None:
            return "torch's own choice is not right"
        return f"{self.own_choice_ms / self.pass_ms:.1f} times as fast as torch's own choice"


def chosen(measured: Sequence[Pass], *, gradients: bool) -> dict[str, Choice]:
    """By dtype, the fastest that is right, or torch's own choice where that is nearly as fast; no entry where nothing
    is right. finitune's own is left out: nobody has to choose it."""
    choices = {}
    for dtype in dict.fromkeys(one.dtype for one in measured):
        spent = {
            one.backend: one.both_s if gradients else one.forward_s
            for one in measured
            if one.dtype == dtype and (one.trains if gradients else one.right) and not one.backend.startswith(OWN)
        }
        timed = {name: _milli(seconds) for name, seconds in spent.items() if seconds is not None}
        if timed:
            fastest, own = min(timed, key=timed.__getitem__), timed.get(BY_ITSELF)
            name = fastest if own is None or timed[fastest] < WORTH * own else BY_ITSELF
            choices[dtype] = Choice(name, timed[name], own)
    return choices


def _advice(choices: dict[str, Choice], purpose: str, cautions: dict[str, str]) -> Finding:
    told = [f"{choice.name} in {dtype} ({choice.why})" for dtype, choice in choices.items()]
    doubts = {choice.name: doubt for choice in choices.values() if (doubt := cautions.get(choice.name))}
    return Finding(
        Level.NOTE,
        "ATTENTION-CHOICE",
        f"to {purpose}",
        f"to {purpose}, take {'; '.join(told)}",
        {"pass_ms": {dtype: choice.pass_ms for dtype, choice in choices.items()}},
        " ".join(
            [
                *(f"Look at the pictures that {name} gives: {doubt}." for name, doubt in doubts.items()),
                "Set it in the program that runs the model; finitune computes half attention by itself.",
            ]
        ),
    )


def _broken(backend: Backend) -> Finding:
    return Finding(
        Level.WARNING,
        "ATTENTION-PACKAGE-BROKEN",
        backend.name,
        f"{backend.name} is {backend.absent}",
        remedy="It was most likely built for another torch or CUDA: install the version made for this torch, or remove "
        "it. torch's own attention needs none of them.",
    )


def _wrong(one: Pass) -> Finding:
    far = "its results are not finite" if one.error != one.error else f"it is off by {one.error:.1e} from fp64"
    return Finding(
        Level.WARNING,
        "ATTENTION-INEXACT",
        f"{one.backend}, {one.dtype}",
        f"{one.backend} in {one.dtype}: {far}, more than {one.dtype} accounts for",
        {"error": one.error},
        "Do not train with it; for drawing, compare pictures with and without it.",
    )


def table_of(measured: Sequence[Pass]) -> Table:
    """A line for each back end and dtype that ran, or should have."""
    columns = ("back end", "dtype", "a pass", "with gradients", "peak memory", "error", "gradients' error", "result")
    return Table("attention", columns, tuple(_line(one) for one in measured if not _not_for_here(one)))


def _not_for_here(one: Pass) -> bool:
    return one.failure.startswith("not for this device")


def _line(one: Pass) -> tuple[str, ...]:
    result = one.failure or one.gradient_failure or ("right" if one.trains else "INEXACT")
    return (
        one.backend,
        one.dtype,
        "" if one.forward_s is None else f"{_milli(one.forward_s):g} ms",
        "" if one.both_s is None else f"{_milli(one.both_s):g} ms",
        "" if one.peak_bytes is None else f"{one.peak_bytes / 2**20:.0f} MiB",
        "" if one.error is None else f"{one.error:.1e}",
        "" if one.gradient_error is None else f"{one.gradient_error:.1e}",
        result,
    )


def _milli(seconds: float) -> float:
    return float(f"{seconds * 1e3:.3g}")


def _machine(facts: DeviceFacts, device_type: str) -> str:
    import platform

    name = facts.name if device_type == facts.kind or device_type == "cuda" else device_type.upper()
    return f"{name}, torch {facts.torch_version}, {platform.system()}, Python {platform.python_version()}"


def markdown(report: Report, heading: str) -> str:
    """The heading, the tables and the findings' sentences, for an issue or a forum."""
    lines = [f"**{heading}**", ""]
    for table in report.tables:
        lines += [_markdown_row(table.columns), _markdown_row(["---"] * len(table.columns))]
        lines += [*map(_markdown_row, table.rows), ""]
    lines += [f"- {finding.message}" for finding in report.findings]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
