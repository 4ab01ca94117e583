"""How a frozen model computes while adapters learn on it. No autocast, no loss scale: every cast stands in a module.

Half precision here means fp16 operands in every product, forward and backward, each with a power of two of its own;
fp32 between the products; fp32 masters, gradients and optimiser state for what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finitune.errors import UsageError
from finitune.models.anima.attention import apply_attention_function
from finitune.numerics.attention import half_attention
from finitune.numerics.products import exact_accumulation
from finitune.precision.apply import (
    apply_current_scaling,
    apply_training_plan,
    enable_measured_scales,
    hold_parameters_in,
)
from finitune.precision.plan import ComponentPlan

DESCRIPTION_BY_PRECISION = {
    "planned-half": "fp16 products with the plan's powers of two forward and measured ones backward, fp32 between them",
    "current-half": "fp16 products with measured powers of two, forward and backward, fp32 between them",
    "bf16": "the frozen model in bfloat16, the adapter in fp32",
    "fp32": "everything in fp32",
}
COMPUTE_DTYPE_BY_PRECISION = {
    "planned-half": torch.float16,
    "current-half": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
STORAGE_DTYPE_BY_OPTION = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
_CASTING_SKIP_PATTERNS = (r"norm", r"embed", r"held")


class SwitchableHalfAttention:
    """Attention in half whose exponents are the plan's until they are measured."""

    def __init__(self, exponent: int | None):
        self.exponent = exponent

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return half_attention(*args, **kwargs, exponent=self.exponent)


@dataclass(frozen=True)
class PrecisionComponent:
    """A component computing in a precision; `measure` gives up the plan's constants and names their sites."""

    module: nn.Module
    precision: str
    measure: Callable[[], list[str]]


@contextmanager
def apply_training_precision(
    root: nn.Module, precision: str, plan: ComponentPlan | None = None, *, attends: bool = True
) -> Iterator[PrecisionComponent]:
    """`root` computing as ARITHMETIC says, its own modules and bits back at the end; adapters are attached inside.

    `attends`: the model's attentions are of Anima's kinds and go in half, too; others (Qwen3's) stay in fp32 between
    their products. planned-half needs a `plan`.
    """
    with ExitStack() as stack:
        stack.enter_context(exact_accumulation())
        if precision in ("fp32", "bf16"):
            module = stack.enter_context(hold_parameters_in(root, COMPUTE_DTYPE_BY_PRECISION[precision]))
            yield PrecisionComponent(module, precision, list)
            return
        if precision == "planned-half":
            if plan is None:
                raise ValueError("planned-half needs a plan")
            module = stack.enter_context(apply_training_plan(root, plan))
        else:
            module = stack.enter_context(apply_current_scaling(root))
        attention = SwitchableHalfAttention(0 if precision == "planned-half" else None)
        if attends:
            stack.enter_context(apply_attention_function(module, attention))
        yield PrecisionComponent(module, precision, partial(give_up_plan, module, attention))


def give_up_plan(root: nn.Module, attention: SwitchableHalfAttention) -> list[str]:
    """Measure every scale from now on; the sites that had a constant before."""
    attention.exponent = None
    return enable_measured_scales(root)


def store_narrow(root: nn.Module, storage: str, compute: torch.dtype) -> None:
    """Hold the frozen weights of `root` in a narrower dtype, widened in each call: diffusers' layerwise casting.

    Norms, embeddings and adapters stay as they are.
    """
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(
        root,
        storage_dtype=STORAGE_DTYPE_BY_OPTION[storage],
        compute_dtype=compute,
        skip_modules_pattern=_CASTING_SKIP_PATTERNS,
        non_blocking=False,
    )


def enable_block_checkpointing(root: nn.Module) -> None:
    """Keep no activations inside of the blocks of a diffusers or transformers model."""
    from torch.utils.checkpoint import checkpoint as recompute

    model: Any = root
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing(lambda block, *args: recompute(block, *args, use_reentrant=False))


def apply_block_offloading(root: nn.Module, device: torch.device) -> None:
    """Hold the blocks of a diffusers model in main memory, one at a time on the device (diffusers' group offloading).

    Raises UsageError (OFFLOAD-NEEDS-GPU) where the device is the main memory's own.
    """
    if device.type == "cpu":
        raise UsageError(
            "offload_blocks: there is no GPU to hold the blocks away from",
            code="OFFLOAD-NEEDS-GPU",
            subject="training.offload_blocks",
            remedy="Set offload_blocks = 0 when computing on the CPU.",
        )
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        root, onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=False
    )


def compile_blocks(root: nn.Module) -> int:
    """Compile every block of a diffusers transformer, in place; how many there were."""
    blocks = [
        m for name, m in root.named_modules() if name.rpartition(".")[0].endswith(("transformer_blocks", "blocks"))
    ]
    for block in blocks:
        block.compile()
    return len(blocks)
