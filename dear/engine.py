"""What a DistributedOptimizer is made of: it ties parameters, plan, streams and ranks together and hears the hooks."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from dearcore.communicator import Communicator
from dearcore.errors import ArgumentError, ScheduleError
from dearcore.heartbeat import Activity, Peers
from dearcore.layout import NearbyLayers, Plan
from dearcore.rendezvous import World
from dearcore.schedule import Schedule
from dearcore.streams import Streams
from dearcore.trace import Trace

from . import checkpoint
from .agreement import check_agreement, describe
from .bindings import Bindings
from .doors import Doors, OwnHook
from .gradients import local_gradient
from .joining import Announcer, Call
from .parameters import without_waiting
from .planning import make_plan_and_schedule
from .replica import Numerics, Replica, settle_gradient
from .stats import WaitLog
from .tracked import TrackedParameter, track
from .update import ShardedUpdate, Update, WholeUpdate, snapshot_hyper

__all__ = ["Engine", "Options"]

# Below this, handing work from thread to thread costs more than overlapping it gains: `python -m bench overhead`.
ONE_WORKER_BYTES = 4 * 1024 * 1024

_hidden_from: list[Any] = []  # dynamo, once it has been told; telling it again makes it slower each time
_owners: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()  # id of a parameter -> its engine


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked. `sharded`: the optimizer steps on shards."""

    schedule: str | Schedule
    fusion: float | NearbyLayers | Plan | None
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
        self.closed = self.local_only = self._was_local = self._unscaled = self._stepped = False
        _check_unclaimed(self.tracked)
        self.trace = Trace()
        self.log = WaitLog(self.trace)
        self.communicator: Communicator
        self.peers: Peers
        self.communicator, self.peers = world.new_communicator(ranks)
        self._timeout, self._num_broken_off = world.timeout, 0
        num_bytes = sum(t.spec.num_bytes for t in self.tracked)
        self.streams = Streams(self.tracked[0].param.device, self.trace, one_worker=num_bytes < ONE_WORKER_BYTES)
        self.announcer = Announcer(self.communicator, self.streams)
        self._finalizer = weakref.finalize(self, _end, self.streams, self.communicator)
        self._finalizer.atexit = False  # dear.shutdown sees to that
        self._handles: list[Any] = []
        self._model = model
        self._doors = Doors(model)
        _hide_from_dynamo()
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
        check_agreement(describe(model, self.optimizer, [str(self.options)]), self._gather_objects)
        # memory formats may differ from rank to rank; buckets need one
        for tracked, strides in zip(
            self.tracked, self._gather_objects([t.strides for t in self.tracked])[0], strict=True
        ):
            tracked.adopt_strides(strides)
        self.broadcast([*model.parameters(), *model.buffers()])
        self._passes = bytearray(len(self.tracked))
        observing = not isinstance(self.options.fusion, Plan)
        self.replica, self.update = self._build(list(range(len(self.tracked))), observing)
        if any(self.optimizer.state.values()):
            self.adopt_state({id(param): dict(state) for param, state in self.optimizer.state.items()})
        self._bindings = Bindings(model, self.tracked, self.optimizer)
        for index, tracked in enumerate(self.tracked):
            bell = functools.partial(_ring, this, index)
            self._handles.append(tracked.param.register_post_accumulate_grad_hook(bell))  # type: ignore[no-untyped-call]
        if self.options.broadcast_buffers:
            hook = OwnHook(functools.partial(_broadcast_buffers, this))
            self._handles.append(model.register_forward_pre_hook(hook))

    # -- an iteration ------------------------------------------------------------------------------------------------

    def grad_arrived(self, index: int, param: nn.Parameter) -> None:
        """The doorbell of one parameter."""
        if self.local_only:
            self._was_local = True
            return
        tracked = self.tracked[index]
        self._unscaled = False
        grad = param.grad
        if grad is not tracked.in_flight:
            assert grad is not None
            if self.announcer.active and grad is tracked.whole:
                raise ScheduleError(
                    f"the gradient of '{tracked.spec.fqn}' was added to the average of an earlier step, which ranks "
                    "without batches cannot know of inside join(). Call opt.zero_grad() before each backward."
                )
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
        if self.replica.scheduler.observing:
            self.announcer.say(Call.ORDER)
            self.adopt_observed_order()
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
                    if not tracked.retained:
                        dropped.add(index)
                    elif in_flight.zeroed:
                        zeroed.add(index)
                    in_flight.zeroed = False
                    if in_flight.local is not None:
                        replica.scheduler.mark_late(index)
        if dropped or zeroed:
            self.announcer.say(Call.CLEAR, (dropped, zeroed))
        replica.clear(dropped, zeroed)
        replica.scheduler.finish_gradients()
        self.update.gradients_finished()

    def step(self) -> None:
        """Applies the averaged gradients and begins the next iteration. Collective."""
        self.finish_gradients()
        if self.announcer.active:
            self.announcer.say(Call.STEP, snapshot_hyper(self.optimizer))
        self.apply()

    def apply(self) -> None:
        """The step itself, when all gradients are under way."""
        self.update.step()
        self.replica.step += 1
        self.announcer.step = self.replica.step
        self.log.step_ended()
        self._stepped = True
        self._forget_passes()

    def clip_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm = self.update.norm(norm_type).to(self.streams.device, torch.float32)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.update.change_gradients(lambda grad: grad.mul_(factor))
        return norm

    def clip_value(self, clip_value: float) -> None:
        self.update.change_gradients(lambda grad: grad.clamp_(-clip_value, clip_value))

    def zero_grad(self, set_to_none: bool) -> None:
        """Begins an iteration anew. Reductions under way, here or elsewhere, are launched on every rank first."""
        scheduler = self.replica.scheduler
        if set_to_none:
            self._forget_all()
        unfinished = not scheduler.observing and (scheduler.has_begun or not self._stepped)
        if unfinished and (self.announcer.active or self._any_has_begun()):
            scheduler.launch_reductions()
        self.announcer.say(Call.ZERO_GRAD, set_to_none)
        self.begin_anew(set_to_none)

    def begin_anew(self, set_to_none: bool) -> None:
        self._stepped = False
        self.replica.start_over()
        self._forget_passes()
        if set_to_none:
            self._forget_all()
            return
        with without_waiting():
            for tracked in self.tracked:
                if tracked.param.grad is not None:
                    tracked.param.grad.zero_()
                    tracked.whole = None

    def _any_has_begun(self) -> bool:
        """Asked where no step was made since the last `zero_grad`: what an exception has cut short may be an iteration
        that other ranks have begun. A rank that has begun knows the answer, and waits for nobody.
        """
        self._num_broken_off += 1
        begun = self.replica.scheduler.has_begun
        self.peers.post(self._num_broken_off, begun)
        return begun or any(self.peers.collect(self._num_broken_off, self._timeout))

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
        if not self._unscaled:
            self.finish_gradients()
            self._unscaled = True
            if self.announcer.active:
                self.announcer.say(Call.UNSCALE, inv_scale.item())
            self.update.unscale(found_inf, inv_scale)
        return others

    def _forget_all(self) -> None:
        with without_waiting():
            for tracked in self.tracked:
                tracked.forget()

    def _forget_passes(self) -> None:
        self._unscaled = self._was_local = False
        if self.options.accumulate > 1:
            self._passes[:] = bytes(len(self._passes))

    # -- plan and state ----------------------------------------------------------------------------------------------

    def export_state(self) -> dict[int, dict[str, Any]]:
        """The whole state of every parameter, by its number in the optimizer. Collective."""
        self.announcer.say(Call.STATE)
        numbers = checkpoint.packed_indices(self.optimizer)
        states = checkpoint.export_state(self.replica)
        return {numbers[id(self.tracked[index].param)]: state for index, state in sorted(states.items())}

    def names(self) -> dict[int, str]:
        """Of every parameter of the model, by id."""
        return {id(param): name for name, param in self._model.named_parameters()}

    def adopt_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes this rank's part of the whole state of every parameter, by id. The optimizer keeps no copy."""
        if self.options.sharded:
            by_index = {t.spec.index: states[id(t.param)] for t in self.tracked if states.get(id(t.param))}
            checkpoint.import_state(self.replica, by_index)
            for tracked in self.tracked:
                self.optimizer.state.pop(tracked.param, None)

    def _build(self, forward_order: list[int], observing: bool) -> tuple[Replica, Update]:
        """Lays out the parameters for a plan over `forward_order` and makes what runs it."""
        options = self.options
        specs = [self.tracked[index].spec for index in forward_order]
        plan, schedule = make_plan_and_schedule(
            options.schedule, options.fusion, specs, self.communicator.size, options.sharded
        )
        replica = Replica(
            plan,
            schedule,
            self.tracked,
            self.communicator,
            self.streams,
            self._doors,
            Numerics(options.reduce_dtype, options.master_dtype if options.sharded else None),
            self.log.waited,
            self.announcer,
            observing,
        )
        return replica, (ShardedUpdate if options.sharded else WholeUpdate)(replica, self.optimizer)

    def adopt_observed_order(self) -> None:
        """The first backward has shown the order of gradients: lay out anew if the first rank with one saw another."""
        scheduler = self.replica.scheduler
        missing = set(range(len(self.tracked))) - set(scheduler.order)
        # what never got a gradient goes last in the backward, where it delays nobody's reduction
        observed = [*sorted(missing), *reversed(scheduler.order)] if scheduler.order else None
        seen: list[list[int]] = [order for order in self._gather_objects(observed) if order is not None]
        order = seen[0] if seen else None
        planned = [slot.param for bucket in self.replica.plan.buckets for slot in bucket.slots if slot.start == 0]
        scheduler.observing = False
        if order is not None and order != planned:
            states = checkpoint.export_state(self.replica) if self.options.sharded else {}
            step = self.replica.step
            self._doors.close()
            self._doors = Doors(self._model)
            self.replica, self.update = self._build(order, observing=False)
            self.replica.step = step
            if states:
                checkpoint.import_state(self.replica, states)
            self._bindings.rebind()

    # -- ranks -------------------------------------------------------------------------------------------------------

    def broadcast_buffers(self, root: int) -> None:
        self.broadcast(list(self._model.buffers()), root)

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Gives every rank the root's values, in place; blocks until done."""
        with torch.no_grad():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
            for copy in copies:
                label = "broadcast of the first rank's values"
                self.communicator.start_broadcast(copy, root, self.streams.communication, label)
            self._wait_communication()
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data.copy_(copy)  # not a change that a graph of an earlier forward should see

    def _gather_objects(self, mine: Any) -> list[Any]:
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
        heard = engine.announcer.ask(Call.BUFFERS)
        engine.broadcast_buffers(0 if heard is None else heard.leader)


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


def _hide_from_dynamo() -> None:
    """Compiled training loops call our hooks and `step`, but never trace into them."""
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")  # there whenever somebody may compile
    if trace_rules is not None and not _hidden_from:
        _hidden_from.append(trace_rules)
        for package in ("dear", "dearcore", "dear_kernels"):
            trace_rules.add(package)


def _check_unclaimed(tracked: list[TrackedParameter]) -> None:
    for t in tracked:
        owner = _owners.get(id(t.param))
        if owner is not None and not owner.closed and any(t.param is other.param for other in owner.tracked):
            raise ArgumentError(
                f"parameter '{t.spec.fqn}' is trained by another DistributedOptimizer already. Give each parameter to "
                "one optimizer, or close() the other one first."
            )
