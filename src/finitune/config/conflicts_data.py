"""The rules about datasets and subsets, in the words that inheritance has given them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from finitune.config.config_rule import (
    CONFIG_ERROR,
    CONFIG_NOTE,
    CONFIG_WARNING,
    NO_EFFECT_CODE,
    ConfigRule,
    make_dataset_no_effect_rule,
    make_subset_no_effect_rule,
    match_any_dataset,
    match_any_subset,
)
from finitune.config.datasets import ResolvedDataset, ResolvedSubset

_SIDE_MULTIPLE = 16
"""Sides of pictures are multiples of it: 8 by the VAE, 2 by the patches."""

_MAX_RESOLUTION_SIDE = 4096
"""The side of a picture that is surely a slip of the pen: a step at 1024 takes a sixteenth of it."""


def get_resolution_sides(dataset: ResolvedDataset) -> tuple[int, int]:
    """Width and height of the resolution."""
    resolution = dataset.resolution
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def find_nearest_multiple(value: int) -> Mapping[str, int]:
    """The nearest multiple of 16 for a number that is none."""
    return (
        {"value": value, "nearest": max(1, round(value / _SIDE_MULTIPLE)) * _SIDE_MULTIPLE}
        if value % _SIDE_MULTIPLE
        else {}
    )


def find_unaligned_side(dataset: ResolvedDataset) -> Mapping[str, int]:
    """The first side that is no multiple of 16."""
    return next((found for side in get_resolution_sides(dataset) if (found := find_nearest_multiple(side))), {})


def find_excessive_resolution(dataset: ResolvedDataset) -> Mapping[str, str]:
    """The resolution, where it has more pixels than anybody trains on."""
    width, height = get_resolution_sides(dataset)
    return (
        {"size": f"{width} x {height}", "largest": f"{_MAX_RESOLUTION_SIDE} x {_MAX_RESOLUTION_SIDE}"}
        if width * height > _MAX_RESOLUTION_SIDE**2
        else {}
    )


def find_crossed_bucket_limits(dataset: ResolvedDataset) -> Mapping[str, int]:
    """The shortest and the longest side of buckets where they leave no room."""
    shortest, longest = dataset.min_bucket_reso, max(dataset.max_bucket_reso, *get_resolution_sides(dataset))
    return {"shortest": shortest, "longest": longest} if dataset.enable_bucket and shortest > longest else {}


def has_random_tags(subset: ResolvedSubset) -> bool:
    """Whether something is done to single tags, by chance."""
    return subset.shuffle_caption or subset.caption_tag_dropout_rate > 0 or subset.token_warmup_step > 0


def has_subset_masks(subset: ResolvedSubset) -> bool:
    """Whether there are masks."""
    return subset.alpha_mask or subset.conditioning_data_dir is not None


def find_repeated_subset_folder(dataset: ResolvedDataset) -> Mapping[str, str]:
    """The first folder that a dataset names twice for the same purpose."""
    named = Counter((subset.image_dir, subset.metadata_file, subset.is_reg) for subset in dataset.subsets)
    return next(({"folder": str(key[0])} for key, count in named.items() if count > 1 and key[0]), {})


_WITHOUT_BUCKETS = "without enable_bucket"
_DATASET_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "DATASET-NONE",
        "datasets",
        lambda c: not any(dataset.subsets for dataset in c.datasets),
        "there are no pictures: no [[datasets]] with a [[datasets.subsets]]",
        "Add [[datasets]] and below it [[datasets.subsets]] with an image_dir.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "DATASET-WITHOUT-SUBSETS",
        "datasets",
        match_any_dataset(lambda d: not d.subsets),
        "{where} names no folder, and counts for nothing",
        "Give it a [[datasets.subsets]] with an image_dir, or leave it out.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "SIDE-NOT-MULTIPLE",
        "datasets.bucket_reso_steps",
        match_any_dataset(lambda d: d.enable_bucket and find_nearest_multiple(d.bucket_reso_steps)),
        "bucket_reso_steps = {value} is no multiple of 16 ({where})",
        "Take bucket_reso_steps = {nearest}.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "SIDE-NOT-MULTIPLE",
        "datasets.resolution",
        match_any_dataset(lambda d: not d.enable_bucket and find_unaligned_side(d)),
        "a side of {value} is no multiple of 16 ({where})",
        "Take {nearest}, or enable_bucket = true.",
    ),
    ConfigRule(
        CONFIG_NOTE,
        "RESOLUTION-IS-AREA",
        "datasets.resolution",
        match_any_dataset(lambda d: d.enable_bucket and find_unaligned_side(d)),
        "a side of {value} is no multiple of 16; with buckets it says only how many pixels there are ({where})",
        "Take {nearest} for a square bucket of just that size.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "RESOLUTION-TOO-LARGE",
        "datasets.resolution",
        match_any_dataset(find_excessive_resolution),
        "a resolution of {size} has more pixels than {largest} ({where})",
        "Anima draws about 1024 x 1024: take resolution = 1024, or less to save memory.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "BUCKETS-CROSSED",
        "datasets.min_bucket_reso",
        match_any_dataset(find_crossed_bucket_limits),
        "min_bucket_reso = {shortest} is above the longest side, {longest} ({where})",
        "Lower min_bucket_reso, or raise max_bucket_reso.",
    ),
    make_dataset_no_effect_rule("min_bucket_reso", lambda d: not d.enable_bucket, _WITHOUT_BUCKETS),
    make_dataset_no_effect_rule("max_bucket_reso", lambda d: not d.enable_bucket, _WITHOUT_BUCKETS),
    make_dataset_no_effect_rule("bucket_reso_steps", lambda d: not d.enable_bucket, _WITHOUT_BUCKETS),
    make_dataset_no_effect_rule("bucket_no_upscale", lambda d: not d.enable_bucket, _WITHOUT_BUCKETS),
    make_dataset_no_effect_rule("validation_seed", lambda d: not d.validation_split, "without validation_split"),
    ConfigRule(
        CONFIG_WARNING,
        "MULTIPLIER-ZERO",
        "datasets.network_multiplier",
        match_any_dataset(lambda d: d.network_multiplier == 0),
        "network_multiplier = 0: nothing is learned from {where}",
        "Leave the dataset out, or network_multiplier at 1.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "DATASET-FOLDER-TWICE",
        "datasets.subsets.image_dir",
        match_any_dataset(find_repeated_subset_folder),
        "{folder} stands twice in {where}",
        "Name it once, and raise num_repeats instead.",
    ),
)

_SUBSET_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "SUBSET-WITHOUT-FOLDER",
        "datasets.subsets.image_dir",
        match_any_subset(lambda s, _: s.image_dir is None and s.metadata_file is None),
        "{where} names no folder",
        "Give it an image_dir.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "REGULARISATION-ONLY",
        "datasets.subsets.is_reg",
        lambda c: (subsets := [s for d in c.datasets for s in d.subsets]) and all(s.is_reg for s in subsets),
        "every subset is of regularisation pictures: there is nothing to learn",
        "Leave is_reg out where the pictures are to be learned.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "CROP-NOT-SUPPORTED",
        "datasets.subsets.face_crop_aug_range",
        match_any_subset(lambda s, _: s.face_crop_aug_range is not None),
        "face_crop_aug_range is not supported: crops around faces are not made here ({where})",
        "Crop the pictures beforehand, or use random_crop.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "MASKS-TWO-KINDS",
        "datasets.subsets.alpha_mask",
        match_any_subset(lambda s, _: s.alpha_mask and s.conditioning_data_dir),
        "alpha_mask and conditioning_data_dir are two masks for one picture ({where})",
        "Leave one of them out.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "MASKS-ARE-PICTURES",
        "datasets.subsets.conditioning_data_dir",
        match_any_subset(lambda s, _: s.conditioning_data_dir is not None and s.conditioning_data_dir == s.image_dir),
        "conditioning_data_dir is the folder of the pictures themselves ({where})",
        "Keep masks in a folder of their own, under the names of the pictures.",
    ),
    ConfigRule(
        CONFIG_NOTE,
        "LATENTS-NOT-CACHED",
        "datasets.subsets.random_crop",
        match_any_subset(lambda s, _: s.random_crop),
        "random_crop: the latents are made anew in each step, which is slower ({where})",
    ),
    ConfigRule(
        CONFIG_NOTE,
        "LATENTS-NOT-CACHED",
        "datasets.subsets.color_aug",
        match_any_subset(lambda s, _: s.color_aug),
        "color_aug: the latents are made anew in each step, which is slower ({where})",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "CAPTIONS-ALL-DROPPED",
        "datasets.subsets.caption_dropout_rate",
        match_any_subset(lambda s, _: s.caption_dropout_rate == 1 or s.caption_dropout_every_n_epochs == 1),
        "every caption is dropped, so that nothing is learned about words ({where})",
        "0.05 to 0.1 is usual for caption_dropout_rate.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "TAGS-ALL-DROPPED",
        "datasets.subsets.caption_tag_dropout_rate",
        match_any_subset(lambda s, _: s.caption_tag_dropout_rate == 1),
        "every tag that is not kept is dropped, always ({where})",
        "0.1 is usual for caption_tag_dropout_rate.",
    ),
    make_subset_no_effect_rule(
        "keep_tokens", lambda s: not has_random_tags(s), "where tags are neither shuffled nor dropped"
    ),
    make_subset_no_effect_rule("token_warmup_min", lambda s: not s.token_warmup_step, "without token_warmup_step"),
    make_subset_no_effect_rule(
        "caption_variants",
        lambda s: not (s.shuffle_caption or s.enable_wildcard or s.caption_tag_dropout_rate),
        "where nothing in the captions is random",
    ),
    make_subset_no_effect_rule(
        "caption_extension", lambda s: s.metadata_file, "with metadata_file, which holds the captions"
    ),
    make_subset_no_effect_rule("custom_attributes", lambda s: True, "here: it is for other programs"),
    make_subset_no_effect_rule(
        "cache_info", lambda s: True, "here: sizes are read from headers each time, in a moment"
    ),
)

_MASK_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "MASKS-MISSING",
        "objective.masked_loss",
        lambda c: c.objective.masked_loss and c.datasets and not match_any_subset(lambda s, _: has_subset_masks(s))(c),
        "masked_loss, and no subset has masks",
        "Give a subset conditioning_data_dir, a folder of masks, or alpha_mask = true.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "MASKS-NOT-USED",
        "objective.masked_loss",
        lambda c: not c.objective.masked_loss and match_any_subset(lambda s, _: has_subset_masks(s))(c),
        "there are masks, and the loss does not look at them without masked_loss ({where})",
        "Set masked_loss = true in [objective], or leave the masks out.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "REGULARISATION-WEIGHTLESS",
        "objective.prior_loss_weight",
        lambda c: not c.objective.prior_loss_weight and match_any_subset(lambda s, _: s.is_reg)(c),
        "prior_loss_weight = 0: regularisation pictures are computed, and count for nothing ({where})",
        "Leave these subsets out, or prior_loss_weight at 1.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        NO_EFFECT_CODE,
        "objective.prior_loss_weight",
        lambda c: c.objective.prior_loss_weight != 1 and not match_any_subset(lambda s, _: s.is_reg)(c),
        "prior_loss_weight has no effect without regularisation pictures",
        "Mark a subset with is_reg = true, or leave it out.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        NO_EFFECT_CODE,
        "training.train_batch_size",
        lambda c: (
            c.training.train_batch_size != 1 and c.datasets and not match_any_dataset(lambda d: d.batch_size is None)(c)
        ),
        "train_batch_size has no effect where every dataset has a batch_size",
        "Leave one of them out.",
    ),
)
CONFIG_DATA_RULES = (*_DATASET_RULES, *_SUBSET_RULES, *_MASK_RULES)
