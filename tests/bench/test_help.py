"""`python -m bench SUBCOMMAND --help`: prose is filled to the width of the terminal, commands stand as written."""

from __future__ import annotations

import importlib

import pytest

from bench.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_field_h16_help_shows_each_example_on_a_line_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    doc = importlib.import_module(COMMANDS[name]).__doc__
    assert doc is not None
    as_written = [line for line in doc.splitlines() if line.startswith(" ")]
    commands = [line for line in doc.splitlines() if "python -m bench " in line and not line.startswith("`")]
    assert all(line in as_written for line in commands), "commands are indented in the docstring"
    assert all(line in lines for line in as_written)
    end = min(lines.index(title) for title in ("positional arguments:", "options:") if title in lines)
    described = lines[lines.index("") + 1 : end]
    assert all(len(line) <= 80 for line in described if line not in as_written), "prose is filled"
    words = " ".join(described).split()
    assert words[: len(doc.split())] == doc.split(), "nothing is lost"
