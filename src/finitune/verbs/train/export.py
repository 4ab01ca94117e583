"""What a training leaves behind: adapter files that were read back, and pictures drawn on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finitune.adapters import AdapterSet
from finitune.config.schema import PreviewSection, TrainConfig
from finitune.errors import NumericsError, UsageError
from finitune.files.sniff import read_utf8_text
from finitune.generation.draw import draw_picture_batch
from finitune.generation.picture import save_picture
from finitune.generation.picture_quality import judge_picture
from finitune.generation.precisions import RunningModel
from finitune.generation.settings import PictureSettings, parse_picture_size
from finitune.merging.adapterfile import OutputFormat, put_adapter
from finitune.models.loaded import LoadedModel
from finitune.models.spec import ModelSpec
from finitune.namings.metadata import Receipt
from finitune.precision.guard import PrecisionGuard
from finitune.report import Report, Table
from finitune.training.adapted_model import AdaptedModel
from finitune.training.events import PreviewsDrawn
from finitune.training.guard import find_first_nonfinite
from finitune.training.history import TrainingHistory
from finitune.verbs.shared.adapters import collect_loader_verdicts, resolve_dtype_option

PREVIEW_FOLDER_NAME = "previews"
"""The folder of the pictures that are drawn on the way, within the run's."""


@dataclass
class AdapterExporter:
    """Writes adapter files in every spelling that is asked for, reads each back, compares, and keeps the verdict."""

    config: TrainConfig
    fingerprint: str
    model: str
    family: ModelSpec
    last: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, adapter: AdapterSet, path: Path, facts: Mapping[str, object]) -> dict[str, Path]:
        """The files by spelling; raises where one is not finite, or does not read back."""
        require_finite_adapter(adapter, path)
        saving, paths = self.config.saving, {}
        for spelling in saving.save_as:
            target = path if spelling == saving.save_as[0] else path.with_stem(f"{path.stem}-{spelling}")
            target = target.with_suffix("") if spelling == "peft" else target
            report = Report("train")
            form = OutputFormat(spelling, resolve_dtype_option(saving.save_precision), self.texts(facts))
            receipt = Receipt("train", ((self.model, self.fingerprint),))
            reading = put_adapter(target, adapter, self.family, form, receipt, report)
            paths[spelling] = target
            verdicts = collect_loader_verdicts(replace(reading, family=self.family))
            keys = ("bytes", "tensors", "max_delta_error", "narrowing_error", "flushed_share")
            self.last[spelling] = {
                "file": str(target),
                "sites": len(reading.adapter),
                "loads": verdicts,
                **{key: report.figures.get(key) for key in keys},
            }
        return paths

    def table(self) -> Table:
        """The verdict on the files written last, for a person."""
        rows = [
            (spelling, str(facts["file"]), str(facts["sites"]), program, verdict)
            for spelling, facts in self.last.items()
            for program, verdict in facts["loads"].items()
        ]
        return Table("verified", ("spelling", "file", "sites", "program", "loads"), tuple(rows))

    def texts(self, facts: Mapping[str, object]) -> dict[str, str]:
        """What the file says of its training, under kohya's names."""
        c, s = self.config, self.config.saving
        texts: dict[str, object] = {
            "ss_output_name": s.output_name,
            "ss_sd_model_name": self.model,
            "ss_learning_rate": c.optimizer.learning_rate,
            "ss_optimizer": c.optimizer.optimizer_type,
            "ss_lr_scheduler": c.optimizer.lr_scheduler,
            "ss_max_grad_norm": c.optimizer.max_grad_norm,
            "ss_gradient_accumulation_steps": c.training.gradient_accumulation_steps,
            "ss_batch_size_per_device": c.training.train_batch_size,
            "ss_seed": c.training.seed,
            "ss_network_dropout": c.network.network_dropout,
            "ss_timestep_sampling": c.objective.timestep_sampling,
            "ss_discrete_flow_shift": c.objective.discrete_flow_shift,
            "ss_sigmoid_scale": c.objective.sigmoid_scale,
            "ss_weighting_scheme": c.objective.weighting_scheme,
            "ss_loss_type": c.objective.loss_type,
            "ss_steps": facts["step"],
            "ss_epoch": facts["epoch"],
            "ss_training_comment": s.training_comment,
            "modelspec.title": s.output_name,
            "modelspec.trigger_phrase": s.trigger_phrase,
            "finitune_base_fingerprint": self.fingerprint,
            "finitune_applied_steps": facts["taken"],
        }
        return {key: str(value) for key, value in texts.items() if value not in ("", None)}


def require_finite_adapter(adapter: AdapterSet, path: Path) -> None:
    """Raise NumericsError (ADAPTER-NONFINITE) where a tensor holds a NaN or an infinity: such a file is not written."""
    tensors = ((f"{site}.{role}", t) for site, one in adapter.sites.items() for role, t in one.tensors.items())
    found = find_first_nonfinite(tensors)
    if found:
        raise NumericsError(
            f"{path.name} was not written: {found}",
            code="ADAPTER-NONFINITE",
            subject=found.name,
            evidence={"element": found.place},
            remedy="The last file that was written is good.",
        )


@dataclass(frozen=True)
class PreviewDrawer:
    """Draws fixed prompts with fixed seeds by the model as it is being trained."""

    parts: LoadedModel
    learner: AdaptedModel
    pictures: tuple[PictureSettings, ...]
    folder: Path

    def __call__(self, step: int) -> tuple[Path, ...]:
        """The pictures of a step, written to the folder; a bad one is named `.suspect.png`."""
        own = {name: one.module for name, one in self.learner.precisions.items()}
        running = RunningModel("training", self.parts.with_modules(own), PrecisionGuard())
        paths: list[Path] = []
        for number, picture in enumerate(self.pictures):
            drawing = draw_picture_batch(running, [picture])
            verdict = judge_picture(drawing.latents, drawing.pixels, remedy="")
            facts = {"prompt": picture.prompt, "seed": picture.seed, "step": step}
            path = self.folder / f"step{step:08d}-{number:02d}.png"
            paths.append(save_picture(path, drawing.pixels[0], facts, good=verdict.good))
        return tuple(paths)


_PREVIEW_NAME_PATTERN = re.compile(r"step(\d{8})-\d\d(\.suspect)?\.png")
"""The names of previews."""


def restore_run_history(history: TrainingHistory, folder: Path, step: int) -> None:
    """Take over what the lives of a run before this one have left in its folder up to step `step`: log and previews."""
    history.load_log(folder, step)
    drawn: dict[int, list[Path]] = {}
    for path in sorted((folder / PREVIEW_FOLDER_NAME).glob("*.png")):
        match = _PREVIEW_NAME_PATTERN.fullmatch(path.name)
        if match and int(match[1]) <= step:
            drawn.setdefault(int(match[1]), []).append(path)
    for at, paths in drawn.items():
        history.add(PreviewsDrawn(at, tuple(paths), 0.0))


_SETTING_BY_PROMPT_FLAG = {"n": "negative", "w": "width", "h": "height", "d": "seed", "s": "steps", "l": "cfg"}
"""kohya's flags behind a prompt, and what they set."""


def build_preview_settings(settings: PreviewSection, default_size: str) -> tuple[PictureSettings, ...]:
    """The pictures that previews draw, from the prompts of a configuration or of a file with kohya's flags.

    Raises UsageError: PROMPTS-MISSING for a file that is not there or has no prompt, PROMPT-FLAG, and what
    `PictureSettings` raises; FileError for a file that is no text.
    """
    prompts = settings.sample_prompts
    if isinstance(prompts, Path):
        prompts = read_preview_prompts(prompts)
    size = settings.sample_size or default_size
    return tuple(parse_preview_prompt(line, settings, place, size) for place, line in enumerate(prompts))


def read_preview_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a text file, one a line; lines that begin with # are none."""
    remedy = "Name a text file with one prompt a line, or list the prompts themselves."
    option = "preview.sample_prompts"
    if not path.exists():
        message = f"sample_prompts: there is no {path}"
        raise UsageError(message, code="PROMPTS-MISSING", subject=option, remedy=remedy)
    lines = [line.strip() for line in read_utf8_text(path).splitlines()]
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        message = f"sample_prompts: {path} holds no prompt"
        raise UsageError(message, code="PROMPTS-MISSING", subject=option, remedy=remedy)
    return prompts


def parse_preview_prompt(line: str, settings: PreviewSection, place: int, size: str) -> PictureSettings:
    """One prompt with kohya's flags behind it: --n negative --w --h --d seed --s steps --l guidance."""
    try:
        width, height = parse_picture_size(size)
    except UsageError as error:
        raise to_option_error(error, "preview.sample_size") from error
    values: dict[str, Any] = {
        "negative": "",
        "steps": settings.sample_steps,
        "cfg": settings.sample_cfg,
        "seed": settings.sample_seed + place,
        "width": width,
        "height": height,
    }
    prompt, *flags = f" {line}".split(" --")
    for flag in flags:
        values.update([parse_prompt_flag(line, flag, values)])
    try:
        return PictureSettings(prompt=prompt.strip(), **values)
    except UsageError as error:
        raise to_option_error(error, f"preview.sample_prompts: {line[:60]}") from error


def parse_prompt_flag(line: str, flag: str, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The setting that a flag behind a prompt stands for, with its value; raises UsageError (PROMPT-FLAG)."""
    name, _, text = flag.strip().partition(" ")
    setting = _SETTING_BY_PROMPT_FLAG.get(name)
    if setting is None:
        what, remedy = (
            "is no flag of a prompt",
            f"These are: {', '.join(f'--{flag}' for flag in _SETTING_BY_PROMPT_FLAG)}.",
        )
    else:
        kind = type(values[setting])
        try:
            return setting, kind(text.strip())
        except ValueError:
            what = f"wants a {'whole ' if kind is int else ''}number, and has {text.strip()!r}"
            remedy = f"Write --{name} {values[setting]}."
    where = f"preview.sample_prompts: {line[:60]}"
    raise UsageError(f"sample_prompts: --{name} {what}", code="PROMPT-FLAG", subject=where, remedy=remedy)


def to_option_error(error: UsageError, option: str) -> UsageError:
    """An error about a flag of the command line, of an option in a file."""
    message = f"{option}: {error.message.removeprefix(f'{error.subject}: ')}"
    remedy = error.remedy.replace("--size ", "").replace("--seed ", "--d ").replace("--prompt ", "")
    return UsageError(message, code=error.code, subject=option, evidence=error.evidence, remedy=remedy)
