"""What `optimizer.state` is while the ranks hold it in parts: it tells for which parameters there is state, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from torch import nn

from dearcore.errors import ScheduleError

__all__ = ["DividedState"]


class DividedState(MutableMapping[nn.Parameter, Any]):
    """Length, iteration and `in` as in the wrapped optimizer's; reading or changing a parameter's state is an error.

    An empty mapping here would be silently wrong: `clear()` would clear nothing, and torch's helpers for checkpoints
    take a step to create what they find missing.

    Args:
        own: the wrapped optimizer's state, of parameters that are not divided.
        divided: the names of the parameters whose state the ranks hold in parts.
        has_state: whether there is any by now, the same on every rank.
    """

    def __init__(self, own: MutableMapping[Any, Any], divided: Mapping[nn.Parameter, str], has_state: bool) -> None:
        self._own, self._divided, self._has_state = own, divided, has_state

    def __len__(self) -> int:
        return len(self._own) + (len(self._divided) if self._has_state else 0)

    def __iter__(self) -> Iterator[nn.Parameter]:
        yield from self._own
        if self._has_state:
            yield from self._divided

    def __getitem__(self, param: nn.Parameter) -> Any:
        if param in self._divided:
            self._refuse(param)
        return self._own[param]

    def __setitem__(self, param: nn.Parameter, state: Any) -> None:
        if param in self._divided:
            self._refuse(param)
        self._own[param] = state

    def __delitem__(self, param: nn.Parameter) -> None:
        if param in self._divided:
            self._refuse(param)
        del self._own[param]

    def __repr__(self) -> str:
        return f"DividedState({len(self)} parameters; state_dict() gathers it)"

    def _refuse(self, param: nn.Parameter) -> NoReturn:
        raise ScheduleError(
            f"the optimizer state of '{self._divided[param]}' is divided among the ranks. Read it with state_dict(), "
            "change it with load_state_dict(), on all ranks."
        )
