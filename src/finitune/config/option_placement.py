"""Where each option belongs, what others call it, and what a misspelled one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from finitune.config.datasets import ConfigSection, Dataset, DatasetOptions, Subset, SubsetOptions
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig

_MIN_NAME_SIMILARITY = 75
"""How like two names must be, in percent of their letters, for one to be a misspelling of the other."""

_OPTION_BY_FOREIGN_NAME = {
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


class OptionPlacement(NamedTuple):
    """The levels at which an option may stand, as headers of tables."""

    option: str
    levels: tuple[str, ...]

    def __str__(self) -> str:
        *others, last = self.levels
        return f"{', '.join(others)} or {last}" if others else last


SECTION_BY_HEADER: dict[str, type[ConfigSection]] = {
    **{f"[{name}]": TrainConfig.model_fields[name].annotation for name in CONFIG_SECTION_NAMES},  # type: ignore[dict-item]
    "[general]": DatasetOptions,
    "[[datasets]]": Dataset,
    "[[datasets.subsets]]": Subset,
}


def find_option_placement(option: str) -> OptionPlacement | None:
    """Where an option belongs; None where there is no such option.

    >>> str(home_of("num_repeats")), str(home_of("learning_rate"))
    ('[general], [[datasets]] or [[datasets.subsets]]', '[optimizer]')
    """
    if option == "subsets":
        return OptionPlacement(option, ("[[datasets.subsets]]",))
    levels = tuple(level for level, section in SECTION_BY_HEADER.items() if option in section.model_fields)
    return OptionPlacement(option, levels) if levels else None


def find_nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a misspelling of, if it is one.

    >>> nearest("learing_rate", ["learning_rate", "lr_scheduler"])
    'learning_rate'
    """
    from rapidfuzz import fuzz, process

    match = process.extractOne(name.casefold(), list(known), scorer=fuzz.ratio, score_cutoff=_MIN_NAME_SIMILARITY)
    return match[0] if match else None


def guess_meant_option(name: str, siblings: Iterable[str]) -> OptionPlacement | None:
    """The option that an unknown name stands for: a sibling first, then what others call so, then any."""
    option = (
        find_nearest_name(name, siblings)
        or _OPTION_BY_FOREIGN_NAME.get(name)
        or find_nearest_name(name, list_config_options())
    )
    return find_option_placement(option) if option else None


def list_config_options() -> list[str]:
    """Every option once."""
    return sorted(
        {option for section in SECTION_BY_HEADER.values() for option in section.model_fields}
        | set(SubsetOptions.model_fields)
    )
