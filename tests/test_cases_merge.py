"""Merges from the field (MRG-01 to MRG-09): each report's own input, and what must come of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from finitune.adapters.weight import compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from finitune.report import Finding, Level, Report
from finitune.verbs import merge
from tests.adapter_files import lora, noise
from tests.case_files import own_model, saved, scaled


def module(block: int, part: str = "q") -> str:
    return f"lora_unet_blocks_{block}_self_attn_{part}_proj"


def site(block: int) -> str:
    return f"transformer.transformer_blocks.{block}.attn1.to_q"


def key(block: int) -> str:
    return f"net.blocks.{block}.self_attn.q_proj.weight"


def merged(model: object, *adapters: object, out: Path, **options) -> Report:
    return merge.run(merge.Request(model=str(model), adapters=tuple(map(str, adapters)), out=out, **options))


def found(report: Report, code: str) -> Finding:
    return next(finding for finding in report.findings if finding.code == code)


def loha(block: int, seed: int = 0) -> dict[str, Tensor]:
    sizes = {"w1_a": (8, 2), "w1_b": (2, 8), "w2_a": (8, 2), "w2_b": (2, 8)}
    tensors = {f"hada_{role}": noise(*size, seed=seed + n) for n, (role, size) in enumerate(sizes.items())}
    return {f"{module(block)}.{role}": t for role, t in (tensors | {"alpha": torch.tensor(1.0)}).items()}


def loha_change(tensors: dict[str, Tensor], block: int) -> Tensor:
    a1, b1, a2, b2 = (tensors[f"{module(block)}.hada_{r}"].double() for r in ("w1_a", "w1_b", "w2_a", "w2_b"))
    return 0.5 * (a1 @ b1) * (a2 @ b2)


def lora_change(tensors: dict[str, Tensor], block: int, scale: float) -> Tensor:
    up, down = (tensors[f"{module(block)}.lora_{side}.weight"].double() for side in ("up", "down"))
    return scale * up @ down


def change_in(file: Path, block: int, *shape: int) -> Tensor:
    adapter = read_adapter(TensorFile(file)).adapter[site(block)]
    return compute_weight_delta(torch.zeros(shape, dtype=torch.float64), adapter)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# --- MRG-01: one algorithm among others ------------------------------------------------------------------------------


def test_mrg_01_a_lora_and_a_loha_become_one_adapter_with_nothing_lost(tmp_path: Path):
    first, second = scaled(module(0), 8, 8, 2, alpha=1.0), loha(0) | loha(1, seed=7)
    files = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((first, second))]
    report = merged(files[0], f"{files[1]}:0.5", out=(out := tmp_path / "out.safetensors"))
    said = found(report, "MERGE-SVD")
    assert report.ok and said.message == "1 of its 2 layers needed an SVD" and said.subject == str(files[1])
    both = lora_change(first, 0, 0.5) + 0.5 * loha_change(second, 0)
    assert relative(change_in(out, 0, 8, 8), both) < 1e-6
    assert relative(change_in(out, 1, 8, 8), 0.5 * loha_change(second, 1)) < 1e-6


def test_mrg_01_both_go_into_a_model(tmp_path: Path):
    first, second = scaled(module(0), 8, 8, 2, alpha=1.0), loha(0) | loha(1, seed=7)
    files = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((first, second))]
    weights = {key(block): noise(8, 8, seed=block) for block in range(3)}
    base, out = saved(tmp_path / "m.safetensors", weights), tmp_path / "out.safetensors"
    report = merged(base, files[0], f"{files[1]}:-2", out=out)
    assert report.ok and (report.figures["tensors_adapted"], report.figures["unmatched"]) == (2, 0)
    changes = [lora_change(first, 0, 0.5) - 2 * loha_change(second, 0), -2 * loha_change(second, 1), torch.zeros(8, 8)]
    for block, change in enumerate(changes):
        wanted = (weights[key(block)].double() + change).float()
        assert torch.equal(TensorFile(out).read(key(block)), wanted)


@pytest.mark.parametrize("into", ["adapter", "model"])
def test_mrg_01_a_key_cut_short_is_listed_and_nothing_is_written(tmp_path: Path, into: str):
    first = saved(tmp_path / "a.safetensors", scaled(module(0), 8, 8, 2, alpha=1.0))
    second = saved(tmp_path / "b.safetensors", loha(0) | {f"{module(1)}.hada_w1_": noise(8, 2)})
    target = first if into == "adapter" else saved(tmp_path / "m.safetensors", {key(0): noise(8, 8)})
    report = merged(target, second, out=(out := tmp_path / "out.safetensors"))
    assert report.exit_code == 1 and not out.exists()
    assert found(report, "ADAPTER-UNKNOWN-KEYS").subject == f"{module(1)}.hada_w1_"
    assert "--allow-unmatched" in report.findings[-1].remedy
    assert merged(target, second, out=out, allow_unmatched=True).ok and out.exists()


def test_mrg_01_what_is_left_out_by_leave_is_counted_right(tmp_path: Path):
    good, bad = lora(module(2), 8, 8), scaled(module(0), 8, 8, 2, alpha=0.0)
    half = {f"{module(1)}.lora_down.weight": noise(2, 8)}
    base = saved(tmp_path / "m.safetensors", {key(block): noise(8, 8, seed=block) for block in range(3)})
    file = saved(tmp_path / "a.safetensors", good | bad | half)
    report = merged(base, file, out=tmp_path / "out.safetensors", allow_unmatched=True)
    told = [finding for finding in report.findings if finding.level is Level.WARNING]
    assert report.ok and {finding.subject for finding in told} == {module(0), module(1)}
    assert not any("0 tensors" in finding.message for finding in told)


# --- MRG-03: the wrong base ------------------------------------------------------------------------------------------

CROSS = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
CROSS_KEY = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"
TITLES = {768: "Stable Diffusion 1.5", 2048: "Stable Diffusion XL"}


@pytest.mark.parametrize(("adapter", "base"), [(2048, 768), (768, 2048)])
def test_mrg_03_another_family_is_told_in_one_sentence(tmp_path: Path, adapter: int, base: int):
    file = saved(tmp_path / "a.safetensors", scaled(CROSS, 640, adapter, 4, alpha=2.0))
    report = merged(
        saved(tmp_path / "m.safetensors", {CROSS_KEY: noise(640, base)}), file, out=tmp_path / "o.safetensors"
    )
    said = found(report, "ADAPTER-OTHER-FAMILY")
    assert said.message == f"this is an adapter of {TITLES[adapter]}; the model is {TITLES[base]}"
    assert report.exit_code == 1 and not (tmp_path / "o.safetensors").exists()


BASES_OF_9 = [
    ("conv_in.weight", "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight"),
    ("model.diffusion_model.input_blocks.0.0.weight", CROSS_KEY),
]


@pytest.mark.parametrize(("conv_in", "cross"), BASES_OF_9)
def test_mrg_03_an_inpainting_base_is_named(tmp_path: Path, conv_in: str, cross: str):
    weights = {conv_in: noise(32, 9, 3, 3), cross: noise(640, 768)}
    tensors = {
        "lora_unet_conv_in.lora_down.weight": noise(4, 4, 3, 3),
        "lora_unet_conv_in.lora_up.weight": noise(32, 4, 1, 1),
    }
    report = merged(
        saved(tmp_path / "m.safetensors", weights),
        saved(tmp_path / "a.safetensors", tensors),
        out=tmp_path / "o.safetensors",
    )
    said = found(report, "ADAPTER-DOES-NOT-FIT")
    assert report.exit_code == 1 and "this is an inpainting model" in said.remedy
    assert (said.evidence["adapter"], said.evidence["model"]) == ([32, 4, 3, 3], [32, 9, 3, 3])


def test_mrg_03_widths_of_no_family_are_told_by_the_shapes(tmp_path: Path):
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    base = own_model(tmp_path / "m.safetensors", name, shape=(32, 77))
    file = saved(tmp_path / "a.safetensors", scaled(CROSS, 32, 20, 4, alpha=2.0))
    said = found(merged(base, file, out=tmp_path / "o.safetensors"), "ADAPTER-DOES-NOT-FIT")
    assert (said.evidence["adapter"], said.evidence["model"]) == ([32, 20], [32, 77])


def test_mrg_03_a_model_of_ones_own_takes_adapters_of_its_modules(tmp_path: Path):
    base = own_model(tmp_path / "m.safetensors", "my.own.fc1")
    file = saved(tmp_path / "a.safetensors", scaled("lora_unet_my_own_fc1", alpha=1.0))
    assert merged(base, file, out=tmp_path / "o.safetensors").ok


def test_mrg_03_metadata_of_another_family_is_not_believed_and_told(tmp_path: Path):
    texts = {"ss_base_model_version": "sdxl_base_v1-0"}
    file = saved(tmp_path / "a.safetensors", scaled(CROSS, 640, 768, 4, alpha=2.0), texts)
    base = saved(tmp_path / "m.safetensors", {CROSS_KEY: noise(640, 768)})
    report = merged(base, file, out=tmp_path / "o.safetensors")
    assert report.ok and found(report, "ADAPTER-FAMILY-METADATA").level is Level.WARNING


# --- MRG-04: ranks and layers that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("ratios", [(1.0, 0.5), (0.7, 0.5), (0.7, -0.5)])
def test_mrg_04_ranks_add_up_and_the_sum_is_exact(tmp_path: Path, ratios: tuple[float, float]):
    first = scaled(module(1), 16, 12, 4, alpha=4.0) | scaled(module(2), 16, 12, 4, alpha=4.0)
    second = scaled(module(2), 16, 12, 2, alpha=1.0) | scaled(module(3), 16, 12, 2, alpha=1.0)
    files = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((first, second))]
    names = [str(file) if ratio == 1 else f"{file}:{ratio}" for file, ratio in zip(files, ratios, strict=True)]
    report = merged(*names, out=(out := tmp_path / "out.safetensors"))
    assert report.ok, report.findings
    shapes = TensorFile(out).shapes
    assert [shapes[f"{module(block)}.lora_down.weight"][0] for block in (1, 2, 3)] == [4, 6, 2]
    a, b = ratios
    for block, wanted in {
        1: a * lora_change(first, 1, 1.0),
        2: a * lora_change(first, 2, 1.0) + b * lora_change(second, 2, 0.5),
        3: b * lora_change(second, 3, 0.5),
    }.items():
        assert relative(change_in(out, block, 16, 12), wanted) <= 1e-6


def test_mrg_04_a_compact_sum_is_the_best_and_states_its_error(tmp_path: Path):
    parts = [scaled(module(0), 16, 12, 4, alpha=4.0), scaled(module(0), 16, 12, 2, alpha=1.0)]
    files = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate(parts)]
    out, total = tmp_path / "out.safetensors", 0.7 * lora_change(parts[0], 0, 1.0) + 0.5 * lora_change(parts[1], 0, 0.5)
    report = merged(f"{files[0]}:0.7", f"{files[1]}:0.5", out=out, rank=3)
    values = torch.linalg.svdvals(total)
    best = float(values[3:].norm() / values.norm())
    assert report.ok and TensorFile(out).shapes[f"{module(0)}.lora_down.weight"] == (3, 12)
    assert relative(change_in(out, 0, 16, 12), total) == pytest.approx(best, rel=1e-4)
    assert report.figures["relative_error_max"] == pytest.approx(best, rel=1e-4)


# --- MRG-05: ratios --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratios", [(0.7, 0.4), (1.0, -0.5), (0.0, 1.0), (-1.0, -2.0), (0.0, 0.0)])
def test_mrg_05_each_ratio_counts_once(tmp_path: Path, ratios: tuple[float, float]):
    adapters = [scaled(module(0), 8, 8, 2, alpha=3.0), scaled(module(0), 8, 8, 2, alpha=3.0)]
    adapters[1] = {
        name: tensor if tensor.ndim == 0 else noise(*tensor.shape, seed=9) for name, tensor in adapters[1].items()
    }
    files = [saved(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate(adapters)]
    weight = noise(8, 8, seed=4)
    base, out = saved(tmp_path / "m.safetensors", {key(0): weight}), tmp_path / "out.safetensors"
    assert merged(base, *(f"{file}:{ratio}" for file, ratio in zip(files, ratios, strict=True)), out=out).ok
    total = sum(ratio * lora_change(tensors, 0, 1.5) for ratio, tensors in zip(ratios, adapters, strict=True))
    assert torch.equal(TensorFile(out).read(key(0)), (weight.double() + total).float())


def test_mrg_05_one_number_by_one(tmp_path: Path):
    """0.36 + 0.22 is 0.58; added factors would make 1.7 * 0.8 = 1.36."""
    files = []
    for n, (up, down) in enumerate(((0.6, 0.6), (1.1, 0.2))):
        factors = {"lora_up.weight": torch.tensor([[up]]), "lora_down.weight": torch.tensor([[down]])}
        files.append(saved(tmp_path / f"{n}.safetensors", {f"{module(0)}.{role}": t for role, t in factors.items()}))
    assert merged(*files, out=(out := tmp_path / "out.safetensors")).ok
    assert float(change_in(out, 0, 1, 1)) == pytest.approx(0.58, abs=1e-7)


# --- MRG-07: what rounding takes -------------------------------------------------------------------------------------


def weak(folder: Path, dtype: torch.dtype) -> tuple[Path, Path, Tensor]:
    """A base of N(0, 0.02), an adapter whose change is about 2e-5, and that change in fp64."""
    up, down = noise(64, 4), noise(4, 64)
    up = up * (2e-5 / float((up @ down).std()))
    factors = {f"{module(0)}.lora_up.weight": up, f"{module(0)}.lora_down.weight": down}
    base = saved(folder / "m.safetensors", {key(0): (noise(64, 64) * 0.02).to(dtype)})
    return base, saved(folder / "a.safetensors", factors), up.double() @ down.double()


@pytest.mark.parametrize(
    ("dtype", "unchanged", "error"),
    [(torch.bfloat16, (0.7, 0.85), (0.7, 0.9)), (torch.float16, (0.15, 0.3), (0.15, 0.3))],
)
def test_mrg_07_what_is_left_of_a_weak_change_is_counted(tmp_path: Path, dtype: torch.dtype, unchanged, error):
    base, adapter, change = weak(tmp_path, dtype)
    report = merged(base, adapter, out=(out := tmp_path / "out.safetensors"))
    before, after = TensorFile(base).read(key(0)), TensorFile(out).read(key(0))
    assert torch.equal(after, (before.double() + change).to(dtype)), "computed wide, rounded once"
    stayed = float((after == before).float().mean())
    assert unchanged[0] < stayed < unchanged[1]
    assert error[0] < relative(after.double() - before.double(), change) < error[1]
    assert report.figures["changed_share"] == pytest.approx(1 - stayed, abs=1e-6)
    if dtype == torch.bfloat16:
        said = found(report, "MERGE-DELTA-LOST")
        assert said.level is Level.WARNING and "--dtype" in said.remedy and "--keep-precise" in said.remedy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mrg_07_the_error_of_the_effective_change_is_reported(tmp_path: Path, dtype: torch.dtype):
    base, adapter, change = weak(tmp_path, dtype)
    report = merged(base, adapter, out=(out := tmp_path / "out.safetensors"))
    error = relative(TensorFile(out).read(key(0)).double() - TensorFile(base).read(key(0)).double(), change)
    numbers = [number for number in report.figures.values() if isinstance(number, float)]
    assert any(number == pytest.approx(error, rel=0.02) for number in numbers), report.figures


def test_mrg_07_the_remedies_work(tmp_path: Path):
    base, adapter, change = weak(tmp_path, torch.bfloat16)
    before, out = TensorFile(base).read(key(0)).double(), tmp_path / "out.safetensors"
    for options in ({"dtype": "fp32"}, {"keep_precise": True}):
        report = merged(base, adapter, out=out, **options)
        assert report.ok and not [f for f in report.findings if f.code == "MERGE-DELTA-LOST"]
        assert relative(TensorFile(out).read(key(0)).double() - before, change) < 1e-3
    report = merged(base, adapter, out=out, rounding="stochastic")
    assert report.ok and report.figures["survival_min"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("change", "result"), [(0.0039, 1.0), (0.004, 1.0078125)])
def test_mrg_07_half_a_spacing_decides(tmp_path: Path, change: float, result: float):
    factors = {
        f"{module(0)}.lora_up.weight": torch.tensor([[change]]),
        f"{module(0)}.lora_down.weight": torch.ones(1, 1),
    }
    base = saved(tmp_path / "m.safetensors", {key(0): torch.ones(1, 1).bfloat16()})
    assert merged(base, saved(tmp_path / "a.safetensors", factors), out=(out := tmp_path / "out.safetensors")).ok
    assert float(TensorFile(out).read(key(0))) == result


# --- MRG-09: memory and disk -----------------------------------------------------------------------------------------

PARTS = ("self_attn.q", "self_attn.k", "self_attn.v", "cross_attn.q")


def eight_mebibytes(folder: Path, more: int = 0) -> tuple[Path, Path]:
    """64 tensors (256, 256) in fp16 and a LoRA of each; `more` adds (2048, 256) tensors beside them."""
    names = [f"blocks.{block}.{part}_proj" for block in range(16) for part in PARTS]
    weights = {f"net.{name}.weight": noise(256, 256, seed=n).half() for n, name in enumerate(names)}
    weights |= {f"net.blocks.{n % 16}.mlp.layer{1 + n // 16}.weight": torch.ones(2048, 256).half() for n in range(more)}
    adapter = {k: t for name in names for k, t in lora(f"lora_unet_{name.replace('.', '_')}", 256, 256, 4).items()}
    return saved(folder / f"m{more}.safetensors", weights), saved(folder / "a.safetensors", adapter)


MEASURE = """
import resource, sys
from pathlib import Path
from finitune.verbs import merge

def run(base):
    report = merge.run(merge.Request(model=base, adapters=(sys.argv[1],), out=Path(base + ".out.safetensors")))
    assert report.ok and report.figures["tensors_adapted"] == 64, report.findings
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small, large = run(sys.argv[2]), run(sys.argv[3])
print(large - small)
"""


def test_mrg_09_a_larger_model_needs_no_more_memory(tmp_path: Path):
    """32 MiB more to copy and 8 MiB again to adapt: the peak of the whole process stays within three tensors."""
    pytest.importorskip("resource")
    small, adapter = eight_mebibytes(tmp_path)
    large, _ = eight_mebibytes(tmp_path, more=32)
    words = [sys.executable, "-c", MEASURE, str(adapter), str(small), str(large)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 <= 3 * 2048 * 256 * 2


def test_mrg_09_no_tensor_of_the_base_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No more than a block is asked for at a time, and no whole tensor of the base is made by the readers of files."""
    base, adapter = eight_mebibytes(tmp_path)
    whole: list[str] = []
    read = TensorFile.read_hashed

    def watched(self: TensorFile, name: str, hashed: bool = True):
        whole.extend([name] * name.startswith("net."))
        return read(self, name, hashed)

    monkeypatch.setattr(TensorFile, "read_hashed", watched)
    assert merged(base, adapter, out=tmp_path / "out.safetensors").ok and not whole


def test_mrg_09_a_full_disk_is_found_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base, adapter = eight_mebibytes(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**12, used=0, free=10**6))
    before = sorted(tmp_path.iterdir())
    report = merged(base, adapter, out=tmp_path / "new" / "out.safetensors")
    said = found(report, "DISK-FULL").evidence
    assert report.exit_code == 1 and sorted(tmp_path.iterdir()) == before
    assert said["free_bytes"] == 10**6 and 64 * 256 * 256 * 2 < said["needed_bytes"] < 64 * 256 * 256 * 2 + 20_000
