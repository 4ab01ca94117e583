"""Where each option belongs, what others call it, and what a misspelled one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from finitune.config.datasets import Dataset, DatasetOptions, Section, Subset, SubsetOptions
from finitune.config.schema import SECTIONS, TrainConfig

LIKENESS = 75
"""How like two names must be, in percent of their letters, for one to be a misspelling of the other."""

NAMED_ELSEWHERE = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "alpha": "network_alpha",
    "algo": "algorithm",
    "base_model": "pretrained_model_name_or_path",
    "blocks_to_swap": "offload_blocks",
    "caption_ext": "caption_extension",
    "compile": "torch_compile",
    "dim": "network_dim",
    "dora_wd": "dora",
    "dtype": "precision",
    "epochs": "max_train_epochs",
    "fp8_base": "storage",
    "grad_clip": "max_grad_norm",
    "linear": "network_dim",
    "linear_alpha": "network_alpha",
    "lr": "learning_rate",
    "max_timestep": "max_sigma",
    "metadata_trigger_phrase": "trigger_phrase",
    "min_timestep": "min_sigma",
    "mixed_precision": "precision",
    "model": "pretrained_model_name_or_path",
    "network_args": "algorithm",
    "network_module": "algorithm",
    "optimizer": "optimizer_type",
    "prompts": "sample_prompts",
    "rank": "network_dim",
    "repeats": "num_repeats",
    "reso": "resolution",
    "save_last_n_epochs": "save_last_n",
    "save_last_n_steps": "save_last_n",
    "save_model_as": "save_as",
    "scheduler": "lr_scheduler",
    "steps": "max_train_steps",
    "train_data_dir": "image_dir",
    "unbalanced_factorization": "unbalanced",
    "unet_lr": "learning_rate",
    "warmup_steps": "lr_warmup_steps",
}
"""Our names of options that other programs, or people in a hurry, call otherwise."""


class Home(NamedTuple):
    """The levels at which an option may stand, as headers of tables."""

    option: str
    levels: tuple[str, ...]

    def __str__(self) -> str:
        *others, last = self.levels
        return f"{', '.join(others)} or {last}" if others else last


LEVELS: dict[str, type[Section]] = {
    **{f"[{name}]": TrainConfig.model_fields[name].annotation for name in SECTIONS},  # type: ignore[dict-item]
    "[general]": DatasetOptions,
    "[[datasets]]": Dataset,
    "[[datasets.subsets]]": Subset,
}


def home_of(option: str) -> Home | None:
    """Where an option belongs; None where there is no such option.

    >>> str(home_of("num_repeats")), str(home_of("learning_rate"))
    ('[general], [[datasets]] or [[datasets.subsets]]', '[optimizer]')
    """
    if option == "subsets":
        return Home(option, ("[[datasets.subsets]]",))
    levels = tuple(level for level, section in LEVELS.items() if option in section.model_fields)
    return Home(option, levels) if levels else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a misspelling of, if it is one.

    >>> nearest("learing_rate", ["learning_rate", "lr_scheduler"])
    'learning_rate'
    """
    from rapidfuzz import fuzz, process

    match = process.extractOne(name.casefold(), list(known), scorer=fuzz.ratio, score_cutoff=LIKENESS)
    return match[0] if match else None


def meant_by(name: str, siblings: Iterable[str]) -> Home | None:
    """The option that an unknown name stands for: a sibling first, then what others call so, then any."""
    option = nearest(name, siblings) or NAMED_ELSEWHERE.get(name) or nearest(name, all_options())
    return home_of(option) if option else None


def all_options() -> list[str]:
    """Every option once."""
    return sorted(
        {option for section in LEVELS.values() for option in section.model_fields} | set(SubsetOptions.model_fields)
    )
