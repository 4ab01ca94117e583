"""How far from fp64 are output and gradients, in current half and in bf16, as the residual stream grows?

The trained denoiser of pico-anima, its stream multiplied by 2**k (the same function), one rectified-flow loss on fixed
noise; gradients of all weights. Run: python benchmarks/half_accuracy.py [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finitune.models.anima.attention import apply_attention_function
from finitune.models.anima.load import load_folder
from finitune.models.pico import STREAM_EXPONENT, get_pico_folder, scale_stream_
from finitune.numerics import simulate
from finitune.numerics.attention import half_attention
from finitune.numerics.compare import relative_l2
from finitune.precision.apply import apply_current_scaling

EXPONENTS = (0, 4, 8, 12, 16, 20, 24, 30)


def batch(size: int = 4) -> dict[str, Tensor]:
    """Fixed noise, latents, context and times, fp64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sigma = torch.linspace(0.1, 0.95, size, dtype=torch.float64)
    x0, noise = normal(size, 16, 1, 8, 8), normal(size, 16, 1, 8, 8)
    s = sigma.view(-1, 1, 1, 1, 1)
    return {"x": (1 - s) * x0 + s * noise, "target": noise - x0, "sigma": sigma, "context": normal(size, 32, 128)}


def loss_and_gradients(
    model: nn.Module, data: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output in fp64 and the gradient of the squared error for every weight."""
    data = {name: tensor.to(dtype) for name, tensor in data.items()}
    mask = data["x"].new_zeros(1, 1, 64, 64)
    output = model(data["x"], data["sigma"], data["context"], padding_mask=mask, return_dict=False)[0]
    loss = (output.double() - data["target"].double()).square().mean()
    loss.backward()
    return output.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def current_half(model: nn.Module, data: dict[str, Tensor]) -> Any:
    """fp16 products with fp32 masters, every product of forward and backward scaled by its own power of two."""
    applied = apply_current_scaling(model, masters=True)
    with apply_attention_function(applied.module, partial(half_attention, exponent=None)):
        return loss_and_gradients(applied.module, data, torch.float32)


def bf16(model: nn.Module, data: dict[str, Tensor]) -> Any:
    """Weights and activations in bfloat16, products accumulated in fp32."""
    with simulate.half():
        return loss_and_gradients(model.bfloat16(), data, torch.bfloat16)


def errors(run: Callable[..., Any], model: nn.Module, data: dict[str, Tensor], reference: Any) -> dict[str, float]:
    """Relative L2 of output and of all gradients together, each weight's gradient taken at unit norm."""
    output, gradients = run(copy.deepcopy(model), data)
    expected_output, expected = reference
    assert gradients.keys() == expected.keys(), sorted(gradients.keys() ^ expected.keys())[:4]
    ours = torch.cat([(gradients[n] / expected[n].norm()).flatten() for n in expected])
    theirs = torch.cat([(expected[n] / expected[n].norm()).flatten() for n in expected])
    return {"output": relative_l2(output, expected_output), "gradient": relative_l2(ours, theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformer = load_folder(get_pico_folder()).transformer.float()
    scale_stream_(transformer, -STREAM_EXPONENT)
    data, rows = batch(), []
    print("stream   output: half      bf16      gradient: half      bf16   bf16 / half")
    for exponent in EXPONENTS:
        model = copy.deepcopy(transformer)
        scale_stream_(model, exponent)
        reference = loss_and_gradients(copy.deepcopy(model).double(), data, torch.float64)
        half, bfloat = errors(current_half, model, data, reference), errors(bf16, model, data, reference)
        rows.append({"exponent": exponent, "half": half, "bf16": bfloat})
        print(
            f"2^{exponent:<6d} {half['output']:12.2e} {bfloat['output']:9.2e}"
            f" {half['gradient']:19.2e} {bfloat['gradient']:9.2e} {bfloat['gradient'] / half['gradient']:10.1f}x"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
