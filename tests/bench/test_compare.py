"""The comparison keeps a testbed's ratio, trains the same weights with every method, and says what each line means."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.compare import cli
from bench.compare.measure import Measurement, RankResult, Timing, measure_inside
from bench.compare.real import MODELS, Real, blocks_of, make_batch
from bench.compare.rows import LINE_KEYS, best_of, lines_of, table_rows, targets_of
from bench.compare.testbeds import GOODPUT, TESTBEDS, emulate, profile_of
from bench.methods import BUILDERS, Method, parse_methods
from bench.replay import DeviceClock, LayerProfile
from bench.simulate.networks import NETWORKS
from bench.workload import load_shapes
from tests.support.ranks import RankPool

METHODS = (
    "ddp,ddp:10,fsdp2:25,zero,horovod-package,wfbp,horovod,mg-wfbp,bytescheduler,dear:merge,dear:25,dear-fill,dear-rs"
)


def run(path: Path, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true")
    cli.add_arguments(parser)
    status = cli.run(parser.parse_args([*argv, "--json", str(path)]))
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def little_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate need not be exact here."""
    monkeypatch.setattr(cli, "RATE_MB_PER_GBPS", 4.0)
    monkeypatch.setattr(cli, "REAL_RATE_MB", 4.0)


def test_every_method_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--hosts", "2", "--testbed", "balanced", "--model", "resnet50", "--methods", METHODS]
    status, lines = run(
        tmp_path / "lines.jsonl", *argv, "--scale", "0.01", "--speed", "10", "--iterations", "2", "--blocks", "1"
    )
    assert status == 0
    by_method = {line["method"]: line for line in lines}
    assert list(by_method) == ["none", *METHODS.split(",")]
    assert all(set(LINE_KEYS) <= set(line) for line in lines)
    assert {line["model"] for line in lines} == {"resnet50"} and {line["hosts"] for line in lines} == {2}
    absent = by_method.pop("horovod-package")
    assert absent["iteration_ms"] is None and "horovod" in absent["absent"]  # by trying to import it
    for name, line in by_method.items():
        is_right = name.partition(":")[0] not in ("none", "dear-none", "dear-rs", "dear-ag")
        assert line["params_equal"] is (True if is_right else None), name
        assert line["iteration_ms"]["num"] == 2 and line["absent"] == ""
    assert by_method["dear:25"]["num_buckets"] == 5  # 102 MB in buckets of 25 MiB, whatever the scale
    assert by_method["wfbp"]["num_buckets"] == 161
    assert by_method["ddp"]["settings"]["mb"] == pytest.approx(1.02, rel=0.01)
    output = capsys.readouterr().out
    assert "absent" in output and "best peer" in output


def train_for_real(model: str, batch: int, methods: list[Method], timing: Timing) -> RankResult:
    return measure_inside(methods, timing, functools.partial(Real, model, batch), cli.OPTIMIZER, 1.0)


def test_real_models_train_alike(tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_pool(_: object, size: int, *, timeout_s: float, **kwargs: Any) -> list[Any]:
        return pool.run(train_for_real, size=size, ddp=True, timeout_s=110, **kwargs)

    monkeypatch.setattr(cli, "run_ranks", in_pool)  # processes that are there already
    argv = ["--real", "--hosts", "2", "--model", "resnet50", "--batch", "1", "--iterations", "1", "--blocks", "1"]
    status, lines = run(tmp_path / "lines.jsonl", *argv, "--methods", "ddp,dear")
    assert status == 0
    assert [(line["method"], line["params_equal"]) for line in lines] == [("none", None), ("ddp", True), ("dear", True)]
    assert lines[2]["max_difference"] < 1e-4 and lines[0]["settings"]["mb"] == pytest.approx(102.2, rel=0.01)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_have_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    found = {key.removeprefix("model."): tuple(p.shape) for key, p in model.named_parameters()}
    assert found == dict(load_shapes(name))
    inside = sum(p.numel() for block in blocks_of(model) for p in block.parameters())
    assert inside > 0.5 * sum(p.numel() for p in model.parameters())


def test_inception_computes() -> None:
    model = MODELS["inception-v4"]()
    loss = model(*make_batch("inception-v4", 2, seed=0))
    assert loss.item() == pytest.approx(math.log(1000), abs=1.0)  # nothing is known yet about a thousand classes
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("testbed", TESTBEDS)
@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_ratio_is_kept(testbed: str, num_hosts: int) -> None:
    for model, network in NETWORKS.items():
        full_bytes = 4 * sum(math.prod(shape) for _, shape in load_shapes(model))
        slope_ns = {"10gbe-64": 1.70, "ib-64": 0.39 * (63 / 64) / (31 / 32)}.get(testbed)
        expected = 4 / 3 if slope_ns is None else slope_ns * full_bytes / network.compute_s / 1e9
        for scale, speed in ((None, None), (0.01, 3.0)):
            emulation = emulate(model, testbed, num_hosts, scale, speed)
            bytes_per_s = emulation.link_gbps * GOODPUT * 1e9 / 8
            all_reduce_s = 2 * (num_hosts - 1) / num_hosts * emulation.num_bytes / bytes_per_s
            assert all_reduce_s / emulation.compute_s == pytest.approx(expected, rel=1e-6)
            assert emulation.compute_s == pytest.approx(network.compute_s / emulation.speed)
            assert sum(len(layer.shapes) for layer in emulation.layers) == len(load_shapes(model))


def test_profile_of_merged_layers() -> None:
    layers = [LayerProfile(((2, 3), (4,)), 1.0, 2.0), LayerProfile(((5,),), 3.0, 4.0)]
    profile = profile_of(layers, 4)
    assert [layer.fqn for layer in profile.layers] == ["layers.0.param0", "layers.0.param1", "layers.1.param0"]
    # the first layer computes when both of its parameters are there; both gradients are ready when it has
    assert [layer.forward_s for layer in profile.layers] == [0.0, 1.0, 3.0]
    assert profile.ready_s() == [6.0, 6.0, 4.0]


def test_clock_hides_a_host_that_is_a_little_late() -> None:
    strict, lenient = DeviceClock(), DeviceClock(slack_s=1e3)
    for clock in (strict, lenient):
        clock.spans = []
        clock.start("first", 0.0)
    for clock in (strict, lenient):
        clock.start("second", 0.0)
        assert clock.spans is not None
    assert strict.spans is not None and lenient.spans is not None
    assert strict.spans[1][1] > strict.spans[0][2]  # late by what lies between two calls
    assert lenient.spans[1][1] == lenient.spans[0][2]
    lenient.start("stalled", 0.0, stalled=True)
    assert lenient.spans[2][1] > lenient.spans[1][2]


# ----------------------------------------------------------------------------------------------------------- the lines

LAYERS = [LayerProfile(((250_000,),), 0.1, 0.2), LayerProfile(((250_000,),), 0.1, 0.2)]  # 2 MB, 0.6 s


def lines(times_s: Mapping[str, float], testbed: str, s_per_mb: float) -> list[dict[str, Any]]:
    methods = parse_methods(",".join(times_s))[1:]
    methods.insert(0, Method("none"))
    measurements = [Measurement([0.6] * 3, [0.2] * 3, [0.4] * 3)]
    measurements += [Measurement([times_s[m.name]] * 3, [0.0], [0.0], [3e6], 4_000_000) for m in methods[1:]]
    for measurement in measurements[1:]:
        measurement.params_equal = True
    results = [RankResult(measurements, [s_per_mb * 160], profile_of(LAYERS, 2)) for _ in range(2)]
    base = {"model": "m", "testbed": testbed, "hosts": 2}
    return lines_of(base, methods, results, 160.0)


def test_bounds_and_shares_by_hand() -> None:
    # an all-reduce of everything takes 0.8 s, a half of one layer 0.2 s
    found = {line["method"]: line for line in lines({"ddp": 1.3, "dear": 1.0, "fsdp2": 2.0}, "balanced", 0.4)}
    assert found["none"]["bound_ms"] == pytest.approx(600)
    assert found["ddp"]["bound_ms"] == pytest.approx(1200)  # 0.2 + 0.4 + 0.4, then the forward
    # reduced at 0.4 and 0.6; gathered at 0.8 and 1.0; forward until 0.9 and 1.1
    assert found["dear"]["bound_ms"] == pytest.approx(1100)
    assert found["dear"]["exposed_ms"] == pytest.approx(400) and found["dear"]["sent_mb_per_rank"] == 3.0
    assert found["dear"]["live_mb_per_rank"] == 4.0 and found["dear"]["all_reduce_ms"] == pytest.approx(800)


def test_targets_by_hand() -> None:
    measured = lines({"ddp": 1.3, "ddp:5": 1.2, "fsdp2": 2.0, "dear": 1.15, "dear:5": 1.4}, "balanced", 0.4)
    values = {target.name.partition(", m")[0]: target for target in targets_of(measured)}
    assert values["dear / ddp"].value == pytest.approx(1.15 / 1.3) and not values["dear / ddp"].passed  # below 1.2x
    assert values["dear / best peer (ddp:5)"].passed
    assert values["dear / ddp's best bucket"].value == pytest.approx(1.15 / 1.2)
    assert values["dear / fsdp2"].passed
    assert values["1 - bound / dear"].value == pytest.approx(1 - 1.1 / 1.15)
    little = targets_of(lines({"ddp": 0.62, "dear": 0.61}, "ib-64", 0.04))
    assert [target.name for target in little][-1] == "dear / no communication, m, ib-64"
    rows = {row["method"]: row for row in table_rows(measured)}
    assert rows["dear"]["over_ddp"] == pytest.approx(1.3 / 1.15, abs=1e-3)
    assert rows["dear"]["over_best_peer"] == pytest.approx(1.2 / 1.15, abs=1e-3)
    best = best_of(measured, "dear", "dear-fill")
    assert best is not None and best["method"] == "dear"


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for argv in (
        ["--real", "--testbed", "balanced"],
        [],
        ["--real", "--scale", "0.1"],
        ["--testbed", "balanced", "--batch", "2"],
        ["--testbed", "balanced", "--scale", "0"],
        ["--testbed", "balanced", "--model", "alexnet"],
        ["--testbed", "balanced", "--methods", "sgd"],
    ):
        with pytest.raises(SystemExit, match="error: "):
            run(tmp_path / "none.jsonl", *argv)


def test_names() -> None:
    names = ["dear:auto", "dear:merge", "dear-fill:auto", "fsdp2:25", "horovod-package", "zero"]
    assert [method.name for method in parse_methods(",".join(names))] == ["none", *names]
    assert parse_methods(cli.DEFAULT_METHODS) and set(BUILDERS) >= {"wfbp", "mg-wfbp", "bytescheduler"}
