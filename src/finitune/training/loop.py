"""The loop: gradient, judgement, update; then what is due. It yields what happens and prints nothing.

The judgement comes before the update, on one small vector that all processes have added up: one wait for the device a
step, which also brings the loss that is shown. So nothing non-finite ever reaches an adapter or an optimiser, whatever
the optimiser keeps of its own, and there is nothing to mask or to take back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from finitune.adapters import AdapterSet
from finitune.datasets.items import TrainingBatch, derive_seed
from finitune.errors import NumericsError
from finitune.report import Finding, Level
from finitune.training import events
from finitune.training.checkpoint import save_run_state
from finitune.training.guard import (
    GuardAction,
    GuardDecision,
    StepEvidence,
    find_first_nonfinite,
    make_guard_finding,
    make_preview_failed_finding,
    require_fp32_masters,
)
from finitune.training.measurements import PeakMemoryTracker
from finitune.training.optimizers import set_learning_rates
from finitune.training.step import StepGradient
from finitune.training.telemetry import digest_tensors
from finitune.training.train_state import TrainingRun, TrainState

_PLAN_EXCEEDED_CODE = "PLAN-EXCEEDED"
_MEMORY_HALVED_CODE = "MEMORY-HALVED"


@dataclass(frozen=True)
class TrainingSnapshot:
    """A good state in memory."""

    step: int
    taken: int
    adapter: Mapping[str, Tensor]
    optimizer: Any
    average: Any


class Trainer:
    """A run in progress: iterate over `events()`."""

    def __init__(self, run: TrainingRun, progressing: TrainState):
        self.run, self.now = run, progressing
        self.memory = PeakMemoryTracker(run.ranks.device)
        self.named = dict(run.learner.named_parameters())
        self.saved: Mapping[str, Path] = {}
        self.saved_at = self.measured_at = -1
        self.split = run.differentiator.split
        self.replayed_from = -1
        require_fp32_masters(self.named.items())
        self.snapshot = self.take_snapshot()

    def events(self) -> Iterator[events.TrainingEvent]:
        """Everything that happens until the end; the last event is Finished."""
        run, reason = self.run, "done"
        run.ranks.demand_same("pictures or captions", run.manifest.dataset, "datasets")
        self.require_agreement()
        yield self.started()
        if self.now.step == 0:
            yield from self.validation()
        while self.now.step < run.total_steps:
            verdict = yield from self.one_step()
            if verdict.action is GuardAction.STOP:
                reason = "given up"
                yield self.roll_back(verdict.reason)
                break
            if verdict.action is GuardAction.ROLLBACK:
                continue
            yield from self.run_due_actions()
            if any(run.ranks.gathered(run.hooks.stop())):
                reason = "stopped"
                break
        if reason == "done" or (self.now.taken and self.saved_at != self.now.step):
            yield from self.save(final=reason == "done")
        if reason == "done" and self.measured_at != self.now.step:
            yield from self.validation()
        yield events.TrainingFinished(self.now.step, self.epoch, reason, self.saved)

    @property
    def epoch(self) -> int:
        return self.now.step // self.run.course.steps_per_epoch

    def started(self) -> events.TrainingStarted:
        training = self.run.config.training
        return events.TrainingStarted(
            first_step=self.now.step,
            steps=self.run.total_steps,
            steps_per_epoch=self.run.course.steps_per_epoch,
            batch=training.train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            devices=self.run.ranks.world,
            parameters=sum(parameter.numel() for parameter in self.named.values()),
        )

    def one_step(self) -> Iterator[Any]:
        """One optimiser step: gradient, verdict, and what the verdict asks for; returns the verdict."""
        run, now, begin = self.run, self.now, time.perf_counter()
        step = now.step
        gradient = self.gradient(step)
        beyond = not gradient.finite and self.is_true_anywhere(now.planned and self._has_finite_inputs(gradient))
        if beyond and (yield from self.abandon_plan(step)):
            gradient = self.gradient(step)
        yield from self.report_memory_split(step)
        if step % run.course.steps_per_epoch == 0:
            now.meter.start_epoch()
        if not gradient.samples:
            now.step = step + 1
            return GuardDecision(GuardAction.OK, "every picture of the step is left out")
        evidence = self.evidence(gradient, step)
        verdict = now.guard.judge(evidence)
        rate = run.rate_of(step)
        if verdict.action is GuardAction.OK:
            if step % run.config.guard.snapshot_every == 0 and find_first_nonfinite(self.named.items()) is None:
                self.snapshot = self.take_snapshot()  # before the update: what has just been finite all the way
            self.update(gradient, rate)
        now.meter.add(gradient.loss)
        now.step = step + 1
        yield self.stepped(gradient, rate, verdict, time.perf_counter() - begin)
        yield from self.told(gradient, evidence, verdict, step)
        if verdict.action is GuardAction.ROLLBACK:
            yield self.roll_back(verdict.reason)
        return verdict

    def gradient(self, step: int) -> StepGradient:
        run = self.run
        excluded = frozenset(self.now.guard.quarantined)
        batches = [run.load(micro, excluded) for micro in run.course.select_micro_batches(step, run.ranks.rank)]
        rounds = len(run.course.select_micro_batches(step, 0))  # at the end of an epoch others may have one less
        return run.differentiator.gradient([*batches, *[None] * (rounds - len(batches))], step, self.now.attempt)

    def report_memory_split(self, step: int) -> Iterator[events.TrainingEvent]:
        """Say so where memory was short at this step, and what follows from it."""
        before, self.split = self.split, self.run.differentiator.split
        if self.split > before:
            message = f"memory was short: micro-batches go through in {self.split} parts from now on"
            remedy = (
                "The gradient is the same. A smaller train_batch_size, or gradient_checkpointing, saves the attempt."
            )
            facts: dict[str, object] = {"step": step, "split": self.split}
            yield events.FindingRaised(
                step, Finding(Level.WARNING, _MEMORY_HALVED_CODE, f"step {step}", message, facts, remedy)
            )

    def is_true_anywhere(self, here: bool) -> bool:
        return any(self.run.ranks.gathered(here))

    def _has_finite_inputs(self, gradient: StepGradient) -> bool:
        """Whether latents, texts and adapter are finite, so that the arithmetic itself must have failed."""
        tensors = [tensor for batch in gradient.batches for tensor in (batch.latents, *batch.conditioning.values())]
        return find_first_nonfinite(("", tensor) for tensor in (*tensors, *self.named.values())) is None

    def abandon_plan(self, step: int) -> Generator[events.TrainingEvent, None, bool]:
        """Measure every scale from now on, where a plan's constants were exceeded, and say so; whether any was."""
        sites = self.run.learner.give_up_plans()
        self.now.planned = False
        if sites:
            message = f"the plan's constants were exceeded: {len(sites)} products measure their own scales from now on"
            remedy = "The step is taken again. Plan on prompts of this dataset for the next run, or use current-half."
            yield events.FindingRaised(
                step, Finding(Level.WARNING, _PLAN_EXCEEDED_CODE, "model.plan", message, {"step": step}, remedy)
            )
        return bool(sites)

    def evidence(self, gradient: StepGradient, step: int) -> StepEvidence:
        """What everybody knows of a step; the search for the guilty begins only where something is wrong."""
        if gradient.finite:
            return StepEvidence(step)
        weight = find_first_nonfinite(self.named.items())
        loss_finite = math.isfinite(gradient.loss)
        raw = [(name, parameter.grad) for name, parameter in self.named.items() if loss_finite]
        where = str(weight or find_first_nonfinite(raw) or "")
        suspects = gradient.bad
        if not self.is_true_anywhere(weight is not None or bool(suspects)):
            suspects = self.run.differentiator.find_nonfinite_samples(gradient.batches, step, self.now.attempt)
        base = self.run.base_nonfinite() if not self.now.guard.good else ""
        sound = weight is not None or not self.was_finite_before(gradient.batches, suspects, step)
        if not sound:
            where = f"it is with the adapter of step {self.snapshot.step}"
        own = StepEvidence(
            step=step,
            names=gradient.names,
            loss_finite=loss_finite,
            gradient_finite=False,
            weights_finite=weight is None,
            base_finite=not base,
            adapter_sound=sound,
            suspects=() if weight else suspects,
            where=base or where,
        )
        return StepEvidence.merged(self.run.ranks.gathered(own))

    def was_finite_before(self, batches: Sequence[TrainingBatch], suspects: Sequence[str], step: int) -> bool:
        """Whether any of this process's suspects is finite with the last good adapter: then not they are to blame."""
        if self.now.taken == self.snapshot.taken:
            return False
        now = self.run.learner.tensors()
        self.run.learner.restore(self.snapshot.adapter)
        accused = [batch.part(i, i + 1) for batch in batches for i, name in enumerate(batch.names) if name in suspects]
        guilty = self.run.differentiator.find_nonfinite_samples(accused, step, self.now.attempt)
        self.run.learner.restore(now)
        return len(guilty) < len(accused)

    def update(self, gradient: StepGradient, rate: float) -> None:
        """Cut the gradient, set the rates, take the step, and what follows a step that was taken."""
        run, now = self.run, self.now
        limit = run.config.optimizer.max_grad_norm
        if limit and gradient.norm > limit:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / gradient.norm)
        set_learning_rates(now.optimizer, rate)
        torch.manual_seed(derive_seed(run.config.training.seed, now.step, now.attempt, "update"))
        now.optimizer.step()  # some draw random numbers: the same in all processes
        now.taken += 1
        norms = run.config.network.scale_weight_norms
        if norms:
            run.learner.limit_norms(norms)
        if now.average:
            now.average.update()

    def told(
        self, gradient: StepGradient, evidence: StepEvidence, verdict: GuardDecision, step: int
    ) -> Iterator[events.TrainingEvent]:
        now = self.now
        if verdict.action is not GuardAction.OK:
            yield events.FindingRaised(step, make_guard_finding(verdict, evidence))
            return
        spike = now.spikes.add(step, gradient.loss, gradient.norm)
        grads = {n: None if n in gradient.missing else parameter.grad for n, parameter in self.named.items()}
        silent = now.silence.watch(now.taken, grads, [group["lr"] for group in now.optimizer.param_groups])
        if silent and silent.level is Level.ERROR:
            raise NumericsError(
                silent.message,
                code=silent.code,
                subject=silent.subject,
                evidence=silent.evidence,
                remedy=silent.remedy,
            )
        yield from (events.FindingRaised(step, finding) for finding in (spike, silent) if finding)

    def stepped(self, gradient: StepGradient, rate: float, verdict: GuardDecision, seconds: float) -> events.StepTaken:
        now = self.now
        return events.StepTaken(
            step=now.step,
            epoch=self.epoch,
            loss=gradient.loss,
            smoothed=now.meter.smoothed if now.meter.smoothed is not None else float("nan"),
            rate=rate * self.run.config.optimizer.learning_rate,
            grad_norm=gradient.norm,
            seconds=seconds,
            taken=verdict.action is GuardAction.OK,
            counts=now.guard.counts(),
            memory=self.memory.peak(),
        )

    def take_snapshot(self) -> TrainingSnapshot:
        now = self.now
        average = now.average.state_dict() if now.average else None
        return TrainingSnapshot(
            now.step,
            now.taken,
            self.run.learner.tensors(),
            clone_tensor_tree(now.optimizer.state_dict()),
            clone_tensor_tree(average),
        )

    def roll_back(self, reason: str) -> events.StepsRolledBack:
        """Back to the last good state; steps taken again for the second time draw other noise."""
        now, good = self.now, self.snapshot
        left = now.step
        self.run.learner.restore(good.adapter)
        now.optimizer = self.run.make_optimizer()
        now.optimizer.load_state_dict(clone_tensor_tree(good.optimizer))
        if now.average:
            now.average.load_state_dict(clone_tensor_tree(good.average))
        now.step, now.taken = good.step, good.taken
        now.attempt += self.replayed_from == good.step
        self.replayed_from = good.step
        return events.StepsRolledBack(left, good.step, reason)

    def run_due_actions(self) -> Iterator[events.TrainingEvent]:
        """Files first, then what could fail: a measurement, a preview."""
        config, step = self.run.config, self.now.step
        ends = step % self.run.course.steps_per_epoch == 0 or step == self.run.total_steps
        if self.is_due(config.saving.save_every_n_steps, config.saving.save_every_n_epochs, ends):
            yield from self.save(final=False)
        if self.is_validation_due():
            yield from self.validation()
        if self.is_due(config.preview.sample_every_n_steps, config.preview.sample_every_n_epochs, ends):
            yield from self.preview()

    def is_due(self, steps: int | None, epochs: int | None, ends: bool) -> bool:
        return bool(steps and self.now.step % steps == 0) or bool(epochs and ends and self.epoch % epochs == 0)

    def save(self, final: bool) -> Iterator[events.TrainingEvent]:
        """Write the adapter, have it checked, write the state; the main process writes, all of them agree before."""
        run, now, begin = self.run, self.now, time.perf_counter()
        self.require_agreement()
        at_epoch = now.step % run.course.steps_per_epoch == 0 and bool(run.config.saving.save_every_n_epochs)
        where = {"epoch": self.epoch} if at_epoch else {"step": now.step}
        path = run.folder.adapter_path(run.config.saving.output_name, **({} if final else where))
        paths: Mapping[str, Path] = {}
        if run.ranks.main:
            paths = run.hooks.export(self.adapter(), path, {"step": now.step, "epoch": self.epoch, "taken": now.taken})
            if run.config.saving.save_state:
                state = run.folder.state_path(run.config.saving.output_name, None if final else now.step)
                save_run_state(state, now.state(run), run.manifest)
                paths = {**paths, "state": state}
            if run.config.saving.save_last_n:
                run.folder.prune(run.config.saving.save_last_n)
        self.saved, self.saved_at = run.ranks.broadcast_from_main(paths), now.step
        yield events.CheckpointSaved(now.step, self.epoch, self.saved, time.perf_counter() - begin)

    def adapter(self) -> AdapterSet:
        """The adapter to write: its average where there is one, as the optimiser wants it to be used."""
        now = self.now
        with now.optimizer.apply_eval_mode():
            if now.average is None:
                return self.run.learner.adapter()
            with now.average.swapped():
                return self.run.learner.adapter()

    def require_agreement(self) -> None:
        """Raise NumericsError (RANKS-DIFFER) where the processes hold different adapters, or averages of them."""
        if self.run.ranks.world > 1:
            averages = self.now.average.sums.values() if self.now.average else ()
            own = (self.now.step, digest_tensors([*self.named.values(), *averages]))
            self.run.ranks.demand_same("adapters", own, f"step {self.now.step}")

    def is_validation_due(self) -> bool:
        """Whether the pictures kept out are to be measured on now: once an epoch where nothing is said."""
        settings = self.run.config.validation
        epochs = settings.validate_every_n_epochs or (None if settings.validate_every_n_steps else 1)
        return self.is_due(
            settings.validate_every_n_steps, epochs, self.now.step % self.run.course.steps_per_epoch == 0
        )

    def validation(self) -> Iterator[events.TrainingEvent]:
        """Measure the loss on the pictures kept out, where there are some, and the ranges of the denoiser on one."""
        run = self.run
        self.measured_at = self.now.step
        if run.validation is None:
            return
        with self.now.optimizer.apply_eval_mode():
            load = run.load_held or run.load
            by_sigma = run.validation.measure(run.learner, run.differentiator.objective, load, run.ranks)
            yield events.ValidationMeasured(self.now.step, sum(by_sigma.values()) / len(by_sigma), by_sigma)
            if run.ranks.main:
                ranges = run.validation.ranges(run.learner, run.differentiator.objective, load)
                yield events.RangesMeasured(self.now.step, ranges)

    def preview(self) -> Iterator[events.TrainingEvent]:
        """Draw; what goes wrong there is told, and the run goes on."""
        draw, begin = self.run.hooks.preview, time.perf_counter()
        if draw is None or not self.run.ranks.main:
            return
        self.run.learner.train(False)
        self.run.learner.strength(1.0)
        try:
            with self.now.optimizer.apply_eval_mode():
                paths = draw(self.now.step)
            yield events.PreviewsDrawn(self.now.step, paths, time.perf_counter() - begin)
        except Exception as error:
            yield events.FindingRaised(self.now.step, make_preview_failed_finding(error))


def clone_tensor_tree(tree: Any) -> Any:
    """A tree of tensors and plain values with tensors of its own."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
