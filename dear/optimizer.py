"""The optimizer that users wrap around their own."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from dearcore.communicator import Communicator
from dearcore.errors import ArgumentError, CommunicatorError, ScheduleError
from dearcore.heartbeat import Activity
from dearcore.layout import NearbyLayers, Plan
from dearcore.schedule import Schedule
from dearcore.shard import steps_on_shards
from dearcore.streams import Streams
from dearcore.trace import Trace

from . import checkpoint
from .agreement import check_agreement, describe
from .bindings import Bindings
from .context import current
from .gradients import local_gradient
from .parameters import without_waiting
from .planning import check_fusion, make_plan, make_schedule
from .replica import Numerics, Replica, settle_gradient
from .stats import Stats, WaitLog
from .tracked import TrackedParameter, track
from .update import ShardedUpdate, Update, WholeUpdate

__all__ = ["DistributedOptimizer"]

_REFUSED = {
    "LBFGS": "it evaluates the model several times in one step",
    "SparseAdam": "it needs sparse gradients, and averaged gradients are dense (use Adam)",
}
# id of a parameter -> the optimizer that trains it
_owners: weakref.WeakValueDictionary[int, DistributedOptimizer] = weakref.WeakValueDictionary()


class DistributedOptimizer(optim.Optimizer):
    """Trains an unmodified module on several ranks with all communication hidden behind backward and forward.

    Construction broadcasts parameters and buffers from the first rank of the group, after a check that all ranks wrap
    the same thing. From then on `backward()` averages gradients over ranks, `step()` updates this rank's part of the
    weights, and the next forward waits for the others' parts layer by layer, where it touches them. Parameters are
    fresh wherever Python touches them.

    Args:
        optimizer: any torch optimizer over parameters of `model`. Element-wise ones (SGD, Adam, ...: exact types)
            step on shards; anything else gets whole averaged gradients and runs its own `step`.
        model: the module whose parameters are trained.
        schedule: the name of a schedule, or a Schedule.
        fusion: MiB a bucket (25.0), None for one bucket a tensor, `NearbyLayers(n)`, or a Plan.
        shard: "auto" by optimizer; True: gather parameters; False: gather gradients and run the optimizer's own step.
        accumulate: backward passes before gradients are averaged; the earlier ones stay local.
        reduce_dtype: dtype of gradients on the wire; None: each parameter's own.
        master_dtype: dtype of the shards of bf16 and fp16 parameters; None keeps no masters.
        broadcast_buffers: give every rank the first rank's buffers before each training forward.
        group: ranks that train together: a torch ProcessGroup, a list of ranks, or None for all.

    Raises:
        ArgumentError: (a ValueError) bad arguments, or ranks that wrap different things; the same on every rank.
        ScheduleError: `dear.init()` was not called.
    """

    def __init__(  # no super().__init__: groups, state and defaults are the wrapped optimizer's own
        self,
        optimizer: optim.Optimizer,
        model: nn.Module,
        *,
        schedule: str | Schedule = "dear",
        fusion: float | NearbyLayers | Plan | None = 25.0,
        shard: bool | str = "auto",
        accumulate: int = 1,
        reduce_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        broadcast_buffers: bool = False,
        group: object = None,
    ) -> None:
        world = current().world
        _check_arguments(optimizer, model, shard, accumulate, reduce_dtype, master_dtype)
        check_fusion(fusion)
        self._optimizer, self._model = optimizer, model
        self._accumulate = accumulate
        self._sharded = steps_on_shards(optimizer) if shard == "auto" else bool(shard)
        self._fusion, self._schedule_wish = fusion, schedule
        this = weakref.ref(self)  # parameters must not keep the optimizer alive
        self._tracked = track(optimizer, model, functools.partial(_unscale, this))
        _claim(self._tracked, self)
        self._trace = Trace()
        self._log = WaitLog(model)
        self._communicator: Communicator
        self._communicator, self._peers = world.new_communicator(world.ranks_of(group))
        self._streams = Streams(self._tracked[0].param.device, self._trace)
        self._numerics = Numerics(reduce_dtype, master_dtype)
        options = [
            f"schedule {schedule}, fusion {fusion}, shard {self._sharded}, accumulate {accumulate}, reduce_dtype "
            f"{reduce_dtype}, master_dtype {master_dtype}, broadcast_buffers {broadcast_buffers}"
        ]
        check_agreement(describe(model, optimizer, options), self._gather_objects)
        self._adopt_layout_of_first_rank()
        self._broadcast([*model.parameters(), *model.buffers()])
        self._local_only = self._closed = self._unscaled = False
        self._passes = bytearray(len(self._tracked))
        self._replica, self._update = self._build(
            list(range(len(self._tracked))), observing=not isinstance(fusion, Plan)
        )
        if any(optimizer.state.values()):
            self._adopt_state({id(param): dict(state) for param, state in optimizer.state.items()})
        self._bindings = Bindings(model, self._tracked, optimizer)
        self._handles: list[Any] = []
        for index, tracked in enumerate(self._tracked):
            bell = functools.partial(_ring, this, index)
            self._handles.append(tracked.param.register_post_accumulate_grad_hook(bell))  # type: ignore[no-untyped-call]
        if broadcast_buffers:
            self._handles.append(model.register_forward_pre_hook(self._broadcast_buffers))
        optim.Optimizer.__setstate__(self, {})  # hook tables, profiler range around step
        world.on_shutdown(self)
        self._peers.watch(functools.partial(_activity, this))
        self._finalizer = weakref.finalize(self, _end, self._streams, self._communicator)
        self._finalizer.atexit = False  # dear.shutdown sees to that

    # -- what torch.optim.Optimizer offers ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state; that of sharded parameters is in `state_dict()`."""
        return self._optimizer.state

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r}, {self.plan.fusion}, {len(self.plan.buckets)} buckets)"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ScheduleError(
            "add_param_group after wrapping would leave the new parameters unsynchronised. Call close(), "
            "add the group to "
            "the torch optimizer, and wrap again."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters with the gradients averaged over all ranks. Collective.

        Returns the closure's value, as torch does. At return the work is enqueued; parameters are fresh wherever
        they are touched. Parameters that no rank used stay as they are.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_gradients()
        self._update.step()
        self._begin_iteration()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those that are being averaged. With set_to_none=False they become zeros."""
        self._check_open()
        replica = self._replica
        with without_waiting():
            if set_to_none:
                for tracked in self._tracked:
                    tracked.param.grad = None
                    tracked.in_flight.local = None
            self._unscaled = False
            if (
                replica.scheduler.has_begun
            ):  # reductions may be under way: every rank launches the rest, then starts anew
                if not replica.scheduler.observing:
                    replica.scheduler.finish_gradients()
                    replica.reduced.clear()
                replica.scheduler.restart()
                self._passes[:] = bytes(len(self._passes))
                if set_to_none:
                    for tracked in self._tracked:
                        tracked.param.grad = None
            if not set_to_none:
                for tracked in self._tracked:
                    if tracked.param.grad is not None:
                        tracked.param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own format, whole, the same on every rank. Collective: call it on all ranks."""
        self._check_open()
        whole = self._optimizer.state_dict()
        if self._sharded:
            numbers = checkpoint.packed_indices(self._optimizer)
            states = checkpoint.export_state(self._replica)
            whole["state"] = {numbers[id(self._tracked[index].param)]: state for index, state in sorted(states.items())}
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state saved by this or the plain torch optimizer on any number of ranks. Call it on all ranks."""
        self._check_open()
        if not self._sharded:
            self._optimizer.load_state_dict(dict(state_dict))
            return
        self._adopt_state(checkpoint.load_into_groups(self._optimizer, state_dict))

    # -- beyond torch ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The buckets. After the first backward they follow the order in which gradients arrived on the first rank."""
        return self._replica.plan

    @property
    def schedule(self) -> Schedule:
        return self._replica.schedule

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent in reduce-scatters and all-gathers so far."""
        return self._communicator.bytes_sent

    @property
    def trace(self) -> Trace:
        """Set `trace.enabled` to collect spans of every pack, collective and step."""
        return self._trace

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; the first one outside averages the sum."""
        before, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm is at most `max_norm`. Collective.

        Returns the norm before clipping over all parameters and ranks, the same number everywhere, as
        `torch.nn.utils.clip_grad_norm_` would on one process.
        """
        self._check_open()
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0 or not norm_type > 0:
            raise ArgumentError(
                f"clip_grad_norm_ expects max_norm >= 0 and norm_type > 0, got {max_norm}, {norm_type}."
            )
        self._finish_gradients()
        norm = self._update.norm(norm_type).to(self._streams.device, torch.float32)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._update.change_gradients(lambda grad: grad.mul_(factor))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the averaged gradients to [-clip_value, clip_value]. Collective."""
        self._check_open()
        clip_value = float(clip_value)
        if not clip_value >= 0:
            raise ArgumentError(f"clip_grad_value_ expects a value >= 0, got {clip_value}.")
        self._finish_gradients()
        self._update.change_gradients(lambda grad: grad.clamp_(-clip_value, clip_value))

    def full_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the averaged gradient of `param`, whole, on every rank. Collective, after backward."""
        self._check_open()
        tracked = next((t for t in self._tracked if t.param is param), None)
        if tracked is None:
            raise ArgumentError(
                f"full_grad expects a parameter that this optimizer trains, got a tensor of shape {tuple(param.shape)}."
            )
        self._finish_gradients()
        return self._update.full_grad(tracked)

    def synchronize(self) -> None:
        """Blocks the host until every parameter is up to date."""
        self._check_open()
        self._replica.wait_fresh()
        for bucket in self._replica.buckets:
            bucket.params_fresh.wait_host()

    def stats(self) -> Stats:
        """Where time went: the longest waits by bucket and module. Local to this rank; `print` shows a table."""
        return self._log.stats(self.plan, self._communicator.rank, self.bytes_sent, self._peers.read())

    def close(self) -> None:
        """Ends what is under way, removes every hook, gives parameters memory of their own. Call on all ranks."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for tracked in self._tracked:
            _owners.pop(id(tracked.param), None)
        with contextlib.suppress(CommunicatorError):  # the gates stay: whoever touches a parameter is told
            self._replica.release()
        self._finalizer.detach()
        self._peers.forget()
        _end(self._streams, self._communicator)
        with without_waiting():
            for tracked in self._tracked:
                if tracked.param.grad is tracked.in_flight:
                    tracked.param.grad = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _grad_arrived(self, index: int, param: nn.Parameter) -> None:
        """The doorbell of one parameter."""
        if self._local_only:
            return
        tracked = self._tracked[index]
        if self._accumulate > 1:
            self._passes[index] = passes = min(self._passes[index] + 1, 255)
            if passes < self._accumulate:
                return
        grad = param.grad
        if grad is not tracked.in_flight:
            assert grad is not None
            tracked.in_flight.local = local_gradient(grad)
            tracked.retained = False
            param.grad = tracked.in_flight
        self._replica.scheduler.grad_ready(index)

    def _finish_gradients(self) -> None:
        """Brings every gradient of this iteration under way, whatever the user did to `p.grad`. Collective."""
        self._bindings.check()
        replica = self._replica
        if replica.scheduler.observing:
            replica = self._adopt_observed_order()
        dropped: list[TrackedParameter] = []
        with without_waiting():
            for tracked in self._tracked:
                if tracked.param.grad is not tracked.in_flight:
                    was_retained = tracked.retained
                    settle_gradient(tracked)
                    if was_retained and tracked.in_flight.local is None:
                        dropped.append(tracked)
                if tracked.in_flight.local is not None:
                    replica.scheduler.mark_dirty(tracked.spec.index)
        replica.drop([t.spec.index for t in dropped])
        replica.scheduler.finish_gradients()
        self._update.gradients_finished()

    def _begin_iteration(self) -> None:
        self._replica.step += 1
        self._unscaled = False
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers made before wrapping ask for it
        self._log.step_ended()
        if self._accumulate > 1:
            self._passes[:] = bytes(len(self._passes))

    def _build(self, forward_order: list[int], observing: bool) -> tuple[Replica, Update]:
        """Lays out the parameters for a plan over `forward_order` and makes what runs it."""
        specs = [self._tracked[index].spec for index in forward_order]
        plan = make_plan(self._fusion, specs, self._communicator.size if self._sharded else 1)
        schedule = make_schedule(self._schedule_wish, plan, self._sharded)
        replica = Replica(
            plan,
            schedule,
            self._tracked,
            self._communicator,
            self._streams,
            self._numerics,
            self._log.waited,
            observing,
        )
        return replica, (ShardedUpdate if self._sharded else WholeUpdate)(replica, self._optimizer)

    def _adopt_observed_order(self) -> Replica:
        """The first backward has shown the order of gradients: lay out anew if the first rank saw another one."""
        scheduler = self._replica.scheduler
        missing = set(range(len(self._tracked))) - set(scheduler.order)
        # what never got a gradient goes last in the backward, where it delays nobody's reduction
        observed = [*sorted(missing), *reversed(scheduler.order)] if scheduler.order else None
        order: list[int] | None = self._gather_objects(observed)[0]
        planned = [slot.param for bucket in self._replica.plan.buckets for slot in bucket.slots if slot.start == 0]
        scheduler.observing = False
        if order is not None and order != planned:
            states = checkpoint.export_state(self._replica) if self._sharded else {}
            step = self._replica.step
            self._replica, self._update = self._build(order, observing=False)
            self._replica.step = step
            if states:
                checkpoint.import_state(self._replica, states)
            self._bindings.rebind()
        return self._replica

    def _adopt_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        if not self._sharded:
            return
        by_index = {t.spec.index: states[id(t.param)] for t in self._tracked if states.get(id(t.param))}
        checkpoint.import_state(self._replica, by_index)
        for tracked in self._tracked:
            self._optimizer.state.pop(tracked.param, None)

    def _adopt_layout_of_first_rank(self) -> None:
        """Memory formats may differ from rank to rank; buckets need one."""
        for tracked, strides in zip(
            self._tracked, self._gather_objects([t.strides for t in self._tracked])[0], strict=True
        ):
            tracked.strides = strides

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        stream = self._streams.communication
        with torch.no_grad():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            for copy in copies:
                self._communicator.start_broadcast(copy, 0, stream, "broadcast of the first rank's values")
            self._wait_communication()
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.detach().copy_(copy)

    def _broadcast_buffers(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._broadcast(list(self._model.buffers()))

    def _gather_objects(self, mine: Any) -> list[Any]:
        gathered: list[Any] = []
        stream = self._streams.communication
        self._communicator.start_gather_objects(mine, gathered, stream, "agreement")
        self._wait_communication()
        return gathered

    def _wait_communication(self) -> None:
        passed = self._streams.new_event()
        self._streams.communication.record(passed)
        passed.wait_host()

    def _unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """What torch's GradScaler asks of in-flight gradients; it asks once for each dtype, we answer once for all."""
        if not self._unscaled:
            self._unscaled = True
            self._finish_gradients()
            self._update.unscale(found_inf, inv_scale)

    def _owns(self, param: nn.Parameter) -> bool:
        return not self._closed and any(t.param is param for t in self._tracked)

    def _check_open(self) -> None:
        if self._closed:
            raise ScheduleError("this DistributedOptimizer was closed. Wrap the torch optimizer again.")


def _ring(this: weakref.ref[DistributedOptimizer], index: int, param: nn.Parameter) -> None:
    owner = this()
    if owner is not None:
        owner._grad_arrived(index, param)


def _unscale(this: weakref.ref[DistributedOptimizer], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    owner = this()
    if owner is not None:
        owner._unscale(found_inf, inv_scale)


def _activity(this: weakref.ref[DistributedOptimizer]) -> Activity:
    owner = this()
    if owner is None:
        return Activity(0, "", 0.0)
    communicator = owner._communicator
    return Activity(owner._replica.step, communicator.doing, owner._log.waited_ms, communicator.failed)


def _end(streams: Streams, communicator: Communicator) -> None:
    """Lets what was enqueued drain, with a deadline: peers may still need this rank's part."""
    streams.close()
    communicator.close()


def _claim(tracked: list[TrackedParameter], owner: DistributedOptimizer) -> None:
    for t in tracked:
        if id(t.param) in _owners and _owners[id(t.param)]._owns(t.param):
            raise ArgumentError(
                f"parameter '{t.spec.fqn}' is trained by another DistributedOptimizer already. Give each "
                f"parameter to one "
                "optimizer, or close() the other one first."
            )
    for t in tracked:
        _owners[id(t.param)] = owner


def _check_arguments(
    optimizer: Any, model: Any, shard: Any, accumulate: Any, reduce_dtype: Any, master_dtype: Any
) -> None:
    if isinstance(optimizer, DistributedOptimizer):
        raise ArgumentError("this optimizer is a DistributedOptimizer already. Wrap the torch optimizer once.")
    if not isinstance(optimizer, optim.Optimizer):
        raise ArgumentError(f"optimizer expects a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model expects the torch.nn.Module that is trained, got {type(model).__name__}.")
    name = type(optimizer).__name__
    if name in _REFUSED and type(optimizer).__module__.startswith("torch.optim"):
        raise ArgumentError(f"{name} cannot be distributed: {_REFUSED[name]}. Choose another optimizer.")
    if shard not in (True, False, "auto"):
        raise ArgumentError(f"shard={shard!r}; expected True, False or 'auto'.")
    if shard is True and not steps_on_shards(optimizer):
        raise ArgumentError(
            f"shard=True, but {name} is not known to be element-wise: on a part of a parameter it could "
            f"compute something "
            "else. Use shard='auto'."
        )
    if not isinstance(accumulate, int) or not 1 <= accumulate <= 255:
        raise ArgumentError(f"accumulate={accumulate!r}; expected a whole number of backward passes from 1 to 255.")
    for label, dtype in (("reduce_dtype", reduce_dtype), ("master_dtype", master_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"{label}={dtype!r}; expected a floating-point torch.dtype or None.")
