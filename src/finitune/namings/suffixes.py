"""What may follow a module's name in an adapter file, and which role it gives the tensor: one table, read both ways.

A key is divided at the longest suffix of the table that ends it, never by position. Beside the roles of the
algorithms themselves there are roles that a file has and an adapter has not; reading turns them into what they mean:

alpha           the numerator of the scale; for the rotations of LyCORIS and kohya, their constraint
magnitude       DoRA's norms
scalar          a factor that belongs to the change (LyCORIS before 2.0)
on_input        the side of an IA3
factor          PEFT's IA3, which is 1 + w
rotation        R itself, where `blocks` is the matrix that it is made of (LyCORIS before 2.0)
scaled          OneTrainer's mark that packed rotations are divided by 2 sqrt(b - 1)
reshape         the shape that the base weight is widened to first
embedding_down, embedding_up                 LoRA of an embedding, whose weight is transposed
residual_indices, _values, _size             what an extracted LoRA left over, as a sparse matrix
q_layer, p_layer, lambda_layer               T-LoRA, which is a LoRA together with the model's own weight
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["kohya", "peft", "genmo", "diffusers-old", "xlabs", "ai-toolkit", "comfy", "bfl", "cloneofsimo"]


@dataclass(frozen=True)
class Suffix:
    """One way to spell a role: the `text` behind the module's name, with its dot.

    `algorithms` may have the role, all where empty. `inner` ends the module's name where the key leaves that out
    (".processor.to_q_lora.up.weight" belongs to ".to_q"). `named`: PEFT's name of the adapter may stand behind the
    first word (".lora_A.default.weight"). `written` is False for what we read and other programs would not.
    """

    text: str
    role: str
    algorithms: tuple[str, ...]
    dialects: tuple[Dialect, ...]
    inner: str = ""
    named: bool = False
    written: bool = True

    def pattern(self, group: str = "?:") -> str:
        """The suffix as a regular expression; the adapter's name and its dot are in a `group`."""
        head, dot, tail = self.text[1:].partition(".")
        name = rf"({group}\.(?!weight$|bias$)[\w-]+)?" if self.named else ""
        return re.escape(self.text[0] + head) + name + re.escape(dot + tail)

    def name_in(self, key: str) -> str:
        """PEFT's name of the adapter in a key that this suffix ends; '' where there is none.

        >>> split("a.to_q.lora_A.default.weight")[1].name_in("a.to_q.lora_A.default.weight")
        'default'
        """
        found = re.search(f"{self.pattern('?P<name>')}$", key) if self.named else None
        return (found["name"] or "").removeprefix(".") if found else ""


def factors(algorithm: str, stem: str, *roles: str) -> Iterator[Suffix]:
    """Roles that kohya's programs and PEFT spell alike, behind a stem."""
    for role in roles:
        yield Suffix(f".{stem}_{role}", role, (algorithm,), ("kohya", "peft"), named=True)


def low_rank(down: str, up: str, dialect: Dialect, inner: str = "", named: bool = False) -> Iterator[Suffix]:
    """The two matrices of a LoRA."""
    yield Suffix(down, "down", ("lora",), (dialect,), inner, named)
    yield Suffix(up, "up", ("lora",), (dialect,), inner, named)


def processor(word: str, inner: str, dialect: Dialect) -> Iterator[Suffix]:
    """LoRA in an attention processor, which knows its attention's layers by words of its own."""
    yield from low_rank(f".{word}.down.weight", f".{word}.up.weight", dialect, inner)


SUFFIXES: tuple[Suffix, ...] = (
    *low_rank(".lora_down.weight", ".lora_up.weight", "kohya"),
    Suffix(".lora_mid.weight", "mid", ("lora",), ("kohya",)),
    Suffix(".lora_up.bias", "up_bias", ("lora",), ("kohya",), written=False),
    Suffix(".alpha", "alpha", (), ("kohya",)),
    Suffix(".dora_scale", "magnitude", (), ("kohya",)),
    Suffix(".scalar", "scalar", (), ("kohya",)),
    *factors("loha", "hada", "w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"),
    *factors("lokr", "lokr", "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"),
    *(Suffix(f".{role}.weight", role, ("glora",), ("kohya",)) for role in ("a1", "a2", "b1", "b2")),
    Suffix(".diff", "diff", ("full",), ("kohya",)),
    Suffix(".diff_b", "diff_b", (), ("kohya",)),
    *(Suffix(f".{role}", role, ("norm",), ("kohya",)) for role in ("w_norm", "b_norm")),
    Suffix(".weight", "weight", ("ia3",), ("kohya",)),
    Suffix(".on_input", "on_input", ("ia3",), ("kohya",)),
    Suffix(".oft_blocks", "blocks", ("oft", "boft"), ("kohya",)),
    Suffix(".oft_diag", "rotation", ("oft",), ("kohya",)),
    Suffix(".rescale", "rescale", ("oft", "boft"), ("kohya",)),
    *(Suffix(f".bias_{part}", f"residual_{part}", ("lora",), ("kohya",)) for part in ("indices", "values", "size")),
    *(Suffix(f".{role}.weight", role, ("tlora",), ("kohya",)) for role in ("q_layer", "p_layer")),
    Suffix(".lambda_layer", "lambda_layer", ("tlora",), ("kohya",)),
    *low_rank(".lora_A.weight", ".lora_B.weight", "peft", named=True),
    Suffix(".lora_B.bias", "up_bias", ("lora",), ("peft",), named=True),
    Suffix(".lora_magnitude_vector.weight", "magnitude", (), ("peft",), named=True),
    Suffix(".lora_magnitude_vector", "magnitude", (), ("peft",), named=True),
    Suffix(".lora_embedding_A", "embedding_down", ("lora",), ("peft",), named=True),
    Suffix(".lora_embedding_B", "embedding_up", ("lora",), ("peft",), named=True),
    Suffix(".oft_R.weight", "packed", ("oft_v2",), ("peft",), named=True),
    Suffix(".oft_R.scaled_oft", "scaled", ("oft_v2",), ("peft",), named=True),
    Suffix(".ia3_l", "factor", ("ia3",), ("peft",), named=True),
    *low_rank(".lora_A", ".lora_B", "genmo"),
    Suffix(".magnitude", "magnitude", (), ("ai-toolkit",)),
    *low_rank("_lora.down.weight", "_lora.up.weight", "diffusers-old"),
    *low_rank(".lora.down.weight", ".lora.up.weight", "diffusers-old"),
    *low_rank(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", "diffusers-old"),
    *(
        suffix
        for word in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        for suffix in processor(f"processor.{word}_lora", f".{word}", "diffusers-old")
    ),
    *processor("processor.to_out_lora", ".to_out.0", "diffusers-old"),
    *processor("to_out_lora", ".to_out.0", "diffusers-old"),
    *processor("processor.qkv_lora1", ".img_attn.qkv", "xlabs"),
    *processor("processor.qkv_lora2", ".txt_attn.qkv", "xlabs"),
    *processor("processor.proj_lora1", ".img_attn.proj", "xlabs"),
    *processor("processor.proj_lora2", ".txt_attn.proj", "xlabs"),
    *processor("processor.qkv_lora", ".linear1", "xlabs"),
    *processor("processor.proj_lora", ".linear2", "xlabs"),
    *low_rank(":down", ":up", "cloneofsimo"),
    Suffix(".set_weight", "weight", ("set",), ("comfy",)),
    Suffix(".reshape_weight", "reshape", (), ("comfy",)),
    Suffix(".scale", "weight", ("set",), ("bfl",)),
)

LONGEST_FIRST = tuple(sorted(SUFFIXES, key=lambda suffix: -len(suffix.text)))
PATTERN = re.compile("(.+?)(?:" + "|".join(f"({suffix.pattern()})" for suffix in LONGEST_FIRST) + ")", re.DOTALL)


def split(key: str) -> tuple[str, Suffix] | None:
    """A key's module name and suffix, or None where no suffix of the table ends it.

    >>> module, suffix = split("blocks.0.attn.to_q.lora_A.default_0.weight")
    >>> module, suffix.role
    ('blocks.0.attn.to_q', 'down')
    """
    found = PATTERN.fullmatch(key)
    if found is None or found.lastindex is None:
        return None
    suffix = LONGEST_FIRST[found.lastindex - 2]
    return found[1] + suffix.inner, suffix


def suffix_of(role: str, algorithm: str, dialects: Sequence[str]) -> Suffix | None:
    """How the first of `dialects` that can spells a role of an algorithm; None where none of them can.

    >>> suffix_of("down", "lora", ("peft", "kohya")).text
    '.lora_A.weight'
    """
    for dialect in dialects:
        for suffix in SUFFIXES:
            fits = suffix.written and (not suffix.algorithms or algorithm in suffix.algorithms)
            if suffix.role == role and fits and dialect in suffix.dialects and not suffix.inner:
                return suffix
    return None
