"""Collectives over NCCL, by way of CuPy.

What is small and on the host (agreements, flags, Python objects) goes through the *control* communicator, which is
gloo's: the thread that launches waits for it, the GPU does not.

`cupy` is imported by `load_library` alone.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dear_kernels

from .communicator import PlainFlats
from .errors import ArgumentError
from .nccl_group import NcclGroup
from .streams import InlineStream, Stream

__all__ = [
    "DTYPES",
    "OPS",
    "NcclCommunicator",
    "library_problem",
    "library_version",
    "load_library",
    "loaded_from",
]

# Names in `cupy.cuda.nccl`. What is not here cannot be summed; it can be moved, as bytes.
DTYPES: dict[torch.dtype, str] = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
}
OLDEST_CUPY = (14,)  # from then on a unique id is bytes
OPS = {"sum": "NCCL_SUM", "avg": "NCCL_AVG"}


def library_problem() -> str:
    """Why NCCL cannot be used here, and the command that mends it; "" if it can. Imports CuPy only if it is there."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install torch's CUDA build"
    major = cuda.partition(".")[0]
    extra = f"pip install 'dear-pytorch[cuda{major}]'"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {extra}"
    try:
        library = load_library()
        found = int(library.get_version())
        built = _cupy_cuda_major()
    except Exception as error:  # whatever an import of somebody else's binary raises
        return f"CuPy or NCCL cannot be loaded ({error}); {extra}"
    if _cupy_release() < OLDEST_CUPY:
        upgrade = extra.replace("install", "install --upgrade")
        return f"CuPy {'.'.join(map(str, _cupy_release()))} is too old, expected {OLDEST_CUPY[0]} or newer; {upgrade}"
    if built and built != major:
        return f"CuPy is built for CUDA {built}, torch for CUDA {cuda}; pip uninstall cupy-cuda{built}x, then {extra}"
    return "" if found else f"NCCL is not found; {extra}"


def _cupy_release() -> tuple[int, ...]:
    version: str = importlib.import_module("cupy").__version__
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _cupy_cuda_major() -> str:
    version = int(importlib.import_module("cupy.cuda").get_local_runtime_version())
    return str(version // 1000) if version else ""


def load_library() -> Any:
    """`cupy.cuda.nccl`. Raises ImportError."""
    return importlib.import_module("cupy.cuda.nccl")


def library_version(library: Any) -> str:
    """As "2.30.7"."""
    number = int(library.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def loaded_from() -> str:
    """The file of libnccl that this process has loaded, "" if none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rpartition(" ")[2]
            if "libnccl.so" in path:
                return path
    return ""


class NcclCommunicator(PlainFlats):
    """One optimizer's view of a group; see `Communicator` for the contract of each method.

    Tensors of the group's device go through NCCL, those of the host through the control communicator. Sums are taken in
    the dtype of the wire (NCCL adds wider where it can), and cast when they have arrived. In deterministic mode every
    rank sends shard k to rank k, which adds them in rank order in the dtype of the output.
    """

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self.rank, self.size, self.deterministic, self.bytes_sent = group.rank, group.size, group.deterministic, 0

    @property
    def doing(self) -> str:
        return self._group.doing

    @property
    def failed(self) -> str:
        return self._group.failed

    def start_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        if self._is_elsewhere(flat):
            self._group.control.start_reduce_scatter(output, flat, divisor, stream, label)
            return
        self._check_sum(flat, label)
        self._group.start(stream, label, lambda handle: self._reduce_scatter(output, flat, divisor, handle))

    def start_all_gather(self, flat: torch.Tensor, stream: Stream, label: str) -> None:
        if self._is_elsewhere(flat):
            self._group.control.start_all_gather(flat, stream, label)
            return
        self._group.start(stream, label, lambda handle: self._all_gather(flat, handle))

    def start_all_reduce(
        self, output: torch.Tensor, flat: torch.Tensor, divisor: int, stream: Stream, label: str
    ) -> None:
        if self._is_elsewhere(flat):
            self._group.control.start_all_reduce(output, flat, divisor, stream, label)
            return
        self._check_sum(flat, label)
        self._group.start(stream, label, lambda handle: self._all_reduce(output, flat, divisor, handle))

    def start_combine(self, tensor: torch.Tensor, op: str, stream: Stream, label: str) -> None:
        """On the host; with a maximum the ranks also compare the order of their collectives so far."""
        group, control = self._group, self._group.control
        if op != "max":
            control.start_combine(tensor, op, stream, label)
            return

        def combine() -> None:
            digits = torch.tensor(group.order_digits(), dtype=tensor.dtype)
            together = torch.cat([tensor.reshape(-1), digits])
            control.start_combine(together, op, InlineStream(), label)
            group.check_order([int(digit) for digit in together[tensor.numel() :]], label)
            tensor.copy_(together[: tensor.numel()].view(tensor.shape))

        stream.run(label, combine)

    def begin_combine(self, tensor: torch.Tensor, op: str, label: str) -> Callable[[], None]:
        """Nothing is sent before: which collectives came earlier is known to the stream only."""
        return lambda: self.start_combine(tensor, op, InlineStream(), label)

    def start_broadcast(self, tensor: torch.Tensor, root: int, stream: Stream, label: str) -> None:
        if self._is_elsewhere(tensor):
            self._group.control.start_broadcast(tensor, root, stream, label)
            return

        def broadcast(handle: int) -> None:
            pointer, moved = tensor.data_ptr(), _movable(tensor)
            if moved.numel():
                self._group.comm.broadcast(pointer, pointer, moved.numel(), self._code(moved), root, handle)

        self._group.start(stream, label, broadcast)

    def start_gather_objects(self, mine: Any, into: list[Any], stream: Stream, label: str) -> None:
        self._group.control.start_gather_objects(mine, into, stream, label)

    def start_exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], stream: Stream, label: str
    ) -> None:
        """Through the host: it happens once in many iterations."""
        self._group.control.start_exchange(outgoing, incoming, stream, label)

    def close(self) -> None:
        """The group stays for the other optimizers; `dear.shutdown` closes it."""

    def _reduce_scatter(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, handle: int) -> None:
        count = flat.numel() // self.size
        assert output.numel() == count and output.is_contiguous() and flat.is_contiguous()
        if count == 0:
            return
        self._count(flat)
        if self._in_rank_order(flat):
            self._exchange(output, flat, divisor, handle)
            return
        op, rest = self._op(flat.dtype, divisor)
        mine = flat[self.rank * count : (self.rank + 1) * count]
        target = output if output.dtype == flat.dtype else mine
        self._group.comm.reduceScatter(flat.data_ptr(), target.data_ptr(), count, self._code(flat), op, handle)
        if target is not output:
            output.copy_(target)
        if rest != 1:
            output.div_(rest)

    def _all_gather(self, flat: torch.Tensor, handle: int) -> None:
        moved = _movable(flat)
        count = moved.numel() // self.size
        assert flat.is_contiguous()
        if count == 0:
            return
        self._count(flat)
        start = flat.data_ptr() + self.rank * count * moved.element_size()
        self._group.comm.allGather(start, flat.data_ptr(), count, self._code(moved), handle)

    def _all_reduce(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, handle: int) -> None:
        if flat.numel() == 0:
            return
        if self._in_rank_order(flat):
            shard_numel = flat.numel() // self.size
            average = self._group.scratch("average", output.dtype, shard_numel)
            self._exchange(average, flat, divisor, handle)
            flat[self.rank * shard_numel : (self.rank + 1) * shard_numel].copy_(average)
            self._count(flat)
            self._all_gather(flat, handle)
            output.copy_(flat[: output.numel()])
            return
        self._count(flat)
        self._count(flat)
        op, rest = self._op(flat.dtype, divisor)
        pointer = flat.data_ptr()
        self._group.comm.allReduce(pointer, pointer, flat.numel(), self._code(flat), op, handle)
        output.copy_(flat[: output.numel()])
        if rest != 1:
            output.div_(rest)

    def _exchange(self, output: torch.Tensor, flat: torch.Tensor, divisor: int, handle: int) -> None:
        """Everyone's shard `rank` comes here and is added in rank order, in the dtype of `output`."""
        group, rank, size = self._group, self.rank, self.size
        count, code, width = flat.numel() // size, self._code(flat), flat.element_size()
        received = group.scratch("received", flat.dtype, flat.numel())
        library, comm = group.library, group.comm
        library.groupStart()
        try:
            for peer in range(size):
                if peer != rank:
                    comm.send(flat.data_ptr() + peer * count * width, count, code, peer, handle)
                    comm.recv(received.data_ptr() + peer * count * width, count, code, peer, handle)
        finally:
            library.groupEnd()
        rows = received.view(size, count)
        rows[rank].copy_(flat[rank * count : (rank + 1) * count])
        dear_kernels.sum_rows_(output, rows, divisor)

    def _in_rank_order(self, flat: torch.Tensor) -> bool:
        return self.deterministic and self.size > 1 and flat.dtype.is_floating_point

    def _op(self, dtype: torch.dtype, divisor: int) -> tuple[int, int]:
        """NCCL's op, and what is left to divide by.

        NCCL averages by scaling each summand, which is exact for powers of two; else the sum is divided.
        """
        if divisor == self.size and divisor > 1 and divisor & (divisor - 1) == 0 and dtype.is_floating_point:
            return getattr(self._group.library, OPS["avg"]), 1
        return getattr(self._group.library, OPS["sum"]), divisor

    def _code(self, tensor: torch.Tensor) -> int:
        return int(getattr(self._group.library, DTYPES[tensor.dtype]))

    def _check_sum(self, flat: torch.Tensor, label: str) -> None:
        if flat.dtype not in DTYPES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ArgumentError(
                f"{label}: NCCL cannot sum {str(flat.dtype).removeprefix('torch.')}; it can sum {supported}. "
                "Cast it first, or pass reduce_dtype."
            )

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """True for tensors of the host. Raises for those of another GPU."""
        device = self._group.device
        if tensor.device == device:
            return False
        if tensor.device.type == "cpu":
            return True
        raise ArgumentError(
            f"a tensor is on {tensor.device}, but rank {self.rank} communicates on {device}. Move the model to "
            "dear.device()."
        )

    def _count(self, flat: torch.Tensor) -> None:
        """One half of an all-reduce of `flat` has been sent."""
        self.bytes_sent += (self.size - 1) * (flat.numel() // self.size) * flat.element_size()


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where NCCL does not know the dtype: for collectives that do not add."""
    return tensor if tensor.dtype in DTYPES else tensor.view(-1).view(torch.uint8)
