"""Packages that do not go together, or not with this card; judged by their metadata, never by importing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from finitune.machine.environment import Environment, Package
from finitune.machine.hardware import has_kernels, parse_version_parts
from finitune.rules.conditions import Fields, is_version_in

_OWN_PACKAGE = "finitune"
COMPILED_PACKAGES = ("xformers", "flash-attn", "sageattention", "torchvision", "torchaudio", "bitsandbytes", "nunchaku")
"""Packages whose binaries are of one torch."""


def find_package_pair(environment: Environment, **versions: str) -> Iterator[Fields]:
    """Two packages, each in some versions, that break one another."""
    found = [environment.package(name) for name in versions]
    there = [package for package in found if package and is_version_in(package.version, versions[package.name])]
    if len(there) == len(versions):
        yield {"pair": " with ".join(f"{package.name} {package.version}" for package in there)}


def find_cards_below(
    environment: Environment, package: str, versions: str, capability: Sequence[int]
) -> Iterator[Fields]:
    """Cards for which some versions of a package have no code: those of a lower capability."""
    found = environment.package(package)
    if not found or not is_version_in(found.version, versions):
        return
    for device in environment.kinds:
        facts = device.facts
        if facts.capability and facts.capability < tuple(capability):
            name = f"{found.name} {found.version}"
            yield {"package": name, "device": facts.name, "capability": facts.architecture}


def find_extensions_without_kernels(environment: Environment) -> Iterator[Fields]:
    """Packages that say for which cards they were built, and a card that is none of them."""
    for package in environment.packages:
        archs = tuple(arch for built in package.built_archs for arch in to_torch_archs(built))
        for device in environment.kinds:
            if archs and not has_kernels(replace(device.facts, arch_list=archs)):
                yield {
                    "package": f"{package.name} {package.version}",
                    "device": device.facts.name,
                    "capability": device.facts.architecture,
                    "built_for": ", ".join(package.built_archs),
                }


def to_torch_archs(built: str) -> list[str]:
    """An entry of TORCH_CUDA_ARCH_LIST as torch.cuda.get_arch_list() spells it: '9.0+PTX' is two.

    >>> to_torch_archs("8.6"), to_torch_archs("9.0+PTX")
    (['sm_86'], ['sm_90', 'compute_90'])
    """
    number, _, ptx = built.partition("+")
    digits = number.replace(".", "")
    return [f"sm_{digits}", *([f"compute_{digits}"] if ptx else [])]


def find_mismatched_extensions(environment: Environment) -> Iterator[Fields]:
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


def find_unmet_requirements(environment: Environment, ours: bool) -> Iterator[Fields]:
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


PACKAGE_PREDICATES = (
    find_package_pair,
    find_cards_below,
    find_extensions_without_kernels,
    find_mismatched_extensions,
    find_unmet_requirements,
)
