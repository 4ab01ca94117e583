"""Dropout of adapters: its laws, for every algorithm, kind and shape of input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from finitune.adapters.core import SiteAdapter
from finitune.adapters.dropout import Dropout, draw_counted_bits
from finitune.adapters.layer import AdaptedLayer, attach_adapters
from finitune.adapters.weight import compute_adapted_weight
from finitune.errors import AdapterError
from tests.adapters_made import random_adapter
from tests.test_algebra import relative

OUT, INTO = 8, 12
KINDS = {
    "lora": {"name": "lora"},
    "dora": {"name": "lora", "magnitude": "out"},
    "dora-in": {"name": "lora", "magnitude": "in"},
    **{name: {"name": name} for name in ("loha", "lokr", "oft")},
}
P = {"network": Dropout(network=0.3), "rank": Dropout(rank=0.4), "both": Dropout(network=0.2, rank=0.3)}


def layer(kind: str, dropout: Dropout, strength: float = 1.0) -> AdaptedLayer:
    options = dict(KINDS[kind])
    weight, adapter = random_adapter(options.pop("name"), (OUT, INTO), 0, **options)
    base = nn.Linear(INTO, OUT).requires_grad_(False)
    base.weight.copy_(weight)
    torch.nn.init.zeros_(base.bias)
    return AdaptedLayer(base.train(), [(adapter, strength)], trainable=True, dropout=dropout)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def change(adapted: AdaptedLayer, x: Tensor) -> Tensor:
    return (adapted(x) - adapted.base(x)).detach()


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("kind", ["network", "rank", "module"])
def test_what_is_no_probability_is_refused(kind: str, share: float):
    with pytest.raises(AdapterError) as caught:
        Dropout(**{kind: share})
    assert caught.value.code == "ADAPTER-DROPOUT" and caught.value.subject == f"{kind}_dropout" and caught.value.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_none_and_evaluation_are_bit_for_bit_without_dropout_and_draw_nothing(kind: str):
    plain, x = layer(kind, Dropout()), noise(3, 50, INTO)
    wanted, state = plain(x), torch.get_rng_state()
    assert torch.equal(layer(kind, Dropout(0.0, 0.0, 0.0))(x), wanted)
    assert torch.equal(layer(kind, Dropout(0.5, 0.5, 0.5)).eval()(x), wanted)
    assert not Dropout() and Dropout(module=0.1)
    torch.set_rng_state(state)
    plain(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer(kind, Dropout(0.5, 0.5, 0.0))(x), wanted)


@pytest.mark.parametrize("dropped", P)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_many_draws_is_the_change(kind: str, dropped: str):
    torch.manual_seed(0)
    adapted, x = layer(kind, P[dropped], strength=0.7), noise(1, 3, INTO)
    wanted = change(layer(kind, Dropout(), strength=0.7), x)
    draws = torch.stack([change(adapted, x) for _ in range(3000)])
    spread = draws.std(0) / 3000**0.5
    assert relative(draws.mean(0), wanted) < 0.06
    assert float(((draws.mean(0) - wanted).abs() / (spread + 1e-6)).max()) < 5
    assert float(draws.std(0).min()) > 0


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 3), min_size=0, max_size=3), st.integers(1, 4), st.integers(0, 99))
def test_ranks_are_dropped_by_sample_whatever_lies_between(middle: list[int], samples: int, seed: int):
    """As a column space: what a sample gets lies in the span of the ranks that one mask left it."""
    torch.manual_seed(seed)
    x, rank = noise(samples, *middle, INTO).abs() + 0.1, 3
    down, up = torch.ones(rank, INTO), torch.eye(OUT)[:, :rank]  # output r is what rank r carries, and nothing else
    base = nn.Linear(INTO, OUT, bias=False).requires_grad_(False).train()
    adapter = SiteAdapter("lora", {"down": down, "up": up})
    found = change(AdaptedLayer(base, [(adapter, 1.0)], True, Dropout(rank=0.5)), x)[..., :rank]
    factors = (found / x.sum(-1, keepdim=True)).reshape(samples, -1, rank)
    assert torch.allclose(factors, factors[:, :1].expand_as(factors), atol=1e-4)
    assert all(abs(value) < 1e-4 or abs(value - 2) < 1e-4 for value in factors.flatten().tolist())


@pytest.mark.parametrize("shape", [(2, 6, 9, 8), (2, 6, 4, 9, 8)], ids=["conv2d", "conv3d"])
def test_ranks_of_a_convolution_lie_along_its_channels(shape: tuple[int, ...]):
    torch.manual_seed(0)
    base = {4: nn.Conv2d, 5: nn.Conv3d}[len(shape)](6, 8, 1, bias=False).requires_grad_(False).train()
    ones = [1] * (len(shape) - 2)
    adapter = SiteAdapter("lora", {"down": torch.ones(3, 6, *ones), "up": torch.eye(8)[:, :3].reshape(8, 3, *ones)})
    x = noise(*shape).abs() + 0.1
    found = change(AdaptedLayer(base, [(adapter, 1.0)], True, Dropout(rank=0.5)), x)[:, :3]
    factors = (found / x.sum(1, keepdim=True)).flatten(2)
    assert torch.allclose(factors, factors[..., :1].expand_as(factors), atol=1e-4)


def test_a_module_is_left_out_whole_with_its_probability():
    torch.manual_seed(0)
    adapted, x = layer("dora", Dropout(module=0.3)), noise(2, INTO)
    whole, base = layer("dora", Dropout())(x).detach(), adapted.base(x)
    left_out = 0
    for _ in range(1000):
        y = adapted(x).detach()
        assert torch.equal(y, base) or relative(y, whole) < 1e-6
        left_out += torch.equal(y, base)
    assert 0.25 < left_out / 1000 < 0.35


def test_gradients_flow_through_what_was_kept_alone():
    adapted, x = layer("lora", Dropout(rank=0.5)), noise(1, 7, INTO)
    seen: set[tuple[bool, bool]] = set()
    for seed in range(4):
        torch.manual_seed(seed)
        adapted.zero_grad()
        adapted(x).sum().backward()
        up, down = adapted.held[0].up.grad, adapted.held[0].down.grad
        seen |= {(bool(up[:, r].any()), bool(down[r].any())) for r in range(up.shape[1])}
    assert seen == {(True, True), (False, False)}
    torch.manual_seed(0)
    skipped = layer("lora", Dropout(module=0.999))
    y = skipped(x.requires_grad_())
    y.sum().backward()
    assert skipped.held[0].up.grad is None and relative(x.grad, skipped.base.weight.sum(0).expand_as(x)) < 1e-6
    torch.manual_seed(2)
    outputs = layer("loha", Dropout(rank=0.5))
    outputs(x).sum().backward()
    rows = outputs.held[0].w1_a.grad.any(1).tolist()
    assert True in rows and False in rows


def test_the_same_seed_draws_the_same_and_every_call_anew():
    adapted, x = layer("lora", Dropout(0.3, 0.3, 0.1)), noise(3, 5, INTO)
    torch.manual_seed(4)
    first, second = adapted(x), adapted(x)
    torch.manual_seed(4)
    assert torch.equal(adapted(x), first) and not torch.equal(first, second)


def test_attach_hands_it_on_and_the_mode_of_the_model_decides():
    model, x = nn.Sequential(nn.Linear(INTO, OUT)).requires_grad_(False), noise(4, INTO)
    _, adapter = random_adapter("lora", (OUT, INTO), 0)
    attached = attach_adapters(model, {"0": adapter}, trainable=True, dropout=Dropout(network=0.5))
    model.eval()
    merged = nn.functional.linear(x, compute_adapted_weight(model[0].weight, adapter), model[0].bias)
    assert relative(model(x), merged) < 1e-5
    model.train()
    assert relative(model(x), merged) > 0.01
    assert attached.layers["0"].held.dropping == Dropout(network=0.5)


def test_seeds_make_the_masks_of_a_sample_whatever_it_is_with():
    seeds = torch.tensor([11, 22, 33])
    for kind in KINDS:
        plain, x = layer(kind, Dropout(0.3, 0.3, 0.3)), noise(6, 5, INTO)  # two rows of each sample
        state = torch.get_rng_state()
        plain.held.dropout = Dropout(0.3, 0.3, 0.3, seeds)
        whole = plain(x)
        assert torch.equal(plain(x), whole) and torch.equal(torch.get_rng_state(), state)
        plain.held.dropout = Dropout(0.3, 0.3, 0.3, seeds[1:])
        assert relative(plain(x[2:]), whole[2:]) < 1e-6
        plain.held.dropout = Dropout(0.3, 0.3, 0.3, seeds + 1000)
        assert not torch.allclose(plain(x), whole)


@pytest.mark.parametrize("dropped", [*P, "module"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_over_many_seeds_is_the_change(kind: str, dropped: str):
    dropout = P.get(dropped, Dropout(module=0.4))
    adapted, x = layer(kind, dropout, strength=0.7), noise(1, 3, INTO).expand(3000, -1, -1)
    adapted.held.dropout = replace(dropout, seeds=torch.randint(1 << 62, (3000,), generator=torch.manual_seed(0)))
    draws, wanted = change(adapted, x), change(layer(kind, Dropout(), strength=0.7), x[:1])[0]
    spread = draws.std(0) / 3000**0.5
    assert float(((draws.mean(0) - wanted * (1 - dropout.module)).abs() / (spread + 1e-6)).max()) < 5
    assert float(draws.std(0).min()) > 0


def test_counted_bits_are_splitmix64():
    """The first numbers of the reference implementation (Vigna, splitmix64.c) for the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert draw_counted_bits(torch.tensor([1234567]), 5).tolist() == [[number >> 11 for number in known]]


def test_rows_that_belong_to_no_sample_share_a_mask_of_the_batch():
    adapted, x = layer("lora", Dropout(0.3, 0.3, 0.3, torch.tensor([5, 6]))), noise(3, 4, INTO)
    assert adapted(x).shape == (3, 4, OUT) and torch.equal(adapted(x), adapted(x))
