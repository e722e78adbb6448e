"""In-flight gradients: what `p.grad` is once the gradient is on its way to be averaged.

The local gradient is not what the optimizer will apply, so nobody may read or change it by accident. `p.grad` becomes a
tensor without storage: zeroing works, autograd may accumulate into it, `torch.amp.GradScaler` may unscale it, and any
other use is an error that names the parameter and the call that does what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dearcore.errors import ScheduleError

from .wrappers import is_in_ddp

__all__ = ["InFlightGradient", "Unscale", "local_gradient", "unscale_gradients"]

_aten = torch.ops.aten

# (found_inf, inv_scale, gradients asked for as well that are not in flight) -> those of them that are not ours
Unscale = Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


class InFlightGradient(torch.Tensor):
    """Stands for one parameter's gradient from its hook until `zero_grad`. Made once and used again in each iteration.

    `local` is this rank's gradient that has not been reduced yet, or None. `zeroed`: what has been reduced counts as
    zeros from now on, which unlike no gradient at all is applied (weight decay, momentum). `has_graph`: a gradient was
    made with create_graph=True, for whoever asks what to do instead.

    Autograd adds out of place where it makes a graph. That gives a *sum*: another object of this class, which has in
    `local` what was added to its `base`, and becomes part of it when it is found in `p.grad`.
    """

    local: torch.Tensor | None
    zeroed: bool
    has_graph: bool
    base: InFlightGradient | None
    fqn: str
    _unscale: Unscale

    @staticmethod
    def __new__(
        cls, param: torch.Tensor, fqn: str, unscale: Unscale, base: InFlightGradient | None = None
    ) -> InFlightGradient:
        dtype = (param.grad_dtype or param.dtype) if base is None else base.dtype
        self = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype, device=param.device, requires_grad=False
        )
        assert isinstance(self, InFlightGradient)
        self.local, self.zeroed, self.has_graph, self.base = None, False, base is not None, base
        self.fqn, self._unscale = fqn, unscale
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def set_local(self, grad: torch.Tensor, copy: bool) -> None:
        """Makes `grad`, a copy of it if others may use its memory, the local gradient."""
        if grad.requires_grad:
            self.has_graph = True
        self.local = local_gradient(grad).clone() if copy else local_gradient(grad)

    def plus(self, grad: torch.Tensor) -> InFlightGradient:
        """The sum of this and `grad`; neither changes."""
        total = InFlightGradient(self, self.fqn, self._unscale, self if self.base is None else self.base)
        if self.base is not None and self.local is not None:
            total.accumulate(self.local)
        total.accumulate(grad)
        return total

    def absorb(self, total: torch.Tensor) -> bool:
        """Takes over what `total` has added to this. False, and nothing happens, if it is no sum with this."""
        if not isinstance(total, InFlightGradient) or total.base is not self:
            return False
        self.has_graph = True
        if total.local is not None:
            self.accumulate(total.local)
        return True

    def accumulate(self, grad: torch.Tensor) -> None:
        """Adds a gradient that autograd (or the user) gives on top."""
        grad = local_gradient(grad)
        if grad.shape != self.shape or grad.dtype != self.dtype:
            grad = torch.zeros(self.shape, dtype=self.dtype, device=self.device).add_(grad)
        if self.local is None or self.local.numel() != self.local.untyped_storage().nbytes() // self.local.itemsize:
            self.local = grad.detach().clone() if self.local is None else self.local + grad
        else:
            self.local.add_(grad)

    def zero(self) -> None:
        """Zeros what was reduced and what was not; a parameter that nobody used stays unused."""
        self.zeroed = True
        if self.base is not None:
            self.base.zero()
        if self.local is not None:
            self.local = torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"InFlightGradient('{self.fqn}', shape={tuple(self.shape)}: being averaged over ranks; "
            "read it with DistributedOptimizer.full_grad(param))"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.add_.Tensor and isinstance(args[0], cls) and _is_plain(args[1]) and not kwargs:
            args[0].accumulate(args[1])
            return args[0]
        if func is _aten.add.Tensor and isinstance(args[0], cls) and _is_plain(args[1]) and not kwargs:
            return args[0].plus(args[1])
        if func is _aten.zero_.default:
            args[0].zero()
            return args[0]
        if func is _aten._foreach_zero_.default:
            for grad in args[0]:
                grad.zero() if isinstance(grad, cls) else grad.zero_()
            return None
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return unscale_gradients(*args)
        grad = _first((*args, *(kwargs or {}).values()), cls)
        if grad is not None and is_in_ddp(grad):
            raise _averaged_twice(grad.fqn)
        raise _misuse("?" if grad is None else grad.fqn, str(func), grad is not None and grad.has_graph)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _misuse(self.fqn, "code that reads its memory", self.has_graph)

    numpy = tolist = data_ptr = storage = share_memory_ = __dlpack__ = __reduce_ex__ = __array__ = _refuse

    def _replace(self, value: torch.Tensor) -> None:
        if value is not self:  # modules that are moved to where they are give each gradient to itself
            raise _misuse(self.fqn, "code that replaces its memory", self.has_graph)

    data = property(_refuse, _replace)


def _misuse(fqn: str, who: str, has_graph: bool) -> ScheduleError:
    instead = (
        " backward(create_graph=True) leaves no graph in p.grad, which is an average over ranks: to differentiate a "
        "gradient of this rank, take it by torch.autograd.grad(loss, params, create_graph=True), or make it within "
        "no_sync()."
    )
    return ScheduleError(
        f"the gradient of '{fqn}' is being averaged over ranks and cannot be used by {who}. Call "
        "opt.clip_grad_norm_(max_norm) or opt.clip_grad_value_(value) instead of torch's functions, "
        "opt.full_grad(param) "
        f"to read the averaged gradient, and step through the DistributedOptimizer only.{instead if has_graph else ''}"
    )


def _averaged_twice(fqn: str) -> ScheduleError:
    return ScheduleError(
        f"the gradient of '{fqn}' would be averaged twice: after the DistributedOptimizer was built, the model was "
        "also wrapped in DistributedDataParallel. Call the module inside (`model.module`), or do not wrap it: pass "
        "only loaders to Accelerator.prepare(), choose a Lightning strategy without DDP, leave out DDP(model)."
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, InFlightGradient)


def unscale_gradients(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """What `torch._amp_foreach_non_finite_check_and_unscale_` does, where some of `grads` are optimizers' of ours."""
    owners: list[Unscale] = []
    rest: list[torch.Tensor] = []
    for grad in grads:
        owner: Unscale | None = getattr(grad, "_unscale", None)
        if owner is not None and owner not in owners:
            owners.append(owner)
        if not isinstance(grad, InFlightGradient):
            rest.append(grad)
    for owner in owners:
        rest = owner(found_inf, inv_scale, rest)
    if rest:
        with torch._C.DisableTorchFunctionSubclass():
            torch._amp_foreach_non_finite_check_and_unscale_(rest, found_inf, inv_scale)


def local_gradient(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as it can be packed: dense, without a graph (create_graph=True leaves one), and no other class."""
    if grad.requires_grad or type(grad) is not torch.Tensor:
        grad = grad.detach()
    return grad if grad.layout == torch.strided else grad.to_dense()


def _first(args: Any, cls: type) -> InFlightGradient | None:
    for arg in args:
        if isinstance(arg, InFlightGradient):
            return arg
        if isinstance(arg, (list, tuple)) and (found := _first(arg, cls)) is not None:
            return found
    return None
