"""Wait on use: whoever touches a parameter whose all-gather is on its way waits for it, and nobody else.

While a bucket's gather is in flight, its parameters belong to a subclass of their class whose `__torch_function__`
waits, gives them their own class back, and goes on. So any access that Python can see is fresh: modules, functional
calls, `.data`, `state_dict`, `copy.deepcopy`, pickle, optimizers, tools that have never heard of us. No forward hook
decides what is right, and no rank starts a collective by touching a parameter.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn

from dearcore.errors import ScheduleError
from dearcore.streams import Event

__all__ = ["Gate", "PendingParameter", "without_waiting"]

# A context in which touching a pending parameter does not wait: for our own bookkeeping.
without_waiting = torch._C.DisableTorchFunctionSubclass

_METADATA_PROPERTIES = (
    "_backward_hooks", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
    "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "name",
    "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_METADATA_METHODS = (
    "dim", "dim_order", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_same_size", "is_set_to", "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
)  # fmt: skip


def _metadata_functions() -> frozenset[Any]:
    """What reads or writes metadata only, and so need not wait."""
    functions: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.is_signed}
    functions.add(torch.Tensor.__len__)
    for name in _METADATA_PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        if descriptor is not None:
            functions.add(descriptor.__get__)
    for name in ("grad", "requires_grad"):
        functions.add(getattr(torch.Tensor, name).__set__)
    functions.add(cast(Any, torch.Tensor.grad).__delete__)
    functions.update(getattr(torch.Tensor, name) for name in _METADATA_METHODS if hasattr(torch.Tensor, name))
    return frozenset(functions)


_METADATA = _metadata_functions()


class PendingParameter(nn.Parameter):
    """Mixin of the classes that parameters belong to while they are pending; `Gate` makes one for each class."""

    dear_gate: ClassVar[Gate]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA and not torch.compiler.is_compiling():  # a compiler's touch always waits
            with without_waiting():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, PendingParameter):
                kind.dear_gate.wait(args)
        return func(*args, **(kwargs or {}))


# What is looked up on the class, so that it cannot ask the parameter for its gate: another thread may have given the
# parameter its own class back since.


def _pending_share_memory(gate: Gate, param: nn.Parameter) -> NoReturn:
    raise ScheduleError(
        f"the memory of '{gate.name_of(param)}' cannot be moved while parameters are on their way. Call "
        "synchronize() first, or share_memory() before wrapping."
    )


def _pending_deepcopy(gate: Gate, param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    gate.wait((param,))
    return copy.deepcopy(param, memo)


def _pending_reduce(gate: Gate, param: nn.Parameter, protocol: Any) -> Any:
    gate.wait((param,))
    return param.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _pending_as_subclass(gate: Gate, param: nn.Parameter, cls: type) -> torch.Tensor:
    gate.wait((param,))
    return param.as_subclass(cls)


def _pending_class(gate: Gate, own: type) -> type:
    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda param, *args: function(gate, param, *args)

    members = {
        "dear_gate": gate,
        "__slots__": (),
        "as_subclass": method(_pending_as_subclass),  # which torch does not dispatch
        "share_memory_": method(_pending_share_memory),
        "__deepcopy__": method(_pending_deepcopy),
        "__reduce_ex__": method(_pending_reduce),
    }
    bases = (PendingParameter,) if own is nn.Parameter else (PendingParameter, own)
    return type(f"Pending{own.__name__}", bases, members)


Flight = tuple[Event, ...]  # the events of one step's gathers, as they were recorded then


class Gate:
    """Parameters that become fresh together: those of one bucket, or one tensor that is split over several.

    Any thread may touch the parameters while another one steps. What keeps that right:

    1. `arm` makes a *flight*: the events of this step, as recorded now. It is never used again, so that a thread that
       has waited for step k knows by identity whether step k + 1 has begun since.
    2. While the flight that was armed last has not landed, every member belongs to its pending class. Only the thread
       that has waited for *that very flight* disarms: it clears `_flight` and gives the members their class back.
    3. Arming and disarming are one critical section each. `wait` blocks outside of it and returns only when there is no
       flight left; that of a later step, armed meanwhile, is waited for as well.
    4. After `close` the gate is never pending again: `arm` then waits itself.

    tests/dear/test_gate.py explores every interleaving of two waiters, two steps and a closer.

    Args:
        params: (name, parameter) pairs.
        events: `params_fresh` of the bucket, or buckets, in their order; recorded before each `arm`.
        on_wait: told (buckets, name of the parameter touched, seconds waited) after each wait, by whoever waited.
    """

    # One for all gates: two may have the same member (recorder.py). Held for a few assignments, never while waiting.
    _switching: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        buckets: tuple[int, ...],
        params: Sequence[tuple[str, nn.Parameter]],
        events: Sequence[Event],
        on_wait: Callable[[tuple[int, ...], str, float], None],
    ) -> None:
        self.buckets = buckets
        self._names = {id(param): name for name, param in params}
        self._events = events
        self._on_wait = on_wait
        self._flight: Flight | None = None
        self._closed = False
        self.compiler_touched = False  # compiled code reads the parameters
        self.is_eager = False  # and no door stands before it: never armed, so step() waits
        classes: dict[type, type] = {}
        self._members: list[tuple[nn.Parameter, type, type]] = []
        for _, param in params:
            own = type(param)
            if own not in classes:
                classes[own] = _pending_class(self, own)
            self._members.append((param, own, classes[own]))

    def params(self) -> list[nn.Parameter]:
        return [param for param, _, _ in self._members]

    def name_of(self, param: nn.Parameter) -> str:
        return self._names[id(param)]

    def holds_any(self, param_ids: set[int]) -> bool:
        return not param_ids.isdisjoint(self._names)

    @property
    def is_pending(self) -> bool:
        """True if whoever touches one of the parameters waits."""
        return self._flight is not None

    def arm(self) -> None:
        """From now on whoever touches one of the parameters waits for the events. One thread arms: that which steps."""
        flight = tuple([event.as_of_now() for event in self._events])
        with self._switching:
            self._flight = flight
            if not (self.is_eager or self._closed):
                for param, _, pending in self._members:
                    param.__class__ = pending
        if self.is_eager or self._closed:
            self.wait()

    def wait(self, args: Sequence[Any] = ()) -> None:
        """Makes the compute stream wait and gives the parameters their class back. Raises CommunicatorError."""
        while (flight := self._flight) is not None:
            if torch.compiler.is_compiling():
                self.compiler_touched = True
            start_s = time.perf_counter()
            for event in flight:
                event.wait_compute()
            waited_s = time.perf_counter() - start_s
            with self._switching:
                if self._flight is flight:
                    self._flight = None
                    for param, own, pending in self._members:
                        if type(param) is pending:  # else it is another gate's that was armed after this one
                            param.__class__ = own
            touched = next((self._names[id(arg)] for arg in args if id(arg) in self._names), "")
            self._on_wait(self.buckets, touched, waited_s)

    def close(self) -> None:
        """Waits, and is never pending again. Raises CommunicatorError; the parameters then stay pending."""
        self._closed = True
        self.wait()


def _renew_lock() -> None:
    Gate._switching = threading.Lock()


# A child of os.fork must not inherit the lock from a thread that it does not have.
os.register_at_fork(
    before=lambda: Gate._switching.acquire(),
    after_in_parent=lambda: Gate._switching.release(),
    after_in_child=_renew_lock,
)
