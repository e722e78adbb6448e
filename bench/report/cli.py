"""One self-contained HTML page out of JSON lines that `compare`, `memory` and `scaling` have written.

    python -m bench report balanced.jsonl ib.jsonl memory.jsonl --out report.html

The page needs no network and no file beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .page import build_page

__all__ = ["SUMMARY", "add_arguments", "read_lines", "run"]

SUMMARY = "one HTML page of tables and figures out of JSON lines"
KNOWN = ("compare", "memory", "scaling", "tensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines of compare, memory, scaling")
    parser.add_argument("--out", default="report.html", metavar="FILE.html", help="(report.html)")


def run(args: argparse.Namespace) -> int:
    if args.json or args.check:
        raise SystemExit("error: report measures nothing, so that --json and --check have no meaning here")
    try:
        lines = [line for path in args.files for line in read_lines(path)]
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    Path(args.out).write_text(build_page(lines))
    print(f"{args.out}: {len(lines)} lines of {', '.join(dict.fromkeys(line['benchmark'] for line in lines))}")
    return 0


def read_lines(path: str | Path) -> Sequence[dict[str, Any]]:
    """Raises ValueError with the number of a line that is none of ours."""
    lines = []
    for number, text in enumerate(Path(path).read_text().splitlines(), 1):
        if text.strip():
            line = json.loads(text)
            if not isinstance(line, dict) or line.get("benchmark") not in KNOWN:
                raise ValueError(f"{path}:{number} is no line of {', '.join(KNOWN)}")
            lines.append(line)
    if not lines:
        raise ValueError(f"{path} has no lines")
    return lines
