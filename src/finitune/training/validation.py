"""The loss on pictures kept out, at fixed sigmas and with fixed noise: the same question each time.

A random sigma would drown the answer: the loss varies tenfold over sigma and hardly at all over a training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from finitune.datasets.items import MicroBatch, TrainingBatch
from finitune.precision.probe import probe
from finitune.training.adapted_model import AdaptedModel
from finitune.training.objective import FlowObjective
from finitune.training.ranks import ProcessRanks

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


def average_sigma_losses(by_sigma: dict[float, float]) -> float:
    return sum(by_sigma.values()) / len(by_sigma)
