"""Metadata: read with distrust, kept, corrected; and hashes that agree with the programs that look for them."""

from __future__ import annotations

import hashlib
import json
from io import BytesIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.files.writer import save_tensors
from finitune.models import MODEL_FAMILIES
from finitune.namings.metadata import (
    MAX_METADATA_TEXT_BYTES,
    RECEIPT_METADATA_KEY,
    Receipt,
    add_kohya_hashes,
    build_adapter_metadata,
    compute_kohya_hashes,
    drop_oversized_texts,
    parse_metadata_number,
    parse_metadata_table,
    read_applied_block_maps,
)

ANIMA = next(family for family in MODEL_FAMILIES if family.name == "anima")
SD15 = next(family for family in MODEL_FAMILIES if family.name == "sd15")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.float64)


def lora(rank: int = 4, alpha: float | None = 2.0) -> SiteAdapter:
    return SiteAdapter("lora", {"up": torch.zeros(8, rank), "down": torch.zeros(rank, 6)}, alpha)


def adapter(*sites: SiteAdapter) -> AdapterSet:
    return AdapterSet({f"transformer.transformer_blocks.{i}.attn1.to_q": site for i, site in enumerate(sites)})


def written(source: dict[str, str], *sites: SiteAdapter, family=ANIMA, **own: str) -> dict[str, str]:
    return build_adapter_metadata(source, adapter(*(sites or (lora(),))), family, Receipt("convert"), own)[0]


def reference_hashes(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> tuple[str, str]:
    """sd-scripts' definition, on the safetensors library's own bytes."""
    stream = BytesIO(safetensors.torch.save(tensors, {k: v for k, v in metadata.items() if k.startswith("ss_")}))
    header = int.from_bytes(stream.read(8), "little")
    stream.seek(8 + header)
    model = hashlib.sha256(stream.read()).hexdigest()
    stream.seek(0x100000)
    return model, hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]


@settings(deadline=None, max_examples=30)
@given(
    shapes=st.dictionaries(
        st.text("ab._\u00e9", min_size=1, max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    texts=st.dictionaries(st.sampled_from(["ss_a", "ss_\u00fc", "other"]), st.text(max_size=9), max_size=3),
)
def test_hashes_are_those_of_sd_scripts(shapes, texts):
    tensors = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    hashes = compute_kohya_hashes(tensors, texts)
    assert (hashes["sshs_model_hash"], hashes["sshs_legacy_hash"]) == reference_hashes(tensors, texts)


def test_the_legacy_hash_reads_the_second_mebibyte():
    tensors = {"a": torch.randn(300_000), "b": torch.randn(70_000).half()}
    texts = {"ss_tag_frequency": "x" * 5000}
    hashes = compute_kohya_hashes(tensors, texts)
    assert hashes["sshs_legacy_hash"] == reference_hashes(tensors, texts)[1]
    assert hashes["sshs_legacy_hash"] != hashlib.sha256(b"").hexdigest()[:8]
    assert (
        hashes["sshs_legacy_hash"]
        != compute_kohya_hashes(tensors, {"ss_tag_frequency": "x" * 4000})["sshs_legacy_hash"]
    )


def test_our_files_have_the_library_s_bytes(tmp_path):
    """So that a program which hashes the file's tensor region finds the hash in the metadata."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    tensors = {f"{n}.{dtype}": torch.ones(n + 1, 2).to(dtype) for n in range(2) for dtype in dtypes}
    save_tensors(tmp_path / "ours.safetensors", tensors, {})
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    ours, theirs = (region_of(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert ours == theirs
    assert hashlib.sha256(ours).hexdigest() == compute_kohya_hashes(tensors, {})["sshs_model_hash"]


def region_of(path: Path) -> bytes:
    """A file's bytes behind its header."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_stale_hashes_are_replaced():
    tensors = {"a": torch.ones(2)}
    texts = add_kohya_hashes(
        written({"sshs_model_hash": "old", "modelspec.hash_sha256": "0xold", "ss_seed": "7"}), tensors
    )
    assert texts["sshs_model_hash"] == reference_hashes(tensors, texts)[0]
    assert "modelspec.hash_sha256" not in texts


@pytest.mark.parametrize(
    ("text", "number", "warned"),
    [("16", 16.0, 0), ("None", None, 0), ("", None, 0), ("1e-4", 1e-4, 0), ("Dynamic", None, 1), ("nan", None, 1)],
)
def test_numbers_are_read_with_distrust_fil_09(text, number, warned):
    value, findings = parse_metadata_number({"ss_network_dim": text}, "ss_network_dim")
    assert value == number
    assert [finding.code for finding in findings] == ["METADATA-UNREADABLE"] * warned
    assert parse_metadata_number({}, "ss_network_dim") == (None, ())


@pytest.mark.parametrize(
    ("text", "table", "warned"),
    [
        ('{"a": "1"}', {"a": "1"}, 0),
        ("None", None, 0),
        ("{'a': 1}", None, 1),
        ("[1]", None, 1),
        ("[" * 100_000, None, 1),
    ],
)
def test_tables_are_read_with_distrust_fil_09(text, table, warned):
    value, findings = parse_metadata_table({"ss_network_args": text}, "ss_network_args")
    assert value == table
    assert [finding.code for finding in findings] == ["METADATA-UNREADABLE"] * warned


def test_what_is_still_true_is_kept():
    source = {
        "ss_seed": "42",
        "ss_tag_frequency": '{"\u732b": 3}',
        "modelspec.title": "Cat",
        "modelspec.date": "2026-01-01",
        "workflow": "{not json",
        "ss_network_module": "networks.lora_anima",
        "ss_network_args": '{"train_llm_adapter": "True"}',
        "format": "pt",
    }
    texts = written(source)
    assert source.items() <= texts.items()


def test_what_changed_is_corrected():
    source = {
        "ss_network_dim": "16",
        "ss_network_alpha": "8",
        "ss_network_module": "networks.lokr",
        "ss_network_args": '{"factor": "8", "rank_dropout": "0.1"}',
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.prediction_type": "epsilon",
        "lora_adapter_metadata": "{}",
        "unet": '["GEGLU"]',
        "unet:12:rank": "4",
    }
    texts = written(source, lora(4, 4.0))
    assert texts["ss_network_dim"] == texts["ss_network_alpha"] == "4"
    assert texts["ss_network_module"] == "networks.lora"
    assert json.loads(texts["ss_network_args"]) == {"rank_dropout": "0.1"}
    assert texts["modelspec.architecture"] == "anima-preview/lora"
    assert texts["modelspec.prediction_type"] == "flow"
    assert texts["ss_base_model_version"] == "anima"
    assert not {"lora_adapter_metadata", "unet", "unet:12:rank"} & texts.keys()


def test_mixed_ranks_are_dynamic():
    texts = written({}, lora(4, 4.0), lora(2, 4.0))
    assert (texts["ss_network_dim"], texts["ss_network_alpha"]) == ("Dynamic", "4")


def test_a_noise_predicting_family_may_say_v():
    assert written({"modelspec.prediction_type": "v"}, family=SD15)["modelspec.prediction_type"] == "v"
    assert written({}, family=SD15)["modelspec.prediction_type"] == "epsilon"


def test_the_algorithm_is_named_as_lycoris_does():
    glora = SiteAdapter("glora", {role: torch.zeros(4, 4) for role in ("a1", "a2", "b1", "b2")})
    texts = written({}, glora)
    assert texts["ss_network_module"] == "lycoris.kohya"
    assert json.loads(texts["ss_network_args"]) == {"algo": "glora"}


def test_oversized_texts_are_left_out_with_a_note():
    source = {"modelspec.thumbnail": "x" * (MAX_METADATA_TEXT_BYTES + 1), "ss_tag_frequency": "y" * 200_000}
    texts, findings = build_adapter_metadata(source, adapter(lora()), ANIMA, Receipt("convert"), {})
    assert "modelspec.thumbnail" not in texts
    assert texts["ss_tag_frequency"] == source["ss_tag_frequency"]
    assert [(finding.code, finding.subject) for finding in findings] == [("METADATA-TOO-LARGE", "modelspec.thumbnail")]


def test_the_header_as_a_whole_is_bounded():
    texts, findings = drop_oversized_texts({f"ss_{i}": "x" * (MAX_METADATA_TEXT_BYTES - i) for i in range(70)})
    assert sum(map(len, texts.values())) <= 64 * 2**20
    assert (
        {finding.subject for finding in findings}
        == {f"ss_{i}" for i in range(70)} - texts.keys()
        == {f"ss_{i}" for i in range(6)}
    )


def test_the_receipt_says_what_was_done():
    receipt = Receipt("convert", (("a.safetensors", "abc"),), "growing", {"delta": 1e-9}, ("28 to 40",))
    texts = build_adapter_metadata({"ss_seed": "1"}, adapter(lora()), ANIMA, receipt, {})[0]
    told = json.loads(texts[RECEIPT_METADATA_KEY])
    assert told["sources"] == [{"name": "a.safetensors", "fingerprint": "abc"}]
    assert (told["verb"], told["class"], told["errors"]) == ("convert", "growing", {"delta": 1e-9})
    again = build_adapter_metadata(texts, adapter(lora()), ANIMA, Receipt("convert"), {})[0]
    assert read_applied_block_maps(again) == ("28 to 40",)
    assert read_applied_block_maps({RECEIPT_METADATA_KEY: "{broken"}) == read_applied_block_maps({}) == ()
