"""Verbs for adapter files, and for models as files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from finitune.cli.options import CliAmbiguityOptions, CliDtype, CliFlag, CliOutPath, CliRankOptions, VerbJob


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliConvertOptions:
    """What to make of an adapter file."""

    to: Literal["kohya", "comfy", "diffusers", "peft"]
    """The spelling to write."""
    out: CliOutPath = None
    """The file to write; for `peft` a folder."""
    as_algorithm: Annotated[Literal["lora"] | None, Parameter(name="--as")] = None
    """The algorithm to write: a LoRA can say what most others do, at a larger rank or with an error."""
    rank: int | None = None
    """The largest rank to write; the least that is exact if left out."""
    dtype: CliDtype | None = None
    """The dtype of factors; the file's own if left out. Alpha and magnitudes are fp32 always."""
    blocks: str | None = None
    """A re-numbering of the model's blocks, as "28 to 40"."""
    portable: CliFlag = False
    """Fold the scale into the factors, so that no program can miss it."""
    allow_lossy: CliFlag = False
    """Write it although something is lost; the report says how much."""
    allow_unmatched: CliFlag = False
    """Leave tensors out that have no place."""
    fix_split_scale: CliFlag = False
    """Mend the alpha of modules that were trained in parts and saved as one (see the warning of `check`)."""
    model: str | None = None
    """The model that it is for: its family, `pico-anima`, a file or a folder. Its weights are needed for T-LoRA, and
    for `--as lora` of GLoRA, IA3 and OFT."""


def convert(file: Path, conversion: CliConvertOptions, doubts: CliAmbiguityOptions = CliAmbiguityOptions()) -> VerbJob:
    """Write an adapter file in another spelling, or as another algorithm, and say what that costs.

    Parameters
    ----------
    file
        An adapter file, or a PEFT folder.
    """
    from finitune.verbs import convert as journey

    return partial(journey.run, journey.Request(file=file, **vars(conversion), **vars(doubts)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliMergeOptions:
    """How to merge, and where to."""

    out: Annotated[Path, Parameter(alias="-o")]
    """The file to write, or the folder where MODEL is one."""
    dtype: Literal["fp32", "fp16", "bf16", "fp8", "fp8-e5m2"] | None = None
    """The dtype of the result; each tensor's own if left out."""
    rounding: Literal["nearest", "stochastic", "compensated"] = "nearest"
    """How the one rounding is done."""
    allow_unmatched: CliFlag = False
    """Leave modules out that MODEL does not have."""
    dry_run: CliFlag = False
    """Say what would be done, and write nothing."""
    keep_precise: CliFlag = False
    """Store the tensors in fp32 whose change the dtype would lose."""
    min_survival: float = 0.9
    """The share of a tensor's change below which it is lost: to be warned of, or kept precise."""
    seed: int = 0
    """Seed of stochastic rounding."""
    shard_size: int | None = None
    """Write shards of at most so many bytes."""
    map: Path | None = None
    """A TOML file that names the keys of an odd checkpoint."""


def merge(
    model: str,
    *adapters: Annotated[str, Parameter(name="ADAPTER", required=True)],
    merging: CliMergeOptions,
    cut: CliRankOptions = CliRankOptions(),
    doubts: CliAmbiguityOptions = CliAmbiguityOptions(),
) -> VerbJob:
    """Merge adapters into a model, or into one another, rounding once, and check what was written.

    Parameters
    ----------
    model
        `pico-anima`, a file, the index of a sharded one, or a folder; or an adapter, to which the others are added,
        cut to `--rank` or `--energy` if asked.
    adapters
        Adapter files, as FILE or FILE:STRENGTH.
    """
    from finitune.verbs import merge as journey

    options = {**vars(merging), **vars(cut), **vars(doubts)}
    return partial(journey.run, journey.Request(model=model, adapters=adapters, **options))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliExtractOptions:
    """What to extract."""

    out: CliOutPath = None
    """The file to write."""
    to: Literal["kohya", "comfy", "diffusers"] = "kohya"
    """The spelling to write."""
    dtype: CliDtype | None = None
    """The dtype of factors; fp32 if left out."""
    include: tuple[str, ...] = ()
    """Patterns of the modules to extract (`*attn*`); all if left out."""
    min_change: float = 0.0
    """Leave out tensors that changed by less than this share of their norm."""
    full: CliFlag = False
    """Store whole what no LoRA can hold (embeddings and the like)."""


def extract(
    base: Path, tuned: Path, cut: CliRankOptions = CliRankOptions(), extraction: CliExtractOptions = CliExtractOptions()
) -> VerbJob:
    """Write what a tuned model has learned over its base as a LoRA, with the error of each layer.

    Parameters
    ----------
    base
        The model before: a file, the index of a sharded one, or a folder.
    tuned
        The model after.
    """
    from finitune.verbs import extract as journey

    return partial(journey.run, journey.Request(base=base, tuned=tuned, **vars(cut), **vars(extraction)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliResizeOptions:
    """How small to make it."""

    out: CliOutPath = None
    """The file to write."""
    dtype: CliDtype | None = None
    """The dtype of factors; the file's own if left out."""
    allow_unmatched: CliFlag = False
    """Leave tensors out that have no place."""


def resize(
    file: Path,
    cut: CliRankOptions = CliRankOptions(),
    resizing: CliResizeOptions = CliResizeOptions(),
    doubts: CliAmbiguityOptions = CliAmbiguityOptions(),
) -> VerbJob:
    """Write a LoRA of a smaller rank, with the true error of each layer.

    Parameters
    ----------
    file
        An adapter file.
    """
    from finitune.verbs import resize as journey

    return partial(journey.run, journey.Request(file=file, **vars(cut), **vars(resizing), **vars(doubts)))
