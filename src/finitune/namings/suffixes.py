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

SuffixDialect = Literal["kohya", "peft", "genmo", "diffusers-old", "xlabs", "ai-toolkit", "comfy", "bfl", "cloneofsimo"]


@dataclass(frozen=True)
class KeySuffix:
    """One way to spell a role: the `text` behind the module's name, with its dot.

    `algorithms` may have the role, all where empty. `inner` ends the module's name where the key leaves that out
    (".processor.to_q_lora.up.weight" belongs to ".to_q"). `named`: PEFT's name of the adapter may stand behind the
    first word (".lora_A.default.weight"). `written` is False for what we read and other programs would not.
    """

    text: str
    role: str
    algorithms: tuple[str, ...]
    dialects: tuple[SuffixDialect, ...]
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

        >>> split_adapter_key("a.to_q.lora_A.default.weight")[1].name_in("a.to_q.lora_A.default.weight")
        'default'
        """
        found = re.search(f"{self.pattern('?P<name>')}$", key) if self.named else None
        return (found["name"] or "").removeprefix(".") if found else ""


def make_shared_suffixes(algorithm: str, stem: str, *roles: str) -> Iterator[KeySuffix]:
    """Roles that kohya's programs and PEFT spell alike, behind a stem."""
    for role in roles:
        yield KeySuffix(f".{stem}_{role}", role, (algorithm,), ("kohya", "peft"), named=True)


def make_lora_suffixes(
    down: str, up: str, dialect: SuffixDialect, inner: str = "", named: bool = False
) -> Iterator[KeySuffix]:
    """The two matrices of a LoRA."""
    yield KeySuffix(down, "down", ("lora",), (dialect,), inner, named)
    yield KeySuffix(up, "up", ("lora",), (dialect,), inner, named)


def make_processor_suffixes(word: str, inner: str, dialect: SuffixDialect) -> Iterator[KeySuffix]:
    """LoRA in an attention processor, which knows its attention's layers by words of its own."""
    yield from make_lora_suffixes(f".{word}.down.weight", f".{word}.up.weight", dialect, inner)


ADAPTER_SUFFIXES: tuple[KeySuffix, ...] = (
    *make_lora_suffixes(".lora_down.weight", ".lora_up.weight", "kohya"),
    KeySuffix(".lora_mid.weight", "mid", ("lora",), ("kohya",)),
    KeySuffix(".lora_up.bias", "up_bias", ("lora",), ("kohya",), written=False),
    KeySuffix(".alpha", "alpha", (), ("kohya",)),
    KeySuffix(".dora_scale", "magnitude", (), ("kohya",)),
    KeySuffix(".scalar", "scalar", (), ("kohya",)),
    *make_shared_suffixes("loha", "hada", "w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"),
    *make_shared_suffixes("lokr", "lokr", "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"),
    *(KeySuffix(f".{role}.weight", role, ("glora",), ("kohya",)) for role in ("a1", "a2", "b1", "b2")),
    KeySuffix(".diff", "diff", ("full",), ("kohya",)),
    KeySuffix(".diff_b", "diff_b", (), ("kohya",)),
    *(KeySuffix(f".{role}", role, ("norm",), ("kohya",)) for role in ("w_norm", "b_norm")),
    KeySuffix(".weight", "weight", ("ia3",), ("kohya",)),
    KeySuffix(".on_input", "on_input", ("ia3",), ("kohya",)),
    KeySuffix(".oft_blocks", "blocks", ("oft", "boft"), ("kohya",)),
    KeySuffix(".oft_diag", "rotation", ("oft",), ("kohya",)),
    KeySuffix(".rescale", "rescale", ("oft", "boft"), ("kohya",)),
    *(KeySuffix(f".bias_{part}", f"residual_{part}", ("lora",), ("kohya",)) for part in ("indices", "values", "size")),
    *(KeySuffix(f".{role}.weight", role, ("tlora",), ("kohya",)) for role in ("q_layer", "p_layer")),
    KeySuffix(".lambda_layer", "lambda_layer", ("tlora",), ("kohya",)),
    *make_lora_suffixes(".lora_A.weight", ".lora_B.weight", "peft", named=True),
    KeySuffix(".lora_B.bias", "up_bias", ("lora",), ("peft",), named=True),
    KeySuffix(".lora_magnitude_vector.weight", "magnitude", (), ("peft",), named=True),
    KeySuffix(".lora_magnitude_vector", "magnitude", (), ("peft",), named=True),
    KeySuffix(".lora_embedding_A", "embedding_down", ("lora",), ("peft",), named=True),
    KeySuffix(".lora_embedding_B", "embedding_up", ("lora",), ("peft",), named=True),
    KeySuffix(".oft_R.weight", "packed", ("oft_v2",), ("peft",), named=True),
    KeySuffix(".oft_R.scaled_oft", "scaled", ("oft_v2",), ("peft",), named=True),
    KeySuffix(".ia3_l", "factor", ("ia3",), ("peft",), named=True),
    *make_lora_suffixes(".lora_A", ".lora_B", "genmo"),
    KeySuffix(".magnitude", "magnitude", (), ("ai-toolkit",)),
    *make_lora_suffixes("_lora.down.weight", "_lora.up.weight", "diffusers-old"),
    *make_lora_suffixes(".lora.down.weight", ".lora.up.weight", "diffusers-old"),
    *make_lora_suffixes(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", "diffusers-old"),
    *(
        suffix
        for word in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        for suffix in make_processor_suffixes(f"processor.{word}_lora", f".{word}", "diffusers-old")
    ),
    *make_processor_suffixes("processor.to_out_lora", ".to_out.0", "diffusers-old"),
    *make_processor_suffixes("to_out_lora", ".to_out.0", "diffusers-old"),
    *make_processor_suffixes("processor.qkv_lora1", ".img_attn.qkv", "xlabs"),
    *make_processor_suffixes("processor.qkv_lora2", ".txt_attn.qkv", "xlabs"),
    *make_processor_suffixes("processor.proj_lora1", ".img_attn.proj", "xlabs"),
    *make_processor_suffixes("processor.proj_lora2", ".txt_attn.proj", "xlabs"),
    *make_processor_suffixes("processor.qkv_lora", ".linear1", "xlabs"),
    *make_processor_suffixes("processor.proj_lora", ".linear2", "xlabs"),
    *make_lora_suffixes(":down", ":up", "cloneofsimo"),
    KeySuffix(".set_weight", "weight", ("set",), ("comfy",)),
    KeySuffix(".reshape_weight", "reshape", (), ("comfy",)),
    KeySuffix(".scale", "weight", ("set",), ("bfl",)),
)

_SUFFIXES_BY_LENGTH = tuple(sorted(ADAPTER_SUFFIXES, key=lambda suffix: -len(suffix.text)))
_SUFFIXED_KEY_PATTERN = re.compile(
    "(.+?)(?:" + "|".join(f"({suffix.pattern()})" for suffix in _SUFFIXES_BY_LENGTH) + ")", re.DOTALL
)


def split_adapter_key(key: str) -> tuple[str, KeySuffix] | None:
    """A key's module name and suffix, or None where no suffix of the table ends it.

    >>> module, suffix = split_adapter_key("blocks.0.attn.to_q.lora_A.default_0.weight")
    >>> module, suffix.role
    ('blocks.0.attn.to_q', 'down')
    """
    found = _SUFFIXED_KEY_PATTERN.fullmatch(key)
    if found is None or found.lastindex is None:
        return None
    suffix = _SUFFIXES_BY_LENGTH[found.lastindex - 2]
    return found[1] + suffix.inner, suffix


def find_suffix(role: str, algorithm: str, dialects: Sequence[str]) -> KeySuffix | None:
    """How the first of `dialects` that can spells a role of an algorithm; None where none of them can.

    >>> find_suffix("down", "lora", ("peft", "kohya")).text
    '.lora_A.weight'
    """
    for dialect in dialects:
        for suffix in ADAPTER_SUFFIXES:
            fits = suffix.written and (not suffix.algorithms or algorithm in suffix.algorithms)
            if suffix.role == role and fits and dialect in suffix.dialects and not suffix.inner:
                return suffix
    return None
