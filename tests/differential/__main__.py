"""python -m tests.differential --seeds 0:200 --ranks 2: runs these programs, shrinks and prints what fails."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.differential.draw import draw
from tests.differential.program import from_json, script, to_json
from tests.differential.running import Runner
from tests.differential.shrinking import shrink
from tests.support.ranks import RankPool


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", default="0:60", help="one seed, or a range like 0:200 (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="how many ranks (default: 2 and 3)")
    parser.add_argument("--json", type=Path, help="a program as data, instead of seeds")
    parser.add_argument("--out", type=Path, help="folder for the scripts of failures")
    parser.add_argument("--print", action="store_true", help="print the scripts and run nothing")
    parser.add_argument("--no-shrink", action="store_true", help="report failures as they were drawn")
    parser.add_argument("--max-runs", type=int, default=300, help="runs to shrink a failure (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.json:
        programs = [from_json(args.json.read_text())]
    else:
        first, _, end = args.seeds.partition(":")
        seeds = range(int(first), int(end) if end else int(first) + 1)
        programs = [draw(seed, ranks) for seed in seeds for ranks in args.ranks]
    if args.print:
        print("\n\n".join(map(script, programs)))
        return 0
    start_s, done = time.monotonic(), 0

    def progress(number: int) -> None:
        nonlocal done
        done += number
        print(f"\r{done} of {len(programs)} programs, {time.monotonic() - start_s:.0f} s", end="", file=sys.stderr)

    with RankPool() as pool:
        runner = Runner(pool)
        failures = runner.failures(programs, progress)
        print(file=sys.stderr)
        for failure in failures:
            print(f"seed {failure.program.seed} on {failure.program.ranks} ranks: {failure.kind}", flush=True)
        for failure in failures:
            shrunk = failure if args.no_shrink else shrink(failure, runner, args.max_runs, 2.0 * args.max_runs)
            print(f"{shrunk}\nas data: {to_json(shrunk.program)}\n{'-' * 80}", flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                name = f"seed_{failure.program.seed}_on_{failure.program.ranks}"
                (args.out / f"{name}.py").write_text(script(shrunk.program))
                (args.out / f"{name}.json").write_text(to_json(shrunk.program))
    took_s = time.monotonic() - start_s
    print(f"{len(programs)} programs, {len(failures)} failed, {took_s:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
