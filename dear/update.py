"""The two ways to apply averaged gradients: sharded (each rank steps its part) and whole (the user's own step).

Both offer the same operations on the averaged gradients, which all ranks must call alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import optim

from dearcore.bucket import BucketRuntime
from dearcore.errors import ArgumentError
from dearcore.shard import NOT_HYPER, state_after_steps, step_with_own_hooks

from .parameters import without_waiting
from .replica import Numerics, Replica
from .tracked import TrackedParameter

__all__ = ["ShardedUpdate", "Update", "WholeUpdate", "check_grad_dtypes", "snapshot_hyper"]


def check_grad_dtypes(tracked: Sequence[TrackedParameter], optimizer: optim.Optimizer, numerics: Numerics) -> None:
    """Raises ArgumentError where torch's optimizer cannot step gradients of the dtype that a parameter asks for."""
    seen: set[tuple[int, torch.dtype, torch.dtype]] = set()
    for t in tracked:
        dtype = numerics.step_dtype(t.spec.dtype)
        grad_dtype = t.grad_dtype_of_step(dtype)
        if grad_dtype is None or (t.group, dtype, grad_dtype) in seen:
            continue
        seen.add((t.group, dtype, grad_dtype))
        try:
            state_after_steps(optimizer, t.group, dtype, grad_dtype, t.param.device)
        except RuntimeError as error:
            raise ArgumentError(
                f"parameter '{t.spec.fqn}' is stepped in {dtype} and has grad_dtype {grad_dtype}; "
                f"{type(optimizer).__name__} cannot step such gradients, here as in plain PyTorch ({error}). Set its "
                f"grad_dtype to {dtype} before wrapping, or choose an optimizer that can (SGD)."
            ) from error


def snapshot_hyper(optimizer: optim.Optimizer, without: Collection[str] = ()) -> list[dict[str, Any]]:
    """The options of each group at this moment; a later change (a scheduler's) must not reach a step under way."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in NOT_HYPER and key not in without
        }
        for group in optimizer.param_groups
    ]


class Update(Protocol):
    def gradients_finished(self) -> None:
        """Called when every reduction of this step has been enqueued."""

    def norm(self, norm_type: float) -> torch.Tensor: ...

    def change_gradients(self, change: Callable[[torch.Tensor], Any]) -> None:
        """Applies an element-wise change in place."""

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None: ...

    def full_grad(self, tracked: TrackedParameter) -> torch.Tensor: ...

    def step(self) -> None: ...


class ShardedUpdate:
    """Each rank changes and steps its own shard of every bucket."""

    def __init__(self, replica: Replica, optimizer: optim.Optimizer) -> None:
        self._replica, self._optimizer = replica, optimizer
        for bucket in replica.buckets:
            bucket.make_stepper(optimizer)

    def gradients_finished(self) -> None:
        pass

    def norm(self, norm_type: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._replica.streams.device)

        def add(bucket: BucketRuntime) -> None:
            shard = bucket.grad_shard
            if norm_type == float("inf") and shard.numel():
                total.copy_(torch.maximum(total, shard.abs().max().double()))
            elif norm_type != float("inf"):
                total.add_(_power_sum(shard, norm_type))

        self._on_every_shard("norm", add)
        total = total.cpu()  # the one number that the host waits for
        replica = self._replica
        kind = "max" if norm_type == float("inf") else "sum"
        label = f"gradient norm in step {replica.step}"
        if replica.plan.num_shards > 1:
            replica.communicator.start_combine(total, kind, replica.streams.communication, label)
            replica.wait_communication()
        return total if norm_type == float("inf") else torch.pow(total, 1.0 / norm_type)

    def change_gradients(self, change: Callable[[torch.Tensor], Any]) -> None:
        self._replica.streams.wait_compute()  # what `change` brings along was made there
        for bucket in self._replica.buckets:
            shard = bucket.grad_shard
            bucket.on_reduced(f"change[{bucket.index}]", lambda shard=shard: change(shard))  # type: ignore[misc]

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        found = found_inf.detach().clone()

        def work(bucket: BucketRuntime) -> None:
            torch._amp_foreach_non_finite_check_and_unscale_([bucket.grad_shard], found, inv_scale)

        self._on_every_shard("unscale", work)
        replica = self._replica
        flag = found.detach().to("cpu").reshape(1)
        label = f"search for inf and nan in step {replica.step}"
        replica.communicator.start_combine(flag, "max", replica.streams.communication, label)
        replica.wait_communication()
        found_inf.copy_(flag.view(found_inf.shape))

    def full_grad(self, tracked: TrackedParameter) -> torch.Tensor:
        replica = self._replica
        parts: list[torch.Tensor] = []
        for index in replica.scheduler.buckets_of[tracked.spec.index]:
            bucket = replica.buckets[index]
            slot = next(s for s in bucket.layout.slots if s.param == tracked.spec.index)
            whole = bucket.start_gather_of(bucket.grad_shard, f"all_gather of the gradient of {slot.fqn}", replica.step)
            replica.wait_communication()
            parts.append(whole.view(-1)[slot.offset : slot.offset + slot.numel])
        return tracked.view_of(torch.cat(parts).to(tracked.grad_dtype))

    def step(self) -> None:
        replica = self._replica
        replica.finish_step()
        replica.arm()
        with without_waiting():
            torch.autograd.graph.increment_version(replica.changed_params())

    def _on_every_shard(self, name: str, work: Callable[[BucketRuntime], None]) -> None:
        """Runs `work` for each bucket once it is reduced, and blocks until all have been done."""
        self._replica.streams.wait_compute()  # what `work` brings along was made there
        for bucket in self._replica.buckets:
            bucket.on_reduced(f"{name}[{bucket.index}]", lambda bucket=bucket: work(bucket))  # type: ignore[misc]
        for bucket in self._replica.buckets:
            bucket.shard_stepped.wait_host()


class WholeUpdate:
    """Gradients are gathered and the user's own `step` runs once, with every averaged gradient in its place.

    It runs in one call and not bucket by bucket: an optimizer that is not known to be element-wise may count its
    calls or couple parameters (a global norm, say), and must see what it would see in plain PyTorch.
    """

    def __init__(self, replica: Replica, optimizer: optim.Optimizer) -> None:
        self._replica, self._optimizer = replica, optimizer

    def gradients_finished(self) -> None:
        """Puts the averaged gradient into every `p.grad` whose parameter was used by any rank."""
        replica = self._replica
        replica.late_reduced.wait_compute()
        replica.reduced |= replica.late_buckets
        parts: dict[int, list[torch.Tensor]] = {}
        used: dict[int, bool] = {}
        for bucket in replica.buckets:
            if bucket.index not in replica.reduced:
                continue
            bucket.grads_reduced.wait_compute()
            for segment, count in zip(bucket.owned, bucket.owned_flags.tolist(), strict=True):
                grad = bucket.grad_shard[segment.offset : segment.offset + segment.numel]
                parts.setdefault(segment.param, []).append(grad)
                used[segment.param] = used.get(segment.param, False) or count > 0
        for param, pieces in parts.items():
            tracked = replica.tracked[param]
            average = tracked.view_of(torch.cat(pieces).to(tracked.grad_dtype)) if used[param] else None
            tracked.put_average(average)
            tracked.retained = False
        for index in replica.reduced:  # what comes later is added to the gradients that are whole already
            replica.buckets[index].reduced_region.zero_()
        replica.reduced.clear()

    def norm(self, norm_type: float) -> torch.Tensor:
        grads = self._grads()
        if norm_type == float("inf"):
            return torch.stack([g.abs().max().double() for g in grads if g.numel()] or [torch.zeros(())]).max()
        total = torch.zeros((), dtype=torch.float64)
        for grad in grads:
            total += _power_sum(grad, norm_type).to("cpu")
        return torch.pow(total, 1.0 / norm_type)

    def change_gradients(self, change: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad():
            for grad in self._grads():
                change(grad)
        self._keep()

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        with without_waiting():  # averages that are marked as local gradients are would ask us again
            for grad in self._grads():
                by_dtype.setdefault(grad.dtype, []).append(grad)
            for grads in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        self._keep()

    def _keep(self) -> None:
        """What we have just changed ourselves is still an average."""
        for tracked in self._replica.tracked:
            if tracked.whole is not None and tracked.param.grad is tracked.whole:
                tracked.put_average(tracked.whole)

    def full_grad(self, tracked: TrackedParameter) -> torch.Tensor:
        grad = tracked.param.grad
        return torch.zeros_like(tracked.param) if grad is None else grad.detach().clone()

    def step(self) -> None:
        step_with_own_hooks(self._optimizer)
        self._replica.scheduler.restart()

    def _grads(self) -> list[torch.Tensor]:
        return [t.param.grad for t in self._replica.tracked if t.param.grad is not None]


def _power_sum(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type == 2.0:
        norm: torch.Tensor = torch.linalg.vector_norm(grad, 2.0, dtype=torch.float64)
        return norm.square()
    return grad.abs().double().pow(norm_type).sum()
