"""NCCL's result codes, each in a sentence with its usual cause, and what an error of several processes means.

NCCL says little: a code, and "run with NCCL_DEBUG=INFO". The same code has had other meanings in other versions, so an
error is known by its name, by NCCL's phrase for it, or by what torch puts around it; the more special is tried first.

Sources: nccl.h 2.30.7 and NCCL's user guide (types, troubleshooting); strings of torch 2.14.1 and libnccl; reports
named beside the entries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class NcclResult:
    """A result code of NCCL: its name, the phrase that NCCL prints, what it says, and its usual cause."""

    code: int
    name: str
    phrase: str
    sentence: str
    cause: str


NCCL_RESULTS = (
    NcclResult(0, "ncclSuccess", "no error", "It worked.", ""),
    NcclResult(
        1,
        "ncclUnhandledCudaError",
        "unhandled cuda error",
        "A call of CUDA failed inside NCCL.",
        "Usually the GPU's memory is full, the driver is older than this CUDA, or the GPU has failed (dmesg names an "
        "Xid); the first error of the first process that failed is the one to read.",
    ),
    NcclResult(
        2,
        "ncclSystemError",
        "unhandled system error",
        "A call of the operating system, or of a library outside NCCL, failed.",
        "Usually /dev/shm is too small (docker run --shm-size=8g or --ipc=host), the network interface is the wrong "
        "one (NCCL_SOCKET_IFNAME), or locked memory is limited (ulimit -l); old versions say it too when another "
        "process has ended.",
    ),
    NcclResult(
        3,
        "ncclInternalError",
        "internal error",
        "A check inside NCCL failed: a fault of NCCL, or memory that was overwritten.",
        "Usually two versions of NCCL in one environment, or a topology that it reads wrongly in a virtual machine or "
        "container; another version of torch brings another NCCL.",
    ),
    NcclResult(
        4,
        "ncclInvalidArgument",
        "invalid argument",
        "A value that NCCL was given cannot be.",
        "Usually an error of the program, or another version of NCCL is loaded than torch was built with "
        "(LD_LIBRARY_PATH).",
    ),
    NcclResult(
        5,
        "ncclInvalidUsage",
        "invalid usage",
        "NCCL was called in a way that cannot work.",
        "Usually two processes use one GPU, the processes do different things in turn, or NCCL_NET names a plugin that "
        "is not installed.",
    ),
    NcclResult(
        6,
        "ncclRemoteError",
        "remote process exited or there was a network error",
        "Another process has ended, or the connection to it.",
        "The cause is in the output of the process that ended first: most often it ran out of memory.",
    ),
    NcclResult(
        7,
        "ncclInProgress",
        "NCCL operation in progress",
        "The operation has not ended yet.",
        "It is no failure by itself; with TORCH_NCCL_USE_COMM_NONBLOCKING a program has to ask again.",
    ),
    NcclResult(
        8,
        "ncclTimeout",
        "operation timed out",
        "An operation took longer than its limit.",
        "Usually one process came late or not at all, or the GPUs cannot reach each other.",
    ),
)
"""All result codes of NCCL 2.30."""


@dataclass(frozen=True)
class PeerErrorExplanation:
    """What an error text says, in a sentence, and what usually is behind it and helps."""

    name: str
    sentence: str
    cause: str


PEER_ERROR_PATTERNS = (
    (
        r"Duplicate GPU detected",
        PeerErrorExplanation(
            "Duplicate GPU",
            "Two processes were given one GPU.",
            "Start as many processes as there are GPUs, and let each take the GPU of its LOCAL_RANK.",
        ),
    ),
    (
        r"(?:collective operation timeout|Timed out).*?SeqNum=1,",
        PeerErrorExplanation(
            "first collective timed out",
            "The processes have not exchanged anything: this was the very first time.",
            "Usually the GPUs cannot reach each other (try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1 too), or one "
            "process had not started.",
        ),
    ),
    (
        r"collective operation timeout",
        PeerErrorExplanation(
            "collective timed out",
            "The processes have exchanged data before, and now one did not come in time.",
            "Usually one of them was still encoding pictures, saving or drawing: the limit is the `timeout` of torch's "
            "process group (10 minutes for NCCL), and no environment variable.",
        ),
    ),
)
"""What is known of error texts before the result code counts: (pattern, meaning)."""

GLOO_ERROR_PATTERNS = (
    (
        r"Connection closed by peer|Connection reset by peer|Broken pipe",
        PeerErrorExplanation(
            "connection closed", "Another process has ended.", "The cause is in the output of the one that ended first."
        ),
    ),
    (
        r"Timed out waiting \d+ms|Application timeout|wait timeout",
        PeerErrorExplanation(
            "timed out",
            "Another process did not come in time.",
            "It was still at something else, or it hangs; it has to be found among the processes.",
        ),
    ),
    (
        r"[Cc]onnection refused|No route to host|connectFullMesh|unable to resolve|Unable to find address",
        PeerErrorExplanation(
            "cannot connect",
            "The processes cannot reach each other over the network.",
            "The host's name leads to an address that is not this machine's, or a firewall is between: set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface to use, such as lo or eth0.",
        ),
    ),
)
"""The same for gloo, which torch uses on CPUs and to meet."""


def explain_peer_error(text: str) -> PeerErrorExplanation | None:
    """What an error text of torch's distributed package means; None where it names nothing that is known.

    >>> explain_peer_error("ncclSystemError: System call (e.g. socket, malloc) ...").name
    'ncclSystemError'
    >>> explain_peer_error("out of cheese")
    """
    for pattern, explanation in PEER_ERROR_PATTERNS:
        if re.search(pattern, text, re.DOTALL):
            return explanation
    for result in NCCL_RESULTS[1:]:
        named = re.search(rf"\b{result.name}\b", text)
        if named or ("NCCL" in text and result.phrase.lower() in text.lower()):
            return PeerErrorExplanation(result.name, result.sentence, result.cause)
    return next((explanation for pattern, explanation in GLOO_ERROR_PATTERNS if re.search(pattern, text)), None)
