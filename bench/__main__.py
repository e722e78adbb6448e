"""`python -m bench SUBCOMMAND`: each subcommand is a module with `SUMMARY`, `add_arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys

# name -> module; imported when it is asked for, so that one benchmark's needs are not another's
COMMANDS = {
    "collectives": "bench.collectives",
    "overhead": "bench.overhead",
    "cluster": "bench.cluster",
    "replay": "bench.replay",
    "compare": "bench.compare.cli",
    "memory": "bench.memory",
    "scaling": "bench.scaling",
    "report": "bench.report.cli",
    "tune": "bench.tune",
    "accuracy": "bench.accuracy",
    "simulate": "bench.simulate.cli",
    "gpu": "bench.gpu.cli",
    "against": "bench.against",
}


# before torch loads: TCPStore warns that loopback peers have no name
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class _HelpFormatter(argparse.HelpFormatter):
    """Fills the paragraphs of a description; what is indented in it (commands, tables) stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = re.split(r"\n{2,}", text.strip())
        return "\n\n".join(b if re.search(r"^\s", b, re.MULTILINE) else fill(b, width, indent) for b in blocks)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of dear. Each prints one table.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, module_name in COMMANDS.items():
        if argv and argv[0] in COMMANDS and argv[0] != name:
            continue
        module = importlib.import_module(module_name)
        command = subparsers.add_parser(
            name, help=module.SUMMARY, description=module.__doc__, formatter_class=_HelpFormatter
        )
        command.add_argument("--json", metavar="FILE", help="append the record to FILE, one JSON line a run")
        command.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
