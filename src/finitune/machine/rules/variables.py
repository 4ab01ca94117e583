"""Environment variables: real ones set by mistake, those that are out of date, those that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from finitune.errors import suggest_nearest_name
from finitune.machine.environment import Environment
from finitune.package_data import read_package_toml
from finitune.rules.conditions import Fields

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
MIN_CORES_FOR_THREADS = 4
OFF_VALUES = ("", "0", "off", "false", "no", "n")
"""What a switch is off by, as C programs read it."""


def find_variable(
    environment: Environment, names: Sequence[str], switched_on: bool = False, values: Sequence[str] = ()
) -> Iterator[Fields]:
    """Variables that are set; if `switched_on`, those that mean yes; of `values`, in any case, where there are some."""
    for name in names:
        value = environment.variables.get(name)
        off = switched_on and value is not None and value.strip().lower() in OFF_VALUES
        if value is not None and not off and (not values or value.upper() in values):
            yield {"variable": name, "value": value}


@cache
def read_variable_names(kind: str) -> tuple[str, ...]:
    """The words of an entry of variables.toml."""
    return tuple(read_package_toml(Path(__file__).with_name("variables.toml"))[kind].split())


@cache
def read_known_nccl_variables() -> frozenset[str]:
    """The variables with NCCL's prefixes that mean something to NCCL, torch, or a build of them."""
    prefixes = {"nccl": "NCCL_", "torch_nccl": "TORCH_NCCL_", "build": ""}
    return frozenset(prefix + name for kind, prefix in prefixes.items() for name in read_variable_names(kind))


def find_unknown_variables(environment: Environment) -> Iterator[Fields]:
    """Variables with NCCL's prefixes that are none of NCCL's, nor those of a rule of their own."""
    rules = read_package_toml(Path(__file__).with_name("rules.toml"))["rule"]
    told = {name for rule in rules if isinstance(rule["when"], dict) for name in rule["when"].get("names", ())}
    known = read_known_nccl_variables()
    for name in environment.variables:
        if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in known and name not in told:
            yield {"variable": name, "what": suggest_nearest_name(name, known)}


def find_unknown_allocator_keys(environment: Environment) -> Iterator[Fields]:
    known = read_variable_names("allocator")
    for name in ALLOCATOR_VARIABLES:
        for key in parse_allocator_keys(environment.variables.get(name, "")):
            if key not in known:
                yield {"variable": name, "key": key, "what": suggest_nearest_name(key, known)}


def find_broken_allocator(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable of torch's allocator, and its part, at which importing torch aborts the process; None if sound.

    Source: measured with torch 2.14, which asks for the token behind a key without looking whether there is one.

    >>> find_broken_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb=128"})
    ('PYTORCH_ALLOC_CONF', 'max_split_size_mb=128')
    """
    for name in ALLOCATOR_VARIABLES:
        for part in strip_allocator_lists(variables.get(name, "")).split(","):
            key, colon, value = part.partition(":")
            if key.strip() and not (colon and value.strip()):
                return name, part.strip()
    return None


def parse_allocator_keys(settings: str) -> list[str]:
    """The keys of "key:value,key:[value,value]".

    >>> parse_allocator_keys("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]")
    ['expandable_segments', 'roundup_power2_divisions']
    """
    return [part.partition(":")[0].strip() for part in strip_allocator_lists(settings).split(",") if part.strip()]


def strip_allocator_lists(settings: str) -> str:
    """The settings with each list shrunk to its closing bracket, so that every comma stands between two settings."""
    flat, depth = "", 0
    for char in settings:
        depth += (char == "[") - (char == "]")
        flat += char if not depth else ""
    return flat


def find_single_thread(environment: Environment) -> Iterator[Fields]:
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environment.variables.get(name) == "1"]
    alone = environment.variables.get("WORLD_SIZE", "1") == "1"
    cores = environment.machine.cores
    if names and alone and cores >= MIN_CORES_FOR_THREADS:
        yield {"variables": ", ".join(names), "cores": cores}


VARIABLE_PREDICATES = (find_variable, find_unknown_variables, find_unknown_allocator_keys, find_single_thread)
