"""How a frozen model computes while adapters learn on it. No autocast, no loss scale: every cast stands in a module.

Half precision here means fp16 operands in every product, forward and backward, each with a power of two of its own;
fp32 between the products; fp32 masters, gradients and optimiser state for what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from finitune.errors import UsageError
from finitune.models.loaded import AttentionFunction
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
    root: nn.Module,
    precision: str,
    plan: ComponentPlan | None = None,
    *,
    attend: Callable[[nn.Module, AttentionFunction], AbstractContextManager[Any]] | None = None,
) -> Iterator[PrecisionComponent]:
    """`root` computing as ARITHMETIC says, its own modules and bits back at the end; adapters are attached inside.

    `attend` lets a function of ours compute the model's attentions (`LoadedModel.apply_attention`), which then go in
    half, too; without it they stay in fp32 between their products. planned-half needs a `plan`.
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
        if attend:
            stack.enter_context(attend(module, attention))
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
    model: Any = root
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing(lambda block, *args: recompute(block, *args, use_reentrant=False))


@dataclass
class BlockSwapper:
    """Blocks whose frozen weights lie in main memory and take turns in one place on a device, forward and backward.

    A block comes when it is called or when a gradient reaches its output, and stays until another one is needed: only
    then is its backward over for certain, checkpointed or not. The weights never change, so that nothing is copied when
    they leave. What is trained stays on the device.
    """

    device: torch.device
    held: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]]
    resident: nn.Module | None = None

    @classmethod
    @contextmanager
    def install(cls, blocks: Sequence[nn.Module], device: torch.device) -> Iterator[BlockSwapper]:
        """Move the blocks out, and back in at the end."""
        pin = device.type == "cuda"  # a copy from pageable memory would wait for the GPU
        frozen = {block: [one for one in block.parameters() if not one.requires_grad] for block in blocks}
        held = {
            block: [(one, one.data.cpu().pin_memory() if pin else one.data.cpu()) for one in parameters]
            for block, parameters in frozen.items()
        }
        swapper = cls(device, held)
        hooks = [
            hook
            for block in blocks
            for hook in (
                block.register_forward_pre_hook(lambda block, _: swapper.bring(block)),
                block.register_forward_hook(swapper.await_gradient),
            )
        ]
        for block in blocks:
            swapper.send_home(block)
        try:
            yield swapper
        finally:
            for hook in hooks:
                hook.remove()
            for block in blocks:
                swapper.move_in(block)

    def bring(self, block: nn.Module) -> None:
        """See that a block is on the device, and no other one of these."""
        if block is not self.resident:
            if self.resident is not None:
                self.send_home(self.resident)
            self.move_in(block)
            self.resident = block

    def await_gradient(self, block: nn.Module, _: object, output: object) -> None:
        """Bring a block back when its backward begins."""
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.bring(block))

    def move_in(self, block: nn.Module) -> None:
        for parameter, home in self.held[block]:
            parameter.data = home.to(self.device, non_blocking=True, copy=True)

    def send_home(self, block: nn.Module) -> None:
        """Leave the copy on the device to whoever needs the room."""
        for parameter, home in self.held[block]:
            parameter.data = home


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in their order: what stands in a list whose name ends with "blocks"."""
    return [module for name, module in root.named_modules() if name.rpartition(".")[0].endswith("blocks")]


@contextmanager
def offload_blocks(root: nn.Module, count: int, device: torch.device) -> Iterator[BlockSwapper]:
    """Hold so many blocks of `root` in main memory, all where it has fewer, with one of them on the device at a time.

    Raises UsageError (OFFLOAD-NEEDS-GPU) where the device is the main memory's own.
    """
    if device.type == "cpu":
        raise UsageError(
            "offload_blocks: there is no GPU to hold the blocks away from",
            code="OFFLOAD-NEEDS-GPU",
            subject="training.offload_blocks",
            remedy="Set offload_blocks = 0 when computing on the CPU.",
        )
    with BlockSwapper.install(find_blocks(root)[:count], device) as swapper:
        yield swapper
