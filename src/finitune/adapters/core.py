"""An adapter free of any file's naming, the facts that algorithms state of themselves, and the errors of both.

One rule for strength, for every algorithm: W(m) = W + m * (W(1) - W). So m = 0 is the base bit for bit and m = 1 is
what was trained. For the additive algorithms that is W + m * dW; for the others it is the straight line between the
two weights (as ComfyUI blends DoRA), not a strength applied somewhere inside of a formula.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from finitune.errors import AdapterError

if TYPE_CHECKING:
    from finitune.adapters.algorithm import AdapterAlgorithm

Shape = tuple[int, ...]
TensorsByRole = Mapping[str, Tensor]
MagnitudeSide = Literal["out", "in"]


@dataclass(frozen=True)
class Magnitude:
    """DoRA's magnitudes: one per output or per input of the weight, and the norm that they are divided by.

    `norm_of` "adapted" divides by the norms of W + dW (the paper's rule), "base" by those of W. `eps` is added to
    the norm.
    """

    tensor: Tensor
    side: MagnitudeSide = "out"
    norm_of: Literal["adapted", "base"] = "adapted"
    eps: float = 0.0


@dataclass(frozen=True)
class SiteAdapter:
    """What one module gets: an algorithm, its tensors by role, and the scale as it was stated.

    `alpha` is exact and apart from the rank; None means that none was stated, and the scale is 1. With
    `rank_stabilised` the scale is alpha / sqrt(rank). `options` hold what an algorithm needs beside tensors, such as
    a rotation's constraint; `reshape` lets the weight have more inputs than the model's, which is zero there (a control
    adapter reads a second picture). Roles that every algorithm may have: `diff_b`, added to the bias as it is.
    """

    algorithm: str
    tensors: TensorsByRole
    alpha: float | None = None
    rank_stabilised: bool = False
    magnitude: Magnitude | None = None
    options: Mapping[str, float | bool | str] = field(default_factory=dict)

    def with_tensors(self, **tensors: Tensor) -> SiteAdapter:
        return replace(self, tensors={**self.tensors, **tensors})


@dataclass(frozen=True)
class AdapterSet:
    """{site: adapter}; a site is the component and the dotted module name as diffusers spells it, with a dot between.

    `embeddings` are learned token vectors that came bundled, by their own names: kept, not part of the algebra.
    """

    sites: Mapping[str, SiteAdapter]
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, site: str) -> SiteAdapter:
        return self.sites[site]

    def component(self, name: str) -> dict[str, SiteAdapter]:
        """The adapters of one component, by module name."""
        return {s.partition(".")[2]: a for s, a in self.sites.items() if s.partition(".")[0] == name}


@dataclass(frozen=True)
class Target:
    """What a new adapter is made for: the base weight, and the shape of its work."""

    weight: Tensor
    rank: int = 4
    alpha: float | None = None
    options: Mapping[str, float | bool | str] = field(default_factory=dict)
    shared: TensorsByRole = field(default_factory=dict)
    """What `draw_shared` drew for all adapters together."""

    @property
    def shape(self) -> Shape:
        return tuple(self.weight.shape)


SuffixDialect = Literal["kohya", "peft", "genmo", "diffusers-old", "xlabs", "ai-toolkit", "comfy", "bfl", "cloneofsimo"]
AdapterProgram = Literal["diffusers", "PEFT", "ComfyUI", "A1111", "Forge", "sd-scripts"]
RankMeaning = Literal["factors", "at most", "block size", "nothing"]
"""What a rank is: that of the factors however large it is; that, or full factors where these are smaller; the size of
blocks that turn."""
AlphaMeaning = Literal["scale", "constraint", "nothing"]
"""What an alpha in a file is: the numerator of the scale, or the bound of a rotation."""


@dataclass(frozen=True)
class FactorRole:
    """What one tensor of an algorithm is to the others.

    `row_axis`: along which axis it has the rows of the weight, or whole blocks of them. `scaled`: multiplying all such
    roles by a number multiplies the change by it. `up`: LoRA+ (Hayou et al. 2024, arXiv 2402.12354)
    gives it a larger rate, as sd-scripts does (lora_up, hada_w2_a, lokr_w1). `core`: a Tucker core. `trained`
    is False for what stays as it was drawn. `shared_key` is the key of the one tensor that all modules of a file have.
    """

    optional: bool = False
    row_axis: int | None = None
    scaled: bool = False
    up: bool = False
    core: bool = False
    trained: bool = True
    shared_key: str = ""


class LoadVerdict(str, Enum):
    """Whether a program loads a thing, refuses or ignores (part of) it, or draws something else than was trained."""

    YES = "yes"
    NO = "no"
    WRONG = "wrong"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class ProgramSupport:
    """What a program makes of an algorithm, and why; in the `families` named it loads all the same."""

    verdict: LoadVerdict
    reason: str = ""
    families: tuple[str, ...] = ()


RolesByName = Mapping[str, FactorRole]
SupportByProgram = Mapping[AdapterProgram, ProgramSupport]
ALGORITHM_LOADS = ProgramSupport(LoadVerdict.YES)
ALGORITHM_NOT_KNOWN = ProgramSupport(LoadVerdict.UNKNOWN, "whether it has this algorithm was not tried")
PROGRAM_LACKS_ALGORITHM = ProgramSupport(LoadVerdict.NO, "it has no such adapter")
LORA_CONVERTER_ONLY = ProgramSupport(LoadVerdict.NO, "its converter knows LoRA alone: convert with --as lora")
SD_SCRIPTS_LACKS_ALGORITHM = ProgramSupport(LoadVerdict.NO, "it has none such")


@dataclass(frozen=True)
class KeySuffix:
    """One way to spell a role: the `text` behind the module's name, with its dot.

    `algorithms` may have the role, all where empty. `inner` ends the module's name where the key leaves that out
    (".processor.to_q_lora.up.weight" belongs to ".to_q"). `named`: PEFT's name of the adapter may stand behind the
    first word (".lora_A.default.weight"). `written` is False for what we read and other programs would not.
    """

    text: str
    role: str
    dialects: tuple[SuffixDialect, ...]
    inner: str = ""
    named: bool = False
    written: bool = True
    algorithms: tuple[str, ...] = ()

    def pattern(self, group: str = "?:") -> str:
        """The suffix as a regular expression; the adapter's name and its dot are in a `group`."""
        head, dot, tail = self.text[1:].partition(".")
        name = rf"({group}\.(?!weight$|bias$)[\w-]+)?" if self.named else ""
        return re.escape(self.text[0] + head) + name + re.escape(dot + tail)

    def name_in(self, key: str) -> str:
        """PEFT's name of the adapter in a key that this suffix ends ("default"); '' where there is none."""
        found = re.search(f"{self.pattern('?P<name>')}$", key) if self.named else None
        return (found["name"] or "").removeprefix(".") if found else ""


def spell_in_kohya_and_peft(stem: str, *roles: str) -> Iterator[KeySuffix]:
    """Roles that kohya's programs and PEFT spell alike, behind a stem."""
    yield from (KeySuffix(f".{stem}_{role}", role, ("kohya", "peft"), named=True) for role in roles)


@dataclass(frozen=True)
class AmbiguityOptions:
    """What only a person can tell where a file does not: see the findings that ask.

    They are ADAPTER-UNDECIDED, ADAPTER-ALPHA and ADAPTER-SCALE-UNKNOWN. `dora_side` is the side of magnitudes whose
    shape fits both, `glora_order` that of the factors of a square weight (the "old" is of 2023), `zero_alpha` what
    alpha 0 means, `scale` the scale (alpha / rank) of modules for which nothing states one.
    """

    dora_side: Literal["out", "in"] | None = None
    glora_order: Literal["new", "old"] | None = None
    zero_alpha: Literal["rank", "zero"] | None = None
    scale: float | None = None


@dataclass(frozen=True)
class FileFacts:
    """What a file says beside the tensors of one module.

    `shape` is the model's weight there where it is known, `config` PEFT's configuration, `convention` what the
    algorithm found out by looking at all of the file's modules (`detect_convention`).
    """

    shape: Shape | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    convention: str = ""


def is_same_weight_shape(a: Shape, b: Shape) -> bool:
    """Whether two weight shapes differ only in trailing kernel axes of length 1: Linear and 1x1 convolution."""
    short, long = sorted((a, b), key=len)
    return long[: len(short)] == short and all(n == 1 for n in long[len(short) :])


def get_factor_shapes(adapter: SiteAdapter) -> dict[str, Shape]:
    return {role: tuple(tensor.shape) for role, tensor in adapter.tensors.items()}


def make_misfit_error(what: str, implied: Shape, shape: Shape) -> AdapterError:
    return AdapterError(
        f"{what} {list(implied)}; the model has {list(shape)} there",
        code="ADAPTER-DOES-NOT-FIT",
        evidence={"adapter": list(implied), "model": list(shape)},
        remedy="The adapter was made for another model, or another size of it. Name that one.",
    )


def make_roles_error(
    algorithm: AdapterAlgorithm, present: Set[str], missing: Set[str], extra: Set[str]
) -> AdapterError:
    parts = [f"{what} {', '.join(sorted(roles))}" for what, roles in (("lacks", missing), ("has also", extra)) if roles]
    return AdapterError(
        f"a {algorithm.title} {' and '.join(parts)}",
        code="ADAPTER-ROLES",
        evidence={"present": sorted(present), "missing": sorted(missing), "extra": sorted(extra)},
        remedy="The file is incomplete, or mixes two algorithms at one module. Export it again.",
    )


def make_shapes_error(algorithm: AdapterAlgorithm, adapter: SiteAdapter, why: str) -> AdapterError:
    shapes = {role: list(shape) for role, shape in get_factor_shapes(adapter).items()}
    return AdapterError(
        f"the tensors of a {algorithm.title} contradict each other: {why}",
        code="ADAPTER-SHAPES",
        evidence={"shapes": shapes},
        remedy="The file is damaged, or was split or renamed by a faulty program. Export it again.",
    )


def make_magnitude_error(magnitude: Magnitude, shape: Shape) -> AdapterError:
    return AdapterError(
        f"{magnitude.tensor.numel()} magnitudes on the {magnitude.side}put side of a weight of {list(shape)}",
        code="ADAPTER-DORA",
        evidence={"magnitudes": list(magnitude.tensor.shape), "side": magnitude.side, "weight": list(shape)},
        remedy="The magnitudes are of the other side, or of another module: check the file's convention.",
    )


def make_not_additive_error(algorithm: AdapterAlgorithm) -> AdapterError:
    return AdapterError(
        f"a magnitude (DoRA) over {algorithm.title}, which is not additive, has no meaning",
        code="ADAPTER-DORA",
        evidence={"algorithm": algorithm.name},
        remedy="Drop the magnitude if it was written by mistake, or export the adapter again.",
    )


def make_damaged_adapter_error(why: str, **evidence: object) -> AdapterError:
    return AdapterError(why, code="ADAPTER-SHAPES", evidence=evidence, remedy="The file is damaged. Export it again.")


def make_no_adapter_error(roles: Set[str], why: str) -> AdapterError:
    return AdapterError(
        f"this is no adapter: {why}",
        code="ADAPTER-ROLES",
        evidence={"roles": sorted(roles)},
        remedy="The file is incomplete, or no adapter. Export it again.",
    )


def read_single_number(tensor: Tensor, role: str) -> float:
    """The number in a tensor of one element, in fp64; raises AdapterError for another count."""
    if tensor.numel() != 1:
        raise make_damaged_adapter_error(
            f"{role} has {tensor.numel()} elements; it is one number", shape=list(tensor.shape)
        )
    return float(tensor.double())


def make_undecided_shape_error(what: str, tensors: str, shape: Shape, remedy: str) -> AdapterError:
    return AdapterError(
        f"the shape of {tensors} does not tell {what}",
        code="ADAPTER-UNDECIDED",
        evidence={"shape": list(shape)},
        remedy=remedy,
    )
