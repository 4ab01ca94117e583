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

from finitune.adapters import AdapterSet
from finitune.datasets.items import Batch, seed_of
from finitune.errors import NumericsError
from finitune.report import Finding, Level
from finitune.training import events
from finitune.training.guard import CODES, Action, Evidence, Verdict, demand_fp32_masters, first_nonfinite
from finitune.training.measure import Memory
from finitune.training.run import Progressing, Run
from finitune.training.schedules import set_rates
from finitune.training.silence import fingerprints
from finitune.training.state import save_state
from finitune.training.step import Gradient
from finitune.training.validation import mean

BEYOND_PLAN = "PLAN-EXCEEDED"
MEMORY_SHORT = "MEMORY-HALVED"


@dataclass(frozen=True)
class Snapshot:
    """A good state in memory."""

    step: int
    taken: int
    adapter: Mapping[str, Tensor]
    optimizer: Any
    average: Any


class Trainer:
    """A run in progress: iterate over `events()`."""

    def __init__(self, run: Run, progressing: Progressing):
        self.run, self.now = run, progressing
        self.memory = Memory(run.ranks.device)
        self.named = dict(run.learner.named_parameters())
        self.saved: Mapping[str, Path] = {}
        self.saved_at = self.measured_at = -1
        self.split = run.differentiator.split
        self.replayed_from = -1
        demand_fp32_masters(self.named.items())
        self.snapshot = self.take_snapshot()

    def events(self) -> Iterator[events.Event]:
        """Everything that happens until the end; the last event is Finished."""
        run, reason = self.run, "done"
        run.ranks.demand_same("pictures or captions", run.manifest.dataset, "datasets")
        self.demand_agreement()
        yield self.started()
        if self.now.step == 0:
            yield from self.validation()
        while self.now.step < run.total_steps:
            verdict = yield from self.one_step()
            if verdict.action is Action.STOP:
                reason = "given up"
                yield self.go_back(verdict.reason)
                break
            if verdict.action is Action.ROLLBACK:
                continue
            yield from self.whatever_is_due()
            if any(run.ranks.gathered(run.hooks.stop())):
                reason = "stopped"
                break
        if reason == "done" or (self.now.taken and self.saved_at != self.now.step):
            yield from self.save(final=reason == "done")
        if reason == "done" and self.measured_at != self.now.step:
            yield from self.validation()
        yield events.Finished(self.now.step, self.epoch, reason, self.saved)

    @property
    def epoch(self) -> int:
        """Whole epochs that are over."""
        return self.now.step // self.run.course.steps_per_epoch

    def started(self) -> events.Started:
        """The arithmetic of the run."""
        training = self.run.config.training
        return events.Started(
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
        beyond = not gradient.finite and self.anywhere(now.planned and self.inputs_finite(gradient))
        if beyond and (yield from self.leave_the_plan(step)):
            gradient = self.gradient(step)
        yield from self.memory_told(step)
        if step % run.course.steps_per_epoch == 0:
            now.meter.start_epoch()
        if not gradient.samples:
            now.step = step + 1
            return Verdict(Action.OK, "every picture of the step is left out")
        evidence = self.evidence(gradient, step)
        verdict = now.guard.judge(evidence)
        rate = run.rate_of(step)
        if verdict.action is Action.OK:
            if step % run.config.guard.snapshot_every == 0 and first_nonfinite(self.named.items()) is None:
                self.snapshot = self.take_snapshot()  # before the update: what has just been finite all the way
            self.update(gradient, rate)
        now.meter.add(gradient.loss)
        now.step = step + 1
        yield self.stepped(gradient, rate, verdict, time.perf_counter() - begin)
        yield from self.told(gradient, evidence, verdict, step)
        if verdict.action is Action.ROLLBACK:
            yield self.go_back(verdict.reason)
        return verdict

    def gradient(self, step: int) -> Gradient:
        """The gradient of a step over all processes."""
        run = self.run
        excluded = frozenset(self.now.guard.quarantined)
        batches = [run.load(micro, excluded) for micro in run.course.micro_batches_of(step, run.ranks.rank)]
        rounds = len(run.course.micro_batches_of(step, 0))  # at the end of an epoch others may have one less
        return run.differentiator.gradient([*batches, *[None] * (rounds - len(batches))], step, self.now.attempt)

    def memory_told(self, step: int) -> Iterator[events.Event]:
        """Say so where memory was short at this step, and what follows from it."""
        before, self.split = self.split, self.run.differentiator.split
        if self.split > before:
            message = f"memory was short: micro-batches go through in {self.split} parts from now on"
            remedy = (
                "The gradient is the same. A smaller train_batch_size, or gradient_checkpointing, saves the attempt."
            )
            facts: dict[str, object] = {"step": step, "split": self.split}
            yield events.Told(step, Finding(Level.WARNING, MEMORY_SHORT, f"step {step}", message, facts, remedy))

    def anywhere(self, here: bool) -> bool:
        """Whether it is so in any process."""
        return any(self.run.ranks.gathered(here))

    def inputs_finite(self, gradient: Gradient) -> bool:
        """Whether latents, texts and adapter are finite, so that the arithmetic itself must have failed."""
        tensors = [tensor for batch in gradient.batches for tensor in (batch.latents, *batch.conditioning.values())]
        return first_nonfinite(("", tensor) for tensor in (*tensors, *self.named.values())) is None

    def leave_the_plan(self, step: int) -> Generator[events.Event, None, bool]:
        """Measure every scale from now on, where a plan's constants were exceeded, and say so; whether any was."""
        sites = self.run.learner.give_up_plans()
        self.now.planned = False
        if sites:
            message = f"the plan's constants were exceeded: {len(sites)} products measure their own scales from now on"
            remedy = "The step is taken again. Plan on prompts of this dataset for the next run, or use current-half."
            yield events.Told(step, Finding(Level.WARNING, BEYOND_PLAN, "model.plan", message, {"step": step}, remedy))
        return bool(sites)

    def evidence(self, gradient: Gradient, step: int) -> Evidence:
        """What everybody knows of a step; the search for the guilty begins only where something is wrong."""
        if gradient.finite:
            return Evidence(step)
        weight = first_nonfinite(self.named.items())
        loss_finite = math.isfinite(gradient.loss)
        raw = [(name, parameter.grad) for name, parameter in self.named.items() if loss_finite]
        where = str(weight or first_nonfinite(raw) or "")
        suspects = gradient.bad
        if not self.anywhere(weight is not None or bool(suspects)):
            suspects = self.run.differentiator.alone(gradient.batches, step, self.now.attempt)
        base = self.run.base_nonfinite() if not self.now.guard.good else ""
        sound = weight is not None or not self.finite_before(gradient.batches, suspects, step)
        if not sound:
            where = f"it is with the adapter of step {self.snapshot.step}"
        own = Evidence(
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
        return Evidence.merged(self.run.ranks.gathered(own))

    def finite_before(self, batches: Sequence[Batch], suspects: Sequence[str], step: int) -> bool:
        """Whether any of this process's suspects is finite with the last good adapter: then not they are to blame."""
        if self.now.taken == self.snapshot.taken:
            return False
        now = self.run.learner.tensors()
        self.run.learner.restore(self.snapshot.adapter)
        accused = [batch.part(i, i + 1) for batch in batches for i, name in enumerate(batch.names) if name in suspects]
        guilty = self.run.differentiator.alone(accused, step, self.now.attempt)
        self.run.learner.restore(now)
        return len(guilty) < len(accused)

    def update(self, gradient: Gradient, rate: float) -> None:
        """Cut the gradient, set the rates, take the step, and what follows a step that was taken."""
        run, now = self.run, self.now
        limit = run.config.optimizer.max_grad_norm
        if limit and gradient.norm > limit:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / gradient.norm)
        set_rates(now.optimizer, rate)
        torch.manual_seed(seed_of(run.config.training.seed, now.step, now.attempt, "update"))
        now.optimizer.step()  # some draw random numbers: the same in all processes
        now.taken += 1
        norms = run.config.network.scale_weight_norms
        if norms:
            run.learner.limit_norms(norms)
        if now.average:
            now.average.update()

    def told(self, gradient: Gradient, evidence: Evidence, verdict: Verdict, step: int) -> Iterator[events.Event]:
        """What should be known of a step."""
        now = self.now
        if verdict.action is not Action.OK:
            yield events.Told(step, judged(verdict, evidence))
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
        yield from (events.Told(step, finding) for finding in (spike, silent) if finding)

    def stepped(self, gradient: Gradient, rate: float, verdict: Verdict, seconds: float) -> events.Stepped:
        """The event of a step."""
        now = self.now
        return events.Stepped(
            step=now.step,
            epoch=self.epoch,
            loss=gradient.loss,
            smoothed=now.meter.smoothed if now.meter.smoothed is not None else float("nan"),
            rate=rate * self.run.config.optimizer.learning_rate,
            grad_norm=gradient.norm,
            seconds=seconds,
            taken=verdict.action is Action.OK,
            counts=now.guard.counts(),
            memory=self.memory.peak(),
        )

    def take_snapshot(self) -> Snapshot:
        """The state as it is, in memory."""
        now = self.now
        average = now.average.state_dict() if now.average else None
        return Snapshot(
            now.step, now.taken, self.run.learner.tensors(), copied(now.optimizer.state_dict()), copied(average)
        )

    def go_back(self, reason: str) -> events.RolledBack:
        """Back to the last good state; steps taken again for the second time draw other noise."""
        now, good = self.now, self.snapshot
        left = now.step
        self.run.learner.restore(good.adapter)
        now.optimizer = self.run.make_optimizer()
        now.optimizer.load_state_dict(copied(good.optimizer))
        if now.average:
            now.average.load_state_dict(copied(good.average))
        now.step, now.taken = good.step, good.taken
        now.attempt += self.replayed_from == good.step
        self.replayed_from = good.step
        return events.RolledBack(left, good.step, reason)

    def whatever_is_due(self) -> Iterator[events.Event]:
        """Files first, then what could fail: a measurement, a preview."""
        config, step = self.run.config, self.now.step
        ends = step % self.run.course.steps_per_epoch == 0 or step == self.run.total_steps
        if self.due(config.saving.save_every_n_steps, config.saving.save_every_n_epochs, ends):
            yield from self.save(final=False)
        if self.validation_is_due():
            yield from self.validation()
        if self.due(config.preview.sample_every_n_steps, config.preview.sample_every_n_epochs, ends):
            yield from self.preview()

    def due(self, steps: int | None, epochs: int | None, ends: bool) -> bool:
        """Whether something that happens every so many steps or epochs is due now."""
        return bool(steps and self.now.step % steps == 0) or bool(epochs and ends and self.epoch % epochs == 0)

    def save(self, final: bool) -> Iterator[events.Event]:
        """Write the adapter, have it checked, write the state; the main process writes, all of them agree before."""
        run, now, begin = self.run, self.now, time.perf_counter()
        self.demand_agreement()
        at_epoch = now.step % run.course.steps_per_epoch == 0 and bool(run.config.saving.save_every_n_epochs)
        where = {"epoch": self.epoch} if at_epoch else {"step": now.step}
        path = run.folder.adapter_path(run.config.saving.output_name, **({} if final else where))
        paths: Mapping[str, Path] = {}
        if run.ranks.main:
            paths = run.hooks.export(self.adapter(), path, {"step": now.step, "epoch": self.epoch, "taken": now.taken})
            if run.config.saving.save_state:
                state = run.folder.state_path(run.config.saving.output_name, None if final else now.step)
                save_state(state, now.state(run), run.manifest)
                paths = {**paths, "state": state}
            if run.config.saving.save_last_n:
                run.folder.prune(run.config.saving.save_last_n)
        self.saved, self.saved_at = run.ranks.of_main(paths), now.step
        yield events.Saved(now.step, self.epoch, self.saved, time.perf_counter() - begin)

    def adapter(self) -> AdapterSet:
        """The adapter to write: its average where there is one, as the optimiser wants it to be used."""
        now = self.now
        with now.optimizer.evaluating():
            if now.average is None:
                return self.run.learner.adapter()
            with now.average.swapped():
                return self.run.learner.adapter()

    def demand_agreement(self) -> None:
        """Raise NumericsError (RANKS-DIFFER) where the processes hold different adapters, or averages of them."""
        if self.run.ranks.world > 1:
            averages = self.now.average.sums.values() if self.now.average else ()
            own = (self.now.step, fingerprints([*self.named.values(), *averages]))
            self.run.ranks.demand_same("adapters", own, f"step {self.now.step}")

    def validation_is_due(self) -> bool:
        """Whether the pictures kept out are to be measured on now: once an epoch where nothing is said."""
        settings = self.run.config.validation
        epochs = settings.validate_every_n_epochs or (None if settings.validate_every_n_steps else 1)
        return self.due(settings.validate_every_n_steps, epochs, self.now.step % self.run.course.steps_per_epoch == 0)

    def validation(self) -> Iterator[events.Event]:
        """Measure the loss on the pictures kept out, where there are some, and the ranges of the denoiser on one."""
        run = self.run
        self.measured_at = self.now.step
        if run.validation is None:
            return
        with self.now.optimizer.evaluating():
            load = run.load_held or run.load
            by_sigma = run.validation.measure(run.learner, run.differentiator.objective, load, run.ranks)
            yield events.Validated(self.now.step, mean(by_sigma), by_sigma)
            if run.ranks.main:
                yield events.Ranged(
                    self.now.step, run.validation.ranges(run.learner, run.differentiator.objective, load)
                )

    def preview(self) -> Iterator[events.Event]:
        """Draw; what goes wrong there is told, and the run goes on."""
        draw, begin = self.run.hooks.preview, time.perf_counter()
        if draw is None or not self.run.ranks.main:
            return
        self.run.learner.train(False)
        self.run.learner.strength(1.0)
        try:
            with self.now.optimizer.evaluating():
                paths = draw(self.now.step)
            yield events.Previewed(self.now.step, paths, time.perf_counter() - begin)
        except Exception as error:
            yield events.Told(self.now.step, preview_failed(error))


def preview_failed(error: Exception) -> Finding:
    """The finding of a preview that could not be drawn."""
    message = f"the preview failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    remedy = "The run goes on, and its files are safe. Draw later: finitune generate MODEL --adapter FILE"
    return Finding(Level.WARNING, "PREVIEW-FAILED", "preview", message, {}, remedy)


def judged(verdict: Verdict, evidence: Evidence) -> Finding:
    """The finding of a step that did not reach the adapter."""
    level = Level.ERROR if verdict.action is Action.STOP else Level.WARNING
    subject = ", ".join(verdict.names[:3]) or evidence.where or f"step {evidence.step}"
    facts: dict[str, object] = {"step": evidence.step, "where": evidence.where, "names": list(verdict.names[:5])}
    return Finding(level, CODES[verdict.action], subject, verdict.reason, facts)


def copied(tree: Any) -> Any:
    """A tree of tensors and plain values with tensors of its own."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
