"""Anima's own classes as small as they go, on disk in both layouts, for every test that needs a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finitune.errors import FinituneError
from finitune.files.tensorfile import TensorFile
from finitune.models.anima.load import load_folder
from tests.anima_files import save_three_files

VOCABULARY = 300
LATENT_STD = [0.5 + 0.1 * n for n in range(16)]


def tiny_tokenizers(folder: Path) -> None:
    """A byte-level BPE and a unigram tokenizer of at most VOCABULARY tokens, trained on one sentence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import Qwen2Tokenizer, T5Tokenizer

    text = ["a picture of a red apple on a table"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    Qwen2Tokenizer(vocab=model["vocab"], merges=merges).save_pretrained(folder / "tokenizer")

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(text, trainer)
    unigram.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    T5Tokenizer(tokenizer_object=unigram, extra_ids=0).save_pretrained(folder / "t5_tokenizer")


def tiny_modules() -> dict[str, torch.nn.Module]:
    """Anima's own classes, as small as they go, with random bfloat16 weights."""
    from diffusers import AnimaTextConditioner, AutoencoderKLQwenImage, CosmosTransformer3DModel
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    modules = {
        "transformer": CosmosTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=24,
            num_layers=3,
            text_embed_dim=32,
            adaln_lora_dim=8,
            extra_pos_embed_type=None,
            rope_scale=(1.0, 4.0, 4.0),
        ),
        "text_conditioner": AnimaTextConditioner(
            source_dim=48,
            target_dim=32,
            model_dim=16,
            num_layers=2,
            num_attention_heads=2,
            mlp_ratio=2.5,
            target_vocab_size=VOCABULARY,
            min_sequence_length=16,
        ),
        "text_encoder": Qwen3Model(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            )
        ),
        "vae": AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, latents_std=LATENT_STD),
    }
    return {name: module.bfloat16() for name, module in modules.items()}


@pytest.fixture(name="layouts", scope="module")
def two_layouts(tmp_path_factory) -> tuple[Path, Path]:
    """The tiny model as a diffusers folder, and as three files with the tokenizers."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    root = tmp_path_factory.mktemp("anima")
    folder = root / "folder"
    for name, module in tiny_modules().items():
        module.save_pretrained(folder / name)
    FlowMatchEulerDiscreteScheduler(shift=2.5).save_pretrained(folder / "scheduler")
    tiny_tokenizers(folder)
    save_three_files(load_folder(folder), root / "files")
    return folder, root / "files"


@pytest.fixture(name="folder")
def a_folder(layouts, tmp_path) -> Path:
    return Path(shutil.copytree(layouts[0], tmp_path / "folder"))


@pytest.fixture(name="files")
def three_files(layouts, tmp_path) -> dict[str, Path]:
    place = Path(shutil.copytree(layouts[1], tmp_path / "files"))
    return {
        "dit": place / "anima.safetensors",
        "qwen3": place / "qwen3.safetensors",
        "vae": place / "vae.safetensors",
        "tokenizers": place,
    }


def rewrite(path: Path, change, metadata: dict[str, str] | None = None) -> None:
    """Replace a file's tensors by change(tensors); its metadata too where given."""
    tensors = load_file(path)
    kept = TensorFile(path).metadata if metadata is None else metadata
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, kept)


def refused(kind: type[FinituneError], load, *args, **options) -> FinituneError:
    with pytest.raises(kind) as caught:
        load(*args, **options)
    assert caught.value.subject and caught.value.remedy
    return caught.value
