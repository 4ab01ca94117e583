"""The pictures and captions of pico-anima, and the tokenizers made of the captions."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
PICTURE_SIZE = 64
CONTEXT_TOKENS = 32
VOCABULARY = 1024
WORDINGS = ("{}", "{}", "{}", "an emoji of {}", "{} emoji", "a picture of {}", "emoji: {}")


def named_glyphs() -> list[tuple[int, str]]:
    """Code points of the font with a Unicode name of their own, and that name in lower case."""
    from fontTools.ttLib import TTFont

    unwanted = ("REGIONAL", "TAG", "VARIATION", "CANCEL", "EMOJI MODIFIER", "ZERO WIDTH", "COMBINING")
    with TTFont(FONT) as font:
        points = sorted(font.getBestCmap())
    named = [(point, unicodedata.name(chr(point), "")) for point in points if point > 0x2000]
    return [(p, n.lower()) for p, n in named if n and not any(word in n for word in unwanted)]


def draw_glyph(point: int) -> Tensor:
    """One glyph, centred on white: uint8 (3, 64, 64)."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(FONT), 109)  # the only size of the font's bitmap strike
    canvas = Image.new("RGBA", (160, 160), "white")
    left, top, right, bottom = font.getbbox(chr(point))
    origin = (80 - (left + right) / 2, 80 - (top + bottom) / 2)
    ImageDraw.Draw(canvas).text(origin, chr(point), font=font, embedded_color=True)
    small = canvas.crop((10, 10, 150, 150)).convert("RGB").resize((PICTURE_SIZE,) * 2, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def draw_pictures(work: Path) -> tuple[Tensor, list[str]]:
    """All distinct glyphs: uint8 (N, 3, 64, 64) and their names."""
    seen, pictures, names = set(), [], []
    for point, name in named_glyphs():
        picture = draw_glyph(point)
        key = picture.numpy().tobytes()
        if picture.float().std() < 8 or key in seen:
            continue
        seen.add(key)
        pictures.append(picture)
        names.append(name)
    (work / "names.json").write_text(json.dumps(names, indent=0))
    return torch.stack(pictures), names


def train_tokenizers(names: list[str], work: Path):
    """The two tokenizers, trained on the captions: Qwen2 (byte-level BPE) and T5 (unigram)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import Qwen2Tokenizer, T5TokenizerFast

    captions = [wording.format(name) for name in names for wording in WORDINGS]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    qwen = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, model_max_length=512)

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.train_from_iterator(
        captions,
        trainers.UnigramTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    unigram.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    t5 = T5TokenizerFast(tokenizer_object=unigram, extra_ids=0, model_max_length=512)
    qwen.save_pretrained(work / "tokenizer")
    t5.save_pretrained(work / "t5_tokenizer")
    return qwen, t5


class Captions:
    """All wordings of all names, tokenised once and padded to one length each."""

    def __init__(self, names: list[str], qwen, t5):
        texts = [wording.format(name) for name in names for wording in WORDINGS] + [""]
        self.wordings = len(WORDINGS)
        self.empty = len(texts) - 1
        a = qwen(texts, padding="longest", return_tensors="pt")
        b = t5(texts, padding="longest", return_tensors="pt")
        if b.input_ids.shape[1] > CONTEXT_TOKENS:
            raise SystemExit(f"a caption has {b.input_ids.shape[1]} T5 tokens; the context holds {CONTEXT_TOKENS}")
        self.columns = (a.input_ids, a.attention_mask, b.input_ids, b.attention_mask)

    def draw(self, pictures: Tensor, dropout: float, generator: torch.Generator) -> list[Tensor]:
        row = pictures * self.wordings + torch.randint(self.wordings, pictures.shape, generator=generator)
        row[torch.rand(pictures.shape, generator=generator) < dropout] = self.empty
        rows = [column[row] for column in self.columns]
        longest = [int(rows[1].sum(1).max().clamp(min=1)), int(rows[3].sum(1).max())]
        return [rows[0][:, : longest[0]], rows[1][:, : longest[0]], rows[2][:, : longest[1]], rows[3][:, : longest[1]]]
