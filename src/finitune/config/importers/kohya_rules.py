"""What kohya's keys become where the value is not simply taken over: one small function for each.

Each sees the value and the other keys beside it, because the meaning of a key of sd-scripts often depends on another:
`unet_lr` stands over `learning_rate`, epochs over steps, a window of steps becomes a number of files.
Facts: sd-scripts, library/train_util.py, train_network.py, library/config_util.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from finitune.config.imported import Fate
from finitune.config.importers.mapping import Answer, changed, no_effect, number, plainly, taken, unsupported, whole
from finitune.config.importers.terms import as_list, optimizer_name
from finitune.config.schema import Schedule

Beside = Mapping[str, Any]

OFF = (None, "", "undefined", "None", "null")
"""What a form writes for nothing; `undefined` stands in files that lora-scripts exported."""

TRUE = (True, 1, "true", "True", "1")


def given(beside: Beside, name: str) -> Any:
    """The value of a neighbour, text that is a number as one; None where it is absent or off."""
    value = beside.get(name)
    if value in OFF:
        return None
    return number(value, beside).value


def positive_of(beside: Beside, name: str) -> Any:
    """The value of a neighbour that counts something; None where it is absent, off, or zero."""
    value = given(beside, name)
    return value if isinstance(value, (int, float)) and value > 0 else None


def is_on(beside: Beside, name: str) -> bool:
    """Whether a switch beside is on."""
    return beside.get(name) in TRUE


def resolution(value: Any, beside: Beside) -> Answer:
    """A side, or width and height; kohya writes them as text, "512,768"."""
    if isinstance(value, float):
        return whole(value, beside)
    parts = str(value).lower().replace("x", ",").split(",") if isinstance(value, str) else as_list(value)
    try:
        sides = [int(float(part)) for part in parts]
    except (TypeError, ValueError):
        return taken(value)
    return taken(sides[0] if len(sides) == 1 else sides)


def bucket_steps(value: Any, beside: Beside) -> Answer:
    """A multiple of 16: the VAE's 8 times the patch of 2."""
    answer = whole(value, beside)
    steps = answer.value
    if not isinstance(steps, int) or (steps > 0 and steps % 16 == 0):
        return answer
    return changed(max(16, -(-steps // 16) * 16), "rounded up to a multiple of 16, which Anima needs")


def caption_extension(value: Any, beside: Beside) -> Answer:
    """An ending; sd-scripts' default stands for what is absent."""
    return changed(None, "the default there; here .txt is looked for, too") if value == ".caption" else taken(value)


def face_crop(value: Any, beside: Beside) -> Answer:
    """Not here."""
    return unsupported("crop the pictures around the faces beforehand.")


def learning_rate(value: Any, beside: Beside) -> Answer:
    """The rate of all, unless unet_lr says that of the denoiser; the text encoder's falls back on this one."""
    answer = number(value, beside)
    denoiser = given(beside, "unet_lr")
    if denoiser is None:
        return answer
    also = {}
    if trains_text_encoder(beside) and given(beside, "text_encoder_lr") is None:
        also = {"optimizer.text_encoder_lr": answer.value}
    note = "unet_lr stands in its place for the denoiser"
    return Answer(denoiser, Fate.CHANGED, note, also)


def text_encoder_lr(value: Any, beside: Beside) -> Answer:
    """One rate; Anima has one text encoder."""
    if is_on(beside, "network_train_unet_only"):
        return no_effect("network_train_unet_only: the text encoder is not trained")
    rates = as_list(value)
    answer = number(rates[0], beside) if rates else no_effect("empty")
    if answer.value == 0:
        return changed(None, "0: the text encoder is not trained")
    return changed(answer.value, "Anima has one text encoder: the first rate counts") if len(rates) > 1 else answer


def trains_text_encoder(beside: Beside) -> bool:
    """Whether sd-scripts would train Qwen3: it does unless told not to, but not with its outputs cached."""
    cached = is_on(beside, "cache_text_encoder_outputs") or is_on(beside, "cache_text_encoder_outputs_to_disk")
    rates = beside.get("text_encoder_lr")
    stopped = rates not in OFF and all(number(rate, {}).value == 0 for rate in as_list(rates))
    return not (is_on(beside, "network_train_unet_only") or cached or stopped)


def unet_only(value: Any, beside: Beside) -> Answer:
    """Said the other way round here."""
    trains = trains_text_encoder(beside)
    if trains == (value in TRUE):
        return changed(trains, "the text encoder's outputs are cached, or its rate is 0: it is not trained")
    return Answer(trains, note="said the other way round")


def max_steps(value: Any, beside: Beside) -> Answer:
    """Steps, where epochs do not stand over them."""
    if positive_of(beside, "max_train_epochs"):
        return no_effect("max_train_epochs stands over it")
    answer = whole(value, beside)
    return no_effect("off") if answer.value == 0 else answer


def warmup(value: Any, beside: Beside) -> Answer:
    """Steps as a whole number, or a share of all steps: as a fraction, or as text with %."""
    if isinstance(value, str) and value.strip().endswith("%"):
        share = number(value.strip()[:-1], beside).value
        return changed(share / 100, "a percentage; here a share") if isinstance(share, float) else taken(value)
    answer = number(value, beside)
    if isinstance(answer.value, float) and answer.value >= 1 and not isinstance(value, int):
        return changed(
            int(answer.value), "a fraction of 1 and above would be that many times all steps: taken as steps"
        )
    return answer


SCHEDULES = get_args(Schedule)
"""Kohya's own names."""
NEAREST_SCHEDULE = {
    "warmup_stable_decay": "constant_with_warmup",
    "inverse_sqrt": "polynomial",
    "piecewise_constant": "constant",
    "adafactor": "constant",
    "cosineannealinglr": "cosine",
    "cosineannealingwarmrestarts": "cosine_with_restarts",
    "rex": "polynomial",
}


def schedule(value: Any, beside: Beside) -> Answer:
    """One of ours, or the nearest; a class in lr_scheduler_type stands over it."""
    if beside.get("lr_scheduler_type") not in OFF:
        return no_effect("lr_scheduler_type stands over it")
    name = str(value).lower().partition(":")[0]
    return taken(name) if name in SCHEDULES else nearest_schedule(value, beside)


def nearest_schedule(value: Any, beside: Beside) -> Answer:
    """What stands in the place of a schedule that we lack."""
    name = str(value).rpartition(".")[2].lower()
    nearest = name if name in SCHEDULES else NEAREST_SCHEDULE.get(name, "cosine" if "cosine" in name else "constant")
    todo = f"no such schedule here; {nearest}, the nearest, stands in its place."
    return Answer(None, Fate.UNSUPPORTED, todo, {"optimizer.lr_scheduler": nearest})


PLAIN_OPTIMIZERS = {
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


def optimizer(value: Any, beside: Beside) -> Answer:
    """Our name of an optimiser; of a dotted class its last part."""
    name = str(value).rpartition(".")[2]
    ours = PLAIN_OPTIMIZERS.get(name.lower())
    if ours and "nesterov" in name.lower():
        also = {"optimizer.optimizer_args": with_nesterov(beside)}
        return Answer(ours, Fate.CHANGED, "SGD with nesterov and, if nothing is said, a momentum of 0.9", also)
    if ours:
        return changed(ours, "its state is not paged to main memory here") if "paged" in name.lower() else taken(ours)
    answer = optimizer_name(name, beside)
    if answer.fate is Fate.UNSUPPORTED:
        return Answer(name, note="looked up by this name when the run starts")
    return answer


def with_nesterov(beside: Beside) -> dict[str, object]:
    """The optimiser's arguments, with those that the name SGDNesterov stands for."""
    arguments = beside.get("optimizer_args")
    named = {"nesterov": True, "momentum": 0.9} if "nesterov" in str(beside.get("optimizer_type")).lower() else {}
    return {**named, **(arguments if isinstance(arguments, Mapping) else {})}


def optimizer_args(value: Any, beside: Beside) -> Answer:
    """The arguments by name."""
    arguments = with_nesterov(beside)
    return taken(arguments) if arguments else no_effect("empty")


def old_switch(ours: str) -> Any:
    """A switch of old versions that chose an optimiser."""

    def convert(value: Any, beside: Beside) -> Answer:
        chosen = value in TRUE and beside.get("optimizer_type") in OFF
        return (
            changed(ours, "an old switch for optimizer_type") if chosen else no_effect("off, or optimizer_type counts")
        )

    return convert


def huber_schedule(value: Any, beside: Beside) -> Answer:
    """Only the constant one has a meaning for rectified flow."""
    if str(beside.get("loss_type", "l2")) not in ("huber", "smooth_l1"):
        return no_effect("read for huber and smooth_l1 only")
    if value == "constant":
        return Answer(None, note="as here")
    return unsupported("sd-scripts stops on snr and sees exponential as almost constant: huber_c is constant here.")


def last_n_epochs(value: Any, beside: Beside) -> Answer:
    """A number of files."""
    answer = whole(value, beside)
    if not isinstance(answer.value, int) or answer.value <= 0:
        return no_effect("off")
    return changed(answer.value, "a number of files, of their states, too")


def last_n_steps(value: Any, beside: Beside) -> Answer:
    """A window of steps there, a number of files here: those at most so many steps behind the newest."""
    window = whole(value, beside).value
    every = positive_of(beside, "save_every_n_steps")
    if not isinstance(window, int) or window <= 0:
        return no_effect("off")
    if every is None:
        return no_effect("without save_every_n_steps nothing is removed")
    files = int(window // every) + 1
    return changed(files, f"a window of {window} steps with a file every {int(every)}: {files} files")


def last_n_state(name: str) -> Any:
    """States are kept as long as files here."""

    def convert(value: Any, beside: Beside) -> Answer:
        if value in (*OFF, 0, "0"):
            return no_effect("off")
        same = str(value) == str(beside.get(name))
        return (
            no_effect(f"the same as {name}") if same else unsupported("states are kept as long as files: save_last_n.")
        )

    return convert


def state_at_end(value: Any, beside: Beside) -> Answer:
    """The state of the run, with the last file only."""
    if value not in TRUE or is_on(beside, "save_state"):
        return no_effect("off, or save_state stands over it")
    return changed(True, "written with each file here, not with the last only")


def preview_size(value: Any, beside: Beside) -> Answer:
    """Width and height of a form, as one."""
    width, height = (int(given(beside, name) or 1024) for name in ("sample_width", "sample_height"))
    return changed(f"{width}x{height}", "width and height as one")


def offload(value: Any, beside: Beside) -> Answer:
    """Blocks in main memory."""
    return changed(whole(value, beside).value, "moved by diffusers' group offload")


def fp8_base(value: Any, beside: Beside) -> Answer:
    """8-bit storage works here; sd-scripts turns it off for Anima."""
    if value not in TRUE:
        return no_effect("off")
    return changed("fp8", "sd-scripts turns it off for Anima; here the frozen weights are held in 8 bits")


def cached(value: Any, beside: Beside) -> Answer:
    """Latents and texts are always cached here, on disk."""
    if value in TRUE:
        return Answer(None, note="always done here, on disk, by content")
    return changed(None, "done all the same, on disk, by content")


def log_with(value: Any, beside: Beside) -> Answer:
    """TensorBoard, or none."""
    name = str(value).lower()
    if name in ("tensorboard", "none"):
        return taken(name)
    if name == "all":
        return changed("tensorboard", "without wandb")
    return unsupported("log_with = 'tensorboard', and the report in the output folder.")


def logging_dir(value: Any, beside: Beside) -> Answer:
    """A folder; in sd-scripts it switches TensorBoard on."""
    if beside.get("log_with") in OFF:
        return Answer(value, Fate.CHANGED, "switches TensorBoard on", {"logging.log_with": "tensorboard"})
    return taken(value)


def resume(value: Any, beside: Beside) -> Answer:
    """States of accelerate are pickles of its own shape."""
    return unsupported("states of sd-scripts cannot be read; go on from its adapter file by network_weights.")


def save_model_as(value: Any, beside: Beside) -> Answer:
    """safetensors."""
    return (
        Answer(None, note="as here")
        if value == "safetensors"
        else unsupported("adapters are safetensors files, never pickles.")
    )


def prompts(value: Any, beside: Beside) -> Answer:
    """A text file of prompts."""
    if isinstance(value, str) and value.lower().endswith((".toml", ".json")):
        return unsupported("write the prompts to a text file, one a line, with --n --w --h --d --s --l.")
    return taken(value)


def positive_prompts(value: Any, beside: Beside) -> Answer:
    """lora-scripts: the prompt in the form, its negative beside it."""
    negative = beside.get("negative_prompts")
    return taken([f"{value} --n {negative}" if negative not in OFF else value])


def folder(value: Any, beside: Beside) -> Answer:
    """The N_name folders, where no dataset TOML stands over them."""
    return (
        no_effect("dataset_config stands over it")
        if beside.get("dataset_config") not in OFF
        else plainly(value, beside)
    )


def repeats(value: Any, beside: Beside) -> Answer:
    """How often pictures of in_json are shown."""
    return whole(value, beside) if beside.get("in_json") not in OFF else no_effect("only in_json reads it")
