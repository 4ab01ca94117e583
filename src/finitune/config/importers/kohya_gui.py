"""Importing the JSON of the kohya_ss GUI: its fields are given sd-scripts' names first, as the GUI does itself.

Some of its fields mean something else than the flag of that name: rates of 0 choose what is trained, the warm-up is in
percent, one text holds a list. Facts: kohya_ss, kohya_gui/lora_gui.py, class_basic_training.py, class_anima.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.config.imported import Fate, Imported, KeyLine
from finitune.config.importers.kohya import Entry, settle
from finitune.config.importers.kohya_flags import flags, words
from finitune.config.importers.kohya_gui_keys import (
    ADAPTERS,
    ALIASES,
    CONVOLVED,
    FAMILIES,
    FIELDS,
    FOREIGN,
    LYCORIS_ONLY,
    READ_BY,
    SHARED_ARGUMENTS,
    UNFILLED,
    ZERO_IS_OFF,
)
from finitune.config.importers.kohya_keys import ABSENT, NEUTRAL, TRAINING
from finitune.config.importers.kohya_rules import OFF, TRUE, given
from finitune.report import Finding, Level

PROGRAM = "kohya_ss"


@dataclass(frozen=True)
class Form:
    """The fields of the GUI, and what several of them decide together."""

    fields: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The kind of adapter, as the GUI calls it."""
        return str(self.fields.get("LoRA_type") or "Standard")

    @property
    def anima(self) -> bool:
        """Whether the Anima box is ticked, or its kind of adapter chosen."""
        return self.fields.get("anima_checkbox") in TRUE or self.kind == "Anima"

    def number(self, name: str) -> float:
        """The number in a field; 0 where it is empty or holds none."""
        value = given(self.fields, name)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def family(self) -> str:
        """The model family of the script that the GUI would start; '' for Anima, or where nothing says it."""
        if self.anima:
            return ""
        ticked = [family for box, family in FAMILIES.items() if self.fields.get(box) in TRUE]
        if ticked:
            return ticked[0]
        said = self.fields.get("pretrained_model_name_or_path") not in OFF or self.fields.keys() & FAMILIES.keys()
        return "Stable Diffusion 1.5 or 2" if said else ""


def import_gui(document: Mapping[str, Any], source: Path) -> Imported:
    """A configuration or preset of the kohya_ss GUI for LoRA in our terms.

    A field that is missing has the GUI's default.
    """
    form = Form(document)
    entries: list[Entry] = []
    lines: list[KeyLine] = []
    for key, value in document.items():
        for part in translated(form, key, value):
            (lines if isinstance(part, KeyLine) else entries).append(part)  # type: ignore[arg-type]
    entries.sort(key=lambda entry: entry.path.startswith(("anima_", "additional_parameters:")))
    entries, idle = without_idle_aliases(entries)
    absent = dict(ABSENT) | {place: value for key, (place, value) in UNFILLED.items() if key not in document}
    imported = settle(entries, source, PROGRAM, {}, form.family(), absent)
    order = {key: place for place, key in enumerate(document)}
    every = sorted([*lines, *idle, *imported.lines], key=lambda line: order.get(line.key, len(order)))
    return replace(imported, lines=tuple(every), findings=(*imported.findings, *unsaid(form, source)))


def unsaid(form: Form, source: Path) -> Iterator[Finding]:
    """A note on a preset that does not say its model family."""
    if not form.anima and not form.family():
        message = "nothing says for which model family this is: it is taken for Anima"
        remedy = "Rates and ranks that suit another family may not suit Anima: look through the account."
        yield Finding(Level.WARNING, "CONFIG-FAMILY-UNSAID", str(source), message, {}, remedy)


def without_idle_aliases(entries: list[Entry]) -> tuple[list[Entry], list[KeyLine]]:
    """Of several fields with one meaning, those that are off count for nothing beside one that is on."""
    used = {entry.name for entry in entries if entry.value not in NEUTRAL}
    many = {name for name in used if sum(entry.name == name for entry in entries) > 1}
    idle = [entry for entry in entries if entry.name in many and entry.value in NEUTRAL]
    lines = [KeyLine(entry.path, entry.value, Fate.NO_EFFECT, "", "off") for entry in idle]
    return [entry for entry in entries if entry not in idle], lines


def translated(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """A field as a key of sd-scripts, or its line where the GUI makes none of it."""
    if key in SPECIAL:
        yield from SPECIAL[key](form, key, value)
    elif key in FIELDS:
        yield KeyLine(key, value, Fate.NO_EFFECT if value in NEUTRAL else Fate.UNSUPPORTED, "", FIELDS[key])
    elif key in FAMILIES:
        yield family_box(key, value)
    elif key in ALIASES:
        yield Entry(key, ALIASES[key], value)
    elif key.startswith("anima_"):
        yield anima_field(form, key, value)
    elif key in LYCORIS_ONLY or key in CONVOLVED:
        yield argument(form, key, value)
    elif key in SHARED_ARGUMENTS:
        yield Entry(key, f"network_args.{key}", value)
    elif key.startswith(FOREIGN) and key not in TRAINING:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "of another model family")
    elif key in ZERO_IS_OFF and value in NEUTRAL:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "empty: the default counts")
    else:
        yield Entry(key, key, value)


def family_box(key: str, value: Any) -> KeyLine:
    """The box of another model family."""
    if value in TRUE:
        return KeyLine(key, value, Fate.UNSUPPORTED, "", f"for {FAMILIES[key]}; only Anima is trained here")
    return KeyLine(key, value, Fate.NO_EFFECT, "", "off")


def anima_field(form: Form, key: str, value: Any) -> Entry | KeyLine:
    """A field of the Anima group: the key of that name without anima_."""
    if not form.anima:
        return KeyLine(key, value, Fate.NO_EFFECT, "", "read with the Anima box only")
    return Entry(key, key.removeprefix("anima_"), value)


def argument(form: Form, key: str, value: Any) -> Entry | KeyLine:
    """A field that goes into network_args for some kinds of adapter."""
    lycoris = form.kind.startswith("LyCORIS/") and READ_BY.get(key, "") in form.kind
    read = lycoris or (key in CONVOLVED and form.kind.startswith("Kohya "))
    if not read and not (form.kind == "Kohya LoKr" and key == "factor"):
        return KeyLine(key, value, Fate.NO_EFFECT, "", f"not read for {form.kind}")
    return Entry(key, f"network_args.{LYCORIS_ONLY.get(key, key)}", value)


def kind_of_adapter(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """LoRA_type: a network module, or an algorithm of LyCORIS."""
    name, made = ADAPTERS.get(form.kind, ("network_module", form.kind))
    yield Entry(key, name, made, f"{form.kind!r} is {made}", shown=value)


def epochs(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """The GUI makes steps of its epochs, unless steps or an epoch limit are given."""
    if form.number("max_train_epochs") or form.number("max_train_steps"):
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "max_train_epochs or max_train_steps stands over it")
    else:
        yield Entry(key, "max_train_epochs", value, "the GUI makes steps of them; here they are epochs")


def warmup(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """Percent of all steps."""
    if form.number("lr_warmup_steps"):
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "lr_warmup_steps stands over it")
        return
    share = min(form.number(key) / 100, 0.9999)
    yield Entry(key, "lr_warmup_steps", share, "percent of all steps; a share here", shown=value)


def warmup_steps(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """Steps, where they are given."""
    if form.number(key):
        yield Entry(key, key, value)
    else:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "0: lr_warmup counts")


def denoiser_rate(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """A rate of 0 beside one for the text encoder trains the text encoder alone."""
    if form.number(key):
        yield Entry(key, key, value)
    elif form.number("text_encoder_lr"):
        yield Entry(key, "network_train_text_encoder_only", True, shown=value)
    else:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "0: learning_rate counts")


def text_rate(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """A rate of 0 beside one for the denoiser trains the denoiser alone."""
    if form.number(key) or form.number("unet_lr"):
        yield Entry(key, key, value if form.number(key) else 0)
    else:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "0: learning_rate counts")


def prompts(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """The GUI writes the text to a file of prompts, one a line."""
    text = str(value or "")
    if text.lower().endswith((".txt", ".toml", ".json")):
        yield Entry(key, key, value)
        return
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    yield Entry(key, key, lines or None, "", shown=value)


def additional(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """Flags that the GUI appends to the command."""
    found = list(flags(words(str(value or ""))))
    note = "its flags follow" if found else "empty: the default counts"
    yield KeyLine(key, value, Fate.TAKEN if found else Fate.NO_EFFECT, "", note)
    for name, item in found:
        yield Entry(f"{key}: {name}", name.lstrip("-"), item)


def wandb(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """A tick for wandb."""
    if value in TRUE:
        yield Entry(key, "log_with", "wandb", shown=value)
    else:
        yield KeyLine(key, value, Fate.NO_EFFECT, "", "off")


def anima_box(form: Form, key: str, value: Any) -> Iterator[Entry | KeyLine]:
    """The box of our model family."""
    on = value in TRUE
    yield KeyLine(key, value, Fate.TAKEN if on else Fate.NO_EFFECT, "", "Anima" if on else "off")


SPECIAL = {
    "LoRA_type": kind_of_adapter,
    "epoch": epochs,
    "lr_warmup": warmup,
    "lr_warmup_steps": warmup_steps,
    "unet_lr": denoiser_rate,
    "text_encoder_lr": text_rate,
    "sample_prompts": prompts,
    "additional_parameters": additional,
    "use_wandb": wandb,
    "anima_checkbox": anima_box,
}
"""Fields that mean something of their own, or in company."""
