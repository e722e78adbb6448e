"""Ranks must wrap the same thing. Differences are found before anything else is sent, and reported alike everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn, optim

from dearcore.errors import ArgumentError
from dearcore.profile import Profile

__all__ = ["check_agreement", "describe", "described_profile"]


def describe(
    model: nn.Module,
    optimizer: optim.Optimizer,
    options: Sequence[str],
    sent: Collection[str],
    aliases: Sequence[str],
    per_rank: Collection[str] = (),
) -> list[str]:
    """One line for each thing that has to be the same on every rank.

    Of the model that is what stands in the optimizer, the parameters and buffers that are `sent` from rank to rank,
    and the `aliases`, a line each. `per_rank`: options of groups that may differ.
    """
    lines = [f"optimizer class {type(optimizer).__module__}.{type(optimizer).__qualname__}", *options]
    owner = {
        param: f"{number}, place {place}"  # of the same order in checkpoints
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    }
    for name, param in model.named_parameters():
        if param not in owner and name not in sent:
            continue
        state = optimizer.state.get(param, {})
        history = ", ".join(f"{key}={_value(value)}" for key, value in sorted(state.items()))
        lines.append(
            f"parameter '{name}': shape {tuple(param.shape)}, {param.dtype}, grad_dtype {param.grad_dtype}, "
            f"requires_grad {param.requires_grad}, group {owner.get(param, 'none')}, state {{{history}}}"
        )
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in sent]
    lines += [f"buffer '{name}': shape {tuple(buffer.shape)}, {buffer.dtype}" for name, buffer in buffers]
    lines += aliases
    for number, group in enumerate(optimizer.param_groups):
        lines.append(f"group {number}: {len(group['params'])} parameters")
        keys = [key for key in sorted(group) if key not in ("params", "param_names", *per_rank)]
        lines += [f"group {number}: {key}={_value(group[key])}" for key in keys]
    return lines


def described_profile(profile: Profile | None) -> list[str]:
    if profile is None:
        return ["profile: none given"]
    links = f"reduce_scatter {profile.reduce_scatter}, all_gather {profile.all_gather}, all_reduce {profile.all_reduce}"
    costs = f"step {profile.step_s_per_byte!r} s a byte, host {profile.host_s_per_op!r} s an op"
    return [
        f"profile of {profile.world_size} ranks: {links}, {costs}",
        *(f"profile of {layer}" for layer in profile.layers),
    ]


def check_agreement(lines: Sequence[str], gather: Callable[[Any], list[Any]]) -> None:
    """Raises the same ArgumentError on every rank, with the first difference, unless all have equal `lines`."""
    digests = gather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if all(digest == digests[0] for digest in digests):
        return
    everyone: list[Sequence[str]] = gather(list(lines))
    for other, theirs in enumerate(everyone):
        for index in range(max(len(theirs), len(everyone[0]))):
            first = everyone[0][index] if index < len(everyone[0]) else "nothing more"
            second = theirs[index] if index < len(theirs) else "nothing more"
            if first != second:
                raise ArgumentError(
                    f"ranks build different optimizers. The first difference: rank 0 has {first}; rank {other} has "
                    f"{second}. Build the same model, optimizer and options on every rank."
                )


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() == 1 else f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (int, float, str, bool, tuple, list, type(None))):
        return repr(value)
    return type(value).__qualname__
