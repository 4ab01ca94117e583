"""Environment variables: real ones set by mistake, those that are out of date, those that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from finitune.device.environment import Environment
from finitune.device.rules.nccl_names import REAL, words
from finitune.device.rules.rule import ERROR, NOTE, WARNING, Numbers, Rule, leading, once
from finitune.errors import did_you_mean
from finitune.report import Finding, Level

HEADERS = "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TIMEOUT = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group"
DEBUGGING = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
MANY_CORES = 4

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_KEYS = words("""
    backend expandable_segments expandable_segments_handle_type garbage_collection_threshold
    graph_capture_record_stream_reuse large_segment_size_mb max_non_split_rounding_mb max_split_size_mb
    per_process_memory_fraction pinned_free_catch_all pinned_num_register_threads pinned_reserve_segment_size_mb
    pinned_use_background_threads pinned_use_cuda_host_register pinned_use_hip_host_register
    release_lock_on_cudamalloc release_lock_on_hipmalloc roundup_power2_divisions throw_on_cudamalloc_oom
""")
"""Source: the strings of torch 2.14's libc10 and libc10_cuda."""


@dataclass(frozen=True)
class Variable:
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


def on(value: str) -> bool:
    """Whether a switch is on, as C programs read it."""
    return value.strip().lower() not in ("", "0", "off", "false", "no", "n")


def there(value: str) -> bool:
    """Whatever the value."""
    return True


def loud(value: str) -> bool:
    """Whether NCCL, or torch.distributed, writes a line for each call."""
    return value.upper() in ("INFO", "TRACE", "DETAIL")


def renamed(name: str) -> Variable:
    """A variable of torch that has a new name, and is still read under the old one."""
    return Variable(
        name, "VARIABLE-DEPRECATED", NOTE, there,
        "{name} is torch's old name (never NCCL's) for TORCH_{name}; it is read with a warning",
        "Set TORCH_{name}={value}, or nothing: the default is right.", HEADERS,
    )  # fmt: skip


def invented(name: str, instead: str) -> Variable:
    """A variable that is handed around, and that nothing reads."""
    return Variable(
        name, "VARIABLE-INVENTED", WARNING, there, "{name}={value}: neither NCCL nor torch reads it",
        f"Unset it; {instead}", TIMEOUT,
    )  # fmt: skip


GROUP = "the time-out is that of init_process_group: 10 minutes for NCCL, 30 for gloo (--ddp_timeout in sd-scripts)."

# fmt: off
VARIABLES = (
    *map(renamed, ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")),
    invented("NCCL_TIMEOUT", GROUP),
    invented("NCCL_SOCKET_NTIMEO", GROUP),
    invented("NCCL_TIMEOUT_MS", GROUP),
    invented("TORCH_NCCL_TIMEOUT", GROUP),
    invented("TORCH_USE_CUDA_DSA", "it is an option for building torch, and has no effect on a wheel."),
    Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "VARIABLE-DEPRECATED", NOTE, there,
             "{name} is deprecated: what it asked for is the default", "Unset it.", HEADERS),
    Variable("CUDA_LAUNCH_BLOCKING", "VARIABLE-DEBUGGING", WARNING, on,
             "{name}={value} lets the host wait for each kernel: for finding a fault, and much slower",
             "Unset it when the fault is found.", DEBUGGING),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "VARIABLE-DEBUGGING", WARNING, on,
             "{name}={value} asks the driver for every tensor's memory: for memory checkers, and many times slower",
             "Unset it.", DEBUGGING),
    Variable("TORCH_DISTRIBUTED_DEBUG", "VARIABLE-DEBUGGING", WARNING, loud,
             "{name}={value} checks each collective call: for finding a fault, and slower", "Unset it.",
             "https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications"),
    Variable("NCCL_DEBUG", "VARIABLE-DEBUGGING", NOTE, loud,
             "{name}={value} was left on: many lines, and NVIDIA advises against it outside of debugging",
             "Set {name}=WARN, which tells what fails.", NCCL_DOCS),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "FP32-IS-TF32", WARNING, on,
             "{name}={value}: every fp32 product is a TF32 one, of 11 significand bits, and so is the reference that "
             "plans are proved against", "Unset it.",
             "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/Context.cpp"),
)
# fmt: on


def unknown_names(environment: Environment) -> Iterator[Numbers]:
    """Variables with NCCL's prefixes that are none of NCCL's, nor in the table above."""
    told = {variable.name for variable in VARIABLES}
    for name in environment.variables:
        if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in REAL and name not in told:
            yield {"variable": name, "what": did_you_mean(name, REAL)}


def unknown_allocator_keys(environment: Environment) -> Iterator[Numbers]:
    for name in ALLOCATOR:
        for key in allocator_keys(environment.variables.get(name, "")):
            if key not in ALLOCATOR_KEYS:
                yield {"variable": name, "key": key, "what": did_you_mean(key, ALLOCATOR_KEYS)}


def broken_allocator(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable of torch's allocator, and its part, at which importing torch aborts the process; None if sound.

    Source: measured with torch 2.14, which asks for the token behind a key without looking whether there is one.

    >>> broken_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb=128"})
    ('PYTORCH_ALLOC_CONF', 'max_split_size_mb=128')
    """
    for name in ALLOCATOR:
        for part in without_lists(variables.get(name, "")).split(","):
            key, colon, value = part.partition(":")
            if key.strip() and not (colon and value.strip()):
                return name, part.strip()
    return None


def allocator_keys(settings: str) -> list[str]:
    """The keys of "key:value,key:[value,value]".

    >>> allocator_keys("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]")
    ['expandable_segments', 'roundup_power2_divisions']
    """
    return [part.partition(":")[0].strip() for part in without_lists(settings).split(",") if part.strip()]


def without_lists(settings: str) -> str:
    """The settings with each list shrunk to its closing bracket, so that every comma stands between two settings."""
    flat, depth = "", 0
    for char in settings:
        depth += (char == "[") - (char == "]")
        flat += char if not depth else ""
    return flat


def ignored_allocator(environment: Environment) -> list[Numbers]:
    """torch 2.9 and 2.10 read the new name for everything but what the CUDA allocator alone knows."""
    old = (2, 9) <= leading(environment.torch.version) < (2, 11)
    settings = environment.variables.get("PYTORCH_ALLOC_CONF", "")
    mine = "expandable_segments" in settings and "PYTORCH_CUDA_ALLOC_CONF" not in environment.variables
    return once(environment.torch.cuda and old and mine, torch=environment.torch.version, value=settings)


def one_thread(environment: Environment) -> list[Numbers]:
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environment.variables.get(name) == "1"]
    alone = environment.variables.get("WORLD_SIZE", "1") == "1"
    cores = environment.machine.cores
    return once(names and alone and cores >= MANY_CORES, variables=", ".join(names), cores=cores)


# fmt: off
RULES = (
    *VARIABLES,
    Rule("ALLOCATOR-KEY-UNKNOWN", ERROR, "{variable}", unknown_allocator_keys,
         "{variable} has a key {key!r}, at which torch stops with 'Unrecognized key'.{what}",
         "Correct it, or unset the variable.",
         "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"),
    Rule("ALLOCATOR-SETTING-IGNORED", WARNING, "PYTORCH_ALLOC_CONF", ignored_allocator,
         "torch {torch} ignores PYTORCH_ALLOC_CONF={value} on CUDA",
         "Set PYTORCH_CUDA_ALLOC_CONF={value}, or install torch 2.11 or later.",
         "https://github.com/pytorch/pytorch/issues/183387"),
    Rule("VARIABLE-UNKNOWN", NOTE, "{variable}", unknown_names,
         "NCCL 2.30 and torch 2.14 do not read {variable}.{what}", "Unset it, or correct its name.", NCCL_DOCS),
    Rule("CPU-THREADS-FEW", NOTE, "environment", one_thread,
         "{variables} is 1 on {cores} cores: the CPU's part, the caches of latents and texts above all, takes one core",
         "Unset it; torchrun sets it where nobody does.",
         "https://docs.pytorch.org/docs/stable/elastic/run.html"),
)
# fmt: on
