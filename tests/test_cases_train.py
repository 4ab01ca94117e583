"""Cases from the field at the level of a whole training: NAN-04, DTY-03, DTY-04, CFG-05, CFG-07, RES-07."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finitune.files.tensorfile import TensorFile, compute_tensor_digest, hash_tensor
from finitune.models.pico import get_pico_folder
from tests.train_asked import (
    READ,
    TWO_MODULES,
    Scene,
    Told,
    a_scene,
    ask,
    header_only,
    one_cache_for_all,
    pico_is_read_once,
)

__all__ = ["a_scene", "one_cache_for_all", "pico_is_read_once"]

Entry = dict[str, Tensor]


def adapter(told: Told) -> dict[str, Tensor]:
    return dict(TensorFile(Path(told.report["artifacts"]["kohya"])).tensors())


def same(one: Told, other: Told) -> bool:
    """Whether two trainings ended with the same bits."""
    a, b = adapter(one), adapter(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- NAN-04: caches of another precision, length or model ------------------------------------------------------------


def entries(scene: Scene, kind: str) -> list[Path]:
    return sorted((scene.folder / "own" / kind).glob("*.safetensors"))


def own_cache(scene: Scene, *words: object, **sections: dict[str, Any]) -> Told:
    """Train on a cache that is this test's."""
    training = {"cache_dir": str(scene.folder / "own"), **sections.pop("training", {})}
    return scene.train(*words, training=training, **sections)


def rewrite(path: Path, change: Callable[[Entry], Entry], stated: str = "truly") -> None:
    """An entry with other tensors; what it states of them is true, of the old ones, or not there."""
    file = TensorFile(path)
    tensors = change(dict(file.tensors()))
    checksum = compute_tensor_digest({name: hash_tensor(tensor) for name, tensor in tensors.items()})
    truth = {**file.metadata, "checksum": checksum}
    save_file(tensors, path, {"truly": truth, "falsely": file.metadata}.get(stated))


def shorter(tensors: Entry) -> Entry:
    return {name: tensor[..., :-1].clone() for name, tensor in tensors.items()}


def in_half(tensors: Entry) -> Entry:
    return {name: tensor.half() for name, tensor in tensors.items()}


def with_infinity(tensors: Entry) -> Entry:
    name = next(iter(tensors))
    tensors[name].view(-1)[3] = torch.inf
    return tensors


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "one element inf": (lambda path: rewrite(path, with_infinity), "NaN or infinities"),
    "finite, but fp16": (lambda path: rewrite(path, in_half), "rounded to float16"),
    "cut to another length": (lambda path: rewrite(path, shorter, "falsely"), "not what was written"),
    "without metadata": (lambda path: rewrite(path, dict, "not at all"), "not what was written"),
    "half a file": (lambda path: path.write_bytes(path.read_bytes()[:200]), ""),
    "an npz": (lambda path: path.write_bytes(b"PK\3\4 numpy"), ""),
}


@pytest.mark.parametrize("kind", ["latents", "texts"])
@pytest.mark.parametrize("what", BROKEN)
def test_nan_04_an_entry_that_is_not_as_written_is_made_again_and_told(scene: Scene, what: str, kind: str):
    clean = own_cache(scene)
    spoil, says = BROKEN[what]
    spoiled = entries(scene, kind)[1]
    good = spoiled.read_bytes()
    spoil(spoiled)
    told = own_cache(scene, "--out", scene.folder / "again")
    finding = told.of("CACHE-REMADE")
    assert (told.exit_code, finding["level"], finding["evidence"]["count"]) == (0, "warning", 1)
    assert says in finding["message"] and finding["remedy"]
    assert told.figures[f"{kind}_remade"] == 1
    assert spoiled.read_bytes() == good
    assert same(told, clean)


def test_nan_04_entries_of_another_length_are_left_alone_and_not_used(scene: Scene):
    own_cache(scene)
    before = entries(scene, "texts")
    told = own_cache(scene, training={"qwen3_max_token_length": 3})
    finding = told.of("CACHE-STALE")
    assert "tokens was 512, 512, is 3, 512" in finding["message"] and finding["remedy"]
    assert (told.figures["texts_reused"], told.figures["latents_made"]) == (0, 0)
    assert set(before) < set(entries(scene, "texts"))


def test_nan_04_entries_of_another_model_are_left_alone_and_not_used(scene: Scene):
    own_cache(scene)
    before = entries(scene, "latents")
    other = scene.folder / "other"
    shutil.copytree(get_pico_folder(), other)
    file = other / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["encoder.conv_in.bias"] += 0.01
    save_file(tensors, file)
    told = own_cache(scene, model={"pretrained_model_name_or_path": str(other)})
    assert "vae was" in told.of("CACHE-STALE")["message"]
    assert (told.figures["latents_reused"], told.figures["texts_made"]) == (0, 0)
    assert set(before) < set(entries(scene, "latents"))


def test_nan_04_the_precision_of_training_is_none_of_the_caches_business(scene: Scene):
    """Encoders compute in fp32 whatever the denoiser does: one cache serves all, and each gets what it would make."""
    own_cache(scene)
    shared = own_cache(scene, "--out", scene.folder / "shared", model={"precision": "bf16"})
    assert (shared.figures["latents_made"], shared.figures["texts_made"]) == (0, 0)
    shutil.rmtree(scene.folder / "own")
    alone = own_cache(scene, "--out", scene.folder / "alone", model={"precision": "bf16"})
    assert same(shared, alone)


def test_nan_04_the_caches_of_other_programs_are_neither_read_nor_touched(scene: Scene):
    clean = scene.train()
    theirs = scene.put("pictures/banana_te.npz", b"PK\3\4 inf")
    told = scene.train("--out", scene.folder / "again")
    assert same(told, clean)
    assert theirs.read_bytes() == b"PK\3\4 inf"


# --- DTY-03, DTY-04: dtypes that meet --------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"algorithm": "lokr", "factor": 4},
    "loha": {"algorithm": "loha"},
    "dora": {"algorithm": "lora", "dora": True},
    "oft": {"algorithm": "oft", "network_dim": 4},
}
CLOSE = {"fp32": 1e-6, "bf16": 0.03, "planned-half": 5e-3}
"""How far the first loss may be from that of fp32, as a share."""
FIRST: dict[str, float] = {}


def one_step(scene: Scene, kind: str, precision: str, **training: Any) -> Told:
    return scene.train(
        "--out",
        scene.folder / f"{kind}-{precision}-{len(training)}",
        model={"precision": precision},
        network=KINDS[kind],
        training={"max_train_steps": 1, **training},
    )


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("kind", KINDS)
def test_dty_04_fp32_factors_over_bases_of_every_precision(scene: Scene, kind: str, precision: str):
    """With checkpointing and without: the same bits. The masters are fp32, and so is the file."""
    told, again = one_step(scene, kind, precision), one_step(scene, kind, precision, gradient_checkpointing=True)
    for one in (told, again):
        assert one.exit_code == 0 and one.figures["non_finite_steps"] == 0
    assert again.steps() == told.steps()
    assert same(told, again)
    tensors = adapter(told)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    first = FIRST.setdefault(kind, one_step(scene, kind, "fp32").steps()[0])
    assert told.steps()[0] == pytest.approx(first, rel=CLOSE[precision])


@pytest.mark.parametrize(
    ("precision", "storage"), [("fp32", "fp8"), ("bf16", "bf16"), ("planned-half", "fp16"), ("planned-half", "fp8")]
)
def test_dty_03_previews_and_measurements_in_the_middle_of_a_training(scene: Scene, precision: str, storage: str):
    """The VAE and the texts' modules are fp32, the denoiser is not, the adapter is: every border has its cast."""
    told = scene.train(
        model={"precision": precision, "storage": storage},
        network={"only_patterns": [*TWO_MODULES, r".*llm_adapter.*blocks\.0\..*"], "train_llm_adapter": True},
        preview={"sample_prompts": ["blue ink"], "sample_every_n_steps": 1, "sample_steps": 1, "sample_cfg": 1},
        validation={"validation_sigmas": [0.5], "validate_every_n_steps": 1},
        general={"resolution": 64, "validation_split": 0.34},
    )
    assert told.exit_code == 0
    assert "PREVIEW-FAILED" not in [finding["code"] for finding in told.findings]
    assert len(list((scene.run / "previews").glob("step*.png"))) == 3
    assert told.figures["validation_loss"] > 0


# --- CFG-05: options of kohya's that get in each other's way ---------------------------------------------------------

UNET = "--network_train_unet_only "
FREE = "taken"
"""What other programs forbid and what works here."""


def by_flags(scene: Scene, flags: str) -> Told:
    """A training by sd-scripts' command line, explained."""
    command = (
        "anima_train_network.py --pretrained_model_name_or_path=pico-anima --network_module networks.lora_anima "
        "--network_dim 2 --output_dir run --max_train_steps 2 --optimizer_type AdamW --dataset_config data.toml "
    )
    scene.put("data.toml", "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'pictures'\n")
    return ask("--from", command + flags, "--explain")


@pytest.mark.parametrize(
    ("flags", "key", "fate", "code"),
    [
        (f"{UNET}--cache_text_encoder_outputs --shuffle_caption", "--shuffle_caption", FREE, None),
        (f"{UNET}--cache_text_encoder_outputs --caption_dropout_rate 0.1", "--caption_dropout_rate", FREE, None),
        ("--cache_text_encoder_outputs", "--cache_text_encoder_outputs", FREE, None),
        (f"{UNET}--cache_latents --color_aug", "--color_aug", FREE, "LATENTS-NOT-CACHED"),
        (f"{UNET}--cache_latents --random_crop", "--random_crop", FREE, "LATENTS-NOT-CACHED"),
        (f"{UNET}--fp8_base --full_fp16", "--full_fp16", "not supported", "CONFIG-UNSUPPORTED-KEY"),
        (f"{UNET}--text_encoder_lr 1e-5", "--text_encoder_lr", "has no effect in the original either", None),
    ],
)
def test_cfg_05_what_is_no_conflict_here_goes_on(scene: Scene, flags: str, key: str, fate: str, code: str | None):
    told = by_flags(scene, flags)
    (line,) = [line for line in told.figures["keys"] if line["key"] == key]
    assert line["fate"] == fate
    assert told.exit_code == 0
    assert code is None or told.of(code)["level"] in ("note", "warning")


def test_cfg_05_what_is_one_is_told_before_any_model_is_read(scene: Scene):
    told = by_flags(scene, f"{UNET}--blocks_to_swap 2 --torch_compile")
    assert told.errors == ["COMPILE-OFFLOAD"]
    assert "Leave torch_compile out" in told.of("COMPILE-OFFLOAD")["remedy"]
    assert READ == []


# --- CFG-07: the family is the file's, whatever is said of it --------------------------------------------------------

UNET_PREFIX = "model.diffusion_model.input_blocks"
FAMILIES: dict[str, dict[str, tuple[int, ...]]] = {
    "Stable Diffusion 1.5": {
        f"{UNET_PREFIX}.0.0.weight": (320, 4, 3, 3),
        f"{UNET_PREFIX}.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
        "cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight": (768, 768),
    },
    "Stable Diffusion XL": {
        f"{UNET_PREFIX}.0.0.weight": (320, 4, 3, 3),
        f"{UNET_PREFIX}.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 2048),
        "conditioner.embedders.1.model.ln_final.weight": (1280,),
        "model.diffusion_model.label_emb.0.0.weight": (1280, 2816),
    },
    "Flux.1": {
        "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
        "single_blocks.0.linear1.weight": (21504, 3072),
        "img_in.weight": (3072, 64),
    },
    "Qwen-Image": {
        "transformer_blocks.0.attn.add_q_proj.weight": (3072, 3072),
        "transformer_blocks.0.attn.to_q.weight": (3072, 3072),
        "transformer_blocks.0.img_mlp.net.0.proj.weight": (12288, 3072),
        "txt_norm.weight": (3584,),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_cfg_07_a_model_of_another_family_is_named_by_its_header(scene: Scene, family: str):
    header_only(scene.folder / "model.safetensors", FAMILIES[family])
    told = scene.train(model={"pretrained_model_name_or_path": "model.safetensors"})
    finding = told.of("MODEL-OTHER-FAMILY")
    assert told.errors == ["MODEL-OTHER-FAMILY"]
    assert finding["message"] == f"model.safetensors is of {family}; adapters are trained here for Anima alone"
    assert finding["subject"] == "model.pretrained_model_name_or_path" and "Anima" in finding["remedy"]
    assert not scene.run.exists()


def test_cfg_07_a_family_that_nobody_here_knows_is_not_guessed(scene: Scene):
    unknown = {"context_refiner.0.attention.qkv.weight": (11520, 3840), "cap_embedder.1.weight": (3840, 2560)}
    header_only(scene.folder / "model.safetensors", unknown)
    told = scene.train(model={"pretrained_model_name_or_path": "model.safetensors"})
    assert told.errors == ["MODEL-WRONG-PART"]
    assert told.of("MODEL-WRONG-PART")["remedy"] == "It is not a file of Anima, or is of a format not known here."


def test_cfg_07_an_anima_of_one_file_is_not_taken_for_another(scene: Scene):
    header_only(
        scene.folder / "model.safetensors",
        {
            "net.blocks.0.self_attn.q_proj.weight": (2048, 2048),
            "net.blocks.0.adaln_modulation_self_attn.1.weight": (256, 2048),
            "net.x_embedder.proj.1.weight": (2048, 68),
        },
    )
    assert scene.train(model={"pretrained_model_name_or_path": "model.safetensors"}).errors == ["MODEL-FILES-MISSING"]


# --- RES-07: memory is measured and told before the run --------------------------------------------------------------


def test_res_07_what_a_step_takes_is_told_before_the_first(scene: Scene):
    told = scene.train("--dry-run")
    evidence = told.of("FITS")["evidence"]
    assert 0 < evidence["peak_bytes"] < evidence["total_bytes"]
    assert told.figures["measured_memory_peak"] == evidence["peak_bytes"]
    assert not list(scene.run.glob("*.safetensors"))
