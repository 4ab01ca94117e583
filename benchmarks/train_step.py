"""What does a training step of an adapter cost, over forward and backward of the frozen base alone?

A Cosmos stack of diffusers on a CPU in fp32, adapters of rank 16 on the ten Linears of every block that kohya trains in
Anima. An adapter's step is forward, backward and AdamW; the base's is forward and backward to its input. All rows run
in turn in one process, round after round; a row's figure is the median of its ratios to the base in the same round.
Ours, PEFT's, and LyCORIS's (which rebuilds the weight by default, and adds the change with `bypass`).

Run: python benchmarks/train_step.py [--rounds N] [--only ours-lora peft-lora] [--threads N] [--cpu-time]
     [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finitune.adapters import Target
from finitune.adapters.layer import attach_adapters
from finitune.adapters.new import create_adapter

RANK, LAYERS, HEADS, HEAD_DIM, BATCH, TEXT = 16, 6, 8, 64, 4, 1024
TARGETS = tuple(
    [f"{attention}.{part}" for attention in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")]
    + ["ff.net.0.proj", "ff.net.2"]
)
BARS = {"ours-lora": 1.15, "ours-lokr": 1.35, "ours-dora": 1.35, "ours-loha": 1.8}
KINDS = ("lora", "lokr", "dora", "loha")

Step = Callable[[], float]
Clock = Callable[[], float]


def cosmos() -> nn.Module:
    """The stack, 512 wide, with fixed random weights, frozen, in training mode."""
    from diffusers import CosmosTransformer3DModel

    torch.manual_seed(0)
    model = CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=LAYERS,
        text_embed_dim=TEXT,
        adaln_lora_dim=128,
        extra_pos_embed_type=None,
        rope_scale=(1.0, 4.0, 4.0),
    )
    return model.requires_grad_(False).train()


def sites(model: nn.Module) -> dict[str, nn.Module]:
    """The Linears that are trained, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith(TARGETS)}


def inputs(tokens: int) -> dict[str, Any]:
    """Fixed noise in the shapes of a batch of 256 x 256 pictures."""
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(BATCH, 16, 1, 32, 32, generator=generator),
        "timestep": torch.linspace(0.1, 0.9, BATCH),
        "encoder_hidden_states": torch.randn(BATCH, tokens, TEXT, generator=generator),
        "padding_mask": torch.zeros(1, 1, 256, 256),
        "return_dict": False,
    }


def squared(model: nn.Module, data: dict[str, Any]) -> Tensor:
    """A loss."""
    return model(**data)[0].square().mean()


def base_step(data: dict[str, Any]) -> Step:
    """Forward, and backward to the input."""
    model, own = cosmos(), {**data, "hidden_states": data["hidden_states"].clone().requires_grad_()}

    def step() -> float:
        own["hidden_states"].grad = None
        loss = squared(model, own)
        loss.backward()
        return float(loss.detach())

    return step


def trained_step(model: nn.Module, parameters: Iterable[nn.Parameter], data: dict[str, Any]) -> Step:
    """Forward, backward and the optimiser's step."""
    optimiser = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-4)

    def step() -> float:
        optimiser.zero_grad()
        loss = squared(model, data)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def ours(kind: str, data: dict[str, Any]) -> Step:
    """Our adapters, attached."""
    model, generator = cosmos(), torch.Generator().manual_seed(0)
    algorithm, dora = ("lora", True) if kind == "dora" else (kind, False)
    made = {
        name: create_adapter(Target(layer.weight, RANK, alpha=RANK), algorithm, generator, dora)  # type: ignore[arg-type]
        for name, layer in sites(model).items()
    }
    return trained_step(model, attach_adapters(model, made, trainable=True).parameters(), data)


def peft(kind: str, data: dict[str, Any]) -> Step:
    """PEFT's, injected."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model

    model = cosmos()
    targets = list(sites(model))
    config = {
        "lora": lambda: LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets),
        "dora": lambda: LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, use_dora=True),
        "lokr": lambda: LoKrConfig(r=RANK, alpha=RANK, target_modules=targets),
        "loha": lambda: LoHaConfig(r=RANK, alpha=RANK, target_modules=targets),
    }[kind]()
    injected = inject_adapter_in_model(config, model)
    return trained_step(injected, injected.parameters(), data)


def lycoris(kind: str, data: dict[str, Any], bypass: bool = False) -> Step:
    """LyCORIS's modules, each in the place of its layer's forward, as `apply_to` of the library does."""
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    model = cosmos()
    made = {"lora": LoConModule, "dora": LoConModule, "loha": LohaModule, "lokr": LokrModule}[kind]
    options = {"lora_dim": RANK, "alpha": RANK, "weight_decompose": kind == "dora", "bypass_mode": bypass}
    modules = nn.ModuleList()
    for name, layer in sites(model).items():
        module = made(name.replace(".", "_"), layer, 1.0, **options)
        module.apply_to()
        modules.append(module.train())
    return trained_step(model, modules.parameters(), data)


def rows() -> dict[str, Callable[[dict[str, Any]], Step]]:
    """Every row, by name. LyCORIS forgets a magnitude in its bypass, so there is no such DoRA."""
    made: dict[str, Callable[[dict[str, Any]], Step]] = {}
    for kind in KINDS:
        made[f"ours-{kind}"] = functools.partial(ours, kind)
        made[f"peft-{kind}"] = functools.partial(peft, kind)
        made[f"lycoris-{kind}"] = functools.partial(lycoris, kind)
        if kind != "dora":
            made[f"lycoris-{kind}-bypass"] = functools.partial(lycoris, kind, bypass=True)
    return made


def seconds(step: Step, clock: Clock) -> float:
    start = clock()
    step()
    return clock() - start


def measured(steps: dict[str, Step], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """The seconds of every row in every round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            spent = seconds(step, clock)
            if number:
                times[name].append(spent)
    return times


def figures(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and quartiles of each row's ratios to the base of the same round, and its median seconds."""
    found = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["base"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        found[name] = {"ratio": middle, "low": low, "high": high, "seconds": statistics.median(own)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(rows()), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of the text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="the process's own time, for a machine in use")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    data = inputs(options.tokens)
    chosen = {name: row for name, row in rows().items() if not options.only or name in options.only}
    steps = {"base": base_step(data), **{name: row(copy.copy(data)) for name, row in chosen.items()}}
    found = figures(measured(steps, options.rounds, time.process_time if options.cpu_time else time.perf_counter))
    print(f"{'row':22s}   ratio  quartiles      seconds   bar")
    for name, row in found.items():
        bar = f"{BARS[name]:5.2f}" if name in BARS else ""
        print(f"{name:22s} {row['ratio']:7.3f}  {row['low']:.3f}-{row['high']:.3f} {row['seconds']:10.3f} {bar}")
    if options.json:
        run = {"rounds": options.rounds, "threads": options.threads, "tokens": options.tokens, "rows": found}
        options.json.write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
