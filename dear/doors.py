"""Waits in front of modules that read parameters below Python's dispatch: compiled ones, TorchScript.

Known modules of that kind get a door: a wait before their call. Where a compiler touches a pending parameter and no
door stands before it, that parameter's gate is not armed any more: `step()` itself waits for it. Eager models have no
doors and pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .parameters import Gate

__all__ = ["Doors", "OwnHook", "compiled_params", "hide_from_dynamo"]

_hidden_from: list[Any] = []  # dynamo, once it has been told; telling it again makes it slower each time


class OwnHook:
    """A forward pre-hook of ours. Copies and pickles of the module carry only a function that does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


class _CompiledDoor:
    """Stands in for `Module._compiled_call_impl`, which copies and pickles of the module drop by themselves."""

    def __init__(self, wait: Callable[[], None], compiled: Callable[..., Any]) -> None:
        self.compiled, self._wait = compiled, wait

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return self.compiled(*args, **kwargs)


class Doors:
    """Finds the modules that need a door: at first, and again whenever a compiler has touched a gate."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: dict[int, Any] = {}
        self._compiled: list[tuple[nn.Module, _CompiledDoor]] = []
        self._has_looked = False

    def refresh(self, gates: Sequence[Gate]) -> None:
        touched = [gate for gate in gates if gate.compiler_touched]
        if self._has_looked and not touched:
            return
        self._has_looked = True
        covered = self._look(gates)
        for gate in touched:
            gate.compiler_touched = False
            gate.is_eager = gate.is_eager or gate not in covered

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        for module, door in self._compiled:
            if module._compiled_call_impl is door:
                module._compiled_call_impl = door.compiled

    def _look(self, gates: Sequence[Gate]) -> set[Gate]:
        """Puts doors where there are none yet. Returns the gates that a new door covers."""
        covered: set[Gate] = set()
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        optimized = (eval_frame.OptimizedModule,) if eval_frame is not None else ()
        for module in self._model.modules():
            compiled = module._compiled_call_impl
            if isinstance(module, torch.jit.ScriptModule):
                for gate in _behind(module, gates):
                    gate.is_eager = True
            elif isinstance(module, optimized):  # its hooks run outside the compiled frame
                covered.update(self._hook(module, _behind(module, gates)))
            elif compiled is not None and not isinstance(compiled, _CompiledDoor):
                inside = _behind(module, gates)
                door = _CompiledDoor(_waiting_for(inside), compiled)
                module._compiled_call_impl = door
                self._compiled.append((module, door))
                covered.update(inside)
        return covered

    def _hook(self, module: nn.Module, inside: Sequence[Gate]) -> Sequence[Gate]:
        if not inside or id(module) in self._handles:
            return ()
        wait = _waiting_for(inside)
        self._handles[id(module)] = module.register_forward_pre_hook(OwnHook(lambda *_: wait()), prepend=True)
        return inside


def compiled_params(model: nn.Module) -> set[int]:
    """ids of the parameters of compiled and scripted modules, which are read below Python's dispatch."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    optimized = (eval_frame.OptimizedModule,) if eval_frame is not None else ()
    return {
        id(param)
        for module in model.modules()
        if module._compiled_call_impl is not None or isinstance(module, (torch.jit.ScriptModule, *optimized))
        for param in module.parameters()
    }


def hide_from_dynamo() -> None:
    """Compiled training loops call our hooks and `step`, but never trace into them."""
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")  # there whenever somebody may compile
    if trace_rules is not None and not _hidden_from:
        _hidden_from.append(trace_rules)
        for package in ("dear", "dearcore", "dear_kernels"):
            trace_rules.add(package)


def nothing(*_: Any) -> None:
    """What is left of a door in a copy of a module."""


def _no_hook() -> Callable[..., None]:
    return nothing


def _behind(module: nn.Module, gates: Sequence[Gate]) -> list[Gate]:
    params = {id(param) for param in module.parameters()}
    return [gate for gate in gates if gate.holds_any(params)]


def _waiting_for(gates: Sequence[Gate]) -> Callable[[], None]:
    def wait() -> None:
        for gate in gates:
            gate.wait()

    hidden: Callable[[], None] = torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
    return hidden
