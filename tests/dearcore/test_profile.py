"""Profiles: what they hold, what they refuse, and the bounds that follow from them.

Cannot see: whether a measured time is right.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dearcore.errors import ArgumentError
from dearcore.layout import ParamSpec
from dearcore.profile import (
    LayerTime,
    Link,
    Profile,
    dear_bound_s,
    dear_fill_bound_s,
    fit_link,
    layer_times,
    plan_bounds,
    wfbp_bound_s,
)

FREE = Link(0.0, 0.0)


def uniform(num_layers: int, tf_s: float, tb_s: float, tc_s: float) -> Profile:
    """Layers of one fp32 element each."""
    layers = tuple(
        LayerTime(f"layer{i}.weight", (1,), torch.float32, tf_s / num_layers, tb_s / num_layers)
        for i in range(num_layers)
    )
    beta = tc_s / (4 * num_layers)
    return Profile(layers, 4, Link(0.0, beta / 2), Link(0.0, beta / 2), Link(0.0, beta))


times = st.floats(0, 10, allow_nan=False)
layers = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from([torch.float32, torch.bfloat16]), times, times),
    min_size=1,
    max_size=12,
).map(
    lambda rows: tuple(LayerTime(f"p{i}.w", tuple(shape), dtype, f, b) for i, (shape, dtype, f, b) in enumerate(rows))
)
links = st.builds(Link, times, times, times)
profiles = st.builds(Profile, layers, st.integers(1, 9), links, links, links, times, times)


@given(profiles)
def test_json_round_trip(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_a_profile_prints_as_a_table() -> None:
    profile = uniform(2, 1e-3, 2e-3, 4e-3)
    lines = str(profile).splitlines()
    assert lines[0].startswith("profile: 2 parameters, 0.0 MB, 4 ranks, tf 1.00 ms, tb 2.00 ms, tc 4.00 ms")
    assert lines[3].split()[:3] == ["all_reduce", "alpha", "0.0"]
    assert lines[5].split() == ["0", "500.0", "1000.0", "0.0", "float32", "layer0.weight"]
    assert len(lines) == 4 + 1 + 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [{"fqn": "a"}]}', '{"layers": 3}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="JSON of a profile"):
        Profile.from_json(text)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1"])
def test_times_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ArgumentError, match=r"forward_s of 'w' is .*expected a finite number >= 0"):
        LayerTime("w", (1,), torch.float32, value, 0.0)
    with pytest.raises(ArgumentError, match="alpha_s of a link"):
        Link(value, 0.0)


def test_a_profile_needs_layers_ranks_and_unique_names() -> None:
    (layer,) = uniform(1, 1.0, 1.0, 1.0).layers
    with pytest.raises(ArgumentError, match="at least one layer"):
        Profile((), 2, FREE, FREE, FREE)
    with pytest.raises(ArgumentError, match="world_size=0"):
        Profile((layer,), 0, FREE, FREE, FREE)
    with pytest.raises(ArgumentError, match=r"'layer0\.weight' twice"):
        Profile((layer, layer), 2, FREE, FREE, FREE)


def test_a_profile_fits_its_own_model_only() -> None:
    profile = uniform(3, 1.0, 2.0, 1.0)
    own = [ParamSpec(10 - i, f"layer{i}.weight", (1,), torch.float32) for i in (2, 0, 1)]
    assert [spec.index for spec in profile.order(own)] == [10, 9, 8]  # the optimizer's numbers, in forward order
    profile.check_fits(own, 4)
    other = ParamSpec(0, "layer0.weight", (2,), torch.float32)
    half = ParamSpec(0, "layer0.weight", (1,), torch.float16)
    for params, match in (
        (own[1:], r"has a parameter 'layer2\.weight' that this optimizer does not train"),
        ([*own, ParamSpec(3, "head.bias", (1,), torch.float32)], r"no times of parameter 'head\.bias'"),
        ([own[0], other, own[2]], r"'layer0\.weight' as float32 \[1\], this model has it as float32 \[2\]"),
        ([own[0], half, own[2]], r"as float32 \[1\], this model has it as float16 \[1\]"),
    ):
        with pytest.raises(ArgumentError, match=match):
            profile.check_fits(params, 4)
    with pytest.raises(ArgumentError, match="taken on 4 ranks, this job has 8"):
        profile.check_fits(own, 8)


def test_the_example_of_fit_link() -> None:
    link = fit_link([(0, 1e-3), (1e6, 2e-3), (4e6, 5e-3)])
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-3, 1e-9))
    assert link.residual == pytest.approx(0.0, abs=1e-12)
    assert link.time_s(2e6) == pytest.approx(3e-3)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7), st.lists(st.integers(0, 10**9), min_size=2, unique=True))
def test_fit_link_recovers_a_line(alpha_s: float, beta: float, sizes: list[int]) -> None:
    link = fit_link([(n, alpha_s + beta * n) for n in sizes])
    for n in sizes:
        assert link.time_s(n) == pytest.approx(alpha_s + beta * n, rel=1e-5)
    assert link.residual < 1e-5


def test_a_fit_never_goes_below_zero_and_says_how_far_off_it_is() -> None:
    falling = fit_link([(1e6, 2e-3), (2e6, 1e-3)])
    assert falling.beta_s_per_byte == 0 and 1e-3 < falling.alpha_s < 2e-3
    steep = fit_link([(1e6, 1e-3), (2e6, 4e-3)])
    assert steep.alpha_s == 0 and 1e-9 < steep.beta_s_per_byte < 2e-9
    assert min(falling.residual, steep.residual) > 0.1


@pytest.mark.parametrize("samples", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (9, 0.0)], [(-1, 1.0), (9, 2.0)]])
def test_samples_that_say_nothing_are_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ArgumentError, match="fit_link got"):
        fit_link(samples)


@pytest.mark.parametrize("tc_s", [0.5, 2.0, 4.0, 9.0])
def test_bounds_of_many_uniform_layers(tc_s: float) -> None:
    tf, tb = 1.0, 2.0
    bounds = plan_bounds(uniform(4000, tf, tb, tc_s))
    assert bounds.compute_s == pytest.approx(tf + tb)
    assert bounds.wfbp_s == pytest.approx(tf + max(tb, tc_s), rel=2e-3)
    assert bounds.dear_s == pytest.approx(max(tb, tc_s / 2) + max(tf, tc_s / 2), rel=2e-3)
    assert bounds.dear_fill_s == pytest.approx(max(tf + tb, tc_s), rel=2e-3)


def test_bounds_by_hand() -> None:
    """Two layers: 0 has 8 bytes, 1 has 4; forward 1 s each; backward 1 s, then 3 s; one byte takes 1 s for both halves.

    wfbp: gradient 1 ready at 1, reduced at 5; gradient 0 ready at 4, reduced from 5 to 13; forward until 15.
    dear: reduced 1 to 3 and 4 to 8; gathered 0 at 12, 1 at 14; forward of 0 12 to 13, of 1 14 to 15.
    dear-fill: layer 0 needs 8 s between gradient and forward, besides 6 s of compute; layers 0 and 1 need 12 s, besides
    forward and backward of layer 1, 2 s.
    """
    layers = (
        LayerTime("0", (2,), torch.float32, 1.0, 3.0),
        LayerTime("1", (1,), torch.float32, 1.0, 1.0),
    )
    profile = Profile(layers, 2, Link(9.0, 9.0), Link(9.0, 9.0), Link(9.0, 1.0))
    assert profile.ready_s() == [4.0, 1.0]
    assert wfbp_bound_s(profile) == 15.0
    assert dear_bound_s(profile) == 15.0
    assert dear_fill_bound_s(profile) == 14.0
    assert plan_bounds(profile, 0.0).wfbp_s == 6.0  # another rate


@settings(max_examples=50)
@given(profiles)
def test_no_bound_is_below_compute_and_filling_is_never_worse(profile: Profile) -> None:
    bounds = plan_bounds(profile)
    slack = 1 + 1e-9
    assert bounds.compute_s <= bounds.dear_fill_s * slack
    assert bounds.dear_fill_s <= bounds.dear_s * slack
    assert bounds.dear_fill_s <= bounds.wfbp_s * slack


def test_time_stamps_become_layers() -> None:
    params = [ParamSpec(i, name, (1,), torch.float32) for i, name in enumerate(["head", "body", "bias", "unused"])]
    needed = {"body": 10.0, "bias": 10.0, "head": 11.5}
    layers = layer_times(params, needed, 12.0, 12.5, {"head": 13.0, "bias": 14.0, "body": 14.25})
    assert [(layer.fqn, layer.forward_s, layer.backward_s) for layer in layers] == [
        ("body", 0.0, 0.25),
        ("bias", 1.5, 1.0),
        ("head", 0.5, 0.5),
        ("unused", 0.0, 0.0),
    ]


def test_shapes_alone_make_a_profile_without_times() -> None:
    params = [ParamSpec(i, f"p{i}", (2, 3), torch.float32) for i in range(3)]
    profile = Profile.from_shapes(params, 4)
    assert (profile.tf_s, profile.tb_s, profile.tc_s, profile.num_bytes) == (0, 0, 0, 72)
    assert profile.specs() == params
    assert uniform(3, 1.0, 2.0, 1.0).scaled_compute(2.0).tb_s == pytest.approx(4.0)


def test_a_profile_is_kept_in_a_file(tmp_path: Path) -> None:
    profile = uniform(3, 1e-3, 2e-3, 4e-3)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"other\.json: expected the JSON of a profile"):
        Profile.load(tmp_path / "other.json")
