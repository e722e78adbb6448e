"""Which optimizer trains which parameter: never two of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from dearcore.errors import ArgumentError

from .tracked import TrackedParameter

__all__ = ["Owner", "check_unclaimed", "claim", "give_up", "is_claimed"]


class Owner(Protocol):
    closed: bool
    tracked: list[TrackedParameter]


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()  # by id of the parameter


def check_unclaimed(tracked: Sequence[TrackedParameter]) -> None:
    """Raises ArgumentError naming a parameter that another optimizer trains."""
    for t in tracked:
        if is_claimed(t.param):
            raise ArgumentError(
                f"parameter '{t.spec.fqn}' is trained by another DistributedOptimizer already. Give each parameter to "
                "one optimizer, or close() the other one first."
            )


def is_claimed(tensor: torch.Tensor) -> bool:
    """True if it is a parameter that an optimizer trains."""
    owner = _owners.get(id(tensor))
    return owner is not None and not owner.closed and any(tensor is other.param for other in owner.tracked)


def claim(owner: Owner) -> None:
    for tracked in owner.tracked:
        _owners[id(tracked.param)] = owner


def give_up(owner: Owner) -> None:
    for tracked in owner.tracked:
        _owners.pop(id(tracked.param), None)
