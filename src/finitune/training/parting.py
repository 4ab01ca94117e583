"""How processes end together: who fails says why, at the place where all have met (torch's store), before it goes.

The others notice at their next word that somebody is missing, and end with those words. So the first process's report
has what went wrong in any of them, and nobody waits for one that will not come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import distributed

from finitune.errors import FinituneError
from finitune.report import plain

LAST_WORDS, GONE = "finitune/last-words", "finitune/gone"
LOST = "PROCESS-LOST"
PARTING_SECONDS = 5.0
"""How long who has failed waits for the others to hear of it: they may be at work for longer, and find out alone."""
TELLING_SECONDS = 1.0
"""How much later than the first process the others end after a failure: launchers kill all when one has ended, and the
first has to tell why."""
LOOK_SECONDS = 0.05


def meeting_place() -> Any:
    """The store of torch's process group."""
    return distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


class Missing(FinituneError):
    """Another process has ended: its last words, or that it had none."""


@contextmanager
def parting(rank: int, world: int) -> Iterator[None]:
    """Leave the process group at the end; with an error, tell it to the others and see that they hear it."""
    from accelerate import PartialState

    store, error = meeting_place(), None
    try:
        yield
    except BaseException as raised:
        error = cause_of(raised)
        with suppress(RuntimeError):
            store.compare_set(LAST_WORDS, "", json.dumps(words_of(error, rank)))
        raise
    finally:
        distributed.destroy_process_group()  # from now on the others miss this one
        PartialState._reset_state()
        with suppress(RuntimeError):  # the place itself is gone with the process that kept it
            wait_for_others(store, world, patience(error, rank))
        if rank and is_own(error):
            time.sleep(TELLING_SECONDS)


def cause_of(error: BaseException) -> BaseException:
    """The error of ours that another one was raised from, or the error itself."""
    return error.__cause__ if isinstance(error.__cause__, FinituneError) else error


def is_own(error: BaseException | None) -> bool:
    """Whether an error is of this process, and not the news of another's."""
    return isinstance(error, Exception) and not isinstance(error, Missing)


def patience(error: BaseException | None, rank: int) -> float:
    """Seconds to wait for the others: who failed has to be heard, and the first process may keep the meeting place."""
    gone_for_good = isinstance(error, Missing) and error.code == LOST
    if gone_for_good or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return 0.0
    return PARTING_SECONDS if is_own(error) or rank == 0 else 0.0


def wait_for_others(store: Any, world: int, seconds: float) -> None:
    """Say that this process leaves, and wait until all do, or for so many seconds."""
    end = time.monotonic() + seconds
    gone = store.add(GONE, 1)
    while gone < world and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        gone = store.add(GONE, 0)
    time.sleep(2 * LOOK_SECONDS if seconds else 0.0)  # so that others who look see the same


def words_of(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a process as JSON: what `FinituneError` is made of."""
    if isinstance(error, FinituneError):
        return {
            "message": error.message,
            "code": error.code,
            "subject": error.subject,
            "evidence": plain({"process": rank, **error.evidence}),
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
    why = f"{type(error).__name__} {error}".strip().splitlines()[0]
    return {"message": f"process {rank} has ended: {why}", "code": "PROCESS-ENDED", "evidence": {"process": rank}}


def who_left(error: RuntimeError) -> Missing:
    """What the process that is missed has said; PROCESS-LOST where it could not say anything."""
    words: dict[str, Any] = {}
    with suppress(RuntimeError):
        store = meeting_place()
        if store.check([LAST_WORDS]):
            words = json.loads(store.get(LAST_WORDS))
    if not words:
        return Missing(
            "a process of the run has ended without a word, or cannot be reached",
            code=LOST,
            subject="processes",
            evidence={"error": str(error).splitlines()[0]},
            remedy="Its own output and the system's log say why; often memory was short. Then go on from the last "
            "state: finitune train CONFIG --resume",
        )
    exit_code = words.pop("exit_code", Missing.exit_code)
    heard = Missing(words.pop("message"), **words)
    heard.exit_code = exit_code
    return heard
