"""The optimizer that users wrap around their own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn, optim

from dearcore.errors import ArgumentError, ScheduleError
from dearcore.layout import NearbyLayers, Plan
from dearcore.profile import Profile
from dearcore.schedule import Schedule
from dearcore.shard import steps_on_shards
from dearcore.trace import Trace

from . import checkpoint
from .adaptation import measure_after_a_step
from .agreed_options import check_per_rank
from .context import current
from .divided import DividedState
from .engine import Engine
from .following import joined
from .joining import Call
from .options import Options
from .planning import check_fusion, check_profile, steps_all_everywhere
from .scope import check_scope
from .stats import Stats

__all__ = ["DistributedOptimizer"]

_REFUSED: dict[type[optim.Optimizer], str] = {  # subclasses too
    optim.LBFGS: "it evaluates the model several times in one step",
    optim.SparseAdam: "it needs sparse gradients, and averaged gradients are dense (use Adam)",
}


class DistributedOptimizer(optim.Optimizer):
    """Trains an unmodified module on several ranks with all communication hidden behind backward and forward.

    Construction broadcasts what the optimizer has from the first rank of the group, after a check that all ranks wrap
    the same thing. From then on `backward()` averages gradients over ranks, `step()` updates this rank's part of the
    weights, and the next forward waits for the others' parts layer by layer, where it touches them. Parameters are
    fresh wherever Python touches them.

    Args:
        optimizer: any torch optimizer over parameters of `model`. Element-wise ones (SGD, Adam, ...: exact types)
            step on shards; anything else gets whole averaged gradients and runs its own `step`.
        model: the module whose parameters are trained.
        schedule: the name of a schedule, or a Schedule.
        fusion: MiB a bucket, "sized" (a tenth of the model, 1 to 25 MiB), None for one bucket a tensor,
            `NearbyLayers(n)`, a Plan, "merge" (buckets that follow from measured times), or "auto" (the best of at most
            15 that are tried in the first iterations; needs the extra `tune`).
        profile: times to plan with, for what needs them; None: measured in steps 2 to 4, then planned with.
        shard: "auto" by optimizer; True: gather parameters; False: gather gradients and run the optimizer's own step.
        accumulate: backward passes before gradients are averaged; the earlier ones stay local.
        reduce_dtype: dtype of gradients on the wire; None: each parameter's own.
        master_dtype: dtype of the shards of bf16 and fp16 parameters; None keeps no masters. Whole gradients keep none.
        broadcast: what construction gives every rank from the first. "trained": the parameters of this optimizer, also
            frozen ones, and the buffers beside them (those whose smallest module with parameters has some that are the
            optimizer's, and no trainable ones that are not). So everything if the optimizer has `model.parameters()`,
            and nothing of a part that is left out, which may differ from rank to rank, even in shape. "all": every
            parameter and buffer of the model, as DDP does. "none": nothing; the trained parameters must be alike
            already (checked by checksum).
        broadcast_buffers: give every rank the first rank's buffers, all of the model's, before each training forward.
        per_rank_options: names of options that may differ from rank to rank, such as ("lr",). All others that the
            optimizer has in its `defaults` are compared in each step.
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
        fusion: float | NearbyLayers | Plan | str | None = "sized",
        profile: Profile | None = None,
        shard: bool | str = "auto",
        accumulate: int = 1,
        reduce_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        broadcast: str = "trained",
        broadcast_buffers: bool = False,
        per_rank_options: Collection[str] = (),
        group: object = None,
    ) -> None:
        world = current().world
        _check_arguments(optimizer, model, shard, accumulate, reduce_dtype, master_dtype)
        check_fusion(fusion)
        check_profile(profile, schedule, fusion)
        check_scope(broadcast)
        on_shards = steps_on_shards(optimizer) if shard == "auto" else bool(shard)
        would_drift = steps_on_shards(optimizer) and steps_all_everywhere(schedule, on_shards)
        own = check_per_rank(per_rank_options, optimizer, would_drift)
        options = Options(
            schedule,
            fusion,
            profile,
            on_shards,
            accumulate,
            reduce_dtype,
            master_dtype,
            broadcast_buffers,
            broadcast,
            own,
        )
        self._optimizer = optimizer
        self._has_loaded = any(optimizer.state.values())
        self._engine = Engine(optimizer, model, options, world, world.ranks_of(group))
        optim.Optimizer.__setstate__(self, {})  # tables of hooks, profiler range around step

    # -- what torch.optim.Optimizer offers ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self._engine.mark_local_gradients()
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state. That of sharded parameters is in `state_dict()`: here it is only counted."""
        engine = self._engine
        if engine.closed or not engine.options.sharded:
            return self._optimizer.state
        names = {tracked.param: tracked.spec.fqn for tracked in engine.tracked}
        return DividedState(self._optimizer.state, names, self._has_loaded or engine.replica.step > 0)

    @state.setter
    def state(self, state: Any) -> None:
        raise ScheduleError("the optimizer's state cannot be assigned. Load it with load_state_dict(), on all ranks.")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r}, {self.plan.fusion}, {len(self.plan.buckets)} buckets)"

    def __reduce_ex__(self, protocol: Any) -> Any:  # what pickle and copy call
        raise ScheduleError(
            "a DistributedOptimizer cannot be copied or pickled: it belongs to this model and these ranks. Save its "
            "state_dict() (on all ranks), and load it into an optimizer that wraps the other model."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ScheduleError(
            "add_param_group after wrapping would leave the new parameters unsynchronised. Call close(), add the group "
            "to the torch optimizer, and wrap again."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters with the gradients averaged over all ranks. Collective.

        Returns the closure's value, as torch does. At return the work is enqueued; parameters are fresh wherever they
        are touched. Parameters that no rank used stay as they are.
        """
        engine = self._open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.options.sharded:  # the wrapped optimizer's step, which would call its hooks, does not run
            self._call_hooks("_optimizer_step_pre_hooks")
        engine.step()
        if engine.options.sharded:
            self._call_hooks("_optimizer_step_post_hooks")
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers made before wrapping ask for it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those that are being averaged. With set_to_none=False they become zeros."""
        self._open().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own format, whole, the same on every rank. Collective: call it on all ranks."""
        engine = self._open()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        whole = self._optimizer.state_dict()
        if engine.options.sharded:
            whole["state"] = engine.export_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state saved by this or the plain torch optimizer on any number of ranks. Call it on all ranks."""
        engine = self._open()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        if engine.announcer.active:
            raise ScheduleError(
                "load_state_dict() inside join(): ranks without batches would not load it. Leave it first."
            )
        if engine.options.sharded:
            states = checkpoint.load_into_groups(self._optimizer, state_dict)
            engine.adopt_state(states)
            self._has_loaded = any(states.values())
        else:
            self._optimizer.load_state_dict(dict(state_dict))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank owns of the state, for `torch.distributed.checkpoint`: a CPU copy, to save or load into.

            state = {"model": model.state_dict(), "optimizer": opt.sharded_state_dict()}
            torch.distributed.checkpoint.save(state, checkpoint_id=path)     # or async_save; on all ranks

            torch.distributed.checkpoint.load(state, checkpoint_id=path)     # at any number of ranks
            model.load_state_dict(state["model"])
            opt.load_sharded_state_dict(state["optimizer"])

        Raises ScheduleError where several ranks have no process group, without which each would save on its own.
        """
        from . import sharded  # torch's checkpoints take a second to import

        engine = self._open()
        if engine.announcer.active:
            raise ScheduleError(
                "sharded_state_dict() inside join(): ranks without batches would not save. Leave it first."
            )
        if not current().world.has_process_group:
            raise ScheduleError(
                "torch.distributed.checkpoint saves together only in a process group. Call "
                "torch.distributed.init_process_group() before dear.init(), which then uses its ranks."
            )
        if not engine.options.sharded:
            return sharded.export_whole(self._optimizer)
        engine.replica.discard_early()
        return sharded.export_sharded(engine.replica, self._optimizer, engine.names())

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `sharded_state_dict()` returned and a checkpoint was loaded into. Call it on all ranks."""
        from . import sharded

        engine = self._open()
        engine.replica.discard_early()
        if engine.options.sharded:
            sharded.import_sharded(engine.replica, self._optimizer, engine.names(), state_dict)
        else:
            sharded.import_whole(self._optimizer, state_dict)

    # -- beyond torch ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The buckets. After the first backward they follow the order in which gradients arrived on the first rank.

        `Plan.to_json()` and `from_json` keep a plan, a tuned one say, for the next run: `fusion=plan`.
        """
        return self._engine.replica.plan

    @property
    def schedule(self) -> Schedule:
        return self._engine.replica.schedule

    @property
    def profile(self) -> Profile | None:
        """Times of layers and network: what was passed or measured, else None. `profile.save(path)` keeps it."""
        return self._engine.profile

    def measure(self) -> None:
        """Takes a profile in the three iterations after the next step; they hide no communication. Collective."""
        engine = self._open()
        engine.beside.start(measure_after_a_step(engine))

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent in reduce-scatters and all-gathers so far."""
        return self._engine.communicator.bytes_sent

    @property
    def trace(self) -> Trace:
        """Set `trace.enabled` to collect spans of every pack, collective and step."""
        return self._engine.trace

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside accumulate locally; the first one outside averages the sum."""
        return self._open().accumulating_locally()

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Ranks may have different numbers of batches inside. Enter and leave it on all ranks.

            with opt.join():
                for data, target in loader: ...      # as ever

        A rank that leaves its loop early waits at the end of the block and takes part in what the others do, with
        gradients of zero: averages are still divided by the number of all ranks. Gradients that it had left (of
        `no_sync`, of `accumulate`) count in the next step. At the end all ranks hold the same parameters and options.
        Other collectives (`dear.allreduce`, a second optimizer, `torch.distributed`) are not followed: leave the block
        first. A rank that raises ends it for all.
        """
        engine = self._open()
        engine.check_steps_wait("join()", "a rank without batches could follow")
        return joined(engine)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm is at most `max_norm`. Collective.

        Returns the norm before clipping over all parameters and ranks, the same number everywhere, as
        `torch.nn.utils.clip_grad_norm_` would on one process: fp32, and fp64 where a parameter is.
        """
        engine = self._open()
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0 or not norm_type > 0:
            raise ArgumentError(f"clip_grad_norm_ expects max_norm >= 0, norm_type > 0, got {max_norm}, {norm_type}.")
        engine.check_steps_wait("clipping", "the norm of all gradients is known")
        engine.finish_gradients()
        engine.announcer.say(Call.CLIP_NORM, (max_norm, norm_type))
        return engine.clip_norm(max_norm, norm_type)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the averaged gradients to [-clip_value, clip_value]. Collective."""
        engine = self._open()
        clip_value = float(clip_value)
        if not clip_value >= 0:
            raise ArgumentError(f"clip_grad_value_ expects a value >= 0, got {clip_value}.")
        engine.check_steps_wait("clipping", "anybody could clip")
        engine.finish_gradients()
        engine.announcer.say(Call.CLIP_VALUE, clip_value)
        engine.clip_value(clip_value)

    def full_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the averaged gradient of `param`, whole, on every rank. Collective, after backward."""
        engine = self._open()
        tracked = next((t for t in engine.tracked if t.param is param), None)
        if tracked is None:
            got = f"of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ArgumentError(f"full_grad expects a parameter that this optimizer trains, got one {got}.")
        engine.finish_gradients()
        engine.announcer.say(Call.FULL_GRAD, tracked.spec.index)
        return engine.update.full_grad(tracked)

    def synchronize(self) -> None:
        """Blocks the host until every parameter is up to date."""
        self._open().replica.synchronize()

    def stats(self) -> Stats:
        """Where time went: the longest waits by bucket and module. Local to this rank; `print` shows a table."""
        engine = self._engine
        return engine.log.stats(self.plan, engine.communicator.rank, self.bytes_sent, engine.peers.read())

    def close(self) -> None:
        """Ends what is under way, removes every hook, gives parameters memory of their own. Call on all ranks."""
        self._engine.close()

    def _call_hooks(self, kind: str) -> None:
        for hook in getattr(self._optimizer, kind).values():
            if hook(self._optimizer, (self._optimizer,), {}) is not None:
                raise ScheduleError(
                    "a step hook of the wrapped optimizer changes the arguments of step(), which are not passed on. "
                    "Register it on the DistributedOptimizer."
                )

    def _open(self) -> Engine:
        if self._engine.closed:
            raise ScheduleError(self._engine.why_closed)
        return self._engine


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
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise ArgumentError(f"{name} cannot be distributed: {reason}. Choose another optimizer.")
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
