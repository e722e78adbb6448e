"""The model of bytes moved, against what the compiled kernels load and store, and against the tables as they are."""

import pytest
import torch

from dear_kernels import Segment, StepSegment, traffic
from dear_kernels.segments import plan_step_tiles, plan_tiles

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def modelled(case):
    """(bytes read, bytes written) per element, of the model, for a kernel that was compiled ahead of time."""
    label, numel = case.label, 2**20
    if case.name in ("pack", "unpack"):
        source, target = (DTYPES[name] for name in label.split(" scaled")[0].split(" to "))
        found = traffic.pack_traffic(numel, source, target, 1)
    elif case.name == "norm":
        found = traffic.norm_traffic(numel, DTYPES[label])
    elif case.name == "sum_rows":
        row, output = (DTYPES[name] for name in label.split(" to "))
        found = traffic.sum_rows_traffic(numel, 2, row, output)
    else:
        param = DTYPES[label.split(",")[0]]
        grad = DTYPES[label.split("grad ")[1].split(",")[0].split(" ")[0]]
        copy = DTYPES[label.split("copy ")[1].split(" ")[0]] if "copy" in label else None
        if case.name == "sgd":
            found = traffic.sgd_traffic(numel, param, grad, "momentum" in label, copy)
        else:
            found = traffic.adam_traffic(numel, param, grad, "amsgrad" in label, copy)
    return found.read_bytes / numel, found.written_bytes / numel


def test_the_model_counts_what_the_compiled_kernels_move():
    """A full block: 16 bytes a thread for each 128-bit access that the PTX has."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from dear_kernels import aot

    checked = 0
    for case in aot.cases():
        if not case.loads or "scaled" in case.label:
            continue
        report = aot.compile_case(case, 90)
        per_access = 16 * 32 * case.num_warps / case.constants["BLOCK"]  # bytes per element of the block
        loads, stores = report.num_vector_loads * per_access, report.num_vector_stores * per_access
        assert (loads, stores) == modelled(case), f"{case.name} {case.label}"
        checked += 1
    assert checked >= 20


def test_tables_are_as_large_as_the_model_says():
    pytest.importorskip("triton", reason="Triton is not installed")
    from dear_kernels import adam, pack, sgd, unpack

    numel = 5 * 4096 + 1
    assert pack.BLOCK_NUMEL == unpack.BLOCK_NUMEL == traffic.TILE_NUMEL["pack"]
    assert sgd.BLOCK_NUMEL == adam.BLOCK_NUMEL == traffic.TILE_NUMEL["step"]
    tiles = plan_tiles([Segment(0, 0, 0, numel)], pack.BLOCK_NUMEL)
    found = traffic.pack_traffic(numel, torch.float32, torch.float32, 1)
    assert found.table_bytes == tiles.nbytes + 8
    step_tiles = plan_step_tiles([StepSegment(0, numel)], sgd.BLOCK_NUMEL)
    assert traffic.sgd_traffic(numel, torch.float32, torch.float32).table_bytes == step_tiles.nbytes


def test_the_floor_by_hand():
    """AdamW on 2^20 fp32 elements: 4 values read, 3 written, at 1000 GB/s."""
    found = traffic.adam_traffic(2**20, torch.float32, torch.float32)
    assert (found.read_bytes, found.written_bytes) == (4 * 2**22, 3 * 2**22)
    assert found.floor_us(1000.0) == pytest.approx((7 * 2**22 + found.table_bytes) / 1e6)


def test_the_command_prints_a_table(capsys):
    assert traffic.main(["--gbps", "1000"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("copy"))
    assert float(line.split()[-1]) == pytest.approx(2 * 25 * 2**20 / 1e6, rel=1e-3)
    with pytest.raises(SystemExit):
        traffic.main(["--gbps", "0"])
