"""finitune doctor: will it work here, in which dtype, and what should be changed first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FinituneError, UsageError
from finitune.machine.environment import Environment, to_gib
from finitune.machine.hardware import ComputeDtype, DeviceFacts, advise, has_kernels
from finitune.machine.reading import read_environment
from finitune.machine.rules import examine_machine, examine_processes
from finitune.machine.rules.software import find_no_gpu_reason
from finitune.machine.rules.variables import find_broken_allocator
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Level, Report, Table
from finitune.verbs.doctor.bundle import require_run_files, write_bundle

if TYPE_CHECKING:
    from finitune.machine.measuring.measurements import Measurements

_MEASURED_DTYPE_BY_COMPUTE: dict[ComputeDtype, str] = {"planned-half": "fp16", "bf16": "bf16", "fp32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to look at, and what to write for a bug report."""

    quick: bool = False
    """Read the facts, and measure nothing."""
    distributed: int | None = None
    """Let so many processes meet and add up, as training on several GPUs does."""
    bundle: Path | None = None
    """A ZIP file to write for a bug report: without tokens, names of people, and paths outside the project."""
    run: Path | None = None
    """The folder of a run, whose configuration, report and steps go into the bundle."""


def run(request: Request, progress: Progress | None = None) -> Report:
    """Read the facts, measure the device, and say what follows, the verdict first."""
    watch = progress or SilentProgress()
    with Report("doctor") as report:
        require_valid_doctor_request(request)
        environment = read_environment()
        loads = bool(environment.torch.version) and not environment.torch.error
        measurements = measure_main_device(environment, watch) if loads and not request.quick else None
        report.findings.append(judge_machine(environment, measurements))
        report.findings += examine_machine(environment)
        for one in environment.unread:
            told = f"{one.fact}: {one.reason}"
            report.add(Level.NOTE, "FACT-UNREAD", one.fact, told, remedy="Judge the rest without it.")
        report.figures["compute"] = report.findings[0].evidence["compute"]
        report.figures["facts"] = environment.as_json()
        report.tables += build_facts_tables(environment)
        if measurements:
            report.findings += measurements.findings()
            report.figures |= measurements.figures()
            report.tables.append(measurements.table())
        if request.distributed is not None:
            probe_processes(request.distributed, environment, report, watch)
        if request.bundle:
            write_doctor_bundle(request.bundle, environment, report, request.run)
    return report


def require_valid_doctor_request(request: Request) -> None:
    """Raise UsageError for a request that cannot be meant, before anything takes time."""
    if broken := find_broken_allocator(os.environ):
        name, part = broken
        raise FinituneError(
            f"{name} has the part {part!r}, which is no KEY:VALUE: torch ends the whole program at it, on its import",
            code="ALLOCATOR-SETTING-BROKEN",
            subject=name,
            evidence={"value": os.environ[name]},
            remedy=f"Write it as in {name}=max_split_size_mb:128, or unset it.",
        )
    if request.distributed is not None:
        from finitune.verbs.doctor.distributed import require_process_count  # torch, which may not load

        require_process_count(request.distributed)
    if request.run and not request.bundle:
        raise UsageError(
            "--run names a run for the bundle, and no bundle is asked for",
            code="RUN-WITHOUT-BUNDLE",
            subject="--run",
            remedy="Add --bundle FILE.zip, or leave --run out.",
        )
    if request.run:
        require_run_files(request.run)


def measure_main_device(environment: Environment, progress: Progress) -> Measurements:
    import torch  # which doctor has found to load

    from finitune.machine.measuring.measurements import measure_device

    kind = environment.main.kind
    return measure_device(torch.device("cuda" if kind == "rocm" else kind), progress)


def judge_machine(environment: Environment, measurements: Measurements | None) -> Finding:
    """The dtype that finitune computes in here, and why; an error where nothing computes rightly."""
    facts = environment.main
    advice = advise(facts)
    ranked = (advice.compute, *advice.alternatives)
    blind = not has_kernels(facts)
    wrong = [d for d in ranked if blind or (measurements and not measurements.right(_MEASURED_DTYPE_BY_COMPUTE[d]))]
    chosen = next((dtype for dtype in ranked if dtype not in wrong), None)
    others = [dtype for dtype in advice.alternatives if dtype not in wrong]
    numbers: dict[str, object] = {
        "device": facts.name,
        "compute": chosen or "nothing",
        "alternatives": others,
        "native_bf16": advice.native_bf16,
        "tensor_cores": advice.tensor_cores,
        "measured": measurements is not None,
    }
    if environment.torch.error or not environment.torch.version:
        text = "finitune computes nothing here: torch is not there, or does not load"
        return Finding(Level.ERROR, "VERDICT", facts.name, text, {**numbers, "compute": "nothing"}, "See TORCH-*.")
    if chosen is None:
        text = f"finitune cannot compute on {facts.name}: it has no kernels, or {', '.join(ranked)} are each wrong"
        return Finding(Level.ERROR, "VERDICT", facts.name, text, numbers, "See the errors below; or use --device cpu.")
    if chosen != advice.compute:
        text = f"{advice.compute} would be the dtype for {facts.name}, and gives wrong results here; {chosen} is right"
        return Finding(Level.WARNING, "VERDICT", facts.name, text, numbers, f"Pass --precision {chosen}.")
    text = f"finitune computes in {chosen} on {facts.name}. {'. '.join(advice.reasons)}"
    remedy = f"Nothing to do. --precision {' or '.join(others)} works, too." if others else "Nothing to do."
    return Finding(Level.NOTE, "VERDICT", facts.name, text, numbers, remedy)


def build_facts_tables(environment: Environment) -> list[Table]:
    tables = [Table("facts", ("fact", "value", "what it means"), tuple(list_fact_rows(environment)))]
    if environment.packages:
        rows = tuple((package.name, package.version or "damaged") for package in environment.packages)
        tables.append(Table("packages", ("package", "version"), rows))
    if environment.variables:
        tables.append(Table("variables", ("variable", "value"), tuple(environment.variables.items())))
    return tables


def list_fact_rows(environment: Environment) -> list[tuple[str, str, str]]:
    python, machine, torch, memory = environment.python, environment.machine, environment.torch, environment.memory
    where = " ".join(filter(None, (machine.container, machine.hosted, "WSL" if machine.wsl else "")))
    built = (
        f"built for CUDA {torch.cuda}" if torch.cuda else f"built for ROCm {torch.hip}" if torch.hip else "CPU build"
    )
    why = find_no_gpu_reason(environment)
    limit = "" if memory.limit_bytes is None else f"; {to_gib(memory.limit_bytes)} GiB allowed"
    rows = [
        ("Python", f"{python.version}, {python.bits} bits", python.environment or "the system's own"),
        ("system", f"{machine.system} {machine.release}, {machine.architecture}", where),
        ("torch", torch.version or "none", torch.error or built),
        ("kernels", ", ".join(torch.arch_list) or "none", "the cards that torch holds code for"),
        ("cuDNN", str(torch.cudnn or "none"), "comes with torch"),
        ("driver", environment.driver.version or "none", f"no GPU ({why})" if why else "NVIDIA's"),
        *(format_device_row(device.facts, to_gib(device.free_bytes or 0)) for device in environment.devices),
        ("processor", machine.cpu, f"{machine.cores} cores; {', '.join(machine.cpu_features)}"),
        ("memory", f"{to_gib(memory.total_bytes)} GiB", f"{to_gib(memory.available_bytes)} GiB free{limit}"),
        ("swap", f"{to_gib(memory.swap_total_bytes)} GiB", "memory on the disk"),
        *((disk.place, f"{to_gib(disk.free_bytes)} GiB free", "") for disk in environment.disks),
        *((toolkit.program, toolkit.version, "does not matter for wheels") for toolkit in environment.toolkits),
    ]
    if memory.shm_bytes is not None:
        rows.append(("/dev/shm", f"{to_gib(memory.shm_bytes)} GiB", "between processes"))
    return rows


def format_device_row(facts: DeviceFacts, free_gib: float) -> tuple[str, str, str]:
    """A device, and what it can do."""
    advice = advise(facts)
    identity = ".".join(map(str, facts.capability)) if facts.capability else facts.gcn_arch.partition(":")[0]
    size = f"{free_gib} of {facts.total_memory_bytes / 2**30:.1f} GiB free"
    bf16 = "native bf16" if advice.native_bf16 else "bf16 emulated or unknown"
    cores = "tensor cores" if advice.tensor_cores else "no tensor cores"
    return f"{facts.kind} device", f"{facts.name} {identity}".strip(), f"{bf16}, {cores}; {size}"


def probe_processes(count: int, environment: Environment, report: Report, progress: Progress) -> None:
    """Test several processes, unless there are more of them than GPUs."""
    from finitune.verbs.doctor import distributed  # torch, which may not load

    found = examine_processes(environment, count) if count > 1 else []
    report.findings += found
    if not any(finding.level is Level.ERROR for finding in found):
        distributed.run(count, report, progress)


def write_doctor_bundle(path: Path, environment: Environment, report: Report, run: Path | None) -> None:
    """Write the bundle, and say what is in it."""
    inside = write_bundle(path, environment, report, run)
    report.artifacts["bundle"] = str(path)
    report.add(
        Level.NOTE,
        "BUNDLE-WRITTEN",
        str(path),
        f"{len(inside)} files for a bug report: {', '.join(inside)}; tokens, names and private paths were taken out",
        remedy="Look into it before you send it: prompts and file names of a run are yours.",
        files=len(inside),
        bytes=path.stat().st_size,
    )
