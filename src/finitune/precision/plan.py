"""The precision plan: what deviates from plain fp16, where, why, and on what evidence. A text file that diffs well.

A plan without lines is plain fp16. A line names a product whose result fp16 cannot hold (or a module that must
compute in fp32), the power of two its input is divided by, the reason, and the range that was measured. What follows
from the lines needs none: where one operand is fp32, promotion keeps the sum fp32 (the residual stream); `casts` lists
the norms that read such a stream and hand on fp16, once, for all products behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from finitune.errors import PlanError

_PLAN_FORMAT = 1
_MAX_PLAN_EXPONENT = 126
PlanLineKind = Literal["product", "island"]


@dataclass(frozen=True)
class PlanLine:
    """One deviation from plain fp16.

    product: operands stay fp16, the input is divided by 2**exponent (None: by a power of two measured in each call),
    the stored weight by 2**weight_exponent, and the result is written in `out`. With `carry` the result is stored
    divided by 2**carry, and `carried_to`, the product that reads it through linear operations alone (the values of an
    attention), multiplies it back. island: the whole module computes in fp32.
    """

    site: str
    kind: PlanLineKind = "product"
    out: Literal["fp16", "fp32"] = "fp32"
    exponent: int | None = 0
    weight_exponent: int = 0
    carry: int = 0
    carried_to: str = ""
    reason: str = ""
    input_amax: float = 0.0
    output_amax: float = 0.0

    def __post_init__(self) -> None:
        powers = (self.exponent or 0, self.weight_exponent, self.carry)
        if any(type(power) is not int or abs(power) > _MAX_PLAN_EXPONENT for power in powers):
            raise ValueError(f"{self.site}: exponents {powers} are not whole numbers up to {_MAX_PLAN_EXPONENT}")
        if self.kind not in ("product", "island") or self.out not in ("fp16", "fp32"):
            raise ValueError(f"{self.site}: no such kind or out: {self.kind}, {self.out}")
        if bool(self.carry) != bool(self.carried_to):
            raise ValueError(f"{self.site}: carry and carried_to go together")


@dataclass(frozen=True)
class ComponentPlan:
    """The plan of one component: its lines, the norms that return to fp16, and the dtype of its border."""

    lines: tuple[PlanLine, ...] = ()
    casts: tuple[str, ...] = ()
    border: Literal["fp16", "fp32"] = "fp16"

    def without(self, line: PlanLine) -> ComponentPlan:
        """The same plan with one line dropped."""
        return replace(self, lines=tuple(kept for kept in self.lines if kept != line))

    def with_line(self, line: PlanLine) -> ComponentPlan:
        """The same plan with `line` added, in place of earlier lines of its site, or within it if it is an island."""
        inside = f"{line.site}." if line.kind == "island" else None
        kept = (o for o in self.lines if o.site != line.site and not (inside and o.site.startswith(inside)))
        return replace(self, lines=(*kept, line))

    def moved(self, places: Mapping[str, str]) -> ComponentPlan:
        """The same plan for a model in which some sites stand elsewhere, as {site: its new name}."""

        def place(site: str) -> str:
            return places.get(site, site)

        lines = (replace(line, site=place(line.site), carried_to=place(line.carried_to)) for line in self.lines)
        return replace(self, lines=tuple(lines), casts=tuple(map(place, self.casts)))

    @property
    def islands(self) -> tuple[str, ...]:
        """The modules that compute in fp32."""
        return tuple(line.site for line in self.lines if line.kind == "island")

    def in_island(self, site: str) -> bool:
        """True for an island and for every module within one."""
        return any(site == island or site.startswith(f"{island}.") for island in self.islands)


@dataclass(frozen=True)
class PrecisionPlan:
    """A checkpoint's plan: per component, with the fingerprint that it belongs to, what it was measured on, and the
    figures that prove it, by component and for the whole `run`.
    """

    model: str
    fingerprint: str
    headroom_bits: float
    calibration: str = ""
    components: dict[str, ComponentPlan] = field(default_factory=dict[str, ComponentPlan])
    proof: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def check_fingerprint(self, fingerprint: str, subject: str) -> None:
        """Refuse to serve another checkpoint; raises PlanError."""
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"{subject}: this plan was made for another checkpoint",
                code="PLAN-OTHER-CHECKPOINT",
                subject=subject,
                evidence={"plan": self.fingerprint, "checkpoint": fingerprint},
                remedy="Make one for this checkpoint: finitune plan MODEL --out FILE",
            )

    def dumps(self) -> str:
        """The plan as TOML text; equal plans give equal text."""
        import tomlkit

        document: Any = tomlkit.document()  # tomlkit leaves the items of its containers untyped
        document.add(tomlkit.comment("finitune precision plan: every deviation from plain fp16, with its reason."))
        document.update(
            {
                "format": _PLAN_FORMAT,
                "model": self.model,
                "fingerprint": self.fingerprint,
                "headroom_bits": self.headroom_bits,
                "calibration": self.calibration,
            }
        )
        components: Any = tomlkit.table(is_super_table=True)
        for name, component in self.components.items():
            table: Any = tomlkit.table()
            table.update({"border": component.border, "casts": _listed(component.casts)})
            lines: Any = tomlkit.aot()
            for line in component.lines:
                lines.append(tomlkit.item(_as_dict(line)))
            if component.lines:
                table.append("line", lines)
            components.append(name, table)
        document.append("components", components)
        if self.proof:
            document.append("proof", tomlkit.item(self.proof))
        return tomlkit.dumps(document)

    def save(self, path: Path) -> None:
        """Write the plan's text, whole or not at all."""
        from finitune.files.writer import write_text

        write_text(path, self.dumps())

    @classmethod
    def loads(cls, text: str, subject: str = "plan") -> PrecisionPlan:
        """Read a plan's text; raises PlanError where it is not one."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        try:
            data: dict[str, Any] = tomlkit.parse(text).unwrap()
            if data["format"] != _PLAN_FORMAT:
                raise _unreadable(subject, f"format {data['format']} is not {_PLAN_FORMAT}")
            components = {name: _component(table) for name, table in data.get("components", {}).items()}
            keys = ("model", "fingerprint", "headroom_bits", "calibration")
            return cls(**{key: data[key] for key in keys}, components=components, proof=data.get("proof", {}))
        except (TOMLKitError, KeyError, TypeError, ValueError) as error:
            raise _unreadable(subject, f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> PrecisionPlan:
        """Read a plan file; raises PlanError where it is missing or not a plan."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(str(path), f"{type(error).__name__}: {error}") from error
        return cls.loads(text, str(path))


def _as_dict(line: PlanLine) -> dict[str, Any]:
    data: dict[str, Any] = {"site": line.site, "kind": line.kind, "out": line.out}
    data["exponent"] = "current" if line.exponent is None else line.exponent
    if line.weight_exponent:
        data["weight_exponent"] = line.weight_exponent
    if line.carry:
        data.update(carry=line.carry, carried_to=line.carried_to)
    data.update(reason=line.reason, input_amax=line.input_amax, output_amax=line.output_amax)
    return data


def _component(table: dict[str, Any]) -> ComponentPlan:
    lines: list[dict[str, Any]] = [dict(line) for line in table.get("line", [])]
    for line in lines:
        line["exponent"] = None if line["exponent"] == "current" else line["exponent"]
    return ComponentPlan(tuple(PlanLine(**line) for line in lines), tuple(table["casts"]), table["border"])


def _listed(items: Iterable[str]) -> Any:
    import tomlkit

    array: Any = tomlkit.array()
    array.extend(items)
    return array.multiline(bool(array))


def _unreadable(subject: str, why: str) -> PlanError:
    return PlanError(
        f"{subject}: not a precision plan that this version can read ({why})",
        code="PLAN-UNREADABLE",
        subject=subject,
        evidence={"why": why},
        remedy="Make a new one: finitune plan MODEL --out FILE",
    )
