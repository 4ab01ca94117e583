"""Small trainings of pico-anima on a few of the example's pictures: seconds each, by the journey that users take."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from finitune.config.read import validate_config
from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError
from finitune.models.anima.load import AnimaParts, load_folder
from finitune.models.pico import get_pico_folder
from finitune.report import Finding, Report
from finitune.training import events
from finitune.verbs import train
from finitune.verbs.train import Request, iter_train_events, prepare
from finitune.verbs.train.prepare import PreparedRun, TrainingStopped

PICTURES = Path(__file__).parents[1] / "examples" / "emoji_style" / "pictures"
COUNT = 8
FEW_BLOCKS = [r"blocks\.[04]\.(self_attn|mlp)\..*"]
"""Twelve modules of two blocks."""
FEW = {"only_patterns": FEW_BLOCKS}
Kind = TypeVar("Kind", bound=events.TrainingEvent)


@cache
def pico() -> AnimaParts:
    """pico-anima as it is stored, read once; only copies of it may be changed."""
    return load_folder(get_pico_folder())


@dataclass(frozen=True)
class Outcome:
    """A training that is over."""

    report: Report
    events: list[events.TrainingEvent]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def findings(self, code: str) -> list[Finding]:
        """The findings of one code."""
        return [finding for finding in self.report.findings if finding.code == code]

    @property
    def codes(self) -> list[str]:
        """The codes of all findings."""
        return [finding.code for finding in self.report.findings]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.of(events.StepTaken)]

    @property
    def validation(self) -> list[float]:
        """The validation losses: before the first step, ..., at the end."""
        return [measured.loss for measured in self.of(events.ValidationMeasured)]

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the end."""
        return dict(self.of(events.TrainingFinished)[-1].paths)

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self.of(events.TrainingFinished)[-1].reason


@dataclass(frozen=True)
class Playground:
    """A folder with pictures, and a cache that all trainings share: what it holds is told apart by content."""

    folder: Path
    cache: Path

    @property
    def pictures(self) -> Path:
        """The folder of the pictures."""
        return self.folder / "pictures"

    def document(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """A small training by sections, those of `sections` over the defaults here."""
        document: dict[str, Any] = {
            "model": {"pretrained_model_name_or_path": "pico-anima", "device": "cpu", "precision": "fp32"},
            "network": {"network_dim": 4, "network_alpha": 4},
            "optimizer": {"learning_rate": 5e-3},
            "training": {"max_train_steps": 6, "train_batch_size": 2, "seed": 1, "cache_dir": str(self.cache)},
            "saving": {"output_dir": str(self.folder / "run"), "output_name": "made"},
            "validation": {"validation_sigmas": [0.25, 0.7], "validate_every_n_steps": 1000},
            "general": {"resolution": 64, "min_bucket_reso": 64, "validation_split": 0.25},
            "datasets": [{"subsets": [{"image_dir": str(self.pictures)}]}],
        }
        for name, options in sections.items():
            document[name] = options if name == "datasets" else {**document.get(name, {}), **options}
        return document

    def config(self, **sections: Any) -> TrainConfig:
        """The configuration of `document`."""
        return validate_config(self.document(**sections))[0]

    def train(self, stop: Callable[[], bool] = bool, asked: Request | None = None, **sections: Any) -> Outcome:
        """Train by a configuration with these sections."""
        return trained(self.config(**sections), stop, asked)


def trained(config: TrainConfig, stop: Callable[[], bool] = bool, asked: Request | None = None) -> Outcome:
    """Train; an error ends in the report, as the journey's own `run` has it."""
    outcome = Outcome(Report("train"), [])
    try:
        outcome.events.extend(iter_train_events(config, outcome.report, request=asked, stop=stop))
    except TrainingStopped:
        pass
    except FinituneError as error:
        outcome.report.fail(error)
    return outcome


def put_pictures(place: Path, count: int = COUNT) -> Path:
    """Copy the first pictures of the example and their captions."""
    place.mkdir(parents=True, exist_ok=True)
    for picture in sorted(PICTURES.glob("*.png"))[:count]:
        for path in (picture, picture.with_suffix(".txt")):
            shutil.copy(path, place)
    return place


@pytest.fixture(name="quick_model")
def a_model_that_is_read_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AnimaParts]:
    """Each training gets a copy of the model that is in memory; the parts of the last one are what this returns."""
    given: list[AnimaParts] = []

    def load(_: object) -> AnimaParts:
        given.append(copy.deepcopy(pico()))
        return given[-1]

    monkeypatch.setattr(prepare, "load_model", load)
    return lambda: given[-1]


@pytest.fixture(name="meddle")
def meddling_with_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[PreparedRun], None]], None]:
    """`meddle(change)`: every training from now on is changed before it runs."""
    original = prepare.open_prepared_run

    def arrange(change: Callable[[PreparedRun], None]) -> None:
        @contextmanager
        def meddled(*args: Any, **options: Any) -> Iterator[PreparedRun]:
            with original(*args, **options) as ready:
                change(ready)
                yield ready

        monkeypatch.setattr(train, "open_prepared_run", meddled)

    return arrange


@pytest.fixture(name="shared_cache", scope="session")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(name="playground")
def a_playground(tmp_path: Path, shared_cache: Path, quick_model: object) -> Playground:
    put_pictures(tmp_path / "pictures")
    return Playground(tmp_path, shared_cache)
