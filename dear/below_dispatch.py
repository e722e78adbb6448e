"""Where torch takes a tensor without asking its class: waits that are put in front of a few of torch's own functions.

`__torch_function__` hears of nearly every use of a pending parameter. Not of these, which look at memory or keep an
alias of it: `nn.Parameter(p)`, `t.data = p` and `torch.jit.trace(model, ...)`. They are wrapped once in a process, when
the first optimizer is built: a check of the argument's class, then the original. What cannot be wrapped so
(`torch.tensor(p)`, which compilers know by identity) stands in README.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .parameters import PendingParameter

__all__ = ["install"]

_is_installed: list[bool] = []


def install() -> None:
    """Wraps them, once. What they do otherwise, and their signatures, stay as they are."""
    if _is_installed:
        return
    _is_installed.append(True)
    _wrap_parameter()
    _wrap_data()
    _wrap_trace()


def _wait(value: object) -> None:
    kind = type(value)
    if issubclass(kind, PendingParameter):
        kind.dear_gate.wait((value,))


def _wrap_parameter() -> None:
    original = nn.Parameter.__new__

    @functools.wraps(original)
    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        _wait(data)
        return original(cls, data, requires_grad)

    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]


def _wrap_data() -> None:
    """Assigning `t.data` asks the class of `t`, not of what is assigned. Reading it asks already."""
    original: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.data

    def assign(tensor: torch.Tensor, value: Any) -> None:
        _wait(value)
        original.__set__(tensor, value)

    torch.Tensor.data = property(original.__get__, assign)  # type: ignore[assignment]


def _wrap_trace() -> None:
    """A parameter that becomes fresh during a trace leaves our own frame in the graph, and torch finds it changed."""
    owners: tuple[Any, ...] = (torch.jit, torch.jit._trace)
    for owner in owners:
        original: Callable[..., Any] = owner.trace_module

        @functools.wraps(original)
        def trace_module(mod: nn.Module, *args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            for param in mod.parameters():
                _wait(param)
            return original(mod, *args, **kwargs)

        owner.trace_module = trace_module
