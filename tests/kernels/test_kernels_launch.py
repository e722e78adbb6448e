"""What the launch sites ask Triton for, without a GPU: number of launches, argument types, alignment, recompilations.

A driver that only names an architecture takes the place of CUDA's, and every launch is a warm-up: Triton binds the
arguments and compiles, as for a real launch, and stops there. What this ring cannot see: the launch itself.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dear_kernels import (
    AdamHyper,
    Segment,
    SegmentTable,
    SGDHyper,
    StepSegment,
    StepTable,
    adam,
    addresses,
    aot,
    norm,
    pack,
    sgd,
    unpack,
)


class NamedDriver:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 99  # no real one: compiled kernels are cached by device

    def get_current_stream(self, device):
        return 0


class Recorder:
    """Stands in for a kernel; keeps what each launch compiled to."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches
        self.__name__ = kernel.__name__

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            compiled = self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
            self.launches.append((self.kernel.__name__, grid, compiled))

        return run


@pytest.fixture
def launches(monkeypatch):
    recorded = []
    for module in (pack, unpack, sgd, adam, norm):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), recorded))
    monkeypatch.setattr(driver, "_active", NamedDriver())  # set_active cannot be undone where there is no GPU
    return recorded


def names(launches):
    return [name.strip("_").removesuffix("_kernel") for name, _, _ in launches]


def run_all(numel):
    table = SegmentTable([Segment(0, 0, 0, numel, flag=2 * numel), Segment(1, 0, numel, numel)], 2)
    flat = torch.zeros(2 * numel + 1)
    pack.pack_(flat, [torch.ones(numel), None], table, scale=1 / 3)
    unpack.unpack_([torch.ones(numel), None], flat, table, scale=1 / 3)
    steps = StepTable([StepSegment(0, numel), StepSegment(numel, numel)], 2 * numel)
    tensors = [torch.ones(2 * numel) for _ in range(4)]
    sgd.sgd_step_(*tensors[:3], steps, [SGDHyper(0.1, 0.9)], torch.zeros(2), torch.ones(2))
    adam.adam_step_(*tensors, None, steps, [AdamHyper(0.1)], torch.zeros(2), torch.ones(2))
    norm.norm_stats(flat)


def test_each_call_launches_what_was_compiled_ahead_of_time(launches):
    run_all(96)
    assert names(launches) == [
        *("pack", "unpack", "sgd_coefficients", "sgd", "adam_coefficients", "adam", "norm", "norm_finish")
    ]
    ahead = {(case.kernel.__name__, tuple(case.signature.values())) for case in aot.cases()}
    for name, _, compiled in launches:
        types = tuple(t for t in compiled.src.signature.values() if t != "constexpr")
        if name == "_norm_kernel":
            types = tuple("i64" if t == "i32" else t for t in types)  # the number of elements, here a small one
        assert (name, types) in ahead


def test_streams_are_loaded_128_bits_at_a_time(launches):
    run_all(96)
    for name, _, compiled in launches:
        if name in ("_pack_kernel", "_unpack_kernel", "_sgd_kernel", "_adam_kernel"):
            assert max(aot.access_bits(compiled.asm["ptx"], "ld")) == 128
            assert max(aot.access_bits(compiled.asm["ptx"], "st")) == 128


def test_sizes_do_not_recompile(launches):
    for numel in (1, 7, 16, 5000):
        run_all(numel)
    compiled = {}
    for name, _, kernel in launches:
        compiled.setdefault(name, set()).add(kernel.hash)
    # shards of different lengths differ in where they lie, never in what is compiled
    assert {name: len(hashes) for name, hashes in compiled.items()} == dict.fromkeys(compiled, 1)


def test_an_unaligned_shard_has_narrow_accesses(launches):
    table = StepTable([StepSegment(0, 64)], 64)
    param, grad = torch.ones(65)[1:], torch.ones(64)
    sgd.sgd_step_(param, grad, None, table, [SGDHyper(0.1)], torch.zeros(1), None)
    ptx = launches[-1][2].asm["ptx"]
    assert aot.access_bits(ptx, "ld").count(128) == sgd.BLOCK_NUMEL * 4 // (16 * 32 * sgd.NUM_WARPS)
    assert aot.access_bits(ptx, "st").count(128) == 0


def test_mixed_dtypes_take_one_launch_each_and_one_dtype_one(launches):
    table = SegmentTable([Segment(i, 0, 4 * i, 4) for i in range(4)], 4)
    flat = torch.zeros(16)
    pack.pack_(flat, [torch.ones(4), None, torch.ones(2, 2).t(), torch.ones(8)[::2]], table)
    assert names(launches) == ["pack"]
    pack.pack_(flat, [torch.ones(4), None, torch.ones(4).bfloat16(), torch.ones(4)], table)
    assert names(launches) == ["pack"] * 3
    pack.pack_(flat, [None] * 4, table)
    assert names(launches) == ["pack"] * 4


def test_the_grid_is_capped(launches, monkeypatch):
    """Case 93: a tiny block and a big tensor."""
    monkeypatch.setattr(pack, "BLOCK_NUMEL", 16)
    monkeypatch.setattr(pack, "EDGE_NUMEL", 16)
    table = SegmentTable([Segment(0, 0, 0, 2_000_000)], 1)
    pack.pack_(torch.zeros(2_000_000), [torch.zeros(2_000_000)], table)
    assert launches[-1][1] == (pack.MAX_PROGRAMS,)


@pytest.fixture
def uploads(monkeypatch):
    sent = []
    upload = addresses.upload
    monkeypatch.setattr(addresses, "upload", lambda *args: (sent.append(args[0]), upload(*args))[1])
    return sent


def test_one_copy_a_bucket_and_none_when_nothing_has_changed(launches, uploads):
    table = SegmentTable([Segment(i, 0, 4 * i, 4) for i in range(3)], 3)
    flat, grads = torch.zeros(12), [torch.ones(4), None, torch.ones(4).bfloat16()]
    pack.pack_(flat, grads, table)
    pack.pack_(flat, grads, table)
    pack.pack_(torch.zeros(12), grads, table)
    assert len(uploads) == 1, "two launches, one copy; the same gradients need none"
    other = [torch.ones(4), *grads[1:]]
    pack.pack_(flat, other, table)
    pack.pack_(flat, [*other[:2], None], table)
    assert len(uploads) == 3
    assert [launch[0] for launch in launches] == ["_pack_kernel"] * 9


@pytest.mark.parametrize("step", ["sgd", "adam"])
def test_hyper_parameters_are_sent_when_they_change(launches, uploads, step):
    table, steps = StepTable([StepSegment(0, 8)], 8), torch.zeros(1)
    tensors = [torch.ones(8) for _ in range(4)]

    def run(lr):
        if step == "sgd":
            sgd.sgd_step_(*tensors[:2], None, table, [SGDHyper(lr)], steps)
        else:
            adam.adam_step_(*tensors, None, table, [AdamHyper(lr)], steps)

    for lr in (0.1, 0.1, 0.2, 0.2, 0.1):
        run(lr)
    assert len(uploads) == 3


def test_released_tables_send_again(launches, uploads):
    table = SegmentTable([Segment(0, 0, 0, 4)], 1)
    flat, grads = torch.zeros(4), [torch.ones(4)]
    pack.pack_(flat, grads, table)
    table.release()
    pack.pack_(flat, grads, table)
    assert len(uploads) == 2


@pytest.mark.parametrize(("low", "align"), [(None, 4), (torch.bfloat16, 8)])
def test_the_fast_path_is_taken_wherever_16_bytes_begin(launches, low, align):
    """Shards are cut at any 16 bytes: a slot's place in a shard is a multiple of 4 floats and of nothing more."""
    table = StepTable([StepSegment(4, 64)], 68)
    param, grad = torch.ones(68), torch.ones(68)
    copy = None if low is None else param.to(low)
    sgd.sgd_step_(param, grad, None, table, [SGDHyper(0.1)], torch.zeros(1), low_precision_param=copy)
    compiled = launches[-1][2]
    position = sgd._sgd_kernel.kernel.arg_names.index("ALIGN")
    assert compiled.src.constants[(position,)] == align


def test_shards_and_slots_begin_at_16_bytes():
    from dearcore.layout import ParamSpec, plan_threshold

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params = [ParamSpec(i, f"p{i}", (3 + 7 * i,), dtype) for i in range(9)]
        for bucket in plan_threshold(params, 3, 1e9).buckets:
            for segment in bucket.segments():
                assert segment.offset * dtype.itemsize % 16 == 0
