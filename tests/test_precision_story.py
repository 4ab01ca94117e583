"""What will happen on a card that is not here, precision by precision; no test needs one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.errors import UsageError
from finitune.machine.cards import BYTES_PER_GIB, find_gpu_model, normalize_gpu_name, read_gpu_models, strip_gpu_series
from finitune.machine.hardware import DeviceFacts, advise
from finitune.models import MODEL_FAMILIES
from finitune.models.pico import get_pico_folder
from finitune.report import Level
from finitune.verbs import check
from finitune.verbs.check.precision_forecast import (
    FORECAST_PRECISIONS,
    build_forecast_findings,
    forecast_gpu,
)
from finitune.verbs.check.request import Request

FAMILY = {model.name: model for model in MODEL_FAMILIES}
TORCH = "2.11.0"


def facts(name: str) -> DeviceFacts:
    card, gib = find_gpu_model(name)
    return card.facts(TORCH, gib)


@pytest.mark.parametrize(
    ("written", "meant", "gib"),
    [
        ("t4", "Tesla T4", 16),
        ("Tesla T4", "Tesla T4", 16),
        ("rtx 2080 ti", "NVIDIA GeForce RTX 2080 Ti", 11),
        ("2080TI", "NVIDIA GeForce RTX 2080 Ti", 11),
        ("3060", "NVIDIA GeForce RTX 3060", 12),
        ("3060 8GB", "NVIDIA GeForce RTX 3060", 8),
        ("V100", "Tesla V100", 16),
        ("V100 32 GB", "Tesla V100", 32),
        ("GTX 1660", "NVIDIA GeForce GTX 1660", 6),
        ("p40", "Tesla P40", 24),
        ("RTX4090", "NVIDIA GeForce RTX 4090", 24),
        ("A100-80GB", "NVIDIA A100", 80),
        ("MI50", "AMD Instinct MI50", 16),
        ("7900 xtx", "AMD Radeon RX 7900 XTX", 24),
        ("Arc A770", "Intel(R) Arc(TM) A770", 16),
        ("a770", "Intel(R) Arc(TM) A770", 16),
        ("M2", "Apple M2", 8),
        ("Apple M2 Pro", "Apple M2 Pro", 16),
        ("RTX A4000", "NVIDIA RTX A4000", 16),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", "NVIDIA GeForce RTX 3070 Ti", 8),
        ("cpu", "CPU", 16),
    ],
)
def test_a_card_is_known_by_what_people_write(written: str, meant: str, gib: int):
    found = facts(written)
    assert (found.name, found.total_memory_bytes) == (meant, gib * BYTES_PER_GIB)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(read_gpu_models()), st.sampled_from((str.lower, str.upper, normalize_gpu_name)))
def test_every_card_is_found_by_its_own_name(card, spelt):
    assert find_gpu_model(spelt(card.name)) == (card, None)
    assert find_gpu_model(f"{card.name} 7GB") == (card, 7)


def test_no_two_cards_share_a_name_and_each_is_of_a_known_family():
    assert len({strip_gpu_series(card.name) for card in read_gpu_models()}) == len(read_gpu_models())
    unknown = {card.name for card in read_gpu_models() if "nknown" in advise(card.facts(TORCH)).reasons[0]}
    assert not unknown, "the rules of the hardware know each"
    assert all(not advise(card.facts(TORCH)).warnings for card in read_gpu_models())


@pytest.mark.parametrize(
    ("written", "near"), [("RTX 3900", "RTX 3090"), ("T5", "T4"), ("V10", "V100"), ("A110", "A100")]
)
def test_an_unknown_card_is_answered_with_near_ones(written: str, near: str):
    with pytest.raises(UsageError) as raised:
        find_gpu_model(written)
    assert raised.value.code == "GPU-UNKNOWN" and near in raised.value.message and raised.value.exit_code == 2


def test_a_name_that_is_nothing_like_a_card_is_answered_without_a_guess():
    with pytest.raises(UsageError) as raised:
        find_gpu_model("")
    assert "Did you mean" not in raised.value.message


# family, card: fp32, bf16, raw-half, planned-half, current-half, what finitune would take
STORIES = (
    ("anima", "T4", ("slow", "slow", "wrong", "works", "works"), "planned-half"),
    ("anima", "V100", ("slow", "slow", "wrong", "works", "works"), "planned-half"),
    ("anima", "2080 Ti", ("slow", "slow", "wrong", "works", "works"), "planned-half"),
    ("anima", "GTX 1660", ("works", "slow", "wrong", "wrong", "wrong"), "fp32"),
    ("anima", "P40", ("works", "slow", "wrong", "slow", "slow"), "fp32"),
    ("anima", "GTX 1080", ("works", "slow", "wrong", "slow", "slow"), "fp32"),
    ("anima", "K80", ("works", "slow", "wrong", "wrong", "wrong"), "fp32"),
    ("anima", "3060", ("slow", "works", "wrong", "works", "works"), "bf16"),
    ("anima", "A100", ("slow", "works", "wrong", "works", "works"), "bf16"),
    ("anima", "4090", ("slow", "works", "wrong", "works", "works"), "bf16"),
    ("anima", "MI50", ("works", "slow", "wrong", "works", "works"), "planned-half"),
    ("anima", "MI210", ("slow", "works", "wrong", "wrong", "wrong"), "bf16"),
    ("anima", "M2", ("works", "slow", "wrong", "slow", "slow"), "fp32"),
    ("anima", "Arc A770", ("slow", "works", "wrong", "works", "works"), "bf16"),
    ("sd15", "T4", ("slow", "slow", "works", "not offered", "not offered"), ""),
    ("sd15", "P40", ("works", "slow", "slow", "not offered", "not offered"), ""),
    ("sd15", "GTX 1650", ("works", "slow", "wrong", "not offered", "not offered"), ""),
    ("qwen-image", "T4", ("slow", "slow", "wrong", "not offered", "not offered"), ""),
)


@pytest.mark.parametrize(("family", "card", "verdicts", "choice"), STORIES, ids=lambda value: str(value)[:12])
def test_each_precision_has_its_verdict(family: str, card: str, verdicts: tuple[str, ...], choice: str):
    story = forecast_gpu(FAMILY[family], facts(card))
    assert tuple(line.verdict for line in story.lines) == verdicts and story.choice == choice
    assert [line.precision for line in story.lines] == list(FORECAST_PRECISIONS)
    assert all(line.why for line in story.lines)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(read_gpu_models()), st.sampled_from([*MODEL_FAMILIES, None]), st.none() | st.integers(1, 10**11))
def test_every_story_is_whole(card, family, numbers):
    story = forecast_gpu(family, card.facts(TORCH), numbers)
    by_name = {line.precision: line for line in story.lines}
    advice = advise(card.facts(TORCH))
    assert by_name["fp32"].verdict in ("works", "slow", "does not fit"), "fp32 is right everywhere"
    if story.choice:
        assert by_name[story.choice].verdict in ("works", "slow")
        assert story.choice == advice.compute or by_name[advice.compute].verdict == "does not fit"
    if family is None:
        assert by_name["raw-half"].verdict in ("not known", "wrong"), "nothing is promised of what nobody knows"
    assert len(story.table().columns) == len(story.table().rows[0])


def test_weights_that_do_not_fit_have_the_last_word():
    two_billion = 2_091_068_928
    small = forecast_gpu(FAMILY["anima"], facts("RTX 2060"), two_billion)
    verdicts = {line.precision: (line.verdict, line.weight_bytes) for line in small.lines}
    assert verdicts["fp32"] == ("does not fit", 4 * two_billion) and verdicts["planned-half"][0] == "works"
    assert small.choice == "planned-half"
    card = forecast_gpu(FAMILY["anima"], facts("GTX 1660"), two_billion)
    codes = {finding.code for finding in build_forecast_findings(card, "m")}
    assert card.choice == "" or "bf16" in card.choice
    assert {line.precision: line.verdict for line in card.lines}["fp32"] == "does not fit"
    assert "FP16-GOES-WRONG" in codes
    nowhere = forecast_gpu(FAMILY["anima"], facts("GTX 1050"), two_billion)
    assert nowhere.choice == "" and "GPU-TOO-SMALL" in {f.code for f in build_forecast_findings(nowhere, "m")}


def test_weights_that_leave_the_range_are_wrong_in_plain_fp16_whatever_the_family():
    line = next(
        line for line in forecast_gpu(FAMILY["sd15"], facts("A100"), over=2).lines if line.precision == "raw-half"
    )
    assert line.verdict == "wrong" and "2 tensors" in line.why


def test_the_misleading_answer_about_bf16_is_told_where_it_is_given():
    for card, emulated in (("T4", True), ("V100", True), ("P40", True), ("3060", False), ("M2", False)):
        found = {f.code: f for f in build_forecast_findings(forecast_gpu(FAMILY["anima"], facts(card)), "m")}
        assert ("BF16-EMULATED" in found) is emulated
        if emulated:
            assert "is_bf16_supported() says True" in found["BF16-EMULATED"].message
            assert found["BF16-EMULATED"].level is Level.WARNING


def test_each_hazard_has_a_source_and_each_family_a_hazard():
    assert all(family.fp16 and family.fp16.source and family.fp16.why for family in MODEL_FAMILIES)


def test_old_cards_are_told_which_wheel_they_need():
    assert any("cu126" in reason for reason in forecast_gpu(FAMILY["anima"], facts("P40")).reasons)
    assert not any("cu126" in reason for reason in forecast_gpu(FAMILY["anima"], facts("T4")).reasons)


def test_check_tells_it_for_a_model_a_family_and_an_adapter():
    report = check.run(Request(paths=(get_pico_folder(),), gpu="t4"))
    precision = report.figures["precision"]
    assert report.ok and isinstance(precision, dict) and precision["choice"] == "planned-half"
    numbers = report.figures["numbers"]
    assert isinstance(numbers, int)
    assert precision["precisions"]["fp32"]["weight_bytes"] == 4 * numbers
    assert {"BF16-EMULATED", "FP16-GOES-WRONG", "GPU-PRECISION"} <= {f.code for f in report.findings}
    both = check.run(Request(paths=(Path("anima"), Path("sdxl")), gpu="t4"))
    codes = [finding.code for finding in both.findings]
    assert codes.count("BF16-EMULATED") == 1, "what is of the card is said once"
    assert codes.count("FP16-GOES-WRONG") == 2 and both.ok
