"""finitune bench: measure the ways to compute one thing here, and say which to take.

`attention`: torch's back ends, those of other packages that are installed, and finitune's own, at the head counts and
token counts of a model. A pass is every attention of the model once: what a step of drawing spends on attention, or,
with the gradients, a step of training.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from finitune.errors import UsageError, suggest_nearest_name
from finitune.files.writer import write_text
from finitune.generation.settings import parse_picture_size
from finitune.machine.hardware import DeviceFacts, read_device_facts
from finitune.machine.measuring.attention_backends import (
    DEFAULT_SDPA_NAME,
    AttentionBackend,
    list_half_backends,
    list_sdpa_backends,
    load_installed_backends,
)
from finitune.machine.measuring.attention_bench import BackendResult, BenchLayer, measure_attention
from finitune.models import MODEL_FAMILIES
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Level, Report, Table
from finitune.verbs.shared.model import choose_device

_PROGRESS_BAR = "attention"
BENCH_CPU_TIME_LIMIT_S = 8.0
_GPU_TIME_LIMIT_S = 120.0
_OWN_BACKEND_PREFIX = "finitune"
BENCH_FAMILIES = tuple(family.name for family in MODEL_FAMILIES if family.attention)
"""The families whose attentions are known."""
_WORTHWHILE_TIME_SHARE = 0.8
"""Only what takes less than this share of the time of torch's own choice is worth choosing by hand."""


@dataclass(frozen=True)
class Request:
    """What to measure, and at which model's sizes."""

    what: Literal["attention"] = "attention"
    """What to measure."""
    _: KW_ONLY
    model: Literal[BENCH_FAMILIES] = BENCH_FAMILIES[0]  # pyright: ignore[reportInvalidTypeForm]
    """The model whose layers are measured."""
    size: str = "1024x1024"
    """WIDTHxHEIGHT in pixels."""
    device: str = "auto"
    """Where to compute: `auto` takes the first GPU if there is one, else the CPU."""
    out: Annotated[Path, Parameter(alias="-o")] = Path("finitune-out/bench-attention.md")
    """The Markdown file to write, a table that can be pasted into an issue."""


def run(request: Request, progress: Progress | None = None) -> Report:
    """Measure, report each back end and which to choose, and write the table as Markdown, to be pasted."""
    with Report("bench") as report:
        _bench(request, report, progress or SilentProgress())
    return report


def _bench(request: Request, report: Report, progress: Progress) -> None:
    layers = find_attention_layers(request)
    device = torch.device(choose_device(request.device))
    backends = [*list_sdpa_backends(device), *load_installed_backends(), *list_half_backends()]

    def heard(one: BackendResult) -> None:
        progress.say(_PROGRESS_BAR, f"{one.backend}, {one.dtype}")
        progress.advance(_PROGRESS_BAR)

    progress.start(_PROGRESS_BAR, None)
    try:
        within_s = BENCH_CPU_TIME_LIMIT_S if device.type == "cpu" else _GPU_TIME_LIMIT_S
        divisor, measured = measure_attention(backends, layers, device, within_s, heard)
    finally:
        progress.finish(_PROGRESS_BAR)
    report_bench_results(report, request, measured, backends, divisor)
    facts = read_device_facts(device.index or 0)
    write_text(
        request.out, format_bench_markdown(report, f"{_machine(facts, device.type)}, {request.model} at {request.size}")
    )
    report.artifacts["markdown"] = str(request.out)


def find_attention_layers(request: Request) -> list[BenchLayer]:
    """The attentions of the asked model at the asked size; raises UsageError for a model or size that is none."""
    families = {family.name: family.attention for family in MODEL_FAMILIES if family.attention}
    if request.model not in families:
        raise UsageError(
            f"--model {request.model}: its attention is not known.{suggest_nearest_name(request.model, families)}",
            code="BENCH-MODEL",
            subject="--model",
            remedy=f"One of {', '.join(families)}.",
        )
    width, height = parse_picture_size(request.size)
    if width < 32 or height < 32:
        raise UsageError(
            f"--size {request.size}: too small for a pass to have tokens",
            code="BENCH-SIZE",
            subject="--size",
            remedy="Give a picture's size, such as 1024x1024.",
        )
    return families[request.model]((width // 16) * (height // 16))


def report_bench_results(
    report: Report,
    request: Request,
    measured: Sequence[BackendResult],
    backends: Sequence[AttentionBackend],
    divisor: int,
) -> None:
    """Put the table, what is wrong, and which to choose, into the report."""
    table = build_bench_table(measured)
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
        if choices := choose_attention_backends(measured, gradients=gradients):
            report.figures[f"choice_to_{purpose}"] = {dtype: choice.name for dtype, choice in choices.items()}
            report.findings.append(_advice(choices, purpose, cautions))


@dataclass(frozen=True)
class BackendChoice:
    """A back end to choose in one dtype: its name, its milliseconds a pass, and torch's own choice's."""

    name: str
    pass_ms: float
    own_choice_ms: float | None

    @property
    def why(self) -> str:
        """In a few words."""
        if self.name == DEFAULT_SDPA_NAME:
            return "nothing that is right is faster by a fifth"
        if self.own_choice_ms is None:
            return "torch's own choice is not right"
        return f"{self.own_choice_ms / self.pass_ms:.1f} times as fast as torch's own choice"


def choose_attention_backends(measured: Sequence[BackendResult], *, gradients: bool) -> dict[str, BackendChoice]:
    """By dtype, the fastest that is right, or torch's own choice where that is nearly as fast; no entry where nothing
    is right. finitune's own is left out: nobody has to choose it."""
    choices = {}
    for dtype in dict.fromkeys(one.dtype for one in measured):
        spent = {
            one.backend: one.both_s if gradients else one.forward_s
            for one in measured
            if one.dtype == dtype
            and (one.trains if gradients else one.right)
            and not one.backend.startswith(_OWN_BACKEND_PREFIX)
        }
        timed = {name: _milli(seconds) for name, seconds in spent.items() if seconds is not None}
        if timed:
            fastest, own = min(timed, key=timed.__getitem__), timed.get(DEFAULT_SDPA_NAME)
            name = fastest if own is None or timed[fastest] < _WORTHWHILE_TIME_SHARE * own else DEFAULT_SDPA_NAME
            choices[dtype] = BackendChoice(name, timed[name], own)
    return choices


def _advice(choices: dict[str, BackendChoice], purpose: str, cautions: dict[str, str]) -> Finding:
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


def _broken(backend: AttentionBackend) -> Finding:
    return Finding(
        Level.WARNING,
        "ATTENTION-PACKAGE-BROKEN",
        backend.name,
        f"{backend.name} is {backend.absent}",
        remedy="It was most likely built for another torch or CUDA: install the version made for this torch, or remove "
        "it. torch's own attention needs none of them.",
    )


def _wrong(one: BackendResult) -> Finding:
    far = "its results are not finite" if one.error != one.error else f"it is off by {one.error:.1e} from fp64"
    return Finding(
        Level.WARNING,
        "ATTENTION-INEXACT",
        f"{one.backend}, {one.dtype}",
        f"{one.backend} in {one.dtype}: {far}, more than {one.dtype} accounts for",
        {"error": one.error},
        "Do not train with it; for drawing, compare pictures with and without it.",
    )


def build_bench_table(measured: Sequence[BackendResult]) -> Table:
    """A line for each back end and dtype that ran, or should have."""
    columns = ("back end", "dtype", "a pass", "with gradients", "peak memory", "error", "gradients' error", "result")
    return Table("attention", columns, tuple(_line(one) for one in measured if one.has_kernel))


def _line(one: BackendResult) -> tuple[str, ...]:
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
    name = facts.name if device_type == facts.kind or device_type == "cuda" else device_type.upper()
    return f"{name}, torch {facts.torch_version}, {platform.system()}, Python {platform.python_version()}"


def format_bench_markdown(report: Report, heading: str) -> str:
    """The heading, the tables and the findings' sentences, for an issue or a forum."""
    lines = [f"**{heading}**", ""]
    for table in report.tables:
        lines += [_markdown_row(table.columns), _markdown_row(["---"] * len(table.columns))]
        lines += [*map(_markdown_row, table.rows), ""]
    lines += [f"- {finding.message}" for finding in report.findings]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
