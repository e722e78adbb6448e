"""What of the GPU benchmark can be shown without one: its cases are right, its arithmetic, and what it says."""

from argparse import Namespace

import pytest
import torch

from bench.gpu import cli, targets
from bench.gpu.overlap import hidden

CPU = torch.device("cpu")


@pytest.mark.parametrize("mib", [0.01, 0.25])
def test_every_case_runs_and_is_right(mib):
    pytest.importorskip("triton", reason="Triton is not installed")
    from bench.gpu import kernels

    cases = list(kernels._cases(mib, CPU))
    assert {case.kernel for case in cases} == {"pack", "unpack", "sgd", "adam", "norm", "sum_rows"}
    for case in cases:
        assert case.correct(), f"{case.kernel} {case.dtypes}"
        case.run()
        for baseline in case.baselines.values():
            baseline()
        assert case.moved.total_bytes > 0.5 * mib * 2**20 * (0.25 if case.kernel == "sum_rows" else 1)


def test_a_wrong_kernel_is_seen(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from bench.gpu import kernels

    monkeypatch.setattr(kernels.dear_kernels, "pack_", lambda flat, *_, **__: flat.zero_())
    monkeypatch.setattr(kernels.dear_kernels, "norm_stats", lambda shard: torch.zeros(2, dtype=torch.float64))
    wrong = {case.kernel for case in kernels._cases(0.01, CPU) if not case.correct()}
    assert {"pack", "norm"} <= wrong


def test_the_worst_large_size_counts():
    from bench.gpu.kernels import summary

    rows = [
        {"kernel": "adam", "mib": 1.0, "fraction": 0.2, "fused_ratio": 1.1},
        {"kernel": "adam", "mib": 25.0, "fraction": 0.95, "fused_ratio": 0.9},
        {"kernel": "adam", "mib": 64.0, "fraction": 0.91},
    ]
    assert summary(rows) == {"adam_fraction": 0.91, "adam_ratio": 1.1}
    assert targets.missed(summary(rows)) == [
        "AdamW step, any size: time over torch's fused AdamW, worst size: 1.100, wanted <= 1.00"
    ]


def test_targets_that_were_not_measured_say_so():
    shown = targets.table({"pack_fraction": 0.93, "num_syncs": 2.0})
    by_target = {row["target"].split(",")[0].split(" ")[0]: (row["measured"], row["verdict"]) for row in shown}
    assert by_target["pack"] == ("0.930", "pass") and by_target["host"] == ("2.000", "FAIL")
    assert by_target["unpack"] == ("not yet measured", "")


def event(cat, name, tid, ts, dur):
    return {"cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur}


def test_hidden_time_by_hand():
    """Forward 0 to 10, backward 10 to 30 on stream 7; collectives on stream 9."""
    events = [
        event("gpu_user_annotation", "forward", 7, 0, 10),
        event("kernel", "gemm", 7, 0, 4),
        event("kernel", "gemm", 7, 5, 5),
        event("kernel", "gemm_backward", 7, 12, 18),
        event("gpu_user_annotation", "dear::all_gather[0] (w) in step 1", 9, 2, 4),
        event("gpu_user_annotation", "dear::reduce_scatter[0] (w) in step 1", 9, 10, 4),
        event("gpu_user_annotation", "dear::reduce_scatter[1] (w) in step 1", 9, 28, 4),
        event("kernel", "ncclDevKernel", 9, 10, 4),
        event("cpu_op", "aten::mm", 1, 0, 50),
    ]
    rs = hidden(events, "reduce_scatter", "backward")
    assert (rs.num_collectives, rs.total_us, rs.hidden_us) == (2, 8, 4)
    ag = hidden(events, "all_gather", "forward")
    assert (ag.num_collectives, ag.hidden_us, ag.fraction) == (1, 3, 0.75)
    assert hidden([], "all_gather", "forward").fraction == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    args = Namespace(json=None, check=True, budget_s=1.0, sizes_mib=None, sweep=False)
    assert cli.run(args) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"skipped: torch {torch.__version__} sees no CUDA device.")
    assert out.count("not yet measured") == len(targets.TARGETS)


def test_every_launch_setting_of_the_sweep_is_put_back():
    pytest.importorskip("triton", reason="Triton is not installed")
    from bench.gpu import sweep
    from dear_kernels import pack

    before = (pack.BLOCK_NUMEL, pack.EDGE_NUMEL, pack.NUM_WARPS)
    with sweep._all_set(512, 2):
        assert (pack.BLOCK_NUMEL, pack.EDGE_NUMEL, pack.NUM_WARPS) == (512, 256, 2)
    assert before == (pack.BLOCK_NUMEL, pack.EDGE_NUMEL, pack.NUM_WARPS)
