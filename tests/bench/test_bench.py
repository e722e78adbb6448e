"""Every benchmark runs, says what it ran on and checks its own results. No time is asserted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import collectives, record, workload
from bench.launch import RankError, World, run_ranks

REPO = Path(__file__).resolve().parents[2]


def run_bench(tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Records and output of `python -m bench ...`."""
    records = tmp_path / "records.jsonl"
    shown = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "--json", str(records), "--timeout-s", "100"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return [json.loads(line) for line in records.read_text().splitlines()], shown.stdout


def assert_says_where_it_ran(found: dict[str, Any]) -> None:
    assert {"benchmark", "utc", "argv", "commit", "versions", "machine", "settings", "rows", "targets"} <= set(found)
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    assert found["machine"]["cpu_model"] and found["machine"]["num_cores"] >= 1
    assert found["argv"][:3] == ["python", "-m", "bench"]
    for row in found["rows"]:
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]


def test_collectives(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--mb", "1", "--iterations", "2", "--piece-mib", "0.1", "2"]
    (found,), output = run_bench(tmp_path, "collectives", *arguments)
    assert_says_where_it_ran(found)
    rows = [(row["op"], row["way"]) for row in found["rows"]]
    assert rows == [
        ("gloo all_reduce", "sockets"),
        ("gloo reduce_scatter_tensor", "sockets"),
        ("gloo all_gather_into_tensor", "sockets"),
        ("dear reduce_scatter", "memory"),
        ("dear all_gather", "memory"),
        ("dear reduce_scatter", "sockets, 0.1 MiB"),
        ("dear all_gather", "sockets, 0.1 MiB"),
        ("dear reduce_scatter", "sockets, 2 MiB"),
        ("dear all_gather", "sockets, 2 MiB"),
    ]
    assert all(row["correct"] for row in found["rows"])
    assert [target["limit"] for target in found["targets"]] == [0.55, 0.55]
    assert "correct" in output and "dear all_gather (memory) / gloo all_reduce" in output


def test_overhead(tmp_path: Path) -> None:
    arguments = ["--scale", "0.01", "1", "--tensors", "24", "--blocks", "2", "--iterations", "2", "--no-fit"]
    (small, full), output = run_bench(tmp_path, "overhead", *arguments)
    for found in (small, full):
        assert_says_where_it_ran(found)
        assert [row["method"] for row in found["rows"]] == ["local", "ddp", "ddp bucket views", "dear"]
        assert [row.get("params_equal") for row in found["rows"]] == [None, True, True, True]
        assert found["num_tensors"] == 24
    assert small["num_elements"] < full["num_elements"] / 50
    assert "params_equal" in output


def test_shapes_are_those_of_densenet201() -> None:
    shapes = workload.load_shapes("densenet201")
    numels = [record.np.prod(shape) for _, shape in shapes]
    assert (len(shapes), sum(numels)) == (604, 20_013_928)
    small = workload.scaled(shapes, 0.01)
    assert [len(shape) for _, shape in small] == [len(shape) for _, shape in shapes]
    assert sum(record.np.prod(shape) for _, shape in small) == pytest.approx(200_139, rel=0.01)


def test_wrong_results_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = (collectives.BASELINE, collectives.REDUCE_SCATTER, collectives.ALL_GATHER)
    cases = [
        collectives.Case(name, collectives.MEMORY, bool, bool, bool, [0.1], correct=name != collectives.ALL_GATHER)
        for name in names
    ]
    monkeypatch.setattr(collectives, "run_ranks", lambda *_, **__: [cases])
    args = Namespace(
        ranks=1, mb=1.0, iterations=1, piece_mib=[1.0], deterministic=False, timeout_s=1.0, json=None, check=False
    )
    assert collectives.run(args) == 1
    assert "NO" in capsys.readouterr().out
    cases[-1].correct = True
    assert collectives.run(args) == 0
    args.check = True  # both halves take as long as the all-reduce here
    assert collectives.run(args) == 1


def _sleep_or_fail(world: World, sleep_s: float) -> int:
    if sleep_s < 0 and world.rank == 1:
        raise ValueError("no such luck")
    time.sleep(abs(sleep_s))
    return world.rank


@pytest.mark.parametrize(("sleep_s", "match"), [(-60.0, "rank 1 failed(.|\n)*no such luck"), (60.0, "still busy")])
def test_ranks_are_torn_down(sleep_s: float, match: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=match):
        run_ranks(_sleep_or_fail, 2, timeout_s=30 if sleep_s < 0 else 1, sleep_s=sleep_s)
    assert time.monotonic() - start_s < 40


def test_table_has_a_column_for_each_key() -> None:
    table = record.format_table([{"op": "a", "median_ms": 1.5, "correct": True}, {"op": "bb", "correct": False}])
    assert [line.split() for line in table.splitlines()] == [
        ["op", "median_ms", "correct"],
        ["a", "1.500", "yes"],
        ["bb", "-", "NO"],
    ]
