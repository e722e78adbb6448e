"""Which library carries the collectives: decided once, by all ranks together, before anything is connected."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .errors import ArgumentError, CommunicatorError
from .nccl import library_problem, library_version, load_library

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["Capability", "Decision", "agree_on_backend", "decide", "local_device", "probe"]

# The first NCCL that lets ranks share a GPU, and the variable (NCCL's own) that allows it.
SHARED_GPU_VERSION = (2, 30)
SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class Capability:
    """What one rank has. `problem`: why it cannot use NCCL, and what mends it; "" if it can."""

    rank: int
    host: str
    gpu: str  # its unique name, "" for none
    nccl: str  # version
    shares_gpu: bool  # NCCL has been told to let ranks share a GPU
    problem: str


@dataclass(frozen=True, slots=True)
class Decision:
    backend: str  # "nccl" or "gloo"
    reason: str


def local_device(local_rank: int) -> torch.device:
    """The GPU of a rank, the CPU where there is none. Ranks of a host share its GPUs in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def probe(rank: int, device: torch.device, env: Mapping[str, str] = os.environ) -> Capability:
    """Looks at this process. Imports CuPy only where there is a GPU."""
    host, shares = socket.gethostname(), env.get(SHARED_GPU_VARIABLE, "") == "1"
    if device.type != "cuda":
        reason = f"torch {torch.__version__} sees no GPU (nvidia-smi and CUDA_VISIBLE_DEVICES say why)"
        return Capability(rank, host, "", "", shares, reason)
    problem = library_problem()
    version = "" if problem else library_version(load_library())
    return Capability(rank, host, str(torch.cuda.get_device_properties(device).uuid), version, shares, problem)


def decide(asked: str, ranks: Sequence[Capability]) -> Decision:
    """ "auto" takes NCCL where every rank can use it, else gloo.

    Raises: ArgumentError if "nccl" was asked for and cannot be used, with rank, reason and what mends it.
    """
    problem = _first_problem(ranks)
    if problem and asked == "nccl":
        raise ArgumentError(f"backend='nccl' cannot be used: {problem}. Or use backend='gloo'.")
    if problem or asked == "gloo":
        return Decision("gloo", problem or "asked for")
    return Decision("nccl", f"every rank has a GPU and NCCL {ranks[0].nccl}")


def _first_problem(ranks: Sequence[Capability]) -> str:
    for rank in ranks:
        if rank.problem:
            return f"rank {rank.rank} on {rank.host}: {rank.problem}"
    for rank in ranks:
        if _release(rank.nccl) != _release(ranks[0].nccl):
            return (
                f"rank {ranks[0].rank} has NCCL {ranks[0].nccl}, rank {rank.rank} NCCL {rank.nccl}; "
                "install the same release on every host"
            )
    return _shared_gpu(ranks)


def _shared_gpu(ranks: Sequence[Capability]) -> str:
    owner: dict[tuple[str, str], Capability] = {}
    for rank in ranks:
        first = owner.setdefault((rank.host, rank.gpu), rank)
        if first is rank or (rank.shares_gpu and first.shares_gpu and _release(rank.nccl) >= SHARED_GPU_VERSION):
            continue
        return (
            f"ranks {first.rank} and {rank.rank} on {rank.host} share a GPU, which NCCL allows from version "
            f"{'.'.join(map(str, SHARED_GPU_VERSION))} on with {SHARED_GPU_VARIABLE}=1 (here: {rank.nccl}); start one "
            "rank for each GPU"
        )
    return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part)


def agree_on_backend(
    asked: str, store: Store | None, rank: int, size: int, device: torch.device, timeout: timedelta, key: str
) -> Decision:
    """Every rank tells what it has and learns the same decision. Collective, blocks the host.

    Raises: ArgumentError as `decide`, on every rank alike; CommunicatorError if a rank does not come within `timeout`.
    """
    mine = probe(rank, device)
    if store is None:
        return decide(asked, [mine])
    try:
        store.set(f"{key}/{rank}", json.dumps({"asked": asked, **asdict(mine)}))
        if rank == 0:
            store.set(f"{key}/decision", json.dumps(_collect(store, size, timeout, key)))
        store.wait([f"{key}/decision"], timeout)
        decision = json.loads(store.get(f"{key}/decision"))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CommunicatorError(
            f"rank {rank} of {size}: the ranks could not agree on a backend within {timeout.total_seconds():g} s. "
            f"Check that all of them were started. ({reason})"
        ) from error
    if decision["error"]:
        raise ArgumentError(decision["error"])
    return Decision(decision["backend"], decision["reason"])


def _collect(store: Store, size: int, timeout: timedelta, key: str) -> dict[str, str]:
    told = []
    for rank in range(size):
        store.wait([f"{key}/{rank}"], timeout)
        told.append(json.loads(store.get(f"{key}/{rank}")))
    asked = [record.pop("asked") for record in told]
    for rank, other in enumerate(asked):
        if other != asked[0]:
            error = f"rank 0 asks for backend='{asked[0]}', rank {rank} for '{other}'. Pass the same on every rank."
            return {"backend": "", "reason": "", "error": error}
    try:
        decision = decide(asked[0], [Capability(**record) for record in told])
    except ArgumentError as error:
        return {"backend": "", "reason": "", "error": str(error)}
    return {**asdict(decision), "error": ""}
