"""The guard's judgement: a table of rules, and a machine that tries to make it wrong."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from finitune.config.schema import GuardSection
from finitune.errors import NumericsError
from finitune.report import Level
from finitune.training.guard import GuardAction, StepEvidence, TrainingGuard, find_first_nonfinite, require_fp32_masters

NAN, INF = float("nan"), float("inf")
OK, SKIP, QUARANTINE, ROLLBACK, STOP = GuardAction
NAMES = ("a.png", "b.png", "c.png", "d.png")


def guard_of(examples: int = 100, **options: Any) -> TrainingGuard:
    return TrainingGuard(GuardSection(**{"max_skips": 2, "max_rollbacks": 2, "snapshot_every": 3, **options}), examples)


def good(step: int = 0) -> StepEvidence:
    return StepEvidence(step, NAMES)


def bad(step: int = 0, *suspects: str, names: tuple[str, ...] = NAMES, **what: Any) -> StepEvidence:
    return StepEvidence(step, names, suspects=suspects, **{"loss_finite": False, "gradient_finite": False, **what})


def actions(guard: TrainingGuard, evidence: list[StepEvidence]) -> list[GuardAction]:
    return [guard.judge(one).action for one in evidence]


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "action", "said"),
    [
        (good(), OK, ""),
        (bad(), SKIP, "the loss is not finite, in a step with a.png, b.png, c.png, d.png"),
        (StepEvidence(0, NAMES, gradient_finite=False, where="x.up, element 17: nan"), SKIP, "gradient .*element 17"),
        (bad(0, "b.png"), QUARANTINE, "the loss is not finite for b.png alone"),
        (bad(0, "b.png", loss_finite=True), QUARANTINE, "b.png alone"),
        (bad(0, *NAMES), QUARANTINE, "a.png, b.png, c.png, d.png alone"),
        (bad(weights_finite=False, where="x.up, element 0: inf"), ROLLBACK, "weight of the adapter .*x.up"),
        (bad(0, "a.png", weights_finite=False), ROLLBACK, "weight of the adapter"),
        (bad(0, "a.png", adapter_sound=False, where="it is before"), ROLLBACK, "the loss is not .*it is before"),
        (bad(base_finite=False, where="x.weight, element 3: nan"), STOP, "weight of the base model .*x.weight"),
        (bad(0, "a.png", weights_finite=False, base_finite=False), STOP, "weight of the base model"),
    ],
)
def test_one_step(evidence: StepEvidence, action: GuardAction, said: str):
    verdict = guard_of().judge(evidence)
    assert verdict.action is action
    assert re.search(said, verdict.reason)
    assert verdict.names == (evidence.suspects if action is QUARANTINE else ())
    assert evidence.ok is (action is OK)


def test_skips_in_a_row_lead_back_and_ways_back_to_the_end():
    verdicts = actions(guard_of(), [bad(step) for step in range(12)])
    assert verdicts == [SKIP, SKIP, ROLLBACK, SKIP, SKIP, ROLLBACK, SKIP, SKIP, STOP, STOP, STOP, STOP]


def test_without_rollbacks_it_stops_where_it_would_go_back():
    assert actions(guard_of(max_rollbacks=0), [bad(), bad(), bad()]) == [SKIP, SKIP, STOP]
    assert actions(guard_of(max_rollbacks=0), [bad(weights_finite=False)]) == [STOP]


def test_a_good_step_ends_a_streak():
    verdicts = actions(guard_of(), [bad(), bad(), good(), bad(), bad(), good()] * 10)
    assert set(verdicts) == {SKIP, OK}


def test_ways_back_count_until_a_new_good_state_is_reached():
    back = [bad(weights_finite=False)]
    assert actions(guard_of(), [*back, good(), good(), *back, *back])[-1] is STOP
    guard = guard_of()
    verdicts = actions(guard, ([*back, good(), good(), good()]) * 10)
    assert STOP not in verdicts
    assert guard.rolled_back == 10


def test_one_bad_step_in_ten_never_stops_a_run():
    guard = guard_of(examples=8)
    verdicts = actions(guard, [bad(step) if step % 10 == 7 else good(step) for step in range(5000)])
    assert Counter(verdicts) == {OK: 4500, SKIP: 500}
    assert guard.counts() == {"ok": 4500, "skipped": 500, "rolled_back": 0, "quarantined": 0}


def test_a_guilty_sample_is_told_apart_from_a_guilty_model():
    """All samples of a step fail: perhaps the model. Then one is finite with the same weights: it was the samples."""
    guard = guard_of()
    guard.judge(bad(0, "a.png", names=("a.png",)))
    assert guard.provisional == ["a.png"]
    guard.judge(bad(1, "b.png", names=("b.png", "c.png")))
    assert (guard.provisional, guard.streak) == ([], 0)
    assert list(guard.quarantined) == ["a.png", "b.png"]


def test_a_rollback_pardons_the_samples_of_its_streak_only():
    guard = guard_of()
    steps = [bad(0, "a.png"), good(1), *(bad(2 + i, f"{i}.png", names=(f"{i}.png",)) for i in range(3))]
    assert actions(guard, steps) == [QUARANTINE, OK, QUARANTINE, QUARANTINE, ROLLBACK]
    assert list(guard.quarantined) == ["a.png"]
    assert guard.pardoned == ["0.png", "1.png", "2.png"]


def test_bad_pictures_in_a_row_are_left_out_when_they_fail_again_after_a_rollback():
    guard, shown = guard_of(), [f"{i}.png" for i in range(5)]
    first = [bad(i, name, names=(name,)) for i, name in enumerate(shown[:3])]
    assert actions(guard, [good(), *first]) == [OK, QUARANTINE, QUARANTINE, ROLLBACK]
    again = [bad(i, name, names=(name,)) for i, name in enumerate(shown)]
    assert actions(guard, [good(), *again, good()]) == [OK, *[QUARANTINE] * 5, OK]
    assert list(guard.quarantined) == shown


def test_more_than_half_of_the_pictures_is_too_many():
    guard = guard_of(examples=4)
    assert actions(guard, [bad(0, "a.png"), good(), bad(2, "b.png"), good(), bad(4, "c.png")]) == [
        QUARANTINE,
        OK,
        QUARANTINE,
        OK,
        STOP,
    ]
    assert list(guard.quarantined) == ["a.png", "b.png"]
    assert "more than half of the 4 pictures" in guard.findings()[0].message


def test_all_samples_failing_at_once_in_a_small_dataset_is_first_taken_for_the_models_fault():
    guard, failing = guard_of(examples=4), bad(1, *NAMES)
    assert actions(guard, [good(), failing]) == [OK, ROLLBACK]
    assert not guard.quarantined
    assert actions(guard, [good(), failing]) == [OK, STOP]
    assert actions(guard_of(examples=4), [failing]) == [STOP]  # nothing was learned, so there is nothing to take back


def test_a_picture_that_is_left_out_already_is_no_new_reason():
    guard = guard_of()
    assert actions(guard, [bad(0, "a.png"), bad(1, "a.png"), bad(2, "a.png"), bad(3, "a.png")]) == [
        QUARANTINE,
        SKIP,
        SKIP,
        ROLLBACK,
    ]
    assert list(guard.quarantined) == ["a.png"]


def test_quarantine_can_be_switched_off():
    guard = guard_of(quarantine=False)
    assert actions(guard, [bad(0, "a.png")] * 3) == [SKIP, SKIP, ROLLBACK]
    assert not guard.quarantined


# --- all processes together ------------------------------------------------------------------------------------------


FLAGS = ("loss_finite", "gradient_finite", "weights_finite", "base_finite", "adapter_sound")


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("rank", range(3))
def test_what_is_bad_for_one_is_bad_for_all(flag: str, rank: int):
    parts = [StepEvidence(4, (f"{i}.png",), **{flag: i != rank}) for i in range(3)]
    merged = StepEvidence.merged(parts)
    assert [getattr(merged, other) for other in FLAGS] == [other != flag for other in FLAGS]
    assert merged.names == ("0.png", "1.png", "2.png")
    assert not merged.ok


def test_suspects_are_united_and_a_sample_elsewhere_acquits_the_model():
    parts = [bad(0, "a.png", names=("a.png",), where="y"), bad(0, "b.png", "a.png", names=("b.png", "a.png"))]
    merged = StepEvidence.merged(parts)
    assert (merged.suspects, merged.where) == (("a.png", "b.png"), "y")
    assert not merged.is_model_acquitted
    assert StepEvidence.merged([*parts, StepEvidence(0, ("c.png",))]).is_model_acquitted


def test_processes_at_different_steps_are_refused():
    with pytest.raises(NumericsError) as caught:
        StepEvidence.merged([good(3), good(4)])
    assert (caught.value.code, caught.value.evidence) == ("RANKS-OUT-OF-STEP", {"steps": [3, 4]})


# --- what is told ----------------------------------------------------------------------------------------------------


def test_findings_name_what_was_done():
    guard = guard_of()
    actions(guard, [bad(0, "a.png"), bad(1), good(2), bad(3, weights_finite=False), good(4), bad(5, base_finite=False)])
    found = {finding.code: finding for finding in guard.findings()}
    assert set(found) == {"GUARD-STOPPED", "GUARD-QUARANTINED", "GUARD-ROLLED-BACK", "GUARD-SKIPPED"}
    assert found["GUARD-STOPPED"].level is Level.ERROR
    assert found["GUARD-QUARANTINED"].subject == "a.png"
    assert found["GUARD-QUARANTINED"].evidence == {"step": 0, "reason": "the loss is not finite"}
    assert found["GUARD-SKIPPED"].evidence == {"count": 1, "steps": [1]}
    assert "once; the first: a weight of the adapter" in found["GUARD-ROLLED-BACK"].message
    assert all(finding.remedy for finding in found.values())
    assert guard_of().findings() == []


def test_what_is_told_and_kept_is_bounded():
    guard = guard_of(examples=10_000)
    for step in range(1000):
        guard.judge(bad(step, f"{step}.png", names=("x.png", f"{step}.png")))
        guard.judge(bad(step))
        guard.judge(good(step))
    assert guard.counts() == {"ok": 1000, "skipped": 2000, "rolled_back": 0, "quarantined": 1000}
    assert len(guard.findings()) < 30
    assert "980 more" in str([finding.message for finding in guard.findings()])
    assert len(guard.events) == 100
    verdict = guard.judge(bad(0, names=tuple(f"{i}.png" for i in range(500))))
    assert verdict.reason.endswith("0.png, 1.png, 2.png, 3.png, 4.png and 495 more")


def test_who_resumes_a_stopped_run_has_lifted_the_stop():
    guard = guard_of()
    actions(guard, [bad(step) for step in range(9)])
    resumed = guard_of()
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert actions(resumed, [good(), bad(), bad(), bad()]) == [OK, SKIP, SKIP, ROLLBACK]


# --- the machine -----------------------------------------------------------------------------------------------------


EXAMPLES = 12
POOL = [f"{i}.png" for i in range(EXAMPLES)]


@st.composite
def evidences(draw: st.DrawFn) -> StepEvidence:
    names = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=4, unique=True))
    flags = {flag: draw(st.sampled_from([True, True, True, False])) for flag in FLAGS[:3]}
    suspects = draw(st.lists(st.sampled_from(names), unique=True)) if not all(flags.values()) else []
    return StepEvidence(draw(st.integers(0, 99)), tuple(names), suspects=tuple(suspects), **flags)


class Judged(RuleBasedStateMachine):
    """Any evidence in any order, with saves and resumes in between."""

    @initialize(skips=st.integers(1, 3), rollbacks=st.integers(0, 3), every=st.integers(1, 5), quarantine=st.booleans())
    def begin(self, skips: int, rollbacks: int, every: int, quarantine: bool) -> None:
        options = GuardSection(max_skips=skips, max_rollbacks=rollbacks, snapshot_every=every, quarantine=quarantine)
        self.guard, self.twin = TrainingGuard(options, EXAMPLES), TrainingGuard(options, EXAMPLES)
        self.counts: Counter[GuardAction] = Counter()
        self.bad_in_a_row = 0

    @rule(evidence=evidences())
    def judge(self, evidence: StepEvidence) -> None:
        stopped, before = bool(self.guard.stopped), dict(self.guard.quarantined)
        verdict = self.guard.judge(evidence)
        assert self.twin.judge(evidence) == verdict  # every process decides the same
        assert (verdict.action is OK) == (evidence.ok and not stopped)
        assert bool(verdict.reason) == (verdict.action is not OK)
        assert verdict.action is STOP or not stopped
        if verdict.action is QUARANTINE:
            assert verdict.names
            assert set(verdict.names) <= set(evidence.suspects) - set(before)
            assert set(self.guard.quarantined) == set(before) | set(verdict.names)
        if not evidence.weights_finite:
            assert verdict.action in (ROLLBACK, STOP)
        if not stopped:
            self.counts[verdict.action] += 1
        self.bad_in_a_row = 0 if evidence.ok else self.bad_in_a_row + 1

    @rule()
    def resume(self) -> None:
        if not self.guard.stopped:
            state = json.loads(json.dumps(self.guard.state_dict()))
            self.guard = TrainingGuard(self.guard.settings, EXAMPLES)
            self.guard.load_state_dict(state)

    @invariant()
    def counters_add_up(self) -> None:
        guard, counts = self.guard, self.guard.counts()
        assert counts["ok"] == self.counts[OK]
        assert counts["skipped"] == self.counts[SKIP] + self.counts[QUARANTINE]
        assert counts["rolled_back"] == self.counts[ROLLBACK]
        assert counts["quarantined"] == len(guard.quarantined) <= EXAMPLES / 2
        assert bool(guard.stopped) == bool(self.counts[STOP])
        assert set(guard.provisional) <= set(guard.quarantined)

    @invariant()
    def it_ends_in_bounded_time(self) -> None:
        limits = self.guard.settings
        longest = (limits.max_skips + 1) * (limits.max_rollbacks + 1) * (1 + EXAMPLES)
        assert self.guard.stopped or self.bad_in_a_row < longest


TestJudged = Judged.TestCase
TestJudged.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)


@given(
    skips=st.integers(1, 4),
    rollbacks=st.integers(0, 4),
    batch=st.integers(1, 4),
    alone=st.booleans(),
    good_before=st.integers(0, 30),
)
@settings(max_examples=60)
def test_when_everything_is_nan_the_end_comes_soon(
    skips: int, rollbacks: int, batch: int, alone: bool, good_before: int
):
    guard = guard_of(1000, max_skips=skips, max_rollbacks=rollbacks)
    actions(guard, [good()] * good_before)
    for step in range(1000):
        names = tuple(f"{batch * step + i}.png" for i in range(batch))
        verdict = guard.judge(bad(step, *(names if alone else ()), names=names))
        assert verdict.action is not OK
        if verdict.action is STOP:
            break
    assert step + 1 == (skips + 1) * (rollbacks + 1)


# --- the culprit -----------------------------------------------------------------------------------------------------


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_nonfinite_element_is_named(dtype: torch.dtype):
    spoiled = torch.arange(24.0).view(4, 6)
    spoiled[2, 5] = spoiled[3, 0] = NAN
    found = find_first_nonfinite([("fine", torch.ones(3).to(dtype)), ("none", None), ("bad", spoiled.to(dtype))])
    assert found is not None
    assert (found.name, found.place) == ("bad", 17)
    assert str(found) == "bad, element 17: nan"
    assert find_first_nonfinite([("fine", torch.ones(3).to(dtype)), ("empty", torch.zeros(0, dtype=dtype))]) is None


@given(values=st.lists(st.sampled_from([0.0, 1.0, -3.5, NAN, INF, -INF]), max_size=9), names=st.integers(1, 3))
@settings(max_examples=50)
def test_the_culprit_is_that_of_a_plain_search(values: list[float], names: int):
    tensors = [(f"{i}", torch.tensor(values[i::names])) for i in range(names)]
    expected = next(
        ((name, place) for name, tensor in tensors for place, v in enumerate(tensor.tolist()) if not math.isfinite(v)),
        None,
    )
    found = find_first_nonfinite(tensors)
    assert (found and (found.name, found.place)) == expected


def test_integers_are_finite_and_transposed_tensors_are_read_in_order():
    tensor = torch.ones(2, 3)
    tensor[1, 0] = INF
    found = find_first_nonfinite([("int", torch.tensor([1, 2])), ("t", tensor.T)])
    assert found is not None
    assert (found.place, found.value) == (1, INF)


def test_masters_in_fp32_are_demanded():
    fine: list[tuple[str, Tensor]] = [("a.up", torch.zeros(2))]
    require_fp32_masters(fine)
    with pytest.raises(NumericsError) as caught:
        require_fp32_masters([*fine, ("b.up", torch.zeros(2).half()), ("c.up", torch.zeros(2).bfloat16())])
    assert (caught.value.code, caught.value.subject) == ("MASTERS-NOT-FP32", "b.up")
    assert caught.value.evidence == {"tensors": 2, "dtypes": ["torch.bfloat16", "torch.float16"]}
