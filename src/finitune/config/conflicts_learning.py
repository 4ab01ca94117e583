"""The rules about the objective, the optimiser, and the length of a training."""

from __future__ import annotations

import re
from collections.abc import Mapping

from finitune.config.rule import ERROR, WARNING, Holds, Rule, idle, is_set, steps
from finitune.config.schema import TrainConfig

WITH_UP_FACTORS = ("lora", "loha", "lokr")
"""Algorithms that LoRA+ has a larger rate for."""
SELF_TUNED = ("prodigy", "dadapt")
"""How names of optimisers begin that find the learning rate themselves."""
HIGHEST_RATES = {"lion": 1e-3, "sgd": 1.0}
HIGHEST_RATE = 1e-2
RATES = (
    "optimizer.text_encoder_lr",
    "optimizer.llm_adapter_lr",
    "optimizer.loraplus_lr_ratio",
    "network.network_reg_lrs",
)


def sampling_is_not(*names: str) -> Holds:
    """The condition that sigmas are drawn in another way."""
    return lambda config: config.objective.timestep_sampling not in names


def density_is_not(name: str) -> Holds:
    """The condition that another density of u is drawn from, or none."""
    return lambda config: config.objective.weighting_scheme != name or config.objective.timestep_sampling != "sigma"


def scheduler_is_not(name: str) -> Holds:
    """The condition that the learning rate takes another course."""
    return lambda config: config.optimizer.lr_scheduler != name


def optimizer_name(config: TrainConfig) -> str:
    """The optimiser in lower case, without module and separators."""
    return re.sub(r"[-_ ]", "", config.optimizer.optimizer_type.rpartition(".")[2].casefold())


def is_self_tuned(config: TrainConfig) -> bool:
    """Whether the optimiser finds its learning rate."""
    return optimizer_name(config).startswith(SELF_TUNED)


def nothing_learns(config: TrainConfig) -> bool:
    """Whether every learning rate is 0."""
    optimizer, network = config.optimizer, config.network
    others = [
        optimizer.text_encoder_lr if network.train_text_encoder else 0,
        optimizer.llm_adapter_lr if network.train_llm_adapter else 0,
        *network.network_reg_lrs.values(),
    ]
    return not optimizer.learning_rate and not any(others)


def high_rate(config: TrainConfig) -> Mapping[str, object]:
    """The learning rate, where it is above what the optimiser bears."""
    name, rate = optimizer_name(config), config.optimizer.learning_rate
    highest = next((top for kind, top in HIGHEST_RATES.items() if kind in name), HIGHEST_RATE)
    if is_self_tuned(config) or rate <= highest:
        return {}
    return {"name": config.optimizer.optimizer_type, "rate": f"{rate:g}", "highest": f"{highest:g}"}


def slow_average(config: TrainConfig) -> Mapping[str, object]:
    """How many steps a moving average looks back, where the run is not much longer."""
    decay, last = config.optimizer.ema_decay, steps(config)
    span = round(1 / (1 - decay)) if decay else 0
    return {"span": span, "last": last} if last and span > last / 2 else {}


OBJECTIVE = (
    Rule(
        ERROR,
        "SIGMA-RANGE",
        "objective.min_sigma",
        lambda c: c.objective.min_sigma >= c.objective.max_sigma,
        "min_sigma is not below max_sigma: no sigma is left to draw",
        "0 and 1 are all of them.",
    ),
    Rule(
        WARNING,
        "WEIGHT-UNBOUNDED",
        "objective.weighting_scheme",
        lambda c: c.objective.weighting_scheme == "sigma_sqrt" and c.objective.min_sigma == 0,
        "sigma_sqrt weighs the loss by 1 / sigma^2, which has no bound near 0",
        "Set min_sigma, such as 0.02, or weighting_scheme = uniform.",
    ),
    idle("objective.sigmoid_scale", sampling_is_not("sigmoid", "shift", "flux_shift"), "with this timestep_sampling"),
    idle(
        "objective.discrete_flow_shift",
        sampling_is_not("shift", "sigma"),
        "with this timestep_sampling",
        "Set timestep_sampling = shift, or leave it out.",
    ),
    Rule(
        WARNING,
        "CONFIG-NO-EFFECT",
        "objective.weighting_scheme",
        lambda c: c.objective.weighting_scheme in ("logit_normal", "mode") and c.objective.timestep_sampling != "sigma",
        "weighting_scheme has no effect without timestep_sampling = sigma: it is a density of sigmas",
        "Set timestep_sampling = sigma, or leave weighting_scheme out.",
    ),
    idle("objective.logit_mean", density_is_not("logit_normal"), "without the density logit_normal, of sigma"),
    idle("objective.logit_std", density_is_not("logit_normal"), "without the density logit_normal, of sigma"),
    idle("objective.mode_scale", density_is_not("mode"), "without the density mode, of sigma"),
    idle(
        "objective.huber_c",
        lambda c: c.objective.loss_type not in ("huber", "smooth_l1"),
        "without loss_type = huber or smooth_l1",
    ),
    idle("objective.mask_normalised", lambda c: not c.objective.masked_loss, "without masked_loss"),
    idle(
        "objective.mask_area_floor",
        lambda c: not (c.objective.masked_loss and c.objective.mask_normalised),
        "without masked_loss and mask_normalised",
    ),
)

OPTIMIZER = (
    Rule(
        ERROR,
        "RATE-ZERO",
        "optimizer.learning_rate",
        nothing_learns,
        "the learning rate is 0: the adapter would stay as it is",
        "1e-4 is usual for AdamW, 1 for Prodigy.",
    ),
    Rule(
        WARNING,
        "OPTIMIZER-RATE",
        "optimizer.learning_rate",
        high_rate,
        "a learning rate of {rate} is very high for {name}; above {highest} training tends to diverge",
        "1e-4 is usual for AdamW, a third of that for Lion; 1 is for Prodigy.",
    ),
    Rule(
        WARNING,
        "OPTIMIZER-RATE-SELF-TUNED",
        "optimizer.learning_rate",
        lambda c: is_self_tuned(c) and 0 < c.optimizer.learning_rate < 0.1,
        "this optimiser multiplies a rate that it finds itself; with this one it hardly learns",
        "Write learning_rate = 1.0.",
    ),
    Rule(
        ERROR,
        "OPTIMIZER-ONE-RATE",
        "optimizer.optimizer_type",
        lambda c: (
            is_self_tuned(c) and (given := [rate for rate in RATES if is_set(c, rate)]) and {"given": ", ".join(given)}
        ),
        "this optimiser finds one learning rate for all; {given} would give others",
        "Leave them out, or use AdamW.",
    ),
    Rule(
        ERROR,
        "OPTIMIZER-ARGUMENT",
        "optimizer.optimizer_args",
        lambda c: "lr" in c.optimizer.optimizer_args,
        "lr among optimizer_args is the learning_rate once more",
        "Leave it out, and set learning_rate.",
    ),
    Rule(
        ERROR,
        "OPTIMIZER-NEEDS-CUDA",
        "optimizer.optimizer_type",
        lambda c: c.model.device == "cpu" and optimizer_name(c).endswith("8bit"),
        "8-bit optimisers compute on CUDA devices alone, and device is cpu",
        "Take the optimiser of the same name without 8bit.",
    ),
    Rule(
        ERROR,
        "LORAPLUS-WITHOUT-EFFECT",
        "optimizer.loraplus_lr_ratio",
        lambda c: (
            c.optimizer.loraplus_lr_ratio is not None
            and c.network.algorithm not in WITH_UP_FACTORS
            and {"algorithm": c.network.algorithm}
        ),
        "loraplus_lr_ratio has no effect with {algorithm}, which has no up factors",
        f"Leave it out; it is for {', '.join(WITH_UP_FACTORS)}.",
    ),
    Rule(
        WARNING,
        "SCHEDULE-FREE",
        "optimizer.lr_scheduler",
        lambda c: "schedulefree" in optimizer_name(c) and c.optimizer.lr_scheduler != "constant",
        "a schedule-free optimiser wants a constant learning rate: its average stands for the schedule",
        "Set lr_scheduler = constant.",
    ),
    Rule(
        WARNING,
        "AVERAGE-SLOW",
        "optimizer.ema_decay",
        slow_average,
        "ema_decay averages over {span} steps, and the run has {last}: much of the beginning stays in the average",
        "Take 1 - 10 / steps or less, such as 0.99.",
    ),
    Rule(
        ERROR,
        "WARMUP-TOO-LONG",
        "optimizer.lr_warmup_steps",
        lambda c: (
            c.optimizer.lr_warmup_steps >= 1
            and (last := steps(c))
            and last <= c.optimizer.lr_warmup_steps
            and {"warmup": f"{c.optimizer.lr_warmup_steps:g}", "last": last}
        ),
        "the warm-up of {warmup} steps is not over when the run ends after {last}",
        "Write a share of the run, such as lr_warmup_steps = 0.05.",
    ),
    idle(
        "optimizer.lr_warmup_steps",
        lambda c: c.optimizer.lr_scheduler == "constant",
        "with lr_scheduler = constant",
        "Set lr_scheduler = constant_with_warmup, or leave it out.",
    ),
    idle("optimizer.lr_scheduler_num_cycles", scheduler_is_not("cosine_with_restarts"), "without cosine_with_restarts"),
    idle("optimizer.lr_scheduler_power", scheduler_is_not("polynomial"), "without lr_scheduler = polynomial"),
    idle("optimizer.lr_scheduler_min_lr_ratio", scheduler_is_not("cosine_with_min_lr"), "without cosine_with_min_lr"),
    idle("optimizer.text_encoder_lr", lambda c: not c.network.train_text_encoder, "without train_text_encoder"),
    idle("optimizer.llm_adapter_lr", lambda c: not c.network.train_llm_adapter, "without train_llm_adapter"),
    Rule(
        WARNING,
        "CONFIG-NO-EFFECT",
        "optimizer.learning_rate",
        lambda c: c.optimizer.optimizer_args.get("relative_step") is True,
        "learning_rate has no effect with relative_step = true: Adafactor makes its own from the number of steps",
        "Set relative_step = false among optimizer_args.",
    ),
)

TRAINING = (
    Rule(
        ERROR,
        "LENGTH-TWICE",
        "training.max_train_epochs",
        lambda c: c.training.max_train_steps and c.training.max_train_epochs,
        "max_train_steps and max_train_epochs are both given",
        "Leave one of them out. With kohya's scripts the epochs count.",
    ),
    Rule(
        ERROR,
        "COMPILE-OFFLOAD",
        "training.torch_compile",
        lambda c: c.training.torch_compile and c.training.offload_blocks,
        "torch_compile and offload_blocks exclude each other: compiled blocks cannot be moved between steps",
        "Leave torch_compile out where memory is short, else set offload_blocks = 0.",
    ),
)
LEARNING_RULES = (*OBJECTIVE, *OPTIMIZER, *TRAINING)
