"""What to do about a step whose numbers are not finite: pure judgement on what all processes know together.

A step with a non-finite loss or gradient has not reached the adapter (it is judged before the update), so all steps of
a bad streak ran with the same weights. That decides who is to blame. Where some samples of a step are finite by
themselves and others are not, the model is acquitted and the others are quarantined for good. Where all of a step's
samples fail, it may be the model: the blame is for the time being, and a rollback takes it back; those that fail once
more with the restored weights are guilty. A rollback restores adapter, optimiser and generators, but never the guard,
which must remember how often it went back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finitune.config.schema import GuardSection
from finitune.errors import NumericsError
from finitune.report import Finding, Level

_MAX_NAMES_SHOWN = 5
_MAX_EVENTS_KEPT = 100
_MAX_QUARANTINE_FINDINGS = 20

_LOWER_RATE_REMEDY = "If it comes often: a lower learning rate, a smaller max_grad_norm, or precision = 'current-half'."
_SKIPPED_STEP_REMEDY = (
    "A skipped step is no harm. Many of them are a reason to run `finitune diagnose` on the base model."
)


class GuardAction(str, Enum):
    """What follows from a step, the mildest first."""

    OK = "ok"
    SKIP = "skip"
    QUARANTINE = "quarantine"
    ROLLBACK = "rollback"
    STOP = "stop"


CODE_BY_GUARD_ACTION = {
    GuardAction.SKIP: "GUARD-SKIPPED",
    GuardAction.QUARANTINE: "GUARD-QUARANTINED",
    GuardAction.ROLLBACK: "GUARD-ROLLED-BACK",
    GuardAction.STOP: "GUARD-STOPPED",
}
"""What findings of an action are called."""


@dataclass(frozen=True)
class StepEvidence:
    """What is known of a step, over all processes once `merged`.

    `names` are the step's samples; `suspects` those of them that are not finite when looked at alone; `where` names the
    first non-finite tensor, if it was looked for. `weights` are the adapter's, `base` the frozen model's. With the last
    good adapter the suspects are finite where `adapter_sound` is False: it went too far, and they are not to blame.
    """

    step: int
    names: tuple[str, ...] = ()
    loss_finite: bool = True
    gradient_finite: bool = True
    weights_finite: bool = True
    base_finite: bool = True
    adapter_sound: bool = True
    suspects: tuple[str, ...] = ()
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether the step may reach the adapter."""
        finite = self.loss_finite and self.gradient_finite and self.weights_finite and self.base_finite
        return finite and self.adapter_sound and not self.suspects

    @property
    def is_model_acquitted(self) -> bool:
        """Whether some samples of the step are to blame, and others were finite with the same weights."""
        return bool(self.suspects) and not set(self.names) <= set(self.suspects)

    @property
    def fault(self) -> str:
        kinds = {
            "a weight of the base model": self.base_finite,
            "a weight of the adapter": self.weights_finite,
            "the loss": self.loss_finite,
            "the gradient": self.gradient_finite and not self.suspects,
        }
        kind = next((kind for kind, finite in kinds.items() if not finite), "")
        return f"{kind} is not finite" + (f" ({self.where})" if self.where else "") if kind else ""

    @classmethod
    def merged(cls, parts: Sequence[StepEvidence]) -> StepEvidence:
        """The evidence of all processes, in the order of their ranks: what is bad for one is bad for all.

        Raises NumericsError (RANKS-OUT-OF-STEP) where they speak of different steps.
        """
        steps = {part.step for part in parts}
        if len(steps) != 1:
            raise NumericsError(
                f"the processes are at different steps: {sorted(steps)}.",
                code="RANKS-OUT-OF-STEP",
                evidence={"steps": [part.step for part in parts]},
                remedy="Resume from the last checkpoint: from here on their adapters would differ.",
            )
        return cls(
            step=parts[0].step,
            names=merge_sample_names(part.names for part in parts),
            loss_finite=all(part.loss_finite for part in parts),
            gradient_finite=all(part.gradient_finite for part in parts),
            weights_finite=all(part.weights_finite for part in parts),
            base_finite=all(part.base_finite for part in parts),
            adapter_sound=all(part.adapter_sound for part in parts),
            suspects=merge_sample_names(part.suspects for part in parts),
            where=next((part.where for part in parts if part.where), ""),
        )


@dataclass(frozen=True)
class GuardDecision:
    """What to do: with the samples concerned, and why."""

    action: GuardAction
    reason: str = ""
    names: tuple[str, ...] = ()


@dataclass
class TrainingGuard:
    """Judges the steps of a run over `examples` different pictures, and remembers what it did.

    `quarantined` are the pictures left out from now on, by name, with step and reason; read it after each verdict: a
    rollback takes names out again, into `pardoned`. `streak` are the bad steps in a row, `good` all good ones,
    `returns` the rollbacks without `snapshot_every` good steps behind them.
    """

    settings: GuardSection
    examples: int
    good: int = 0
    skipped: int = 0
    rolled_back: int = 0
    quarantines: int = 0
    streak: int = 0
    returns: int = 0
    good_since_return: int = 0
    quarantined: dict[str, dict[str, Any]] = field(default_factory=dict)
    provisional: list[str] = field(default_factory=list)
    pardoned: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    stopped: dict[str, Any] | None = None

    def judge(self, evidence: StepEvidence) -> GuardDecision:
        """The verdict on a step; a STOP is for good."""
        if self.stopped:
            return GuardDecision(GuardAction.STOP, self.stopped["reason"], tuple(self.stopped["names"]))
        verdict = self._verdict(evidence)
        self._book(evidence, verdict)
        return verdict

    def _verdict(self, evidence: StepEvidence) -> GuardDecision:
        if evidence.ok:
            return GuardDecision(GuardAction.OK)
        if not evidence.base_finite:
            return GuardDecision(GuardAction.STOP, evidence.fault)
        if not (evidence.weights_finite and evidence.adapter_sound):
            return self._back(evidence.fault)
        fresh = tuple(name for name in evidence.suspects if name not in self.quarantined)
        if fresh and self.settings.quarantine:
            reason = f"{evidence.fault} for {format_sample_names(fresh)} alone"
            if 2 * (len(self.quarantined) + len(fresh)) > self.examples:
                reason = f"more than half of the {self.examples} pictures would be left out; {reason}"
                hopeless = self._certain(evidence, fresh) or not self.good
                return GuardDecision(GuardAction.STOP, reason, fresh) if hopeless else self._back(reason, fresh)
            if self._certain(evidence, fresh) or self.streak < self.settings.max_skips:
                return GuardDecision(GuardAction.QUARANTINE, reason, fresh)
        reason = f"{evidence.fault}, in a step with {format_sample_names(evidence.suspects or evidence.names)}"
        if self.streak < self.settings.max_skips:
            return GuardDecision(GuardAction.SKIP, reason, evidence.suspects)
        return self._back(f"{self.streak + 1} bad steps in a row; in the last, {reason}", evidence.suspects)

    def _certain(self, evidence: StepEvidence, fresh: Sequence[str]) -> bool:
        return evidence.is_model_acquitted or set(fresh) <= set(self.pardoned)

    def _back(self, reason: str, names: tuple[str, ...] = ()) -> GuardDecision:
        if self.returns < self.settings.max_rollbacks:
            return GuardDecision(GuardAction.ROLLBACK, reason, names)
        return GuardDecision(GuardAction.STOP, f"went back {self.returns} times, and again: {reason}", names)

    def _book(self, evidence: StepEvidence, verdict: GuardDecision) -> None:
        match verdict.action:
            case GuardAction.OK:
                self.good += 1
                self.streak = 0
                self.provisional.clear()
                self.good_since_return += 1
                if self.good_since_return >= self.settings.snapshot_every:
                    self.returns = 0
                return
            case GuardAction.SKIP:
                self.skipped += 1
                self.streak += 1
            case GuardAction.QUARANTINE:
                self.quarantines += 1
                entry = {"step": evidence.step, "reason": evidence.fault}
                self.quarantined |= {name: dict(entry) for name in verdict.names}
                if evidence.is_model_acquitted:
                    self.streak = 0
                    self.provisional.clear()
                elif not self._certain(evidence, verdict.names):
                    self.streak += 1
                    self.provisional += verdict.names
            case GuardAction.ROLLBACK:
                self.rolled_back += 1
                self.returns += 1
                self.streak = self.good_since_return = 0
                for name in self.provisional:
                    del self.quarantined[name]
                self.pardoned += [*self.provisional, *verdict.names]
                self.provisional.clear()
            case GuardAction.STOP:
                self.stopped = {"step": evidence.step, "reason": verdict.reason, "names": list(verdict.names)}
        self._remember(evidence.step, verdict)

    def _remember(self, step: int, verdict: GuardDecision) -> None:
        if len(self.events) < _MAX_EVENTS_KEPT:
            self.events.append({"step": step, "action": verdict.action.value, "reason": verdict.reason})

    def counts(self) -> dict[str, int]:
        """Steps by what became of them, for the status line; `quarantined` counts pictures."""
        return {
            "ok": self.good,
            "skipped": self.skipped + self.quarantines,
            "rolled_back": self.rolled_back,
            "quarantined": len(self.quarantined),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings and the dataset's size, as JSON holds it."""
        return {name: value for name, value in asdict(self).items() if name not in ("settings", "examples")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; it is not for rollbacks. Who resumes a stopped run has lifted the stop."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        if self.stopped:
            self.stopped, self.streak, self.returns = None, 0, 0

    def findings(self) -> list[Finding]:
        """What the report should tell: the stop, the rollbacks, each picture left out, and the skipped steps."""
        found = [
            Finding(
                Level.WARNING,
                CODE_BY_GUARD_ACTION[GuardAction.QUARANTINE],
                name,
                f"left out from step {entry['step']} on: {entry['reason']}",
                dict(entry),
                "Look at the picture, its mask and its caption; remove its cache entries; or take it out.",
            )
            for name, entry in islice(self.quarantined.items(), _MAX_QUARANTINE_FINDINGS)
        ]
        if (rest := len(self.quarantined) - _MAX_QUARANTINE_FINDINGS) > 0:
            message = f"{rest} more pictures were left out"
            found.append(
                Finding(
                    Level.WARNING, CODE_BY_GUARD_ACTION[GuardAction.QUARANTINE], "dataset", message, {"count": rest}
                )
            )
        if self.stopped:
            remedy = (
                "The last good file is kept. Run `finitune diagnose` on the base model, or lower the learning rate."
            )
            message = f"the run was stopped: {self.stopped['reason']}"
            subject = f"step {self.stopped['step']}"
            found.insert(
                0,
                Finding(
                    Level.ERROR, CODE_BY_GUARD_ACTION[GuardAction.STOP], subject, message, dict(self.stopped), remedy
                ),
            )
        for action, count, what, remedy in (
            (GuardAction.ROLLBACK, self.rolled_back, "went back to a good state", _LOWER_RATE_REMEDY),
            (GuardAction.SKIP, self.skipped, "left out a step", _SKIPPED_STEP_REMEDY),
        ):
            events = [event for event in self.events if event["action"] == action.value]
            if count:
                times = "once" if count == 1 else f"{count} times"
                message = f"the run {what} {times}" + (f"; the first: {events[0]['reason']}" if events else "")
                evidence: dict[str, object] = {"count": count, "steps": [event["step"] for event in events]}
                found.append(
                    Finding(Level.WARNING, CODE_BY_GUARD_ACTION[action], "training", message, evidence, remedy)
                )
        return found


class NonfiniteElement(NamedTuple):
    """The first non-finite element: its tensor's name, its place in the flattened tensor, and its value."""

    name: str
    place: int
    value: float

    def __str__(self) -> str:
        return f"{self.name}, element {self.place}: {self.value}"


def find_first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> NonfiniteElement | None:
    """The first non-finite element of tensors of any dtype (fp8 included; None is passed over), or None.

    It waits for the device once for each tensor: for finding the culprit, not for watching.
    """
    for name, tensor in named:
        if tensor is None or not tensor.is_floating_point():
            continue
        flat = tensor.detach().reshape(-1)
        bad = ~torch.isfinite(flat if flat.element_size() > 1 else flat.float())  # fp8 has no isfinite of its own
        if bool(bad.any()):
            place = int(bad.to(torch.uint8).argmax())
            return NonfiniteElement(name, place, float(flat[place]))
    return None


def require_fp32_masters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NumericsError (MASTERS-NOT-FP32) where a trained tensor is not fp32, before the first step.

    Half-precision weights cannot take an update smaller than half of their last place, and a resumed run that loads
    them in the base model's dtype fails only when gradients are unscaled (diffusers issue 6552).
    """
    others = {name: tensor.dtype for name, tensor in named if tensor.dtype is not torch.float32}
    if others:
        first, dtype = next(iter(others.items()))
        raise NumericsError(
            f"{len(others)} trained tensors are not fp32; the first is {first}, {dtype}.",
            code="MASTERS-NOT-FP32",
            subject=first,
            evidence={"tensors": len(others), "dtypes": sorted({str(dtype) for dtype in others.values()})},
            remedy="Load the adapter in torch.float32: only the products are half, never what is trained.",
        )


def merge_sample_names(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


def format_sample_names(names: Sequence[str]) -> str:
    """Names for a sentence; the first few where there are many."""
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "") or "no names"


def make_guard_finding(verdict: GuardDecision, evidence: StepEvidence) -> Finding:
    level = Level.ERROR if verdict.action is GuardAction.STOP else Level.WARNING
    subject = ", ".join(verdict.names[:3]) or evidence.where or f"step {evidence.step}"
    facts: dict[str, object] = {"step": evidence.step, "where": evidence.where, "names": list(verdict.names[:5])}
    return Finding(level, CODE_BY_GUARD_ACTION[verdict.action], subject, verdict.reason, facts)


def make_preview_failed_finding(error: Exception) -> Finding:
    said = f"the preview failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    remedy = "The run goes on, and its files are safe. Draw later: finitune generate MODEL --adapter FILE"
    return Finding(Level.WARNING, "PREVIEW-FAILED", "preview", said, {}, remedy)
