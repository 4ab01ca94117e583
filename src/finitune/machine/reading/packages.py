"""The installed packages that matter, by their metadata; none is imported."""

from __future__ import annotations

import json
import os
import re
import site
import sys
from importlib import metadata
from pathlib import Path

from finitune.machine.environment import Package

REPORTED_PACKAGES = (
    *("finitune", "torch", "torchvision", "torchaudio", "triton", "triton-windows", "pytorch-triton-rocm", "numpy"),
    *("diffusers", "transformers", "peft", "accelerate", "safetensors", "huggingface-hub", "tokenizers"),
    *("xformers", "flash-attn", "sageattention", "bitsandbytes", "torchao", "optimum-quanto", "nunchaku", "deepspeed"),
    *("onnxruntime", "onnxruntime-gpu", "pytorch-optimizer", "lycoris-lora", "prodigyopt", "pillow", "opencv-python"),
    *("lightning", "tensorboard", "wandb", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12"),
    *("nvidia-nccl-cu13", "psutil", "packaging"),
)


def read_packages() -> tuple[Package, ...]:
    """Those of REPORTED_PACKAGES that are installed, in that order."""
    return tuple(package for name in REPORTED_PACKAGES if (package := read_package(name)))


def read_package(name: str) -> Package | None:
    """A package with what it requires of the others, and where its copies lie: the first is the one imported."""
    copies: dict[str, metadata.Distribution] = {}
    for found in metadata.distributions(name=name):
        copies.setdefault(str(Path(str(found.locate_file(""))).resolve()), found)
    if not copies:
        return None
    first = next(iter(copies.values()))
    try:
        version = str(first.version or "")
        requires = tuple(
            text
            for text in first.requires or ()
            if "extra ==" not in text and parse_package_name(text) in REPORTED_PACKAGES
        )
    except Exception:  # damaged metadata raises what it likes, KeyError, TypeError and UnicodeError among it
        version, requires = "", ()
    built = read_xformers_build(first) if name == "xformers" else {}
    return Package(
        name=name,
        version="" if version == "None" else version,
        requires=requires,
        built_torch=str(built.get("torch", "")),
        built_cuda=format_cuda_version(built.get("cuda")),
        built_archs=tuple(str(built.get("archs", "")).split()),
        homes=tuple(find_package_home(Path(folder)) for folder in copies),
    )


def parse_package_name(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    return name[0].lower().replace("_", "-") if name else ""


def read_xformers_build(package: metadata.Distribution) -> dict[str, object]:
    """What xformers' wheels tell of their build: torch, CUDA (1201 for 12.1), architectures."""
    path = Path(str(package.locate_file("xformers/cpp_lib.json")))
    try:
        record = json.loads(path.read_text())
        version = dict(record["version"])
        archs = record.get("env", {}).get("TORCH_CUDA_ARCH_LIST") or ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"torch": version.get("torch") or "", "cuda": version.get("cuda"), "archs": archs.replace(";", " ")}


def format_cuda_version(cuda: object) -> str:
    """'12.1' of 1201.

    >>> format_cuda_version(1201), format_cuda_version(None)
    ('12.1', '')
    """
    return f"{cuda // 100}.{cuda % 100}" if isinstance(cuda, int) else ""


def find_package_home(folder: Path) -> str:
    """Whose a folder of packages is: this environment's, the user's, or that of a path set from outside."""
    user = site.getusersitepackages() if site.ENABLE_USER_SITE is not None else ""
    if user and folder == Path(user).resolve():
        return "user"
    outside = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if any(folder == Path(part).resolve() for part in outside):
        return "PYTHONPATH"
    prefix = Path(sys.prefix).resolve()
    return "environment" if folder.is_relative_to(prefix) else "elsewhere"
