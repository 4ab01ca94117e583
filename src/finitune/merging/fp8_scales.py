"""Weights stored as 8-bit floats with one scale for the whole tensor: weight = code * scale.

A merged weight has another range, so it gets another scale: the one that maps its largest magnitude to the format's
largest number. A scale kept from the base would cut off what has grown, and waste a bit of what has shrunk.
Sources: ComfyUI comfy/ops.py (`scale_weight`), Hugging Face's and NVIDIA's fp8 checkpoints (`weight_scale`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from finitune.errors import ModelError
from finitune.files.tensorfile import TensorEntry
from finitune.merging.rounding import RowRounder

FP8_SCALE_SUFFIXES = (".scale_weight", ".weight_scale")
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
FOREIGN_FP8_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale_2", ".weight_block_scale")
"""Scales of blocks, or of scales: other formats."""


@dataclass(frozen=True)
class TensorScale:
    """Where the scale of a tensor of codes lies."""

    key: str
    entry: TensorEntry

    def value(self) -> float:
        """The scale, a positive finite number; raises ModelError where it is none."""
        from finitune.merging.stream import read_whole_tensor

        value = float(read_whole_tensor(self.entry))
        if not 0 < value < float("inf"):
            raise ModelError(
                f"the scale {self.key} is {value}",
                code="MERGE-FP8-SCALE",
                subject=self.key,
                evidence={"scale": value},
                remedy="The base is damaged. Fetch it again.",
            )
        return value


def find_fp8_scales(entries: Mapping[str, TensorEntry]) -> dict[str, TensorScale]:
    """{key of a weight in 8 bits: its scale}, where it has one for the whole tensor."""
    found: dict[str, TensorScale] = {}
    for key, entry in entries.items():
        stem = key.removesuffix(".weight")
        if entry.dtype in _FP8_DTYPES and stem != key:
            for name in (stem + suffix for suffix in FP8_SCALE_SUFFIXES):
                if name in entries and entries[name].size_bytes == entries[name].torch_dtype.itemsize:
                    found[key] = TensorScale(name, entries[name])
    return found


def require_single_scale(key: str, entries: Mapping[str, TensorEntry], scales: Mapping[str, TensorScale]) -> None:
    """Raise ModelError where a weight that is to change has scales of another kind than one for all."""
    stem = key.removesuffix(".weight")
    others = [
        stem + suffix for suffix in (*FP8_SCALE_SUFFIXES, *FOREIGN_FP8_SCALE_SUFFIXES) if stem + suffix in entries
    ]
    if others and key not in scales:
        raise ModelError(
            f"{key} is quantised with {others[0]} of shape {list(entries[others[0]].shape)}, not with one scale",
            code="MERGE-FP8-SCALE",
            subject=key,
            evidence={"dtype": entries[key].dtype, "scale_shape": list(entries[others[0]].shape)},
            remedy="Merge into the unquantised base and quantise the result.",
        )


def requantise_to_fp8(
    after: Tensor, scale: TensorScale, rounder: RowRounder, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """fp64 `after` as codes and their new scale, as it can be stored; rounded once. Zeros keep scale 1."""
    largest = float(after.abs().max()) if after.numel() else 0.0
    stored = torch.tensor(largest / torch.finfo(dtype).max or 1.0).to(scale.entry.torch_dtype)
    value = float(stored) or 1.0
    codes = torch.empty(after.shape, dtype=dtype)
    rounder(after / value, codes)
    return codes, value
