"""Machines from the field (ENV-01, -03, -04, -05, DDP-03, BLK-03): each report's own repro, and what is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from finitune.machine.environment import Environment
from finitune.machine.hardware import advise
from finitune.machine.reading import packages as installed
from finitune.machine.rules import examine_machine, examine_processes
from finitune.machine.rules.software import find_no_gpu_reason
from finitune.report import Finding, Level
from tests import environments as made


def found(environment: Environment, code: str) -> Finding:
    """The one finding of a code."""
    (finding,) = (finding for finding in examine_machine(environment) if finding.code == code)
    return finding


def codes(environment: Environment) -> set[str]:
    return {finding.code for finding in examine_machine(environment)}


# --- ENV-01: is_bf16_supported says yes on cards that emulate --------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "compute", "emulated"),
    [
        (made.V100, "planned-half", True),
        (made.T4, "planned-half", True),
        (("NVIDIA A100", (8, 0), 40), "bf16", False),
        (made.RTX_3060, "bf16", False),
        (made.RTX_4090, "bf16", False),
        (made.H100, "bf16", False),
        (made.RTX_5090, "bf16", False),
        (made.RX_7900, "bf16", False),
    ],
)
def test_env_01_bf16_is_judged_by_the_card(card: tuple, compute: str, emulated: bool, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)  # as torch says of a T4 since 2.3
    tag = "rocm6.4" if isinstance(card[1], str) else "cu126" if card == made.V100 else "cu130"
    environment = made.machine(card, torch=f"2.14.1+{tag}")
    assert advise(environment.main).compute == compute
    assert ("BF16-EMULATED" in codes(environment)) is emulated


def test_env_01_works_and_fast_are_two_answers():
    finding = found(made.machine(made.T4), "BF16-EMULATED")
    assert (finding.evidence["works"], finding.evidence["fast"], finding.evidence["capability"]) == (True, False, "7.5")
    assert finding.level is Level.NOTE and "is_bf16_supported" in finding.message


def test_env_01_without_a_gpu_fp32():
    assert advise(made.machine().main).compute == "fp32"
    assert "BF16-EMULATED" not in codes(made.machine())
    assert advise(replace(made.machine(torch="2.14.1"), devices=(made.APPLE,)).main).compute == "fp32"


# --- ENV-03: no kernel image -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "archs", "runs"),
    [
        (made.RTX_5090, ("sm_80", "sm_86", "sm_90"), False),
        (made.RTX_5090, ("sm_80", "sm_86", "sm_90", "compute_90"), True),
        (made.GTX_1080, ("sm_75", "sm_80", "sm_90"), False),
        (made.RTX_4090, ("sm_86",), True),
        (made.H100, ("sm_90a",), True),
        (made.RTX_5090, ("sm_90a",), False),
        (made.RX_7900, ("gfx1100",), True),
        (made.RX_7900, ("gfx1030",), False),
        (made.RTX_3060, ("gfx1100", "nonsense", ""), False),
    ],
)
def test_env_03_kernels_against_the_card(card: tuple, archs: tuple[str, ...], runs: bool):
    environment = made.machine(
        card, torch="2.14.1+rocm6.4" if isinstance(card[1], str) else "2.14.1+cu130", archs=archs
    )
    assert ("KERNELS-MISSING" not in codes(environment)) is runs


def test_env_03_says_which_card_lacks_what_and_what_to_install():
    finding = found(made.machine(made.RTX_5090, torch="2.6.0+cu124"), "KERNELS-MISSING")
    assert finding.level is Level.ERROR and finding.subject == "NVIDIA GeForce RTX 5090"
    assert finding.evidence["is"] == "12.0" and "sm_90" in str(finding.evidence["built_for"])
    assert "no kernel image" in finding.message and "12.8" in finding.remedy


def test_env_03_names_the_package_at_fault():
    built = replace(made.BUILT, built_torch="2.14.1+cu130", built_cuda="13.0")
    finding = found(made.machine(made.RTX_5090, packages={"xformers": built}), "EXTENSION-WITHOUT-KERNELS")
    assert finding.subject == "xformers 0.0.30" and finding.evidence["built_for"] == "8.0, 9.0"
    assert "KERNELS-MISSING" not in codes(made.machine(made.RTX_5090, packages={"xformers": built}))


# --- ENV-04: xformers built for another torch ------------------------------------------------------------------------


def dist_info(folder: Path, name: str, version: str, requires: str = "") -> None:
    info = folder / f"{name}-{version.replace('+', '_')}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")


def test_env_04_read_from_metadata_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dist_info(tmp_path, "torch", "2.1.0+cu118")
    dist_info(tmp_path, "xformers", "0.0.22", "Requires-Dist: torch (==2.0.1)\n")
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text("raise OSError('undefined symbol')\n")  # no ImportError
    (tmp_path / "xformers" / "cpp_lib.json").write_text(
        json.dumps({"version": {"cuda": 1108, "torch": "2.0.1+cu118"}, "env": {}})
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    package = installed.read_package("xformers")
    assert package is not None and package.built_torch == "2.0.1+cu118" and "xformers" not in sys.modules
    assert (installed.read_package("torch") or package).version == "2.1.0+cu118"
    environment = made.machine(made.RTX_3090, torch="2.1.0+cu118", packages={"xformers": package, "numpy": "1.26.4"})
    finding = found(environment, "EXTENSION-OTHER-TORCH")
    assert finding.evidence["built_for"] == "torch 2.0.1 CUDA 11.8" and finding.evidence["torch"] == "2.1.0+cu118"
    assert "torch's own attention" in finding.remedy  # what a plan falls back to


@pytest.mark.parametrize(("torch", "told"), [("2.7.0+cu126", False), ("2.7.1+cu126", True), ("2.7.0+cpu", True)])
def test_env_04_one_torch_and_one_cuda(torch: str, told: bool):
    environment = made.machine(made.RTX_3090, torch=torch, seen="cpu" not in torch, packages={"xformers": made.BUILT})
    assert ("EXTENSION-OTHER-TORCH" in codes(environment)) is told


def test_env_04_missing_metadata_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "xformers-0.0.22.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    package = installed.read_package("xformers")
    assert package is not None and package.version == ""
    assert found(made.machine(made.RTX_3090, packages={"xformers": package}), "PACKAGE-DAMAGED").subject == "xformers"


# --- ENV-05: torch computes on the CPU of a machine with a GPU -------------------------------------------------------


def test_env_05_four_causes_have_four_messages():
    machines = {
        "no-driver": made.machine(pci=("nvidia",)),
        "driver-old": made.machine(made.RTX_3060, driver="470.82", seen=False),
        "cpu-wheel": made.machine(made.RTX_3060, torch="2.4.0+cpu", seen=False),
        "hidden": made.machine(made.RTX_3060, seen=False, variables={"CUDA_VISIBLE_DEVICES": ""}),
    }
    messages, remedies = set(), set()
    for reason, environment in machines.items():
        assert find_no_gpu_reason(environment) == reason
        (finding,) = examine_machine(environment)
        messages.add(finding.message)
        remedies.add(finding.remedy)
        assert "autocast('cuda') and GradScaler('cuda')" in finding.message
    assert len(messages) == len(remedies) == 4


def test_env_05_numbers_are_told():
    finding = found(made.machine(made.RTX_3060, driver="470.82", seen=False), "DRIVER-OLD")
    assert (finding.evidence["driver"], finding.evidence["needed"]) == ("470.82", "580")
    finding = found(made.machine(made.RTX_3060, seen=False, variables={"CUDA_VISIBLE_DEVICES": "7"}), "DEVICES-HIDDEN")
    assert "CUDA_VISIBLE_DEVICES='7'" in finding.message and "RTX 3060" in finding.message


def test_env_05_a_rocm_build_is_no_cpu_build():
    environment = made.machine(torch="2.4.0+rocm6.0", pci=("amd",))
    assert environment.torch.cuda is None and environment.torch.hip == "6.0"
    assert find_no_gpu_reason(environment) == "unknown" and "TORCH-CPU-ONLY" not in codes(environment)


def test_env_05_autocast_switches_itself_off_here():
    program = (
        "import warnings, torch\n"
        "warnings.simplefilter('ignore')\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n"
        "    print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.amp.GradScaler('cuda').is_enabled())\n"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=hidden, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch.float32", "False"]


# --- DDP-03: the RTX 4000 series has no P2P --------------------------------------------------------------------------


def test_ddp_03_names_the_variables_and_counts_the_cards():
    finding = found(made.machine(made.RTX_4090, made.RTX_4090, driver="535.54.03"), "P2P-NOT-THERE")
    assert finding.evidence["cards"] == 2 and finding.evidence["variables"] == "NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1"
    assert "NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1" in finding.remedy and "NCCL_P2P_DISABLE" not in os.environ


def test_ddp_03_one_card_and_new_drivers_are_left_alone():
    assert "P2P-NOT-THERE" not in codes(made.machine(made.RTX_4090, driver="535.54.03"))
    assert "P2P-NOT-THERE" not in codes(made.machine(made.RTX_4090, made.RTX_4090))
    assert "P2P-NOT-THERE" in codes(made.machine(made.RTX_3090, made.RTX_4090, driver="535.54.03"))
    one = {"NCCL_P2P_DISABLE": "1"}
    finding = found(made.machine(made.RTX_4090, made.RTX_4090, driver="535.54.03", variables=one), "P2P-NOT-THERE")
    assert finding.evidence["variables"] == "NCCL_IB_DISABLE=1"


@pytest.mark.parametrize(
    ("gpus", "processes", "code"),
    [
        (1, 2, "GPUS-TOO-FEW"),
        (2, 3, "GPUS-TOO-FEW"),
        (2, 2, None),
        (2, 1, "GPUS-IDLE"),
        (2, 0, "PROCESSES-NONE"),
        (0, 2, None),
    ],
)
def test_ddp_03_processes_against_gpus(gpus: int, processes: int, code: str | None):
    findings = examine_processes(made.machine(*[made.RTX_4090] * gpus), processes)
    assert [finding.code for finding in findings] == ([code] if code else [])
    assert all(finding.evidence["processes"] == processes and finding.evidence["gpus"] == gpus for finding in findings)


# --- BLK-03: a back end that silently returns zeros ------------------------------------------------------------------


def test_blk_03_a_dtype_that_is_wrong_is_not_chosen():
    """On an accelerator that returns zeros in one dtype, the verdict falls back to the next."""
    import torch

    from finitune.machine.measuring.measurements import PRODUCT_OP, measure_device
    from finitune.progress import SilentProgress
    from finitune.verbs.doctor import judge_machine

    def zeros_in_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept = 0 if x.dtype == torch.bfloat16 and x.shape[1] >= 64 else 1
        return torch.nn.functional.linear(x, weight) * kept

    product = replace(PRODUCT_OP, compute=zeros_in_bf16)
    measurements = measure_device(torch.device("cpu"), SilentProgress(), within_s=0, product=product, backends=())
    assert not measurements.right("bf16") and measurements.right("fp16")
    finding = judge_machine(made.machine(made.RTX_3060), measurements)
    assert (finding.level, finding.evidence["compute"]) == (Level.WARNING, "planned-half")
    assert "--precision planned-half" in finding.remedy and "bf16" not in finding.evidence["alternatives"]
