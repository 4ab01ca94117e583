"""Questions to a tape about where a number comes from and where it goes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from finitune.precision.trace import OpRecord, OpTrace

#: Operations that hand on what they read.
_PASS_THROUGH_OPS = frozenset({"clone", "_to_copy", "copy_", "alias", "contiguous", "detach"})
_ATTENTION_VALUE_OPERAND = 2  # the place of the values among an attention's operands


def find_upstream_product(tape: OpTrace, row: OpRecord, half: torch.dtype) -> OpRecord | None:
    """The nearest product upstream of `row` that writes `half`, along the largest operands first."""
    seen: set[int] = set()

    def search(candidate: OpRecord) -> OpRecord | None:
        if candidate.is_product:
            return candidate if candidate.dtype == half else None
        if candidate.ends_norm:
            return None
        operands = [n for n in candidate.operands if n not in seen]
        seen.update(operands)
        ranked = sorted((tape.rows[n] for n in operands), key=lambda r: -r.amax)
        return next((found for found in map(search, ranked) if found), None)

    return search(row)


def find_value_reader(tape: OpTrace, row: OpRecord) -> str | None:
    """The one product that reads `row` through nothing but the values of attentions, or None.

    An attention is linear in its values, so a power of two taken out of them can be put back behind that product.
    """
    readers: set[str] = set()
    for attention, place in _uses(tape, tape.rows.index(row)):
        if "scaled_dot_product" not in tape.rows[attention].op or place != _ATTENTION_VALUE_OPERAND:
            return None
        for reader, _ in _uses(tape, attention):
            if not tape.rows[reader].is_product:
                return None
            readers.add(tape.rows[reader].site)
    return readers.pop() if len(readers) == 1 else None


def _uses(tape: OpTrace, number: int) -> Iterator[tuple[int, int]]:
    """(row, place among its operands) of everything that reads a row, seen through operations that only hand it on."""
    for user, row in enumerate(tape.rows):
        for place, operand in enumerate(row.operands):
            if operand == number and row.op in _PASS_THROUGH_OPS:
                yield from _uses(tape, user)
            elif operand == number:
                yield user, place
