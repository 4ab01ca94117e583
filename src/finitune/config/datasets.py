"""The schema of datasets: kohya's dataset TOML, level by level, each lower level overriding the one above it.

[general] -> [[datasets]] -> [[datasets.subsets]]. Names, meanings and defaults are those of sd-scripts
(docs/config_README-en.md, library/config_util.py), but for those that a docstring names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SIDE_MULTIPLE = 16
"""Sides of pictures are multiples of it: 8 pixels of the VAE by 2 of the patches."""
ResolutionOption = int | tuple[int, int]
UnitShare = float


class ConfigSection(BaseModel):
    """A group of options: frozen, and an unknown one is an error. The text below each option is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)


class SubsetOptions(ConfigSection):
    """What may stand at any level, and holds for the subsets below."""

    num_repeats: int = Field(default=1, ge=1)
    """How often each picture is shown in an epoch; 1 is once."""
    caption_extension: str | None = Field(default=None, examples=[".txt"])
    """The ending of caption files; left out, `.txt` and `.caption` are looked for."""
    shuffle_caption: bool = False
    """Shuffle the tags of a caption, anew for each variant."""
    caption_separator: str = ","
    """What stands between tags."""
    keep_tokens: int = Field(default=0, ge=0)
    """How many leading tags stay where they are."""
    keep_tokens_separator: str = ""
    """A mark in the caption: what stands before it stays where it is; what stands behind a second one stays last."""
    secondary_separator: str = ""
    """A mark that binds tags into one for shuffling and dropping; written as the separator afterwards."""
    enable_wildcard: bool = False
    """Choose one of `{a|b|c}`, and one line of a caption of several lines."""
    caption_prefix: str = ""
    """Text in front of each caption."""
    caption_suffix: str = ""
    """Text behind each caption."""
    caption_dropout_rate: UnitShare = Field(default=0.0, ge=0, le=1)
    """The share of appearances with an empty caption."""
    caption_dropout_every_n_epochs: int = Field(default=0, ge=0)
    """Empty captions in every n-th epoch; 0 is never."""
    caption_tag_dropout_rate: UnitShare = Field(default=0.0, ge=0, le=1)
    """The share of tags left out, kept ones excepted."""
    token_warmup_min: int = Field(default=1, ge=1)
    """The number of tags at the first step of a token warm-up."""
    token_warmup_step: float = Field(default=0.0, ge=0)
    """Steps (or, below 1, the share of all steps) until all tags are used; 0 is no warm-up."""
    caption_variants: int = Field(default=8, ge=0)
    """Ours: how many different drawings of each caption (shuffles, dropped tags, wildcards) a run goes round; 0: a new
    one each time it is shown."""
    flip_aug: bool = False
    """Mirror every other appearance of a picture."""
    color_aug: bool = False
    """Vary hue and gamma a little; the latents are then made in each step."""
    random_crop: bool = False
    """Crop anywhere instead of in the middle; the latents are then made in each step."""
    face_crop_aug_range: tuple[float, float] | None = Field(default=None, examples=[[2.0, 4.0]])
    """Not supported: a crop around a face, whose place the file name tells."""
    alpha_mask: bool = False
    """Take the picture's transparency as the mask of the loss."""
    background: str = "white"
    """Ours: the colour behind transparent parts."""
    resize_interpolation: (
        Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"] | None
    ) = Field(default=None, examples=["lanczos"])
    """How pictures are resized; left out: area to shrink, Lanczos to enlarge."""
    custom_attributes: dict[str, object] | None = Field(default=None, examples=[{"from": "my camera"}])
    """Free text for other programs; has no effect."""


class DatasetOptions(SubsetOptions):
    """What may stand in [general] and in [[datasets]]."""

    resolution: ResolutionOption = 1024
    """The area of a picture in pixels, as a side length or [width, height]."""
    batch_size: int | None = Field(default=None, ge=1, examples=[2])
    """Pictures in a micro-batch; left out: train_batch_size."""
    enable_bucket: bool = True
    """Sort pictures by their shape instead of cropping all to one. kohya's default is false."""
    min_bucket_reso: int = Field(default=256, ge=16)
    """The shortest side of a bucket."""
    max_bucket_reso: int = Field(default=1024, ge=16)
    """The longest side of a bucket; is raised to the resolution where that is larger."""
    bucket_reso_steps: int = Field(default=64, ge=16)
    """Sides of buckets are multiples of it; itself a multiple of 16."""
    bucket_no_upscale: bool = False
    """Never enlarge a picture: small ones get buckets of their own."""
    network_multiplier: float = 1.0
    """The strength of the adapter while it learns from this dataset."""
    validation_split: UnitShare = Field(default=0.0, ge=0, lt=1)
    """The share of pictures kept out of training, to measure the loss on."""
    validation_seed: int | None = Field(default=None, examples=[0])
    """Seed of that choice; left out: the run's seed."""
    skip_image_resolution: ResolutionOption | None = Field(default=None, examples=[768])
    """Pictures up to this area are left out, as they were trained at another resolution."""


class Subset(SubsetOptions):
    """A folder of pictures: one [[datasets.subsets]]."""

    image_dir: Path | None = Field(default=None, examples=["pictures"])
    """The folder with pictures."""
    metadata_file: Path | None = Field(default=None, examples=["captions.json"])
    """A JSON file of captions by picture, in place of caption files ("fine-tuning" subsets)."""
    conditioning_data_dir: Path | None = Field(default=None, examples=["masks"])
    """A folder with a mask for each picture, under the same name: white learns, black does not."""
    is_reg: bool = False
    """Regularisation pictures: each counts prior_loss_weight, and they are repeated to match the others."""
    class_tokens: str | None = Field(default=None, examples=["1girl, solo"])
    """The caption of pictures without a caption file."""
    cache_info: bool = False
    """Has no effect: sizes are read from headers each time, in a moment."""


class Dataset(DatasetOptions):
    """One resolution and batch size, over one or more folders: one [[datasets]]."""

    subsets: tuple[Subset, ...] = ()
    """The folders."""


class DatasetConfig(ConfigSection):
    """A dataset TOML: as a file of its own, or in the training's TOML."""

    general: DatasetOptions = DatasetOptions()
    """What holds for all datasets."""
    datasets: tuple[Dataset, ...] = ()
    """The datasets."""


class ResolvedSubset(Subset):
    """A subset with everything it inherits, as `flattened` makes it."""

    dataset: int = 0
    """The place of its dataset among all."""


class ResolvedDataset(DatasetOptions):
    """A dataset with everything it inherits, its subsets complete."""

    subsets: tuple[ResolvedSubset, ...] = ()
    """The folders, with everything they inherit."""


def resolve_datasets(config: DatasetConfig) -> tuple[ResolvedDataset, ...]:
    """The datasets with every inherited option written out: what a level does not set, it has from the one above."""
    resolved: list[ResolvedDataset] = []
    for place, dataset in enumerate(config.datasets):
        above = get_stated_options(config.general) | get_stated_options(dataset)
        own = {name: value for name, value in above.items() if name in SubsetOptions.model_fields}
        subsets = tuple(
            ResolvedSubset(**(own | get_stated_options(subset)), dataset=place) for subset in dataset.subsets
        )
        resolved.append(ResolvedDataset(**{**above, "subsets": subsets}))
    return tuple(resolved)


def get_stated_options(section: ConfigSection) -> dict[str, Any]:
    """The options that were written down, as they are."""
    return {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}


def to_width_height(resolution: ResolutionOption) -> tuple[int, int]:
    """Width and height of a resolution that is a side or a pair."""
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def round_to_side(value: int) -> int:
    """The nearest length that the side of a picture can have."""
    return max(1, round(value / SIDE_MULTIPLE)) * SIDE_MULTIPLE


def parse_numbered_folder(name: str) -> tuple[int, str] | None:
    """Repeats and name of a folder `N_name`; None for another name."""
    match = re.match(r"(-?\d+)(?:_(.*))?$", name, re.DOTALL)
    return (int(match[1]), match[2] or "") if match else None
