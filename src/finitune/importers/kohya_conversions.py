"""What kohya's keys become where the value is not simply taken over: one small function for each.

Each sees the value and the other keys beside it, because the meaning of a key of sd-scripts often depends on another:
`unet_lr` stands over `learning_rate`, epochs over steps, a window of steps becomes a number of files.
Facts: sd-scripts, library/train_util.py, train_network.py, library/config_util.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from finitune.config.imported_config import KeyStatus
from finitune.config.schema import LrSchedulerName
from finitune.importers.conversions import convert_optimizer_name, wrap_in_list
from finitune.importers.mapping import (
    ConvertedValue,
    convert_as_is,
    convert_number,
    convert_whole_number,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

KohyaSiblings = Mapping[str, Any]

KOHYA_OFF_VALUES = (None, "", "undefined", "None", "null")
"""What a form writes for nothing; `undefined` stands in files that lora-scripts exported."""

KOHYA_TRUE_VALUES = (True, 1, "true", "True", "1")


def get_sibling_value(beside: KohyaSiblings, name: str) -> Any:
    """The value of a neighbour, text that is a number as one; None where it is absent or off."""
    value = beside.get(name)
    if value in KOHYA_OFF_VALUES:
        return None
    return convert_number(value, beside).value


def get_positive_sibling(beside: KohyaSiblings, name: str) -> Any:
    """The value of a neighbour that counts something; None where it is absent, off, or zero."""
    value = get_sibling_value(beside, name)
    return value if isinstance(value, (int, float)) and value > 0 else None


def is_sibling_on(beside: KohyaSiblings, name: str) -> bool:
    """Whether a switch beside is on."""
    return beside.get(name) in KOHYA_TRUE_VALUES


def convert_kohya_resolution(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A side, or width and height; kohya writes them as text, "512,768"."""
    if isinstance(value, float):
        return convert_whole_number(value, beside)
    parts = str(value).lower().replace("x", ",").split(",") if isinstance(value, str) else wrap_in_list(value)
    try:
        sides = [int(float(part)) for part in parts]
    except (TypeError, ValueError):
        return take_value(value)
    return take_value(sides[0] if len(sides) == 1 else sides)


def convert_bucket_steps(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A multiple of 16: the VAE's 8 times the patch of 2."""
    answer = convert_whole_number(value, beside)
    steps = answer.value
    if not isinstance(steps, int) or (steps > 0 and steps % 16 == 0):
        return answer
    return take_changed(max(16, -(-steps // 16) * 16), "rounded up to a multiple of 16, which Anima needs")


def convert_caption_extension(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """An ending; sd-scripts' default stands for what is absent."""
    return (
        take_changed(None, "the default there; here .txt is looked for, too")
        if value == ".caption"
        else take_value(value)
    )


def convert_face_crop(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Not here."""
    return mark_unsupported("crop the pictures around the faces beforehand.")


def convert_kohya_learning_rate(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The rate of all, unless unet_lr says that of the denoiser; the text encoder's falls back on this one."""
    answer = convert_number(value, beside)
    denoiser = get_sibling_value(beside, "unet_lr")
    if denoiser is None:
        return answer
    also = {}
    if is_text_encoder_trained(beside) and get_sibling_value(beside, "text_encoder_lr") is None:
        also = {"optimizer.text_encoder_lr": answer.value}
    note = "unet_lr stands in its place for the denoiser"
    return ConvertedValue(denoiser, KeyStatus.CHANGED, note, also)


def convert_text_encoder_lr(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """One rate; Anima has one text encoder."""
    if is_sibling_on(beside, "network_train_unet_only"):
        return mark_no_effect("network_train_unet_only: the text encoder is not trained")
    rates = wrap_in_list(value)
    answer = convert_number(rates[0], beside) if rates else mark_no_effect("empty")
    if answer.value == 0:
        return take_changed(None, "0: the text encoder is not trained")
    return take_changed(answer.value, "Anima has one text encoder: the first rate counts") if len(rates) > 1 else answer


def is_text_encoder_trained(beside: KohyaSiblings) -> bool:
    """Whether sd-scripts would train Qwen3: it does unless told not to, but not with its outputs cached."""
    cached = is_sibling_on(beside, "cache_text_encoder_outputs") or is_sibling_on(
        beside, "cache_text_encoder_outputs_to_disk"
    )
    rates = beside.get("text_encoder_lr")
    stopped = rates not in KOHYA_OFF_VALUES and all(convert_number(rate, {}).value == 0 for rate in wrap_in_list(rates))
    return not (is_sibling_on(beside, "network_train_unet_only") or cached or stopped)


def convert_unet_only(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Said the other way round here."""
    trains = is_text_encoder_trained(beside)
    if trains == (value in KOHYA_TRUE_VALUES):
        return take_changed(trains, "the text encoder's outputs are cached, or its rate is 0: it is not trained")
    return ConvertedValue(trains, note="said the other way round")


def convert_max_steps(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Steps, where epochs do not stand over them."""
    if get_positive_sibling(beside, "max_train_epochs"):
        return mark_no_effect("max_train_epochs stands over it")
    answer = convert_whole_number(value, beside)
    return mark_no_effect("off") if answer.value == 0 else answer


def convert_kohya_warmup(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Steps as a whole number, or a share of all steps: as a fraction, or as text with %."""
    if isinstance(value, str) and value.strip().endswith("%"):
        share = convert_number(value.strip()[:-1], beside).value
        return (
            take_changed(share / 100, "a percentage; here a share") if isinstance(share, float) else take_value(value)
        )
    answer = convert_number(value, beside)
    if isinstance(answer.value, float) and answer.value >= 1 and not isinstance(value, int):
        return take_changed(
            int(answer.value), "a fraction of 1 and above would be that many times all steps: taken as steps"
        )
    return answer


_KOHYA_SCHEDULES = get_args(LrSchedulerName)
"""Kohya's own names."""
_NEAREST_SCHEDULE_BY_NAME = {
    "warmup_stable_decay": "constant_with_warmup",
    "inverse_sqrt": "polynomial",
    "piecewise_constant": "constant",
    "adafactor": "constant",
    "cosineannealinglr": "cosine",
    "cosineannealingwarmrestarts": "cosine_with_restarts",
    "rex": "polynomial",
}


def convert_kohya_schedule(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """One of ours, or the nearest; a class in lr_scheduler_type stands over it."""
    if beside.get("lr_scheduler_type") not in KOHYA_OFF_VALUES:
        return mark_no_effect("lr_scheduler_type stands over it")
    name = str(value).lower().partition(":")[0]
    return take_value(name) if name in _KOHYA_SCHEDULES else convert_to_nearest_schedule(value, beside)


def convert_to_nearest_schedule(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """What stands in the place of a schedule that we lack."""
    name = str(value).rpartition(".")[2].lower()
    nearest = (
        name
        if name in _KOHYA_SCHEDULES
        else _NEAREST_SCHEDULE_BY_NAME.get(name, "cosine" if "cosine" in name else "constant")
    )
    todo = f"no such schedule here; {nearest}, the nearest, stands in its place."
    return ConvertedValue(None, KeyStatus.UNSUPPORTED, todo, {"optimizer.lr_scheduler": nearest})


_OPTIMIZER_BY_KOHYA_NAME = {
    "adamwschedulefree": "ScheduleFreeAdamW",
    "radamschedulefree": "ScheduleFreeRAdam",
    "sgdschedulefree": "ScheduleFreeSGD",
    "dadaptadampreprint": "DAdaptAdam",
    "dadaptsgd": "DAdaptSGD",
    "dadaptadagrad": "DAdaptAdaGrad",
    "pagedadamw": "AdamW",
    "pagedadamw32bit": "AdamW",
    "pagedlion8bit": "Lion8bit",
    "sgdnesterov": "SGD",
    "sgdnesterov8bit": "SGD8bit",
}


def convert_kohya_optimizer(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Our name of an optimiser; of a dotted class its last part."""
    name = str(value).rpartition(".")[2]
    ours = _OPTIMIZER_BY_KOHYA_NAME.get(name.lower())
    if ours and "nesterov" in name.lower():
        also = {"optimizer.optimizer_args": merge_nesterov_args(beside)}
        return ConvertedValue(
            ours, KeyStatus.CHANGED, "SGD with nesterov and, if nothing is said, a momentum of 0.9", also
        )
    if ours:
        return (
            take_changed(ours, "its state is not paged to main memory here")
            if "paged" in name.lower()
            else take_value(ours)
        )
    answer = convert_optimizer_name(name, beside)
    if answer.fate is KeyStatus.UNSUPPORTED:
        return ConvertedValue(name, note="looked up by this name when the run starts")
    return answer


def merge_nesterov_args(beside: KohyaSiblings) -> dict[str, object]:
    """The optimiser's arguments, with those that the name SGDNesterov stands for."""
    arguments = beside.get("optimizer_args")
    named = {"nesterov": True, "momentum": 0.9} if "nesterov" in str(beside.get("optimizer_type")).lower() else {}
    return {**named, **(arguments if isinstance(arguments, Mapping) else {})}


def convert_optimizer_args(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The arguments by name."""
    arguments = merge_nesterov_args(beside)
    return take_value(arguments) if arguments else mark_no_effect("empty")


def make_old_switch_converter(ours: str) -> Any:
    """A switch of old versions that chose an optimiser."""

    def convert(value: Any, beside: KohyaSiblings) -> ConvertedValue:
        chosen = value in KOHYA_TRUE_VALUES and beside.get("optimizer_type") in KOHYA_OFF_VALUES
        return (
            take_changed(ours, "an old switch for optimizer_type")
            if chosen
            else mark_no_effect("off, or optimizer_type counts")
        )

    return convert


def convert_huber_schedule(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Only the constant one has a meaning for rectified flow."""
    if str(beside.get("loss_type", "l2")) not in ("huber", "smooth_l1"):
        return mark_no_effect("read for huber and smooth_l1 only")
    if value == "constant":
        return ConvertedValue(None, note="as here")
    return mark_unsupported(
        "sd-scripts stops on snr and sees exponential as almost constant: huber_c is constant here."
    )


def convert_last_n_epochs(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A number of files."""
    answer = convert_whole_number(value, beside)
    if not isinstance(answer.value, int) or answer.value <= 0:
        return mark_no_effect("off")
    return take_changed(answer.value, "a number of files, of their states, too")


def convert_last_n_steps(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A window of steps there, a number of files here: those at most so many steps behind the newest."""
    window = convert_whole_number(value, beside).value
    every = get_positive_sibling(beside, "save_every_n_steps")
    if not isinstance(window, int) or window <= 0:
        return mark_no_effect("off")
    if every is None:
        return mark_no_effect("without save_every_n_steps nothing is removed")
    files = int(window // every) + 1
    return take_changed(files, f"a window of {window} steps with a file every {int(every)}: {files} files")


def make_last_n_state_converter(name: str) -> Any:
    """States are kept as long as files here."""

    def convert(value: Any, beside: KohyaSiblings) -> ConvertedValue:
        if value in (*KOHYA_OFF_VALUES, 0, "0"):
            return mark_no_effect("off")
        same = str(value) == str(beside.get(name))
        return (
            mark_no_effect(f"the same as {name}")
            if same
            else mark_unsupported("states are kept as long as files: save_last_n.")
        )

    return convert


def convert_state_at_end(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The state of the run, with the last file only."""
    if value not in KOHYA_TRUE_VALUES or is_sibling_on(beside, "save_state"):
        return mark_no_effect("off, or save_state stands over it")
    return take_changed(True, "written with each file here, not with the last only")


def convert_preview_size(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Width and height of a form, as one."""
    width, height = (int(get_sibling_value(beside, name) or 1024) for name in ("sample_width", "sample_height"))
    return take_changed(f"{width}x{height}", "width and height as one")


def convert_blocks_to_swap(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Blocks in main memory."""
    return take_changed(convert_whole_number(value, beside).value, "moved by diffusers' group offload")


def convert_fp8_base(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """8-bit storage works here; sd-scripts turns it off for Anima."""
    if value not in KOHYA_TRUE_VALUES:
        return mark_no_effect("off")
    return take_changed("fp8", "sd-scripts turns it off for Anima; here the frozen weights are held in 8 bits")


def convert_cache_switch(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Latents and texts are always cached here, on disk."""
    if value in KOHYA_TRUE_VALUES:
        return ConvertedValue(None, note="always done here, on disk, by content")
    return take_changed(None, "done all the same, on disk, by content")


def convert_log_with(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """TensorBoard, or none."""
    name = str(value).lower()
    if name in ("tensorboard", "none"):
        return take_value(name)
    if name == "all":
        return take_changed("tensorboard", "without wandb")
    return mark_unsupported("log_with = 'tensorboard', and the report in the output folder.")


def convert_logging_dir(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A folder; in sd-scripts it switches TensorBoard on."""
    if beside.get("log_with") in KOHYA_OFF_VALUES:
        return ConvertedValue(value, KeyStatus.CHANGED, "switches TensorBoard on", {"logging.log_with": "tensorboard"})
    return take_value(value)


def convert_kohya_resume(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """States of accelerate are pickles of its own shape."""
    return mark_unsupported("states of sd-scripts cannot be read; go on from its adapter file by network_weights.")


def convert_save_model_as(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """safetensors."""
    return (
        ConvertedValue(None, note="as here")
        if value == "safetensors"
        else mark_unsupported("adapters are safetensors files, never pickles.")
    )


def convert_prompt_file(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A text file of prompts."""
    if isinstance(value, str) and value.lower().endswith((".toml", ".json")):
        return mark_unsupported("write the prompts to a text file, one a line, with --n --w --h --d --s --l.")
    return take_value(value)


def convert_positive_prompts(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """lora-scripts: the prompt in the form, its negative beside it."""
    negative = beside.get("negative_prompts")
    return take_value([f"{value} --n {negative}" if negative not in KOHYA_OFF_VALUES else value])


def convert_data_folder(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The N_name folders, where no dataset TOML stands over them."""
    return (
        mark_no_effect("dataset_config stands over it")
        if beside.get("dataset_config") not in KOHYA_OFF_VALUES
        else convert_as_is(value, beside)
    )


def convert_json_repeats(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """How often pictures of in_json are shown."""
    return (
        convert_whole_number(value, beside)
        if beside.get("in_json") not in KOHYA_OFF_VALUES
        else mark_no_effect("only in_json reads it")
    )
