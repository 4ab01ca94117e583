"""The rules about datasets and subsets, in the words that inheritance has given them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from finitune.config.datasets import ResolvedDataset, ResolvedSubset
from finitune.config.rule import ERROR, NO_EFFECT, NOTE, WARNING, Rule, in_dataset, in_datasets, in_subset, in_subsets

MULTIPLE = 16
"""Sides of pictures are multiples of it: 8 by the VAE, 2 by the patches."""

LARGEST = 4096
"""The side of a picture that is surely a slip of the pen: a step at 1024 takes a sixteenth of it."""


def sides(dataset: ResolvedDataset) -> tuple[int, int]:
    """Width and height of the resolution."""
    resolution = dataset.resolution
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def off_multiple(value: int) -> Mapping[str, int]:
    """The nearest multiple of 16 for a number that is none."""
    return {"value": value, "nearest": max(1, round(value / MULTIPLE)) * MULTIPLE} if value % MULTIPLE else {}


def resolution_off(dataset: ResolvedDataset) -> Mapping[str, int]:
    """The first side that is no multiple of 16."""
    return next((found for side in sides(dataset) if (found := off_multiple(side))), {})


def too_large(dataset: ResolvedDataset) -> Mapping[str, str]:
    """The resolution, where it has more pixels than anybody trains on."""
    width, height = sides(dataset)
    return {"size": f"{width} x {height}", "largest": f"{LARGEST} x {LARGEST}"} if width * height > LARGEST**2 else {}


def crossed_buckets(dataset: ResolvedDataset) -> Mapping[str, int]:
    """The shortest and the longest side of buckets where they leave no room."""
    shortest, longest = dataset.min_bucket_reso, max(dataset.max_bucket_reso, *sides(dataset))
    return {"shortest": shortest, "longest": longest} if dataset.enable_bucket and shortest > longest else {}


def tags_move(subset: ResolvedSubset) -> bool:
    """Whether something is done to single tags, by chance."""
    return subset.shuffle_caption or subset.caption_tag_dropout_rate > 0 or subset.token_warmup_step > 0


def is_masked(subset: ResolvedSubset) -> bool:
    """Whether there are masks."""
    return subset.alpha_mask or subset.conditioning_data_dir is not None


def twice(dataset: ResolvedDataset) -> Mapping[str, str]:
    """The first folder that a dataset names twice for the same purpose."""
    named = Counter((subset.image_dir, subset.metadata_file, subset.is_reg) for subset in dataset.subsets)
    return next(({"folder": str(key[0])} for key, count in named.items() if count > 1 and key[0]), {})


NO_BUCKETS = "without enable_bucket"
DATASETS = (
    Rule(
        ERROR,
        "DATASET-NONE",
        "datasets",
        lambda c: not any(dataset.subsets for dataset in c.datasets),
        "there are no pictures: no [[datasets]] with a [[datasets.subsets]]",
        "Add [[datasets]] and below it [[datasets.subsets]] with an image_dir.",
    ),
    Rule(
        WARNING,
        "DATASET-WITHOUT-SUBSETS",
        "datasets",
        in_datasets(lambda d: not d.subsets),
        "{where} names no folder, and counts for nothing",
        "Give it a [[datasets.subsets]] with an image_dir, or leave it out.",
    ),
    Rule(
        ERROR,
        "SIDE-NOT-MULTIPLE",
        "datasets.bucket_reso_steps",
        in_datasets(lambda d: d.enable_bucket and off_multiple(d.bucket_reso_steps)),
        "bucket_reso_steps = {value} is no multiple of 16 ({where})",
        "Take bucket_reso_steps = {nearest}.",
    ),
    Rule(
        ERROR,
        "SIDE-NOT-MULTIPLE",
        "datasets.resolution",
        in_datasets(lambda d: not d.enable_bucket and resolution_off(d)),
        "a side of {value} is no multiple of 16 ({where})",
        "Take {nearest}, or enable_bucket = true.",
    ),
    Rule(
        NOTE,
        "RESOLUTION-IS-AREA",
        "datasets.resolution",
        in_datasets(lambda d: d.enable_bucket and resolution_off(d)),
        "a side of {value} is no multiple of 16; with buckets it says only how many pixels there are ({where})",
        "Take {nearest} for a square bucket of just that size.",
    ),
    Rule(
        ERROR,
        "RESOLUTION-TOO-LARGE",
        "datasets.resolution",
        in_datasets(too_large),
        "a resolution of {size} has more pixels than {largest} ({where})",
        "Anima draws about 1024 x 1024: take resolution = 1024, or less to save memory.",
    ),
    Rule(
        ERROR,
        "BUCKETS-CROSSED",
        "datasets.min_bucket_reso",
        in_datasets(crossed_buckets),
        "min_bucket_reso = {shortest} is above the longest side, {longest} ({where})",
        "Lower min_bucket_reso, or raise max_bucket_reso.",
    ),
    in_dataset("min_bucket_reso", lambda d: not d.enable_bucket, NO_BUCKETS),
    in_dataset("max_bucket_reso", lambda d: not d.enable_bucket, NO_BUCKETS),
    in_dataset("bucket_reso_steps", lambda d: not d.enable_bucket, NO_BUCKETS),
    in_dataset("bucket_no_upscale", lambda d: not d.enable_bucket, NO_BUCKETS),
    in_dataset("validation_seed", lambda d: not d.validation_split, "without validation_split"),
    Rule(
        WARNING,
        "MULTIPLIER-ZERO",
        "datasets.network_multiplier",
        in_datasets(lambda d: d.network_multiplier == 0),
        "network_multiplier = 0: nothing is learned from {where}",
        "Leave the dataset out, or network_multiplier at 1.",
    ),
    Rule(
        WARNING,
        "DATASET-FOLDER-TWICE",
        "datasets.subsets.image_dir",
        in_datasets(twice),
        "{folder} stands twice in {where}",
        "Name it once, and raise num_repeats instead.",
    ),
)

SUBSETS = (
    Rule(
        ERROR,
        "SUBSET-WITHOUT-FOLDER",
        "datasets.subsets.image_dir",
        in_subsets(lambda s, _: s.image_dir is None and s.metadata_file is None),
        "{where} names no folder",
        "Give it an image_dir.",
    ),
    Rule(
        ERROR,
        "REGULARISATION-ONLY",
        "datasets.subsets.is_reg",
        lambda c: (subsets := [s for d in c.datasets for s in d.subsets]) and all(s.is_reg for s in subsets),
        "every subset is of regularisation pictures: there is nothing to learn",
        "Leave is_reg out where the pictures are to be learned.",
    ),
    Rule(
        ERROR,
        "CROP-NOT-SUPPORTED",
        "datasets.subsets.face_crop_aug_range",
        in_subsets(lambda s, _: s.face_crop_aug_range is not None),
        "face_crop_aug_range is not supported: crops around faces are not made here ({where})",
        "Crop the pictures beforehand, or use random_crop.",
    ),
    Rule(
        ERROR,
        "MASKS-TWO-KINDS",
        "datasets.subsets.alpha_mask",
        in_subsets(lambda s, _: s.alpha_mask and s.conditioning_data_dir),
        "alpha_mask and conditioning_data_dir are two masks for one picture ({where})",
        "Leave one of them out.",
    ),
    Rule(
        ERROR,
        "MASKS-ARE-PICTURES",
        "datasets.subsets.conditioning_data_dir",
        in_subsets(lambda s, _: s.conditioning_data_dir is not None and s.conditioning_data_dir == s.image_dir),
        "conditioning_data_dir is the folder of the pictures themselves ({where})",
        "Keep masks in a folder of their own, under the names of the pictures.",
    ),
    Rule(
        NOTE,
        "LATENTS-NOT-CACHED",
        "datasets.subsets.random_crop",
        in_subsets(lambda s, _: s.random_crop),
        "random_crop: the latents are made anew in each step, which is slower ({where})",
    ),
    Rule(
        NOTE,
        "LATENTS-NOT-CACHED",
        "datasets.subsets.color_aug",
        in_subsets(lambda s, _: s.color_aug),
        "color_aug: the latents are made anew in each step, which is slower ({where})",
    ),
    Rule(
        WARNING,
        "CAPTIONS-ALL-DROPPED",
        "datasets.subsets.caption_dropout_rate",
        in_subsets(lambda s, _: s.caption_dropout_rate == 1 or s.caption_dropout_every_n_epochs == 1),
        "every caption is dropped, so that nothing is learned about words ({where})",
        "0.05 to 0.1 is usual for caption_dropout_rate.",
    ),
    Rule(
        WARNING,
        "TAGS-ALL-DROPPED",
        "datasets.subsets.caption_tag_dropout_rate",
        in_subsets(lambda s, _: s.caption_tag_dropout_rate == 1),
        "every tag that is not kept is dropped, always ({where})",
        "0.1 is usual for caption_tag_dropout_rate.",
    ),
    in_subset("keep_tokens", lambda s: not tags_move(s), "where tags are neither shuffled nor dropped"),
    in_subset("token_warmup_min", lambda s: not s.token_warmup_step, "without token_warmup_step"),
    in_subset(
        "caption_variants",
        lambda s: not (s.shuffle_caption or s.enable_wildcard or s.caption_tag_dropout_rate),
        "where nothing in the captions is random",
    ),
    in_subset("caption_extension", lambda s: s.metadata_file, "with metadata_file, which holds the captions"),
    in_subset("custom_attributes", lambda s: True, "here: it is for other programs"),
    in_subset("cache_info", lambda s: True, "here: sizes are read from headers each time, in a moment"),
)

MASKS = (
    Rule(
        ERROR,
        "MASKS-MISSING",
        "objective.masked_loss",
        lambda c: c.objective.masked_loss and c.datasets and not in_subsets(lambda s, _: is_masked(s))(c),
        "masked_loss, and no subset has masks",
        "Give a subset conditioning_data_dir, a folder of masks, or alpha_mask = true.",
    ),
    Rule(
        WARNING,
        "MASKS-NOT-USED",
        "objective.masked_loss",
        lambda c: not c.objective.masked_loss and in_subsets(lambda s, _: is_masked(s))(c),
        "there are masks, and the loss does not look at them without masked_loss ({where})",
        "Set masked_loss = true in [objective], or leave the masks out.",
    ),
    Rule(
        WARNING,
        "REGULARISATION-WEIGHTLESS",
        "objective.prior_loss_weight",
        lambda c: not c.objective.prior_loss_weight and in_subsets(lambda s, _: s.is_reg)(c),
        "prior_loss_weight = 0: regularisation pictures are computed, and count for nothing ({where})",
        "Leave these subsets out, or prior_loss_weight at 1.",
    ),
    Rule(
        WARNING,
        NO_EFFECT,
        "objective.prior_loss_weight",
        lambda c: c.objective.prior_loss_weight != 1 and not in_subsets(lambda s, _: s.is_reg)(c),
        "prior_loss_weight has no effect without regularisation pictures",
        "Mark a subset with is_reg = true, or leave it out.",
    ),
    Rule(
        WARNING,
        NO_EFFECT,
        "training.train_batch_size",
        lambda c: (
            c.training.train_batch_size != 1 and c.datasets and not in_datasets(lambda d: d.batch_size is None)(c)
        ),
        "train_batch_size has no effect where every dataset has a batch_size",
        "Leave one of them out.",
    ),
)
DATA_RULES = (*DATASETS, *SUBSETS, *MASKS)
