"""Tests of the tests: each mistake that the GPU path could hide is made on purpose, and its test has to see it."""

import importlib
import importlib.util
import inspect
import re
import textwrap

import pytest
import torch
from torch import nn

from tests.dear import test_cuda_order as order
from tests.dearcore import test_nccl as exact
from tests.support.fake_world import gpu_ranks

EVENTS = [
    ("dearcore.bucket", "BucketRuntime.start_reduction", "communication.wait(self.grads_packed)"),
    ("dearcore.bucket", "BucketRuntime.start_reduction", "streams.wait_gradients()"),
    ("dearcore.bucket", "BucketRuntime.start_reduction", "streams.pack.wait(flat_read)"),
    ("dearcore.bucket", "BucketRuntime.on_reduced", "stream.wait(self.grads_reduced)"),
    ("dearcore.bucket", "BucketRuntime.start_all_gather", "communication.wait(self.shard_stepped)"),
    ("dear.replica", "Replica.finish_step", "self.streams.wait_compute()"),
    ("dear.parameters", "Gate.wait", "event.wait_compute()"),
    ("dear.engine", "broadcast_values", "streams.wait_values()"),
]


def mutate(monkeypatch, module_name, path, old, new):
    """Replaces the function at `path` of a module by one whose source has `old` replaced by `new`."""
    module = importlib.import_module(module_name)
    owner = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {path}"
    names = dict(function.__globals__)
    exec("from __future__ import annotations\n" + textwrap.dedent(source).replace(old, new), names)
    monkeypatch.setattr(owner, name, names[name])


@pytest.mark.parametrize(("module", "path", "wait"), EVENTS, ids=[wait for _, _, wait in EVENTS])
def test_a_missing_event_is_seen(monkeypatch, module, path, wait):
    mutate(monkeypatch, module, path, wait, "pass")
    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        run(order.train(detector, peek=True))
        assert detector.races(), f"nobody misses {wait}"


def test_a_missing_event_before_a_late_gradient_is_seen(monkeypatch):
    mutate(monkeypatch, "dear.replica", "Replica.launch_late", "self.streams.wait_gradients(communication)", "pass")
    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        run(order.train(detector, late=True))
        assert detector.races()


def test_a_gradients_stream_that_is_not_noted_is_seen(monkeypatch):
    mutate(monkeypatch, "dear.engine", "Engine.grad_arrived", "self.streams.note_gradient()", "pass")
    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        run(order.train_with_two_branches(detector))
        assert detector.races()


def test_gradients_that_nobody_keeps_are_seen(monkeypatch):
    keep = "streams.keep_until(self.grads_packed, grads)"
    mutate(monkeypatch, "dearcore.bucket", "BucketRuntime.start_reduction", keep, "pass")
    with pytest.raises(AssertionError):
        order.test_every_gradient_is_kept_until_its_pack_is_done(monkeypatch)


def test_bytes_for_elements_are_seen(monkeypatch):
    exact.test_counts_are_elements_and_pointers_are_bytes()
    for path, pointer, code in (("_reduce_scatter", "target", "flat"), ("_all_gather", "flat", "moved")):
        with monkeypatch.context() as patch:
            right = f"{pointer}.data_ptr(), count, self._code({code})"
            wrong = f"{pointer}.data_ptr(), count * flat.element_size(), self._code({code})"
            mutate(patch, "dearcore.nccl", f"NcclCommunicator.{path}", right, wrong)
            with pytest.raises(AssertionError):
                exact.test_counts_are_elements_and_pointers_are_bytes()


def test_swapped_reduce_scatter_and_all_gather_are_seen(monkeypatch):
    """Where ops are launched, so that the schedule's own checks have nothing to find."""
    mutate(
        monkeypatch,
        "dearcore.bucket",
        "BucketRuntime._start_collective",
        "self._communicator.start_reduce_scatter(output, grad_flat, self._divisor, stream, label)",
        "self._communicator.start_all_gather(self.param_flat, stream, label)",
    )
    with pytest.raises(AssertionError):
        order.test_collectives_come_in_the_order_of_the_schedule(monkeypatch)


def test_a_dtype_missing_from_the_table_is_seen(monkeypatch):
    from dearcore import nccl

    exact.test_the_dtype_table_is_right_and_complete()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        without = {known: name for known, name in nccl.DTYPES.items() if known != dtype}
        with monkeypatch.context() as patch:
            patch.setattr(nccl, "DTYPES", without)
            with pytest.raises(AssertionError, match="missing from the table"):
                exact.test_the_dtype_table_is_right_and_complete()


def test_a_wrong_dtype_in_the_table_is_seen(monkeypatch):
    from dearcore import nccl

    monkeypatch.setitem(nccl.DTYPES, torch.bfloat16, "NCCL_FLOAT16")
    with pytest.raises(AssertionError):
        exact.test_the_dtype_table_is_right_and_complete()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("pack", "offset = tl.load(row + 1)", "offset = tl.load(row + 1).to(tl.int32)"),
        ("pack", "start = tl.load(row)\n", "start = tl.load(row).to(tl.int32)\n"),
        ("sgd", "offset = tl.load(tile_ptr + tile * 3)\n", "offset = tl.load(tile_ptr + tile * 3).to(tl.int32)\n"),
        ("rank_sum", "tl.program_id(0).to(tl.int64) * BLOCK", "tl.program_id(0) * BLOCK"),
    ],
)
def test_a_32_bit_offset_is_seen(tmp_path, module, old, new):
    pytest.importorskip("triton", reason="Triton is not installed")
    from dataclasses import replace

    from dear_kernels import aot
    from tests.kernels.test_kernels_aot import narrow_offsets

    original = importlib.import_module(f"dear_kernels.{module}")
    source = inspect.getsource(original)
    assert source.count(old) == 1
    file = tmp_path / f"{module}_mutated.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"{module}_mutated", file)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    case = next(c for c in aot.cases() if c.kernel.__module__ == original.__name__ and c.loads)
    assert narrow_offsets(aot.compile_case(case, 90).ttir) == []
    changed = replace(case, kernel=getattr(mutated, case.kernel.__name__))
    assert narrow_offsets(aot.compile_case(changed, 90).ttir) != []


# What may block the host on the device, and where it is allowed: in waits that are asked for, never in an iteration.
FORBIDDEN = r"\.synchronize\(\)|\.item\(\)|\.cpu\(\)|\.tolist\(\)|to\(\"cpu\"|is_nonzero|\.nonzero\("
STEADY = [
    ("dearcore.bucket", "BucketRuntime.start_reduction"),
    ("dearcore.bucket", "BucketRuntime._pack"),
    ("dearcore.bucket", "BucketRuntime._start_collective"),
    ("dearcore.bucket", "BucketRuntime.start_step"),
    ("dearcore.bucket", "BucketRuntime._step"),
    ("dearcore.bucket", "BucketRuntime.on_reduced"),
    ("dearcore.bucket", "BucketRuntime.start_all_gather"),
    ("dearcore.bucket", "BucketRuntime._adopt_foreign_changes"),
    ("dearcore.nccl", "NcclCommunicator"),
    ("dearcore.nccl_group", "NcclGroup"),
    ("dearcore.kernel_step", "KernelStepper.step"),
    ("dearcore.kernel_step", "KernelStepper._step_sgd"),
    ("dearcore.kernel_step", "KernelStepper._step_adam"),
    ("dearcore.streams", "CudaWorkerStream"),
    ("dearcore.streams", "Streams"),
    ("dear.engine", "Engine.grad_arrived"),
    ("dear.engine", "Engine.step"),
    ("dear.update", "ShardedUpdate.step"),
    ("dear.replica", "Replica.finish_step"),
    ("dear.replica", "Replica._step_bucket"),
    ("dear.parameters", "Gate"),
    ("dear.replica", "Replica._reduce"),
    ("dear.replica", "Replica._take_gradients"),
    *(("dear_kernels", name) for name in ("pack.pack_", "sgd.sgd_step_", "adam.adam_step_", "addresses.plan_launches")),
    ("dear_kernels", "rank_sum.sum_rows_"),
]


@pytest.mark.parametrize("line", ["event.synchronize()", "x = flags.tolist()", 'y = shard.to("cpu")', "a.item()"])
def test_calls_that_wait_are_found(line):
    assert re.search(FORBIDDEN, line)


@pytest.mark.parametrize(("module", "path"), STEADY, ids=[path for _, path in STEADY])
def test_no_iteration_waits_for_the_device(module, path):
    found = importlib.import_module(module)
    if module == "dear_kernels":
        found = importlib.import_module(f"dear_kernels.{path.partition('.')[0]}")
        path = path.partition(".")[2]
    for part in path.split("."):
        found = getattr(found, part)
    lines = [line.strip() for line in inspect.getsource(found).splitlines() if re.search(FORBIDDEN, line)]
    assert not lines


def test_the_models_of_these_tests_have_several_buckets():
    assert sum(isinstance(module, nn.Linear) for module in order.make_model().modules()) == 3
