"""The rules about the base model and the adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from finitune.config.config_rule import (
    CONFIG_ERROR,
    CONFIG_NOTE,
    CONFIG_WARNING,
    ConfigCondition,
    ConfigRule,
    make_no_effect_rule,
)
from finitune.config.schema import TrainConfig

DORA_ALGORITHMS = ("lora", "loha", "lokr", "full")
"""Algorithms whose change is added to the weight, so that DoRA's magnitudes have a meaning."""
ALPHA_SCALED_ALGORITHMS = ("lora", "loha", "lokr", "glora")
"""Algorithms with a rank and a scale alpha / rank."""
BLOCK_SIZE_ALGORITHMS = ("oft", "boft", "oft_v2")
"""Algorithms that take the rank as the size of their blocks."""
_MAX_NETWORK_SCALE = 8.0
"""alpha / rank above which training tends to diverge; 32 is reported with losses of NaN (kohya_ss, issue 1758)."""


def match_other_algorithm(*names: str) -> ConfigCondition:
    """The condition that the adapter is of another kind."""
    return lambda config: config.network.algorithm not in names


def find_excessive_network_scale(config: TrainConfig) -> Mapping[str, object]:
    """alpha and rank of the largest scale, where it is above MAX_SCALE."""
    network = config.network
    if network.algorithm not in ALPHA_SCALED_ALGORITHMS:
        return {}
    ranks = {"": network.network_dim, **network.network_reg_dims}
    scales = []
    for pattern, rank in ranks.items():
        alpha = network.network_reg_alphas.get(pattern, network.network_alpha) or rank
        scales.append((alpha / (math.sqrt(rank) if network.rs_lora else max(rank, 1)), alpha, rank))
    scale, alpha, rank = max(scales)
    return {"scale": f"{scale:g}", "alpha": f"{alpha:g}", "rank": rank} if scale > _MAX_NETWORK_SCALE else {}


def find_pattern_without_alpha(config: TrainConfig) -> Mapping[str, object]:
    """The first pattern with a rank of its own and the alpha of the others."""
    network = config.network
    for pattern, rank in network.network_reg_dims.items():
        if network.network_alpha and rank != network.network_dim and pattern not in network.network_reg_alphas:
            scale, usual = network.network_alpha / max(rank, 1), network.network_alpha / network.network_dim
            return {"pattern": pattern, "rank": rank, "scale": f"{scale:g}", "usual": f"{usual:g}"}
    return {}


def find_invalid_network_pattern(config: TrainConfig) -> Mapping[str, object]:
    """The first pattern that is no regular expression."""
    network = config.network
    lists = ("exclude_patterns", "include_patterns", "only_patterns")
    tables = ("network_reg_dims", "network_reg_alphas", "network_reg_lrs")
    for option in (*lists, *tables):
        for pattern in getattr(network, option):
            try:
                re.compile(pattern)
            except re.error as error:
                return {"option": option, "pattern": pattern, "why": str(error)}
    return {}


def find_invalid_pattern_value(config: TrainConfig) -> Mapping[str, object]:
    """The first rank below 1, or alpha or learning rate below 0, by pattern."""
    network = config.network
    lowest = (("network_reg_dims", 1), ("network_reg_alphas", 0), ("network_reg_lrs", 0))
    return next(
        (
            {"option": option, "pattern": pattern, "value": value, "least": least}
            for option, least in lowest
            for pattern, value in getattr(network, option).items()
            if value < least
        ),
        {},
    )


_MODEL_SECTION_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "OFFLOAD-TEXT-ENCODER",
        "training.offload_blocks",
        lambda c: c.network.train_text_encoder and c.training.offload_blocks,
        "offload_blocks and train_text_encoder exclude each other: a text encoder that learns must stay on the GPU, "
        "which is the memory that offloading is to free",
        "Leave train_text_encoder out, or offload_blocks at 0; gradient_checkpointing saves memory with both.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "OFFLOAD-NEEDS-GPU",
        "training.offload_blocks",
        lambda c: c.training.offload_blocks and c.model.device == "cpu",
        "offload_blocks: there is no GPU to hold the blocks away from",
        "Set offload_blocks = 0 when computing on the CPU.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "STORAGE-TEXT-ENCODER",
        "model.storage",
        lambda c: c.model.storage == "fp8" and c.network.train_text_encoder,
        "the text encoder learns on weights rounded to fp8, which keeps 3 bits of fraction",
        "Set storage to auto, or leave train_text_encoder out.",
    ),
    make_no_effect_rule(
        "model.plan",
        lambda c: c.model.precision not in ("auto", "planned-half"),
        "with this precision: only planned-half follows a plan",
        "Set precision to planned-half, or leave the plan out.",
    ),
    *(
        make_no_effect_rule(
            f"model.{name}",
            lambda c: c.model.pretrained_model_name_or_path == "pico-anima",
            "with pico-anima: it has its own",
        )
        for name in ("qwen3", "vae", "tokenizers")
    ),
)

_NETWORK_SECTION_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "DORA-ALGORITHM",
        "network.dora",
        lambda c: c.network.dora and c.network.algorithm not in DORA_ALGORITHMS and {"algorithm": c.network.algorithm},
        "dora has no meaning with {algorithm}, whose change is not added to the weight",
        f"Leave dora out, or take one of {', '.join(DORA_ALGORITHMS)}.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "NETWORK-SCALE",
        "network.network_alpha",
        find_excessive_network_scale,
        "alpha {alpha} at rank {rank} is a scale of {scale}: training tends to diverge",
        "Take network_alpha at most as large as the rank, and raise the learning rate if it learns too little.",
    ),
    ConfigRule(
        CONFIG_NOTE,
        "NETWORK-SCALE-BY-PATTERN",
        "network.network_reg_dims",
        find_pattern_without_alpha,
        "{pattern!r} has rank {rank} with the common alpha, so its scale is {scale} in place of {usual}",
        "Give the pattern an alpha in network_reg_alphas if that is not meant.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "PATTERN-UNREADABLE",
        "network",
        find_invalid_network_pattern,
        "{option}: {pattern!r} is no regular expression: {why}",
        r"A dot stands for any sign, `.*` for any text; write `\.` for a dot itself.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "PATTERN-VALUE",
        "network",
        find_invalid_pattern_value,
        "{option}: {value} for {pattern!r} is below {least}",
        "To leave modules out, name them in exclude_patterns.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "NETWORK-RATE-ZERO",
        "network.network_reg_lrs",
        lambda c: any(rate == 0 for rate in c.network.network_reg_lrs.values()),
        "modules with a learning rate of 0 get an adapter that learns nothing",
        "Name them in exclude_patterns.",
    ),
    make_no_effect_rule("network.factor", match_other_algorithm("lokr"), "without algorithm = lokr"),
    make_no_effect_rule("network.full_matrix", match_other_algorithm("lokr"), "without algorithm = lokr"),
    make_no_effect_rule("network.decompose_both", match_other_algorithm("lokr"), "without algorithm = lokr"),
    make_no_effect_rule("network.unbalanced", match_other_algorithm("lokr"), "without algorithm = lokr"),
    make_no_effect_rule(
        "network.use_tucker", match_other_algorithm("lora", "loha", "lokr"), "without algorithm = lora, loha or lokr"
    ),
    make_no_effect_rule("network.constraint", match_other_algorithm("oft", "boft"), "without algorithm = oft or boft"),
    make_no_effect_rule(
        "network.network_dim",
        match_other_algorithm(*ALPHA_SCALED_ALGORITHMS, *BLOCK_SIZE_ALGORITHMS),
        "with an algorithm that has no rank",
    ),
    make_no_effect_rule(
        "network.network_alpha", match_other_algorithm(*ALPHA_SCALED_ALGORITHMS), "with an algorithm that has no scale"
    ),
    make_no_effect_rule(
        "network.conv_dim",
        lambda c: c.network.conv_dim and match_other_algorithm(*ALPHA_SCALED_ALGORITHMS, *BLOCK_SIZE_ALGORITHMS)(c),
        "without a rank",
    ),
    make_no_effect_rule(
        "network.conv_alpha",
        lambda c: match_other_algorithm(*ALPHA_SCALED_ALGORITHMS)(c) or c.network.conv_dim == 0,
        "without a conv_dim",
    ),
    make_no_effect_rule(
        "network.rs_lora", match_other_algorithm(*ALPHA_SCALED_ALGORITHMS), "with an algorithm that has no scale"
    ),
    make_no_effect_rule(
        "network.network_reg_dims",
        match_other_algorithm(*ALPHA_SCALED_ALGORITHMS, *BLOCK_SIZE_ALGORITHMS),
        "with an algorithm that has no rank",
    ),
    make_no_effect_rule(
        "network.network_reg_alphas",
        match_other_algorithm(*ALPHA_SCALED_ALGORITHMS),
        "with an algorithm that has no scale",
    ),
)
CONFIG_MODEL_RULES = (*_MODEL_SECTION_RULES, *_NETWORK_SECTION_RULES)
