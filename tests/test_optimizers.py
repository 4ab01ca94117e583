"""Every optimiser that is offered learns, stays finite, follows its rate, and is resumed to the same bits."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from finitune.config.schema import OptimizerSection
from finitune.errors import UsageError
from finitune.training.checkpoint import decode_state_tree, encode_state_tree, get_random_states, restore_random_states
from finitune.training.optimizer_classes import (
    find_optimizer,
    iterate_optimizer_names,
    list_pytorch_optimizer_classes,
    normalize_optimizer_name,
    read_optimizer_facts,
)
from finitune.training.optimizers import OptimizerHandle, build_param_groups, make_optimizer, set_learning_rates

FACTS = read_optimizer_facts()
REFUSED = {name: why for why, names in FACTS["refused"].items() for name in names}

NEEDS_CUDA = {
    *FACTS["bitsandbytes"],
    *(name for name, known in FACTS["kohya"].items() if known["library"] == "bitsandbytes"),
}
NAMES = [name for name in iterate_optimizer_names() if name not in NEEDS_CUDA]
MATRICES_ONLY = {"Muon", "SpectralSphere"}
RATES = {"AdaTAM": 1e-3, "AccSGD": 0.1, "Adadelta": 1.0, "MSVAG": 0.1}
BEFORE, AFTER = 3, 40


def problem(matrices_only: bool) -> tuple[dict[str, torch.nn.Parameter], Any]:
    """A LoRA whose up factor is zero, a magnitude and a small convolution; and a quadratic in what they make."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    tensors = {"a.down": normal(4, 12) / 12**0.5, "a.up": torch.zeros(10, 4)}
    target = normal(10, 3) @ normal(3, 12) / 12**0.5
    kernel = normal(2, 3, 3, 3) / 10
    if not matrices_only:
        tensors |= {"a.magnitude": torch.ones(10), "b.down": normal(2, 3, 3, 3) / 10}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}

    def loss() -> Tensor:
        delta = parameters["a.up"] @ parameters["a.down"]
        if matrices_only:
            return (delta - target).square().mean()
        delta = delta * parameters["a.magnitude"][:, None]
        return (delta - target).square().mean() + (parameters["b.down"] - kernel).square().mean()

    return parameters, loss


def settings_for(name: str, **more: Any) -> OptimizerSection:
    rate = 1.0 if find_optimizer(name).cls.__name__ in FACTS["self_tuning"] else RATES.get(name, 1e-2)
    return OptimizerSection(optimizer_type=name, learning_rate=rate, **more)


def made(name: str, parameters: dict[str, torch.nn.Parameter]) -> OptimizerHandle:
    settings = settings_for(name)
    return make_optimizer(settings, build_param_groups(parameters.items(), settings, lambda _: None))


def take_steps(optimizer: OptimizerHandle, loss: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def values(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_every_offered_optimizer_learns_and_resumes(name: str):
    """Three steps are finite, the loss falls, and a second optimiser goes on from a state to the same bits."""
    torch.manual_seed(0)
    parameters, loss = problem(name in MATRICES_ONLY)
    optimizer = made(name, parameters)
    first = take_steps(optimizer, loss, BEFORE)[0]
    assert all(bool(p.isfinite().all()) for p in parameters.values())
    tensors: dict[str, Tensor] = {}
    form = json.dumps(encode_state_tree(optimizer.state_dict(), "optimizer", tensors), allow_nan=False)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    assert not {t.dtype for t in tensors.values()} & {torch.float16, torch.bfloat16}
    middle, chance = values(parameters), get_random_states()
    take_steps(optimizer, loss, AFTER)
    with optimizer.apply_eval_mode(), torch.no_grad():
        assert float(loss()) < first

    again, loss_again = problem(name in MATRICES_ONLY)
    resumed = made(name, again)
    with torch.no_grad():
        for key, value in middle.items():
            again[key].copy_(value)
    resumed.load_state_dict(decode_state_tree(json.loads(form), tensors))
    restore_random_states(chance)  # Kron draws from numpy, Alice from torch
    take_steps(resumed, loss_again, AFTER)
    assert same(values(again), values(parameters))


@pytest.mark.parametrize("name", NAMES)
def test_every_offered_optimizer_stands_still_at_rate_zero(name: str):
    """The first update of a warm-up has rate 0."""
    parameters, loss = problem(name in MATRICES_ONLY)
    optimizer = made(name, parameters)
    before = values(parameters)
    set_learning_rates(optimizer, 0.0)
    take_steps(optimizer, loss, 1)
    assert same(before, values(parameters))


def test_every_name_of_the_library_is_offered_or_refused_with_a_reason():
    names = [*NAMES, *NEEDS_CUDA, *REFUSED]
    lost = [
        name
        for name in list_pytorch_optimizer_classes()
        if normalize_optimizer_name(name) not in map(normalize_optimizer_name, names)
    ]
    assert lost == []
    assert len(NAMES) > 75
    for name in REFUSED:
        with pytest.raises(UsageError) as caught:
            find_optimizer(name)
        assert caught.value.code == "OPTIMIZER-NOT-OFFERED"
        assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", torch.optim.AdamW),
        ("torch.optim.AdamW", torch.optim.AdamW),
        ("prodigyopt.Prodigy", "Prodigy"),
        ("AdaFactor", "Adafactor"),
        ("adafactor", "Adafactor"),
        ("LION", "Lion"),
        ("DAdaptation", "DAdaptAdam"),
        ("AdamWScheduleFree", "ScheduleFreeAdamW"),
        ("schedule_free_adamw", "ScheduleFreeAdamW"),
        ("SGDNesterov", torch.optim.SGD),
        ("CAME", "CAME"),
    ],
)
def test_names_are_found_in_any_case(name: str, expected: Any):
    cls = find_optimizer(name).cls
    assert cls is expected or cls.__name__ == expected


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("AdammW", "OPTIMIZER-UNKNOWN", "Did you mean 'AdamW'?"),
        ("os.system", "OPTIMIZER-UNKNOWN", "not imported"),
        ("LBFGS", "OPTIMIZER-NOT-OFFERED", "evaluates the loss again"),
    ],
)
def test_other_names_are_refused(name: str, code: str, says: str):
    with pytest.raises(UsageError) as caught:
        find_optimizer(name)
    assert caught.value.code == code
    assert says in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_eight_bits_need_a_gpu():
    for name in ("AdamW8bit", "PagedAdamW8bit", "lion8bit", "SGDNesterov8bit"):
        with pytest.raises(UsageError) as caught:
            find_optimizer(name)
        assert caught.value.code == "OPTIMIZER-NEEDS-CUDA"


def group(**more: Any) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "lr": 1e-4, "base_lr": 1e-4, "name": "all"} | more]


@pytest.mark.parametrize(
    ("name", "given", "key", "value"),
    [
        ("AdamW", {"weight_decay": "0.1"}, "weight_decay", 0.1),
        ("AdamW", {"betas": "0.9,0.99"}, "betas", (0.9, 0.99)),
        ("AdamW", {"betas": [0.9, 0.99]}, "betas", (0.9, 0.99)),
        ("AdamW", {"amsgrad": "true"}, "amsgrad", True),
        ("AdamW", {"eps": "1e-6"}, "eps", 1e-6),
        ("AdamW", {"foreach": "None"}, "foreach", None),
        ("CAME", {"betas": "(0.9, 0.99, 0.999)"}, "betas", (0.9, 0.99, 0.999)),
        ("Prodigy", {"decouple": "True", "d_coef": 2}, "d_coef", 2.0),
        ("Adafactor", {"eps": "1e-30, 1e-3", "relative_step": "False"}, "eps", (1e-30, 1e-3)),
        ("Kron", {"mu_dtype": "fp32"}, "mu_dtype", torch.float32),
        ("SGDNesterov", {"momentum": 0.8}, "momentum", 0.8),
    ],
)
def test_arguments_are_typed(name: str, given: dict[str, Any], key: str, value: object):
    optimizer = make_optimizer(settings_for(name, optimizer_args=given), group())
    assert optimizer.param_groups[0][key] == value
    assert type(optimizer.param_groups[0][key]) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("AdamW", {"weight_decy": 0.1}, "Did you mean 'weight_decay'?"),
        ("AdamW", {"weight_decay": "much"}, "should be float"),
        ("AdamW", {"weight_decay": True}, "should be float"),
        ("AdamW", {"weight_decay": float("nan")}, "is not a number"),
        ("AdamW", {"betas": "0.9"}, "should be tuple"),
        ("AdamW", {"betas": "0.9,1.5"}, "refuses"),
        ("AdamW", {"lr": 1e-3}, "learning_rate"),
        ("AdamW", {"maximize": True}, "raise the loss"),
        ("CAME", {"kwargs": 1}, "no argument"),
        ("Adafactor", {"relative_step": "True"}, "schedule"),
    ],
)
def test_wrong_arguments_are_refused(name: str, given: dict[str, Any], says: str):
    with pytest.raises(UsageError) as caught:
        make_optimizer(settings_for(name, optimizer_args=given), group())
    assert caught.value.code == "OPTIMIZER-ARGUMENT"
    assert says in str(caught.value)


def test_state_in_half_precision_is_refused():
    with pytest.raises(UsageError) as caught:
        make_optimizer(settings_for("Kron", optimizer_args={"mu_dtype": "bf16"}), group())
    assert caught.value.code == "OPTIMIZER-HALF-STATE"
    half = [torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))]
    with pytest.raises(UsageError) as caught:
        make_optimizer(OptimizerSection(), group(params=half))
    assert caught.value.code == "OPTIMIZER-HALF-STATE"


def test_half_parameters_give_nan_at_the_first_step():
    """What the refusal is for: fp16's epsilon is zero, and a down factor's first gradient, too."""
    parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW([parameter], foreach=False).step()
    assert parameter.isnan().all()


def test_groups_have_the_rates_that_were_asked_for():
    named = [(n, torch.nn.Parameter(torch.zeros(1))) for n in ("a.up", "a.down", "text.a.up", "b.up", "b.down")]
    settings = OptimizerSection(learning_rate=1e-4, loraplus_lr_ratio=16)
    rates = {"text.a.up": 1e-5, "b.up": 0.0, "b.down": 0.0}
    groups = build_param_groups(named, settings, rates.get)
    assert [(g["name"], g["base_lr"], len(g["params"])) for g in groups] == [
        ("0.0001 x 16 up", 1e-4 * 16, 1),
        ("0.0001", 1e-4, 1),
        ("1e-05 x 16 up", 1e-5 * 16, 1),
    ]
    assert groups[0]["params"][0] is named[0][1]


@pytest.mark.parametrize(
    ("algorithm", "up"), [("lora", {"up"}), ("loha", {"w2_a"}), ("lokr", {"w1", "w1_a"}), ("oft", None)]
)
def test_lora_plus_takes_the_up_factors_of_each_algorithm(algorithm: str, up: set[str] | None):
    roles = ("up", "down", "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "blocks")
    named = {role: torch.nn.Parameter(torch.zeros(1)) for role in roles}
    settings = OptimizerSection(loraplus_lr_ratio=4)
    of = [(f"site.{role}", parameter) for role, parameter in named.items()]
    if up is None:
        with pytest.raises(UsageError, match="no up factors"):
            build_param_groups(of, settings, lambda _: None, algorithm)
        return
    (fast,) = [g for g in build_param_groups(of, settings, lambda _: None, algorithm) if g["name"].endswith("up")]
    assert {role for role, parameter in named.items() if any(parameter is p for p in fast["params"])} == up


def test_one_rate_for_optimizers_that_find_it():
    with pytest.raises(UsageError) as caught:
        make_optimizer(settings_for("Prodigy"), group() + group(base_lr=1e-5))
    assert caught.value.code == "OPTIMIZER-ONE-RATE"
    with pytest.raises(UsageError) as caught:
        make_optimizer(OptimizerSection(), [])
    assert caught.value.code == "OPTIMIZER-NOTHING-TO-TRAIN"


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SPlus", "AdamW"])
def test_evaluating_gives_back_the_same_bits(name: str):
    """A run that is measured after each step is the run that is not."""
    (watched, loss), (alone, loss_alone) = problem(False), problem(False)
    one, two = made(name, watched), made(name, alone)
    for _ in range(6):
        take_steps(one, loss, 1)
        take_steps(two, loss_alone, 1)
        training = values(watched)
        with one.apply_eval_mode():
            shown = values(watched)
        assert same(training, values(watched))
    assert same(values(watched), values(alone))
    assert same(training, shown) == (name == "AdamW")


def test_a_state_does_not_bring_its_learning_rates():
    parameters, loss = problem(False)
    optimizer = made("AdamW", parameters)
    take_steps(optimizer, loss, 2)
    state = optimizer.state_dict()
    settings = OptimizerSection(learning_rate=1e-5)
    slower = make_optimizer(settings, build_param_groups(parameters.items(), settings, lambda _: None))
    slower.load_state_dict(state)
    assert [(g["lr"], g["base_lr"]) for g in slower.param_groups] == [(1e-5, 1e-5)]
    for parameter in parameters.values():
        assert torch.equal(slower.base.state[parameter]["exp_avg"], optimizer.base.state[parameter]["exp_avg"])


def test_the_loss_of_adamw_falls_steadily():
    parameters, loss = problem(True)
    losses = take_steps(made("AdamW", parameters), loss, 30)
    assert all(later < earlier for earlier, later in pairwise(losses))
