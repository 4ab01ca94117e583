"""Environment variables: real ones set by mistake, those that are out of date, those that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from finitune.errors import suggest_nearest_name
from finitune.machine.environment import Environment
from finitune.machine.rules.nccl_names import KNOWN_NCCL_VARIABLES, split_name_block
from finitune.machine.rules.rule import (
    DEVICE_ERROR,
    DEVICE_NOTE,
    DEVICE_WARNING,
    MachineRule,
    MatchFields,
    parse_version_parts,
    report_if,
)
from finitune.report import Finding, Level

_TORCH_NCCL_HEADER_URL = "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
_NCCL_VARIABLES_URL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_PROCESS_GROUP_URL = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group"
_CUDA_VARIABLES_URL = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
MIN_CORES_FOR_THREADS = 4

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_KEYS = split_name_block("""
    backend expandable_segments expandable_segments_handle_type garbage_collection_threshold
    graph_capture_record_stream_reuse large_segment_size_mb max_non_split_rounding_mb max_split_size_mb
    per_process_memory_fraction pinned_free_catch_all pinned_num_register_threads pinned_reserve_segment_size_mb
    pinned_use_background_threads pinned_use_cuda_host_register pinned_use_hip_host_register
    release_lock_on_cudamalloc release_lock_on_hipmalloc roundup_power2_divisions throw_on_cudamalloc_oom
""")
"""Source: the strings of torch 2.14's libc10 and libc10_cuda."""


@dataclass(frozen=True)
class VariableRule:
    """One variable, the values that are told of, and what is told. Each text may name {name} and {value}."""

    name: str
    code: str
    level: Level
    told: Callable[[str], bool]
    what: str
    do: str
    source: str

    def findings(self, environment: Environment) -> Iterable[Finding]:
        """What there is to say of it on a machine."""
        value = environment.variables.get(self.name)
        if value is not None and self.told(value):
            numbers = {"variable": self.name, "value": value}
            texts = (text.format(name=self.name, value=value) for text in (self.what, self.do))
            what, remedy = texts
            yield Finding(self.level, self.code, self.name, what, {**numbers, "source": self.source}, remedy)


def is_switched_on(value: str) -> bool:
    """Whether a switch is on, as C programs read it."""
    return value.strip().lower() not in ("", "0", "off", "false", "no", "n")


def accept_any_value(value: str) -> bool:
    """Whatever the value."""
    return True


def is_verbose_level(value: str) -> bool:
    """Whether NCCL, or torch.distributed, writes a line for each call."""
    return value.upper() in ("INFO", "TRACE", "DETAIL")


def make_renamed_rule(name: str) -> VariableRule:
    """A variable of torch that has a new name, and is still read under the old one."""
    return VariableRule(
        name, "VARIABLE-DEPRECATED", DEVICE_NOTE, accept_any_value,
        "{name} is torch's old name (never NCCL's) for TORCH_{name}; it is read with a warning",
        "Set TORCH_{name}={value}, or nothing: the default is right.", _TORCH_NCCL_HEADER_URL,
    )  # fmt: skip


def make_invented_rule(name: str, instead: str) -> VariableRule:
    """A variable that is handed around, and that nothing reads."""
    return VariableRule(
        name, "VARIABLE-INVENTED", DEVICE_WARNING, accept_any_value, "{name}={value}: neither NCCL nor torch reads it",
        f"Unset it; {instead}", _PROCESS_GROUP_URL,
    )  # fmt: skip


_TIMEOUT_HINT = (
    "the time-out is that of init_process_group: 10 minutes for NCCL, 30 for gloo (--ddp_timeout in sd-scripts)."
)

SINGLE_VARIABLE_RULES = (
    *map(
        make_renamed_rule,
        ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"),
    ),
    make_invented_rule("NCCL_TIMEOUT", _TIMEOUT_HINT),
    make_invented_rule("NCCL_SOCKET_NTIMEO", _TIMEOUT_HINT),
    make_invented_rule("NCCL_TIMEOUT_MS", _TIMEOUT_HINT),
    make_invented_rule("TORCH_NCCL_TIMEOUT", _TIMEOUT_HINT),
    make_invented_rule("TORCH_USE_CUDA_DSA", "it is an option for building torch, and has no effect on a wheel."),
    VariableRule(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "VARIABLE-DEPRECATED",
        DEVICE_NOTE,
        accept_any_value,
        "{name} is deprecated: what it asked for is the default",
        "Unset it.",
        _TORCH_NCCL_HEADER_URL,
    ),
    VariableRule(
        "CUDA_LAUNCH_BLOCKING",
        "VARIABLE-DEBUGGING",
        DEVICE_WARNING,
        is_switched_on,
        "{name}={value} lets the host wait for each kernel: for finding a fault, and much slower",
        "Unset it when the fault is found.",
        _CUDA_VARIABLES_URL,
    ),
    VariableRule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "VARIABLE-DEBUGGING",
        DEVICE_WARNING,
        is_switched_on,
        "{name}={value} asks the driver for every tensor's memory: for memory checkers, and many times slower",
        "Unset it.",
        _CUDA_VARIABLES_URL,
    ),
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG",
        "VARIABLE-DEBUGGING",
        DEVICE_WARNING,
        is_verbose_level,
        "{name}={value} checks each collective call: for finding a fault, and slower",
        "Unset it.",
        "https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications",
    ),
    VariableRule(
        "NCCL_DEBUG",
        "VARIABLE-DEBUGGING",
        DEVICE_NOTE,
        is_verbose_level,
        "{name}={value} was left on: many lines, and NVIDIA advises against it outside of debugging",
        "Set {name}=WARN, which tells what fails.",
        _NCCL_VARIABLES_URL,
    ),
    VariableRule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "FP32-IS-TF32",
        DEVICE_WARNING,
        is_switched_on,
        "{name}={value}: every fp32 product is a TF32 one, of 11 significand bits, and so is the reference that "
        "plans are proved against",
        "Unset it.",
        "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/Context.cpp",
    ),
)


def find_unknown_variables(environment: Environment) -> Iterator[MatchFields]:
    """Variables with NCCL's prefixes that are none of NCCL's, nor in the table above."""
    told = {variable.name for variable in SINGLE_VARIABLE_RULES}
    for name in environment.variables:
        if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in KNOWN_NCCL_VARIABLES and name not in told:
            yield {"variable": name, "what": suggest_nearest_name(name, KNOWN_NCCL_VARIABLES)}


def find_unknown_allocator_keys(environment: Environment) -> Iterator[MatchFields]:
    for name in ALLOCATOR_VARIABLES:
        for key in parse_allocator_keys(environment.variables.get(name, "")):
            if key not in ALLOCATOR_KEYS:
                yield {"variable": name, "key": key, "what": suggest_nearest_name(key, ALLOCATOR_KEYS)}


def find_broken_allocator(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable of torch's allocator, and its part, at which importing torch aborts the process; None if sound.

    Source: measured with torch 2.14, which asks for the token behind a key without looking whether there is one.

    >>> broken_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb=128"})
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

    >>> allocator_keys("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]")
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


def find_ignored_allocator(environment: Environment) -> list[MatchFields]:
    """torch 2.9 and 2.10 read the new name for everything but what the CUDA allocator alone knows."""
    old = (2, 9) <= parse_version_parts(environment.torch.version) < (2, 11)
    settings = environment.variables.get("PYTORCH_ALLOC_CONF", "")
    mine = "expandable_segments" in settings and "PYTORCH_CUDA_ALLOC_CONF" not in environment.variables
    return report_if(environment.torch.cuda and old and mine, torch=environment.torch.version, value=settings)


def find_single_thread(environment: Environment) -> list[MatchFields]:
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environment.variables.get(name) == "1"]
    alone = environment.variables.get("WORLD_SIZE", "1") == "1"
    cores = environment.machine.cores
    return report_if(names and alone and cores >= MIN_CORES_FOR_THREADS, variables=", ".join(names), cores=cores)


VARIABLE_RULES = (
    *SINGLE_VARIABLE_RULES,
    MachineRule(
        "ALLOCATOR-KEY-UNKNOWN",
        DEVICE_ERROR,
        "{variable}",
        find_unknown_allocator_keys,
        "{variable} has a key {key!r}, at which torch stops with 'Unrecognized key'.{what}",
        "Correct it, or unset the variable.",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
    ),
    MachineRule(
        "ALLOCATOR-SETTING-IGNORED",
        DEVICE_WARNING,
        "PYTORCH_ALLOC_CONF",
        find_ignored_allocator,
        "torch {torch} ignores PYTORCH_ALLOC_CONF={value} on CUDA",
        "Set PYTORCH_CUDA_ALLOC_CONF={value}, or install torch 2.11 or later.",
        "https://github.com/pytorch/pytorch/issues/183387",
    ),
    MachineRule(
        "VARIABLE-UNKNOWN",
        DEVICE_NOTE,
        "{variable}",
        find_unknown_variables,
        "NCCL 2.30 and torch 2.14 do not read {variable}.{what}",
        "Unset it, or correct its name.",
        _NCCL_VARIABLES_URL,
    ),
    MachineRule(
        "CPU-THREADS-FEW",
        DEVICE_NOTE,
        "environment",
        find_single_thread,
        "{variables} is 1 on {cores} cores: the CPU's part, the caches of latents and texts above all, takes one core",
        "Unset it; torchrun sets it where nobody does.",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
)
