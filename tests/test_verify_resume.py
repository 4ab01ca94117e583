"""verify-resume: every kind of run resumes to the same bits, and a run that does not is found out."""

from __future__ import annotations

from typing import Any

import pytest

from finitune.cli import main
from finitune.config.read import dump_config
from finitune.report import Report
from finitune.training.measurements import HeldOutValidation
from finitune.training.optimizers import Ema, OptimizerHandle
from finitune.training.train_state import TrainState
from finitune.verbs.verify_resume import Request, run
from tests.training_made import Playground, a_model_that_is_read_once, a_playground, one_cache

__all__ = ["a_model_that_is_read_once", "a_playground", "one_cache"]

HALF = {"device": "cpu", "precision": "current-half"}
PLANNED = {"device": "cpu", "precision": "planned-half"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "LoRA, AdamW, fp32": {},
    "LoRA, AdamW, current-half, average, accumulated with a tail": {
        "model": HALF,
        "optimizer": {"ema_decay": 0.9, "lr_scheduler": "cosine", "lr_warmup_steps": 1},
        "training": {"gradient_accumulation_steps": 3},
    },
    "LoKr, planned-half, dropout of all kinds, captions varied": {
        "model": PLANNED,
        "network": {"algorithm": "lokr", "factor": 4, "network_dropout": 0.2, "rank_dropout": 0.2}
        | {"module_dropout": 0.2},
        "general": {"shuffle_caption": True, "caption_dropout_rate": 0.3, "flip_aug": True},
    },
    "DoRA, Prodigy, planned-half": {
        "model": PLANNED,
        "network": {"dora": True},
        "optimizer": {"optimizer_type": "Prodigy", "learning_rate": 1.0},
    },
    "LoRA, schedule-free, fp32, average": {
        "optimizer": {"optimizer_type": "ScheduleFreeAdamW", "ema_decay": 0.9},
    },
}


def verified(playground: Playground, sections: dict[str, dict[str, Any]], steps: int = 4) -> Report:
    """The report on a small training with these sections."""
    path = playground.folder / "train.toml"
    base = playground.document()
    together = {name: {**base.get(name, {}), **options} for name, options in sections.items()}
    path.write_text(dump_config(playground.config(**together)))
    return run(Request(config=path, steps=steps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_bits(kind: str, playground: Playground) -> None:
    report = verified(playground, KINDS[kind])
    assert report.findings == []
    figures = report.figures
    assert (figures["max_difference"], figures["resumed_at"], figures["steps"]) == (0, 2, 4)
    parameters = 120 if "LoRA" in kind else 1  # two factors in each of 60 modules
    assert int(str(figures["compared_tensors"])) > 2 * parameters  # and the optimiser's


def forget(*_: object) -> None:
    """Load nothing."""


@pytest.mark.parametrize(
    ("place", "name", "first"),
    [(Ema, "load_state_dict", "average/sums/"), (OptimizerHandle, "load_state_dict", "adapter/")],
)
def test_what_is_not_taken_up_again_is_named(
    place: type, name: str, first: str, playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, forget)
    report = verified(playground, {"optimizer": {"learning_rate": 5e-3, "ema_decay": 0.9}})
    (finding,) = report.findings
    assert finding.code == "RESUME-DIFFERS" and report.exit_code == 1
    assert finding.subject.startswith(first) and finding.subject in finding.message
    assert float(str(report.figures["max_difference"])) > 0


def test_a_run_that_begins_anew_proves_nothing(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainState, "load", forget)
    report = verified(playground, {}, steps=2)
    assert [finding.subject for finding in report.findings] == ["first step"]
    assert report.figures["resumed_at"] == 0 and report.figures["max_difference"] == 0


def test_only_the_proof_is_left_behind(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, previews and boards are off, the runs lie where they were asked for, and share one cache."""
    path, out = playground.folder / "train.toml", playground.folder / "proof"
    sections: dict[str, dict[str, Any]] = {
        "preview": {"sample_prompts": ["a bird"], "sample_at_first": True},
        "saving": {"output_dir": str(playground.folder / "run"), "save_every_n_steps": 1, "output_name": "made"},
        "logging": {"log_with": "tensorboard"},
        "training": {"train_batch_size": 2, "max_train_epochs": 50, "cache_dir": None},
    }
    path.write_text(dump_config(playground.config(**sections)))
    monkeypatch.delattr(HeldOutValidation, "measure")
    assert run(Request(config=path, steps=2, out=out)).ok
    assert sorted(place.name for place in (playground.folder / "run").iterdir()) == ["cache"]
    left = {place.relative_to(out).parts for place in out.rglob("*") if place.is_dir()}
    assert {parts[0] for parts in left} == {"whole", "resumed"}
    assert {parts[1] for parts in left if len(parts) > 1} == {"made-state", "made-step00000001-state"}


def test_errors_are_told(playground: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    path = playground.folder / "train.toml"
    path.write_text(dump_config(playground.config()))
    assert main(["verify-resume", str(path), "--steps", "1", "--json"]) == 2
    assert '"RESUME-STEPS-TOO-FEW"' in capsys.readouterr().out
    for picture in playground.pictures.iterdir():
        picture.unlink()
    assert main(["verify-resume", str(path), "--json"]) == 1
    assert '"verb": "verify-resume"' in capsys.readouterr().out
