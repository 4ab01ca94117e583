"""The rules about the objective, the optimiser, and the length of a training."""

from __future__ import annotations

import re
from collections.abc import Mapping

from finitune.config.config_rule import (
    CONFIG_ERROR,
    CONFIG_WARNING,
    ConfigCondition,
    ConfigRule,
    compute_configured_steps,
    is_option_set,
    make_no_effect_rule,
)
from finitune.config.schema import TrainConfig

_LORAPLUS_ALGORITHMS = ("lora", "loha", "lokr")
"""Algorithms that LoRA+ has a larger rate for."""
_SELF_TUNING_PREFIXES = ("prodigy", "dadapt")
"""How names of optimisers begin that find the learning rate themselves."""
_MAX_RATE_BY_OPTIMIZER = {"lion": 1e-3, "sgd": 1.0}
_DEFAULT_MAX_RATE = 1e-2
_LEARNING_RATE_OPTIONS = (
    "optimizer.text_encoder_lr",
    "optimizer.llm_adapter_lr",
    "optimizer.loraplus_lr_ratio",
    "network.network_reg_lrs",
)


def match_other_sampling(*names: str) -> ConfigCondition:
    """The condition that sigmas are drawn in another way."""
    return lambda config: config.objective.timestep_sampling not in names


def match_other_sigma_density(name: str) -> ConfigCondition:
    """The condition that another density of u is drawn from, or none."""
    return lambda config: config.objective.weighting_scheme != name or config.objective.timestep_sampling != "sigma"


def match_other_scheduler(name: str) -> ConfigCondition:
    """The condition that the learning rate takes another course."""
    return lambda config: config.optimizer.lr_scheduler != name


def normalize_optimizer_type(config: TrainConfig) -> str:
    """The optimiser in lower case, without module and separators."""
    return re.sub(r"[-_ ]", "", config.optimizer.optimizer_type.rpartition(".")[2].casefold())


def is_self_tuning_optimizer(config: TrainConfig) -> bool:
    """Whether the optimiser finds its learning rate."""
    return normalize_optimizer_type(config).startswith(_SELF_TUNING_PREFIXES)


def has_only_zero_rates(config: TrainConfig) -> bool:
    """Whether every learning rate is 0."""
    optimizer, network = config.optimizer, config.network
    others = [
        optimizer.text_encoder_lr if network.train_text_encoder else 0,
        optimizer.llm_adapter_lr if network.train_llm_adapter else 0,
        *network.network_reg_lrs.values(),
    ]
    return not optimizer.learning_rate and not any(others)


def find_excessive_learning_rate(config: TrainConfig) -> Mapping[str, object]:
    """The learning rate, where it is above what the optimiser bears."""
    name, rate = normalize_optimizer_type(config), config.optimizer.learning_rate
    highest = next((top for kind, top in _MAX_RATE_BY_OPTIMIZER.items() if kind in name), _DEFAULT_MAX_RATE)
    if is_self_tuning_optimizer(config) or rate <= highest:
        return {}
    return {"name": config.optimizer.optimizer_type, "rate": f"{rate:g}", "highest": f"{highest:g}"}


def find_slow_ema(config: TrainConfig) -> Mapping[str, object]:
    """How many steps a moving average looks back, where the run is not much longer."""
    decay, last = config.optimizer.ema_decay, compute_configured_steps(config)
    span = round(1 / (1 - decay)) if decay else 0
    return {"span": span, "last": last} if last and span > last / 2 else {}


_OBJECTIVE_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "SIGMA-RANGE",
        "objective.min_sigma",
        lambda c: c.objective.min_sigma >= c.objective.max_sigma,
        "min_sigma is not below max_sigma: no sigma is left to draw",
        "0 and 1 are all of them.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "WEIGHT-UNBOUNDED",
        "objective.weighting_scheme",
        lambda c: c.objective.weighting_scheme == "sigma_sqrt" and c.objective.min_sigma == 0,
        "sigma_sqrt weighs the loss by 1 / sigma^2, which has no bound near 0",
        "Set min_sigma, such as 0.02, or weighting_scheme = uniform.",
    ),
    make_no_effect_rule(
        "objective.sigmoid_scale", match_other_sampling("sigmoid", "shift", "flux_shift"), "with this timestep_sampling"
    ),
    make_no_effect_rule(
        "objective.discrete_flow_shift",
        match_other_sampling("shift", "sigma"),
        "with this timestep_sampling",
        "Set timestep_sampling = shift, or leave it out.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "CONFIG-NO-EFFECT",
        "objective.weighting_scheme",
        lambda c: c.objective.weighting_scheme in ("logit_normal", "mode") and c.objective.timestep_sampling != "sigma",
        "weighting_scheme has no effect without timestep_sampling = sigma: it is a density of sigmas",
        "Set timestep_sampling = sigma, or leave weighting_scheme out.",
    ),
    make_no_effect_rule(
        "objective.logit_mean", match_other_sigma_density("logit_normal"), "without the density logit_normal, of sigma"
    ),
    make_no_effect_rule(
        "objective.logit_std", match_other_sigma_density("logit_normal"), "without the density logit_normal, of sigma"
    ),
    make_no_effect_rule(
        "objective.mode_scale", match_other_sigma_density("mode"), "without the density mode, of sigma"
    ),
    make_no_effect_rule(
        "objective.huber_c",
        lambda c: c.objective.loss_type not in ("huber", "smooth_l1"),
        "without loss_type = huber or smooth_l1",
    ),
    make_no_effect_rule("objective.mask_normalised", lambda c: not c.objective.masked_loss, "without masked_loss"),
    make_no_effect_rule(
        "objective.mask_area_floor",
        lambda c: not (c.objective.masked_loss and c.objective.mask_normalised),
        "without masked_loss and mask_normalised",
    ),
)

_OPTIMIZER_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "RATE-ZERO",
        "optimizer.learning_rate",
        has_only_zero_rates,
        "the learning rate is 0: the adapter would stay as it is",
        "1e-4 is usual for AdamW, 1 for Prodigy.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "OPTIMIZER-RATE",
        "optimizer.learning_rate",
        find_excessive_learning_rate,
        "a learning rate of {rate} is very high for {name}; above {highest} training tends to diverge",
        "1e-4 is usual for AdamW, a third of that for Lion; 1 is for Prodigy.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "OPTIMIZER-RATE-SELF-TUNED",
        "optimizer.learning_rate",
        lambda c: is_self_tuning_optimizer(c) and 0 < c.optimizer.learning_rate < 0.1,
        "this optimiser multiplies a rate that it finds itself; with this one it hardly learns",
        "Write learning_rate = 1.0.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "OPTIMIZER-ONE-RATE",
        "optimizer.optimizer_type",
        lambda c: (
            is_self_tuning_optimizer(c)
            and (given := [rate for rate in _LEARNING_RATE_OPTIONS if is_option_set(c, rate)])
            and {"given": ", ".join(given)}
        ),
        "this optimiser finds one learning rate for all; {given} would give others",
        "Leave them out, or use AdamW.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "OPTIMIZER-ARGUMENT",
        "optimizer.optimizer_args",
        lambda c: "lr" in c.optimizer.optimizer_args,
        "lr among optimizer_args is the learning_rate once more",
        "Leave it out, and set learning_rate.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "OPTIMIZER-NEEDS-CUDA",
        "optimizer.optimizer_type",
        lambda c: c.model.device == "cpu" and normalize_optimizer_type(c).endswith("8bit"),
        "8-bit optimisers compute on CUDA devices alone, and device is cpu",
        "Take the optimiser of the same name without 8bit.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "LORAPLUS-WITHOUT-EFFECT",
        "optimizer.loraplus_lr_ratio",
        lambda c: (
            c.optimizer.loraplus_lr_ratio is not None
            and c.network.algorithm not in _LORAPLUS_ALGORITHMS
            and {"algorithm": c.network.algorithm}
        ),
        "loraplus_lr_ratio has no effect with {algorithm}, which has no up factors",
        f"Leave it out; it is for {', '.join(_LORAPLUS_ALGORITHMS)}.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "SCHEDULE-FREE",
        "optimizer.lr_scheduler",
        lambda c: "schedulefree" in normalize_optimizer_type(c) and c.optimizer.lr_scheduler != "constant",
        "a schedule-free optimiser wants a constant learning rate: its average stands for the schedule",
        "Set lr_scheduler = constant.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "AVERAGE-SLOW",
        "optimizer.ema_decay",
        find_slow_ema,
        "ema_decay averages over {span} steps, and the run has {last}: much of the beginning stays in the average",
        "Take 1 - 10 / steps or less, such as 0.99.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "WARMUP-TOO-LONG",
        "optimizer.lr_warmup_steps",
        lambda c: (
            c.optimizer.lr_warmup_steps >= 1
            and (last := compute_configured_steps(c))
            and last <= c.optimizer.lr_warmup_steps
            and {"warmup": f"{c.optimizer.lr_warmup_steps:g}", "last": last}
        ),
        "the warm-up of {warmup} steps is not over when the run ends after {last}",
        "Write a share of the run, such as lr_warmup_steps = 0.05.",
    ),
    make_no_effect_rule(
        "optimizer.lr_warmup_steps",
        lambda c: c.optimizer.lr_scheduler == "constant",
        "with lr_scheduler = constant",
        "Set lr_scheduler = constant_with_warmup, or leave it out.",
    ),
    make_no_effect_rule(
        "optimizer.lr_scheduler_num_cycles",
        match_other_scheduler("cosine_with_restarts"),
        "without cosine_with_restarts",
    ),
    make_no_effect_rule(
        "optimizer.lr_scheduler_power", match_other_scheduler("polynomial"), "without lr_scheduler = polynomial"
    ),
    make_no_effect_rule(
        "optimizer.lr_scheduler_min_lr_ratio", match_other_scheduler("cosine_with_min_lr"), "without cosine_with_min_lr"
    ),
    make_no_effect_rule(
        "optimizer.text_encoder_lr", lambda c: not c.network.train_text_encoder, "without train_text_encoder"
    ),
    make_no_effect_rule(
        "optimizer.llm_adapter_lr", lambda c: not c.network.train_llm_adapter, "without train_llm_adapter"
    ),
    ConfigRule(
        CONFIG_WARNING,
        "CONFIG-NO-EFFECT",
        "optimizer.learning_rate",
        lambda c: c.optimizer.optimizer_args.get("relative_step") is True,
        "learning_rate has no effect with relative_step = true: Adafactor makes its own from the number of steps",
        "Set relative_step = false among optimizer_args.",
    ),
)

_TRAINING_RULES = (
    ConfigRule(
        CONFIG_ERROR,
        "LENGTH-TWICE",
        "training.max_train_epochs",
        lambda c: c.training.max_train_steps and c.training.max_train_epochs,
        "max_train_steps and max_train_epochs are both given",
        "Leave one of them out. With kohya's scripts the epochs count.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "COMPILE-OFFLOAD",
        "training.torch_compile",
        lambda c: c.training.torch_compile and c.training.offload_blocks,
        "torch_compile and offload_blocks exclude each other: compiled blocks cannot be moved between steps",
        "Leave torch_compile out where memory is short, else set offload_blocks = 0.",
    ),
)
CONFIG_LEARNING_RULES = (*_OBJECTIVE_RULES, *_OPTIMIZER_RULES, *_TRAINING_RULES)
