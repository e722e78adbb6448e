"""The optimizer that users wrap around their own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
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
from .context import current
from .engine import Engine, Options
from .planning import check_fusion, check_profile
from .stats import Stats

__all__ = ["DistributedOptimizer"]

_REFUSED = {
    "LBFGS": "it evaluates the model several times in one step",
    "SparseAdam": "it needs sparse gradients, and averaged gradients are dense (use Adam)",
}


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
        fusion: MiB a bucket (25.0), None for one bucket a tensor, `NearbyLayers(n)`, a Plan, "merge" (buckets that
            follow from measured times), or "auto" (the best of at most 15 that are tried in the first iterations;
            needs the extra `tune`).
        profile: times to plan with, for what needs them; None: measured in steps 2 to 4, then planned with.
        shard: "auto" by optimizer; True: gather parameters; False: gather gradients and run the optimizer's own step.
        accumulate: backward passes before gradients are averaged; the earlier ones stay local.
        reduce_dtype: dtype of gradients on the wire; None: each parameter's own.
        master_dtype: dtype of the shards of bf16 and fp16 parameters; None keeps no masters. Whole gradients keep none.
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
        fusion: float | NearbyLayers | Plan | str | None = 25.0,
        profile: Profile | None = None,
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
        check_profile(profile, schedule, fusion)
        sharded = steps_on_shards(optimizer) if shard == "auto" else bool(shard)
        options = Options(schedule, fusion, profile, sharded, accumulate, reduce_dtype, master_dtype, broadcast_buffers)
        self._optimizer = optimizer
        self._engine = Engine(optimizer, model, options, world, world.ranks_of(group))
        optim.Optimizer.__setstate__(self, {})  # tables of hooks, profiler range around step

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
        engine.step()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers made before wrapping ask for it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those that are being averaged. With set_to_none=False they become zeros."""
        self._open().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own format, whole, the same on every rank. Collective: call it on all ranks."""
        engine = self._open()
        whole = self._optimizer.state_dict()
        if engine.options.sharded:
            whole["state"] = engine.export_state()
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state saved by this or the plain torch optimizer on any number of ranks. Call it on all ranks."""
        engine = self._open()
        if engine.options.sharded:
            engine.adopt_state(checkpoint.load_into_groups(self._optimizer, state_dict))
        else:
            self._optimizer.load_state_dict(dict(state_dict))

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm is at most `max_norm`. Collective.

        Returns the norm before clipping over all parameters and ranks, the same number everywhere, as
        `torch.nn.utils.clip_grad_norm_` would on one process.
        """
        engine = self._open()
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0 or not norm_type > 0:
            raise ArgumentError(f"clip_grad_norm_ expects max_norm >= 0, norm_type > 0, got {max_norm}, {norm_type}.")
        engine.check_steps_wait("clipping", "the norm of all gradients is known")
        engine.finish_gradients()
        norm = engine.update.norm(norm_type).to(engine.streams.device, torch.float32)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        engine.update.change_gradients(lambda grad: grad.mul_(factor))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the averaged gradients to [-clip_value, clip_value]. Collective."""
        engine = self._open()
        clip_value = float(clip_value)
        if not clip_value >= 0:
            raise ArgumentError(f"clip_grad_value_ expects a value >= 0, got {clip_value}.")
        engine.check_steps_wait("clipping", "anybody could clip")
        engine.finish_gradients()
        engine.update.change_gradients(lambda grad: grad.clamp_(-clip_value, clip_value))

    def full_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the averaged gradient of `param`, whole, on every rank. Collective, after backward."""
        engine = self._open()
        tracked = next((t for t in engine.tracked if t.param is param), None)
        if tracked is None:
            raise ArgumentError(
                f"full_grad expects a parameter that this optimizer trains, got a tensor of shape {tuple(param.shape)}."
            )
        engine.finish_gradients()
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

    def _open(self) -> Engine:
        if self._engine.closed:
            raise ScheduleError("this DistributedOptimizer was closed. Wrap the torch optimizer again.")
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
