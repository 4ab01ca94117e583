"""Packages that do not go together, or not with this card; judged by their metadata, never by importing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from finitune.machine.environment import Environment, Package
from finitune.machine.hardware import Capability, has_kernels
from finitune.machine.rules.devices import format_architecture, list_distinct_devices
from finitune.machine.rules.rule import (
    DEVICE_ERROR,
    DEVICE_NOTE,
    DEVICE_WARNING,
    MachineRule,
    MatchFields,
    parse_version_parts,
)
from finitune.report import Level

_OWN_PACKAGE = "finitune"
COMPILED_PACKAGES = ("xformers", "flash-attn", "sageattention", "torchvision", "torchaudio", "bitsandbytes", "nunchaku")
"""Packages whose binaries are of one torch."""


@dataclass(frozen=True)
class IncompatiblePair:
    """Two packages, each in some versions, that break one another."""

    first: str
    first_versions: str
    second: str
    second_versions: str
    what: str
    mend: str
    source: str


@dataclass(frozen=True)
class CapabilityFloor:
    """The lowest compute capability that some versions of a package have code for."""

    package: str
    versions: str
    capability: Capability
    level: Level
    what: str
    mend: str
    source: str


BAD_PAIRS = (
    IncompatiblePair(
        "torch",
        "<2.3",
        "numpy",
        ">=2",
        "torch was built for NumPy 1: tensors and arrays cannot be exchanged",
        "Install torch 2.3 or later, or numpy<2.",
        "https://github.com/pytorch/pytorch/issues/107302",
    ),
    IncompatiblePair(
        "diffusers",
        "<0.29",
        "huggingface-hub",
        ">=0.26",
        "diffusers imports cached_download, which is gone: it does not import",
        "Install diffusers 0.29 or later.",
        "https://github.com/easydiffusion/easydiffusion/issues/1851",
    ),
    IncompatiblePair(
        "diffusers",
        "<0.36",
        "transformers",
        ">=5",
        "diffusers imports FLAX_WEIGHTS_NAME, which is gone: its pipelines do not import",
        "Install diffusers 0.36 or later.",
        "https://github.com/huggingface/diffusers/pull/12354",
    ),
)

FLOORS = (
    CapabilityFloor(
        "flash-attn",
        ">=2",
        (8, 0),
        DEVICE_WARNING,
        "FlashAttention 2 has kernels from Ampere (8.0) on",
        "Use torch's own attention, which finitune does: it is memory-efficient on this card.",
        "https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support",
    ),
    CapabilityFloor(
        "xformers",
        ">=0.0.31",
        (7, 5),
        DEVICE_WARNING,
        "xformers 0.0.31 and later do not support V100 or older",
        "Use torch's own attention, which finitune does, or xformers 0.0.30.",
        "https://github.com/facebookresearch/xformers/releases/tag/v0.0.31",
    ),
    CapabilityFloor(
        "bitsandbytes",
        ">=0.48",
        (6, 0),
        DEVICE_WARNING,
        "the wheels of bitsandbytes 0.48 and later start at Pascal (6.0)",
        "Install bitsandbytes 0.47, or choose an optimizer of torch.",
        "https://huggingface.co/docs/bitsandbytes/v0.48.1/installation",
    ),
    CapabilityFloor(
        "sageattention",
        ">=2",
        (8, 0),
        DEVICE_WARNING,
        "SageAttention 2 has kernels from Ampere (8.0) on",
        "Use torch's own attention, which finitune does.",
        "https://github.com/thu-ml/SageAttention/issues/283",
    ),
    CapabilityFloor(
        "triton",
        ">=3.3",
        (8, 0),
        DEVICE_NOTE,
        "Triton 3.3 and later use no tensor cores before Ampere (8.0)",
        "Leave training.torch_compile off on this card.",
        "https://github.com/triton-lang/triton/pull/5066",
    ),
)


def is_version_in(version: str, versions: str) -> bool:
    """Whether a version is one of those that a specifier names; False for what is no version."""
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def find_bad_pairs(environment: Environment) -> Iterator[MatchFields]:
    for pair in BAD_PAIRS:
        first, second = environment.package(pair.first), environment.package(pair.second)
        if not first or not second:
            continue
        if not is_version_in(first.version, pair.first_versions) or not is_version_in(
            second.version, pair.second_versions
        ):
            continue
        names = f"{first.name} {first.version} with {second.name} {second.version}"
        yield {"pair": names, "what": pair.what, "do": pair.mend, "source": pair.source}


def find_below_floor(level: Level, environment: Environment) -> Iterator[MatchFields]:
    for floor in FLOORS:
        package = environment.package(floor.package)
        if floor.level is not level or not package or not is_version_in(package.version, floor.versions):
            continue
        for device, _ in list_distinct_devices(environment):
            if device.facts.capability and device.facts.capability < floor.capability:
                yield {
                    "package": f"{package.name} {package.version}",
                    "device": device.facts.name,
                    "capability": format_architecture(device),
                    "what": floor.what,
                    "do": floor.mend,
                    "source": floor.source,
                }


def find_extensions_without_kernels(environment: Environment) -> Iterator[MatchFields]:
    """Packages that say for which cards they were built, and a card that is none of them."""
    for package in environment.packages:
        archs = tuple(arch for built in package.built_archs for arch in to_torch_archs(built))
        for device, _ in list_distinct_devices(environment):
            if archs and not has_kernels(replace(device.facts, arch_list=archs)):
                yield {
                    "package": f"{package.name} {package.version}",
                    "device": device.facts.name,
                    "capability": format_architecture(device),
                    "built_for": ", ".join(package.built_archs),
                }


def to_torch_archs(built: str) -> list[str]:
    """An entry of TORCH_CUDA_ARCH_LIST as torch.cuda.get_arch_list() spells it: '9.0+PTX' is two.

    >>> torch_spelling("8.6"), torch_spelling("9.0+PTX")
    (['sm_86'], ['sm_90', 'compute_90'])
    """
    number, _, ptx = built.partition("+")
    digits = number.replace(".", "")
    return [f"sm_{digits}", *([f"compute_{digits}"] if ptx else [])]


def find_mismatched_extensions(environment: Environment) -> Iterator[MatchFields]:
    """Compiled packages made for another torch, or for another CUDA, than the one that is installed."""
    torch = environment.torch
    for package in environment.packages:
        if package.name not in COMPILED_PACKAGES or not torch.version:
            continue
        wants, cuda = find_build_versions(package)
        other_torch = wants and parse_version_parts(
            torch.version, len(parse_version_parts(wants, 3))
        ) != parse_version_parts(wants, 3)
        other_cuda = cuda and parse_version_parts(torch.cuda or "", 1) != parse_version_parts(cuda, 1)
        if other_torch or other_cuda:
            built_for = " ".join(part for part in (f"torch {wants}" * bool(wants), f"CUDA {cuda}" * bool(cuda)) if part)
            yield {
                "package": f"{package.name} {package.version}",
                "built_for": built_for,
                "torch": torch.version,
                "cuda": torch.cuda or "none",
            }


def find_build_versions(package: Package) -> tuple[str, str]:
    """The torch and the CUDA of a package's binaries, by its build record, its version's local part, or its pin."""
    local = package.version.partition("+")[2]
    tag = re.search(r"torch(\d+\.\d+)", local)
    cuda = re.search(r"cu(\d\d)(\d?)", local)
    pins = (
        requirement
        for requirement in map(parse_requirement, package.requires)
        if requirement and requirement.name == "torch"
    )
    pin = next((str(r.specifier)[2:] for r in pins if re.fullmatch(r"==\d[\d.]*", str(r.specifier))), "")
    torch = package.built_torch.partition("+")[0] or (tag[1] if tag else pin)
    return torch, package.built_cuda or (f"{cuda[1]}.{cuda[2] or 0}" if cuda else "")


def parse_requirement(text: str) -> Requirement | None:
    """A requirement, or None for one that cannot be read, or is of an extra or another system."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return requirement if not requirement.marker or requirement.marker.evaluate({"extra": ""}) else None


def find_unmet_requirements(environment: Environment, *, ours: bool) -> Iterator[MatchFields]:
    """Requirements that an installed package does not meet; those on torch of compiled packages are told elsewhere."""
    for package in environment.packages:
        if (package.name == _OWN_PACKAGE) is not ours:
            continue
        for requirement in map(parse_requirement, package.requires):
            there = environment.package(canonicalize_name(requirement.name)) if requirement else None
            if (
                not requirement
                or not there
                or not there.version
                or is_version_in(there.version, str(requirement.specifier))
            ):
                continue
            if package.name in COMPILED_PACKAGES and requirement.name == "torch" and find_build_versions(package)[0]:
                continue
            yield {
                "package": package.name,
                "version": package.version,
                "needs": f"{requirement.name}{requirement.specifier}",
                "installed": f"{there.name} {there.version}",
            }


def find_damaged_packages(environment: Environment) -> Iterator[MatchFields]:
    yield from ({"package": package.name} for package in environment.packages if not package.version)


_REQUIREMENTS_URL = "https://packaging.python.org/en/latest/specifications/core-metadata/#requires-dist-multiple-use"

PACKAGE_RULES = (
    MachineRule(
        "PACKAGE-TOO-OLD",
        DEVICE_ERROR,
        "{needs}",
        lambda e: find_unmet_requirements(e, ours=True),
        "finitune needs {needs}, and {installed} is installed",
        "pip install --upgrade '{needs}'",
        _REQUIREMENTS_URL,
    ),
    MachineRule("PACKAGES-BREAK", DEVICE_WARNING, "{pair}", find_bad_pairs, "{what}", "{do}", "the table BAD_PAIRS"),
    MachineRule(
        "EXTENSION-OTHER-TORCH",
        DEVICE_WARNING,
        "{package}",
        find_mismatched_extensions,
        "{package} was built for {built_for}, and torch is {torch} (CUDA {cuda}): its kernels will not load, and "
        "programs that import it may fail",
        "Install the build for this torch, or remove it: finitune uses torch's own attention.",
        "https://github.com/bmaltais/kohya_ss/issues/1651",
    ),
    MachineRule(
        "EXTENSION-WITHOUT-KERNELS",
        DEVICE_WARNING,
        "{package}",
        find_extensions_without_kernels,
        "{package} holds no kernels for {device} ({capability}), only for {built_for}: 'no kernel image is available'",
        "Install a build for the card, or remove it: finitune uses torch's own attention.",
        "https://github.com/bmaltais/kohya_ss/issues/3368",
    ),
    MachineRule(
        "CARD-BELOW-PACKAGE",
        DEVICE_WARNING,
        "{package}",
        lambda e: find_below_floor(DEVICE_WARNING, e),
        "{what}, and {device} is {capability}",
        "{do}",
        "the table FLOORS",
    ),
    MachineRule(
        "CARD-BELOW-PACKAGE",
        DEVICE_NOTE,
        "{package}",
        lambda e: find_below_floor(DEVICE_NOTE, e),
        "{what}, and {device} is {capability}",
        "{do}",
        "the table FLOORS",
    ),
    MachineRule(
        "PACKAGE-MISMATCH",
        DEVICE_WARNING,
        "{package}",
        lambda e: find_unmet_requirements(e, ours=False),
        "{package} {version} needs {needs}, and {installed} is installed",
        "pip install --upgrade {package}, or install what it needs.",
        _REQUIREMENTS_URL,
    ),
    MachineRule(
        "PACKAGE-DAMAGED",
        DEVICE_WARNING,
        "{package}",
        find_damaged_packages,
        "the metadata of {package} cannot be read: an installation was broken off, or two were mixed",
        "pip install --force-reinstall {package}",
        "https://pip.pypa.io/en/stable/topics/dependency-resolution/",
    ),
)
