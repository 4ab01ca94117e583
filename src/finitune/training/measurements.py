"""What is measured besides the training itself: one step before the first, and the loss on pictures kept out.

**The trial step** says whether the run will fit, and how long it takes: one real step at the largest bucket, with
everything put back.

**Validation** is at fixed sigmas and with fixed noise: the same question each time. A random sigma would drown the
answer: the loss varies tenfold over sigma and hardly at all over a training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from finitune.config.schema import TrainConfig
from finitune.datasets.items import MicroBatch, TrainingBatch
from finitune.machine.reading import read_cgroup_memory
from finitune.precision.probe import probe
from finitune.report import Finding, Level
from finitune.training.adapted_model import AdaptedModel
from finitune.training.checkpoint import get_random_states, restore_random_states
from finitune.training.events import TrialStepMeasured
from finitune.training.objective import FlowObjective
from finitune.training.optimizers import OptimizerHandle
from finitune.training.ranks import ProcessRanks
from finitune.training.step import GradientAccumulator

_SAFE_MEMORY_SHARE = 0.92
"""The share of a GPU's memory up to which a run is called safe: the rest is the driver's, and fragments."""
_MEMORY_SAVING_OPTIONS: tuple[tuple[str, str, Callable[[TrainConfig], bool]], ...] = (
    (
        "training.gradient_checkpointing = true",
        "activations of one block at a time instead of all",
        lambda config: not config.training.gradient_checkpointing,
    ),
    (
        "training.train_batch_size = 1, with more gradient_accumulation_steps",
        "fewer pictures at once",
        lambda config: config.training.train_batch_size > 1,
    ),
    ("model.storage = 'fp8'", "half of the frozen weights", lambda config: config.model.storage != "fp8"),
    (
        "training.offload_blocks, as many as the model has",
        "one of these blocks on the GPU at a time",
        lambda config: not config.training.offload_blocks,
    ),
    ("a lower resolution", "fewer tokens", lambda config: True),
)
"""What makes a run smaller, from the least to the largest loss in speed or quality, and whether it is left to do."""


@dataclass(frozen=True)
class PeakMemoryTracker:
    """How much memory of a device is taken: the peak since `reset`, and what there is; None where nobody knows."""

    device: torch.device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Bytes: of the GPU since `reset`; of the process over its life on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        try:
            import resource
        except ImportError:  # Windows
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def total(self) -> int | None:
        """Bytes that could be had: of the GPU; on a CPU those of the machine, or what a container is given of them."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[1]
        try:
            import psutil
        except ImportError:
            return None
        machine, limit = psutil.virtual_memory().total, read_cgroup_memory()[0]
        return machine if limit is None else min(machine, limit)


def measure_trial_step(
    differentiator: GradientAccumulator,
    make_optimizer: Callable[[], OptimizerHandle],
    batches: Sequence[TrainingBatch],
    save: Callable[[], object],
    preview: Callable[[], object] | None,
) -> TrialStepMeasured:
    """A step on `batches` and a save, timed; then, with the adapter's numbers put back, a preview. The optimiser is
    thrown away, and the generators go on as if nothing had been drawn.
    """
    learner, memory = differentiator.learner, PeakMemoryTracker(differentiator.ranks.device)
    before, chance = learner.tensors(), get_random_states()
    memory.reset()
    try:
        optimizer = make_optimizer()

        def take_step() -> None:
            if differentiator.gradient(batches, step=-1).finite:
                optimizer.step()

        seconds = [time_training_work(take_step) for _ in range(2)]
        saving = time_training_work(save)
    finally:
        learner.restore(before)
        for _, parameter in learner.named_parameters():
            parameter.grad = None
    learner.train(False)
    learner.strength(1.0)
    previewing = time_training_work(preview) if preview else None
    restore_random_states(chance)
    largest = max(batches, key=lambda batch: batch.latents.numel())
    height, width = (8 * side for side in largest.latents.shape[-2:])
    return TrialStepMeasured(
        step_seconds=seconds[-1],  # the first one compiles and fills pools
        save_seconds=saving,
        preview_seconds=previewing,
        memory_peak=memory.peak(),
        memory_total=memory.total(),
        bucket=(width, height),
        batch=len(largest),
        split=differentiator.split,
    )


def time_training_work(work: Callable[[], object]) -> float:
    """Seconds that `work` takes, to the end of what it has put on a GPU."""
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def check_memory_fit(measured: TrialStepMeasured, config: TrainConfig) -> Finding:
    """Whether the run fits, with the numbers, and what is left to make it smaller where it does not, or hardly does."""
    total, peak = measured.memory_total, measured.memory_peak
    share = peak / total if total else 0.0
    evidence: dict[str, object] = {"peak_bytes": peak, "total_bytes": total, "split": measured.split}
    width, height = measured.bucket
    what = f"a step at {width} x {height} with {measured.batch} pictures took {peak / 2**30:.2f} GiB at its peak"
    if measured.split > 1:
        what += f", in {measured.split} parts, because memory was short"
    if share <= _SAFE_MEMORY_SHARE and measured.split == 1:
        of = f" of {total / 2**30:.2f}" if total else ""
        return Finding(Level.NOTE, "FITS", "memory", what + of, evidence)
    if total and share > _SAFE_MEMORY_SHARE:
        what += f" of {total / 2**30:.2f}: {(peak - _SAFE_MEMORY_SHARE * total) / 2**30:.2f} more than is safe"
    options = "; ".join(f"{option} ({why})" for option, why, is_left in _MEMORY_SAVING_OPTIONS if is_left(config))
    return Finding(Level.WARNING, "FITS-BARELY", "memory", what, evidence, f"The least change first: {options}.")


_BatchLoad = Callable[[MicroBatch], TrainingBatch | None]


@dataclass(frozen=True)
class HeldOutValidation:
    """Micro-batches of pictures kept out, each sample with a place of its own for its noise."""

    batches: Sequence[MicroBatch]
    sigmas: tuple[float, ...]
    seed: int

    @torch.no_grad()
    def measure(
        self, learner: AdaptedModel, objective: FlowObjective, load: _BatchLoad, ranks: ProcessRanks
    ) -> dict[float, float]:
        """{sigma: mean loss} over all pictures; the work is shared among the processes, the result is everybody's."""
        sums = torch.zeros(len(self.sigmas) + 1, dtype=torch.float64)
        learner.train(False)
        for place, micro in enumerate(self.batches):
            batch = load(micro) if place % ranks.world == ranks.rank else None
            if batch is None:
                continue
            learner.strength(batch.multiplier)
            for i, sigma in enumerate(self.sigmas):
                lesson = objective.at(batch, sigma, self.seed)
                velocity = learner.denoiser(lesson.x_t, lesson.sigma, batch.conditioning)
                sums[i] += objective.losses(lesson, velocity, batch).double().sum().cpu()
            sums[-1] += len(batch)
        total = ranks.add(sums.float().to(ranks.device)).double().cpu()
        learner.train(True)
        return {sigma: float(total[i] / total[-1]) for i, sigma in enumerate(self.sigmas)}

    @torch.no_grad()
    def ranges(self, learner: AdaptedModel, objective: FlowObjective, load: _BatchLoad) -> dict[str, float]:
        """The largest magnitude that leaves each block of the denoiser on the first pictures, over all sigmas."""
        batch = load(self.batches[0])
        root = learner.precisions[learner.denoiser_name].module
        if batch is None:
            return {}
        learner.train(False)
        with probe(root) as found:
            for sigma in self.sigmas:
                lesson = objective.at(batch, sigma, self.seed)
                learner.denoiser(lesson.x_t, lesson.sigma, batch.conditioning)
        learner.train(True)
        return {site: amax for site, amax in found.amax.items() if site.rpartition(".")[0].endswith("blocks")}
