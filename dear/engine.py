"""What a DistributedOptimizer is made of: it ties parameters, plan, streams and ranks together and hears the hooks."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

from dearcore.communicator import Communicator
from dearcore.errors import ArgumentError, ScheduleError
from dearcore.heartbeat import Activity, Peers
from dearcore.layout import NearbyLayers, Plan
from dearcore.profile import Profile
from dearcore.rendezvous import World
from dearcore.schedule import Schedule
from dearcore.streams import Streams
from dearcore.trace import Trace

from . import checkpoint
from .adaptation import Beside, measure_and_plan
from .agreement import check_agreement, describe, described_profile
from .bindings import Bindings
from .doors import Doors, OwnHook, hide_from_dynamo
from .gradients import local_gradient
from .parameters import without_waiting
from .planning import AUTO, make_plan_and_schedule, needs_times
from .recorder import Recorder
from .relayout import move_shards
from .replica import Numerics, Replica, settle_gradient
from .stats import WaitLog
from .tracked import TrackedParameter, track
from .tuner import check_installed, is_installed
from .update import ShardedUpdate, Update, WholeUpdate, snapshot_hyper

__all__ = ["Engine", "Options"]

# Below this, handing work from thread to thread costs more than overlapping it gains: `python -m bench overhead`.
ONE_WORKER_BYTES = 4 * 1024 * 1024
FILL = "dear-fill"

_owners: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()  # id of a parameter -> its engine


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked. `sharded`: the optimizer steps on shards."""

    schedule: str | Schedule
    fusion: float | NearbyLayers | Plan | str | None
    profile: Profile | None = field(repr=False)  # told line by line
    sharded: bool
    accumulate: int
    reduce_dtype: torch.dtype | None
    master_dtype: torch.dtype | None
    broadcast_buffers: bool


class Engine:
    """Owns the hooks, the replica of the present plan and how it is updated. Every method is for all ranks alike.

    Construction is collective: it checks that all ranks wrap the same thing, then broadcasts from the first rank.
    """

    def __init__(
        self, optimizer: optim.Optimizer, model: nn.Module, options: Options, world: World, ranks: tuple[int, ...]
    ) -> None:
        self.optimizer, self.options = optimizer, options
        this = weakref.ref(self)  # parameters must not keep us alive
        self.tracked = track(optimizer, model, functools.partial(_unscale, this))
        self.closed = self.local_only = self._was_local = self._unscaled = False
        _check_unclaimed(self.tracked)
        self.trace = Trace()
        self.log = WaitLog(self.trace)
        self.communicator: Communicator
        self.peers: Peers
        self.communicator, self.peers = world.new_communicator(ranks)
        num_bytes = sum(t.spec.num_bytes for t in self.tracked)
        self.streams = Streams(self.tracked[0].param.device, self.trace, one_worker=num_bytes < ONE_WORKER_BYTES)
        self._finalizer = weakref.finalize(self, _end, self.streams, self.communicator)
        self._finalizer.atexit = False  # dear.shutdown sees to that
        self._handles: list[Any] = []
        self.model = model
        self.profile = options.profile
        self.recorder: Recorder | None = None  # while times are being taken
        self.beside = Beside()
        self._knows_order = False
        self._doors = Doors(model)
        hide_from_dynamo()
        try:
            self._start(model, this)
        except BaseException:
            self._finalizer()
            raise
        for tracked in self.tracked:
            _owners[id(tracked.param)] = self
        world.on_shutdown(self)
        self.peers.watch(functools.partial(_activity, this))

    def _start(self, model: nn.Module, this: weakref.ref[Engine]) -> None:
        adaptive = needs_times(self.options.schedule, self.options.fusion)
        lines = [str(self.options), *described_profile(self.profile)]
        if self.options.fusion == AUTO:
            lines.append(f"bayesian-optimization installed: {is_installed()}")
        check_agreement(describe(model, self.optimizer, lines), self.gather_objects)
        if self.options.fusion == AUTO:
            check_installed()
        # memory formats may differ from rank to rank; buckets need one
        for tracked, strides in zip(
            self.tracked, self.gather_objects([t.strides for t in self.tracked])[0], strict=True
        ):
            tracked.adopt_strides(strides)
        self.broadcast([*model.parameters(), *model.buffers()])
        self._passes = bytearray(len(self.tracked))
        if self.profile is not None:
            self.profile.check_fits([t.spec for t in self.tracked], self.communicator.size)
        observing = not isinstance(self.options.fusion, Plan) and self.profile is None
        self.replica, self.update = self._build(*self._plan(list(range(len(self.tracked)))), observing)
        if any(self.optimizer.state.values()):
            self.adopt_state({id(param): dict(state) for param, state in self.optimizer.state.items()})
        self._bindings = Bindings(model, self.tracked, self.optimizer)
        for index, tracked in enumerate(self.tracked):
            bell = functools.partial(_ring, this, index)
            self._handles.append(tracked.param.register_post_accumulate_grad_hook(bell))  # type: ignore[no-untyped-call]
        if self.options.broadcast_buffers:
            hook = OwnHook(functools.partial(_broadcast_buffers, this))
            self._handles.append(model.register_forward_pre_hook(hook))
        if adaptive and not (self.profile is not None and self.options.fusion != AUTO):
            self.beside.start(measure_and_plan(self))

    # -- an iteration ------------------------------------------------------------------------------------------------

    def grad_arrived(self, index: int, param: nn.Parameter) -> None:
        """The doorbell of one parameter."""
        if self.recorder is not None:
            self.recorder.grad_arrived(index)
        if self.local_only:
            self._was_local = True
            return
        tracked = self.tracked[index]
        self._unscaled = False
        grad = param.grad
        if grad is not tracked.in_flight:
            assert grad is not None
            # what no_sync() has left visible may be kept and used again by others
            tracked.in_flight.local = local_gradient(grad).clone() if self._was_local else local_gradient(grad)
            tracked.retained, tracked.whole = False, None
            try:
                param.grad = tracked.in_flight
            except RuntimeError:  # the parameter is not what it was when it was wrapped
                self._bindings.check()
                raise
        if self.options.accumulate > 1:
            self._passes[index] = passes = min(self._passes[index] + 1, 255)
            if passes < self.options.accumulate:
                return
        self.replica.scheduler.grad_ready(index)

    @contextlib.contextmanager
    def accumulating_locally(self) -> Iterator[None]:
        before, self.local_only = self.local_only, True
        try:
            yield
        finally:
            self.local_only = before

    def finish_gradients(self) -> None:
        """Brings every gradient of this iteration under way, whatever the user did to `p.grad`. Collective."""
        self._bindings.check()
        if self.replica.scheduler.observing and not self._knows_order:
            self._adopt_observed_order()
        replica = self.replica
        dropped: set[int] = set()
        zeroed: set[int] = set()
        with without_waiting():
            for tracked in self.tracked:
                in_flight, index = tracked.in_flight, tracked.spec.index
                if tracked.param.grad is not in_flight:
                    if tracked.holds_average():
                        continue
                    settle_gradient(tracked)
                if replica.scheduler.is_reduced(index):  # what the reduction left may be unwanted, or too little
                    if not tracked.retained or in_flight.zeroed:
                        replica.scheduler.check_not_stepped(index)
                    if not tracked.retained:
                        dropped.add(index)
                    elif in_flight.zeroed:
                        zeroed.add(index)
                    in_flight.zeroed = False
                    if in_flight.local is not None:
                        replica.scheduler.mark_late(index)
        replica.clear(dropped, zeroed)
        replica.scheduler.finish_gradients()
        self.update.gradients_finished()

    def step(self) -> None:
        """Applies the averaged gradients and begins the next iteration. Collective."""
        recorder = self.recorder
        if recorder is not None:
            recorder.end_iteration()
        start_s = time.perf_counter()
        self.finish_gradients()
        self.update.step()
        if recorder is not None:
            recorder.add_launch(time.perf_counter() - start_s)
        self.replica.step += 1
        self.log.step_ended()
        self._forget_passes()
        self.beside.step_ended()

    def zero_grad(self, set_to_none: bool) -> None:
        """Where gradients have arrived, reductions may be under way: every rank launches the rest, then begins anew."""
        scheduler = self.replica.scheduler
        self._unscaled = False
        with without_waiting():
            if set_to_none:
                self._forget_gradients()
            if scheduler.has_begun:
                if not scheduler.observing:
                    scheduler.finish_gradients()
                    self.replica.discard_early()
                    self.replica.reduced.clear()
                scheduler.restart()
                self._forget_passes()
                if set_to_none:
                    self._forget_gradients()
            if not set_to_none:
                for tracked in self.tracked:
                    if tracked.param.grad is not None:
                        tracked.param.grad.zero_()

    def unscale(
        self, found_inf: torch.Tensor, inv_scale: torch.Tensor, plain: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What torch's GradScaler asks of in-flight gradients; it asks once for each dtype, we answer once for all.

        `plain` are gradients that it asks for in the same breath. Ours among them are reduced first and unscaled with
        the rest; the others are returned.
        """
        with without_waiting():
            ours = {id(tracked.param.grad) for tracked in self.tracked}
        others = [grad for grad in plain if id(grad) not in ours]
        self.check_steps_wait("loss scaling", "whether all gradients are finite is known")
        if not self._unscaled:
            self.finish_gradients()
            self._unscaled = True
            self.update.unscale(found_inf, inv_scale)
        return others

    def check_steps_wait(self, what: str, known: str) -> None:
        """Raises ScheduleError if buckets are stepped in the backward, before what `what` needs is known."""
        schedule = self.options.schedule
        name = schedule if isinstance(schedule, str) else schedule.name
        if name == FILL or self.replica.early:
            raise ScheduleError(
                f"{what} does not go with schedule '{name}', which steps in the backward, before {known}. No weight "
                "has changed. Use schedule='dear'."
            )

    def _forget_gradients(self) -> None:
        for tracked in self.tracked:
            tracked.param.grad = tracked.whole = None
            tracked.in_flight.local = None

    def _forget_passes(self) -> None:
        self._unscaled = self._was_local = False
        if self.options.accumulate > 1:
            self._passes[:] = bytes(len(self._passes))

    # -- plan and state ----------------------------------------------------------------------------------------------

    def export_state(self) -> dict[int, dict[str, Any]]:
        """The whole state of every parameter, by its number in the optimizer. Collective."""
        self.replica.discard_early()
        numbers = checkpoint.packed_indices(self.optimizer)
        states = checkpoint.export_state(self.replica)
        return {numbers[id(self.tracked[index].param)]: state for index, state in sorted(states.items())}

    def adopt_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes this rank's part of the whole state of every parameter, by id. The optimizer keeps no copy."""
        self.replica.discard_early()
        if self.options.sharded:
            by_index = {t.spec.index: states[id(t.param)] for t in self.tracked if states.get(id(t.param))}
            checkpoint.import_state(self.replica, by_index)
            for tracked in self.tracked:
                self.optimizer.state.pop(tracked.param, None)

    def relayout(self, plan: Plan, schedule: Schedule) -> int:
        """Goes on with another plan: weights, state, counters and gradients stay bit for bit. Collective.

        Between `step()` and the first backward whose gradients are averaged; local gradients (no_sync, the earlier
        passes of `accumulate`) may be there. Costs a wait for the parameters that are under way, a copy of them in
        memory, for a moment both layouts at once, and the bytes that are returned: what this rank has sent, which is
        state, masters and averaged gradients that nobody has cleared, of elements whose owner changes.
        """
        if any(self.replica.scheduler.is_reduced(index) for index in range(len(self.tracked))):
            raise ScheduleError("a plan changes between steps, but gradients are being averaged. Call step() first.")
        if self.recorder is not None:
            self.recorder.release()
        self.replica.synchronize()
        old = self.replica
        self._doors.close()
        self._doors = Doors(self.model)
        self.replica, self.update = self._build(plan, schedule, observing=False)
        self.replica.step = old.step
        self.replica.inherit_gates(old)
        self.log.plan_changed()
        sent = move_shards(old, self.replica)
        self._bindings.rebind()
        return sent

    def _plan(self, forward_order: list[int]) -> tuple[Plan, Schedule]:
        options = self.options
        specs = [self.tracked[index].spec for index in forward_order]
        size = self.communicator.size
        return make_plan_and_schedule(options.schedule, options.fusion, specs, size, options.sharded, self.profile)

    def _build(self, plan: Plan, schedule: Schedule, observing: bool) -> tuple[Replica, Update]:
        """Lays out the parameters for a plan and makes what runs it."""
        options = self.options
        replica = Replica(
            plan,
            schedule,
            self.tracked,
            self.communicator,
            self.streams,
            self._doors,
            Numerics(options.reduce_dtype, options.master_dtype if options.sharded else None),
            self.log.waited,
            functools.partial(snapshot_hyper, self.optimizer),
            observing,
        )
        return replica, (ShardedUpdate if options.sharded else WholeUpdate)(replica, self.optimizer)

    def _adopt_observed_order(self) -> None:
        """The first backward has shown the order of gradients: lay out anew if the first rank saw another one."""
        scheduler = self.replica.scheduler
        missing = set(range(len(self.tracked))) - set(scheduler.order)
        # what never got a gradient goes last in the backward, where it delays nobody's reduction
        observed = [*sorted(missing), *reversed(scheduler.order)] if scheduler.order else None
        order: list[int] | None = self.gather_objects(observed)[0]
        planned = [slot.param for bucket in self.replica.plan.buckets for slot in bucket.slots if slot.start == 0]
        scheduler.observing, self._knows_order = False, True
        if order is not None and order != planned:
            self.relayout(*self._plan(order))

    # -- ranks -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Gives every rank the first rank's values, in place; blocks until done."""
        with torch.no_grad():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            for copy in copies:
                label = "broadcast of the first rank's values"
                self.communicator.start_broadcast(copy, 0, self.streams.communication, label)
            self._wait_communication()
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data.copy_(copy)  # not a change that a graph of an earlier forward should see

    def gather_objects(self, mine: Any) -> list[Any]:
        gathered: list[Any] = []
        self.communicator.start_gather_objects(mine, gathered, self.streams.communication, "agreement")
        self._wait_communication()
        return gathered

    def _wait_communication(self) -> None:
        passed = self.streams.new_event()
        self.streams.communication.record(passed)
        passed.wait_host()

    def close(self) -> None:
        """Ends what is under way and undoes everything. After a failed collective it does so without waiting."""
        if self.closed:
            return
        self.closed = True
        self.beside.close()
        for handle in self._handles:
            handle.remove()
        self._doors.close()
        for tracked in self.tracked:
            _owners.pop(id(tracked.param), None)
        with contextlib.suppress(Exception):  # of a stream that failed: the gates stay, so whoever touches is told
            self.replica.release()
        self.peers.forget()
        self._finalizer()
        with without_waiting():
            for tracked in self.tracked:
                if tracked.param.grad is tracked.in_flight:
                    tracked.param.grad = None


def _ring(this: weakref.ref[Engine], index: int, param: nn.Parameter) -> None:
    engine = this()
    if engine is not None:
        engine.grad_arrived(index, param)


def _unscale(
    this: weakref.ref[Engine], found_inf: torch.Tensor, inv_scale: torch.Tensor, plain: list[torch.Tensor]
) -> list[torch.Tensor]:
    engine = this()
    return plain if engine is None else engine.unscale(found_inf, inv_scale, plain)


def _broadcast_buffers(this: weakref.ref[Engine], module: nn.Module, _: Any) -> None:
    engine = this()
    if engine is not None and module.training and torch.is_grad_enabled():
        engine.broadcast(list(module.buffers()))


def _activity(this: weakref.ref[Engine]) -> Activity:
    engine = this()
    if engine is None:
        return Activity(0, "", 0.0)
    communicator = engine.communicator
    return Activity(engine.replica.step, communicator.doing, engine.log.waited_ms, communicator.failed)


def _end(streams: Streams, communicator: Communicator) -> None:
    """Lets what was enqueued drain, with a deadline: peers may still need this rank's part."""
    streams.close()
    communicator.close()


def _check_unclaimed(tracked: list[TrackedParameter]) -> None:
    for t in tracked:
        owner = _owners.get(id(t.param))
        if owner is not None and not owner.closed and any(t.param is other.param for other in owner.tracked):
            raise ArgumentError(
                f"parameter '{t.spec.fqn}' is trained by another DistributedOptimizer already. Give each parameter to "
                "one optimizer, or close() the other one first."
            )
