"""Importing the JSON of the kohya_ss GUI: its fields are given sd-scripts' names first, as the GUI does itself.

Some of its fields mean something else than the flag of that name: rates of 0 choose what is trained, the warm-up is in
percent, one text holds a list. The tables are in `kohya_gui.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyReason, KeyStatus
from finitune.importers.foreign_text import parse_command_flags, split_command_line
from finitune.importers.key_tables import read_facts
from finitune.importers.kohya import KohyaOption, import_kohya_options
from finitune.importers.kohya_conversions import (
    KOHYA_OFF_VALUES,
    KOHYA_TRUE_VALUES,
    get_kohya_number,
    is_kohya_switch_on,
    is_kohya_value_given,
    read_kohya_table,
)
from finitune.importers.kohya_datasets import read_kohya_keys
from finitune.report import Finding, Level

_NEUTRAL_VALUES = (*KOHYA_OFF_VALUES, False, 0, "0", "False", "false")
TranslatedField = KohyaOption | ImportedKey


@dataclass(frozen=True)
class KohyaGuiForm:
    """The fields of the GUI, and what several of them decide together."""

    fields: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The kind of adapter, as the GUI calls it."""
        return str(self.fields.get("LoRA_type") or "Standard")

    @property
    def anima(self) -> bool:
        """Whether the Anima box is ticked, or its kind of adapter chosen."""
        return is_kohya_switch_on(self.fields, "anima_checkbox") or self.kind == "Anima"

    def number(self, name: str) -> float:
        """The number in a field; 0 where it is empty or holds none."""
        return float(get_kohya_number(self.fields, name))

    def family(self) -> str:
        """The model family of the script that the GUI would start; '' for Anima, or where nothing says it."""
        boxes = read_facts("kohya_gui")["family_by_checkbox"]
        if self.anima:
            return ""
        if ticked := [family for box, family in boxes.items() if is_kohya_switch_on(self.fields, box)]:
            return ticked[0]
        said = is_kohya_value_given(self.fields, "pretrained_model_name_or_path") or self.fields.keys() & boxes.keys()
        return "Stable Diffusion 1.5 or 2" if said else ""


def import_kohya_gui(document: Mapping[str, Any], source: Path) -> ImportedConfig:
    """A configuration or preset of the kohya_ss GUI for LoRA in our terms.

    A field that is missing has the GUI's default.
    """
    form = KohyaGuiForm(document)
    parts = [part for key, value in document.items() for part in translate_gui_field(form, key, value)]
    lines = [part for part in parts if isinstance(part, ImportedKey)]
    entries = [part for part in parts if isinstance(part, KohyaOption)]
    entries.sort(key=lambda entry: entry.path.startswith(("anima_", "additional_parameters:")))
    entries, idle = drop_idle_aliases(entries)
    defaults = read_facts("kohya_gui")["form_defaults"]
    absent = dict(read_kohya_table().defaults) | {
        place: value for key, (place, value) in defaults.items() if key not in document
    }
    imported = import_kohya_options(entries, source, "kohya_ss", {}, form.family(), absent)
    order = {key: place for place, key in enumerate(document)}
    every = sorted([*lines, *idle, *imported.lines], key=lambda line: order.get(line.key, len(order)))
    return replace(imported, lines=tuple(every), findings=(*imported.findings, *find_unstated_family(form, source)))


def find_unstated_family(form: KohyaGuiForm, source: Path) -> Iterator[Finding]:
    """A note on a preset that does not say its model family."""
    if not form.anima and not form.family():
        message = "nothing says for which model family this is: it is taken for Anima"
        remedy = "Rates and ranks that suit another family may not suit Anima: look through the account."
        yield Finding(Level.WARNING, "CONFIG-FAMILY-UNSAID", str(source), message, {}, remedy)


def drop_idle_aliases(entries: list[KohyaOption]) -> tuple[list[KohyaOption], list[ImportedKey]]:
    """Of several fields with one meaning, those that are off count for nothing beside one that is on."""
    used = {entry.name for entry in entries if entry.value not in _NEUTRAL_VALUES}
    many = {name for name in used if sum(entry.name == name for entry in entries) > 1}
    idle = [entry for entry in entries if entry.name in many and entry.value in _NEUTRAL_VALUES]
    return [entry for entry in entries if entry not in idle], [make_idle_line(e.path, e.value) for e in idle]


def make_idle_line(key: str, value: Any, why: str = "off") -> ImportedKey:
    """The line of a field that the GUI does not read, as things are."""
    return ImportedKey(key, value, KeyStatus.NO_EFFECT, "", why, KeyReason.OFF if why == "off" else None)


def translate_gui_field(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """A field as a key of sd-scripts, or its line where the GUI makes none of it."""
    facts = read_facts("kohya_gui")
    if key in KOHYA_GUI_TRANSLATORS:
        yield from KOHYA_GUI_TRANSLATORS[key](form, key, value)
    elif key in (unused := read_unused_fields()):
        if value in _NEUTRAL_VALUES:
            yield make_idle_line(key, value, unused[key])
        else:
            yield ImportedKey(key, value, KeyStatus.UNSUPPORTED, "", unused[key], KeyReason.UNNEEDED)
    elif family := facts["family_by_checkbox"].get(key):
        on = value in KOHYA_TRUE_VALUES
        note = f"for {family}; only Anima is trained here"
        yield ImportedKey(key, value, KeyStatus.UNSUPPORTED, "", note) if on else make_idle_line(key, value)
    elif key in facts["name_by_field"]:
        yield KohyaOption(key, facts["name_by_field"][key], value)
    elif key.startswith("anima_"):
        if form.anima:
            yield KohyaOption(key, key.removeprefix("anima_"), value)
        else:
            yield make_idle_line(key, value, "read with the Anima box only")
    elif key in facts["lycoris_argument_by_field"] or key in facts["convolution_fields"]:
        yield translate_network_argument(form, key, value)
    elif key in facts["shared_network_fields"].split():
        yield KohyaOption(key, f"network_args.{key}", value)
    elif key.startswith(tuple(facts["other_family_prefixes"])) and key not in read_kohya_keys():
        yield make_idle_line(key, value, "of another model family")
    elif key in facts["zero_is_off"] and value in _NEUTRAL_VALUES:
        yield make_idle_line(key, value, "empty: the default counts")
    else:
        yield KohyaOption(key, key, value)


@cache
def read_unused_fields() -> Mapping[str, str]:
    """Fields of which the GUI makes no key of sd-scripts, and why."""
    unused = read_facts("kohya_gui")["unused_fields"]
    return {name: why for names, why in unused.items() for name in names.split()}


def translate_network_argument(form: KohyaGuiForm, key: str, value: Any) -> TranslatedField:
    """A field that goes into network_args for some kinds of adapter."""
    facts = read_facts("kohya_gui")
    lycoris = form.kind.startswith("LyCORIS/") and facts["lycoris_kind_by_field"].get(key, "") in form.kind
    read = lycoris or (key in facts["convolution_fields"] and form.kind.startswith("Kohya "))
    if not read and not (form.kind == "Kohya LoKr" and key == "factor"):
        return make_idle_line(key, value, f"not read for {form.kind}")
    return KohyaOption(key, f"network_args.{facts['lycoris_argument_by_field'].get(key, key)}", value)


def translate_adapter_kind(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """LoRA_type: a network module, or an algorithm of LyCORIS."""
    name, made = read_facts("kohya_gui")["network_by_kind"].get(form.kind, ("network_module", form.kind))
    yield KohyaOption(key, name, made, f"{form.kind!r} is {made}", shown=value)


def translate_gui_epochs(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """The GUI makes steps of its epochs, unless steps or an epoch limit are given."""
    if form.number("max_train_epochs") or form.number("max_train_steps"):
        yield make_idle_line(key, value, "max_train_epochs or max_train_steps stands over it")
    else:
        yield KohyaOption(key, "max_train_epochs", value, "the GUI makes steps of them; here they are epochs")


def translate_gui_warmup(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """Percent of all steps."""
    if form.number("lr_warmup_steps"):
        yield make_idle_line(key, value, "lr_warmup_steps stands over it")
        return
    share = min(form.number(key) / 100, 0.9999)
    yield KohyaOption(key, "lr_warmup_steps", share, "percent of all steps; a share here", shown=value)


def translate_gui_warmup_steps(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    yield KohyaOption(key, key, value) if form.number(key) else make_idle_line(key, value, "0: lr_warmup counts")


def translate_denoiser_rate(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """A rate of 0 beside one for the text encoder trains the text encoder alone."""
    if form.number(key):
        yield KohyaOption(key, key, value)
    elif form.number("text_encoder_lr"):
        yield KohyaOption(key, "network_train_text_encoder_only", True, shown=value)
    else:
        yield make_idle_line(key, value, "0: learning_rate counts")


def translate_text_encoder_rate(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """A rate of 0 beside one for the denoiser trains the denoiser alone."""
    if form.number(key) or form.number("unet_lr"):
        yield KohyaOption(key, key, value if form.number(key) else 0)
    else:
        yield make_idle_line(key, value, "0: learning_rate counts")


def translate_gui_prompts(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """The GUI writes the text to a file of prompts, one a line."""
    text = str(value or "")
    if text.lower().endswith((".txt", ".toml", ".json")):
        yield KohyaOption(key, key, value)
        return
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    yield KohyaOption(key, key, lines or None, "", shown=value)


def translate_additional_flags(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    """Flags that the GUI appends to the command."""
    if found := list(parse_command_flags(split_command_line(str(value or "")))):
        yield ImportedKey(key, value, KeyStatus.TAKEN, "", "its flags follow")
    else:
        yield make_idle_line(key, value, "empty: the default counts")
    for name, item in found:
        yield KohyaOption(f"{key}: {name}", name.lstrip("-"), item)


def translate_wandb_switch(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    on = value in KOHYA_TRUE_VALUES
    yield KohyaOption(key, "log_with", "wandb", shown=value) if on else make_idle_line(key, value)


def translate_anima_box(form: KohyaGuiForm, key: str, value: Any) -> Iterator[TranslatedField]:
    on = value in KOHYA_TRUE_VALUES
    yield ImportedKey(key, value, KeyStatus.TAKEN, "", "Anima") if on else make_idle_line(key, value)


KOHYA_GUI_TRANSLATORS: Mapping[str, Callable[[KohyaGuiForm, str, Any], Iterator[TranslatedField]]] = {
    "LoRA_type": translate_adapter_kind,
    "epoch": translate_gui_epochs,
    "lr_warmup": translate_gui_warmup,
    "lr_warmup_steps": translate_gui_warmup_steps,
    "unet_lr": translate_denoiser_rate,
    "text_encoder_lr": translate_text_encoder_rate,
    "sample_prompts": translate_gui_prompts,
    "additional_parameters": translate_additional_flags,
    "use_wandb": translate_wandb_switch,
    "anima_checkbox": translate_anima_box,
}
"""Fields that mean something of their own, or in company."""
