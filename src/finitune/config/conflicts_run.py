"""The rules about what a run writes: files, previews, measurements, logs."""

from __future__ import annotations

from collections.abc import Mapping

from finitune.config.config_rule import (
    CONFIG_ERROR,
    CONFIG_NOTE,
    CONFIG_WARNING,
    ConfigRule,
    compute_configured_steps,
    make_counted_twice_rule,
    make_never_reached_rule,
    make_no_effect_rule,
    match_any_dataset,
)
from finitune.config.schema import TrainConfig

_FORBIDDEN_NAME_CHARACTERS = frozenset('/\\:*?"<>|')
"""Signs that a file's name cannot have everywhere."""
_MAX_OUTPUT_NAME_BYTES = 150
"""Bytes of a name; systems allow 255, and steps, spellings and endings come behind it."""
_MIN_STEPS_TO_SAVE = 500
"""Steps from which the loss of all of them would hurt."""


def has_scheduled_previews(config: TrainConfig) -> bool:
    """Whether pictures are to be drawn at some time."""
    preview = config.preview
    return bool(preview.sample_every_n_steps or preview.sample_every_n_epochs or preview.sample_at_first)


def find_output_name_fault(name: str) -> Mapping[str, str]:
    """What a name has that files cannot have, here or on another system; nothing where all is well."""
    if not name.strip():
        return {"what": "is empty"}
    if _FORBIDDEN_NAME_CHARACTERS & set(name):
        return {"what": 'cannot have any of / \\ : * ? " < > |'}
    if name != name.strip() or name[0] == "." or name[-1] == ".":
        return {"what": "cannot begin or end with a dot or a blank"}
    return (
        {"what": f"has more than {_MAX_OUTPUT_NAME_BYTES} letters"}
        if len(name.encode()) > _MAX_OUTPUT_NAME_BYTES
        else {}
    )


def has_intermediate_saves(config: TrainConfig) -> bool:
    """Whether files are written before the last."""
    return bool(config.saving.save_every_n_steps or config.saving.save_every_n_epochs)


def has_no_validation_split(config: TrainConfig) -> bool:
    """Whether no dataset keeps pictures for validation."""
    return not match_any_dataset(lambda dataset: dataset.validation_split)(config)


_SAVING_RULES = (
    make_counted_twice_rule("saving", "save"),
    make_never_reached_rule("saving", "save_every_n_steps"),
    ConfigRule(
        CONFIG_NOTE,
        "SAVED-ONCE",
        "saving.save_every_n_steps",
        lambda c: not has_intermediate_saves(c) and (compute_configured_steps(c) or 0) >= _MIN_STEPS_TO_SAVE,
        "only the last file is written: a run that is killed leaves nothing to go on from",
        "Set save_every_n_steps, such as 200.",
    ),
    make_no_effect_rule(
        "saving.save_last_n",
        lambda c: not has_intermediate_saves(c),
        "without save_every_n_steps or save_every_n_epochs",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "RESUME-WEIGHTS",
        "network.network_weights",
        lambda c: c.network.network_weights and c.saving.resume != "never",
        "network_weights has no effect where a run is resumed: the state has the adapter",
        "Leave network_weights out, or resume = never to begin anew from them.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "RESUME-WITHOUT-STATE",
        "saving.save_state",
        lambda c: c.saving.resume == "auto" and not c.saving.save_state,
        "resume = auto, and no state is written that a later run could go on from",
        "Leave save_state at true.",
    ),
    ConfigRule(
        CONFIG_ERROR,
        "SPELLING-NONE",
        "saving.save_as",
        lambda c: not c.saving.save_as,
        "save_as is empty: no file would be written",
        'Write save_as = ["kohya"].',
    ),
    ConfigRule(
        CONFIG_ERROR,
        "OUTPUT-NAME",
        "saving.output_name",
        lambda c: find_output_name_fault(c.saving.output_name),
        "output_name is the name of a file, and {what}",
        "Folders go into output_dir.",
    ),
    ConfigRule(
        CONFIG_WARNING,
        "OUTPUT-NAME-ENDING",
        "saving.output_name",
        lambda c: c.saving.output_name.endswith(".safetensors"),
        "output_name has .safetensors at its end, which is added",
        "Leave the ending out.",
    ),
)

_PREVIEW_RULES = (
    make_counted_twice_rule("preview", "sample"),
    make_never_reached_rule("preview", "sample_every_n_steps"),
    ConfigRule(
        CONFIG_ERROR,
        "PROMPTS-MISSING",
        "preview.sample_prompts",
        lambda c: has_scheduled_previews(c) and not c.preview.sample_prompts,
        "previews are asked for, and there is no prompt",
        'Write sample_prompts = ["..."], or leave the previews out.',
    ),
    make_no_effect_rule(
        "preview.sample_prompts",
        lambda c: not has_scheduled_previews(c),
        "without sample_every_n_steps, sample_every_n_epochs or sample_at_first",
        "Set sample_every_n_steps, such as 200, or leave the prompts out.",
    ),
    *(
        make_no_effect_rule(f"preview.{name}", lambda c: not has_scheduled_previews(c), "without previews")
        for name in ("sample_steps", "sample_cfg", "sample_seed", "sample_size")
    ),
)

_VALIDATION_RULES = (
    make_counted_twice_rule("validation", "validate"),
    make_never_reached_rule("validation", "validate_every_n_steps"),
    *(
        make_no_effect_rule(
            f"validation.{name}",
            has_no_validation_split,
            "without validation_split: there are no pictures to measure on",
            "Set validation_split in [general], such as 0.1, or leave it out.",
        )
        for name in ("validate_every_n_steps", "validate_every_n_epochs", "validation_sigmas", "max_validation_steps")
    ),
    ConfigRule(
        CONFIG_ERROR,
        "VALIDATION-SIGMAS",
        "validation.validation_sigmas",
        lambda c: not c.validation.validation_sigmas or not all(0 < s <= 1 for s in c.validation.validation_sigmas),
        "validation_sigmas are numbers above 0 and up to 1, at least one",
        "Leave them out to have the usual ones.",
    ),
)

_LOGGING_RULES = (
    make_no_effect_rule(
        "logging.logging_dir", lambda c: c.logging.log_with == "none", "without log_with = tensorboard"
    ),
)
CONFIG_RUN_RULES = (*_SAVING_RULES, *_PREVIEW_RULES, *_VALIDATION_RULES, *_LOGGING_RULES)
