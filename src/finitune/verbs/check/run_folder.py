"""What `finitune check` says of a run's states, and of a precision plan."""

from __future__ import annotations

from pathlib import Path

from finitune.errors import FinituneError
from finitune.precision.plan import PrecisionPlan
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table
from finitune.training.checkpoint import (
    STATE_CHECKSUMS_NAME,
    STATE_JSON_NAME,
    iterate_state_folders,
    read_verified_state_facts,
)
from finitune.verbs.check.request import Request
from finitune.verbs.shared.model import load_model
from finitune.verbs.shared.options import ModelChoice


def check_run(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """The states in a run's folder, or one state: whole, verified, of which step."""
    states = (
        [path]
        if (path / STATE_JSON_NAME).exists() or (path / STATE_CHECKSUMS_NAME).exists()
        else list(iterate_state_folders(path))
    )
    rows: list[tuple[str, str, str]] = []
    good: dict[Path, int] = {}
    progress.start("states", len(states))
    for state in states:
        try:
            facts = read_verified_state_facts(state)
            good[state] = int(facts["step"])
            rows.append((state.name, str(facts["step"]), "whole"))
        except FinituneError as error:
            report.findings.append(Finding.of(error))
            rows.append((state.name, "-", error.code))
        except (KeyError, TypeError, ValueError) as error:  # the right sum and the wrong form: another has written it
            report.add(
                Level.ERROR,
                "STATE-DAMAGED",
                str(state),
                f"{state}: its facts are of another form ({type(error).__name__}: {error})",
                remedy="Resume from another state, or begin from the adapter file beside it: network_weights.",
                file=STATE_JSON_NAME,
            )
            rows.append((state.name, "-", "STATE-DAMAGED"))
        progress.advance("states")
    progress.finish("states")
    report.figures.update(
        kind="run", states=len(states), states_whole=len(good), resumes_at=max(good.values(), default=None)
    )
    if rows:
        report.tables.append(Table("states", ("state", "step", "verdict"), tuple(rows)))


def check_plan(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """A plan's lines, and whether it belongs to the model that is named; raises PlanError, and what loading raises."""
    plan = PrecisionPlan.load(path)
    report.figures.update(
        kind="precision plan",
        model=plan.model,
        fingerprint=plan.fingerprint,
        headroom_bits=plan.headroom_bits,
        lines={name: len(component.lines) for name, component in plan.components.items()},
    )
    rows = tuple(
        (line.site, line.kind, line.out, "measured" if line.exponent is None else str(line.exponent), line.reason)
        for component in plan.components.values()
        for line in component.lines
    )
    report.tables.append(Table("lines", ("site", "kind", "out", "exponent", "reason"), rows))
    if request.model is not None:
        plan.check_fingerprint(load_model(ModelChoice(model=request.model)).fingerprint, str(path))
