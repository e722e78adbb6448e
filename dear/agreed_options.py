"""Options that every rank must use alike: each step asks whether they still are, for a few bytes more on the wire.

Ranks agree on late gradients in each step anyway. With that goes a *ballot*: a checksum of what each parameter group
is stepped with. Only where checksums differ do the ranks exchange the values themselves, to say which.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import optim

from dearcore.errors import ArgumentError

__all__ = ["BALLOT_BYTES", "AgreedOptions", "Ballot", "Values", "check_per_rank", "difference", "is_unanimous"]

BALLOT_BYTES = 8  # a checksum and its complement: where checksums differ, their maxima add up to more
_CHECKSUM_BYTES = BALLOT_BYTES // 2
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})  # a step is computed, not what it computes

Values = list[dict[str, Any]]  # of each group, comparable by == and repr on all ranks
_Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ballot:
    """`code` [BALLOT_BYTES]: to be combined by maximum over ranks. `values` None: this rank is not at a step."""

    code: bytes
    values: Values | None


_ABSTENTION = Ballot(bytes(BALLOT_BYTES), None)


class AgreedOptions:
    """Of one optimizer: what its step uses, which are the options in `defaults`, but for those of `per_rank`.

    Costs a comparison with what was there in the step before, by identity mostly. An option that is a tensor on another
    device is read when it is another tensor or has been written to, for which the host waits.
    """

    def __init__(self, optimizer: optim.Optimizer, per_rank: Collection[str]) -> None:
        self.per_rank = frozenset(per_rank)
        self._optimizer = optimizer
        self._names = tuple(name for name in optimizer.defaults if name not in self.per_rank and name not in _HOW)
        self._read_group = _reader(self._names)
        self._is_asked = False
        self._ballot: Ballot | None = None
        self._seen: list[tuple[Any, ...]] | None = None  # when `_ballot` was made; None: it cannot be told from that
        self._on_device: dict[int, tuple[torch.Tensor, int, Any]] = {}  # tensor, its version, its value

    def ask(self) -> None:
        """The next agreement is that of a step."""
        self._is_asked = True

    def take_ballot(self) -> Ballot:
        """What goes with the agreement that is about to start."""
        if not self._is_asked:
            return _ABSTENTION
        self._is_asked = False
        seen: list[tuple[Any, ...]] | None
        try:
            seen = list(map(self._read_group, self._optimizer.param_groups))
            if self._ballot is not None and self._seen == seen:
                return self._ballot
            # groups that are alike, as most are where there are many, are looked at once
            known = {read: self._values_of(read) for read in set(seen)} if all(map(_is_fixed, set(seen))) else None
        except (KeyError, RuntimeError, TypeError, ValueError):  # an option is missing, or can change in place
            known = seen = None
        values = self.values() if known is None or seen is None else [known[read] for read in seen]
        checksum = _checksum(values).to_bytes(_CHECKSUM_BYTES)
        self._ballot = Ballot(bytes((*checksum, *(255 - byte for byte in checksum))), values)
        self._seen = seen if known is not None else None
        return self._ballot

    def _values_of(self, read: tuple[Any, ...]) -> _Group:
        return {name: _comparable(value) for name, value in zip(self._names, read, strict=True)}

    def values(self) -> Values:
        """The options of each group at this moment."""
        before, self._on_device = self._on_device, {}
        return [
            {name: self._comparable(group[name], before) for name in self._names if name in group}
            for group in self._optimizer.param_groups
        ]

    def _comparable(self, value: Any, before: Mapping[int, tuple[torch.Tensor, int, Any]]) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return _comparable(value)
        known = before.get(id(value))
        if known is None or known[1] != value._version:
            known = (value, value._version, _comparable(value))
        self._on_device[id(value)] = known
        return known[2]


def _checksum(values: Values) -> int:
    texts: dict[int, bytes] = {}  # groups that are alike are one object
    checksum = 0
    for group in values:
        if id(group) not in texts:
            texts[id(group)] = repr(group).encode()
        checksum = zlib.crc32(texts[id(group)], checksum)
    return checksum


def is_unanimous(code: Sequence[int]) -> bool:
    """True if all ballots whose codes were combined were the same; abstentions do not count."""
    pairs = zip(code[:_CHECKSUM_BYTES], code[_CHECKSUM_BYTES:], strict=True)
    return all(byte + complement in (0, 255) for byte, complement in pairs)


def difference(everyone: Sequence[Values | None]) -> str:
    """What to tell of ranks whose options differ, in which group first. None: a rank that had no say."""
    values = {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
    found = _first_difference(values)
    if found is None:
        lengths = {rank: len(theirs) for rank, theirs in values.items()}
        return f"the ranks' optimizers have different parameter groups: {_by_value(lengths)} of them."
    group, name, by_rank = found
    return (
        f"the ranks' optimizers have different options. In parameter group {group}, '{name}' is {_by_value(by_rank)}. "
        "No weight has changed in this step. Set the same options on every rank: step schedulers on all of them, and "
        "feed them with what all of them have, such as dear.allreduce(loss). Options that are meant to differ are "
        f"named by DistributedOptimizer(..., per_rank_options=('{name}',))."
    )


def check_per_rank(names: object, optimizer: optim.Optimizer, is_replicated: bool) -> tuple[str, ...]:
    """`per_rank_options` as a tuple; raises ArgumentError where it names no options, or would let weights drift."""
    if isinstance(names, str) or not isinstance(names, (tuple, list, set, frozenset)):
        raise ArgumentError(f"per_rank_options={names!r}; expected names of options, such as ('lr',).")
    for name in names:
        if name not in optimizer.defaults:
            known = ", ".join(map(str, optimizer.defaults))
            raise ArgumentError(
                f"per_rank_options names {name!r}, which is no option of {type(optimizer).__name__}; it has {known}."
            )
    if names and is_replicated:
        raise ArgumentError(
            "per_rank_options with a schedule that steps every weight on every rank would let the ranks' weights drift "
            "apart. Leave it out, or use schedule='dear', which has each weight stepped by one rank."
        )
    return tuple(sorted(names))


def _first_difference(values: Mapping[int, Values]) -> tuple[int, str, dict[int, Any]] | None:
    for number, groups in enumerate(zip(*values.values(), strict=False)):
        for name in {name: None for group in groups for name in group}:
            by_rank = {rank: group.get(name) for rank, group in zip(values, groups, strict=True)}
            if len(set(map(repr, by_rank.values()))) > 1:
                return number, name, by_rank
    return None


def _by_value(by_rank: Mapping[int, Any]) -> str:
    """`0.1 on rank 0 and 0.2 on ranks 1, 2`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in by_rank.items():
        ranks.setdefault(repr(value), []).append(str(rank))
    parts = [f"{value} on rank{'s' if len(of) > 1 else ''} {', '.join(of)}" for value, of in ranks.items()]
    return " and ".join(parts)


def _reader(names: tuple[str, ...]) -> Callable[[_Group], tuple[Any, ...]]:
    """Reads these options of a group; raises KeyError if it has not all of them."""
    return operator.itemgetter(*names) if len(names) > 1 else lambda group: tuple(group[name] for name in names)


def _is_fixed(value: Any) -> bool:
    """True if the same object is the same value for ever."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (Real, str))


def _comparable(value: Any) -> Any:
    """The same by repr on ranks that mean the same: a number is a number, of whatever type and wherever it stands."""
    if isinstance(value, int) and abs(value) > 2**53:
        return value
    if isinstance(value, Real):
        number = float(value) + 0.0  # no negative zero
        return number if number == number else "nan"
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):  # NumPy's arrays too
        items = value.tolist()
        return _comparable(items[0] if isinstance(items, list) and len(items) == 1 else items)
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _comparable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (torch.dtype, Enum)):
        return str(value)
    return type(value).__qualname__  # functions and objects: whether two are the same nobody can tell
