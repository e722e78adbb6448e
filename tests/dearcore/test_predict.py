"""The predictor against timelines worked by hand and the bounds of a profile.

Cannot see: whether a real network behaves as the profile says (tests/bench/test_simulate.py has published rows).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dearcore import planners
from dearcore.layout import plan_threshold
from dearcore.predict import predict, predict_iteration_s
from dearcore.profile import LayerTime, Link, Profile, dear_bound_s, wfbp_bound_s
from dearcore.schedule import plan_all_reduce
from dearcore.trace import Span


def profile_of(rows: list[tuple[int, float, float]], beta_s_per_element: float) -> Profile:
    """fp32 layers of (elements, forward, backward); an all-reduce of an element takes beta, each half half of it."""
    layers = tuple(LayerTime(f"layer{i}.weight", (n,), torch.float32, f, b) for i, (n, f, b) in enumerate(rows))
    half = Link(0.0, beta_s_per_element / 8)
    return Profile(layers, 2, half, half, Link(0.0, beta_s_per_element / 4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 3), st.floats(1e-3, 3)), min_size=1, max_size=12),
    st.floats(0, 0.2),
)
def test_predictions_are_the_bounds_where_only_the_idea_costs(
    rows: list[tuple[int, float, float]], beta_s_per_element: float
) -> None:
    """No latency, host cost or step, and a bucket for each tensor: nothing but the order of things is left."""
    profile = profile_of(rows, beta_s_per_element)
    assert predict_iteration_s(profile, *planners.wfbp(profile)) == pytest.approx(wfbp_bound_s(profile))
    assert predict_iteration_s(profile, *planners.dear(profile, fusion=None)) == pytest.approx(dear_bound_s(profile))


def test_a_timeline_by_hand() -> None:
    """One layer, 4 bytes: forward 1, backward 2.5, both halves 4 each, step 1, 0.25 to launch an op."""
    profile = replace(profile_of([(1, 1.0, 2.5)], 8.0), world_size=1, step_s_per_byte=0.25, host_s_per_op=0.25)
    plan, schedule = planners.dear(profile, fusion=None)
    prediction = predict(profile, plan, schedule)
    start = 8.5  # the all-gather of the iteration before ends; it was launched 4.25 after its own start
    assert prediction.spans == (
        Span("forward", "layer0.weight", start, start + 1),
        Span("backward", "layer0.weight", start + 1, start + 3.5),
        Span("network", "reduce_scatter[0]", start + 3.75, start + 7.75),
        Span("step", "step[0]", start + 7.75, start + 8.75),
        Span("network", "all_gather[0]", start + 8.75, start + 12.75),
    )
    assert prediction.iteration_s == 12.75
    # A network that moves nothing: 4 s until the step is launched, 1 s for it, and then the next forward.
    assert prediction.exposed_s == pytest.approx(12.75 - 5.0)


def test_without_steps_the_users_optimizer_steps_at_the_end() -> None:
    profile = replace(profile_of([(1, 1.0, 2.0)] * 2, 1.0), step_s_per_byte=0.5)
    plan = plan_threshold(profile.specs(), 1, 4)
    whole = plan_all_reduce(plan, "whole", step=False)
    assert predict_iteration_s(profile, plan, whole) == pytest.approx(2 + 4 + 1 + 4)
