"""Reads JSON into the dataclasses of plans, schedules and profiles: what does not fit is an error that names the field.

    read_json(Plan, text, "plan")     ->  a Plan, or ArgumentError: "... buckets[0].slots[2].offset is -1; expected ..."

Types come from the annotations of the classes: str, int (counts: never below zero), float, torch.dtype (by its name),
enums (by their value), tuples and other dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from enum import Enum
from typing import Any, NoReturn, TypeVar

import torch

from .errors import ArgumentError

__all__ = ["dtype_name", "read_json"]

T = TypeVar("T")

_SHOWN = 40  # characters of a value that does not fit


def read_json(cls: type[T], text: str | bytes, name: str) -> T:
    """A `cls` from what `json.dumps` made of its fields. `name`: what it is, for people.

    Raises: ArgumentError naming the field that is missing, unknown or does not fit.
    """
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:  # of text that is no text, no JSON, or too deep
        raise ArgumentError(f"{_expected(name)}: {_short(text)} is no JSON ({error}).") from error
    record: T = _Reader(name).read(cls, value, "")
    return record


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in JSON: "float32"."""
    return str(dtype).removeprefix("torch.")


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, kind: Any, value: Any, field: str) -> Any:
        if dataclasses.is_dataclass(kind):
            return self._read_fields(kind, value, field)
        if typing.get_origin(kind) is tuple:
            return self._read_items(typing.get_args(kind), value, field)
        if kind is torch.dtype:
            found = getattr(torch, value, None) if isinstance(value, str) else None
            return found if isinstance(found, torch.dtype) else self._refuse(field, value, "the name of a torch.dtype")
        if issubclass(kind, Enum):
            names = [member.value for member in kind]
            return kind(value) if value in names else self._refuse(field, value, f"one of {', '.join(names)}")
        if kind is int:
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            return value if is_count else self._refuse(field, value, "a whole number >= 0")
        if kind is float:
            return self._read_float(value, field)
        assert kind is str, f"{field}: no way to read {kind}"
        return value if isinstance(value, str) else self._refuse(field, value, "text")

    def _read_fields(self, cls: Any, value: Any, field: str) -> Any:
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if not isinstance(value, dict):
            self._refuse(field, value, f"an object with the fields {', '.join(fields)}")
        kinds = typing.get_type_hints(cls)
        for extra in value.keys() - fields.keys():
            self._fail(f"field '{_inside(field, extra)}' is unknown; expected {', '.join(fields)}")
        read = {}
        for key, described in fields.items():
            if key in value:
                read[key] = self.read(kinds[key], value[key], _inside(field, key))
            elif described.default is dataclasses.MISSING:
                self._fail(f"field '{_inside(field, key)}' is missing")
        return cls(**read)

    def _read_items(self, kinds: tuple[Any, ...], value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self._refuse(field, value, "a list")
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        elif len(kinds) != len(value):
            self._refuse(field, value, f"a list of {len(kinds)}")
        return tuple(
            self.read(kind, item, f"{field}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )

    def _read_float(self, value: Any, field: str) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        self._refuse(field, value, "a finite number")

    def _refuse(self, field: str, value: Any, expected: str) -> NoReturn:
        self._fail(f"{f'field {field!r}' if field else 'the whole'} is {_short(value)}; expected {expected}")

    def _fail(self, what: str) -> NoReturn:
        raise ArgumentError(f"{_expected(self._name)}: {what}.")


def _expected(name: str) -> str:
    return f"expected the JSON of a {name}, as {name.capitalize()}.to_json() writes it"


def _inside(field: str, key: str) -> str:
    return f"{field}.{key}" if field else key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
