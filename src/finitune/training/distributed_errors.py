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
from finitune.report import to_json_value

_ERROR_MESSAGE_KEY, _DEPARTED_COUNT_KEY = "finitune/last-words", "finitune/gone"
_PROCESS_LOST_CODE = "PROCESS-LOST"
_DEPARTURE_TIMEOUT_SECONDS = 5.0
"""How long who has failed waits for the others to hear of it: they may be at work for longer, and find out alone."""
_EXIT_DELAY_SECONDS = 1.0
"""How much later than the first process the others end after a failure: launchers kill all when one has ended, and the
first has to tell why."""
_POLL_SECONDS = 0.05


def get_process_group_store() -> Any:
    """The store of torch's process group."""
    return distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


class ProcessLostError(FinituneError):
    """Another process has ended: its last words, or that it had none."""


@contextmanager
def leave_process_group(rank: int, world: int) -> Iterator[None]:
    """Leave the process group at the end; with an error, tell it to the others and see that they hear it."""
    from accelerate import PartialState

    store, error = get_process_group_store(), None
    try:
        yield
    except BaseException as raised:
        error = find_root_error(raised)
        with suppress(RuntimeError):
            store.compare_set(_ERROR_MESSAGE_KEY, "", json.dumps(encode_process_error(error, rank)))
        raise
    finally:
        distributed.destroy_process_group()  # from now on the others miss this one
        PartialState._reset_state()
        with suppress(RuntimeError):  # the place itself is gone with the process that kept it
            wait_for_others(store, world, compute_departure_timeout(error, rank))
        if rank and is_error_of_this_process(error):
            time.sleep(_EXIT_DELAY_SECONDS)


def find_root_error(error: BaseException) -> BaseException:
    """The error of ours that another one was raised from, or the error itself."""
    return error.__cause__ if isinstance(error.__cause__, FinituneError) else error


def is_error_of_this_process(error: BaseException | None) -> bool:
    """Whether an error is of this process, and not the news of another's."""
    return isinstance(error, Exception) and not isinstance(error, ProcessLostError)


def compute_departure_timeout(error: BaseException | None, rank: int) -> float:
    """Seconds to wait for the others: who failed has to be heard, and the first process may keep the meeting place."""
    gone_for_good = isinstance(error, ProcessLostError) and error.code == _PROCESS_LOST_CODE
    if gone_for_good or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return 0.0
    return _DEPARTURE_TIMEOUT_SECONDS if is_error_of_this_process(error) or rank == 0 else 0.0


def wait_for_others(store: Any, world: int, seconds: float) -> None:
    """Say that this process leaves, and wait until all do, or for so many seconds."""
    end = time.monotonic() + seconds
    gone = store.add(_DEPARTED_COUNT_KEY, 1)
    while gone < world and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        gone = store.add(_DEPARTED_COUNT_KEY, 0)
    time.sleep(2 * _POLL_SECONDS if seconds else 0.0)  # so that others who look see the same


def encode_process_error(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a process as JSON: what `FinituneError` is made of."""
    if isinstance(error, FinituneError):
        return {
            "message": error.message,
            "code": error.code,
            "subject": error.subject,
            "evidence": to_json_value({"process": rank, **error.evidence}),
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
    why = f"{type(error).__name__} {error}".strip().splitlines()[0]
    return {"message": f"process {rank} has ended: {why}", "code": "PROCESS-ENDED", "evidence": {"process": rank}}


def make_process_lost_error(error: RuntimeError) -> ProcessLostError:
    """What the process that is missed has said; PROCESS-LOST where it could not say anything."""
    words: dict[str, Any] = {}
    with suppress(RuntimeError):
        store = get_process_group_store()
        if store.check([_ERROR_MESSAGE_KEY]):
            words = json.loads(store.get(_ERROR_MESSAGE_KEY))
    if not words:
        return ProcessLostError(
            "a process of the run has ended without a word, or cannot be reached",
            code=_PROCESS_LOST_CODE,
            subject="processes",
            evidence={"error": str(error).splitlines()[0]},
            remedy="Its own output and the system's log say why; often memory was short. Then go on from the last "
            "state: finitune train CONFIG --resume",
        )
    exit_code = words.pop("exit_code", ProcessLostError.exit_code)
    heard = ProcessLostError(words.pop("message"), **words)
    heard.exit_code = exit_code
    return heard
