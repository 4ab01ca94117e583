"""One optimiser step's gradient: micro-batches in, sums over all processes out, and who is to blame where it fails.

The loss of a step is the mean over its samples, whichever devices and micro-batches they went through: gradients are
added up as sums, in the order of the micro-batches in the step, and divided by the number of samples once, at the end.
So two processes get the bits of one that accumulates twice. Chance is drawn by address, dropout's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finitune.datasets.items import TrainingBatch, derive_seed
from finitune.errors import NumericsError
from finitune.training.adapted_model import AdaptedModel
from finitune.training.objective import FlowObjective
from finitune.training.ranks import OrderedSum, ProcessRanks

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass
class StepGradient:
    """The gradient of one step, in the parameters' `.grad`, and what it says of itself.

    `loss` is the mean over `samples` of all processes; `finite` tells whether loss and gradient are; `bad` are this
    process's samples whose loss is not, `missing` the parameters that got no gradient at all.
    """

    loss: float
    samples: int
    norm: float
    finite: bool
    bad: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    batches: list[TrainingBatch] = field(default_factory=list)


@dataclass
class GradientAccumulator:
    """Gradients of a learner; `split` cuts each micro-batch into so many parts, where memory was short."""

    learner: AdaptedModel
    objective: FlowObjective
    ranks: ProcessRanks
    seed: int
    split: int = 1

    def gradient(self, batches: Sequence[TrainingBatch | None], step: int, attempt: int = 0) -> StepGradient:
        """The gradient over the micro-batches of all processes; raises where memory does not suffice for one sample.

        `batches` are those of this process, None where one is left out. All processes give as many.
        """
        named = self.learner.named_parameters()
        parameters = [parameter for _, parameter in named]
        total, losses, reached = OrderedSum(self.ranks), [], set[str]()
        for batch in batches:
            own = self.backward(batch, step, attempt)
            losses.append(own)
            reached |= {name for name, parameter in named if parameter.grad is not None}
            total.add(flatten_gradients(parameters, [float(own.sum()), float(len(own))], self.ranks.device))
        kept = [batch for batch in batches if batch is not None]
        names = tuple(name for batch in kept for name in batch.names)
        fine = torch.cat(losses).isfinite().tolist()
        flat = total.value()
        loss_sum, samples = float(flat[-2]), int(flat[-1])
        gradients = flat[:-2].div_(max(samples, 1))
        norm = float(torch.linalg.vector_norm(gradients))
        assign_gradients(parameters, gradients)
        loss = loss_sum / samples if samples else float("nan")
        return StepGradient(
            loss=loss,
            samples=samples,
            norm=norm,
            finite=bool(torch.isfinite(torch.tensor([loss, norm])).all()),
            bad=tuple(name for name, is_fine in zip(names, fine, strict=True) if not is_fine),
            names=names,
            missing=tuple(name for name, _ in named if names and name not in reached),
            batches=kept,
        )

    def backward(self, batch: TrainingBatch | None, step: int, attempt: int) -> Tensor:
        """The gradient of the sum of a batch's losses, in `.grad`, in as many parts as memory asks for; the weighted
        losses (B,), on the CPU. None has neither.
        """
        while True:
            for _, parameter in self.learner.named_parameters():
                parameter.grad = None
            try:
                parts = [] if batch is None else split_batch(batch, self.split)
                return torch.cat([torch.zeros(0), *(self.accumulate(part, step, attempt) for part in parts)])
            except (RuntimeError, MemoryError) as error:
                self.halve(error, 0 if batch is None else len(batch))

    def accumulate(self, batch: TrainingBatch, step: int, attempt: int) -> Tensor:
        """Add the gradient of a batch's losses to `.grad`; the losses."""
        self.learner.train(True)
        self.learner.seed_dropout(*((self.seed, step, attempt, place) for place in batch.places))
        torch.manual_seed(derive_seed(self.seed, step, attempt, batch.places[0]))  # for a model that draws by itself
        losses = self.losses(batch, step, attempt)
        if losses.requires_grad:  # not where module_dropout has left every adapter out
            losses.sum().backward()
        return losses.detach().cpu()

    def losses(self, batch: TrainingBatch, step: int, attempt: int = 0) -> Tensor:
        """The weighted losses (B,) fp32 of a batch, with gradient."""
        self.learner.strength(batch.multiplier)
        lesson = self.objective.draw(batch, (self.seed, attempt) if attempt else self.seed, step)
        velocity = self.learner.denoiser(lesson.x_t, lesson.sigma, batch.conditioning)
        return self.objective.losses(lesson, velocity, batch) * batch.weights

    def find_nonfinite_samples(self, batches: Sequence[TrainingBatch], step: int, attempt: int = 0) -> tuple[str, ...]:
        """The samples of this process whose loss or gradient is not finite on its own."""
        guilty: list[str] = []
        for batch in batches:
            for i, name in enumerate(batch.names):
                loss = self.backward(batch.part(i, i + 1), step, attempt)
                norms = [
                    parameter.grad for _, parameter in self.learner.named_parameters() if parameter.grad is not None
                ]
                if not bool(loss.isfinite().all()) or not all(bool(grad.isfinite().all()) for grad in norms):
                    guilty.append(name)
        return tuple(guilty)

    def halve(self, error: BaseException, largest: int) -> None:
        """Cut micro-batches into twice as many parts after a lack of memory; raises what is something else."""
        if not is_out_of_memory(error):
            raise error
        if self.split >= largest:
            raise NumericsError(
                "one sample at a time does not fit into memory",
                code="OUT-OF-MEMORY",
                subject="training",
                evidence={"split": self.split, "error": str(error).splitlines()[0]},
                remedy="Set gradient_checkpointing = true, storage = 'fp8', offload_blocks, or a lower resolution.",
            ) from error
        self.split *= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in text for words in _OUT_OF_MEMORY_PHRASES
    )


def split_batch(batch: TrainingBatch, split: int) -> list[TrainingBatch]:
    """A batch in at most `split` parts of nearly equal size."""
    size = -(-len(batch) // split)
    return [batch.part(begin, min(begin + size, len(batch))) for begin in range(0, len(batch), size)]


def flatten_gradients(parameters: Sequence[torch.nn.Parameter], facts: Sequence[float], device: torch.device) -> Tensor:
    """All gradients (zeros where there is none) and a few numbers as one fp32 vector, to be added up at once."""
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = [piece.detach().float().flatten() for piece in pieces]
    return torch.cat([*flat, torch.tensor(list(facts), dtype=torch.float32, device=device)])


def assign_gradients(parameters: Sequence[torch.nn.Parameter], flat: Tensor) -> None:
    place = 0
    for parameter in parameters:
        count = parameter.numel()
        parameter.grad = flat[place : place + count].view_as(parameter)
        place += count
