"""The network of kohya and of LyCORIS in our terms: network_module, and what stands in network_args.

Facts: sd-scripts, networks/lora_anima.py, loha.py, lokr.py, network_base.py; LyCORIS, lycoris/kohya.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from finitune.config.imported_config import KeyStatus
from finitune.importers.kohya_conversions import (
    KOHYA_OFF_VALUES,
    KOHYA_TRUE_VALUES,
    KohyaSiblings,
    get_sibling_value,
    is_sibling_on,
)
from finitune.importers.mapping import (
    ConvertedValue,
    ValueConverter,
    convert_number,
    convert_whole_number,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

_ALGORITHM_BY_KOHYA_NAME: Mapping[str, ConvertedValue] = {
    "lora": take_value("lora"),
    "locon": take_value("lora"),
    "loha": take_value("loha"),
    "lokr": take_value("lokr"),
    "ia3": take_value("ia3"),
    "glora": take_value("glora"),
    "full": take_value("full"),
    "native": take_value("full"),
    "norms": take_value("norm"),
    "diag-oft": take_value("oft"),
    "diag_oft": take_value("oft"),
    "oft": take_value("oft"),
    "boft": take_value("boft"),
    "dylora": ConvertedValue(
        "lora", KeyStatus.UNSUPPORTED, "DyLoRA is not here; lora, the nearest, stands in its place."
    ),
    "lora_fa": ConvertedValue(
        "lora", KeyStatus.UNSUPPORTED, "LoRA-FA is not here; lora, the nearest, stands in its place."
    ),
    "tlora": ConvertedValue("lora", KeyStatus.UNSUPPORTED, "T-LoRA cannot be trained here; lora stands in its place."),
}
"""LyCORIS's algo, and the last part of network_module."""

FAMILY_BY_NETWORK_MODULE = {
    "lora_anima": "Anima",
    "lora": "",
    "loha": "",
    "lokr": "",
    "kohya": "",
    "lora_fa": "Stable Diffusion 1.5 or XL",
    "dylora": "Stable Diffusion 1.5 or XL",
    "oft": "Stable Diffusion XL",
    "lora_flux": "FLUX.1",
    "oft_flux": "FLUX.1",
    "lora_chroma": "Chroma",
    "lora_sd3": "Stable Diffusion 3",
    "lora_lumina": "Lumina",
    "lora_hunyuan_image": "HunyuanImage",
    "lora_qwen_image": "Qwen-Image",
    "lora_wan": "Wan",
    "lora_zimage": "Z-Image",
    "lora_framepack": "FramePack",
    "locon": "",
}
"""The model family of a network module by its last part; '' where it serves several."""


def get_network_module_name(value: object) -> str:
    """The last part of a network module: lycoris.kohya is kohya."""
    return str(value).rpartition(".")[2].lower()


def is_lycoris_network(beside: KohyaSiblings) -> bool:
    """Whether the network is one of LyCORIS: it says so, or only its algo is given."""
    named = beside.get("network_module")
    return (
        "network_args.algo" in beside
        if named in KOHYA_OFF_VALUES
        else get_network_module_name(named) in ("kohya", "locon")
    )


def find_kohya_algorithm(beside: KohyaSiblings) -> str:
    """Our algorithm, from network_module and algo."""
    module = get_network_module_name(beside.get("network_module", "lora")).split("_")[0]
    name = str(beside.get("network_args.algo", "lora")) if is_lycoris_network(beside) else module
    answer = _ALGORITHM_BY_KOHYA_NAME.get(name.lower())
    return str(answer.value) if answer else "lora"


def convert_network_module(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The kind of adapter."""
    name = get_network_module_name(value)
    ours = find_kohya_algorithm(beside)
    if name not in FAMILY_BY_NETWORK_MODULE:
        return mark_unsupported("no such network module here; algorithm = 'lora' stands in its place.")
    if name in ("kohya", "locon"):
        return take_changed(ours, "LyCORIS: algo in network_args says the kind")
    if FAMILY_BY_NETWORK_MODULE[name] not in ("", "Anima"):
        return take_changed(ours, f"a module for {FAMILY_BY_NETWORK_MODULE[name]}; the targets are those of Anima")
    answer = _ALGORITHM_BY_KOHYA_NAME.get(name)
    if answer and answer.fate is KeyStatus.UNSUPPORTED:
        return answer
    return take_value(ours) if name != "lora" else take_changed(ours, "the targets are those of networks.lora_anima")


def convert_lycoris_algo(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """LyCORIS's kind of adapter; sd-scripts' own modules do not read it."""
    if not is_lycoris_network(beside):
        return mark_no_effect("only lycoris.kohya reads it")
    answer = _ALGORITHM_BY_KOHYA_NAME.get(str(value).lower())
    if answer is None:
        return mark_unsupported(
            f"choose one of {', '.join(dict.fromkeys(str(a.value) for a in _ALGORITHM_BY_KOHYA_NAME.values()))}."
        )
    if answer.fate is KeyStatus.UNSUPPORTED:
        return ConvertedValue(None, answer.fate, answer.note, {"network.algorithm": answer.value})
    return answer


def restrict_to_algorithms(algorithms: tuple[str, ...], convert: ValueConverter) -> ValueConverter:
    """An argument that only these algorithms read."""

    def converted(value: Any, beside: KohyaSiblings) -> ConvertedValue:
        kind = find_kohya_algorithm(beside)
        return convert(value, beside) if kind in algorithms else mark_no_effect(f"{kind} does not read it")

    return converted


def convert_pattern_list(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """A list of regular expressions, which kohya writes as a Python literal."""
    if not isinstance(value, str):
        return take_value(list(value) if isinstance(value, (list, tuple)) else [str(value)])
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        read = value
    return take_value([str(item) for item in read] if isinstance(read, (list, tuple)) else [value])


def make_pattern_table_converter(kind: Callable[[float], float | int]) -> ValueConverter:
    """'pattern=number,pattern=number' as a mapping; sd-scripts cuts at commas and equals signs, too."""

    def convert(value: Any, beside: KohyaSiblings) -> ConvertedValue:
        if isinstance(value, Mapping):
            return take_value(dict(value))
        table: dict[str, float | int] = {}
        bad = []
        for part in str(value).split(","):
            pattern, equals, text = part.rpartition("=")
            try:
                table[pattern.strip()] = kind(float(text))
            except ValueError:
                bad.append(part)
            if not equals:
                bad.append(part)
        if bad:
            return mark_unsupported(
                f"{bad[0]!r} is not pattern=number: write a table, {{'pattern' = 8}}, in the network section."
            )
        return take_value(table)

    return convert


def convert_loraplus_ratio(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The ratio of all, unless that of the denoiser is given."""
    if convert_number(value, beside).value == 0:
        return mark_no_effect("off")
    own = get_sibling_value(beside, "network_args.loraplus_unet_lr_ratio")
    if own:
        return mark_no_effect("loraplus_unet_lr_ratio stands over it")
    return convert_number(value, beside)


def convert_text_loraplus_ratio(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """One ratio serves the denoiser and the text encoder."""
    mine = convert_number(value, beside).value
    others = [get_sibling_value(beside, f"network_args.loraplus_{name}lr_ratio") for name in ("unet_", "")]
    ratio = next((other for other in others if other), 0)
    if mine in (0, ratio):
        return mark_no_effect("off, or the same as that of the denoiser")
    return mark_unsupported("the text encoder has the ratio of the denoiser: loraplus_lr_ratio.")


def convert_full_matrix(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """LyCORIS: a rank that no layer has is said as full_matrix, too."""
    return take_value(value in KOHYA_TRUE_VALUES)


def convert_conv_rank(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """The rank of convolutions, which sd-scripts' own modules for Anima do not adapt."""
    return (
        convert_whole_number(value, beside)
        if beside.get("network_module") != "networks.lora_anima"
        else mark_no_effect("not read there")
    )


_PATTERN_BY_LYCORIS_PRESET = {
    "full": "",
    "full-lin": "",
    "attn-mlp": "",
    "unet-transformer-only": "",
    "attn-only": ".*_attn.*",
}


def convert_lycoris_preset(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """LyCORIS's lists of targets do not know Anima's names; those that mean something here are said by pattern."""
    pattern = _PATTERN_BY_LYCORIS_PRESET.get(str(value).lower())
    if pattern:
        return take_changed([pattern], "the layers of attention, by pattern")
    if pattern == "":
        return take_changed(None, "attention and MLP of each block, as for Anima everywhere")
    return mark_unsupported("say the targets by network.only_patterns.")


def convert_llm_adapter(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Whether the text conditioner is trained."""
    return take_value(value in KOHYA_TRUE_VALUES)


def convert_lycoris_dropout(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """LyCORIS's name in network_args; network_dropout stands over it."""
    return (
        mark_no_effect("network_dropout stands over it")
        if get_sibling_value(beside, "network_dropout")
        else convert_number(value, beside)
    )


def convert_lycoris_dora(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """LyCORIS's dora_wd, for the algorithms that have it."""
    on = value in KOHYA_TRUE_VALUES
    if on and find_kohya_algorithm(beside) not in ("lora", "loha", "lokr"):
        return mark_no_effect("only lora, loha and lokr read it")
    return take_value(on)


def convert_tucker(value: Any, beside: KohyaSiblings) -> ConvertedValue:
    """Under its name, or one of the older ones."""
    names = ("use_tucker", "use_cp", "use_conv_cp")
    return take_value(any(is_sibling_on(beside, f"network_args.{name}") for name in names))
