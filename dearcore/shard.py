"""The optimizer step on one shard of one bucket.

A shard crosses parameters and parameter groups. Element-wise optimizers do not mind: neighbouring segments of one group
with the same history are stepped as one tensor (a *run*) by the very class that the user chose, with the user's flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import nn, optim

__all__ = [
    "ELEMENTWISE",
    "OwnedSegment",
    "SegmentState",
    "ShardStepper",
    "TorchStepper",
    "state_after_steps",
    "step_with_own_hooks",
    "steps_on_shards",
]

# Exact types whose update of an element depends on that element's history alone.
ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)

NOT_HYPER = ("params", "param_names")

SegmentState = dict[str, Any]  # of one segment: element-wise tensors [numel], and whatever else the optimizer keeps


def steps_on_shards(optimizer: optim.Optimizer) -> bool:
    """True if the optimizer's exact class is known to be element-wise.

    A subclass may do anything, so it is not, nor is an optimizer whose `step` was replaced.
    """
    return type(optimizer) in ELEMENTWISE and _is_class_step(optimizer)


def _is_class_step(optimizer: optim.Optimizer) -> bool:
    """True unless `step` was replaced on the object, by others than LR schedulers, which count its calls."""
    step = vars(optimizer).get("step")
    of_scheduler = getattr(step, "_wrapped_by_lr_sched", False)
    return step is None or (of_scheduler and getattr(step, "__wrapped__", None) is type(optimizer).step)


def step_with_own_hooks(optimizer: optim.Optimizer) -> None:
    """The optimizer's step with the hooks that were registered on it.

    Those that were registered for all optimizers are not called: they belong to the step of which this one is a part.
    A `step` that was replaced on the object, and optimizers that this one steps in turn, do as they do in plain torch.
    """
    step = _unhooked_step(optimizer)
    if step == optimizer.step:
        step()
        return
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for before in list(optimizer._optimizer_step_pre_hooks.values()):
        changed: Any = before(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    step(*args[1:], **kwargs)
    for after in list(optimizer._optimizer_step_post_hooks.values()):
        after(optimizer, args, kwargs)


def _unhooked_step(optimizer: optim.Optimizer) -> Callable[..., Any]:
    """The bound `step` without what torch wraps around that of each class: hooks, and a range for profilers."""
    of_class: Any = type(optimizer).step
    if not _is_class_step(optimizer) or getattr(of_class, "__code__", None) is not _HOOKING:
        return optimizer.step
    return cast("Callable[..., Any]", of_class.__wrapped__.__get__(optimizer))


# of what torch puts in place of the `step` of each class
_HOOKING = optim.Optimizer.profile_hook_step(lambda _: None).__code__


@dataclass(frozen=True, slots=True)
class OwnedSegment:
    """A segment of this rank's shard: [offset, offset + numel) with the options of parameter group `group`.

    grad_dtype: of the gradients that the optimizer gets to see; None: that of the shard.
    """

    param: int
    start: int  # in the parameter, memory order
    offset: int  # in the shard
    numel: int
    flag: int
    group: int
    grad_dtype: torch.dtype | None = None


class ShardStepper(Protocol):
    def step(self, used: torch.Tensor, hyper: Sequence[dict[str, Any]]) -> None:
        """Steps the segments whose entry in `used` [num_segments] is not zero; the others do not change."""

    def export_state(self) -> list[SegmentState]:
        """A copy of the state of every owned segment, {} where there is none yet."""

    def load_state(self, states: Sequence[SegmentState]) -> None:
        """Replaces the state of every owned segment."""

    def snapshot(self) -> Callable[[], None]:
        """Returns what brings the present state back, once; parameters are the caller's business."""


def state_after_steps(
    optimizer: optim.Optimizer, group: int, dtype: torch.dtype, grad_dtype: torch.dtype | None, device: torch.device
) -> SegmentState:
    """Which states the optimizer's class keeps with the options of a group, seen on a parameter of two elements.

    Raises what the optimizer raises that cannot step gradients of `grad_dtype` (None: `dtype`).
    """
    param = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
    param.grad_dtype = grad_dtype or dtype
    options = {k: v for k, v in optimizer.param_groups[group].items() if k not in NOT_HYPER}
    known = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    probe = type(optimizer)([{"params": [param], **options}], **defaults)
    for _ in range(2):  # some states are used by the second step only
        param.grad = torch.zeros(2, dtype=param.grad_dtype, device=device)
        step_with_own_hooks(probe)
    return dict(probe.state[param])


@dataclass(slots=True)
class _Run:
    param: nn.Parameter
    grad: torch.Tensor
    group: int
    members: list[int] = field(default_factory=list)  # positions in the list of owned segments
    average: torch.Tensor | None = None  # to be rounded to the dtype of `grad` before each step


class TorchStepper:
    """Steps a shard with the wrapped optimizer's exact class.

    Args:
        optimizer: the wrapped optimizer; only its class and defaults are used.
        segments: in the order of offsets.
        param_shard, grad_shard: [shard_numel], same dtype; elements between two segments are padding (zeros).
        low_precision_shard: [shard_numel], receives the new parameters, rounded.
        average_shard: [shard_numel], `grad_shard` before it was rounded, for segments with a `grad_dtype` of their own;
            None: it was not.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        segments: Sequence[OwnedSegment],
        param_shard: torch.Tensor,
        grad_shard: torch.Tensor,
        low_precision_shard: torch.Tensor | None = None,
        average_shard: torch.Tensor | None = None,
    ) -> None:
        self._low_precision = low_precision_shard
        self._average_shard = grad_shard if average_shard is None else average_shard
        self._class = type(optimizer)
        known = inspect.signature(self._class.__init__).parameters
        self._defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
        self._segments = segments
        self._param_shard, self._grad_shard = param_shard, grad_shard
        self._runs: list[_Run] = []
        self._inner: optim.Optimizer | None = None
        self._regroup({})

    def step(self, used: torch.Tensor, hyper: Sequence[dict[str, Any]]) -> None:
        if not self._runs:
            return
        if self._inner is None:
            self._build(hyper)
        flags = used.tolist()
        if not all(flags):
            self._split_mixed([flag > 0 for flag in flags])
        for run in self._runs:
            if run.average is not None:
                run.grad.copy_(run.average)
            run.param.grad = run.grad if flags[run.members[0]] else None
        assert self._inner is not None
        for group in self._inner.param_groups:
            group.update(hyper[group["dear_group"]])
        _unhooked_step(self._inner)()
        if self._low_precision is not None:
            self._low_precision.copy_(self._param_shard)

    def export_state(self) -> list[SegmentState]:
        states: list[SegmentState] = [{} for _ in self._segments]
        for run, state in zip(self._runs, self._run_states(), strict=True):
            run_start = self._segments[run.members[0]].offset
            for member in run.members:
                segment = self._segments[member]
                states[member] = _sliced(state, run.param, segment.offset - run_start, segment.numel, copy=True)
        return states

    def _run_states(self) -> list[SegmentState]:
        if self._inner is not None:
            return [self._inner.state.get(run.param, {}) for run in self._runs]
        return self._loaded or [{} for _ in self._runs]

    def load_state(self, states: Sequence[SegmentState]) -> None:
        self._inner = None
        self._regroup({member: state for member, state in enumerate(states) if state})
        self._loaded = [
            _joined([states[member] for member in run.members], [self._segments[m] for m in run.members], run.param)
            for run in self._runs
        ]

    def snapshot(self) -> Callable[[], None]:
        runs, states = self._runs, [_cloned(state) for state in self._run_states()]

        def restore() -> None:
            self._runs, self._inner, self._loaded = runs, None, states

        return restore

    _loaded: list[SegmentState] | None = None

    def _build(self, hyper: Sequence[dict[str, Any]]) -> None:
        groups = [
            {"params": [run.param for run in runs], "dear_group": group, **hyper[group]}
            for group, runs in groupby(sorted(self._runs, key=lambda run: run.group), key=lambda run: run.group)
        ]
        self._inner = self._class(groups, **self._defaults)
        if self._loaded is not None:
            for run, state in zip(self._runs, self._loaded, strict=True):
                if state:
                    self._inner.state[run.param] = state
            self._loaded = None

    def _regroup(self, states: dict[int, SegmentState]) -> None:
        """Makes the longest runs of neighbours with one group and one history."""
        self._runs = []
        for _, members in groupby(
            range(len(self._segments)),
            key=lambda m: (
                self._segments[m].group,
                self._segments[m].grad_dtype,
                _history(states.get(m, {}), self._segments[m]),
            ),
        ):
            self._runs.append(self._new_run(list(members)))

    def _new_run(self, members: list[int]) -> _Run:
        first, last = self._segments[members[0]], self._segments[members[-1]]
        span = slice(first.offset, last.offset + last.numel)
        param = nn.Parameter(self._param_shard[span], requires_grad=True)
        if first.grad_dtype is None:
            return _Run(param, self._grad_shard[span], first.group, members)
        param.grad_dtype = first.grad_dtype
        average = self._average_shard[span]
        return _Run(param, average.to(first.grad_dtype, copy=True), first.group, members, average)

    def _split_mixed(self, used: Sequence[bool]) -> None:
        """Cuts runs of which only a part was used: from now on their parts have different histories."""
        if all(used[m] == used[run.members[0]] for run in self._runs for m in run.members):
            return
        runs: list[_Run] = []
        for run in self._runs:
            parts = [list(members) for _, members in groupby(run.members, key=lambda m: used[m])]
            runs.extend([run] if len(parts) == 1 else self._cut(run, parts))
        self._runs = runs
        if self._inner is not None:
            for group in self._inner.param_groups:
                group["params"] = [run.param for run in runs if run.group == group["dear_group"]]

    def _cut(self, run: _Run, parts: Iterable[list[int]]) -> list[_Run]:
        state = self._inner.state.pop(run.param, {}) if self._inner is not None else {}
        run_start = self._segments[run.members[0]].offset
        runs = [self._new_run(members) for members in parts]
        for part in runs:
            if state and self._inner is not None:
                start = self._segments[part.members[0]].offset - run_start
                self._inner.state[part.param] = _sliced(state, run.param, start, part.param.numel(), copy=False)
        return runs


def _is_elementwise(value: object, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape


def _cloned(state: SegmentState) -> SegmentState:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _sliced(state: SegmentState, param: torch.Tensor, start: int, numel: int, copy: bool) -> SegmentState:
    """The state of a part of `param`: element-wise tensors cut (views unless `copy`), all else cloned."""
    part: SegmentState = {}
    for key, value in state.items():
        if _is_elementwise(value, param):
            cut = value[start : start + numel]
            part[key] = cut.clone() if copy else cut
        else:
            part[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return part


def _joined(states: Sequence[SegmentState], segments: Sequence[OwnedSegment], param: torch.Tensor) -> SegmentState:
    """The state of a run from the states of its segments; padding between them gets zeros."""
    first, run_start = states[0], segments[0].offset
    joined: SegmentState = {}
    for key, value in first.items():
        if _has_elements_of(value, segments[0]):
            whole = torch.zeros(param.shape, dtype=value.dtype, device=param.device)
            for state, segment in zip(states, segments, strict=True):
                at = segment.offset - run_start
                whole[at : at + segment.numel] = state[key]
            joined[key] = whole
        else:
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined


def _has_elements_of(value: object, segment: OwnedSegment) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == segment.numel


def _history(state: SegmentState, segment: OwnedSegment) -> tuple[Any, ...]:
    """What two segments must share to be stepped as one: the same keys, the same values that are not element-wise."""
    return tuple(
        (key, str(value.dtype) if _has_elements_of(value, segment) else _plain(value))
        for key, value in sorted(state.items())
    )


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value
