"""State in the wrapped optimizer's own format: whole, the same on every rank, loadable at any world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from dearcore.bucket import BucketRuntime
from dearcore.errors import ArgumentError
from dearcore.shard import OwnedSegment, SegmentState

from .replica import Replica
from .tracked import TrackedParameter

__all__ = ["MASTER", "export_state", "import_state", "load_into_groups", "packed_indices"]

SCALARS = ("step", "eta", "mu", "mu_product")  # torch's names of what is one number for a whole parameter
MASTER = "master_param"  # key of the fp32 master of a bf16 or fp16 parameter; plain optimizers ignore it


def packed_indices(optimizer: optim.Optimizer) -> dict[int, int]:
    """id of a parameter -> its number in `state_dict()["state"]`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(param): number for number, param in enumerate(params)}


def export_state(replica: Replica) -> dict[int, dict[str, Any]]:
    """The whole state of every parameter, by its index in the plan, on the CPU. Collective."""
    states: dict[int, dict[str, Any]] = {}
    for bucket in replica.buckets:
        mine = _owned_states(bucket)
        everyone: list[list[tuple[int, int, dict[str, Any]]]] = []
        stream = replica.streams.communication
        stream.wait(bucket.shard_stepped)
        if bucket.is_sharded:
            replica.communicator.start_gather_objects(mine, everyone, stream, f"state_dict() of bucket {bucket.index}")
            replica.wait_communication()
        else:
            everyone.append(mine)
        for shard in everyone:
            for param, start, state in shard:
                _place(states.setdefault(param, {}), replica.tracked[param], start, state)
    return {
        param: {
            k: replica.tracked[param].view_of(v) if _is_whole(v, replica.tracked[param]) else v
            for k, v in state.items()
        }
        for param, state in states.items()
        if state
    }


def import_state(replica: Replica, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Takes this rank's shards from the whole state of every parameter (by index in the plan)."""
    for bucket in replica.buckets:
        bucket.shard_stepped.wait_host()
        segments: list[SegmentState] = []
        for segment in bucket.owned:
            tracked = replica.tracked[segment.param]
            state = dict(states.get(segment.param, {}))
            master = state.pop(MASTER, None)
            if bucket.has_master:
                _restore_master(bucket, segment, tracked, master)
            segments.append(
                {key: _cut(key, value, tracked, segment, bucket.master_shard.dtype) for key, value in state.items()}
            )
        assert bucket.stepper is not None
        bucket.stepper.load_state(segments)


def load_into_groups(optimizer: optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Gives the optimizer the options of `state_dict`; returns the state by id of the parameter.

    Raises ArgumentError if the groups do not fit, before anything has changed.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ArgumentError(
            "load_state_dict expects a dict with 'state' and 'param_groups', as state_dict() returns it."
        )
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    have = [len(group["params"]) for group in optimizer.param_groups]
    if saved != have:
        raise ArgumentError(
            f"the checkpoint has parameter groups of {saved} parameters, this optimizer of {have}. Build "
            f"the optimizer with "
            "the groups that the checkpoint was saved with."
        )
    for saved_group, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        lacks, extra = set(group) - set(saved_group) - {"param_names"}, set(saved_group) - set(group) - {"param_names"}
        if lacks & set(optimizer.defaults) and extra - {"initial_lr"}:
            raise ArgumentError(
                f"the checkpoint is of another optimizer than {type(optimizer).__name__}: its groups lack "
                f"{', '.join(sorted(lacks))} and have {', '.join(sorted(extra))}. Load the checkpoint of "
                f"this optimizer."
            )
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = {
        id(param): dict(state_dict["state"].get(number, {})) for number, param in zip(numbers, params, strict=True)
    }
    for param in params:
        for key, value in states[id(param)].items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                raise ArgumentError(
                    f"the checkpoint's state '{key}' has shape {tuple(value.shape)}, its parameter "
                    f"{tuple(param.shape)}. "
                    "Load the checkpoint of this model."
                )
    optimizer.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
    return states


def _owned_states(bucket: BucketRuntime) -> list[tuple[int, int, dict[str, Any]]]:
    bucket.shard_stepped.wait_host()
    assert bucket.stepper is not None
    result = []
    for segment, state in zip(bucket.owned, bucket.stepper.export_state(), strict=True):
        described: dict[str, Any] = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        if bucket.has_master:
            span = slice(segment.offset, segment.offset + segment.numel)
            described[MASTER] = bucket.master_shard[span].cpu()
        result.append((segment.param, segment.start, described))
    return result


def _place(whole: dict[str, Any], tracked: TrackedParameter, start: int, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            flat = whole.setdefault(key, torch.zeros(tracked.spec.numel, dtype=value.dtype))
            flat[start : start + value.numel()] = value
        else:
            whole[key] = value


def _is_whole(value: object, tracked: TrackedParameter) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == tracked.spec.numel


def _cut(key: str, value: Any, tracked: TrackedParameter, segment: OwnedSegment, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != tracked.param.shape or (value.dim() == 0 and key in SCALARS):
        return value.clone()
    flat = tracked.in_memory_order(value).reshape(-1)
    cut = flat[segment.start : segment.start + segment.numel].to(tracked.param.device, copy=True)
    return cut.to(dtype) if cut.is_floating_point() else cut


def _restore_master(
    bucket: BucketRuntime, segment: OwnedSegment, tracked: TrackedParameter, master: torch.Tensor | None
) -> None:
    span = slice(segment.offset, segment.offset + segment.numel)
    if master is None:
        bucket.master_shard[span] = bucket.param_shard[span].to(bucket.master_shard.dtype)
    else:
        flat = tracked.in_memory_order(master).reshape(-1)
        bucket.master_shard[span] = flat[segment.start : segment.start + segment.numel].to(bucket.master_shard)
