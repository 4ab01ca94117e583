"""The network of kohya and of LyCORIS in our terms: network_module, and what stands in network_args.

Facts: sd-scripts, networks/lora_anima.py, loha.py, lokr.py, network_base.py; LyCORIS, lycoris/kohya.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from finitune.config.imported import Fate
from finitune.config.importers.kohya_rules import OFF, TRUE, Beside, given, is_on
from finitune.config.importers.mapping import Answer, Conversion, changed, no_effect, number, taken, unsupported, whole

ALGORITHMS: Mapping[str, Answer] = {
    "lora": taken("lora"),
    "locon": taken("lora"),
    "loha": taken("loha"),
    "lokr": taken("lokr"),
    "ia3": taken("ia3"),
    "glora": taken("glora"),
    "full": taken("full"),
    "native": taken("full"),
    "norms": taken("norm"),
    "diag-oft": taken("oft"),
    "diag_oft": taken("oft"),
    "oft": taken("oft"),
    "boft": taken("boft"),
    "dylora": Answer("lora", Fate.UNSUPPORTED, "DyLoRA is not here; lora, the nearest, stands in its place."),
    "lora_fa": Answer("lora", Fate.UNSUPPORTED, "LoRA-FA is not here; lora, the nearest, stands in its place."),
    "tlora": Answer("lora", Fate.UNSUPPORTED, "T-LoRA cannot be trained here; lora stands in its place."),
}
"""LyCORIS's algo, and the last part of network_module."""

MODULES = {
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


def module_name(value: object) -> str:
    """The last part of a network module: lycoris.kohya is kohya."""
    return str(value).rpartition(".")[2].lower()


def is_lycoris(beside: Beside) -> bool:
    """Whether the network is one of LyCORIS: it says so, or only its algo is given."""
    named = beside.get("network_module")
    return "network_args.algo" in beside if named in OFF else module_name(named) in ("kohya", "locon")


def algorithm_of(beside: Beside) -> str:
    """Our algorithm, from network_module and algo."""
    module = module_name(beside.get("network_module", "lora")).split("_")[0]
    name = str(beside.get("network_args.algo", "lora")) if is_lycoris(beside) else module
    answer = ALGORITHMS.get(name.lower())
    return str(answer.value) if answer else "lora"


def network_module(value: Any, beside: Beside) -> Answer:
    """The kind of adapter."""
    name = module_name(value)
    ours = algorithm_of(beside)
    if name not in MODULES:
        return unsupported("no such network module here; algorithm = 'lora' stands in its place.")
    if name in ("kohya", "locon"):
        return changed(ours, "LyCORIS: algo in network_args says the kind")
    if MODULES[name] not in ("", "Anima"):
        return changed(ours, f"a module for {MODULES[name]}; the targets are those of Anima")
    answer = ALGORITHMS.get(name)
    if answer and answer.fate is Fate.UNSUPPORTED:
        return answer
    return taken(ours) if name != "lora" else changed(ours, "the targets are those of networks.lora_anima")


def algo(value: Any, beside: Beside) -> Answer:
    """LyCORIS's kind of adapter; sd-scripts' own modules do not read it."""
    if not is_lycoris(beside):
        return no_effect("only lycoris.kohya reads it")
    answer = ALGORITHMS.get(str(value).lower())
    if answer is None:
        return unsupported(f"choose one of {', '.join(dict.fromkeys(str(a.value) for a in ALGORITHMS.values()))}.")
    if answer.fate is Fate.UNSUPPORTED:
        return Answer(None, answer.fate, answer.note, {"network.algorithm": answer.value})
    return answer


def only_for(algorithms: tuple[str, ...], convert: Conversion) -> Conversion:
    """An argument that only these algorithms read."""

    def converted(value: Any, beside: Beside) -> Answer:
        kind = algorithm_of(beside)
        return convert(value, beside) if kind in algorithms else no_effect(f"{kind} does not read it")

    return converted


def patterns(value: Any, beside: Beside) -> Answer:
    """A list of regular expressions, which kohya writes as a Python literal."""
    if not isinstance(value, str):
        return taken(list(value) if isinstance(value, (list, tuple)) else [str(value)])
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        read = value
    return taken([str(item) for item in read] if isinstance(read, (list, tuple)) else [value])


def by_pattern(kind: Callable[[float], float | int]) -> Conversion:
    """'pattern=number,pattern=number' as a mapping; sd-scripts cuts at commas and equals signs, too."""

    def convert(value: Any, beside: Beside) -> Answer:
        if isinstance(value, Mapping):
            return taken(dict(value))
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
            return unsupported(
                f"{bad[0]!r} is not pattern=number: write a table, {{'pattern' = 8}}, in the network section."
            )
        return taken(table)

    return convert


def loraplus(value: Any, beside: Beside) -> Answer:
    """The ratio of all, unless that of the denoiser is given."""
    if number(value, beside).value == 0:
        return no_effect("off")
    own = given(beside, "network_args.loraplus_unet_lr_ratio")
    if own:
        return no_effect("loraplus_unet_lr_ratio stands over it")
    return number(value, beside)


def loraplus_text(value: Any, beside: Beside) -> Answer:
    """One ratio serves the denoiser and the text encoder."""
    mine = number(value, beside).value
    others = [given(beside, f"network_args.loraplus_{name}lr_ratio") for name in ("unet_", "")]
    ratio = next((other for other in others if other), 0)
    if mine in (0, ratio):
        return no_effect("off, or the same as that of the denoiser")
    return unsupported("the text encoder has the ratio of the denoiser: loraplus_lr_ratio.")


def full_matrix(value: Any, beside: Beside) -> Answer:
    """LyCORIS: a rank that no layer has is said as full_matrix, too."""
    return taken(value in TRUE)


def conv_rank(value: Any, beside: Beside) -> Answer:
    """The rank of convolutions, which sd-scripts' own modules for Anima do not adapt."""
    return (
        whole(value, beside) if beside.get("network_module") != "networks.lora_anima" else no_effect("not read there")
    )


PRESETS = {
    "full": "",
    "full-lin": "",
    "attn-mlp": "",
    "unet-transformer-only": "",
    "attn-only": ".*_attn.*",
}


def preset(value: Any, beside: Beside) -> Answer:
    """LyCORIS's lists of targets do not know Anima's names; those that mean something here are said by pattern."""
    pattern = PRESETS.get(str(value).lower())
    if pattern:
        return changed([pattern], "the layers of attention, by pattern")
    if pattern == "":
        return changed(None, "attention and MLP of each block, as for Anima everywhere")
    return unsupported("say the targets by network.only_patterns.")


def llm_adapter(value: Any, beside: Beside) -> Answer:
    """Whether the text conditioner is trained."""
    return taken(value in TRUE)


def dropout(value: Any, beside: Beside) -> Answer:
    """LyCORIS's name in network_args; network_dropout stands over it."""
    return no_effect("network_dropout stands over it") if given(beside, "network_dropout") else number(value, beside)


def dora(value: Any, beside: Beside) -> Answer:
    """LyCORIS's dora_wd, for the algorithms that have it."""
    on = value in TRUE
    if on and algorithm_of(beside) not in ("lora", "loha", "lokr"):
        return no_effect("only lora, loha and lokr read it")
    return taken(on)


def tucker(value: Any, beside: Beside) -> Answer:
    """Under its name, or one of the older ones."""
    names = ("use_tucker", "use_cp", "use_conv_cp")
    return taken(any(is_on(beside, f"network_args.{name}") for name in names))
