"""What is written reads back the same, in every spelling that can say it; what cannot be said is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters import ADAPTER_ALGORITHMS, find_algorithm
from finitune.adapters.convert import Exactness
from finitune.adapters.core import AdapterSet, AmbiguityOptions, Magnitude, SiteAdapter, Target
from finitune.adapters.difference import compute_change_error
from finitune.adapters.lora import LoRA
from finitune.adapters.narrow import narrow_adapter
from finitune.errors import AdapterError, NumericsError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors, write_text
from finitune.models import MODEL_FAMILIES
from finitune.namings.core import ParsedAdapter
from finitune.namings.fused import fuse_site_adapters, swap_site_adapter_halves
from finitune.namings.read import read_adapter
from finitune.namings.spellings import WRITABLE_SPELLINGS
from finitune.namings.write import AdapterFileContent, write_adapter

FAMILIES = {family.name: family for family in MODEL_FAMILIES}
ANIMA, FLUX, SDXL = FAMILIES["anima"], FAMILIES["flux"], FAMILIES["sdxl"]
IN_KOHYA = tuple(a.name for a in ADAPTER_ALGORITHMS if a.name not in ("norm", "set", "oft_v2", "tlora"))
Q = "transformer.transformer_blocks.0.attn1.to_q"
FLUX_QKV = tuple(f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv")


def random_site(name: str, shape: tuple[int, ...], seed: int = 0, alpha: float | None = 3.0, **options) -> SiteAdapter:
    generator = torch.Generator().manual_seed(seed)
    site = find_algorithm(name).init(Target(torch.randn(shape, generator=generator), 2, alpha, options), generator)
    return replace(site, tensors={r: torch.randn(t.shape, generator=generator) for r, t in site.tensors.items()})


def read_back(written: AdapterFileContent, family, folder: Path) -> ParsedAdapter:
    path = folder / "adapter_model.safetensors"
    save_tensors(path, written.tensors, written.metadata)
    if written.config is not None:
        write_text(folder / "adapter_config.json", json.dumps(written.config))
    reading = read_adapter(TensorFile(path), family, answers=AmbiguityOptions(glora_order="new"))
    assert not reading.unmatched
    assert not [finding for finding in reading.findings if finding.level.value == "error"]
    return reading


def demand_same(adapter: AdapterSet, other: AdapterSet, bits: bool = True) -> None:
    assert set(adapter) == set(other)
    for site, one in adapter.sites.items():
        assert compute_change_error(other[site], one) <= (0.0 if bits else 1e-6), site
        if bits:
            assert other[site].tensors.keys() == one.tensors.keys()
            assert all(torch.equal(other[site].tensors[role], tensor) for role, tensor in one.tensors.items())
            assert {t.dtype for t in other[site].tensors.values()} == {t.dtype for t in one.tensors.values()}


def some_sites(family, one_component: bool) -> list[str]:
    """A few sites of each component, or of the first, of the tables' templates."""
    components = family.adapters.components[: 1 if one_component else None]
    names = [f"{c.name}.{site}" for c in components for site in c.sites if "norm" not in site.rpartition(".")[2]]
    return [name.replace("{i}", str(n % 2)) for n, name in enumerate(names)]


@settings(deadline=None, max_examples=15)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    spelling=st.sampled_from(WRITABLE_SPELLINGS),
    algorithm=st.sampled_from(IN_KOHYA),
    chosen=st.lists(st.integers(0, 999), min_size=1, max_size=4),
    alpha=st.sampled_from([None, 0.5, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    dora=st.booleans(),
)
def test_what_is_written_reads_back(family, spelling, algorithm, chosen, alpha, dtype, dora):
    family, own = FAMILIES[family], spelling in ("diffusers", "peft")
    name = "lora" if own else algorithm
    table = some_sites(family, spelling == "peft")
    sites = {}
    for n in chosen:
        site = random_site(name, (4, 4), n, alpha)
        magnitude = Magnitude(torch.rand(4) + 0.5) if dora and name in ("lora", "loha", "lokr") else None
        tensors = {role: tensor.to(dtype) for role, tensor in site.tensors.items()}
        sites[table[n % len(table)]] = replace(site, tensors=tensors, magnitude=magnitude)
    fused = family.name == "flux" and not own
    if fused:  # apart from those that the naming fuses, which have tests of their own
        sites = {site: one for site, one in sites.items() if not any(p in site for p in ("to_", "add_", "proj_mlp"))}
    adapter = AdapterSet(sites)
    if not len(adapter):
        return
    with TemporaryDirectory() as folder:
        written = write_adapter(adapter, family, spelling)
        assert written.klass is Exactness.LOSSLESS
        demand_same(adapter, read_back(written, family, Path(folder)).adapter)


@pytest.mark.parametrize("spelling", WRITABLE_SPELLINGS)
def test_alpha_and_magnitudes_stay_fp32(spelling):
    site = replace(random_site("lora", (6, 4), alpha=27.7128), magnitude=Magnitude(torch.rand(6)))
    written = write_adapter(AdapterSet({Q: site}), ANIMA, spelling, dtype=torch.bfloat16)
    dtypes = {
        key.rpartition(".")[2] if "lora_" not in key else key.split("lora_")[1]: t for key, t in written.tensors.items()
    }
    wide = {key for key, tensor in dtypes.items() if tensor.dtype == torch.float32}
    assert all(any(word in key for word in ("alpha", "dora_scale", "magnitude")) for key in wide)
    assert len(wide) == (2 if spelling in ("kohya", "comfy") else 1)
    assert all(tensor.ndim == 0 for key, tensor in dtypes.items() if key == "alpha")


@pytest.mark.parametrize("spelling", WRITABLE_SPELLINGS)
def test_names_are_those_of_the_program_key_01(spelling):
    keys = set(write_adapter(AdapterSet({Q: random_site("lora", (6, 4))}), ANIMA, spelling).tensors)
    stems = {
        "kohya": ("lora_unet_blocks_0_self_attn_q_proj", "lora_down.weight", "lora_up.weight", "alpha"),
        "comfy": ("diffusion_model.blocks.0.self_attn.q_proj", "lora_A.weight", "lora_B.weight", "alpha"),
        "diffusers": (Q, "lora_A.weight", "lora_B.weight"),
        "peft": ("base_model.model.transformer_blocks.0.attn1.to_q", "lora_A.weight", "lora_B.weight"),
    }
    stem, *suffixes = stems[spelling]
    assert keys == {f"{stem}.{suffix}" for suffix in suffixes}


def test_a_missing_alpha_is_the_rank_never_one_scl_01(tmp_path):
    site = random_site("lora", (32, 32), alpha=None)
    written = write_adapter(AdapterSet({Q: site}), ANIMA, "kohya")
    assert float(written.tensors["lora_unet_blocks_0_self_attn_q_proj.alpha"]) == 2.0
    assert compute_change_error(read_back(written, ANIMA, tmp_path).adapter[Q], site) == 0


@pytest.mark.parametrize("spelling", WRITABLE_SPELLINGS)
def test_rslora_keeps_its_strength_scl_04(spelling, tmp_path):
    site = replace(random_site("lora", (6, 4), alpha=16.0), rank_stabilised=True)
    written = write_adapter(AdapterSet({Q: site}), ANIMA, spelling)
    assert compute_change_error(read_back(written, ANIMA, tmp_path).adapter[Q], site) < 1e-6
    if spelling == "kohya":
        alpha = float(written.tensors["lora_unet_blocks_0_self_attn_q_proj.alpha"])
        assert alpha == pytest.approx(16 * math.sqrt(2))


@pytest.mark.parametrize("alpha", [0.0, -2.0])
def test_an_alpha_that_programs_read_differently_is_folded_in(alpha, tmp_path):
    site = random_site("lora", (6, 4), alpha=alpha)
    written = write_adapter(AdapterSet({Q: site}), ANIMA, "kohya")
    assert written.klass is Exactness.EXACT
    assert compute_change_error(read_back(written, ANIMA, tmp_path).adapter[Q], site) == 0


def test_mixed_rules_of_scale_become_one():
    plain, root = random_site("lora", (6, 4)), replace(random_site("lora", (6, 4)), rank_stabilised=True)
    config = LoRA().peft_config({"a": plain, "b": root, "c": plain})
    assert config["use_rslora"] is False
    assert config["lora_alpha"] == 3.0
    assert config["alpha_pattern"] == {"^b": pytest.approx(3 * math.sqrt(2))}


def flux_lora(rank: int, rows: int = 8, seed: int = 0) -> SiteAdapter:
    return random_site("lora", (rows, 8), seed).with_tensors(
        down=torch.randn(rank, 8), up=torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed))
    )


@pytest.mark.parametrize("rank", [3, 4, 6, 64])
def test_a_shared_down_is_never_cut_key_11(rank, tmp_path):
    """Four parts of unequal rows, which have one down: fused and divided again, bit for bit."""
    names = (*(f"attn.to_{part}" for part in "qkv"), "proj_mlp")
    down = torch.randn(rank, 8)
    sites = {
        f"transformer.single_transformer_blocks.3.{name}": flux_lora(rank, rows, n).with_tensors(down=down)
        for n, (name, rows) in enumerate(zip(names, (8, 8, 8, 32), strict=True))
    }
    written = write_adapter(AdapterSet(sites), FLUX, "kohya")
    assert written.klass is Exactness.LOSSLESS
    assert written.tensors["lora_unet_single_blocks_3_linear1.lora_down.weight"].shape == (rank, 8)
    assert written.tensors["lora_unet_single_blocks_3_linear1.lora_up.weight"].shape == (56, rank)
    demand_same(AdapterSet(sites), read_back(written, FLUX, tmp_path).adapter)


@pytest.mark.parametrize("name", ["lora", "loha"])
@pytest.mark.parametrize("alphas", [(3.0, 3.0, 3.0), (1.0, 2.0, 0.7)])
def test_parts_of_their_own_are_fused_exactly_scl_03(name, alphas, tmp_path):
    """The rank grows threefold and alpha with it, so that no part is weaker than it was."""
    sites = {site: random_site(name, (8, 8), n, alphas[n]) for n, site in enumerate(FLUX_QKV)}
    written = write_adapter(AdapterSet(sites), FLUX, "kohya")
    assert written.klass is Exactness.GROWING
    assert json.loads(written.metadata["finitune"])["class"] == "growing"
    if alphas == (3.0, 3.0, 3.0):
        assert float(written.tensors["lora_unet_double_blocks_0_img_attn_qkv.alpha"]) == 9.0
    back = read_back(written, FLUX, tmp_path).adapter
    assert {find_algorithm(name).rank(one) for one in back.sites.values()} == {6}
    demand_same(AdapterSet(sites), back, bits=False)


def test_lokr_parts_of_one_are_stacked_and_others_refused(tmp_path):
    w2 = torch.randn(4, 4)
    one = {site: SiteAdapter("lokr", {"w1": torch.randn(2, 2), "w2": w2}) for site in FLUX_QKV}
    written = write_adapter(AdapterSet(one), FLUX, "kohya")
    assert written.tensors["lora_unet_double_blocks_0_img_attn_qkv.lokr_w1"].shape == (6, 2)
    demand_same(AdapterSet(one), read_back(written, FLUX, tmp_path).adapter)
    other = {site: random_site("lokr", (8, 8), n) for n, site in enumerate(FLUX_QKV)}
    with pytest.raises(AdapterError, match="cannot be written as one fused module") as caught:
        write_adapter(AdapterSet(other), FLUX, "kohya")
    assert caught.value.code == "FUSE-IMPOSSIBLE" and "--as lora" in caught.value.remedy


@pytest.mark.parametrize("name", ["lora", "lokr", "full"])
def test_a_part_that_is_left_alone_stays_so(name, tmp_path):
    sites = {FLUX_QKV[0]: random_site(name, (8, 8))}
    back = read_back(write_adapter(AdapterSet(sites), FLUX, "kohya"), FLUX, tmp_path).adapter
    assert compute_change_error(back[FLUX_QKV[0]], sites[FLUX_QKV[0]]) == 0
    assert all(compute_change_error(back.sites.get(site), None) == 0 for site in FLUX_QKV[1:])


def test_the_rows_of_a_missing_part_must_be_known():
    site = "transformer.single_transformer_blocks.{}.{}"
    alone = {site.format(0, "attn.to_q"): flux_lora(2)}
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet(alone), FLUX, "kohya")
    assert caught.value.code == "FUSE-ROWS-UNKNOWN"
    known = {**alone, site.format(1, "proj_mlp"): flux_lora(2, rows=24)}
    tensors = write_adapter(AdapterSet(known), FLUX, "kohya").tensors
    assert tensors["lora_unet_single_blocks_0_linear1.lora_up.weight"].shape == (48, 2)


def test_magnitudes_are_stacked_with_their_rows_scl_07(tmp_path):
    sites = {
        site: replace(random_site("lora", (8, 8), n), magnitude=Magnitude(torch.rand(8) + n))
        for n, site in enumerate(FLUX_QKV)
    }
    written = write_adapter(AdapterSet(sites), FLUX, "kohya")
    assert written.tensors["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"].shape == (24, 1)
    demand_same(AdapterSet(sites), read_back(written, FLUX, tmp_path).adapter, bits=False)
    sites[FLUX_QKV[0]] = replace(sites[FLUX_QKV[0]], magnitude=None)
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet(sites), FLUX, "kohya")
    assert caught.value.code == "FUSE-IMPOSSIBLE"


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(("lora", "loha", "lokr", "full", "oft")), seed=st.integers(0, 9))
def test_swapping_halves_twice_is_the_identity_and_once_swaps_the_change(name, seed):
    site = random_site(name, (8, 4), seed)
    swapped = swap_site_adapter_halves(site)
    assert compute_change_error(swap_site_adapter_halves(swapped), site) == 0
    base = torch.randn(8, 4, dtype=torch.float64)
    upper, lower = find_algorithm(name).delta(site, base).chunk(2)
    turned = torch.cat(base.chunk(2)[::-1])
    assert torch.allclose(find_algorithm(name).delta(swapped, turned), torch.cat([lower, upper]))


def test_fusing_is_the_change_of_the_rows_whatever_the_algorithm():
    base = torch.zeros(16, 6, dtype=torch.float64)
    for name in ("lora", "loha", "full"):
        parts = [random_site(name, (10, 6), 1, 2.0), random_site(name, (6, 6), 2, 5.0)]
        deltas = [find_algorithm(name).delta(part, base[:rows]) for part, rows in zip(parts, (10, 6), strict=True)]
        fused = fuse_site_adapters(parts, (10, 6)).adapter
        assert torch.allclose(find_algorithm(name).delta(fused, base), torch.cat(deltas), atol=1e-6)


@pytest.mark.parametrize(
    ("site", "spelling", "code"),
    [
        (random_site("loha", (6, 4)), "diffusers", "WRITE-CANNOT-SAY"),
        (random_site("lokr", (6, 4)), "peft", "WRITE-CANNOT-SAY"),
        (random_site("oft_v2", (6, 4)), "kohya", "WRITE-CANNOT-SAY"),
        (random_site("lora", (6, 4)).with_tensors(diff_b=torch.ones(6)), "diffusers", "WRITE-CANNOT-SAY"),
        (
            replace(random_site("lora", (6, 4)), magnitude=Magnitude(torch.ones(4), "in")),
            "diffusers",
            "WRITE-CANNOT-SAY",
        ),
    ],
)
def test_what_a_spelling_cannot_say_is_refused_never_dropped(site, spelling, code):
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet({Q: site}), ANIMA, spelling)
    assert (caught.value.code, caught.value.subject) == (code, Q)
    assert "--" in caught.value.remedy


def test_a_module_of_another_model_is_refused():
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet({"transformer.nowhere": random_site("lora", (6, 4))}), ANIMA, "kohya")
    assert caught.value.code == "WRITE-NO-NAME"


def test_nothing_is_no_adapter():
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet({}), ANIMA, "peft")
    assert caught.value.code == "WRITE-NOTHING"


def test_a_peft_folder_is_of_one_model():
    sites = {Q: random_site("lora", (6, 4)), "text_encoder.layers.0.mlp.up_proj": random_site("lora", (6, 4))}
    with pytest.raises(AdapterError) as caught:
        write_adapter(AdapterSet(sites), ANIMA, "peft")
    assert caught.value.code == "WRITE-ONE-COMPONENT"


def test_a_spelling_that_is_only_read_is_refused():
    with pytest.raises(UsageError, match="not written as 'xlabs'"):
        write_adapter(AdapterSet({}), ANIMA, "xlabs")


@pytest.mark.parametrize(("scale", "dtype"), [(1e-8, torch.float16), (1e-7, torch.float16), (1e-8, torch.bfloat16)])
def test_small_numbers_are_balanced_before_they_sink_to_zero_scl_05(scale, dtype):
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(32, 4, generator=generator) * scale, torch.randn(4, 32, generator=generator)
    site = SiteAdapter("lora", {"up": up, "down": down}, 4.0)
    lost = int((up.to(dtype) == 0).sum()) / up.numel()
    assert (lost > 0.2) is (dtype == torch.float16)
    small = narrow_adapter(site, dtype)
    assert small.flushed == 0
    assert small.error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_what_balancing_cannot_save_is_counted():
    site = SiteAdapter("full", {"diff": torch.tensor([[1e-9, 1.0], [1.0, 0.0]])})
    small = narrow_adapter(site, torch.float16)
    assert (small.flushed, small.nonzero) == (1, 3)


def test_numbers_beyond_the_dtype_are_refused_or_balanced():
    site = SiteAdapter("full", {"diff": torch.full((2, 2), 1e5)})
    with pytest.raises(NumericsError) as caught:
        write_adapter(AdapterSet({Q: site}), ANIMA, "kohya", dtype=torch.float16)
    assert caught.value.code == "NARROW-OVERFLOW" and Q.split(".")[-2] not in caught.value.subject.split(": ")[1]
    lora = SiteAdapter("lora", {"up": torch.full((2, 1), 1e5), "down": torch.full((1, 2), 1e-5)}, 1.0)
    assert narrow_adapter(lora, torch.float16).error < 1e-2
    lokr = replace(random_site("lokr", (8, 8)), alpha=1e5)
    written = write_adapter(AdapterSet({Q: lokr}), ANIMA, "kohya", dtype=torch.float16)
    assert all(torch.isfinite(tensor).all() for tensor in written.tensors.values())


def test_numbers_that_are_none_are_refused():
    site = random_site("lora", (6, 4)).with_tensors(up=torch.full((6, 2), math.nan))
    with pytest.raises(NumericsError) as caught:
        write_adapter(AdapterSet({Q: site}), ANIMA, "kohya")
    assert caught.value.code == "FACTORS-NOT-FINITE"
