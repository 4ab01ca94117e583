"""The table of conflicts: each rule speaks where it should, and falls silent when its remedy is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from finitune.adapters import ADAPTER_ALGORITHMS
from finitune.config import conflicts, lycoris
from finitune.config.conflicts import (
    NO_EFFECT_CODE,
    ConfigFacts,
    find_config_conflicts,
    parse_config_rules,
    read_config_rules,
)
from finitune.config.option_types import find_option_placement
from finitune.config.read import dump_config, read_train_config, validate_config
from finitune.config.schema import TrainConfig
from finitune.config.template import build_config_template
from finitune.package_data import read_package_toml
from finitune.report import Finding, Level
from finitune.rules import Rule
from finitune.training.optimizer_classes import read_optimizer_facts
from tests.conflict_cases import CASES as SETTINGS
from tests.conflict_cases_data import CASES as DATA

CASES = (*SETTINGS, *DATA)
GONE = "-"


def config_of(*assignments: str) -> TrainConfig:
    """A small configuration with "section.option = value; ..." on top; the value - takes an option away."""
    subset: dict[str, Any] = {"image_dir": "pictures"}
    dataset: dict[str, Any] = {"subsets": [subset]}
    document: dict[str, Any] = {
        "model": {"pretrained_model_name_or_path": "anima"},
        "saving": {"output_dir": "out"},
        "datasets": [dataset],
    }
    homes = {"subset": subset, "dataset": dataset, "datasets": document}
    for assignment in filter(None, (part.strip() for text in assignments for part in text.split(";"))):
        place, value = (part.strip() for part in assignment.split("=", 1))
        section, _, option = place.partition(".")
        home = homes[section] if section in homes else document.setdefault(section, {})
        if value == GONE:
            home.pop(option, None)
        else:
            home[option or section] = tomlkit.value(value).unwrap()
    return validate_config(document)[0]


def key(rule: Rule | Finding) -> tuple[str, str]:
    return rule.code, rule.subject


def found(config: TrainConfig) -> dict[tuple[str, str], Finding]:
    return {key(finding): finding for finding in find_config_conflicts(config)}


def test_every_rule_has_a_case_and_every_case_a_rule():
    keys = [key(rule) for rule in read_config_rules()]
    assert len(keys) == len(set(keys))
    assert {(code, subject) for code, subject, _, _ in CASES} == set(keys)


@pytest.mark.parametrize(("code", "subject", "trigger", "cure"), CASES, ids=[f"{c}-{s}" for c, s, _, _ in CASES])
def test_a_rule_speaks_where_it_should_and_its_cure_silences_it(code: str, subject: str, trigger: str, cure: str):
    rule = next(rule for rule in read_config_rules() if key(rule) == (code, subject))
    (finding,) = rule.find(ConfigFacts(config_of(trigger)))
    assert finding.level is rule.level
    assert "{" not in finding.message + finding.remedy
    assert finding.remedy or finding.level is Level.NOTE
    assert not list(rule.find(ConfigFacts(config_of(trigger, cure))))


def test_a_plain_configuration_has_no_conflicts():
    assert [key(finding) for finding in find_config_conflicts(config_of())] == [
        ("SAVED-ONCE", "saving.save_every_n_steps")
    ]


def test_everything_written_out_is_as_silent_as_what_is_left_out():
    config = config_of()
    written, _ = validate_config(tomlkit.parse(dump_config(config)).unwrap())
    assert find_config_conflicts(written) == find_config_conflicts(config)


def test_the_commented_example_has_nothing_worse_than_a_note(tmp_path: Path):
    path = tmp_path / "train.toml"
    path.write_text(build_config_template(), encoding="utf-8")
    assert {finding.level for finding in find_config_conflicts(read_train_config(path).config)} <= {Level.NOTE}


def test_errors_come_first():
    levels = [f.level for f in find_config_conflicts(config_of("network.factor = 4; objective.masked_loss = true"))]
    assert levels == [Level.ERROR, Level.WARNING, Level.NOTE]


def test_no_effect_is_a_warning_and_names_the_option():
    for rule in read_config_rules():
        if rule.code == NO_EFFECT_CODE:
            assert rule.level is Level.WARNING
            assert rule.subject.rpartition(".")[2] in rule.text and "has no effect" in rule.text


def test_the_kinds_of_algorithms_are_those_of_the_algebra():
    additive = {algorithm.name for algorithm in ADAPTER_ALGORITHMS if algorithm.additive}
    trained = [algorithm for algorithm in ADAPTER_ALGORITHMS if algorithm.trainable]
    assert {algorithm.name for algorithm in trained if algorithm.additive} == additive - {"norm"}
    assert all(algorithm.rank_means != "nothing" for algorithm in trained if algorithm.alpha_means == "scale")


@pytest.mark.parametrize("name", sorted(set(read_optimizer_facts()["self_tuning"])))
def test_optimisers_that_find_their_rate_are_known_by_name(name: str):
    config = config_of(f"optimizer.optimizer_type = '{name}'")
    assert ("OPTIMIZER-RATE-SELF-TUNED", "optimizer.learning_rate") in found(config)


def test_the_scale_of_the_report_is_told():
    finding = found(config_of("network.network_dim = 4; network.network_alpha = 128"))[
        ("NETWORK-SCALE", "network.network_alpha")
    ]
    assert finding.evidence == {"scale": "32", "alpha": "128", "rank": 4}


def test_rank_stabilised_scales_are_told_by_the_root():
    settings = "network.network_dim = 64; network.network_alpha = 64"
    assert ("NETWORK-SCALE", "network.network_alpha") not in found(config_of(settings, "network.rs_lora = true"))
    assert ("NETWORK-SCALE", "network.network_alpha") in found(
        config_of("network.network_dim = 256; network.network_alpha = 256; network.rs_lora = true")
    )


def test_inherited_options_are_told_with_all_places():
    finding = found(config_of("general.keep_tokens = 2; datasets.datasets = [{subsets = [{}, {}]}, {subsets = [{}]}]"))[
        (NO_EFFECT_CODE, "datasets.subsets.keep_tokens")
    ]
    places = "datasets[0].subsets[0], datasets[0].subsets[1], datasets[1].subsets[0]"
    assert finding.evidence == {"where": places} and places in finding.message


def test_a_lower_level_counts_for_data_rules():
    config = config_of("general.keep_tokens = 2; subset.shuffle_caption = true")
    assert (NO_EFFECT_CODE, "datasets.subsets.keep_tokens") not in found(config)


MYTHS = (
    "training.gradient_checkpointing = true",
    "network.network_dim = 7; network.network_alpha = 3",
    "network.network_dim = 128; network.network_alpha = 1",
    "network.conv_dim = 0",
    "training.torch_compile = true; model.precision = 'current-half'; model.device = 'cpu'",
    "general.bucket_no_upscale = true",
    "saving.save_precision = 'fp16'",
)


@pytest.mark.parametrize("settings", MYTHS)
def test_what_people_wrongly_forbid_is_no_conflict(settings: str):
    assert find_config_conflicts(config_of(settings)) == find_config_conflicts(config_of())


@pytest.mark.parametrize(
    "wrong", [{"when": {"steps": {"over": 3}}}, {"when": "no_such"}, {"says": "so"}, {"level": "bad"}]
)
def test_what_is_wrong_in_a_rule_is_refused_when_it_is_read(wrong: dict[str, Any]):
    entry = {"code": "X", "level": "note", "subject": "x", "when": {"steps": 3}, "text": "x", **wrong}
    with pytest.raises((ValueError, TypeError)):
        list(parse_config_rules(entry))


def test_every_predicate_serves_a_rule():
    for module, predicates in ((conflicts, conflicts.CONFIG_PREDICATES), (lycoris, lycoris.LYCORIS_PREDICATES)):
        text = Path(str(module.__file__)).with_suffix(".toml").read_text(encoding="utf-8")
        assert not [name for name in predicates if f'"{name}"' not in text]


def test_names_of_other_programs_stand_for_options_of_ours_once():
    names = read_package_toml(Path(str(conflicts.__file__)).with_name("foreign_names.toml"))
    assert all(find_option_placement(option) for option in names)
    others = [name for known in names.values() for name in known]
    assert len(others) == len(set(others)) and not any(find_option_placement(name) for name in others)
