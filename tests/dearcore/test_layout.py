"""Plans: every element has one place, on every rank, whatever the sizes.

Cannot see: whether a plan is fast, and what run time does with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dearcore.errors import ArgumentError
from dearcore.layout import (
    SHARD_ALIGN_BYTES,
    SLOT_ALIGN_BYTES,
    Bucket,
    NearbyLayers,
    ParamSpec,
    Plan,
    Slot,
    dense_strides,
    plan_nearby_layers,
    plan_threshold,
    plan_unfused,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def specs_of(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype] | None = None) -> list[ParamSpec]:
    """Two parameters a module: m0.a, m0.b, m1.a, ..."""
    dtypes = dtypes or [torch.float32] * len(shapes)
    return [
        ParamSpec(i, f"m{i // 2}.{'ab'[i % 2]}", shape, dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


shape_lists = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 70)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 7), st.integers(0, 5), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def param_lists(draw: st.DrawFn) -> list[ParamSpec]:
    shapes = draw(shape_lists)
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes)))
    return specs_of(shapes, dtypes if draw(st.booleans()) else None)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ParamSpec], Plan]:
    params, num_shards = draw(param_lists()), draw(st.integers(1, 9))
    maker = draw(st.sampled_from(["threshold", "unfused", "nearby"]))
    if maker == "unfused":
        return params, plan_unfused(params, num_shards)
    if maker == "nearby":
        return params, plan_nearby_layers(params, num_shards, draw(st.integers(1, 4)))
    return params, plan_threshold(params, num_shards, draw(st.one_of(st.integers(1, 8000), st.floats(0.5, 1e7))))


@given(plans())
def test_every_element_of_every_parameter_has_exactly_one_place(made: tuple[list[ParamSpec], Plan]) -> None:
    params, plan = made
    placed: dict[int, list[int]] = {spec.index: [] for spec in params}
    for bucket in plan.buckets:
        for slot in bucket.slots:
            placed[slot.param].extend(range(slot.start, slot.start + slot.numel))
    assert placed == {spec.index: list(range(spec.numel)) for spec in params}
    assert {slot.param for bucket in plan.buckets for slot in bucket.slots} == {spec.index for spec in params}


@given(plans())
def test_slots_do_not_overlap_and_are_aligned(made: tuple[list[ParamSpec], Plan]) -> None:
    params, plan = made
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset * bucket.dtype.itemsize % SLOT_ALIGN_BYTES == 0
            assert (slot.fqn, bucket.dtype) == (params[slot.param].fqn, params[slot.param].dtype)
            end = slot.offset + slot.numel
        assert end <= bucket.padded_numel


@given(plans())
def test_shards_are_equal_aligned_and_not_larger_than_they_must_be(made: tuple[list[ParamSpec], Plan]) -> None:
    _, plan = made
    for bucket in plan.buckets:
        align = SHARD_ALIGN_BYTES // bucket.dtype.itemsize
        end = max(slot.offset + slot.numel for slot in bucket.slots)
        assert bucket.shard_numel % align == 0
        assert bucket.num_flags % align == 0
        assert bucket.padded_numel == bucket.shard_numel * plan.num_shards
        assert end <= bucket.padded_numel < end + plan.num_shards * align
        assert bucket.region_numel == bucket.shard_numel + bucket.num_flags


@given(plans())
def test_segments_cut_slots_at_shard_boundaries_and_have_flags_of_their_own(made: tuple[list[ParamSpec], Plan]) -> None:
    _, plan = made
    for bucket in plan.buckets:
        segments = bucket.segments()
        flags = [(segment.shard, segment.flag) for segment in segments]
        assert len(set(flags)) == len(flags)
        assert all(segment.flag < bucket.num_flags for segment in segments)
        assert [s.slot for s in segments] == sorted(s.slot for s in segments)
        for position, slot in enumerate(bucket.slots):
            parts = [segment for segment in segments if segment.slot == position]
            at = slot.start
            for part in parts:
                assert part.start == at
                assert 0 <= part.shard < plan.num_shards
                assert part.offset >= 0
                assert part.offset + part.numel <= bucket.shard_numel
                whole = part.shard * bucket.shard_numel + part.offset
                assert whole == slot.offset + part.start - slot.start
                at += part.numel
            assert at == slot.start + slot.numel
            assert all(part.numel for part in parts) or len(parts) == 1  # an empty tensor keeps one empty segment


@given(plans())
def test_a_plan_travels_as_json(made: tuple[list[ParamSpec], Plan]) -> None:
    params, plan = made
    assert Plan.from_json(plan.to_json()) == plan
    plan.check_fits(params, plan.num_shards)


@given(plans())
def test_a_plan_prints_a_table_with_one_row_a_bucket(made: tuple[list[ParamSpec], Plan]) -> None:
    _, plan = made
    lines = str(plan).splitlines()
    assert lines[0] == f"plan: {plan.fusion}, {len(plan.buckets)} buckets, {plan.num_shards} shards"
    assert lines[1].split()[:3] == ["bucket", "dtype", "tensors"]
    assert len(lines) == 2 + len(plan.buckets)
    for bucket, line in zip(plan.buckets, lines[2:], strict=True):
        assert line.split()[0] == str(bucket.index)
        assert bucket.slots[0].fqn in line


@given(param_lists(), st.integers(1, 5), st.integers(1, 10_000))
def test_threshold_is_kept_but_for_what_alignment_needs(
    params: list[ParamSpec], num_shards: int, threshold_bytes: int
) -> None:
    plan = plan_threshold(params, num_shards, threshold_bytes)
    for bucket in plan.buckets:
        if len(bucket.slots) > 1:
            assert bucket.num_bytes <= threshold_bytes
        else:  # a part of a split tensor is at least one aligned piece a rank
            assert bucket.num_bytes <= threshold_bytes + num_shards * SLOT_ALIGN_BYTES


@given(param_lists(), st.integers(1, 5), st.integers(1, 3000))
def test_parts_of_a_split_tensor_are_contiguous_in_memory(
    params: list[ParamSpec], num_shards: int, threshold_bytes: int
) -> None:
    plan = plan_threshold(params, num_shards, threshold_bytes)
    for spec in params:
        buckets = [b for b in plan.buckets if any(s.param == spec.index for s in b.slots)]
        if len(buckets) == 1:
            continue
        assert all(len(bucket.slots) == 1 for bucket in buckets)
        assert [b.index for b in buckets] == list(range(buckets[0].index, buckets[0].index + len(buckets)))
        for bucket in buckets[:-1]:  # flat buffers of one dtype stand one after the other: no padding between parts
            assert bucket.slots[0].numel == bucket.padded_numel
            assert bucket.padded_numel * spec.dtype.itemsize % SLOT_ALIGN_BYTES == 0


@given(param_lists(), st.integers(1, 5), st.integers(1, 10_000))
def test_neighbours_that_would_fit_together_are_together(
    params: list[ParamSpec], num_shards: int, threshold_bytes: int
) -> None:
    plan = plan_threshold(params, num_shards, threshold_bytes)
    split = {slot.param for bucket in plan.buckets for slot in bucket.slots if slot.numel < params[slot.param].numel}
    for dtype in {spec.dtype for spec in params}:
        whole = [b for b in plan.buckets if b.dtype == dtype and not {s.param for s in b.slots} & split]
        whole = [b for b in whole if b.num_bytes <= threshold_bytes]
        for first, second in itertools.pairwise(
            whole
        ):  # filling goes backwards: `second` was closed by the end of `first`
            assert second.num_bytes + params[first.slots[-1].param].num_bytes > threshold_bytes


@pytest.mark.parametrize("numel", [15, 16, 17])
def test_threshold_is_inclusive(numel: int) -> None:
    params = specs_of([(numel,), (16,)])
    plan = plan_threshold(params, 2, 128)  # bytes: 32 fp32
    assert len(plan.buckets) == (2 if numel > 16 else 1)


def test_the_first_layers_get_the_remainder() -> None:
    plan = plan_threshold(specs_of([(10,)] * 7), 2, 120)
    assert [[slot.param for slot in bucket.slots] for bucket in plan.buckets] == [[0], [1, 2, 3], [4, 5, 6]]


def test_worked_example_of_the_module_docstring() -> None:
    plan = plan_threshold(specs_of([(4,), (4,)], [torch.float64] * 2), 2, 1e9)
    (bucket,) = plan.buckets
    assert [slot.offset for slot in bucket.slots] == [0, 8]
    assert (bucket.shard_numel, bucket.num_flags, bucket.region_numel) == (6, 2, 8)
    got = [(s.slot, s.shard, s.start, s.offset, s.numel, s.flag) for s in bucket.segments()]
    assert got == [(0, 0, 0, 0, 4, 0), (1, 1, 0, 2, 4, 0)]


def test_a_giant_tensor_is_split_evenly() -> None:
    plan = plan_threshold(specs_of([(3,), (1000, 100), (5,)]), 4, 100_000)
    # 400 kB in 4 parts. What is small before and after it still shares one bucket, as nobody has filled it.
    names = [[slot.fqn for slot in bucket.slots] for bucket in plan.buckets]
    assert names == [["m0.a", "m1.a"], *[["m0.b"]] * 4]
    sizes = [bucket.numel for bucket in plan.buckets[1:5]]
    assert sum(sizes) == 100_000
    assert max(sizes) - min(sizes) < 4 * 4 * SLOT_ALIGN_BYTES


def test_nearby_layers_share_a_bucket_by_module() -> None:
    plan = plan_nearby_layers(specs_of([(3,)] * 8), 2, 3)
    assert [[s.fqn for s in b.slots] for b in plan.buckets] == [
        ["m0.a", "m0.b", "m1.a", "m1.b", "m2.a", "m2.b"],
        ["m3.a", "m3.b"],
    ]


@pytest.mark.parametrize("num_layers", [0, -1, 1.5, "2"])
def test_nearby_layers_refuses(num_layers: object) -> None:
    with pytest.raises(ArgumentError, match="whole number of layers >= 1"):
        NearbyLayers(num_layers)  # type: ignore[arg-type]


def test_dtypes_have_buckets_of_their_own_in_forward_order() -> None:
    params = specs_of([(3,)] * 4, [torch.float32, torch.bfloat16, torch.float32, torch.float64])
    plan = plan_threshold(params, 2, 1e9)
    assert [(b.dtype, [s.param for s in b.slots]) for b in plan.buckets] == [
        (torch.float32, [0, 2]),
        (torch.bfloat16, [1]),
        (torch.float64, [3]),
    ]


@pytest.mark.parametrize("make", [plan_unfused, lambda p, n: plan_threshold(p, n, 1e9)])
def test_empty_and_tiny_tensors_keep_a_flag(make: Callable[[list[ParamSpec], int], Plan]) -> None:
    for shapes in ([(0,)], [()], [(8, 0), (3,)], [(3,), (8, 0)], [(3,), (0,), (2,)]):
        plan = make(specs_of(shapes), 4)
        segments = [(b.index, s.slot) for b in plan.buckets for s in b.segments()]
        slots = [(b.index, i) for b in plan.buckets for i in range(len(b.slots))]
        assert set(segments) == set(slots)


# Refusals


def test_check_fits_names_what_differs() -> None:
    params = specs_of([(3,), (4,)])
    plan = plan_unfused(params, 2)
    with pytest.raises(ArgumentError, match=r"into 2 shards, this job needs 3"):
        plan.check_fits(params, 3)
    with pytest.raises(ArgumentError, match=r"no place for parameter 'm1\.a'"):
        plan.check_fits(specs_of([(3,), (4,), (5,)]), 2)
    with pytest.raises(ArgumentError, match=r"places 'm0\.b', which this optimizer does not train"):
        plan.check_fits(params[:1], 2)
    with pytest.raises(ArgumentError, match=r"4 elements.*'m0\.b'.*5 elements"):
        plan.check_fits([params[0], replace(params[1], shape=(5,))], 2)
    with pytest.raises(ArgumentError, match="float64"):
        plan.check_fits([params[0], replace(params[1], dtype=torch.float64)], 2)


def bucket_of(index: int, *slots: Slot) -> Bucket:
    return Bucket(index, torch.float32, slots, 32, 4, 2)


@pytest.mark.parametrize(
    ("buckets", "match"),
    [
        ([bucket_of(1, Slot(0, "a", 0, 0, 3))], "bucket 1 stands at position 0"),
        ([bucket_of(0, Slot(0, "a", 3, 0, 3))], "'a' at element 3, expected 0"),
        ([bucket_of(0, Slot(0, "a", 0, 0, 3)), bucket_of(1, Slot(0, "a", 0, 0, 3))], "'a' at element 0, expected 3"),
        ([bucket_of(0, Slot(0, "a", 0, 0, 3)), bucket_of(1, Slot(0, "a", 4, 0, 3))], "'a' at element 4, expected 3"),
        (
            [
                bucket_of(0, Slot(0, "a", 0, 0, 3)),
                bucket_of(1, Slot(1, "b", 0, 0, 3)),
                bucket_of(2, Slot(0, "a", 3, 0, 3)),
            ],
            "one bucket after the other",
        ),
    ],
)
def test_a_plan_with_gaps_is_refused(buckets: list[Bucket], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Plan("by hand", 2, tuple(buckets))


def test_a_plan_whose_slots_overlap_is_refused() -> None:
    overlapping = bucket_of(0, Slot(0, "a", 0, 0, 8), Slot(1, "b", 0, 4, 8))
    with pytest.raises(ArgumentError, match="'b'"):
        Plan("by hand", 2, (overlapping,))


def test_a_plan_whose_bucket_is_too_small_for_its_slots_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'a'"):
        Plan("by hand", 2, (bucket_of(0, Slot(0, "a", 0, 0, 65)),))


def test_a_split_whose_first_part_shares_a_bucket_is_refused() -> None:
    first = bucket_of(0, Slot(1, "b", 0, 0, 3), Slot(0, "a", 0, 16, 3))
    with pytest.raises(ArgumentError, match="each in a bucket of its own"):
        Plan("by hand", 2, (first, bucket_of(1, Slot(0, "a", 3, 0, 3))))


# Strides


@given(st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False))
def test_dense_strides_keep_any_order_of_dimensions(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    permuted = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    got = dense_strides(permuted.shape, permuted.stride())
    numel = math.prod(shape)
    assert len(got) == len(shape)
    if numel:
        view = torch.arange(numel).as_strided(shape, got)
        assert sorted(view.flatten().tolist()) == list(range(numel))
        assert all(s == p for s, p, n in zip(got, permuted.stride(), shape, strict=True) if n != 1)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), ()),
        ((4,), (1,), (1,)),
        ((4,), (2,), (1,)),  # holes
        ((4, 3), (0, 1), (3, 1)),  # expanded
        ((4, 6), (1, 4), (1, 4)),  # transposed
        ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),  # channels_last
        ((5, 1, 3, 3), (9, 1, 3, 1), (9, 1, 3, 1)),
        ((0, 3), (3, 1), (3, 1)),
    ],
)
def test_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert dense_strides(shape, strides) == expected
