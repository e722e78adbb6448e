"""Plans, schedules and profiles as JSON that somebody has edited, truncated or mixed up.

Cannot see: a plan that is whole but of another model; `check_fits` refuses that (test_layout.py).
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dearcore.errors import ArgumentError
from dearcore.layout import ParamSpec, Plan, plan_threshold
from dearcore.profile import LayerTime, Link, Profile
from dearcore.schedule import Schedule, plan_dear

SPECS = [ParamSpec(i, f"m{i}.w", shape, torch.float32) for i, shape in enumerate([(3, 5), (7,), (40, 2), ()])]
PLAN = plan_threshold(SPECS, 2, 200)
PROFILE = Profile(
    tuple(LayerTime(spec.fqn, spec.shape, spec.dtype, 1e-3, 2e-3) for spec in SPECS),
    2,
    *(Link(1e-4, 1e-9 * i, 0.5) for i in (1, 2, 3)),
    step_s_per_byte=1e-10,
)
EXAMPLES: dict[str, Any] = {"plan": PLAN, "schedule": plan_dear(PLAN), "profile": PROFILE}
KINDS: dict[str, Any] = {"plan": Plan, "schedule": Schedule, "profile": Profile}
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 7, 10**400, 1.5, -0.5, float("nan"), float("inf"), "", "x", "float32", "float99", "Tensor",
    "step", "done", [], [1], [[]], {}, {"x": 1},
]  # fmt: skip


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside `value`, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places_of(item, (*path, key)))]


def mutated(record: Any, seed: int, value: Any) -> Any:
    """`record` with one value replaced, removed, doubled or added, somewhere."""
    choose, record = random.Random(seed), copy.deepcopy(record)
    place = choose.choice(places_of(record))
    if not place:
        return value
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    act = choose.choice(["replace", "replace", "remove", "double", "add"])
    if act == "replace":
        inside[place[-1]] = value
    elif act == "remove":
        del inside[place[-1]]
    elif isinstance(inside, list):
        inside.insert(place[-1], copy.deepcopy(inside[place[-1]]) if act == "double" else value)
    else:
        inside["added"] = value
    return record


def contains(loaded: Any, record: Any) -> bool:
    """Everything that `record` says is in `loaded`, which may hold defaults as well."""
    if isinstance(record, dict):
        return isinstance(loaded, dict) and all(
            key in loaded and contains(loaded[key], value) for key, value in record.items()
        )
    if isinstance(record, list):
        return len(loaded) == len(record) and all(contains(a, b) for a, b in zip(loaded, record, strict=True))
    return bool(loaded == record) and isinstance(loaded, bool) == isinstance(record, bool)


@pytest.mark.parametrize("kind", KINDS)
@given(seeds=st.lists(st.integers(0, 10**9), max_size=3), value=st.sampled_from(VALUES))
def test_field_h11_edited_json_is_what_it_says_or_refused(kind: str, seeds: list[int], value: Any) -> None:
    record = json.loads(EXAMPLES[kind].to_json())
    for seed in seeds:
        record = mutated(record, seed, value)
    try:
        loaded = KINDS[kind].from_json(json.dumps(record))
    except ArgumentError as error:
        assert seeds, "what was written is read"
        assert len(str(error)) > 20
        return
    assert contains(json.loads(loaded.to_json()), record)
    assert KINDS[kind].from_json(loaded.to_json()) == loaded
    str(loaded)
    if kind == "plan":
        for bucket in loaded.buckets:
            bucket.segments()


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.text(max_size=20), st.binary(max_size=20)))
def test_field_h11_text_is_refused(kind: str, text: str | bytes) -> None:
    with pytest.raises(ArgumentError, match=f"expected the JSON of a {kind}, as {kind.capitalize()}"):
        KINDS[kind].from_json(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", "hello", "[" * 100_000, "", None, 3])
def test_field_h11_whatever_is_no_record_is_refused(kind: str, text: Any) -> None:
    with pytest.raises(ArgumentError, match=f"expected the JSON of a {kind}") as error:
        KINDS[kind].from_json(text)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("kind", "path", "value", "says"),
    [
        ("plan", ("buckets", 1, "dtype"), "float99", r"field 'buckets\[1\]\.dtype' is 'float99'; expected the name of"),
        ("plan", ("buckets", 0, "slots", 0, "offset"), -4, r"'buckets\[0\]\.slots\[0\]\.offset' is -4; .*number >= 0"),
        ("plan", ("buckets", 0, "shard_numel"), 1.5, r"'buckets\[0\]\.shard_numel' is 1\.5"),
        ("plan", ("num_shards",), True, "'num_shards' is True"),
        ("plan", ("num_shards",), 3, r"bucket 0 has num_shards=2; its plan has 3"),
        ("plan", ("buckets", 0, "num_flags"), 0, r"bucket 0 has num_flags=0; expected"),
        ("plan", ("colour",), "red", "field 'colour' is unknown; expected fusion, num_shards, buckets"),
        ("schedule", ("ops", 0), ["fly", 0, "done"], r"'ops\[0\]\[0\]' is 'fly'; expected one of reduce_scatter, "),
        ("schedule", ("ops", 1), ["step", 0], r"'ops\[1\]' is .*; expected a list of 3"),
        ("schedule", ("name",), None, "'name' is None; expected text"),
        ("profile", ("layers", 2, "forward_s"), -1.0, r"forward_s of 'm2\.w' is -1\.0"),
        ("profile", ("layers", 0, "shape"), [3, "5"], r"'layers\[0\]\.shape\[1\]' is '5'"),
        ("profile", ("all_gather",), None, r"'all_gather' is None; expected an object with the fields alpha_s, beta"),
        ("profile", ("world_size",), 0, "world_size=0"),
    ],
)
def test_field_h11_the_field_is_named(kind: str, path: tuple[Any, ...], value: Any, says: str) -> None:
    record = json.loads(EXAMPLES[kind].to_json())
    inside = record
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(ArgumentError, match=says):
        KINDS[kind].from_json(json.dumps(record))


@pytest.mark.parametrize("kind", KINDS)
def test_field_h11_each_missing_field_is_named(kind: str) -> None:
    whole = json.loads(EXAMPLES[kind].to_json())
    for name in whole.keys() - {"step_s_per_byte", "host_s_per_op"}:  # which have defaults
        record = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(ArgumentError, match=f"field '{name}' is missing"):
            KINDS[kind].from_json(json.dumps(record))


def test_field_h11_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match=rf"{path}: expected the JSON of a profile"):
        Profile.load(path)
