"""What LyCORIS and sd-scripts really do with the options of a network, and what is said of them that is not so.

Two tables. TRUTHS are rules: each holds for a configuration or not, and tells what happens there and what here. MYTHS
are claims that go round in guides and that a configuration was visibly written by: a comment repeats one, or options
are set as it asks for. Nothing is wrong with such a configuration; it is only poorer than it could be.

Facts: LyCORIS 3.3 and 4.1 (lycoris/kohya.py, wrapper.py, modules/*, config.py), sd-scripts (train_network.py,
library/train_util.py, networks/*), read and tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from finitune.config.lycoris_options import LycorisCondition, LycorisMisconception, LycorisOptions, LycorisRule
from finitune.errors import suggest_nearest_name
from finitune.report import Finding, Level

_LYCORIS_ALGORITHMS = ("lora", "locon", "loha", "lokr", "dylora", "glora", "full", "diag-oft", "boft", "ia3", "tlora")
"""All that `algo` may be, in any case; the last two from LyCORIS 4 on."""
_BUILT_IN_PRESETS = (
    *("full", "full-lin", "attn-mlp", "attn-only", "ia3"),
    *("unet-only", "unet-transformer-only", "unet-convblock-only"),
)
"""The built-in ones."""
_EMPTY_PRESETS = ("attn-only", "unet-convblock-only")
"""Presets whose classes no diffusion transformer has."""
_LYCORIS_BOOLEAN_ARGUMENTS = (
    *("use_tucker", "use_cp", "use_conv_cp", "disable_conv_cp", "use_scalar", "train_norm", "rescaled", "dora_wd"),
    *("weight_decompose", "wd_on_output", "wd_on_out", "bypass_mode", "rs_lora", "full_matrix"),
    *("unbalanced_factorization", "train_t5xxl", "train_llm_adapter"),
)
_WORDS_MEANING_NO = ("0", "no", "off", "none", "null", "")
"""What people write for no, and what LyCORIS's str_bool takes for yes: all but the word false."""


def match_other_lycoris_algorithm(*algorithms: str) -> Callable[[str], LycorisCondition]:
    """The condition, by an option, that it is on and the algorithm is another LyCORIS one than these."""
    return lambda option: (
        lambda g: g.is_on(option) and g.algorithm not in ("", *algorithms) and get_algorithm_evidence(g)
    )


def get_algorithm_evidence(given: LycorisOptions) -> Mapping[str, object]:
    """The algorithm, for messages."""
    return {"algo": given.algorithm}


def find_unknown_lycoris_algorithm(given: LycorisOptions) -> object:
    """The algorithm that there is not, and the nearest."""
    name = given.algorithm
    known = name in _LYCORIS_ALGORITHMS or (given["LoRA_type"] and not given["algo"])
    return name and not known and {"algo": name, "guess": suggest_nearest_name(name, _LYCORIS_ALGORITHMS)}


def find_indivisible_block_size(given: LycorisOptions) -> object:
    """DyLoRA's rank and block size where one does not divide the other."""
    rank, block = given.number("network_dim") or 4, given.number("block_size") or 4
    return given.algorithm == "dylora" and rank % block and {"rank": f"{rank:g}", "block": f"{block:g}"}


def find_misread_booleans(given: LycorisOptions) -> object:
    """The switches that were meant as no and that LyCORIS takes for yes."""
    wrong = [
        name
        for name in _LYCORIS_BOOLEAN_ARGUMENTS
        if given.arguments.get(name, "x").strip("'\"").lower() in _WORDS_MEANING_NO
    ]
    return given.algorithm and wrong and {"names": ", ".join(f"{name}={given.arguments[name]}" for name in wrong)}


def find_masked_tucker(given: LycorisOptions) -> object:
    """An older name of use_tucker that says false and stands over the newer one that says true."""
    names = [name for name in ("use_conv_cp", "use_cp", "use_tucker") if name in given.arguments]
    first = given.arguments[names[0]].lower() if len(names) > 1 else ""
    later = any(given.is_on(name) for name in names[1:])
    return given.algorithm and first == "false" and later and {"first": names[0]}


def find_unknown_lycoris_preset(given: LycorisOptions) -> object:
    """The preset that is neither built in nor a file."""
    name = str(given["preset"] or given["LyCORIS_preset"] or "")
    if not given.algorithm or not name or name in _BUILT_IN_PRESETS:
        return False
    return not is_preset_file(name) and {"preset": name, "guess": suggest_nearest_name(name, _BUILT_IN_PRESETS)}


def is_preset_file(name: str) -> bool:
    """Whether there is such a file."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def find_invalid_lokr_factor(given: LycorisOptions) -> object:
    """LoKr's factor where it is no whole number."""
    factor, number = given["factor"], given.number("factor")
    return given.algorithm == "lokr" and factor is not None and (number is None or number % 1) and {"factor": factor}


def match_lycoris_comment(option: str, pattern: str) -> LycorisCondition:
    """The condition that a comment at an option says something."""
    return lambda g: re.search(pattern, g.comments.get(option, ""), re.IGNORECASE)


def match_lycoris_option(option: str, *values: str) -> LycorisCondition:
    """The condition that an option has one of the values, however it is written."""
    return lambda g: g[option] is not None and str(g[option]).lower() in values


_ERROR, _WARNING, _NOTE = Level.ERROR, Level.WARNING, Level.NOTE
LYCORIS_RULES = (
    LycorisRule(
        _ERROR,
        "LYCORIS-ALGO",
        "algo",
        find_unknown_lycoris_algorithm,
        "LyCORIS has no algo {algo!r} and stops with a KeyError at the first module.{guess}",
        f"These are: {', '.join(_LYCORIS_ALGORITHMS)}.",
    ),
    LycorisRule(
        _ERROR,
        "LYCORIS-BLOCK-SIZE",
        "block_size",
        find_indivisible_block_size,
        "DyLoRA's block_size {block} does not divide the rank {rank}: LyCORIS stops there",
        "Take a block_size that divides network_dim.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-NO-EFFECT",
        "block_size",
        lambda g: g["block_size"] is not None and g.algorithm not in ("", "dylora") and get_algorithm_evidence(g),
        "block_size has no effect with algo={algo}: DyLoRA alone reads it",
        "Leave it out.",
    ),
    LycorisRule(
        _ERROR,
        "LYCORIS-FACTOR",
        "factor",
        find_invalid_lokr_factor,
        "factor = {factor} is no whole number: LyCORIS stops there",
        "-1 is the most square split; a number that divides no side gives the nearest that does.",
    ),
    LycorisRule(
        _ERROR,
        "LYCORIS-PRESET",
        "preset",
        find_unknown_lycoris_preset,
        "there is no preset {preset!r}, neither built in nor as a file: LyCORIS stops there.{guess}",
        f"Built in are: {', '.join(_BUILT_IN_PRESETS)}.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-PRESET-EMPTY",
        "preset",
        lambda g: (
            (name := str(g["preset"] or g["LyCORIS_preset"])) in _EMPTY_PRESETS and g.algorithm and {"name": name}
        ),
        "the preset {name} names classes that no diffusion transformer has: LyCORIS adapts 0 modules of it, and "
        "does not say so",
        "Say the modules by pattern: network.only_patterns.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-DORA-BYPASS",
        "bypass_mode",
        lambda g: g.is_on("bypass_mode") and (g.is_on("dora_wd") or g.is_on("weight_decompose")) and g.algorithm,
        "dora_wd with bypass_mode: LyCORIS does not train the magnitudes there, and saves them all the same; here they "
        "are trained",
        "Leave dora_wd out to train what was trained there, or bypass_mode to mean DoRA.",
    ),
    *(
        LycorisRule(
            _WARNING,
            "LYCORIS-NO-EFFECT",
            name,
            match_other_lycoris_algorithm("lora", "locon", "loha", "lokr")(name),
            f"{name} has no effect with algo={{algo}}: only locon, loha and lokr have magnitudes",
            "Leave it out.",
        )
        for name in ("dora_wd", "weight_decompose")
    ),
    LycorisRule(
        _NOTE,
        "LYCORIS-NO-EFFECT",
        "use_tucker",
        lambda g: g.is_on("use_tucker") and g.algorithm == "glora",
        "use_tucker has no effect with algo=glora",
        "Leave it out.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-NO-EFFECT",
        "dropout",
        lambda g: g.number("dropout") and g.algorithm in ("loha", "lokr") and get_algorithm_evidence(g),
        "dropout has no effect with algo={algo} in LyCORIS; here network_dropout has",
        "Set it to 0 to train what was trained there; rank_dropout and module_dropout work in both.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-NO-EFFECT",
        "loraplus_lr_ratio",
        lambda g: g["loraplus_lr_ratio"] and g.algorithm not in ("", "lora", "locon") and get_algorithm_evidence(g),
        "loraplus_lr_ratio has no effect with algo={algo} there, as no parameter is called lora_up; here it has",
        "Leave it out to train what was trained there.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-BOOL",
        "network_args",
        find_misread_booleans,
        "{names}: LyCORIS takes every word but false for true, so these are on there",
        "Write false.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-BOOL",
        "decompose_both",
        lambda g: g.arguments.get("decompose_both", "").lower() in ("false", *_WORDS_MEANING_NO[:-1]),
        "decompose_both={value}: LyCORIS takes any text for true here, the word False as well; here it is off",
        "Leave it out to mean no.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-BOOL",
        "use_tucker",
        find_masked_tucker,
        "{first}=False stands over use_tucker=True in LyCORIS: it is off there",
        "Leave the older name out.",
    ),
    LycorisRule(
        _WARNING,
        "LYCORIS-CONV-DIM-ZERO",
        "conv_dim",
        lambda g: "conv_dim" not in g.arguments and g.options.get("conv_dim") == 0 and g["linear_dim"] is not None,
        "conv_dim is the number 0, which LyCORIS takes for absent: convolutions have the rank of the others there",
        'As text, "0", it leaves them out there, too; here 0 always does.',
    ),
    *(
        LycorisRule(
            _WARNING,
            "LYCORIS-NO-EFFECT",
            name,
            lambda g, name=name: name in g.arguments and g.algorithm,
            f"{name} in network_args has no effect: LyCORIS under sd-scripts reads {counts}",
            f"Set {counts}.",
        )
        for name, counts in (("linear_dim", "network_dim"), ("linear_alpha", "network_alpha"))
    ),
    *(
        LycorisRule(
            _NOTE,
            "LYCORIS-NOT-RELOADED",
            name,
            when,
            f"{name}: LyCORIS cannot read such a file back to go on from it; here it can",
        )
        for name, when in (
            ("wd_on_output", match_lycoris_option("wd_on_output", "false")),
            ("unbalanced_factorization", lambda g: g.is_on("unbalanced_factorization") and g.algorithm == "lokr"),
        )
    ),
    LycorisRule(
        _NOTE,
        "LYCORIS-VERSION",
        "algo",
        lambda g: g.algorithm in ("full", "ia3") and get_algorithm_evidence(g),
        "algo={algo} does not train in LyCORIS 3.3 (full stops at the first forward, ia3 at the first module)",
    ),
)

_DIVISIBILITY_PATTERN = r"head|divi[ds]|multiple|\u6574\u9664|\u500d\u6570"
_NOT_ZERO_PATTERN = (
    r"(not|n't|never|cannot).{0,20}(0\b|zero)|zero.{0,20}(not|error|crash)|\u4e0d\u80fd.{0,6}0|\u4e0d\u53ef.{0,6}0"
)
_HALF_OF_RANK_PATTERN = r"half|dim ?/ ?2|rank ?/ ?2|\u4e00\u534a"
LYCORIS_MISCONCEPTIONS = (
    *(
        LycorisMisconception(
            option,
            "the rank must divide the number of attention heads, or their size",
            "any whole number from 1 on trains; only DyLoRA's block_size must divide the rank, and BOFT's blocks the "
            "outputs",
            "LyCORIS, lycoris/kohya.py; a comment in its example_configs says itself that it has no special effect",
            match_lycoris_comment(option, _DIVISIBILITY_PATTERN),
        )
        for option in ("network_dim", "linear_dim", "conv_dim", "rank", "linear")
    ),
    LycorisMisconception(
        "conv_dim",
        "conv_dim must not be 0",
        "0 means that convolutions with a kernel get no adapter, which is what most want for transformers",
        "LyCORIS, lycoris/kohya.py: conv_dim",
        lambda g: (
            match_lycoris_comment("conv_dim", _NOT_ZERO_PATTERN)(g) or (g.number("conv_dim") == 1 and g.algorithm)
        ),
    ),
    LycorisMisconception(
        "gradient_checkpointing",
        "cached latents and gradient checkpointing exclude each other",
        "they have nothing to do with each other; use both",
        "sd-scripts, train_network.py: its only assertion excludes cache_latents with color_aug and random_crop",
        lambda g: (
            (
                match_lycoris_option("cache_latents", "false")(g)
                and match_lycoris_option("gradient_checkpointing", "true")(g)
            )
            or (
                match_lycoris_option("cache_latents", "true")(g)
                and match_lycoris_option("gradient_checkpointing", "false")(g)
            )
            or match_lycoris_comment("cache_latents", r"checkpoint")(g)
            or match_lycoris_comment("gradient_checkpointing", r"cache")(g)
        ),
    ),
    LycorisMisconception(
        "enable_bucket",
        "all pictures must have one size",
        "enable_bucket = true trains each in a shape near its own; without it all are cropped to one",
        "sd-scripts, library/train_util.py: BucketManager",
        lambda g: (
            match_lycoris_option("enable_bucket", "false")(g)
            or match_lycoris_comment("resolution", r"same size|one size|\u7edf\u4e00")(g)
        ),
    ),
    *(
        LycorisMisconception(
            option,
            f"--{option} is needed for LyCORIS",
            'sd-scripts has no such option; network_module = "lycoris.kohya" and algo in network_args are all that is '
            "needed",
            "sd-scripts, train_network.py: setup_parser; lycoris_config is SimpleTuner's",
            lambda g, option=option: g[option] is not None and not g["lora_type"],
        )
        for option in ("use_lora", "use_lycoris", "lycoris_config")
    ),
    LycorisMisconception(
        "network_alpha",
        "alpha must be half of the rank",
        "the scale is alpha / rank, and counts only together with the learning rate",
        "LyCORIS, lycoris/modules/locon.py: scale",
        match_lycoris_comment("network_alpha", _HALF_OF_RANK_PATTERN),
    ),
)


def find_lycoris_faults(given: LycorisOptions) -> list[Finding]:
    """Every rule that holds for a configuration, and every myth that it follows, worst first."""
    found = [finding for rule in (*LYCORIS_RULES, *LYCORIS_MISCONCEPTIONS) if (finding := rule.finding(given))]
    return sorted(found, key=lambda finding: finding.level.rank)
