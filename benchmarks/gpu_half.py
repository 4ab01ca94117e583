"""The scaled half product on a GPU: does it mean what the CPU says, and what does it cost?

Part 1 compares the CUDA back ends with the CPU's: the same elements overflow, and how many ulps lie between.
Part 2 times a transformer block of Anima's size (width 2048, 16 heads of 128, 4096 tokens) in plain fp16, in planned
and in current half, in bf16 and in fp32 without TF32: interleaved, medians, ratios to plain fp16, the memory peak.

    python benchmarks/gpu_half.py --json gpu_half.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finitune.models.anima.attention import apply_attention_function
from finitune.numerics import products
from finitune.numerics.attention import half_attention
from finitune.numerics.compare import relative_l2, ulp_histogram
from finitune.numerics.conv import ConvGeometry
from finitune.numerics.half import half_conv, half_linear
from finitune.numerics.products import exact_accumulation
from finitune.precision.apply import apply_current_scaling, apply_plan
from finitune.precision.plan import ComponentPlan, PlanLine

WIDTH, HEADS, TOKENS, TEXT_TOKENS, TEXT_WIDTH = 2048, 16, 4096, 512, 1024
SINGLE, HALF = torch.float32, torch.float16


def block() -> nn.Module:
    from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock

    torch.manual_seed(0)
    return CosmosTransformerBlock(HEADS, WIDTH // HEADS, TEXT_WIDTH, adaln_lora_dim=256).requires_grad_(False)


def inputs(dtype: torch.dtype, tokens: int, device: str) -> tuple[Tensor, ...]:
    """hidden states, text, embedded timestep, temb."""
    torch.manual_seed(1)
    shapes = (1, tokens, WIDTH), (1, TEXT_TOKENS, TEXT_WIDTH), (1, WIDTH), (1, 3 * WIDTH)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def planned(module: nn.Module) -> nn.Module:
    """The block by the plan of a model whose stream leaves fp16: the products that write to it write fp32."""
    lines = tuple(PlanLine(site, out="fp32") for site in ("attn1.to_out.0", "attn2.to_out.0", "ff.net.2"))
    plan = ComponentPlan(lines, casts=("norm1.norm", "norm2.norm", "norm3.norm"), border="fp32")
    return apply_plan(module, plan).module


def variants(device: str, tokens: int, stack: ExitStack) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Each precision's block, and inputs in the dtype of its residual stream."""
    rows: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {}
    for name, dtype in (("raw fp16", HALF), ("bf16", torch.bfloat16), ("fp32", SINGLE)):
        rows[name] = block().to(device, dtype), inputs(dtype, tokens, device)
    current = apply_current_scaling(block().to(device)).module
    stack.enter_context(apply_attention_function(current, partial(half_attention, exponent=None)))
    for name, module in (("planned half", planned(block().to(device))), ("current half", current)):
        rows[name] = module, inputs(SINGLE, tokens, device)
    return rows


def meaning(device: str) -> list[dict[str, Any]]:
    """Part 1: one row per case and output format; `same_overflow` must be true."""
    torch.manual_seed(2)
    x, weight = torch.randn(1024, 2048) * torch.logspace(0, 4.2, 2048), torch.randn(512, 2048) * 0.25
    image, kernel = torch.randn(1, 64, 64, 64) * 300, torch.randn(64, 64, 3, 3) * 4
    heads = [torch.randn(1, 4, 512, 64) for _ in range(3)]
    cases: dict[str, tuple[Callable[..., Tensor], list[Tensor], dict[str, Any]]] = {}
    for exponent in (0, 4, None):
        for dtype in (HALF, SINGLE):
            options = {"exponent": exponent, "out_dtype": dtype}
            cases[f"linear k={exponent} {dtype}"] = half_linear, [x, weight.half()], options
            cases[f"conv2d k={exponent} {dtype}"] = (
                half_conv,
                [image, kernel.half()],
                {**options, "geometry": ConvGeometry(padding=1)},
            )
    for exponent in (0, None):
        cases[f"attention k={exponent}"] = half_attention, heads, {"exponent": exponent}
    return [{"case": name, **compared(*case, device)} for name, case in cases.items()]


def compared(
    function: Callable[..., Tensor], args: list[Tensor], options: dict[str, Any], device: str
) -> dict[str, Any]:
    """CUDA against CPU: forward in fp16 ulps and overflow sets, gradients in relative L2."""
    results = []
    for where in ("cpu", device):
        leaves = [a.detach().to(where).requires_grad_() for a in args]
        out = function(*leaves, **options)
        finite = torch.isfinite(out)
        torch.manual_seed(3)
        grad = (torch.randn(out.shape) * 2.0**-12).to(where, out.dtype)
        results.append((out.detach().cpu(), finite.cpu(), [g.cpu() for g in torch.autograd.grad(out, leaves, grad)]))
    (cpu, cpu_finite, cpu_gradients), (cuda, cuda_finite, cuda_gradients) = results
    both = cpu_finite & cuda_finite
    pairs = [(a, b, torch.isfinite(a) & torch.isfinite(b)) for a, b in zip(cuda_gradients, cpu_gradients, strict=True)]
    return {
        "overflowed": int((~cpu_finite).sum()),
        "same_overflow": torch.equal(cpu_finite, cuda_finite),
        "relative_l2": relative_l2(cuda[both], cpu[both]),
        "ulps": {str(k): v for k, v in list(ulp_histogram(cuda[both], cpu[both], HALF).items())[:8]},
        "gradients": [relative_l2(a[fit], b[fit]) for a, b, fit in pairs],
    }


def costs(device: str, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Part 2: milliseconds forward, and with the gradient of the stream; memory above what weights and inputs take."""
    with ExitStack() as stack, exact_accumulation():
        return timed(variants(device, tokens, stack), rounds)


def timed(blocks: dict[str, tuple[nn.Module, tuple[Tensor, ...]]], rounds: int) -> dict[str, dict[str, float]]:
    """The figures of each block: error, memory, and interleaved times."""
    reference = run(*blocks["fp32"], False)
    rows: dict[str, dict[str, float]] = {}
    for name, (module, args) in blocks.items():
        out = run(module, args, False)
        row = rows[name] = {"relative_l2": relative_l2(out, reference), "finite": float(torch.isfinite(out).all())}
        for way, backward in (("forward", False), ("training", True)):
            run(module, args, backward)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(module, args, backward)
            row[f"{way}_peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    for way, backward in (("forward", False), ("training", True)):
        times: dict[str, list[float]] = {name: [] for name in blocks}
        for _ in range(rounds):
            for name, (module, args) in blocks.items():
                times[name].append(milliseconds(module, args, backward))
        for name, taken in times.items():
            rows[name][f"{way}_ms"] = statistics.median(taken)
            rows[name][f"{way}_ratio"] = statistics.median(taken) / statistics.median(times["raw fp16"])
    return rows


def run(module: nn.Module, args: tuple[Tensor, ...], backward: bool) -> Tensor:
    hidden, text, embedded, temb = args
    if not backward:
        with torch.no_grad():
            return module(hidden, text, embedded, temb)
    hidden = hidden.detach().requires_grad_()
    out = module(hidden, text, embedded, temb)
    out.sum().backward()
    return out.detach()


def milliseconds(module: nn.Module, args: tuple[Tensor, ...], backward: bool, repeats: int = 3) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run(module, args, backward)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_half needs a CUDA device; none is here, so nothing was measured.")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "fp32_output": products.can_write_fp32_product(device),
        "fp32_output_with_factor": products.can_scale_fp32_product(device),
        "tokens": options.tokens,
        "meaning": meaning(str(device)),
        "costs": costs(str(device), options.tokens, options.rounds),
    }
    print(f"{figures['device']}, torch {figures['torch']}, fp32 output {figures['fp32_output']}")
    for row in figures["meaning"]:
        gradients = " ".join(f"{g:.1e}" for g in row["gradients"])
        overflow = f"same overflow {row['same_overflow']!s:5} ({row['overflowed']})"
        print(f"{row['case']:32} {overflow} ulps {row['ulps']} gradients {gradients}")
    for name, row in figures["costs"].items():
        print(f"{name:14}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
