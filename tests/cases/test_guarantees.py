"""docs/guarantees.md names tests that exist, and every case stands in it."""

from __future__ import annotations

import re
from pathlib import Path

CASES = Path(__file__).parent
ALL = {f"{number:03d}" for number in range(1, 95)}


def test_every_case_has_a_test_and_a_row() -> None:
    sources = "".join(path.read_text() for path in sorted(CASES.glob("test_[a-l]_*.py")))
    assert set(re.findall(r"^def test_case_(\d{3})_", sources, re.MULTILINE)) == ALL
    named: set[str] = set()
    for row in (CASES.parents[1] / "docs" / "guarantees.md").read_text().splitlines():
        if row.startswith("|"):
            shown_by = row.rstrip("| ").rpartition("|")[2]
            for first, last in re.findall(r"(\d{3}) to (\d{3})", shown_by):
                named |= {f"{number:03d}" for number in range(int(first), int(last) + 1)}
            named |= set(re.findall(r"\b\d{3}\b", shown_by))
    assert named == ALL, f"missing {sorted(ALL - named)}, unknown {sorted(named - ALL)}"


def test_every_field_case_has_a_test_and_a_row() -> None:
    tests = CASES.parent
    sources = "".join(path.read_text() for path in sorted(tests.rglob("test_*.py")))
    tested = {name.upper() for name in re.findall(r"^def test_field_([sh]\d+)_", sources, re.MULTILINE)}
    named: set[str] = set()
    for row in (tests.parent / "docs" / "guarantees.md").read_text().splitlines():
        if row.startswith("|"):
            named |= set(re.findall(r"\b[SH]\d+\b", row.rstrip("| ").rpartition("|")[2]))
    assert named == tested, f"without a row {sorted(tested - named)}, without a test {sorted(named - tested)}"
