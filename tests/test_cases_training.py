"""Trainings from the field (NAN-05, NAN-07, RES-05, DDP-04, BLK-05): each report's own repro, and what is right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finitune.config.schema import GuardSection, ObjectiveSection
from finitune.errors import NumericsError
from finitune.report import Finding, Level
from finitune.training.guard import GuardAction, StepEvidence, TrainingGuard, find_first_nonfinite, require_fp32_masters
from finitune.training.objective import compute_sample_losses
from finitune.training.telemetry import NoTrainingDetector, RunningLoss, digest_tensors

NAN = math.nan
OK, SKIP, QUARANTINE, ROLLBACK, STOP = GuardAction


def guard_of(examples: int = 100, **options) -> TrainingGuard:
    return TrainingGuard(GuardSection(**options), examples)


# --- NAN-05: fp16 parameters meet the gradient scaler, often only on resume ------------------------------------------


def test_nan_05_half_masters_are_refused_before_the_first_step_and_named():
    layer = nn.Linear(4, 4).half()
    with pytest.raises(NumericsError) as caught:
        require_fp32_masters(layer.named_parameters())
    assert caught.value.code == "MASTERS-NOT-FP32"
    assert caught.value.subject == "weight"
    assert caught.value.evidence == {"tensors": 2, "dtypes": ["torch.float16"]}
    assert "torch.float32" in caught.value.remedy


def test_nan_05_fp32_masters_take_a_step():
    layer = nn.Linear(4, 4)
    require_fp32_masters(layer.named_parameters())
    before = digest_tensors(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert digest_tensors(layer.parameters()) != before


def test_nan_05_a_step_with_an_infinite_gradient_does_not_reach_the_weights():
    layer = nn.Linear(4, 4)
    before = digest_tensors(layer.parameters())
    layer(torch.full((1, 4), 1e38)).sum().mul(10).backward()
    found = find_first_nonfinite((name, p.grad) for name, p in layer.named_parameters())
    evidence = StepEvidence(0, ("a.png",), gradient_finite=found is None, where=str(found))
    verdict = guard_of().judge(evidence)
    assert verdict.action is SKIP
    assert "weight, element 0: inf" in verdict.reason
    assert digest_tensors(layer.parameters()) == before


# --- NAN-07: loss=nan for hours, and the file is still saved ---------------------------------------------------------


def fake_run(losses: list[float], **options) -> tuple[list[GuardAction], TrainingGuard, RunningLoss]:
    """Losses through the guard and the meter, as a loop with one picture a step has them."""
    guard, meter, taken = guard_of(**options), RunningLoss(), []
    for step, loss in enumerate(losses):
        meter.add(loss)
        taken.append(guard.judge(StepEvidence(step, (f"{step}.png",), loss_finite=math.isfinite(loss))).action)
    return taken, guard, meter


def test_nan_07_a_run_of_nan_goes_back_and_then_stops():
    taken, guard, meter = fake_run([1.0] * 5 + [NAN] * 15, max_skips=3, max_rollbacks=2)
    bad = [SKIP, SKIP, SKIP, ROLLBACK, SKIP, SKIP, SKIP, ROLLBACK, SKIP, SKIP, SKIP, STOP, STOP, STOP, STOP]
    assert taken == [OK] * 5 + bad
    (stop, *_) = guard.findings()
    assert (stop.level, stop.code, stop.subject) == (Level.ERROR, "GUARD-STOPPED", "step 16")
    assert "16.png" in stop.message
    assert (meter.mean, meter.last, meter.count, meter.nonfinite) == (1.0, 1.0, 5, 15)
    assert meter.smoothed == pytest.approx(1.0)


def test_nan_07_the_default_patience_is_sixteen_steps():
    taken, _, _ = fake_run([1.0] * 5 + [NAN] * 20)
    assert taken.index(STOP) - 5 + 1 == 16
    assert OK not in taken[5:]


def test_nan_07_a_single_nan_is_skipped_and_the_average_goes_on():
    losses = [1.0, NAN, *[1.0] * 18]
    taken, guard, meter = fake_run(losses)
    assert taken == [OK, SKIP, *[OK] * 18]
    assert meter.mean == 1.0
    assert guard.counts() == {"ok": 19, "skipped": 1, "rolled_back": 0, "quarantined": 0}
    assert math.isnan(sum(losses) / len(losses))  # what is shown elsewhere, to the end


def test_nan_07_a_non_finite_adapter_is_named_before_it_can_be_saved():
    adapter = {"blocks.3.attn.up": torch.zeros(2, 4), "blocks.3.attn.down": torch.ones(4, 2)}
    adapter["blocks.3.attn.down"][2, 1] = NAN
    found = find_first_nonfinite(adapter.items())
    assert str(found) == "blocks.3.attn.down, element 5: nan"
    assert guard_of().judge(StepEvidence(9, weights_finite=False, where=str(found))).action is ROLLBACK


# --- RES-05: nothing is learned ---------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer and its low-rank change."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def trained(model: nn.Module, rate: float, forward: Callable[[Tensor], Tensor], own: bool = True) -> Iterator[Finding]:
    """What is said in 20 updates; the optimiser holds the model's parameters, or copies of them."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = list(named.values()) if own else copy.deepcopy(list(named.values()))
    optimizer, silence = torch.optim.SGD(held, lr=rate), NoTrainingDetector(named)
    for update in range(1, 21):
        loss = (forward(torch.randn(8, 4)) - 1).square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        gradients = {name: parameter.grad for name, parameter in named.items()}
        finding = silence.watch(update, gradients, [group["lr"] for group in optimizer.param_groups])
        if finding:
            yield finding


def test_res_05_a_cut_graph_is_an_error_after_the_first_update():
    model = Adapted()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        findings = list(trained(model, 0.1, lambda x: checkpoint(model, x, use_reentrant=True)))
    (finding,) = findings
    assert (finding.level, finding.code) == (Level.ERROR, "TRAINS-NOTHING")
    assert finding.message == "no gradient reached any trained tensor"
    assert finding.evidence == {"parameters": 2, "without gradient": 2, "first": ["down", "up"]}
    assert "non-reentrant" in finding.remedy


def test_res_05_the_other_checkpointing_learns():
    model = Adapted()
    assert list(trained(model, 0.1, lambda x: checkpoint(model, x, use_reentrant=False))) == []
    assert model.up.any()


def test_res_05_an_optimiser_over_copies_is_an_error_after_the_second_update():
    model = Adapted()
    (finding,) = trained(model, 0.1, model, own=False)
    assert finding.level is Level.ERROR
    assert finding.message == "none of 2 trained tensors changed in 2 updates"
    assert "optimiser does not hold them" in finding.remedy
    assert not model.up.any()


def test_res_05_a_rate_of_zero_is_an_error_that_says_so():
    model = Adapted()
    (finding,) = trained(model, 0.0, model)
    assert (finding.level, finding.subject) == (Level.ERROR, "optimizer.learning_rate")
    assert "the learning rate is 0" in finding.message


def test_res_05_one_module_that_is_not_used_is_a_warning_with_its_name():
    model = nn.ModuleDict({"used": Adapted(), "unused": Adapted()})
    (finding,) = trained(model, 0.1, model["used"])
    assert (finding.level, finding.code) == (Level.WARNING, "TRAINS-NOTHING")
    assert finding.evidence["first"] == ["unused.down", "unused.up"]
    assert finding.evidence["first sites"] == ["unused"]


# --- DDP-04: a NaN in one process poisons all ------------------------------------------------------------------------


def replicas(world: int = 2) -> list[nn.Linear]:
    first = nn.Linear(3, 1)
    return [first, *(copy.deepcopy(first) for _ in range(world - 1))]


def parallel_step(models: list[nn.Linear], inputs: list[Tensor], decide: Callable[[list[StepEvidence]], list[bool]]):
    """Gradients averaged over all processes, then each process's update where `decide` lets it through."""
    losses = [model(x).square().mean() for model, x in zip(models, inputs, strict=True)]
    gradients = [torch.autograd.grad(loss, list(m.parameters())) for m, loss in zip(models, losses, strict=True)]
    mean = [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]
    evidence = [
        StepEvidence(3, (f"rank{rank}.png",), loss_finite=bool(loss.isfinite()), gradient_finite=True)
        for rank, loss in enumerate(losses)
    ]
    for model, update in zip(models, decide(evidence), strict=True):
        if update:
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), mean, strict=True):
                    parameter -= 0.1 * gradient


def agree(models: list[nn.Linear]) -> bool:
    return len({tuple(digest_tensors(model.parameters())) for model in models}) == 1


def test_ddp_04_all_processes_skip_the_step_that_is_bad_for_one():
    models, guards = replicas(), [guard_of(), guard_of()]
    before = digest_tensors(models[0].parameters())

    def shared(evidence: list[StepEvidence]) -> list[bool]:
        return [guard.judge(StepEvidence.merged(evidence)).action is OK for guard in guards]

    poisoned = [torch.ones(2, 3), torch.full((2, 3), NAN)]
    parallel_step(models, poisoned, shared)
    assert agree(models)
    assert digest_tensors(models[0].parameters()) == before
    parallel_step(models, [torch.ones(2, 3), torch.zeros(2, 3)], shared)
    assert agree(models)
    assert digest_tensors(models[0].parameters()) != before
    assert guards[0] == guards[1]


def test_ddp_04_a_decision_of_each_process_alone_is_found_by_the_fingerprints():
    models = replicas()
    parallel_step(models, [torch.ones(2, 3), torch.full((2, 3), NAN)], lambda evidence: [e.ok for e in evidence])
    assert not agree(models)
    assert find_first_nonfinite(models[0].named_parameters()) is not None  # its own loss looked fine


# --- BLK-05: a fully masked attention row ----------------------------------------------------------------------------


def attention(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Attention written by hand: a row that sees nothing is NaN."""
    return F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ values


def test_blk_05_the_one_empty_caption_of_a_batch_is_left_out_by_name():
    names = ("a.png", "empty.png", "b.png")
    mask = torch.ones(3, 1, 4, dtype=torch.bool)
    mask[1] = False
    answers = attention(torch.randn(3, 1, 4), mask, torch.randn(3, 4, 4)).view(3, 4, 1, 1, 1)
    losses = compute_sample_losses(answers, torch.zeros(3, 4, 1, 1, 1), torch.full((3,), 0.5), None, ObjectiveSection())
    assert losses.isfinite().tolist() == [True, False, True]
    suspects = tuple(name for name, loss in zip(names, losses.tolist(), strict=True) if not math.isfinite(loss))
    guard = guard_of()
    verdict = guard.judge(StepEvidence(0, names, loss_finite=False, gradient_finite=False, suspects=suspects))
    assert (verdict.action, verdict.names) == (QUARANTINE, ("empty.png",))
    assert [finding.subject for finding in guard.findings()] == ["empty.png"]
