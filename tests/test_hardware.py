"""The dtype advice, device by device, and the facts that it rests on. No test needs a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.errors import UsageError
from finitune.machine import hardware
from finitune.machine.hardware import (
    WHEEL_REMEDY_BY_CAPABILITY,
    DeviceFacts,
    advise,
    has_kernels,
    read_device_facts,
    read_device_families,
)

CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # of torch 2.11 and later, and cu130's
EVERYTHING = (*CU126, "sm_87", "sm_100", "sm_120")


def nvidia(name: str, capability: tuple[int, int] | None, arch_list: tuple[str, ...] = EVERYTHING) -> DeviceFacts:
    return DeviceFacts(name, "cuda", capability, "", 16 << 30, "2.11.0+cu126", "12.6", arch_list)


def other(kind: str, name: str, gcn_arch: str = "", arch_list: tuple[str, ...] = ()) -> DeviceFacts:
    return DeviceFacts(name, kind, None, gcn_arch, 16 << 30, "2.11.0", None, arch_list)  # type: ignore[arg-type]


FP16_ONLY = "planned-half", False, True
NATIVE = "bf16", True, True
PLAIN = "fp32", False, False

# name, capability, (compute, native bf16, tensor cores), part of a reason
NVIDIA = (
    ("Tesla M40", (5, 2), PLAIN, "Maxwell (5.2)"),
    ("Tesla P100-PCIE-16GB", (6, 0), PLAIN, "torch adds them up in fp32"),
    ("Tesla P40", (6, 1), PLAIN, "1/64"),
    ("Tesla P4", (6, 1), PLAIN, "1/64"),
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), PLAIN, "1/64"),
    ("Tesla V100-SXM2-32GB", (7, 0), FP16_ONLY, "15.7 in fp32"),
    ("GRID V100D-8C", (7, 0), FP16_ONLY, "Volta (7.0)"),
    ("NVIDIA TITAN V", (7, 0), FP16_ONLY, "Volta (7.0)"),
    ("Tesla T4", (7, 5), FP16_ONLY, "8.1 in fp32"),
    ("GRID T4-16Q", (7, 5), FP16_ONLY, "multiply fp16 but not bf16"),
    ("NVIDIA T4G", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("Tesla T10", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("NVIDIA GeForce RTX 2060", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("NVIDIA GeForce RTX 2070 SUPER with Max-Q Design", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("GeForce RTX 2080 Ti", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("Quadro RTX 6000", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("GRID RTX6000P-8Q", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("NVIDIA TITAN RTX", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("Titan RTX", (7, 5), FP16_ONLY, "Turing with tensor cores"),
    ("NVIDIA GeForce GTX 1650", (7, 5), PLAIN, "fp16 convolutions can give NaN"),
    ("NVIDIA GeForce GTX 1660 SUPER", (7, 5), PLAIN, "fp16 convolutions can give NaN"),
    ("NVIDIA GeForce MX450", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA GeForce MX550", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T400 4GB", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T500", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T550 Laptop GPU", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T600", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T1000 8GB", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA T1200 Laptop GPU", (7, 5), PLAIN, "Turing without tensor cores"),
    ("Quadro T1000 with Max-Q Design", (7, 5), PLAIN, "Turing without tensor cores"),
    ("Quadro T2000", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA CMP 30HX", (7, 5), PLAIN, "Turing without tensor cores"),
    ("NVIDIA CMP 40HX", (7, 5), PLAIN, "fp32 is right on all of them"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), NATIVE, "more accurate, at the same speed"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.20gb", (8, 0), NATIVE, "Ampere (8.0)"),
    ("NVIDIA A10", (8, 6), NATIVE, "Ampere (8.6)"),
    ("NVIDIA GeForce RTX 2050", (8, 6), NATIVE, "Ampere (8.6)"),
    ("NVIDIA GeForce RTX 3060", (8, 6), NATIVE, "Ampere (8.6)"),
    ("NVIDIA GeForce RTX 3090", (8, 6), NATIVE, "Ampere (8.6)"),
    ("NVIDIA RTX A6000", (8, 6), NATIVE, "Ampere (8.6)"),
    ("Orin", (8, 7), NATIVE, "Ampere (8.7)"),
    ("NVIDIA L4", (8, 9), NATIVE, "Ada (8.9)"),
    ("NVIDIA GeForce RTX 4090", (8, 9), NATIVE, "Ada (8.9)"),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), NATIVE, "Ada (8.9)"),
    ("NVIDIA H100 80GB HBM3", (9, 0), NATIVE, "Hopper (9.0)"),
    ("NVIDIA H200", (9, 0), NATIVE, "Hopper (9.0)"),
    ("NVIDIA GH200 480GB", (9, 0), NATIVE, "Hopper (9.0)"),
    ("NVIDIA B200", (10, 0), NATIVE, "Blackwell or later (10.0)"),
    ("NVIDIA GeForce RTX 5090", (12, 0), NATIVE, "Blackwell or later (12.0)"),
    ("NVIDIA GB10", (12, 1), NATIVE, "Blackwell or later (12.1)"),
)
# facts, (compute, native bf16, matrix cores), part of a reason
ELSEWHERE = (
    (other("rocm", "Radeon RX 580", "gfx803"), PLAIN, "neither bf16 units nor matrix cores"),
    (other("rocm", "Radeon RX Vega", "gfx900:xnack-"), PLAIN, "neither bf16 units nor matrix cores"),
    (other("rocm", "AMD Radeon Graphics", "gfx90c"), PLAIN, "neither bf16 units nor matrix cores"),
    (other("rocm", "AMD Radeon VII", "gfx906:sramecc-:xnack-"), ("planned-half", False, False), "twice the rate"),
    (other("rocm", "AMD Instinct MI100", "gfx908"), NATIVE, "twice as fast"),
    (other("rocm", "AMD Instinct MI250X", "gfx90a:sramecc+:xnack-"), NATIVE, "flush subnormals"),
    (other("rocm", "AMD Instinct MI300X", "gfx942"), NATIVE, "CDNA 3 or 4 (gfx942)"),
    (other("rocm", "AMD Radeon RX 6900 XT", "gfx1030"), ("planned-half", False, False), "RDNA 1 or 2"),
    (other("rocm", "AMD Radeon RX 7900 XTX", "gfx1100"), NATIVE, "RDNA 3 (gfx1100)"),
    (other("rocm", "AMD Radeon RX 9070 XT", "gfx1201"), NATIVE, "RDNA 4 (gfx1201)"),
    (other("xpu", "Intel(R) Arc(TM) A770 Graphics"), NATIVE, "matrix engines"),
    (other("xpu", "Intel(R) Arc(TM) B580 Graphics"), NATIVE, "matrix engines"),
    (other("xpu", "Intel(R) Arc(TM) 140V GPU (16GB)"), NATIVE, "matrix engines"),
    (other("xpu", "Intel(R) Data Center GPU Max 1550"), NATIVE, "matrix engines"),
    (other("xpu", "Intel(R) Graphics"), PLAIN, "not every Intel GPU"),
    (other("mps", "Apple GPU"), PLAIN, "emulated on M1 and M2"),
    (other("cpu", "x86_64"), PLAIN, "emulated, with the tensor core's meaning"),
)
DEVICES = (*((nvidia(name, capability), *rest) for name, capability, *rest in NVIDIA), *ELSEWHERE)
UNNAMED = ("NVIDIA CMP 40HX", "Intel(R) Graphics")  # those whose name does not say enough


@pytest.mark.parametrize(("facts", "expected", "reason"), DEVICES, ids=lambda value: getattr(value, "name", None))
def test_advice(facts: DeviceFacts, expected: tuple[str, bool, bool], reason: str):
    advice = advise(facts)
    assert (advice.compute, advice.native_bf16, advice.tensor_cores) == expected
    assert any(reason in said for said in advice.reasons)
    assert bool(advice.warnings) is (facts.name in UNNAMED)


def test_every_rule_decides_for_some_device():
    decided = {next(rule for rule in read_device_families() if rule.fits(facts)) for facts, *_ in DEVICES}
    unused = {rule.family for rule in set(read_device_families()) - decided}
    assert unused == {"Kepler or older"}, "add a device to the table, or drop the rule"


def test_a_name_is_in_one_turing_list_only():
    names = [name for name, capability, *_ in NVIDIA if capability == (7, 5)]
    turing = [rule for rule in read_device_families() if rule.since == (7, 5) and rule.names]
    counts = {name: sum(rule.fits(nvidia(name, (7, 5))) for rule in turing) for name in names}
    assert counts == {name: int(name not in UNNAMED) for name in names}


def test_planned_half_is_the_first_alternative_to_bf16():
    others = {facts.name: advise(facts).alternatives[0] for facts, (compute, *_), _ in DEVICES if compute == "bf16"}
    assert {name for name, first in others.items() if first != "planned-half"} == {"AMD Instinct MI250X"}


def test_an_unknown_turing_says_how_to_find_out():
    (warning,) = advise(nvidia("NVIDIA CMP 40HX", (7, 5))).warnings
    assert "CMP 40HX" in warning and "more than three times" in warning and "planned-half" in warning
    assert advise(nvidia("NVIDIA CMP 40HX", (7, 5))).alternatives == ("planned-half",)


CAPABILITIES = st.tuples(st.integers(1, 15), st.integers(0, 9))
ENTRIES = st.builds(
    lambda form, built, suffix: f"{form}_{built[0]}{built[1]}{suffix}",
    st.sampled_from(["sm", "compute"]),
    CAPABILITIES,
    st.sampled_from(["", "", "a", "f"]),
)
ANY_FACTS = st.builds(
    DeviceFacts,
    name=st.sampled_from([facts.name for facts, *_ in DEVICES]) | st.text(max_size=12),
    kind=st.sampled_from(["cuda", "rocm", "mps", "cpu", "xpu"]),
    capability=st.none() | CAPABILITIES,
    gcn_arch=st.sampled_from(["", "gfx1300", "gfx942:xnack-"]) | st.text(max_size=8),
    total_memory_bytes=st.just(0),
    torch_version=st.sampled_from(["2.5.1", "2.14.1+cu130", "3.0a0+git1234", "odd"]),
    cuda_version=st.sampled_from([None, "12.6", "13.2"]),
    arch_list=st.lists(ENTRIES | st.text(max_size=8), max_size=4).map(tuple),
)


@settings(max_examples=200)
@given(facts=ANY_FACTS)
def test_advice_is_total_and_consistent(facts: DeviceFacts):
    advice = advise(facts)
    assert advice.reasons and all(advice.reasons)
    assert advice.compute not in advice.alternatives
    assert (advice.compute == "bf16") is advice.native_bf16
    assert any("no kernel image" in warning for warning in advice.warnings) is not has_kernels(facts)


@given(facts=ANY_FACTS, more=ENTRIES)
def test_a_wheel_that_holds_more_serves_more(facts: DeviceFacts, more: str):
    if facts.arch_list and has_kernels(facts):
        assert has_kernels(replace(facts, arch_list=(*facts.arch_list, more)))


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((12, 0), ("sm_80", "sm_86", "sm_90"), False),
        ((12, 0), ("sm_80", "sm_90", "compute_90"), True),
        ((12, 0), ("sm_90", "compute_90a"), False),
        ((12, 1), CU128, True),
        ((10, 3), ("sm_100f",), True),
        ((10, 3), ("sm_100a",), False),
        ((9, 0), ("sm_90a",), True),
        ((8, 9), ("sm_86",), True),
        ((8, 0), ("sm_86",), False),
        ((8, 7), ("sm_80", "sm_86"), False),
        ((8, 7), ("sm_87",), True),
        ((8, 9), ("sm_87",), False),
        ((7, 5), ("sm_70",), True),
        ((7, 0), CU126, True),
        ((7, 0), CU128, False),
        ((6, 1), CU126, True),
        ((6, 1), CU128, False),
        ((7, 5), ("gfx1100", "nonsense", "sm_"), False),
        ((7, 5), (), True),
    ],
)
def test_what_a_wheel_serves(capability: tuple[int, int], arch_list: tuple[str, ...], runs: bool):
    assert has_kernels(nvidia("some card", capability, arch_list)) is runs


@pytest.mark.parametrize("cuda_version", ["13.0", "13.2"])
def test_has_kernels_agrees_with_torch(cuda_version: str, monkeypatch: pytest.MonkeyPatch):
    import torch

    agrees = getattr(torch.cuda, "_code_compatible_with_device", None)
    codes = getattr(torch.cuda, "DEVICE_REQUIREMENT", {})
    if agrees is None or not codes:
        pytest.skip("this torch keeps no such table")
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    renamed = (101, 110)  # one device under two numbers; torch takes each for the other
    numbers = [number for number in codes if number >= 70 and number not in renamed]
    for device in numbers:
        for code in numbers:
            facts = replace(nvidia("", divmod(device, 10), (f"sm_{code}",)), cuda_version=cuda_version)
            assert has_kernels(facts) is agrees(device, code), (device, code)


@pytest.mark.parametrize(
    ("name", "capability", "arch_list", "remedy"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), CU128, "cu126"),
        ("Tesla P40", (6, 1), CU128, "cu126"),
        ("NVIDIA GeForce RTX 5090", (12, 0), CU126, "CUDA 12.8 or later"),
        ("Tesla T4", (7, 5), ("sm_80",), "cu126 or the cu130"),
        ("Orin", (8, 7), ("sm_80", "sm_90"), "Jetson"),
        ("Tesla K80", (3, 7), CU126, "another card"),
    ],
)
def test_missing_kernels_are_told_with_a_remedy(
    name: str, capability: tuple[int, int], arch_list: tuple[str, ...], remedy: str
):
    (warning,) = advise(nvidia(name, capability, arch_list)).warnings
    assert name in warning and "no kernel image" in warning and ", ".join(arch_list) in warning
    assert remedy in warning


def test_missing_rocm_kernels():
    card = other("rocm", "AMD Radeon RX 6700 XT", "gfx1031", ("gfx906", "gfx1030"))
    (warning,) = advise(card).warnings
    assert "gfx1031" in warning and "no kernel image" in warning and "ROCm" in warning
    assert not advise(replace(card, gcn_arch="gfx1030:xnack-")).warnings


def test_wheels_answer_for_every_capability():
    since = [capability for capability, _ in WHEEL_REMEDY_BY_CAPABILITY]
    assert since == sorted(since, reverse=True) and since[-1] == (0, 0)


@pytest.mark.parametrize(("version", "offered"), [("2.7.1+cu126", False), ("2.8.0+cu126", True), ("2.14.1", True)])
def test_fp32_output_of_half_products(version: str, offered: bool):
    advice = advise(replace(nvidia("Tesla T4", (7, 5)), torch_version=version))
    assert advice.fp16_output_products is offered
    assert any("rounded once more" in warning for warning in advice.warnings) is not offered
    assert not advise(replace(other("rocm", "", "gfx942"), torch_version=version)).fp16_output_products


def test_fp32_output_agrees_with_the_installed_torch():
    import torch

    facts = replace(nvidia("Tesla T4", (7, 5)), torch_version=torch.__version__)
    assert advise(facts).fp16_output_products is ("dtype" in torch.ops.aten.mm.overloads())


def test_is_bf16_supported_is_never_asked():
    tree = ast.parse(Path(hardware.__file__).read_text(encoding="utf-8"))
    asked = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and "bf16_supported" in node.attr)
        or (isinstance(node, ast.Name) and "bf16_supported" in node.id)
        or (isinstance(node, ast.Constant) and node.value == "is_bf16_supported")
    ]
    assert not asked
    assert "is_bf16_supported" in (ast.get_docstring(tree) or ""), "the reason is to stand in the module's docstring"


def pretend(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **properties: object) -> None:
    """Let torch see two cards with these properties, and let it fail if it is asked whether bf16 is supported."""
    import torch

    def asked(*_: object) -> bool:
        raise AssertionError("is_bf16_supported was asked")

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_75"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)


def test_read_facts_of_a_cuda_card(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, name="Tesla T4", major=7, minor=5, total_memory=16 << 30)
    facts = read_device_facts(1)
    assert (facts.name, facts.kind, facts.capability, facts.gcn_arch) == ("Tesla T4", "cuda", (7, 5), "")
    assert (facts.total_memory_bytes, facts.arch_list) == (16 << 30, ("sm_70", "sm_75"))
    assert advise(facts).compute == "planned-half"
    with pytest.raises(UsageError, match="no device 2") as caught:
        read_device_facts(2)
    assert caught.value.code == "DEVICE-INDEX" and caught.value.evidence == {"devices": 2}


def test_read_facts_of_a_rocm_card(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, "6.4", name="MI300X", major=9, minor=4, total_memory=192 << 30, gcnArchName="gfx942:xnack-")
    facts = read_device_facts()
    assert (facts.kind, facts.capability, facts.gcn_arch) == ("rocm", None, "gfx942:xnack-")


def test_read_facts_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    import torch

    for backend in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(backend, "is_available", lambda: False)
    facts = read_device_facts()
    assert facts.kind == "cpu" and facts.name and facts.torch_version == torch.__version__
    advice = advise(facts)
    assert advice.compute == "fp32" and not advice.warnings
    assert any("sees no GPU" in reason or "blind to GPUs" in reason for reason in advice.reasons)


def test_importing_the_module_leaves_torch_alone():
    program = "import sys, finitune.machine.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_texts_are_ascii_and_name_no_address():
    texts = [text for rule in read_device_families() for text in (rule.reason, rule.warning, rule.remedy)] + [
        text for _, text in WHEEL_REMEDY_BY_CAPABILITY
    ]
    assert all(text.isascii() and not re.search(r"https?:", text) for text in texts)
