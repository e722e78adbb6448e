"""Every schedule trains to the same weights: the baselines are functions, not forks of the optimizer."""

from __future__ import annotations

import pytest
import torch

import dear
from dearcore.layout import ParamSpec, Plan
from dearcore.planners import NEEDS_TIMES, PLANNERS
from dearcore.profile import LayerTime, Link, Profile
from dearcore.schedule import Schedule
from tests.parity.trainers import Case, check_parity
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import OddMLP, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def _specs() -> list[ParamSpec]:
    return [ParamSpec(i, n, tuple(p.shape), p.dtype) for i, (n, p) in enumerate(OddMLP().named_parameters())]


def _planned(name: str, size: int) -> tuple[Plan, Schedule]:
    layers = tuple(LayerTime(s.fqn, s.shape, s.dtype, 1e-3, 2e-3) for s in _specs())
    profile = Profile(layers, size, Link(1e-4, 1e-7), Link(1e-4, 1e-7), Link(2e-4, 2e-7))
    return PLANNERS[name](profile, _specs())


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
