"""The replay trains the same weights with every method, and its bounds are right where they can be checked by hand."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from bench import replay
from bench.methods import DDP_SWEEP_MIB, Method, parse_methods
from bench.replay import DeviceClock, GradientSource, LayerProfile, ReplayNet, bound_s, grown_layers, load_layers

METHODS = "ddp,ddp:0.2,fsdp2,dear,dear:0.2,dear:unfused,dear-none"


def test_methods_train_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.jsonl"
    arguments = ["--hosts", "2", "--layers", "6", "--mb", "1", "--tf", "0.006", "--tb", "0.012", "--methods", METHODS]
    arguments += ["--iterations", "2", "--blocks", "2", "--rate-mb", "2", "--timeout-s", "80", "--json", str(records)]
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true")
    replay.add_arguments(parser)
    assert replay.run(parser.parse_args(arguments)) == 0
    output = capsys.readouterr().out
    found = json.loads(records.read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["none", *METHODS.split(",")]
    assert [row.get("params_equal") for row in rows.values()] == [None, *[True] * 6, None]
    assert rows["dear:unfused"]["num_buckets"] == 6 and rows["dear"]["num_buckets"] == 1
    assert {"exposed_ms", "bound_ms", "bound_ratio", "over_ddp", "over_best_ddp"} <= set(rows["dear"])
    assert found["settings"]["mb"] == pytest.approx(1, rel=0.01) and found["bus_gbps"] > 0
    assert len(found["targets"]) == 3
    assert found["settings"]["cluster"] in output


def test_bounds_of_two_layers() -> None:
    # 1 s a byte; the first layer has 4 bytes and the second 8; forward 2 + 2 s, backward 3 + 3 s
    layers = [LayerProfile(((1,),), 2.0, 3.0), LayerProfile(((2,),), 2.0, 3.0)]
    # reduced from 3 s on: 8 bytes until 11, 4 bytes until 15, then the forward
    assert bound_s(layers, 4.0, 6.0, 1.0, halves=False) == pytest.approx(15 + 4)
    # halves: reduced until 3 + 4, then until 7 + 2 (gradient ready at 6); gathered until 11, 15; forward until 13, 17
    assert bound_s(layers, 4.0, 6.0, 1.0, halves=True) == pytest.approx(17)
    for halves in (False, True):  # nothing to send: compute alone
        assert bound_s(layers, 4.0, 6.0, 0.0, halves=halves) == pytest.approx(10)
        assert bound_s(layers, 8.0, 12.0, 0.0, halves=halves) == pytest.approx(20)


def test_layers_grow() -> None:
    layers = grown_layers(50, 40, 0.15, 0.30, 1.06)
    assert len(layers) == 50
    assert sum(layer.num_bytes for layer in layers) == pytest.approx(40e6, rel=1e-3)
    assert layers[40].num_bytes / layers[39].num_bytes == pytest.approx(1.06, rel=1e-2)
    assert sum(layer.forward_s for layer in layers) == pytest.approx(0.15)
    assert sum(layer.backward_s for layer in layers) == pytest.approx(0.30)


def test_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": [{"shapes": [[3, 2], [3]], "forward_ms": 1.0, "backward_ms": 2.0}]}))
    assert load_layers(path) == [LayerProfile(((3, 2), (3,)), 0.001, 0.002)]
    path.write_text(json.dumps({"layers": [{"shapes": [[3, 2]]}]}))
    with pytest.raises(ValueError, match="forward_ms"):
        load_layers(path)


def test_gradients_are_whole_and_new() -> None:
    layers = [LayerProfile(((2, 3), (4,)), 0.0, 0.0), LayerProfile(((5,),), 0.0, 0.0)]
    sources = [GradientSource(layer, seed, num_ranks=3) for seed, layer in enumerate(layers)]
    model = ReplayNet(layers, sources, DeviceClock())
    model(torch.zeros(())).backward(torch.tensor(2.0))
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert [grad.shape for grad in once] == [(2, 3), (4,), (5,)]
    assert all(torch.equal(grad % 6, torch.zeros_like(grad)) for grad in once)
    model.zero_grad()
    model(torch.zeros(())).backward(torch.tensor(4.0))
    for param, grad in zip(model.parameters(), once, strict=True):
        assert param.grad is not None and torch.equal(param.grad, 2 * grad)


def test_clock_adds_up_durations() -> None:
    clock = DeviceClock()
    start_s = time.monotonic()
    for _ in range(5):
        clock.start("forward", 0.002)
        clock.wait()
    assert time.monotonic() - start_s >= 0.01


def test_names_of_methods() -> None:
    assert parse_methods("dear") == [Method("none"), Method("dear")]
    assert [m.name for m in parse_methods("none,ddp-best")] == ["none", *(f"ddp:{mib:g}" for mib in DDP_SWEEP_MIB)]
    assert [m.name for m in parse_methods("dear:0.5,dear:unfused")] == ["none", "dear:0.5", "dear:unfused"]
    for bad in ("adam", "ddp:0", "ddp:x", "none:3", "horovod:4", "dear:best", ""):
        with pytest.raises(ValueError, match="is not known"):
            parse_methods(bad)
    assert replay.SUMMARY
