"""Importing the JSON of the kohya_ss GUI: its fields are given sd-scripts' names first, as the GUI does itself.

Some of its fields mean something else than the flag of that name: rates of 0 choose what is trained, the warm-up is in
percent, one text holds a list. Facts: kohya_ss, kohya_gui/lora_gui.py, class_basic_training.py, class_anima.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.importers.kohya import KohyaOption, import_kohya_options
from finitune.importers.kohya_command_line import parse_command_flags, split_command_line
from finitune.importers.kohya_conversions import KOHYA_OFF_VALUES, KOHYA_TRUE_VALUES, get_sibling_value
from finitune.importers.kohya_gui_keys import (
    CONVOLUTION_FIELDS,
    FAMILY_BY_GUI_CHECKBOX,
    KOHYA_GUI_DEFAULTS,
    KOHYA_NAME_BY_GUI_FIELD,
    LYCORIS_ARGUMENT_BY_FIELD,
    LYCORIS_KIND_BY_FIELD,
    NETWORK_BY_GUI_KIND,
    OTHER_FAMILY_PREFIXES,
    SHARED_NETWORK_FIELDS,
    UNUSED_GUI_FIELDS,
    ZERO_IS_OFF_FIELDS,
)
from finitune.importers.kohya_keys import KOHYA_DEFAULTS, KOHYA_NEUTRAL_VALUES, KOHYA_TRAINING_KEYS
from finitune.report import Finding, Level

_PROGRAM_NAME = "kohya_ss"


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
        return self.fields.get("anima_checkbox") in KOHYA_TRUE_VALUES or self.kind == "Anima"

    def number(self, name: str) -> float:
        """The number in a field; 0 where it is empty or holds none."""
        value = get_sibling_value(self.fields, name)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def family(self) -> str:
        """The model family of the script that the GUI would start; '' for Anima, or where nothing says it."""
        if self.anima:
            return ""
        ticked = [family for box, family in FAMILY_BY_GUI_CHECKBOX.items() if self.fields.get(box) in KOHYA_TRUE_VALUES]
        if ticked:
            return ticked[0]
        said = (
            self.fields.get("pretrained_model_name_or_path") not in KOHYA_OFF_VALUES
            or self.fields.keys() & FAMILY_BY_GUI_CHECKBOX.keys()
        )
        return "Stable Diffusion 1.5 or 2" if said else ""


def import_kohya_gui(document: Mapping[str, Any], source: Path) -> ImportedConfig:
    """A configuration or preset of the kohya_ss GUI for LoRA in our terms.

    A field that is missing has the GUI's default.
    """
    form = KohyaGuiForm(document)
    entries: list[KohyaOption] = []
    lines: list[ImportedKey] = []
    for key, value in document.items():
        for part in translate_gui_field(form, key, value):
            (lines if isinstance(part, ImportedKey) else entries).append(part)  # type: ignore[arg-type]
    entries.sort(key=lambda entry: entry.path.startswith(("anima_", "additional_parameters:")))
    entries, idle = drop_idle_aliases(entries)
    absent = dict(KOHYA_DEFAULTS) | {
        place: value for key, (place, value) in KOHYA_GUI_DEFAULTS.items() if key not in document
    }
    imported = import_kohya_options(entries, source, _PROGRAM_NAME, {}, form.family(), absent)
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
    used = {entry.name for entry in entries if entry.value not in KOHYA_NEUTRAL_VALUES}
    many = {name for name in used if sum(entry.name == name for entry in entries) > 1}
    idle = [entry for entry in entries if entry.name in many and entry.value in KOHYA_NEUTRAL_VALUES]
    lines = [ImportedKey(entry.path, entry.value, KeyStatus.NO_EFFECT, "", "off") for entry in idle]
    return [entry for entry in entries if entry not in idle], lines


def translate_gui_field(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """A field as a key of sd-scripts, or its line where the GUI makes none of it."""
    if key in KOHYA_GUI_TRANSLATORS:
        yield from KOHYA_GUI_TRANSLATORS[key](form, key, value)
    elif key in UNUSED_GUI_FIELDS:
        yield ImportedKey(
            key,
            value,
            KeyStatus.NO_EFFECT if value in KOHYA_NEUTRAL_VALUES else KeyStatus.UNSUPPORTED,
            "",
            UNUSED_GUI_FIELDS[key],
        )
    elif key in FAMILY_BY_GUI_CHECKBOX:
        yield translate_family_box(key, value)
    elif key in KOHYA_NAME_BY_GUI_FIELD:
        yield KohyaOption(key, KOHYA_NAME_BY_GUI_FIELD[key], value)
    elif key.startswith("anima_"):
        yield translate_anima_field(form, key, value)
    elif key in LYCORIS_ARGUMENT_BY_FIELD or key in CONVOLUTION_FIELDS:
        yield translate_network_argument(form, key, value)
    elif key in SHARED_NETWORK_FIELDS:
        yield KohyaOption(key, f"network_args.{key}", value)
    elif key.startswith(OTHER_FAMILY_PREFIXES) and key not in KOHYA_TRAINING_KEYS:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "of another model family")
    elif key in ZERO_IS_OFF_FIELDS and value in KOHYA_NEUTRAL_VALUES:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "empty: the default counts")
    else:
        yield KohyaOption(key, key, value)


def translate_family_box(key: str, value: Any) -> ImportedKey:
    """The box of another model family."""
    if value in KOHYA_TRUE_VALUES:
        return ImportedKey(
            key, value, KeyStatus.UNSUPPORTED, "", f"for {FAMILY_BY_GUI_CHECKBOX[key]}; only Anima is trained here"
        )
    return ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "off")


def translate_anima_field(form: KohyaGuiForm, key: str, value: Any) -> KohyaOption | ImportedKey:
    """A field of the Anima group: the key of that name without anima_."""
    if not form.anima:
        return ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "read with the Anima box only")
    return KohyaOption(key, key.removeprefix("anima_"), value)


def translate_network_argument(form: KohyaGuiForm, key: str, value: Any) -> KohyaOption | ImportedKey:
    """A field that goes into network_args for some kinds of adapter."""
    lycoris = form.kind.startswith("LyCORIS/") and LYCORIS_KIND_BY_FIELD.get(key, "") in form.kind
    read = lycoris or (key in CONVOLUTION_FIELDS and form.kind.startswith("Kohya "))
    if not read and not (form.kind == "Kohya LoKr" and key == "factor"):
        return ImportedKey(key, value, KeyStatus.NO_EFFECT, "", f"not read for {form.kind}")
    return KohyaOption(key, f"network_args.{LYCORIS_ARGUMENT_BY_FIELD.get(key, key)}", value)


def translate_adapter_kind(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """LoRA_type: a network module, or an algorithm of LyCORIS."""
    name, made = NETWORK_BY_GUI_KIND.get(form.kind, ("network_module", form.kind))
    yield KohyaOption(key, name, made, f"{form.kind!r} is {made}", shown=value)


def translate_gui_epochs(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """The GUI makes steps of its epochs, unless steps or an epoch limit are given."""
    if form.number("max_train_epochs") or form.number("max_train_steps"):
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "max_train_epochs or max_train_steps stands over it")
    else:
        yield KohyaOption(key, "max_train_epochs", value, "the GUI makes steps of them; here they are epochs")


def translate_gui_warmup(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """Percent of all steps."""
    if form.number("lr_warmup_steps"):
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "lr_warmup_steps stands over it")
        return
    share = min(form.number(key) / 100, 0.9999)
    yield KohyaOption(key, "lr_warmup_steps", share, "percent of all steps; a share here", shown=value)


def translate_gui_warmup_steps(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """Steps, where they are given."""
    if form.number(key):
        yield KohyaOption(key, key, value)
    else:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "0: lr_warmup counts")


def translate_denoiser_rate(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """A rate of 0 beside one for the text encoder trains the text encoder alone."""
    if form.number(key):
        yield KohyaOption(key, key, value)
    elif form.number("text_encoder_lr"):
        yield KohyaOption(key, "network_train_text_encoder_only", True, shown=value)
    else:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "0: learning_rate counts")


def translate_text_encoder_rate(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """A rate of 0 beside one for the denoiser trains the denoiser alone."""
    if form.number(key) or form.number("unet_lr"):
        yield KohyaOption(key, key, value if form.number(key) else 0)
    else:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "0: learning_rate counts")


def translate_gui_prompts(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """The GUI writes the text to a file of prompts, one a line."""
    text = str(value or "")
    if text.lower().endswith((".txt", ".toml", ".json")):
        yield KohyaOption(key, key, value)
        return
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    yield KohyaOption(key, key, lines or None, "", shown=value)


def translate_additional_flags(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """Flags that the GUI appends to the command."""
    found = list(parse_command_flags(split_command_line(str(value or ""))))
    note = "its flags follow" if found else "empty: the default counts"
    yield ImportedKey(key, value, KeyStatus.TAKEN if found else KeyStatus.NO_EFFECT, "", note)
    for name, item in found:
        yield KohyaOption(f"{key}: {name}", name.lstrip("-"), item)


def translate_wandb_switch(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """A tick for wandb."""
    if value in KOHYA_TRUE_VALUES:
        yield KohyaOption(key, "log_with", "wandb", shown=value)
    else:
        yield ImportedKey(key, value, KeyStatus.NO_EFFECT, "", "off")


def translate_anima_box(form: KohyaGuiForm, key: str, value: Any) -> Iterator[KohyaOption | ImportedKey]:
    """The box of our model family."""
    on = value in KOHYA_TRUE_VALUES
    yield ImportedKey(key, value, KeyStatus.TAKEN if on else KeyStatus.NO_EFFECT, "", "Anima" if on else "off")


KOHYA_GUI_TRANSLATORS = {
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
