"""The rules about the base model and the adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from finitune.config.rule import ERROR, NOTE, WARNING, Holds, Rule, idle
from finitune.config.schema import TrainConfig

ADDITIVE = ("lora", "loha", "lokr", "full")
"""Algorithms whose change is added to the weight, so that DoRA's magnitudes have a meaning."""
RANKED = ("lora", "loha", "lokr", "glora")
"""Algorithms with a rank and a scale alpha / rank."""
BLOCKED = ("oft", "boft", "oft_v2")
"""Algorithms that take the rank as the size of their blocks."""
MAX_SCALE = 8.0
"""alpha / rank above which training tends to diverge; 32 is reported with losses of NaN (kohya_ss, issue 1758)."""


def algorithm_is_not(*names: str) -> Holds:
    """The condition that the adapter is of another kind."""
    return lambda config: config.network.algorithm not in names


def largest_scale(config: TrainConfig) -> Mapping[str, object]:
    """alpha and rank of the largest scale, where it is above MAX_SCALE."""
    network = config.network
    if network.algorithm not in RANKED:
        return {}
    ranks = {"": network.network_dim, **network.network_reg_dims}
    scales = []
    for pattern, rank in ranks.items():
        alpha = network.network_reg_alphas.get(pattern, network.network_alpha) or rank
        scales.append((alpha / (math.sqrt(rank) if network.rs_lora else max(rank, 1)), alpha, rank))
    scale, alpha, rank = max(scales)
    return {"scale": f"{scale:g}", "alpha": f"{alpha:g}", "rank": rank} if scale > MAX_SCALE else {}


def alphas_left_behind(config: TrainConfig) -> Mapping[str, object]:
    """The first pattern with a rank of its own and the alpha of the others."""
    network = config.network
    for pattern, rank in network.network_reg_dims.items():
        if network.network_alpha and rank != network.network_dim and pattern not in network.network_reg_alphas:
            scale, usual = network.network_alpha / max(rank, 1), network.network_alpha / network.network_dim
            return {"pattern": pattern, "rank": rank, "scale": f"{scale:g}", "usual": f"{usual:g}"}
    return {}


def bad_pattern(config: TrainConfig) -> Mapping[str, object]:
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


def bad_regional_value(config: TrainConfig) -> Mapping[str, object]:
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


MODEL = (
    Rule(
        ERROR,
        "OFFLOAD-TEXT-ENCODER",
        "training.offload_blocks",
        lambda c: c.network.train_text_encoder and c.training.offload_blocks,
        "offload_blocks and train_text_encoder exclude each other: a text encoder that learns must stay on the GPU, "
        "which is the memory that offloading is to free",
        "Leave train_text_encoder out, or offload_blocks at 0; gradient_checkpointing saves memory with both.",
    ),
    Rule(
        ERROR,
        "OFFLOAD-NEEDS-GPU",
        "training.offload_blocks",
        lambda c: c.training.offload_blocks and c.model.device == "cpu",
        "offload_blocks: there is no GPU to hold the blocks away from",
        "Set offload_blocks = 0 when computing on the CPU.",
    ),
    Rule(
        WARNING,
        "STORAGE-TEXT-ENCODER",
        "model.storage",
        lambda c: c.model.storage == "fp8" and c.network.train_text_encoder,
        "the text encoder learns on weights rounded to fp8, which keeps 3 bits of fraction",
        "Set storage to auto, or leave train_text_encoder out.",
    ),
    idle(
        "model.plan",
        lambda c: c.model.precision not in ("auto", "planned-half"),
        "with this precision: only planned-half follows a plan",
        "Set precision to planned-half, or leave the plan out.",
    ),
    *(
        idle(
            f"model.{name}",
            lambda c: c.model.pretrained_model_name_or_path == "pico-anima",
            "with pico-anima: it has its own",
        )
        for name in ("qwen3", "vae", "tokenizers")
    ),
)

NETWORK = (
    Rule(
        ERROR,
        "DORA-ALGORITHM",
        "network.dora",
        lambda c: c.network.dora and c.network.algorithm not in ADDITIVE and {"algorithm": c.network.algorithm},
        "dora has no meaning with {algorithm}, whose change is not added to the weight",
        f"Leave dora out, or take one of {', '.join(ADDITIVE)}.",
    ),
    Rule(
        WARNING,
        "NETWORK-SCALE",
        "network.network_alpha",
        largest_scale,
        "alpha {alpha} at rank {rank} is a scale of {scale}: training tends to diverge",
        "Take network_alpha at most as large as the rank, and raise the learning rate if it learns too little.",
    ),
    Rule(
        NOTE,
        "NETWORK-SCALE-BY-PATTERN",
        "network.network_reg_dims",
        alphas_left_behind,
        "{pattern!r} has rank {rank} with the common alpha, so its scale is {scale} in place of {usual}",
        "Give the pattern an alpha in network_reg_alphas if that is not meant.",
    ),
    Rule(
        ERROR,
        "PATTERN-UNREADABLE",
        "network",
        bad_pattern,
        "{option}: {pattern!r} is no regular expression: {why}",
        r"A dot stands for any sign, `.*` for any text; write `\.` for a dot itself.",
    ),
    Rule(
        ERROR,
        "PATTERN-VALUE",
        "network",
        bad_regional_value,
        "{option}: {value} for {pattern!r} is below {least}",
        "To leave modules out, name them in exclude_patterns.",
    ),
    Rule(
        WARNING,
        "NETWORK-RATE-ZERO",
        "network.network_reg_lrs",
        lambda c: any(rate == 0 for rate in c.network.network_reg_lrs.values()),
        "modules with a learning rate of 0 get an adapter that learns nothing",
        "Name them in exclude_patterns.",
    ),
    idle("network.factor", algorithm_is_not("lokr"), "without algorithm = lokr"),
    idle("network.full_matrix", algorithm_is_not("lokr"), "without algorithm = lokr"),
    idle("network.decompose_both", algorithm_is_not("lokr"), "without algorithm = lokr"),
    idle("network.unbalanced", algorithm_is_not("lokr"), "without algorithm = lokr"),
    idle("network.use_tucker", algorithm_is_not("lora", "loha", "lokr"), "without algorithm = lora, loha or lokr"),
    idle("network.constraint", algorithm_is_not("oft", "boft"), "without algorithm = oft or boft"),
    idle("network.network_dim", algorithm_is_not(*RANKED, *BLOCKED), "with an algorithm that has no rank"),
    idle("network.network_alpha", algorithm_is_not(*RANKED), "with an algorithm that has no scale"),
    idle("network.conv_dim", lambda c: c.network.conv_dim and algorithm_is_not(*RANKED, *BLOCKED)(c), "without a rank"),
    idle("network.conv_alpha", lambda c: algorithm_is_not(*RANKED)(c) or c.network.conv_dim == 0, "without a conv_dim"),
    idle("network.rs_lora", algorithm_is_not(*RANKED), "with an algorithm that has no scale"),
    idle("network.network_reg_dims", algorithm_is_not(*RANKED, *BLOCKED), "with an algorithm that has no rank"),
    idle("network.network_reg_alphas", algorithm_is_not(*RANKED), "with an algorithm that has no scale"),
)
MODEL_RULES = (*MODEL, *NETWORK)
