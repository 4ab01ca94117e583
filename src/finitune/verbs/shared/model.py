"""Which model a command works on, and the plan that goes with it."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from finitune.errors import FileError, UsageError, suggest_nearest_name
from finitune.files.writer import make_read_back_error
from finitune.generation.planning import calibrate_model, make_model_plan
from finitune.generation.settings import PictureSettings
from finitune.models import SHIPPED_MODELS
from finitune.models.loaded import LoadedModel, find_loaded_class
from finitune.precision.plan import PrecisionPlan
from finitune.progress import Progress
from finitune.report import Level, Report
from finitune.verbs.shared.options import ModelChoice

DEFAULT_OUTPUT_FOLDER = Path("finitune-out")


def load_model(choice: ModelChoice) -> LoadedModel:
    """The chosen model, as stored, on the chosen device; raises where the choice names none."""
    device = choose_device(choice.device)
    parts = _load(choice)
    for module in parts.named_modules().values():
        module.to(device)
    return parts


def choose_device(name: str) -> str:
    """`auto` is the first GPU, or the CPU where there is none; raises UsageError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"--device {name}: {str(error).splitlines()[0]}",
            code="DEVICE-NOT-THERE",
            subject="--device",
            remedy="Use --device cpu, or auto.",
        ) from error
    return name


def resolve_model_path(name: str) -> Path:
    """Where the files of a shipped model lie, or the path that the name is."""
    return SHIPPED_MODELS[name].folder if name in SHIPPED_MODELS else Path(name)


def _load(choice: ModelChoice) -> LoadedModel:
    path = resolve_model_path(choice.model)
    if not path.exists():
        raise FileError(
            f"{choice.model}: no such model, folder or file.{suggest_nearest_name(choice.model, SHIPPED_MODELS)}",
            code="MODEL-NOT-FOUND",
            subject=choice.model,
            remedy="MODEL is pico-anima, a diffusers folder, or the DiT file with --qwen3 FILE and --vae FILE.",
        )
    return find_loaded_class(path).open(path, choice.files)


def format_model_name(choice: ModelChoice) -> str:
    """The model's name in reports and picture files: without the folders of this machine."""
    return choice.model if choice.model in SHIPPED_MODELS else Path(choice.model).name


def get_default_picture_size(choice: ModelChoice) -> str:
    if choice.model in SHIPPED_MODELS:
        side = SHIPPED_MODELS[choice.model].picture_side
    else:
        side = find_loaded_class(Path(choice.model)).family.picture_side
    return f"{side}x{side}"


def get_default_plan_path(choice: ModelChoice) -> Path:
    """Where the plan of a model is written, and looked for, when no other place is named."""
    return DEFAULT_OUTPUT_FOLDER / f"{format_model_name(choice)}.plan.toml"


def load_or_make_plan(
    choice: ModelChoice,
    parts: LoadedModel,
    settings: PictureSettings,
    path: Path | None,
    report: Report,
    progress: Progress | None,
) -> PrecisionPlan:
    """The plan to run with: the given file, the shipped one, the one made before, or one made now on this prompt."""
    own, shipped = get_default_plan_path(choice), SHIPPED_MODELS.get(choice.model)
    chosen = path or (shipped.plan if shipped else own if own.exists() else None)
    if chosen:
        plan = PrecisionPlan.load(chosen)
        if path is None and plan.fingerprint != parts.fingerprint:
            report.add(Level.WARNING, "PLAN-STALE", str(chosen), "it is of another checkpoint; a new one is made")
            return _make_plan(choice, parts, settings, report, progress)
        plan.check_fingerprint(parts.fingerprint, str(chosen))
        place = str(path or own) if not shipped or chosen != shipped.plan else f"shipped with {choice.model}"
        report.add(Level.NOTE, "PLAN-LOADED", place, f"a plan of {_lines(plan)} lines; {plan.calibration}")
        return plan
    return _make_plan(choice, parts, settings, report, progress)


def _make_plan(
    choice: ModelChoice, parts: LoadedModel, settings: PictureSettings, report: Report, progress: Progress | None
) -> PrecisionPlan:
    calls, _ = calibrate_model(parts, [settings], progress)
    plan = make_model_plan(parts, format_model_name(choice), calls, progress=progress)
    written = write_plan(get_default_plan_path(choice), plan)
    report.artifacts["plan"] = str(written)
    report.add(
        Level.NOTE,
        "PLAN-MADE",
        str(written),
        f"a plan of {_lines(plan)} lines was made on this prompt, and will be used again",
        remedy=f"Have one proved on more prompts: finitune plan {shlex.quote(choice.model)} --prompts FILE",
    )
    return plan


def write_plan(path: Path, plan: PrecisionPlan) -> Path:
    """Write the plan and read it back; raises FileError where it does not come back as it was."""
    plan.save(path)
    if PrecisionPlan.load(path) != plan:
        raise make_read_back_error(path, "Check the disk, and write the plan elsewhere: --out FILE")
    return path


def _lines(plan: PrecisionPlan) -> int:
    return sum(len(component.lines) for component in plan.components.values())
