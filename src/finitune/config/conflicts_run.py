"""The rules about what a run writes: files, previews, measurements, logs."""

from __future__ import annotations

from collections.abc import Mapping

from finitune.config.rule import (
    ERROR,
    NOTE,
    WARNING,
    Rule,
    both_counts,
    idle,
    in_datasets,
    never_reached,
    steps,
)
from finitune.config.schema import TrainConfig

NOT_IN_NAMES = frozenset('/\\:*?"<>|')
"""Signs that a file's name cannot have everywhere."""
LONGEST_NAME = 150
"""Bytes of a name; systems allow 255, and steps, spellings and endings come behind it."""
LONG_RUN = 500
"""Steps from which the loss of all of them would hurt."""


def previews_wanted(config: TrainConfig) -> bool:
    """Whether pictures are to be drawn at some time."""
    preview = config.preview
    return bool(preview.sample_every_n_steps or preview.sample_every_n_epochs or preview.sample_at_first)


def bad_name(name: str) -> Mapping[str, str]:
    """What a name has that files cannot have, here or on another system; nothing where all is well."""
    if not name.strip():
        return {"what": "is empty"}
    if NOT_IN_NAMES & set(name):
        return {"what": 'cannot have any of / \\ : * ? " < > |'}
    if name != name.strip() or name[0] == "." or name[-1] == ".":
        return {"what": "cannot begin or end with a dot or a blank"}
    return {"what": f"has more than {LONGEST_NAME} letters"} if len(name.encode()) > LONGEST_NAME else {}


def saves_on_the_way(config: TrainConfig) -> bool:
    """Whether files are written before the last."""
    return bool(config.saving.save_every_n_steps or config.saving.save_every_n_epochs)


def nothing_held_out(config: TrainConfig) -> bool:
    """Whether no dataset keeps pictures for validation."""
    return not in_datasets(lambda dataset: dataset.validation_split)(config)


SAVING = (
    both_counts("saving", "save"),
    never_reached("saving", "save_every_n_steps"),
    Rule(
        NOTE,
        "SAVED-ONCE",
        "saving.save_every_n_steps",
        lambda c: not saves_on_the_way(c) and (steps(c) or 0) >= LONG_RUN,
        "only the last file is written: a run that is killed leaves nothing to go on from",
        "Set save_every_n_steps, such as 200.",
    ),
    idle("saving.save_last_n", lambda c: not saves_on_the_way(c), "without save_every_n_steps or save_every_n_epochs"),
    Rule(
        WARNING,
        "RESUME-WEIGHTS",
        "network.network_weights",
        lambda c: c.network.network_weights and c.saving.resume != "never",
        "network_weights has no effect where a run is resumed: the state has the adapter",
        "Leave network_weights out, or resume = never to begin anew from them.",
    ),
    Rule(
        WARNING,
        "RESUME-WITHOUT-STATE",
        "saving.save_state",
        lambda c: c.saving.resume == "auto" and not c.saving.save_state,
        "resume = auto, and no state is written that a later run could go on from",
        "Leave save_state at true.",
    ),
    Rule(
        ERROR,
        "SPELLING-NONE",
        "saving.save_as",
        lambda c: not c.saving.save_as,
        "save_as is empty: no file would be written",
        'Write save_as = ["kohya"].',
    ),
    Rule(
        ERROR,
        "OUTPUT-NAME",
        "saving.output_name",
        lambda c: bad_name(c.saving.output_name),
        "output_name is the name of a file, and {what}",
        "Folders go into output_dir.",
    ),
    Rule(
        WARNING,
        "OUTPUT-NAME-ENDING",
        "saving.output_name",
        lambda c: c.saving.output_name.endswith(".safetensors"),
        "output_name has .safetensors at its end, which is added",
        "Leave the ending out.",
    ),
)

PREVIEW = (
    both_counts("preview", "sample"),
    never_reached("preview", "sample_every_n_steps"),
    Rule(
        ERROR,
        "PROMPTS-MISSING",
        "preview.sample_prompts",
        lambda c: previews_wanted(c) and not c.preview.sample_prompts,
        "previews are asked for, and there is no prompt",
        'Write sample_prompts = ["..."], or leave the previews out.',
    ),
    idle(
        "preview.sample_prompts",
        lambda c: not previews_wanted(c),
        "without sample_every_n_steps, sample_every_n_epochs or sample_at_first",
        "Set sample_every_n_steps, such as 200, or leave the prompts out.",
    ),
    *(
        idle(f"preview.{name}", lambda c: not previews_wanted(c), "without previews")
        for name in ("sample_steps", "sample_cfg", "sample_seed", "sample_size")
    ),
)

VALIDATION = (
    both_counts("validation", "validate"),
    never_reached("validation", "validate_every_n_steps"),
    *(
        idle(
            f"validation.{name}",
            nothing_held_out,
            "without validation_split: there are no pictures to measure on",
            "Set validation_split in [general], such as 0.1, or leave it out.",
        )
        for name in ("validate_every_n_steps", "validate_every_n_epochs", "validation_sigmas", "max_validation_steps")
    ),
    Rule(
        ERROR,
        "VALIDATION-SIGMAS",
        "validation.validation_sigmas",
        lambda c: not c.validation.validation_sigmas or not all(0 < s <= 1 for s in c.validation.validation_sigmas),
        "validation_sigmas are numbers above 0 and up to 1, at least one",
        "Leave them out to have the usual ones.",
    ),
)

LOGGING = (idle("logging.logging_dir", lambda c: c.logging.log_with == "none", "without log_with = tensorboard"),)
RUN_RULES = (*SAVING, *PREVIEW, *VALIDATION, *LOGGING)
