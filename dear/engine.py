"""What a DistributedOptimizer is made of: it ties parameters, plan, streams and ranks together and hears the hooks."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from dearcore.communicator import Communicator
from dearcore.errors import ScheduleError
from dearcore.heartbeat import Peers
from dearcore.layout import Plan
from dearcore.rendezvous import World
from dearcore.schedule import Schedule
from dearcore.streams import Streams
from dearcore.trace import Trace

from . import below_dispatch, checkpoint, hooks
from .adaptation import Beside, measure_and_plan
from .agreed_options import AgreedOptions
from .agreement import check_agreement, describe, described_profile
from .aliases import check_layouts, find_aliases
from .bindings import Bindings, warn_if_shared
from .claims import check_unclaimed, claim, give_up
from .doors import Doors, OwnHook, hide_from_dynamo
from .foreign import ForeignCollectives
from .gradients import InFlightGradient
from .joining import Announcer, Call
from .local_gradients import mark, marking
from .options import Options
from .parameters import without_waiting
from .planning import AUTO, make_plan_and_schedule, needs_times
from .ranks import broadcast_values, gather_objects
from .recorder import Recorder
from .relayout import move_shards
from .replica import Numerics, Replica, settle_gradient
from .scope import check_alike, tensors_in_scope
from .stats import WaitLog
from .tracked import track
from .tuner import check_installed, is_installed
from .update import ShardedUpdate, Update, WholeUpdate, check_grad_dtypes, snapshot_hyper

__all__ = ["Engine"]

# Below this, handing work from thread to thread costs more than overlapping it gains: `python -m bench overhead`.
ONE_WORKER_BYTES = 4 * 1024 * 1024
FILL = "dear-fill"


class Engine:
    """Owns the hooks, the replica of the present plan and how it is updated. Every method is for all ranks alike.

    Construction is collective: it checks that all ranks wrap the same thing, then broadcasts it from the first rank.
    """

    def __init__(
        self, optimizer: optim.Optimizer, model: nn.Module, options: Options, world: World, ranks: tuple[int, ...]
    ) -> None:
        self.optimizer, self.options = optimizer, options
        this = weakref.ref(self)  # parameters must not keep us alive
        unscale = functools.partial(hooks.unscale, this)
        self.tracked, self._local_kind = track(optimizer, model, unscale), marking(unscale)
        self.why_closed = "this DistributedOptimizer was closed. Wrap the torch optimizer again."
        self.closed = self.local_only = self._was_local = self._stepped = False
        self._found_inf: torch.Tensor | None = None  # where the gradients' last unscaling has put what it found
        self._found: torch.Tensor  # what that was
        check_unclaimed(self.tracked)
        find_aliases(model, self.tracked)
        self.trace = Trace()
        self.log = WaitLog(self.trace)
        self.communicator: Communicator
        self.peers: Peers
        device = self.tracked[0].param.device
        self.communicator, self.peers = world.new_communicator(ranks, device)
        self._timeout, self._num_asked = world.timeout, 0
        num_bytes = sum(t.spec.num_bytes for t in self.tracked)
        shared = world.shared_stream(ranks, device)
        self.streams = Streams(device, self.trace, num_bytes < ONE_WORKER_BYTES, shared)
        self.announcer = Announcer(self.communicator, self.streams)
        self._handles: list[Any] = []
        self._finalizer = weakref.finalize(self, _end, self.streams, self.communicator, self._handles)
        self._finalizer.atexit = False  # dear.shutdown sees to that
        self.model = model
        self.profile = options.profile
        self.recorder: Recorder | None = None  # while times are being taken
        self.beside = Beside()
        self._knows_order = False
        self.agreed = AgreedOptions(optimizer, options.per_rank_options)
        self._doors = Doors(model)
        self._foreign = None if shared is None else ForeignCollectives(model, self.streams)
        hide_from_dynamo()
        below_dispatch.install()
        try:
            self._start(model, this)
        except BaseException:
            self._finalizer()
            raise
        claim(self)
        world.on_shutdown(self)
        self.peers.watch(functools.partial(hooks.activity, this, self.log))

    def _start(self, model: nn.Module, this: weakref.ref[Engine]) -> None:
        adaptive = needs_times(self.options.schedule, self.options.fusion)
        lines = [str(self.options), *described_profile(self.profile)]
        if self.options.fusion == AUTO:
            lines.append(f"bayesian-optimization installed: {is_installed()}")
        at_start = tensors_in_scope(model, self.optimizer, self.tracked, self.options.broadcast)
        sent = {*at_start, *(self._buffers_of_all() if self.options.broadcast_buffers else ())}
        aliases = [
            f"'{alias.name}' in the memory of parameter '{t.spec.fqn}'" for t in self.tracked for alias in t.aliases
        ]
        per_rank = self.options.per_rank_options
        check_agreement(describe(model, self.optimizer, lines, sent, aliases, per_rank), self.gather_objects)
        if self.options.fusion == AUTO:
            check_installed()
        if self.options.sharded:
            check_grad_dtypes(self.tracked, self.optimizer, self._numerics)
        # memory formats may differ from rank to rank; buckets need one
        layouts = self.gather_objects(
            [(t.strides, tuple(a.name for a in t.aliases if not a.is_whole)) for t in self.tracked]
        )
        check_layouts(layouts, [t.spec.fqn for t in self.tracked])
        for tracked, (strides, _) in zip(self.tracked, layouts[0], strict=True):
            tracked.adopt_strides(strides)
        warn_if_shared(self.tracked)
        if self.options.broadcast == "none":
            check_alike(self.tracked, self.gather_objects)
        self.broadcast(list(at_start.values()))
        self._passes = bytearray(len(self.tracked))
        if self.profile is not None:
            self.profile.check_fits([t.spec for t in self.tracked], self.communicator.size)
        observing = not isinstance(self.options.fusion, Plan) and self.profile is None
        self.replica, self.update = self._build(*self._plan(list(range(len(self.tracked)))), observing)
        if any(self.optimizer.state.values()):
            self.adopt_state({id(param): dict(state) for param, state in self.optimizer.state.items()})
        self._bindings = Bindings(model, self.tracked, self.optimizer)
        for index, tracked in enumerate(self.tracked):
            bell = functools.partial(hooks.ring, this, index)
            self._handles.append(tracked.param.register_post_accumulate_grad_hook(bell))  # type: ignore[no-untyped-call]
        if self.options.broadcast_buffers:
            hook = OwnHook(functools.partial(hooks.broadcast_buffers, this))
            self._handles.append(model.register_forward_pre_hook(hook))
        if adaptive and not (self.profile is not None and self.options.fusion != AUTO):
            self.beside.start(measure_and_plan(self))

    # -- an iteration ------------------------------------------------------------------------------------------------

    def grad_arrived(self, index: int, param: nn.Parameter) -> None:
        """The doorbell of one parameter."""
        if self.recorder is not None:
            self.recorder.grad_arrived(index)
        self._found_inf = None
        if self.local_only:
            self._was_local = True
            return
        tracked = self.tracked[index]
        self.streams.note_gradient()
        grad = param.grad
        if grad is not tracked.in_flight:
            assert grad is not None
            # in a graph autograd adds out of place, so that the sum is not the average any more
            if self.announcer.active and (
                grad is tracked.whole or (tracked.whole is not None and torch.is_grad_enabled())
            ):
                raise ScheduleError(
                    f"the gradient of '{tracked.spec.fqn}' was added to the average of an earlier step, which ranks "
                    "without batches cannot know of inside join(). Call opt.zero_grad() before each backward."
                )
            if type(grad) is not InFlightGradient or not tracked.in_flight.absorb(grad):
                # what no_sync() has left visible may be kept and used again by others
                tracked.in_flight.set_local(grad, copy=self._was_local)
                tracked.retained, tracked.whole = False, None
            try:
                param.grad = tracked.in_flight
            except RuntimeError:  # the parameter is not what it was when it was wrapped
                self._bindings.check()
                tracked.check_grad_dtype()
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
                    if not tracked.retained or in_flight.zeroed:
                        replica.scheduler.check_not_stepped(index)
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
        recorder = self.recorder
        if recorder is not None:
            recorder.end_iteration()
        start_s = time.perf_counter()
        if not self.announcer.active:  # else ranks without batches get to know the options, and compare them
            self.agreed.ask()
        self.finish_gradients()
        if self.announcer.active:
            hyper = snapshot_hyper(self.optimizer, self.agreed.per_rank)
            self.announcer.say(Call.STEP, hyper, self.agreed.values())
        self.apply(start_s)

    def apply(self, start_s: float | None = None) -> None:
        """The step itself, when all gradients are under way. start_s: when this rank began to bring them there."""
        self.update.step()
        if self.recorder is not None and start_s is not None:
            self.recorder.add_launch(time.perf_counter() - start_s)
        self.replica.step += 1
        self.announcer.step = self.replica.step
        self.streams.iteration_ended()
        self.log.step_ended()
        self._stepped, self._num_asked = True, 0
        self._forget_passes()
        if not self.announcer.is_open:  # ranks that follow have nothing to measure
            self.beside.step_ended()

    def clip_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        dtype = functools.reduce(torch.promote_types, (b.dtype for b in self.replica.plan.buckets), torch.float32)
        norm = self.update.norm(norm_type).to(self.streams.device, dtype)
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
        if unfinished and self._any_has_begun():
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
        that other ranks have begun. A rank that has begun knows the answer, and waits for nobody. A rank that goes on
        with the iteration while this one only cleared its gradients once more says so by waiting for this one.
        """
        begun = self.replica.scheduler.has_begun
        if self.announcer.active:
            return begun
        step = self.replica.step
        question = f"begun/{step}/{self._num_asked}"
        self._num_asked += 1
        self.peers.post(question, begun)
        return begun or any(self.peers.collect(question, step, self._timeout))

    def unscale(
        self, found_inf: torch.Tensor, inv_scale: torch.Tensor, plain: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What torch's GradScaler asks of gradients; it asks once for each dtype, we answer once for all.

        Whatever is still local on some rank is reduced first, and unscaled with the rest. `plain` are gradients that it
        asks for in the same breath and that are not in flight; those of them that are not ours are returned.

        A scaler has all its questions of one moment answered in one `found_inf`; later ones in another.
        """
        if self.closed:
            raise ScheduleError(self.why_closed)
        with without_waiting():
            ours = {id(tracked.param.grad) for tracked in self.tracked}
        others = [grad for grad in plain if id(grad) not in ours and type(grad) is not self._local_kind]
        self.check_steps_wait("loss scaling", "whether all gradients are finite is known")
        if found_inf is self._found_inf:
            found_inf.copy_(torch.maximum(found_inf, self._found))
            return others
        self.finish_gradients()
        if self.announcer.active:
            self.announcer.say(Call.UNSCALE, inv_scale.item())
        self.update.unscale(found_inf, inv_scale)
        self._found_inf, self._found = found_inf, found_inf.clone()
        return others

    def mark_local_gradients(self) -> None:
        """Whoever reads the parameter groups may be a GradScaler that is about to ask of the gradients in `p.grad`."""
        if not self.closed:
            mark([tracked.param for tracked in self.tracked], self._local_kind)

    def check_steps_wait(self, what: str, known: str) -> None:
        """Raises ScheduleError if buckets are stepped in the backward, before what `what` needs is known."""
        schedule = self.options.schedule
        name = schedule if isinstance(schedule, str) else schedule.name
        if name == FILL or self.replica.early:
            raise ScheduleError(
                f"{what} does not go with schedule '{name}', which steps in the backward, before {known}. No weight "
                "has changed. Use schedule='dear'."
            )

    def _forget_all(self) -> None:
        with without_waiting():
            for tracked in self.tracked:
                tracked.forget()

    def _forget_passes(self) -> None:
        self._found_inf, self._was_local = None, False
        if self.options.accumulate > 1:
            self._passes[:] = bytes(len(self._passes))

    # -- plan and state ----------------------------------------------------------------------------------------------

    def export_state(self) -> dict[int, dict[str, Any]]:
        """The whole state of every parameter, by its number in the optimizer. Collective."""
        self.replica.discard_early()
        self.announcer.say(Call.STATE)
        numbers = checkpoint.packed_indices(self.optimizer)
        states = checkpoint.export_state(self.replica)
        return {numbers[id(self.tracked[index].param)]: state for index, state in sorted(states.items())}

    def names(self) -> dict[int, str]:
        """Of every parameter of the model, by id."""
        return {id(param): name for name, param in self.model.named_parameters()}

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
        self.replica.contributed = old.contributed
        self.replica.inherit_gates(old)
        self.log.plan_changed()
        sent = move_shards(old, self.replica)
        old.retire()
        self._bindings.rebind()
        return sent

    def _plan(self, forward_order: list[int]) -> tuple[Plan, Schedule]:
        options = self.options
        specs = [self.tracked[index].spec for index in forward_order]
        size = self.communicator.size
        return make_plan_and_schedule(options.schedule, options.fusion, specs, size, options.sharded, self.profile)

    @property
    def _numerics(self) -> Numerics:
        options = self.options
        return Numerics(options.reduce_dtype, options.master_dtype if options.sharded else None)

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
            self._numerics,
            self.log.waited,
            functools.partial(snapshot_hyper, self.optimizer),
            self.announcer,
            self.agreed,
            observing,
        )
        update = (ShardedUpdate if options.sharded else WholeUpdate)(replica, self.optimizer)
        if self.streams.on_cuda:
            replica.warm_up(snapshot_hyper(self.optimizer))
        return replica, update

    def adopt_observed_order(self) -> None:
        """The first backward has shown the order of gradients: lay out anew if the first rank with one saw another."""
        scheduler = self.replica.scheduler
        missing = set(range(len(self.tracked))) - set(scheduler.order)
        # what never got a gradient goes last in the backward, where it delays nobody's reduction
        observed = [*sorted(missing), *reversed(scheduler.order)] if scheduler.order else None
        seen: list[list[int]] = [order for order in self.gather_objects(observed) if order is not None]
        order = seen[0] if seen else None
        planned = [slot.param for bucket in self.replica.plan.buckets for slot in bucket.slots if slot.start == 0]
        scheduler.observing, self._knows_order = False, True
        if order is not None and order != planned:
            self.relayout(*self._plan(order))

    # -- ranks -------------------------------------------------------------------------------------------------------

    def broadcast_buffers(self, root: int) -> None:
        self.broadcast(list(self._buffers_of_all().values()), root)

    def _buffers_of_all(self) -> dict[str, torch.Tensor]:
        """Not those that stand in the memory of a trained parameter, which is the same everywhere, or on its way."""
        aliases = {id(alias.tensor) for t in self.tracked for alias in t.aliases}
        return {name: buffer for name, buffer in self.model.named_buffers() if id(buffer) not in aliases}

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Gives every rank the root's values, in place; blocks until done."""
        broadcast_values(tensors, root, self.communicator, self.streams)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's picklable object, by rank; blocks until done."""
        return gather_objects(mine, self.communicator, self.streams, "agreement")

    def close(self, patience_s: float | None = None) -> None:
        """Ends what is under way and undoes everything. After a failed collective it does so without waiting.

        `patience_s` (None: the timeout): peers that have not joined by then are not waited for.
        """
        if self.closed:
            return
        self.closed = True
        if patience_s is not None:
            self.streams.hurry(patience_s)
        self.beside.close()
        hooks.remove(self._handles)
        self._doors.close()
        if self._foreign is not None:
            self._foreign.close()
        give_up(self)
        with contextlib.suppress(Exception):  # of a stream that failed: the gates stay, so whoever touches is told
            self.replica.release()
        self.peers.forget()
        self._finalizer()
        with without_waiting():
            for tracked in self.tracked:
                if tracked.is_in_flight():
                    tracked.param.grad = None

    # -- forks -------------------------------------------------------------------------------------------------------

    def prepare_fork(self) -> None:
        """The child has the parameters as they are after the last step. Raises nothing: touching them there will."""
        if not self.closed:
            with contextlib.suppress(Exception):
                self.replica.wait_fresh()

    def leave_behind(self, why: str) -> Callable[[], None]:
        """In a forked child; see `dearcore.rendezvous.Closeable`. The module may be evaluated, as a plain one."""
        self.closed, self.why_closed = True, why
        self._finalizer.detach()
        self.peers = Peers(None, "", (), 0)
        hooks.remove(self._handles)
        give_up(self)
        params = [tracked.param for tracked in self.tracked]
        refuse = functools.partial(hooks.refuse, why)
        with without_waiting():
            handles = [param.register_post_accumulate_grad_hook(refuse) for param in params]  # type: ignore[no-untyped-call]
        return functools.partial(_take_off, handles, [weakref.ref(param) for param in params])


def _take_off(handles: list[Any], params: list[weakref.ref[nn.Parameter]]) -> None:
    """The child trains on its own: hooks and gradients of its parent's optimizer go."""
    hooks.remove(handles)
    with without_waiting():
        for ref in params:
            param = ref()
            if param is not None and isinstance(param.grad, InFlightGradient):
                param.grad = None


def _end(streams: Streams, communicator: Communicator, handles: list[Any]) -> None:
    """Lets what was enqueued drain, with a deadline: peers may still need this rank's part.

    Also when the optimizer was dropped without `close()`: then its hooks are still there.
    """
    hooks.remove(handles)
    streams.close()
    communicator.close()
