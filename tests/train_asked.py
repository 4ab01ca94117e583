"""`finitune train` as a user meets it: a small training in a folder, the command on it, and what it said.

Every answer keeps to one law, whatever was asked: it is JSON, it is no bug, and each error has a place and a way out.
"""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from finitune.cli import main
from finitune.models.anima.load import AnimaParts
from finitune.verbs.shared.options import ModelChoice
from finitune.verbs.train import prepare
from tests.training_made import pico, put_pictures

REAL_LOAD = prepare.load_model
TWO_MODULES = [r"blocks\.0\.mlp\..*"]
READ: list[ModelChoice] = []
"""The models that were asked for since the last command began."""


@dataclass(frozen=True)
class Told:
    """What the command said."""

    exit_code: int
    report: dict[str, Any]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.report["findings"]

    @property
    def figures(self) -> dict[str, Any]:
        return self.report["figures"]

    @property
    def errors(self) -> list[str]:
        """The codes of the errors."""
        return [finding["code"] for finding in self.findings if finding["level"] == "error"]

    def of(self, code: str) -> dict[str, Any]:
        """The first finding of a code."""
        codes = [finding["code"] for finding in self.findings]
        assert code in codes, (code, self.findings)
        return self.findings[codes.index(code)]

    def steps(self) -> list[float]:
        """The loss of each step of the run."""
        lines = Path(self.report["artifacts"]["steps"]).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]


def ask(*words: object) -> Told:
    """`finitune train WORDS --json`, within this process."""
    READ.clear()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = main(["train", *map(str, words), "--json"])
    told = Told(exit_code, json.loads(out.getvalue()))
    assert "Traceback" not in err.getvalue()
    assert told.report["ok"] == (exit_code == 0) == (not told.errors)
    for finding in told.findings:
        assert finding["code"] != "UNEXPECTED", finding
        assert finding["level"] != "error" or (finding["subject"] and finding["remedy"]), finding
    return told


def header_only(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A safetensors file of fp16 zeros that takes no room: a header, and a hole behind it."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    return path


@dataclass(frozen=True)
class Scene:
    """A folder with some pictures and a training on them; `cache` is shared, since it tells contents apart."""

    folder: Path
    cache: Path

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def document(self, **sections: Any) -> dict[str, Any]:
        """A training of two modules in two steps, with the options of `sections` over it."""
        document: dict[str, Any] = {
            "model": {"pretrained_model_name_or_path": "pico-anima", "device": "cpu", "precision": "fp32"},
            "network": {"network_dim": 2, "network_alpha": 2, "only_patterns": TWO_MODULES},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"max_train_steps": 2, "seed": 1, "cache_dir": str(self.cache)},
            "saving": {"output_dir": str(self.run), "output_name": "made"},
            "logging": {"report": False},
            "general": {"resolution": 64, "min_bucket_reso": 64},
            "datasets": [{"subsets": [{"image_dir": str(self.pictures)}]}],
        }
        for name, options in sections.items():
            document[name] = options if name == "datasets" else {**document.get(name, {}), **options}
        return document

    def subset(self, **options: Any) -> dict[str, Any]:
        """The section of datasets with one subset of these options."""
        return {"datasets": [{"subsets": [{"image_dir": str(self.pictures), **options}]}]}

    def write(self, **sections: Any) -> Path:
        """The training as a file of ours."""
        return self.put("train.toml", tomlkit.dumps(self.document(**sections)))

    def put(self, name: str, content: str | bytes) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def train(self, *words: object, **sections: Any) -> Told:
        """Ask for the training with these sections."""
        return ask(self.write(**sections), *words)

    def files(self) -> dict[str, bytes]:
        """What lies in the run's folder, beside the lock."""
        found = (path for path in self.run.rglob("*") if path.is_file() and path.name != ".finitune-run")
        return {str(path.relative_to(self.run)): path.read_bytes() for path in found}


@pytest.fixture(name="read_once")
def pico_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """pico-anima is copied from memory; other models are read as they always are."""

    def load(choice: ModelChoice) -> AnimaParts:
        READ.append(choice)
        return copy.deepcopy(pico()) if choice.model == "pico-anima" else REAL_LOAD(choice)

    monkeypatch.setattr(prepare, "load_model", load)


@pytest.fixture(name="entries", scope="session")
def one_cache_for_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(name="scene")
def a_scene(tmp_path: Path, entries: Path, read_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Three pictures; the command is given in their parent folder."""
    put_pictures(tmp_path / "pictures", 3)
    monkeypatch.chdir(tmp_path)
    yield Scene(tmp_path, entries)
