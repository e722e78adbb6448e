"""The search for bucket sizes on made-up iteration times: it finds the best, and is not fooled by slow iterations.

Cannot see: whether real iterations are like these; `python -m bench tune` does.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Hashable

import pytest
import torch

from dear.adaptation import tuned_range
from dear.tuner import MAX_TRIALS, Candidate, Point, Range, Tuner
from dearcore.errors import ArgumentError
from dearcore.layout import ParamSpec
from dearcore.planners import dear, dear_fill
from dearcore.predict import predict_iteration_s
from dearcore.profile import LayerTime, Link, Profile

MIB = 1024 * 1024


def _profile(num_layers: int, mb: float, compute_s: float, gbps: float, alpha_s: float) -> Profile:
    """One matrix a layer, each 6 % larger than the one before, on 4 ranks."""
    weights = [1.06**i for i in range(num_layers)]
    rows = [max(1, round(w / sum(weights) * mb * 1e6 / 4 / 64)) for w in weights]
    specs = [ParamSpec(i, f"{i}.weight", (r, 64), torch.float32) for i, r in enumerate(rows)]
    layers = [
        LayerTime(s.fqn, s.shape, s.dtype, compute_s / 3 / num_layers, compute_s / 1.5 / num_layers) for s in specs
    ]
    half = Link(alpha_s, 0.75 * 8 / gbps / 1e9)
    return Profile(tuple(layers), 4, half, half, Link(2 * alpha_s, 2 * half.beta_s_per_byte))


def _search(tuner: Tuner, time_s: Callable[[Point], tuple[Hashable, float]], noise: random.Random) -> None:
    """Runs a search; of five iterations one or two are slow, by up to a factor of 3."""
    points: dict[Hashable, Point] = {}
    while (proposal := tuner.propose()) is not None:
        point = points[proposal.key] if isinstance(proposal, Candidate) else proposal
        key, true_s = time_s(point)
        points.setdefault(key, point)
        if proposal is point and tuner.knows(point, key):
            continue
        times_s = [true_s * noise.uniform(1.0, 1.01) for _ in range(5)]
        for slow in range(noise.choice([0, 1, 2])):
            times_s[slow] *= noise.uniform(1.5, 3.0)
        tuner.observe(key, times_s, point)
    assert tuner.num_trials <= MAX_TRIALS


@pytest.mark.parametrize(
    "profile",
    [_profile(50, 40, 0.45, 1.0, 4e-3), _profile(20, 400, 0.6, 10.0, 5e-4), _profile(100, 8, 0.05, 1.0, 1e-3)],
    ids=["40 MB", "400 MB", "8 MB"],
)
def test_the_best_of_a_grid_is_found(profile: Profile) -> None:
    searched = tuned_range(profile.num_bytes)
    grid = [searched.low_mib * (searched.high_mib / searched.low_mib) ** (i / 24) for i in range(25)]

    def time_s(point: Point) -> tuple[Hashable, float]:
        plan, schedule = dear(profile, fusion=point.mib)
        return plan.buckets, predict_iteration_s(profile, plan, schedule)

    best_s = min(time_s(Point(mib))[1] for mib in grid)
    for seed in range(3):
        wrong = Point(searched.low_mib)  # a prediction that misleads
        tuner = Tuner(searched, [wrong, Point(searched.high_mib)], random_state=seed)
        _search(tuner, time_s, random.Random(seed))
        chosen = tuner.best()
        assert chosen.point is not None
        assert time_s(chosen.point)[1] <= 1.03 * best_s, f"seed {seed}: chose {chosen.point}"


def test_the_density_of_filling_is_searched_too() -> None:
    profile = _profile(50, 40, 0.45, 1.0, 2e-3)
    searched = tuned_range(profile.num_bytes, with_density=True)

    def time_s(point: Point) -> tuple[Hashable, float]:
        plan, schedule = dear_fill(profile, fusion=point.mib, density=point.density)
        return (plan.buckets, schedule.ops), predict_iteration_s(profile, plan, schedule)

    without_s = min(time_s(Point(2.0**i, 0.0))[1] for i in range(6))
    tuner = Tuner(searched, [Point(4.0, 0.0), Point(4.0, 0.5)])
    _search(tuner, time_s, random.Random(0))
    chosen = tuner.best()
    assert chosen.point is not None and chosen.point.density is not None and chosen.point.density > 0
    assert time_s(chosen.point)[1] < without_s


def test_a_plan_is_measured_once_and_the_best_again() -> None:
    """All sizes come to one of three plans, so there is little to search and the rest is for telling two apart."""
    tuner = Tuner(Range(1.0, 64.0), [Point(1.0)])
    keys: list[Hashable] = []
    while (proposal := tuner.propose()) is not None:
        if isinstance(proposal, Point):
            key = int(math.log2(proposal.mib) // 2.5)
            if tuner.knows(proposal, key):
                continue
            keys.append(key)
            tuner.observe(key, [(0.3, 0.201, 0.2)[key]] * 5, proposal)
        else:
            keys.append(proposal.key)
            tuner.observe(proposal.key, [0.2] * 5)
    assert sorted(set(keys)) == [0, 1, 2] and keys.count(0) == 1
    assert keys.count(1) > 1 and keys.count(2) > 1
    assert len(keys) < MAX_TRIALS


def test_a_model_of_one_bucket_is_tuned_at_once() -> None:
    tuner = Tuner(Range(0.01, 0.1), [Point(0.1), Point(0.01)])
    tuner.observe("merged", [0.1] * 5)
    while (proposal := tuner.propose()) is not None:
        assert isinstance(proposal, Point) and tuner.knows(proposal, "merged")
    assert tuner.num_trials == 1 and tuner.best().key == "merged"


@pytest.mark.parametrize(("mib", "low", "high"), [(1000, 1.0, 256.0), (38, 1.0, 38.0), (4, 0.25, 4.0)])
def test_buckets_are_never_larger_than_the_model(mib: float, low: float, high: float) -> None:
    assert tuned_range(mib * MIB) == Range(low, high)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"pip install 'dear-pytorch\[tune\]'"):
        Tuner(Range(1.0, 2.0), [])
