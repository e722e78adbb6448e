"""Gradients that are not averaged yet and lie open in `p.grad`: those of `no_sync()`, and those that users assign.

They are ordinary tensors which anybody may read and change, with one exception: what `torch.amp.GradScaler` asks of
them. It would divide each rank's part by the scale and decide by that part alone whether to skip, whereas the average,
which is what will be applied, is divided too, and all ranks must skip together. A scaler reads the optimizer's
parameter groups first, and at that moment such gradients get a mark: a subclass of their class that hears of the
question. Whatever else is done to a marked gradient gives it its class back first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .gradients import Unscale, unscale_gradients
from .parameters import without_waiting

__all__ = ["LocalGradient", "mark", "marking"]

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_NAMES = (
    "device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse", "is_sparse_csr", "is_xpu", "layout",
    "ndim", "requires_grad", "shape", "_version",
)  # fmt: skip
_METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _NAMES]
    + [torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.is_floating_point, torch.is_floating_point]
    + [torch.Tensor.is_coalesced, torch.Tensor.get_device]
)


class LocalGradient(torch.Tensor):
    """A marked gradient. Each engine has a class of its own, whose `_unscale` asks that engine."""

    __slots__ = ()
    _unscale: Unscale

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _UNSCALE:
            return unscale_gradients(*args, **kwargs)
        if func in _METADATA:
            with without_waiting():
                return func(*args, **kwargs)
        if func == torch.Tensor._values:  # what a scaler asks for in place of a sparse gradient
            with without_waiting():
                values = func(*args)
            values.__class__ = cls
            return values
        _unmark([*args, *kwargs.values()])
        return func(*args, **kwargs)


def marking(unscale: Unscale) -> type[LocalGradient]:
    """A class to mark gradients with whose `unscale` is this one."""
    return type("LocalGradient", (LocalGradient,), {"_unscale": staticmethod(unscale), "__slots__": ()})


def mark(params: Iterable[torch.Tensor], kind: type[LocalGradient]) -> None:
    """Marks what lies open in `p.grad`; tensors of classes that are not torch's or ours stay as they are."""
    with without_waiting():
        grads = [param.grad for param in params]
        kinds = set(map(type, grads))
        if torch.Tensor in kinds or any(issubclass(other, LocalGradient) for other in kinds - {kind}):
            for grad in grads:
                if type(grad) is torch.Tensor or isinstance(grad, LocalGradient):
                    grad.__class__ = kind


def _unmark(args: Iterable[Any]) -> None:
    for arg in args:
        if isinstance(arg, LocalGradient):
            arg.__class__ = torch.Tensor  # type: ignore[assignment]
        elif isinstance(arg, (list, tuple)):
            _unmark(arg)
