"""The page holds every number it was given and loads nothing from elsewhere; growth and memory are told as measured."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import memory, scaling
from bench.compare.rows import line_header
from bench.report import cli
from bench.report.page import build_page
from bench.scaling import growth_exponent
from tests.support.ranks import RankPool

HEADER = line_header("compare", {"cluster": "4 <hosts>", "mb": 2.0, "scale": 0.1, "speed": 1.0})


def line(method: str, median_ms: float, **others: Any) -> dict[str, Any]:
    spans = [["compute", "forward", 0.0, 10.0], ["communication", "all_gather[1] (fc.weight) in step 3", 4.0, 9.0]]
    return {
        **HEADER,
        "method": method,
        "model": "resnet50",
        "testbed": "balanced",
        "hosts": 4,
        "run": "once",
        "iteration_ms": {"median": median_ms, "p20": median_ms - 1, "p80": median_ms + 1, "num": 10},
        "compute_ms": 100.0,
        "all_reduce_ms": 133.0,
        "bus_gbps": 0.9,
        "bound_ms": 120.0,
        "exposed_ms": median_ms - 100,
        "sent_mb_per_rank": 3.25,
        "live_mb_per_rank": 7.5,
        "params_equal": True,
        "note": "",
        "absent": "",
        "spans_ms": spans,
        **others,
    }


LINES = [
    line("none", 100.0, params_equal=None),
    line("ddp", 166.5),
    line("dear", 133.25),
    line("horovod-package", 0.0, absent="No module named 'horovod'", iteration_ms=None, spans_ms=[]),
]


def test_page_is_whole_by_itself() -> None:
    page = build_page(LINES)
    for expected in (
        "resnet50",
        "balanced",
        "166.5",
        "133.2",
        "No module named",
        "4 &lt;hosts&gt;",
        "pass: dear / ddp",
    ):
        assert expected in page
    assert build_page([*LINES, *(each | {"run": "again"} for each in LINES)]).count("<h2>") == 2
    assert page.count("data:image/svg+xml;base64,") == 2  # bars and lanes
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "<script" not in page


def test_command_reads_and_refuses(tmp_path: Path) -> None:
    good, bad, page = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "page.html"
    good.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    bad.write_text(good.read_text() + '{"benchmark": "weather"}\n')

    def call(*files: Path) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json")
        parser.add_argument("--check", action="store_true")
        cli.add_arguments(parser)
        return cli.run(parser.parse_args([*map(str, files), "--out", str(page)]))

    assert call(good) == 0 and "166.5" in page.read_text()
    with pytest.raises(SystemExit, match=r"bad\.jsonl:5 is no line"):
        call(good, bad)
    with pytest.raises(SystemExit, match="error"):
        call(tmp_path / "missing.jsonl")


def test_growth_exponent_by_hand() -> None:
    assert growth_exponent([(1, 3), (10, 30), (100, 300)]) == pytest.approx(1)
    assert growth_exponent([(10, 1), (100, 100), (1000, -5)]) == pytest.approx(2)
    assert growth_exponent([(10, 1)]) == 0


def test_memory_is_measured(tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_pool(_: object, size: int, *, timeout_s: float, **kwargs: Any) -> list[Any]:
        return pool.run(memory.measure, size=size, ddp=True, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(memory, "run_ranks", in_pool)  # processes that are there already
    argv = ["--ranks", "2", "--model", "resnet50", "--scale", "0.1", "--methods", "ddp,dear", "--timeout-s", "60"]
    told = run(memory, tmp_path / "memory.jsonl", *argv)
    rows = {row["method"]: row for row in told["rows"]}
    # AdamW: parameters, gradients and two states; DDP has its buckets too; dear halves the states, gradients are gone
    assert rows["ddp"]["live_over_params"] == pytest.approx(5, abs=0.15)
    assert rows["dear"]["live_over_params"] < 4
    assert rows["ddp"]["peak_rss_mb"] >= 0  # of processes that have held more before
    assert "Memory: resnet50, 2 ranks" in build_page([told])


def test_growth_is_measured(
    tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_pool(_: object, size: int, *, timeout_s: float, **kwargs: Any) -> list[Any]:
        return pool.run(scaling.measure_tensors, size=size, ddp=True, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(scaling, "run_ranks", in_pool)
    argv = ["--hosts", "--tensors", "20", "80", "--blocks", "1", "--iterations", "2", "--timeout-s", "60"]
    grown = run(scaling, tmp_path / "growth.jsonl", *argv)
    assert [row["tensors"] for row in grown["rows"]] == [20] * 3 + [80] * 3
    assert set(grown["exponents"]) == {"ddp", "dear"}
    assert "number of tensors" in build_page([grown]) and "growth exponents" in capsys.readouterr().out


def run(module: Any, path: Path, *argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true")
    module.add_arguments(parser)
    assert module.run(parser.parse_args([*argv, "--json", str(path)])) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found
