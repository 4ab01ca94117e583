"""What people do to a training, and what the command says: see `test_train_refusals`.

A row is how it comes about, the code, a part of the subject, and a part of the remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.picture_files import png
from tests.train_asked import Scene

Arrange = Callable[[Scene], dict[str, Any] | None]
PREVIEWS = {"sample_every_n_steps": 1, "sample_steps": 1}


def removed(scene: Scene, pattern: str) -> None:
    for path in scene.pictures.glob(pattern):
        path.unlink()


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def option(section: str, **values: Any) -> Arrange:
    """The change of some options of a section."""
    return lambda scene: {section: values}


def subset(**values: Any) -> Arrange:
    return lambda scene: scene.subset(**values)


def file(name: str, content: str | bytes, section: str, key: str, **more: Any) -> Arrange:
    """A file of some content, named by an option."""
    return lambda scene: {section: {key: str(scene.put(name, content)), **more}}


def in_pictures(name: str, content: bytes) -> Arrange:
    return lambda scene: scene.put(f"pictures/{name}", content) and None


def drawn(name: str, size: tuple[int, int]) -> Arrange:
    """One more picture, with a caption."""

    def arrange(scene: Scene) -> None:
        Image.new("RGB", size).save(scene.pictures / f"{name}.png")
        (scene.pictures / f"{name}.txt").write_text(name, encoding="utf-8")

    return arrange


def both(arrange: Arrange, **sections: dict[str, Any]) -> Arrange:
    return lambda scene: {**(arrange(scene) or {}), **sections}


PICTURES: dict[str, tuple[Arrange, str, str, str]] = {
    "an empty folder": (lambda s: removed(s, "*"), "DATASET-EMPTY", "pictures", "Put pictures into it"),
    "captions without pictures": (lambda s: removed(s, "*.png"), "DATASET-EMPTY", "pictures", ".txt"),
    "a folder that is not there": (
        lambda s: shutil.rmtree(s.pictures),
        "DATASET-FOLDER-MISSING",
        "pictures",
        "no 'pictures'",
    ),
    "a folder of folders": (subset(image_dir="."), "DATASET-EMPTY", ".", "image_dir = 'pictures'"),
    "a picture for a folder": (
        subset(image_dir="pictures/bear_face.png"),
        "DATASET-FOLDER-MISSING",
        "bear_face.png",
        "pictures",
    ),
    "a blank behind the name": (subset(image_dir="pictures "), "DATASET-FOLDER-MISSING", "pictures ", "'pictures'"),
    "a path of Windows": (
        subset(image_dir="C:\\Users\\me\\pics"),
        "DATASET-FOLDER-MISSING",
        "C:\\Users",
        "There is no",
    ),
    "the backslashes of Windows": (
        subset(image_dir=".\\pictures"),
        "DATASET-FOLDER-MISSING",
        ".\\pictures",
        "'pictures'",
    ),
    "a variable of a shell": (subset(image_dir="$HOME/pics"), "DATASET-FOLDER-MISSING", "$HOME/pics", "There is no"),
    "no subset at all": (lambda s: {"datasets": []}, "DATASET-NONE", "datasets", "[[datasets.subsets]]"),
    "a caption in Latin-1": (in_pictures("banana.txt", b"caf\xe9"), "CAPTION-ENCODING", "banana.txt", "UTF-8"),
    "half a picture": (
        lambda s: cut_in_half(s.pictures / "banana.png"),
        "PICTURE-TRUNCATED",
        "banana.png",
        "Download or export",
    ),
    "a web page": (in_pictures("banana.png", b"<html>404"), "PICTURE-NOT-A-PICTURE", "banana.png", "again"),
    "nothing in a picture": (in_pictures("banana.png", b""), "PICTURE-EMPTY", "banana.png", "again"),
    "a bomb": (in_pictures("bomb.png", png((60000, 60000), 8, 2, b"")), "PICTURE-BOMB", "bomb.png", "scale it down"),
    "masks that are not there": (
        lambda s: {**s.subset(conditioning_data_dir="masks"), "objective": {"masked_loss": True}},
        "DATASET-FOLDER-MISSING",
        "masks",
        "There is no",
    ),
    "captions in a JSON that is not there": (
        lambda s: {"datasets": [{"subsets": [{"metadata_file": "meta.json"}]}]},
        "FILE-MISSING",
        "meta.json",
        "Check the path",
    ),
}

OPTIONS: dict[str, tuple[Arrange, str, str, str]] = {
    "a side that is no multiple": (
        option("general", resolution=70, enable_bucket=False),
        "SIDE-NOT-MULTIPLE",
        "datasets.resolution",
        "Take 64",
    ),
    "a nought too many": (option("general", resolution=10240), "RESOLUTION-TOO-LARGE", "datasets.resolution", "1024"),
    "a side below a patch": (
        option("general", resolution=8, enable_bucket=False),
        "SIDE-NOT-MULTIPLE",
        "datasets.resolution",
        "Take 16",
    ),
    "a rate in words": (option("optimizer", learning_rate="one"), "CONFIG-INVALID", "train.toml", "learning_rate"),
    "an endless rate": (option("optimizer", learning_rate=float("inf")), "CONFIG-INVALID", "train.toml", "rate"),
    "a rate of zero": (option("optimizer", learning_rate=0), "RATE-ZERO", "optimizer.learning_rate", "1e-4"),
    "no steps": (option("training", max_train_steps=0), "CONFIG-INVALID", "train.toml", "max_train_steps"),
    "steps and epochs": (
        option("training", max_train_epochs=1),
        "LENGTH-TWICE",
        "training.max_train_epochs",
        "Leave one",
    ),
    "no repeats": (subset(num_repeats=0), "CONFIG-INVALID", "train.toml", "num_repeats"),
    "no batch": (option("training", train_batch_size=0), "CONFIG-INVALID", "train.toml", "train_batch_size"),
    "everything kept out": (
        option("general", validation_split=1.0),
        "CONFIG-INVALID",
        "train.toml",
        "validation_split",
    ),
    "a resolution as kohya's flags have it": (
        option("general", resolution="64,64"),
        "CONFIG-INVALID",
        "train.toml",
        "side",
    ),
    "an optimiser that there is not": (
        option("optimizer", optimizer_type="AdmaW"),
        "OPTIMIZER-UNKNOWN",
        "type",
        "Names",
    ),
    "an argument that there is not": (
        option("optimizer", optimizer_args=["weight_deacy=0.1"]),
        "OPTIMIZER-ARGUMENT",
        "weight_deacy",
        "weight_decay",
    ),
    "an argument of another kind": (
        option("optimizer", optimizer_args=["betas=0.9"]),
        "OPTIMIZER-ARGUMENT",
        "betas",
        "betas",
    ),
    "an argument out of range": (
        option("optimizer", optimizer_args=["betas=(1.5, 0.9)"]),
        "OPTIMIZER-ARGUMENT",
        "optimizer_args",
        "Correct",
    ),
    "an argument without value": (
        option("optimizer", optimizer_args=["T_max"]),
        "CONFIG-INVALID",
        "train.toml",
        "T_max=VALUE",
    ),
    "8 bits on a CPU": (
        option("optimizer", optimizer_type="AdamW8bit"),
        "OPTIMIZER-NEEDS-CUDA",
        "optimizer_type",
        "without 8bit",
    ),
    "8 bits where there is no CUDA": (
        lambda s: {"optimizer": {"optimizer_type": "AdamW8bit"}, "model": {"device": "auto"}},
        "OPTIMIZER-NEEDS-CUDA",
        "optimizer_type",
        "AdamW",
    ),
    "state in half precision": (
        option("optimizer", optimizer_type="Kron", optimizer_args={"mu_dtype": "bf16"}),
        "OPTIMIZER-HALF-STATE",
        "optimizer_args",
        "Leave it out",
    ),
    "a device that is none": (option("model", device="gpu"), "DEVICE-NOT-THERE", "model.device", "device = 'cpu'"),
    "a name with a folder": (
        option("saving", output_name="styles/blue"),
        "OUTPUT-NAME",
        "saving.output_name",
        "output_dir",
    ),
    "a name of dots": (option("saving", output_name=".."), "OUTPUT-NAME", "saving.output_name", "output_dir"),
    "a name with a blank behind": (
        option("saving", output_name="blue "),
        "OUTPUT-NAME",
        "saving.output_name",
        "output_dir",
    ),
    "a name without end": (option("saving", output_name="a" * 200), "OUTPUT-NAME", "saving.output_name", "output_dir"),
    "no folder to write to": (option("saving", output_dir=""), "CONFIG-INVALID", "train.toml", "output_dir"),
    "a file to write into": (
        file("out", "", "saving", "output_dir"),
        "FILE-NOT-WRITTEN",
        "saving.output_dir",
        "another folder",
    ),
    "a folder in a file": (
        lambda s: {"saving": {"output_dir": str(s.put("out", "") / "a" / "b")}},
        "FILE-NOT-WRITTEN",
        "saving.output_dir",
        "another folder",
    ),
    "a cache that is a file": (
        file("old", "", "training", "cache_dir"),
        "FILE-NOT-WRITTEN",
        "training.cache_dir",
        "another",
    ),
    "logs in a file": (
        file("logs", "", "logging", "logging_dir", log_with="tensorboard"),
        "FILE-NOT-WRITTEN",
        "logging.logging_dir",
        "another",
    ),
    "prompts that are not there": (
        option("preview", sample_prompts="p.txt", **PREVIEWS),
        "PROMPTS-MISSING",
        "sample_prompts",
        "one",
    ),
    "prompts of bytes": (
        file("p.txt", bytes(range(256)), "preview", "sample_prompts", **PREVIEWS),
        "FILE-NOT-TEXT",
        "p.txt",
        "UTF-8",
    ),
    "a folder of prompts": (
        option("preview", sample_prompts="pictures/", **PREVIEWS),
        "FILE-IS-FOLDER",
        "pictures",
        "file",
    ),
    "no prompt in the file": (
        file("p.txt", "# later\n", "preview", "sample_prompts", **PREVIEWS),
        "PROMPTS-MISSING",
        "sample_prompts",
        "one prompt a line",
    ),
    "a flag that is none": (option("preview", sample_prompts=["a --x 3"], **PREVIEWS), "PROMPT-FLAG", "a --x 3", "--w"),
    "a width in words": (
        option("preview", sample_prompts=["a --w wide"], **PREVIEWS),
        "PROMPT-FLAG",
        "a --w wide",
        "--w 64",
    ),
    "a width between": (
        option("preview", sample_prompts=["a --w 70"], **PREVIEWS),
        "SIDE-NOT-MULTIPLE",
        "sample_prompts",
        "64",
    ),
    "a size in words": (
        option("preview", sample_prompts=["a"], sample_size="big", **PREVIEWS),
        "SIZE-UNREADABLE",
        "preview.sample_size",
        "768x1152",
    ),
    "DoRA on a rotation": (option("network", dora=True, algorithm="oft"), "DORA-ALGORITHM", "network.dora", "lora"),
}


TOLD: dict[str, tuple[Arrange, str, str, str, str]] = {
    "pictures without captions": (lambda s: removed(s, "*.txt"), "warning", "CAPTION-MISSING", "pictures", ".txt"),
    "a caption without picture": (
        in_pictures("gone.txt", b"gone"),
        "warning",
        "CAPTION-WITHOUT-PICTURE",
        "pictures",
        "named as its picture",
    ),
    "another ending": (subset(caption_extension=".caption"), "warning", "CAPTION-MISSING", "pictures", ".txt"),
    "an empty caption": (in_pictures("banana.txt", b""), "warning", "CAPTION-EMPTY", "banana.txt", "Write what"),
    "a strip": (drawn("strip", (20000, 60)), "warning", "PICTURE-CUT", "strip.png", "Crop by hand"),
    "a pixel": (drawn("pixel", (1, 1)), "warning", "PICTURE-ENLARGED", "pixel.png", "larger pictures"),
    "a telephone's picture": (
        in_pictures("a.heic", b"\0\0\0\x18ftypheic"),
        "warning",
        "PICTURE-UNREAD",
        "pictures",
        "",
    ),
    "a bucket of one": (
        both(
            drawn("wide", (128, 32)),
            general={"resolution": 64, "min_bucket_reso": 32, "bucket_reso_steps": 16},
            training={"train_batch_size": 3},
        ),
        "note",
        "BUCKET-SHORT",
        "128 x 32",
        "Fewer shapes",
    ),
    "a batch larger than the bucket": (
        option("training", train_batch_size=64),
        "note",
        "BUCKET-SHORT",
        "64 x 64",
        "Fewer shapes",
    ),
    "a rate as text": (
        option("optimizer", learning_rate="1e-4"),
        "warning",
        "CONFIG-NUMBER-AS-TEXT",
        "train.toml:12: optimizer.learning_rate",
        "quotes",
    ),
    "a rate out of this world": (
        option("optimizer", learning_rate=0.5),
        "warning",
        "OPTIMIZER-RATE",
        "learning_rate",
        "1e-4",
    ),
    "an ending in the name": (
        option("saving", output_name="made.safetensors"),
        "warning",
        "OUTPUT-NAME-ENDING",
        "saving.output_name",
        "Leave the ending out",
    ),
    "prompts that nobody draws": (
        option("preview", sample_prompts=["blue ink"]),
        "warning",
        "CONFIG-NO-EFFECT",
        "preview.sample_prompts",
        "sample_every_n_steps",
    ),
}
