"""What kohya's keys become where that is more than a row of `kohya.toml` can say.

A conversion sees the value and all other keys, because the meaning of a key of sd-scripts often depends on another:
`unet_lr` stands over `learning_rate`, epochs over steps, a window of steps becomes a number of files.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast, get_args

from finitune.config.imported_config import KeyStatus
from finitune.config.schema import LrSchedulerName
from finitune.importers.conversions import (
    SHARED_CONVERTERS,
    Siblings,
    convert_number,
    convert_optimizer,
    convert_whole_number,
    wrap_in_list,
)
from finitune.importers.key_tables import ProgramTable, read_program
from finitune.importers.mapping import (
    ConvertedValue,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

KOHYA_OFF_VALUES = (None, "", "undefined", "None", "null")
"""What a form writes for nothing; `undefined` stands in files that lora-scripts exported."""
KOHYA_TRUE_VALUES = (True, 1, "true", "True", "1")


def is_kohya_value_given(beside: Siblings, name: str) -> bool:
    """Whether a key says anything at all, be it zero or no."""
    return beside.get(name) not in KOHYA_OFF_VALUES


def is_kohya_switch_on(beside: Siblings, name: str) -> bool:
    return beside.get(name) in KOHYA_TRUE_VALUES


def get_kohya_number(beside: Siblings, name: str) -> float:
    """The number that a key holds, as a number or as text; 0 where it is absent, off, or holds none."""
    value = convert_number(beside.get(name), beside).value
    return value if isinstance(value, (int, float)) else 0


def convert_kohya_resolution(value: Any, beside: Siblings) -> ConvertedValue:
    """A side, or width and height; kohya writes them as text, "512,768"."""
    if isinstance(value, float):
        return convert_whole_number(value, beside)
    parts = str(value).lower().replace("x", ",").split(",") if isinstance(value, str) else wrap_in_list(value)
    try:
        sides = [int(float(part)) for part in parts]
    except (TypeError, ValueError):
        return take_value(value)
    return take_value(sides[0] if len(sides) == 1 else sides)


def convert_bucket_steps(value: Any, beside: Siblings) -> ConvertedValue:
    """A multiple of 16: the VAE's 8 times the patch of 2."""
    answer = convert_whole_number(value, beside)
    steps = answer.value
    if not isinstance(steps, int) or (steps > 0 and steps % 16 == 0):
        return answer
    return take_changed(max(16, -(-steps // 16) * 16), "rounded up to a multiple of 16, which Anima needs")


def convert_learning_rate(value: Any, beside: Siblings) -> ConvertedValue:
    """The rate of all, unless unet_lr says that of the denoiser; the text encoder's falls back on this one."""
    answer = convert_number(value, beside)
    if not is_kohya_value_given(beside, "unet_lr"):
        return answer
    also = {}
    if is_text_encoder_trained(beside) and not is_kohya_value_given(beside, "text_encoder_lr"):
        also = {"optimizer.text_encoder_lr": answer.value}
    denoiser = convert_number(beside["unet_lr"], beside).value
    return ConvertedValue(denoiser, KeyStatus.CHANGED, "unet_lr stands in its place for the denoiser", also)


def convert_text_encoder_lr(value: Any, beside: Siblings) -> ConvertedValue:
    rates = wrap_in_list(value)
    answer = convert_number(rates[0], beside)
    if answer.value == 0:
        return take_changed(None, "0: the text encoder is not trained")
    return take_changed(answer.value, "Anima has one text encoder: the first rate counts") if len(rates) > 1 else answer


def is_text_encoder_trained(beside: Siblings) -> bool:
    """Whether sd-scripts would train Qwen3: it does unless told not to, but not with its outputs cached."""
    switches = ("network_train_unet_only", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
    rates = wrap_in_list(beside.get("text_encoder_lr"))
    stopped = is_kohya_value_given(beside, "text_encoder_lr") and all(
        convert_number(rate, {}).value == 0 for rate in rates
    )
    return not (stopped or any(is_kohya_switch_on(beside, name) for name in switches))


def convert_unet_only(value: Any, beside: Siblings) -> ConvertedValue:
    """Said the other way round here."""
    trains = is_text_encoder_trained(beside)
    if trains == (value in KOHYA_TRUE_VALUES):
        return take_changed(trains, "the text encoder's outputs are cached, or its rate is 0: it is not trained")
    return ConvertedValue(trains, note="said the other way round")


def convert_warmup(value: Any, beside: Siblings) -> ConvertedValue:
    """Steps as a whole number, or a share of all steps: as a fraction, or as text with %."""
    if isinstance(value, str) and value.strip().endswith("%"):
        share = convert_number(value.strip()[:-1], beside).value
        if isinstance(share, float):
            return take_changed(share / 100, "a percentage; here a share")
        return take_value(value)
    answer = convert_number(value, beside)
    if isinstance(answer.value, float) and answer.value >= 1:
        note = "a fraction of 1 and above would be that many times all steps: taken as steps"
        return take_changed(int(answer.value), note)
    return answer


def convert_kohya_schedule(value: Any, beside: Siblings) -> ConvertedValue:
    """One of ours, which have kohya's names, or the nearest."""
    name = str(value).lower().partition(":")[0]
    return take_value(name) if name in get_args(LrSchedulerName) else convert_nearest_schedule(value, beside)


def convert_nearest_schedule(value: Any, beside: Siblings) -> ConvertedValue:
    """What stands in the place of a schedule that we lack."""
    nearest = name = str(value).rpartition(".")[2].lower()
    if name not in get_args(LrSchedulerName):
        guess = "cosine" if "cosine" in name else "constant"
        nearest = read_kohya_table().facts["nearest_schedule"].get(name, guess)
    todo = f"no such schedule here; {nearest}, the nearest, stands in its place."
    return ConvertedValue(None, KeyStatus.UNSUPPORTED, todo, {"optimizer.lr_scheduler": nearest})


def convert_kohya_optimizer(value: Any, beside: Siblings) -> ConvertedValue:
    """Our name of an optimiser; of a dotted class its last part."""
    name = str(value).rpartition(".")[2]
    answer = convert_optimizer(name, beside)
    if answer.fate is KeyStatus.UNSUPPORTED:
        return ConvertedValue(name, note="looked up by this name when the run starts")
    return replace(answer, also={"optimizer.optimizer_args": merge_nesterov_args(beside)}) if answer.also else answer


def merge_nesterov_args(beside: Siblings) -> dict[str, object]:
    """The optimiser's arguments, with those that the name SGDNesterov stands for."""
    arguments = beside.get("optimizer_args")
    named = {"nesterov": True, "momentum": 0.9} if "nesterov" in str(beside.get("optimizer_type")).lower() else {}
    return {**named, **(arguments if isinstance(arguments, Mapping) else {})}


def convert_optimizer_args(value: Any, beside: Siblings) -> ConvertedValue:
    arguments = merge_nesterov_args(beside)
    return take_value(arguments) if arguments else mark_no_effect("empty")


def convert_count(value: Any, beside: Siblings) -> ConvertedValue:
    count = convert_whole_number(value, beside).value
    return take_value(count) if isinstance(count, int) and count > 0 else mark_no_effect()


def convert_last_n_steps(value: Any, beside: Siblings) -> ConvertedValue:
    """A window of steps there, a number of files here: those at most so many steps behind the newest."""
    window = convert_whole_number(value, beside).value
    every = get_kohya_number(beside, "save_every_n_steps")
    if not isinstance(window, int) or window <= 0:
        return mark_no_effect()
    if every <= 0:
        return mark_no_effect("without save_every_n_steps nothing is removed")
    files = int(window // every) + 1
    return take_changed(files, f"a window of {window} steps with a file every {int(every)}: {files} files")


def convert_last_n_state(value: Any, beside: Siblings, name: str) -> ConvertedValue:
    """States are kept as long as files here; `name` says how long those are."""
    if str(value) == str(beside.get(name)):
        return mark_no_effect(f"the same as {name}")
    return mark_unsupported("states are kept as long as files: save_last_n.")


def convert_preview_size(value: Any, beside: Siblings) -> ConvertedValue:
    sides = (convert_number(beside.get(name), beside).value for name in ("sample_width", "sample_height"))
    width, height = (1024 if side in KOHYA_OFF_VALUES else int(cast("float", side) or 1024) for side in sides)
    return take_changed(f"{width}x{height}", "width and height as one")


def convert_logging_dir(value: Any, beside: Siblings) -> ConvertedValue:
    """A folder; in sd-scripts it switches TensorBoard on."""
    if is_kohya_value_given(beside, "log_with"):
        return take_value(value)
    return take_changed(value, "switches TensorBoard on", logging__log_with="tensorboard")


def convert_prompt_file(value: Any, beside: Siblings) -> ConvertedValue:
    """A text file of prompts."""
    if isinstance(value, str) and value.lower().endswith((".toml", ".json")):
        return mark_unsupported("write the prompts to a text file, one a line, with --n --w --h --d --s --l.")
    return take_value(value)


def convert_positive_prompts(value: Any, beside: Siblings) -> ConvertedValue:
    """lora-scripts: the prompt in the form, its negative beside it."""
    given = is_kohya_value_given(beside, "negative_prompts")
    return take_value([f"{value} --n {beside['negative_prompts']}" if given else value])


def get_network_module_name(value: object) -> str:
    """The last part of a network module: lycoris.kohya is kohya."""
    return str(value).rpartition(".")[2].lower()


def is_lycoris_network(beside: Siblings) -> bool:
    """Whether the network is one of LyCORIS: it says so, or only its algo is given."""
    if not is_kohya_value_given(beside, "network_module"):
        return "network_args.algo" in beside
    return get_network_module_name(beside["network_module"]) in ("kohya", "locon")


def find_kohya_algorithm(beside: Siblings) -> str:
    """Our algorithm, from network_module and algo."""
    module = get_network_module_name(beside.get("network_module", "lora")).split("_")[0]
    name = str(beside.get("network_args.algo", "lora")) if is_lycoris_network(beside) else module
    answer = read_kohya_table().reader.choices["network"].get(name.lower())
    return str(answer.value) if answer else "lora"


def convert_network_module(value: Any, beside: Siblings) -> ConvertedValue:
    table = read_kohya_table()
    name, ours = get_network_module_name(value), find_kohya_algorithm(beside)
    family = table.facts["family_by_network_module"].get(name)
    if family is None:
        return mark_unsupported("no such network module here; algorithm = 'lora' stands in its place.")
    if name in ("kohya", "locon"):
        return take_changed(ours, "LyCORIS: algo in network_args says the kind")
    if family not in ("", "Anima"):
        return take_changed(ours, f"a module for {family}; the targets are those of Anima")
    return take_value(ours) if name != "lora" else take_changed(ours, "the targets are those of networks.lora_anima")


def convert_lycoris_algo(value: Any, beside: Siblings) -> ConvertedValue:
    """LyCORIS's kind of adapter; sd-scripts' own modules do not read it."""
    if not is_lycoris_network(beside):
        return mark_no_effect("only lycoris.kohya reads it")
    answers = read_kohya_table().reader.choices["network"]
    answer = answers.get(str(value).lower())
    if answer is None:
        return mark_unsupported(f"choose one of {', '.join(dict.fromkeys(str(a.value) for a in answers.values()))}.")
    if answer.fate is KeyStatus.UNSUPPORTED:
        return replace(answer, value=None, also={"network.algorithm": answer.value})
    return answer


def convert_pattern_list(value: Any, beside: Siblings) -> ConvertedValue:
    """A list of regular expressions, which kohya writes as a Python literal."""
    if not isinstance(value, str):
        return take_value(list(value) if isinstance(value, (list, tuple)) else [str(value)])
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        read = value
    return take_value([str(item) for item in read] if isinstance(read, (list, tuple)) else [value])


def convert_pattern_table(value: Any, beside: Siblings, whole: bool) -> ConvertedValue:
    """'pattern=number,pattern=number' as a mapping; sd-scripts cuts at commas and equals signs, too."""
    if isinstance(value, Mapping):
        return take_value(dict(value))
    table: dict[str, float] = {}
    for part in str(value).split(","):
        pattern, equals, text = part.rpartition("=")
        try:
            table[pattern.strip()] = int(float(text)) if whole else float(text)
        except ValueError:
            equals = ""
        if not equals:
            table_remedy = "write a table, {'pattern' = 8}, in the network section."
            return mark_unsupported(f"{part!r} is not pattern=number: {table_remedy}")
    return take_value(table)


def convert_text_loraplus_ratio(value: Any, beside: Siblings) -> ConvertedValue:
    """One ratio serves the denoiser and the text encoder."""
    others = (get_kohya_number(beside, f"network_args.loraplus_{name}lr_ratio") for name in ("unet_", ""))
    if convert_number(value, beside).value in (0, next(filter(None, others), 0)):
        return mark_no_effect("off, or the same as that of the denoiser")
    return mark_unsupported("the text encoder has the ratio of the denoiser: loraplus_lr_ratio.")


def convert_tucker(value: Any, beside: Siblings) -> ConvertedValue:
    """Under its name, or one of the older ones."""
    names = ("use_tucker", "use_cp", "use_conv_cp")
    return take_value(any(is_kohya_switch_on(beside, f"network_args.{name}") for name in names))


@cache
def read_kohya_table() -> ProgramTable:
    return read_program("kohya", (*SHARED_CONVERTERS, *_KOHYA_CONVERTERS))


_KOHYA_CONVERTERS = (
    *(convert_kohya_resolution, convert_bucket_steps, convert_learning_rate, convert_text_encoder_lr),
    *(convert_unet_only, convert_warmup, convert_kohya_schedule, convert_nearest_schedule, convert_kohya_optimizer),
    *(convert_optimizer_args, convert_count, convert_last_n_steps, convert_last_n_state, convert_preview_size),
    *(convert_logging_dir, convert_prompt_file, convert_positive_prompts, convert_network_module),
    *(convert_lycoris_algo, convert_pattern_list, convert_pattern_table, convert_text_loraplus_ratio, convert_tucker),
)
