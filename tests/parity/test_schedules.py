"""Every schedule trains to the same weights: the baselines are functions, not forks of the optimizer."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dear
from dearcore.layout import ParamSpec, Plan
from dearcore.planners import NEEDS_TIMES, PLANNERS
from dearcore.profile import LayerTime, Link, Profile
from dearcore.schedule import Schedule
from tests.parity.test_clipping import value_steps
from tests.parity.test_loops import backward_without_step, groups_of_three, groups_of_three_without_sync
from tests.parity.trainers import Case, Script, check_parity, plain_steps
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import Batch, OddMLP, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def _planned(name: str, size: int, model: nn.Module | None = None) -> tuple[Plan, Schedule]:
    named = (model or OddMLP()).named_parameters()
    specs = [ParamSpec(i, name, tuple(param.shape), param.dtype) for i, (name, param) in enumerate(named)]
    layers = tuple(LayerTime(s.fqn, s.shape, s.dtype, 1e-3, 2e-3) for s in specs)
    profile = Profile(layers, size, Link(1e-4, 1e-7), Link(1e-4, 1e-7), Link(2e-4, 2e-7))
    return PLANNERS[name](profile, specs)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_schedule_is_bit_equal(pool: RankPool, size: int) -> None:
    cases = {}
    for name in PLANNERS:
        plan, schedule = _planned(name, size)
        options = {"fusion": plan, "schedule": schedule}
        cases[f"{name}, planned"] = Case(OddMLP(), SGD, options=options, deterministic=size > 2)
        if name not in NEEDS_TIMES:
            cases[name] = Case(OddMLP(), SGD, options={"schedule": name}, deterministic=size > 2)
    assert len(cases) > len(PLANNERS)
    check_parity(pool, cases, size)


def _digits(size: int, num_steps: int) -> tuple[nn.Module, list[list[Batch]]]:
    """The example's network and images: for each rank `num_steps` batches of 8."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the example needs scikit-learn")
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(EXAMPLE.parent), *sys.path]):
        spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.make_model().eval()  # without dropout, which draws differently on each rank
    pixels, digits = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8).split(8)
    labels = torch.from_numpy(digits).split(8)
    return model, [[(images[size * i + r], labels[size * i + r]) for i in range(num_steps)] for r in range(size)]


def _cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(("size", "deterministic"), [(2, False), (2, True), (3, True), (4, True)])
def test_every_schedule_trains_the_digits_example(pool: RankPool, size: int, deterministic: bool) -> None:
    model, batches = _digits(size, num_steps=4)
    cases = {}
    for name in PLANNERS:
        plan, schedule = _planned(name, size, model)
        options = {"fusion": plan, "schedule": schedule}
        cases[name] = Case(
            model, SGD, options=options, batches=batches, loss_fn=_cross_entropy, deterministic=deterministic
        )
    check_parity(pool, cases, size)


LOOPS: dict[str, tuple[Script, dict[str, Any]]] = {
    "Adam": (plain_steps, {}),
    "accumulating": (groups_of_three, {"accumulate": 3}),
    "no_sync": (groups_of_three_without_sync, {}),
    "probes": (backward_without_step, {}),
    "clipping values": (functools.partial(value_steps, 0.05), {}),
}


@pytest.mark.parametrize("size", [2, 3])
def test_every_schedule_in_every_loop(pool: RankPool, size: int) -> None:
    model = OddMLP()
    cases = {}
    for name in PLANNERS:
        plan, schedule = _planned(name, size)
        for loop, (script, more) in LOOPS.items():
            if name == "dear-fill" and "clipping" in loop:
                continue  # it refuses to clip
            options = {"fusion": plan, "schedule": schedule, **more}
            cases[f"{name}, {loop}"] = Case(model, ADAM, script, options=options, num_steps=7, deterministic=size > 2)
    check_parity(pool, cases, size)


def _wrap(kind: str) -> None:
    model = OddMLP()
    plan, schedule = _planned("dear", dear.size())
    options = {
        "unknown": {"schedule": "ring"},
        "without its plan": {"schedule": schedule},
        "fusion without effect": {"schedule": "wfbp", "fusion": 1.0},
        "misses a bucket": {"schedule": Schedule("mine", schedule.ops[1:]), "fusion": plan},
        "gathers before its step": {"schedule": Schedule("mine", schedule.ops[::-1]), "fusion": plan},
        "of another world": {"schedule": schedule, "fusion": _planned("dear", dear.size() + 1)[0]},
        "dear-fill for a whole step": {"schedule": "dear-fill", "shard": False},
    }[kind]
    dear.DistributedOptimizer(SGD(model), model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("unknown", "expected one of"),
        ("without its plan", "Pass the Plan"),
        ("fusion without effect", "no effect"),
        ("misses a bucket", "bucket"),
        ("gathers before its step", "bucket"),
        ("of another world", "shards"),
        ("dear-fill for a whole step", "steps shards"),
    ],
)
def test_bad_schedules_are_refused_on_every_rank(pool: RankPool, kind: str, says: str) -> None:
    outcomes = pool.run(_wrap, kind, size=2, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", says)
