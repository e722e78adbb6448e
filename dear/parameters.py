"""Wait on use: whoever touches a parameter whose all-gather is on its way waits for it, and nobody else.

While a bucket's gather is in flight, its parameters belong to a subclass of their class whose `__torch_function__`
waits, gives them their own class back, and goes on. So any access that Python can see is fresh: modules, functional
calls, `.data`, `state_dict`, `copy.deepcopy`, pickle, optimizers, tools that have never heard of us. No forward hook
decides what is right, and no rank starts a collective by touching a parameter.
"""

from __future__ import annotations

import copy
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
    """Mixin of the classes that parameters belong to while they are pending; `dear_gate` is set by the gate."""

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

    def share_memory_(self) -> NoReturn:  # moves the memory of all buckets, into which others may be gathering
        raise ScheduleError(
            f"the memory of '{self.dear_gate.name_of(self)}' cannot be moved while parameters are on their way. Call "
            "synchronize() first, or share_memory() before wrapping."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.dear_gate.wait((self,))
        return cast(nn.Parameter, copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.dear_gate.wait((self,))
        return self.__reduce_ex__(protocol)


class Gate:
    """Parameters that become fresh together: those of one bucket, or one tensor that is split over several.

    Args:
        params: (name, parameter) pairs.
        events: `params_gathered` of the bucket, or buckets.
        on_wait: told (gate, name of the parameter touched, seconds waited) after each wait.
    """

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
        self._pending = False
        self.compiler_touched = False  # compiled code reads the parameters
        self.is_eager = False  # and no door stands before it: never armed, so step() waits
        classes: dict[type, type] = {}
        self._members: list[tuple[nn.Parameter, type, type]] = []
        for _, param in params:
            own = type(param)
            if own not in classes:
                bases = (PendingParameter,) if own is nn.Parameter else (PendingParameter, own)
                classes[own] = type(f"Pending{own.__name__}", bases, {"dear_gate": self, "__slots__": ()})
            self._members.append((param, own, classes[own]))

    def params(self) -> list[nn.Parameter]:
        return [param for param, _, _ in self._members]

    def name_of(self, param: nn.Parameter) -> str:
        return self._names[id(param)]

    def holds_any(self, param_ids: set[int]) -> bool:
        return not param_ids.isdisjoint(self._names)

    def arm(self) -> None:
        """From now on whoever touches one of the parameters waits for the events."""
        self._pending = True
        if self.is_eager:
            self.wait()
            return
        for param, _, pending in self._members:
            param.__class__ = pending

    def wait(self, args: Sequence[Any] = ()) -> None:
        """Makes the compute stream wait and gives the parameters their class back. Raises CommunicatorError."""
        if not self._pending:
            return
        if torch.compiler.is_compiling():
            self.compiler_touched = True
        start_s = time.perf_counter()
        for event in self._events:
            event.wait_compute()
        self._pending = False
        touched = next((self._names[id(arg)] for arg in args if id(arg) in self._names), "")
        for param, own, _ in self._members:
            param.__class__ = own
        self._on_wait(self.buckets, touched, time.perf_counter() - start_s)
