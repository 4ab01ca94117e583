"""finitune doctor --distributed N: do N processes of this machine meet, have a device each, and add up rightly?

Devices are compared before anything goes over NCCL, which refuses or hangs where two processes share a GPU. Then the
collectives of a training run, each checked, under a limit of seconds: a hang is the usual failure, and training would
wait half an hour in it. After one, it is tried again without direct access between GPUs, and without shared memory, the
two ways that drivers, virtual machines and containers break most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from finitune.errors import UsageError
from finitune.machine.distributed_probe import (
    CONNECT_STAGE,
    DEVICES_STAGE,
    DTYPE_BY_SUM_STAGE,
    PEER_STAGES,
    PEER_START_LIMIT_S,
    SPEED_STAGE,
    SPEED_TEST_BYTES,
    PeerPretence,
    PeerStatus,
    ProbeResult,
    find_shared_devices,
    probe_peers,
)
from finitune.machine.peer_errors import explain_peer_error
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table
from finitune.verbs.shared.model import choose_device

NCCL_WORKAROUNDS = ({"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
"""What to try after a failure, in turn: without direct access between GPUs; and without shared memory, too."""
_CAUSE_BY_NCCL_VARIABLE = {
    "NCCL_P2P_DISABLE": "direct access between the GPUs is broken (IOMMU, ACS, or a card that has none)",
    "NCCL_SHM_DISABLE": "shared memory is broken or too small (/dev/shm: docker run --shm-size=8g or --ipc=host)",
}
_MAX_PROCESSES = 64
"""More than the GPUs of any one machine."""
DEFAULT_NCCL_TIMEOUT_S = 1800.0
"""The limit under which other trainers have waited for the first process to encode all pictures."""

MeetingRunner = Callable[[Mapping[str, str]], ProbeResult]


def run(
    count: int,
    report: Report,
    progress: Progress,
    device: str = "auto",
    limit_s: float = 30,
    pretend: Mapping[int, PeerPretence] | None = None,
) -> Report:
    """Test `count` processes, one for each GPU, or on the CPU; what was found goes into `report`.

    `limit_s`: seconds for all that happens between the processes, once they have started. `pretend`: by
    rank, for tests. Raises UsageError for a count below 2, a device that is not there, or a
    torch without torch.distributed.
    """
    from torch import distributed

    require_process_count(count)
    if not distributed.is_available():
        raise UsageError(
            "this torch is built without torch.distributed",
            code="DISTRIBUTED-NOT-BUILT",
            subject="torch",
            remedy="Install a torch wheel from pytorch.org.",
        )
    kind = choose_device(device).partition(":")[0]
    kind = kind if kind == "cuda" and distributed.is_nccl_available() else "cpu"
    held = lambda variables: probe_peers(count, kind, limit_s, progress, variables, pretend or {})  # noqa: E731
    return judge_meeting(held, report, retry=kind == "cuda")


def require_process_count(count: int) -> None:
    """Raise UsageError (DISTRIBUTED-COUNT) for a number of processes between which nothing can be tested here."""
    if 2 <= count <= _MAX_PROCESSES:
        return
    few = f"there is nothing to test between {count} processes"
    many = f"each is a Python of its own, and one machine has no {count} GPUs; the limit is {_MAX_PROCESSES}"
    raise UsageError(
        f"--distributed {count}: {few if count < 2 else many}",
        code="DISTRIBUTED-COUNT",
        subject="--distributed",
        remedy="Give the number of GPUs that a run is to use; 2 on a CPU.",
    )


def judge_meeting(held: MeetingRunner, report: Report, *, retry: bool) -> Report:
    """Hold a meeting, put what was found into `report`, and, after a failure of NCCL's, see what mends it."""
    meeting = held({})
    faults = find_meeting_faults(meeting)
    report.figures.update(compute_meeting_figures(meeting))
    report.findings.extend(faults)
    report.tables.append(build_process_table(meeting))
    if faults and retry and all(peer.height > PEER_STAGES.index(CONNECT_STAGE) for peer in meeting.peers):
        report.findings.append(find_nccl_workaround(held, report))
    return report


def find_nccl_workaround(held: MeetingRunner, report: Report) -> Finding:
    """Try without what breaks most, and say what has helped."""
    for variables in NCCL_WORKAROUNDS:
        if not find_meeting_faults(held(variables)):
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            last = list(variables)[-1]
            report.figures["mended_by"] = settings
            return Finding(
                Level.WARNING,
                "DISTRIBUTED-MENDED",
                settings,
                f"with {settings} it works: {_CAUSE_BY_NCCL_VARIABLE[last]}",
                {"variables": dict(variables)},
                f"Set it where the training is started: {settings} torchrun ... "
                "It costs speed; mending the cause costs none.",
            )
    return Finding(
        Level.NOTE,
        "DISTRIBUTED-NOT-MENDED",
        "NCCL",
        "it fails without direct access between GPUs and without shared memory, too",
        {"tried": [dict(variables) for variables in NCCL_WORKAROUNDS]},
        "Look at the network interface (NCCL_SOCKET_IFNAME) and the driver; NCCL_DEBUG=INFO tells more. Training on "
        "one GPU is not affected.",
    )


def compute_meeting_figures(meeting: ProbeResult) -> dict[str, object]:
    """The back end, the devices, the rate of a 64 MB sum, and how long all took."""
    told = meeting.told(CONNECT_STAGE)
    backend = " ".join(filter(None, (told.get("backend", ""), told.get("version", ""))))
    numbers: dict[str, object] = {
        "distributed_processes": len(meeting.peers),
        "distributed_seconds": round(meeting.seconds, 1),
    }
    if backend:
        numbers["distributed_backend"] = backend
    seconds = [peer.done[SPEED_STAGE]["seconds"] for peer in meeting.peers if SPEED_STAGE in peer.done]
    if len(seconds) == len(meeting.peers):
        rate = SPEED_TEST_BYTES / max(seconds) / 1e9
        numbers["all_reduce_64_mb_gb_per_s"] = float(f"{rate:.3g}")
        share = 2 * (len(seconds) - 1) / len(seconds)  # of the bytes that a ring sends over each link
        numbers["all_reduce_64_mb_bus_gb_per_s"] = float(f"{rate * share:.3g}")
    title = build_process_table(meeting).title
    return {**numbers, title: build_process_table(meeting).as_dicts()}


def build_process_table(meeting: ProbeResult) -> Table:
    """Each process, its device, and how far it came."""
    devices = meeting.told(DEVICES_STAGE).get("devices", [])
    rows = []
    for peer in meeting.peers:
        identity, name = devices[peer.rank] if devices else ("", "")
        rows.append((str(peer.rank), name, identity, "passed" if peer.passed else _where(peer)))
    return Table("processes", ("rank", "device", "identity", "result"), tuple(rows))


def find_meeting_faults(meeting: ProbeResult) -> list[Finding]:
    """What went wrong: a shared device, who is gone, who failed, who did not come, or what came out wrong."""
    if twice := find_shared_devices(meeting.told(DEVICES_STAGE).get("devices", [])):
        return [_duplicate(identity, ranks, meeting) for identity, ranks in twice.items()]
    if gone := [peer for peer in meeting.peers if peer.crashed]:
        return [_died(peer) for peer in gone]
    if failed := [peer for peer in meeting.peers if peer.failed]:
        return [_failed(failed)]
    if not meeting.passed:
        return [_stalled(meeting)]
    return [_wrong(peer, stage) for stage in PEER_STAGES for peer in meeting.peers if peer.done[stage].get("wrong")]


def _duplicate(identity: str, ranks: Sequence[int], meeting: ProbeResult) -> Finding:
    name = meeting.told(DEVICES_STAGE)["devices"][ranks[0]][1]
    return Finding(
        Level.ERROR,
        "DISTRIBUTED-DUPLICATE-DEVICE",
        f"processes {_listed(ranks)}",
        f"processes {_listed(ranks)} have one device, {name}: NCCL would end with 'Duplicate GPU detected', or hang",
        {"device": identity, "processes": list(ranks)},
        "Start as many processes as there are GPUs, and look at CUDA_VISIBLE_DEVICES. Two on one GPU are no faster.",
    )


def _died(peer: PeerStatus) -> Finding:
    code = peer.ended or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last = peer.talk[-1] if peer.talk else ""
    return Finding(
        Level.ERROR,
        "DISTRIBUTED-PEER-DIED",
        f"process {peer.rank}",
        f"process {peer.rank} {how}, {_where(peer)}{f', and said: {last[:300]}' if last else ', and said nothing'}",
        {"process": peer.rank, "exit_code": code, "stage": peer.at},
        "What the others say of it (connection closed, network error) follows from this. A process killed "
        "by signal 9 was most often out of memory; dmesg tells." + _explained(" ".join(peer.talk)),
    )


def _failed(failed: Sequence[PeerStatus]) -> Finding:
    first = min(failed, key=lambda peer: peer.height)
    said = " ".join([first.error, *first.talk])
    line = first.error.splitlines()[0]
    return Finding(
        Level.ERROR,
        "DISTRIBUTED-FAILED",
        f"process {first.rank}",
        f"process {first.rank} failed in '{first.failed}': {line[:300]}",
        {"processes": [peer.rank for peer in failed], "stage": first.failed},
        (_explained(said) or " NCCL_DEBUG=INFO tells more.").strip(),
    )


def _stalled(meeting: ProbeResult) -> Finding:
    least = min(peer.height for peer in meeting.peers)
    late = [peer for peer in meeting.peers if peer.height == least]
    ahead = [peer for peer in meeting.peers if peer.height > least]
    who, stage = f"process {_listed([peer.rank for peer in late])}", late[0].at
    if least < 0:
        what = f"{who} has not started within {PEER_START_LIMIT_S:.0f} s"
        remedy = "The machine is busy, or reads Python's packages from a slow disk. Try again."
    elif ahead:
        waiting = f"process {_listed([peer.rank for peer in ahead])} waits in '{ahead[0].at}'"
        what = f"{who} did not come within {meeting.limit_s:g} s: it is {_where(late[0])}, and {waiting}"
        remedy = "Look at that process's device: the others, and the way between them, are in order."
    else:
        who = "all processes"
        what = f"all processes have come to '{stage}', and nothing gets through for {meeting.limit_s:g} s"
        remedy = "It is the connection between the devices, or the driver."
    stages = {peer.rank: peer.at for peer in meeting.peers}
    evidence: dict[str, object] = {"late": [peer.rank for peer in late], "stages": stages, "limit_s": meeting.limit_s}
    return Finding(Level.ERROR, "DISTRIBUTED-STALLED", who, what, evidence, remedy)


def _wrong(peer: PeerStatus, stage: str) -> Finding:
    told = peer.done[stage]
    what = f"a sum in {DTYPE_BY_SUM_STAGE[stage]}" if stage in DTYPE_BY_SUM_STAGE else "a broadcast"
    numbers = f", the first {told['got']:g} for {told['expected']:g}" if "got" in told else ""
    return Finding(
        Level.ERROR,
        "DISTRIBUTED-WRONG-RESULT",
        f"process {peer.rank}",
        f"{what} over all processes came out wrong in process {peer.rank}: {told['wrong']} elements{numbers}",
        {"process": peer.rank, "stage": stage, **told},
        "Training would go astray without a word. Direct access between GPUs is the usual cause (IOMMU): see whether "
        "NCCL_P2P_DISABLE=1 mends it.",
    )


def _where(peer: PeerStatus) -> str:
    """'after meet', 'in sum-fp16', 'before it had started'."""
    if not peer.at:
        return "before it had started"
    return f"{'after' if peer.at in peer.done or peer.height == 0 else 'in'} '{peer.at}'"


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))


def _explained(text: str) -> str:
    explanation = explain_peer_error(text)
    return f" {explanation.name}: {explanation.sentence} {explanation.cause}" if explanation else ""


def check_caching_timeout(
    pictures: int, seconds_each: float, timeout_s: float = DEFAULT_NCCL_TIMEOUT_S
) -> Finding | None:
    """A warning where one process encodes `pictures` for longer than the others wait for it; None where it does not.

    For trainers whose first process caches alone, inside a collective (sd-scripts #971: 1818 pictures of 1.13 s each,
    and 30 minutes). finitune's processes share the pictures, and wait for hours.
    """
    seconds = pictures * seconds_each
    if seconds <= timeout_s:
        return None
    return Finding(
        Level.WARNING,
        "DISTRIBUTED-CACHING-OUTLASTS",
        "caching",
        f"{pictures} pictures of {seconds_each:g} s take {seconds / 60:.0f} minutes, and the other processes give up "
        f"after {timeout_s / 60:.0f}",
        {"pictures": pictures, "seconds": round(seconds, 1), "timeout_s": timeout_s},
        "Cache with one process first, then train with all; or raise the timeout (sd-scripts: --ddp_timeout, in "
        "minutes).",
    )
