"""Another commit against this tree, in one run: one of the other benchmarks, run in both in turn.

  python -m bench against --commit 9528731 --rounds 5 -- overhead --scale 0.01 --no-fit
  python -m bench against --commit HEAD~1 -- replay --hosts 4 --rate 1gbit --layers 50 --mb 40 --tf 0.15 --tb 0.30

The commit is checked out beside this tree for as long as it takes. Which of the two begins changes from round to
round. Of every method, for each time in its row: the median over rounds in both, and the median of their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import REPO, Record, append_json, print_record

__all__ = ["SUMMARY", "add_arguments", "compare", "run"]

SUMMARY = "another commit against this tree, in turn"
TIMES = ("median_ms", "host_thread_ms")  # of the keys of a row, those that are compared

Times = dict[tuple[str, str, str], float]  # (settings that tell records of one run apart, method, key) -> time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", required=True, help="what to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (5)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- SUBCOMMAND and its arguments")


def run(args: argparse.Namespace) -> int:
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    rounds: list[tuple[Times, Times]] = []
    with _checked_out(args.commit) as other:
        for number in range(args.rounds):
            trees = (REPO, other) if number % 2 == 0 else (other, REPO)
            times = {tree: _measure(tree, arguments) for tree in trees}
            rounds.append((times[REPO], times[other]))
    settings = {"commit": args.commit, "rounds": args.rounds, "arguments": arguments}
    record = Record("against", settings, compare(rounds))
    print_record(record, f"this tree against {args.commit}, {args.rounds} rounds in turn: {' '.join(arguments)}")
    if args.json:
        append_json(args.json, record)
    return 0


def compare(rounds: list[tuple[Times, Times]]) -> list[dict[str, Any]]:
    """A row for each time that stands in every round of both: (ours, theirs) of one round are compared."""
    shared = [key for key in rounds[0][0] if all(key in ours and key in theirs for ours, theirs in rounds)]
    rows = []
    for key in shared:
        settings, method, name = key
        ours, theirs = [times[key] for times, _ in rounds], [times[key] for _, times in rounds]
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True) if other)
        row: dict[str, Any] = {"settings": settings} if settings else {}
        rows.append(
            {
                **row,
                "method": method,
                "time": name,
                "this_ms": round(statistics.median(ours), 3),
                "other_ms": round(statistics.median(theirs), 3),
                "median_ratio": round(statistics.median(ratios), 4) if ratios else None,
                "least_ratio": round(ratios[0], 4) if ratios else None,
                "largest_ratio": round(ratios[-1], 4) if ratios else None,
            }
        )
    return rows


@contextlib.contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=REPO, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=REPO, check=True)


def _measure(tree: Path, arguments: list[str]) -> Times:
    path = os.pathsep.join([str(tree), str(tree / "kernels")])
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        command = [sys.executable, "-m", "bench", *arguments, "--json", str(records)]
        done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed in {tree}:\n{done.stdout}\n{done.stderr}")
        times: Times = {}
        for line in records.read_text().splitlines():
            record = json.loads(line)
            scale = record["settings"].get("scale")
            for row in record["rows"]:
                for name in TIMES:
                    if name in row:
                        times["" if scale is None else f"scale {scale:g}", row["method"], name] = row[name]
    return times
