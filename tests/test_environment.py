"""Facts, rules and readings of machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from finitune.machine import reading
from finitune.machine.environment import Environment, UnreadFact
from finitune.machine.reading import packages, pytorch
from finitune.machine.rules import MACHINE_PREDICATES, MACHINE_RULES_FILE, examine_machine, read_machine_rules
from finitune.machine.rules.variables import read_known_nccl_variables
from finitune.report import Level
from finitune.rules.conditions import is_version_in
from tests.environments import ROWS, Row, machine


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_machine_gives_the_findings_beside_it(row: Row):
    _, codes, environment = row
    assert sorted(finding.code for finding in examine_machine(environment)) == sorted(codes)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_facts_survive_json(row: Row):
    environment = row[2]
    assert Environment.from_json(json.loads(json.dumps(environment.as_json()))) == environment


def test_the_table_is_large_and_finds_every_code():
    assert len(ROWS) >= 40 and len({name for name, _, _ in ROWS}) == len(ROWS)
    found = {code for _, codes, _ in ROWS for code in codes}
    assert found == {rule.code for rule in read_machine_rules()}


def test_each_finding_has_numbers_a_source_and_a_remedy():
    for _, _, environment in ROWS:
        for finding in examine_machine(environment):
            source = finding.evidence["source"]
            assert str(source).startswith("https://"), finding.code
            assert len(finding.evidence) > 1 and finding.message and finding.remedy, finding.code
            told = f"{finding.subject} {finding.message} {finding.remedy}"
            assert told.isascii() and not re.search(r"[{}]", told), told


def test_findings_come_errors_first():
    for _, _, environment in ROWS:
        levels = [list(Level).index(finding.level) for finding in examine_machine(environment)]
        assert levels == sorted(levels)


def test_every_rule_has_a_source_and_every_predicate_a_rule():
    assert all(rule.source.startswith("https://") for rule in read_machine_rules())
    text = MACHINE_RULES_FILE.read_text(encoding="utf-8")
    assert not [name for name in MACHINE_PREDICATES if f'"{name}"' not in text]
    assert (
        is_version_in("0.0.31", ">=0.0.31")
        and not is_version_in("0.0.30.post1", ">=0.0.31")
        and not is_version_in("odd", ">=1")
    )


def test_real_names_are_those_of_the_installed_libraries():
    """The names that the reference documents call real or invented."""
    real = "TORCH_NCCL_NAN_CHECK NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_CONF_FILE NCCL_RAS_ENABLE"
    assert set(real.split()) <= set(read_known_nccl_variables())
    assert not {"NCCL_TIMEOUT", "NCCL_SOCKET_NTIMEO", "NCCL_ASYNC_ERROR_HANDLING"} & read_known_nccl_variables()


def test_this_machine_against_independent_sources():
    import psutil
    import torch

    environment = reading.read_environment()
    assert environment.unread == ()
    assert environment.memory.total_bytes == psutil.virtual_memory().total
    assert environment.memory.swap_total_bytes == psutil.swap_memory().total
    assert environment.torch.version == torch.__version__ and environment.torch.cuda == torch.version.cuda
    assert environment.torch.arch_list == tuple(torch.cuda.get_arch_list())
    assert environment.torch.available == torch.cuda.is_available()
    assert len(environment.devices) == torch.cuda.device_count()
    assert environment.python.version == ".".join(map(str, sys.version_info[:3]))
    assert environment.disks[0].total_bytes == psutil.disk_usage(str(Path.cwd())).total
    assert abs(environment.disks[0].free_bytes - psutil.disk_usage(str(Path.cwd())).free) < 1 << 30
    if hasattr(os, "sched_getaffinity"):
        assert environment.machine.cores == len(psutil.Process().cpu_affinity() or ())
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("avx512f" in environment.machine.cpu_features) is (capability == "AVX512")
    version = subprocess.run(
        [sys.executable, "-m", "pip", "show", "diffusers"], capture_output=True, text=True, check=True
    )
    (package,) = (p for p in environment.packages if p.name == "diffusers")
    assert f"Version: {package.version}\n" in version.stdout


def test_reading_packages_imports_none():
    program = (
        "import sys\n"
        "from finitune.machine.reading.packages import read_packages\n"
        "assert len(read_packages()) > 5\n"
        "sys.exit(bool({'torch', 'diffusers', 'numpy', 'xformers', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_secrets_are_not_read():
    given = {
        "HF_TOKEN": "hf_x",
        "HF_HOME": "/a",
        "TORCH_API_KEY": "x",
        "NCCL_DEBUG": "INFO",
        "HOME": "/h",
        "EDITOR": "vi",
    }
    assert reading.read_variables(given) == {"HF_HOME": "/a", "NCCL_DEBUG": "INFO"}


def test_memory_limits_of_control_groups(tmp_path: Path):
    own = tmp_path / "cgroup"
    second = tmp_path / "v2" / "job" / "step"
    second.mkdir(parents=True)
    (second.parent / "memory.max").write_text("8589934592\n")
    (second.parent / "memory.current").write_text("3000\n")
    (second.parent / "memory.stat").write_text("anon 1000\ninactive_file 1000\n")
    (second / "memory.max").write_text("max\n")
    own.write_text("0::/job/step\n")
    assert reading.read_cgroup_memory(tmp_path / "v2", own) == (8589934592, 2000)
    first = tmp_path / "v1" / "memory" / "box"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("1073741824\n")
    (first / "memory.usage_in_bytes").write_text("5\n")
    (first.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    own.write_text("11:cpu:/x\n4:memory:/box\n0::/\n")
    assert reading.read_cgroup_memory(tmp_path / "v1", own) == (1073741824, 5)
    assert reading.read_cgroup_memory(tmp_path / "none", own) == (None, 0)


def test_cards_as_nvidia_smi_tells_them(monkeypatch: pytest.MonkeyPatch):
    said = (
        "NVIDIA GeForce RTX 3060, GPU-1a, 580.95.05, 8.6, 12288, 11000, [N/A], [N/A]\n"
        "NVIDIA A100-SXM4-40GB, GPU-2b, 580.95.05, 8.0, 40960, 40000, Enabled, Enabled\n"
    )
    monkeypatch.setattr(pytorch, "run_program", lambda program, *_: said)
    driver = pytorch.read_driver()
    assert driver.version == "580.95.05" and [card.capability for card in driver.cards] == [(8, 6), (8, 0)]
    assert [(card.mig, card.ecc) for card in driver.cards] == [(False, None), (True, True)]
    assert driver.cards[0].total_bytes == 12288 << 20


def test_a_program_that_fails_or_hangs_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pytorch, "PROGRAM_TIMEOUT_S", 0.2)
    assert pytorch.run_program("no-such-program") == ""
    assert pytorch.run_program(sys.executable, "-c", "import time; time.sleep(5)") == ""
    assert pytorch.run_program(sys.executable, "-c", "print(1); raise SystemExit(3)") == ""


def test_what_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise OSError("no such device\nmore")

    monkeypatch.setattr(reading, "read_memory", broken)
    environment = reading.read_environment()
    assert environment.unread == (UnreadFact("memory", "OSError: no such device"),)
    assert environment.memory.total_bytes == 0


def test_a_torch_that_does_not_load_is_a_fact(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    program = "from finitune.machine.reading import read_environment; print(read_environment().torch.error)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "OSError: libcudart.so.13: cannot open", done.stderr


def test_graphics_cards_on_the_bus(tmp_path: Path):
    for name, kind, vendor in (("a", "0x030000", "0x10de"), ("b", "0x020000", "0x8086"), ("c", "0x038000", "0x1002")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(kind)
        (tmp_path / name / "vendor").write_text(vendor)
    assert pytorch.read_pci_vendors(tmp_path) == ("amd", "nvidia")


def test_metadata_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_package(tmp_path, "xformers", "0.0.22", "Requires-Dist: torch (==2.0.1)\nRequires-Dist: pyre-extensions\n")
    (tmp_path / "xformers").mkdir()
    record = {"version": {"cuda": 1108, "torch": "2.0.1+cu118"}, "env": {"TORCH_CUDA_ARCH_LIST": "7.0;8.6+PTX"}}
    (tmp_path / "xformers" / "cpp_lib.json").write_text(json.dumps(record))
    (tmp_path / "sageattention-1.0.6.dist-info").mkdir()  # without METADATA
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    xformers = packages.read_package("xformers")
    assert xformers and xformers.requires == ("torch (==2.0.1)",) and xformers.homes == ("PYTHONPATH",)
    assert (xformers.built_torch, xformers.built_cuda) == ("2.0.1+cu118", "11.8")
    assert xformers.built_archs == ("7.0", "8.6+PTX")
    sage = packages.read_package("sageattention")
    assert sage and sage.version == ""
    assert packages.read_package("flash-attn") is None
    (tmp_path / "xformers" / "cpp_lib.json").write_text("[]")
    assert packages.read_package("xformers") == replace(xformers, built_torch="", built_cuda="", built_archs=())


def fake_package(folder: Path, name: str, version: str, more: str = "") -> None:
    """The metadata of a package, without the package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")


def test_devices_are_read_with_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch):
    import torch

    driver = machine(("Tesla T4", (7, 5), 16)).driver
    found = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=16 << 30, uuid="uuid-0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    (device,) = pytorch.read_devices(driver)
    assert device.free_bytes == driver.cards[0].free_bytes and device.facts.capability == (7, 5)
