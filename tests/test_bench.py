"""finitune bench attention: sizes of the models, faults told, and the choice a pure function of what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.machine.measuring.attention_backends import (
    DEFAULT_SDPA_NAME,
    AttentionBackend,
    list_half_backends,
    list_sdpa_backends,
    load_installed_backends,
)
from finitune.machine.measuring.attention_bench import (
    MAX_TOKEN_DIVISOR,
    BackendResult,
    BenchLayer,
    measure_attention,
    measure_backends,
)
from finitune.report import Level, Report
from finitune.verbs import bench
from finitune.verbs.bench import (
    Request,
    build_bench_table,
    choose_attention_backends,
    find_attention_layers,
    report_bench_results,
    run,
)

CPU = torch.device("cpu")
TINY = [BenchLayer("self", 3, 2, 48, 48, 64), BenchLayer("cross", 1, 2, 48, 20, 64)]


def measured(*backends: AttentionBackend, within_s: float = 60.0) -> dict[tuple[str, str], BackendResult]:
    return {(one.backend, one.dtype): one for one in measure_backends(backends, TINY, CPU, within_s)}


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size", "shapes"),
    [
        ("anima", "1024x1024", [(16, 4096, 4096, 128), (16, 4096, 512, 128)]),
        ("anima", "768x1152", [(16, 3456, 3456, 128), (16, 3456, 512, 128)]),
        ("flux", "1024x1024", [(24, 4608, 4608, 128)]),
        ("sdxl", "1024x1024", [(10, 4096, 4096, 64), (20, 1024, 1024, 64), (10, 4096, 77, 64), (20, 1024, 77, 64)]),
    ],
)
def test_each_model_has_its_attentions(model: str, size: str, shapes: list[tuple[int, ...]]):
    assert [layer.shape for layer in find_attention_layers(Request(model=model, size=size))] == shapes


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request(model="anmia"), "BENCH-MODEL"),
        (Request(size="large"), "SIZE-UNREADABLE"),
        (Request(size="16x16"), "BENCH-SIZE"),
        (Request(device="tpu"), "DEVICE-NOT-THERE"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused(request_: Request, code: str):
    report = run(request_)
    assert report.exit_code == 2 and [one.code for one in report.findings] == [code]
    assert code != "BENCH-MODEL" or "anima" in report.findings[0].message


def test_a_cut_layer_keeps_its_heads_and_a_few_tokens():
    cut = BenchLayer("self", 28, 16, 4096, 512, 128).cut(16)
    assert cut.shape == (16, 256, 32, 128) and cut.number == 28
    assert BenchLayer("cross", 1, 1, 4096, 20, 64).cut(1024).shape == (1, 32, 20, 64)


def test_a_cpu_doubles_its_tokens_while_there_is_time():
    layers, backends = [BenchLayer("self", 1, 1, 4096, 64, 8)], list_sdpa_backends(CPU)[:1]
    heard: list[BackendResult] = []
    divisor, done = measure_attention(backends, layers, CPU, 0.0, heard.append)
    assert divisor == MAX_TOKEN_DIVISOR and done == heard  # no time: one round, and it says so
    divisor, done = measure_attention(backends, layers, CPU, 600.0, heard.append)
    assert divisor == 1 and all(one.right for one in done) and len(heard) == 3 * (1 + 8)


# --- measuring ------------------------------------------------------------------------------------------------------


def test_what_is_here_is_right():
    done = measured(*list_sdpa_backends(CPU)[:2], *list_half_backends())
    assert done.keys() == {
        *((name, dtype) for name in (DEFAULT_SDPA_NAME, "sdpa math") for dtype in ("fp32", "bf16", "fp16")),
        ("finitune, by plan", "fp16"),
        ("finitune, current scaling", "fp16"),
    }
    assert all(one.right and one.trains and one.forward_s and one.both_s for one in done.values())
    assert (
        done[DEFAULT_SDPA_NAME, "fp32"].error
        < done[DEFAULT_SDPA_NAME, "fp16"].error
        < done[DEFAULT_SDPA_NAME, "bf16"].error
    )


def test_faults_are_told():
    def off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v) * 1.05

    def refusing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    def constant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).detach()

    done = measured(
        AttentionBackend("off", off, dtypes=("fp16",)),
        AttentionBackend("refusing", refusing, dtypes=("fp16",)),
        AttentionBackend("constant", constant, dtypes=("fp16",)),
        AttentionBackend("forward only", F.scaled_dot_product_attention, has_gradients=False, dtypes=("fp16",)),
        AttentionBackend("absent", None, dtypes=("fp16",), absent="installed, but cannot be imported: ImportError"),
    )
    off_, refusing_, constant_, forward_, absent = done.values()
    assert off_.error == pytest.approx(0.05, rel=0.1) and not off_.right and not off_.trains
    assert refusing_.failure == "not for this device and dtype"
    assert constant_.right and not constant_.trains and "RuntimeError" in constant_.gradient_failure
    assert forward_.right and not forward_.trains and forward_.both_s is None
    assert absent.failure.startswith("installed, but")
    assert [row[0] for row in build_bench_table(list(done.values())).rows] == [
        "off",
        "constant",
        "forward only",
        "absent",
    ]


def test_what_comes_after_the_time_is_not_measured_and_says_so():
    done = measured(*list_sdpa_backends(CPU)[:1], within_s=0.0)
    assert {one.failure for one in done.values()} == {"not measured: out of time"}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An xformers that works, and a sageattention that was built for another torch."""
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").touch()
    (tmp_path / "xformers" / "ops.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "def memory_efficient_attention(q, k, v):\n"
        "    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)\n"
    )
    (tmp_path / "sageattention.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("xformers", "xformers.ops", "sageattention"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
def test_installed_packages_are_measured_and_broken_ones_named():
    found = {backend.name: backend for backend in load_installed_backends()}
    assert found["sage"].attend is None and "undefined symbol" in found["sage"].absent
    done = measured(found["xformers"])
    assert all(one.right and one.trains for one in done.values())
    report = Report("bench")
    report_bench_results(report, Request(), list(done.values()), list(found.values()), 1)
    assert [one.subject for one in report.findings if one.code == "ATTENTION-PACKAGE-BROKEN"] == ["sage"]


# --- choosing -------------------------------------------------------------------------------------------------------


def one(backend: str, both_s: float, *, error: float = 1e-4, dtype: str = "fp16") -> BackendResult:
    return BackendResult(backend, dtype, both_s / 3, both_s, None, error, error)


def test_the_fastest_that_is_right_is_chosen():
    rows = [
        one(DEFAULT_SDPA_NAME, 1.0),
        one("flash-attn", 0.5),
        one("sage", 0.3, error=0.05),
        one("finitune, by plan", 0.1),
    ]
    choice = choose_attention_backends(rows, gradients=True)["fp16"]
    assert (choice.name, choice.why) == ("flash-attn", "2.0 times as fast as torch's own choice")


def test_a_small_gain_is_not_worth_a_setting():
    choices = choose_attention_backends([one(DEFAULT_SDPA_NAME, 1.0), one("flash-attn", 0.9)], gradients=True)
    assert choices["fp16"].name == DEFAULT_SDPA_NAME


def test_who_has_no_gradients_is_chosen_for_drawing_only():
    drawing = BackendResult("sage", "fp16", 0.1, error=1e-4, gradient_failure="has no gradients")
    rows = [one(DEFAULT_SDPA_NAME, 1.0), drawing]
    assert choose_attention_backends(rows, gradients=False)["fp16"].name == "sage"
    assert choose_attention_backends(rows, gradients=True)["fp16"].name == DEFAULT_SDPA_NAME


def test_where_nothing_is_right_nothing_is_chosen():
    rows = [
        one(DEFAULT_SDPA_NAME, 1.0, error=float("nan")),
        BackendResult("sdpa flash", "fp16", failure="RuntimeError"),
    ]
    assert choose_attention_backends(rows, gradients=True) == {}
    report = Report("bench")
    report_bench_results(report, Request(), rows, [], 1)
    assert [finding.code for finding in report.findings] == ["ATTENTION-INEXACT"]
    assert "not finite" in report.findings[0].message


def test_an_inexact_back_end_is_a_warning_and_its_caution_is_told():
    report = Report("bench")
    rows = [one(DEFAULT_SDPA_NAME, 1.0), one("sage", 0.2)]
    report_bench_results(
        report, Request(), rows, [AttentionBackend("sage", F.scaled_dot_product_attention, caution="black pictures")], 4
    )
    assert {finding.level for finding in report.findings} == {Level.NOTE}
    assert "black pictures" in report.findings[-1].remedy and report.figures["tokens_cut_by"] == 4


# --- the verb -------------------------------------------------------------------------------------------------------


def test_the_table_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "BENCH_CPU_TIME_LIMIT_S", 0.5)
    out = tmp_path / "made" / "attention.md"
    report = run(Request(model="sdxl", size="256x256", device="cpu", out=out))
    assert report.ok and report.artifacts == {"markdown": str(out)}
    (table,) = report.tables
    lines = out.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == len(table.rows) + 2 and {row.count("|") for row in rows} == {len(table.columns) + 1}
    assert f"torch {torch.__version__}" in lines[0] and "sdxl at 256x256" in lines[0]
    assert json.loads(json.dumps(report.as_json()))["figures"][table.title] == table.as_dicts()
