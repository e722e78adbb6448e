"""What a communicator does, and the one of a single rank.

Every `start_*` enqueues one collective on `stream` and returns. All ranks must start the same collectives in the same
order; `label` names one for people (`reduce_scatter of bucket 3 (fc.weight, ...) in step 17`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .streams import Stream

__all__ = ["Communicator", "LocalCommunicator", "NullCommunicator", "PlainFlats"]


class Communicator(Protocol):
    rank: int
    size: int
    deterministic: bool
    bytes_sent: int  # payload this rank has sent in reduce-scatters and all-gathers
    peers_read: bool  # a reduction's `flat` is read by other ranks until the next collective has completed

    def new_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros [numel] to be reduced from, in memory that suits the communicator best."""

    @property
    def doing(self) -> str:
        """Label of the collective under way, "" for none."""

    @property
    def failed(self) -> str:
        """Label of the one that failed, "" for none."""

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        """`output` [n] = sum over ranks of shard `rank` of `flat` [size * n], divided by `divisor`.

        `flat` is read and overwritten, `output` valid, when the stream has passed. `output` may have a wider dtype
        than `flat`: the last addition and the division then happen in the wider one. In deterministic mode the sum is
        taken in rank order in the dtype of `output`.
        """

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        """In place: shard r of `flat` [size * n] is read on rank r and valid everywhere when the stream has passed."""

    def start_all_reduce(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        """`output` [n] = sum over ranks of `flat` [n, padded to a multiple of size], divided by `divisor`.

        Otherwise as `start_reduce_scatter`; values cross the wire in the dtype of `flat`.
        """

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        """In place; `op` is "sum", "max" or "min". For small tensors: combined in rank order on every rank."""

    def begin_combine(self, tensor: torch.Tensor, op: str, label: str) -> Callable[[], None]:
        """As `start_combine`, of values that the host knows now: what can be sent at once is.

        The function returned waits for the others and combines; a stream runs it, in the order of its collectives.
        Errors are raised there. Until then `tensor` stays as it is.
        """

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        """In place: every rank holds the root's values when the stream has passed."""

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        """`into` holds every rank's picklable object, by rank, when the stream has passed."""

    def start_exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], stream: Stream, label: str
    ) -> None:
        """`outgoing[r]` goes to rank r, `incoming[r]` comes from there: bytes, their number known on both sides.

        The entries of this rank itself are left alone.
        """

    def close(self) -> None: ...


class PlainFlats:
    """Flat buffers from the allocator; nobody else reads them."""

    peers_read = False

    def new_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)


class LocalCommunicator(PlainFlats):
    """World size 1: the same calls, nothing to send."""

    def __init__(self, deterministic: bool = False) -> None:
        self.rank, self.size, self.deterministic, self.bytes_sent = 0, 1, deterministic, 0
        self.doing = self.failed = ""

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        def work() -> None:
            output.copy_(flat)
            if divisor != 1:
                output.div_(divisor)

        stream.run(label, work)

    start_all_reduce = start_reduce_scatter

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def begin_combine(self, tensor: torch.Tensor, op: str, label: str) -> Callable[[], None]:
        return lambda: None

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        stream.run(label, lambda: into.append(mine))

    def start_exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], stream: Stream, label: str
    ) -> None:
        stream.run(label, lambda: None)

    def close(self) -> None:
        pass


class NullCommunicator(PlainFlats):
    """Moves nothing: what an iteration costs without communication. The weights it trains are not the right ones."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.deterministic, self.bytes_sent = rank, size, False, 0
        self.doing = self.failed = ""

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        numel = output.numel()
        stream.run(label, lambda: _discard(output.copy_(flat[self.rank * numel : (self.rank + 1) * numel])))

    def start_all_reduce(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        stream.run(label, lambda: _discard(output.copy_(flat[: output.numel()])))

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def begin_combine(self, tensor: torch.Tensor, op: str, label: str) -> Callable[[], None]:
        return lambda: None

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        stream.run(label, lambda: None)

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        stream.run(label, lambda: into.extend([mine] * self.size))

    def start_exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], stream: Stream, label: str
    ) -> None:
        stream.run(label, lambda: None)

    def close(self) -> None:
        pass


def _discard(_: torch.Tensor) -> None:
    return None


def pieces_of(numel: int, piece_numel: int) -> Sequence[slice]:
    """Cuts `numel` elements into slices of at most `piece_numel`; one empty slice for nothing."""
    if numel <= piece_numel:
        return (slice(0, numel),)
    return tuple(slice(at, min(at + piece_numel, numel)) for at in range(0, numel, piece_numel))
