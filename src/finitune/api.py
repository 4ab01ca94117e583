"""Plans, adapters and trainings in a script; the command line goes the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.adapters.layer import attach_adapters as adapters_on
from finitune.errors import UsageError
from finitune.generation.planning import calibrate_model, make_model_plan
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.merging.adapterfile import open_adapter
from finitune.merging.pairing import TargetModel
from finitune.models.loaded import find_pipeline_class
from finitune.precision.plan import PrecisionPlan
from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.config.schema import TrainConfig
    from finitune.training.events import TrainingEvent


def plan(
    pipe: Any,
    prompts: Sequence[str],
    *,
    headroom_bits: float = 2,
    steps: int = 28,
    size: tuple[int, int] | None = None,
) -> PrecisionPlan:
    """The smallest fp16 plan of a diffusers AnimaModularPipeline, measured on an fp32 run of `prompts`.

    `size` is (width, height) in pixels. Raises UsageError for a prompt or size that cannot be drawn, NumericsError
    where the model is not finite in fp32 either.

    >>> import finitune as ft
    >>> from finitune.models.anima.load import load_folder, build_anima_pipeline
    >>> from finitune.models.pico import get_pico_folder
    >>> pipe = build_anima_pipeline(load_folder(get_pico_folder()))
    >>> plan = ft.plan(pipe, ["red apple"], steps=2, size=(64, 64))
    >>> plan.components["transformer"].lines[0].out
    'fp32'
    """
    width, height = size or (pipe.default_width, pipe.default_height)
    pictures = [
        PictureSettings(prompt=prompt, steps=steps, seed=i, width=width, height=height)
        for i, prompt in enumerate(prompts)
    ]
    parts = find_pipeline_class(pipe).of_pipeline(pipe)
    calls, _ = calibrate_model(parts, pictures)
    return make_model_plan(parts, type(pipe).__name__, calls, headroom_bits)


@dataclass
class PipelinePatch:
    """A pipeline with a plan or an adapter on; `undo`, or the end of a `with` block, restores its modules and bits."""

    pipe: Any
    _in_force: ExitStack

    def undo(self) -> None:
        """Take it off again."""
        self._in_force.close()

    def __enter__(self) -> Any:
        return self.pipe

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply(pipe: Any, plan: PrecisionPlan) -> PipelinePatch:
    """Put a plan in force on a diffusers AnimaModularPipeline; raises PlanError for a plan of another checkpoint.

    On a CPU the products have the tensor core's meaning while the plan is in force.

    >>> import finitune as ft
    >>> from finitune.models.anima.load import load_folder, build_anima_pipeline
    >>> from finitune.models.pico import get_pico_folder, get_pico_plan_path
    >>> pipe = build_anima_pipeline(load_folder(get_pico_folder()))
    >>> with ft.apply(pipe, ft.PrecisionPlan.load(get_pico_plan_path())) as pipe:
    ...     image = pipe(prompt="red apple", num_inference_steps=2, width=64, height=64).get("images")[0]
    >>> image.size
    (64, 64)
    """
    parts = find_pipeline_class(pipe).of_pipeline(pipe)
    plan.check_fingerprint(parts.fingerprint, type(pipe).__name__)
    with ExitStack() as stack:
        running = stack.enter_context(open_in_precision(parts, "planned-half", plan))
        stack.callback(parts.put_into_pipeline, pipe)
        running.model.put_into_pipeline(pipe)
        return PipelinePatch(pipe, stack.pop_all())


def attach(pipe: Any, file: str | Path, strength: float = 1.0) -> PipelinePatch:
    """Put an adapter file, of any spelling, on the layers of a diffusers AnimaModularPipeline.

    Raises FileError or AdapterError for a file that cannot be used, or does not fit; nothing is changed then. With a
    plan, apply the plan first: `ft.apply(pipe, plan)`, then `ft.attach(pipe, "style.safetensors", 0.8)`.
    """
    with ExitStack() as stack:
        family = find_pipeline_class(pipe).family
        source = open_adapter(Path(file), Report("attach"), TargetModel.loaded(family, pipe))
        for component in family.adapters.components:
            sites = source.reading.adapter.component(component.name)
            stack.enter_context(adapters_on(getattr(pipe, component.name), sites, strength))
        return PipelinePatch(pipe, stack.pop_all())


class Training:
    """A training: iterate over its events. At the end `report` has its findings, figures and files, as --json shows."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.report = Report("train")

    def __iter__(self) -> Iterator[TrainingEvent]:
        from finitune.verbs.train import iter_train_events
        from finitune.verbs.train.prepare import TrainingStopped

        try:
            yield from iter_train_events(self.config, self.report)
        except TrainingStopped as stopped:
            errors = [finding for finding in self.report.findings if finding.level is Level.ERROR]
            raise UsageError(
                f"the training was refused before its first step: {errors[0].message}",
                code="TRAIN-REFUSED",
                subject=errors[0].subject,
                evidence={"errors": [f"{one.code}: {one.message}" for one in errors]},
                remedy=errors[0].remedy,
            ) from stopped


def train(config: str | Path | Mapping[str, Any]) -> Training:
    """A training by our own TOML, a path or {section: {option: value}}; nothing runs before the first event is taken.

    Raises UsageError for a configuration that is not one.

    >>> import finitune as ft
    >>> training = ft.train({
    ...     "model": {"pretrained_model_name_or_path": "pico-anima"},
    ...     "saving": {"output_dir": "finitune-out/example"},
    ...     "general": {"resolution": 64},
    ...     "datasets": [{"subsets": [{"image_dir": "examples/emoji_style/pictures"}]}],
    ... })
    >>> training.config.network.network_dim
    16
    """
    from finitune.config.read import read_train_config, validate_config

    if isinstance(config, (str, Path)):
        return Training(read_train_config(Path(config)).config)
    return Training(validate_config(config, "the configuration")[0])
