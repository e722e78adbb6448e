"""The benchmarks of the tuner and of the simulator's accuracy run, and say what they saw. No time counts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import accuracy, tune
from bench.replay import grown_layers
from dear import Profile


def _run(module: Any, path: Path, *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true")
    module.add_arguments(parser)
    assert module.run(parser.parse_args([*arguments, "--timeout-s", "80", "--json", str(path)])) == 0
    (line,) = path.read_text().splitlines()
    record: dict[str, Any] = json.loads(line)
    return record


def test_the_tuner_is_compared_with_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tune.Pair(lambda: grown_layers(4, 1, 0.002, 0.004, 1.0), "1gbit")
    monkeypatch.setattr(tune, "PAIRS", {"tiny": tiny})
    options = ["--hosts", "2", "--points", "3", "--iterations", "2", "--blocks", "1", "--final", "2"]
    record = _run(tune, tmp_path / "tune.jsonl", "--pairs", "tiny", *options)
    (row,) = record["rows"]
    assert row["trials"] <= 15 and row["iterations"] <= tune.MOST_ITERATIONS
    assert row["over_grid"] == pytest.approx(row["chosen_ms"] / row["grid_ms"], rel=0.1)
    assert len(record["pairs"]["tiny"]["trials"]) == row["trials"]
    assert [point["mib"] for point in record["pairs"]["tiny"]["grid"]] == pytest.approx(
        [0.0596, 0.238, 0.954], rel=0.01
    )
    assert [target["limit"] for target in record["targets"]] == [1.03]


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    model = ["--layers", "5", "--mb", "1", "--tf", "0.005", "--tb", "0.01", "--hosts", "2"]
    methods = ["ddp", "ddp:0.5", "wfbp", "horovod", "mg-wfbp", "bytescheduler", "dear", "dear:0.3", "dear:merge"]
    methods += ["dear-fill:0.3", "dear-fill:merge"]
    options = ["--methods", ",".join(methods), "--blocks", "1", "--iterations", "2"]
    saved = tmp_path / "profile.json"
    record = _run(accuracy, tmp_path / "accuracy.jsonl", *model, *options, "--save-profile", str(saved))
    assert [row["method"] for row in record["rows"]] == methods
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 for row in record["rows"])
    assert {row["method"]: row["buckets"] for row in record["rows"]}["wfbp"] == 5
    assert set(record["links"]) == {"reduce_scatter", "all_gather", "all_reduce"}
    profile = Profile.load(saved)
    assert profile.world_size == 2 and len(profile.layers) == 5


@pytest.mark.parametrize("method", ["ring", "wfbp:4", "dear:small", "dear:0"])
def test_unknown_methods_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        accuracy.planned(method, accuracy.EXAMPLE, accuracy.EXAMPLE.specs())
