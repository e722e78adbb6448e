"""Runs programs on a pool of ranks, finds the one that failed, and shrinks it."""

from __future__ import annotations

import gc
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.differential.program import Program, own_part, script
from tests.support.ranks import Outcome, RankFailure, RankHang, RankPool

__all__ = ["Failure", "Limits", "Runner", "Setup"]

CHUNK = 20  # programs in one run of the pool: a run costs 50 ms, and a failure ends it


Setup = Callable[[], Callable[[], None]]  # on every rank before programs run; returns what undoes it


@dataclass(frozen=True, slots=True)
class Limits:
    """A collective is given up after `group_timeout_s`, and ranks are replaced after `timeout_s` and 1 s a program."""

    group_timeout_s: float = 15.0
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` is the same for failures of one cause, whatever numbers and names their messages have."""

    program: Program
    kind: str
    message: str

    def __str__(self) -> str:
        text = own_part(self.program)
        return f"seed {self.program.seed} on {self.program.ranks} ranks: {self.kind}\n{self.message}\n\n{text}"


class ProgramError(Exception):
    """`number` of those that were run together."""


def run_scripts(names: Sequence[str], scripts: Sequence[str], setup: Setup | None) -> None:
    """On a rank: one after the other."""
    undo = setup() if setup is not None else None
    try:
        for number, (name, text) in enumerate(zip(names, scripts, strict=True)):
            file = f"<{name}>"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            try:
                exec(compile(text, file, "exec"), {"__name__": file})
            except Exception as error:
                trace = "".join(traceback.format_exception(error)[-6:])
                raise ProgramError(f"number {number}: {type(error).__name__}: {error}\n{trace}") from None
            finally:
                del linecache.cache[file]
            if number % 5 == 4:
                gc.collect()
    finally:
        if undo is not None:
            undo()


class Runner:
    """Runs programs on a pool; every failure is one that the program has when it runs alone, if it has."""

    def __init__(self, pool: RankPool, setup: Setup | None = None, limits: Limits | None = None) -> None:
        self._pool, self._setup, self._limits = pool, setup, limits or Limits()

    def __call__(self, program: Program) -> Failure | None:
        _, error = self._run([program])
        return None if error is None else Failure(program, *_described(error))

    def failures(self, programs: Iterable[Program], progress: Callable[[int], None] | None = None) -> list[Failure]:
        by_world: dict[tuple[int, bool], list[Program]] = {}
        for program in programs:
            by_world.setdefault((program.ranks, program.deterministic), []).append(program)
        failures: list[Failure] = []
        for left in by_world.values():
            while left:
                chunk = left[:CHUNK]
                number, error = self._run(chunk)
                done = len(chunk)
                if error is not None and number is None:  # it hung or died, whoever it was
                    failures += [failure for program in chunk if (failure := self(program)) is not None]
                elif error is not None and number is not None:
                    done = number + 1
                    failure = self(chunk[number])
                    if failure is None:
                        kind, message = _described(error)
                        failure = Failure(chunk[number], f"not alone, {kind}", message)
                    failures.append(failure)
                left = left[done:]
                if progress is not None:
                    progress(done)
        return failures

    def _run(self, programs: Sequence[Program]) -> tuple[int | None, RankFailure | None]:
        """The number of the program that failed, if it is known, and how."""
        try:
            self._pool.run(
                run_scripts,
                [f"seed {program.seed} on {program.ranks} ranks" for program in programs],
                [script(program) for program in programs],
                self._setup,
                size=programs[0].ranks,
                deterministic=programs[0].deterministic,
                group_timeout_s=self._limits.group_timeout_s,
                timeout_s=self._limits.timeout_s + len(programs),
            )
        except RankFailure as error:
            said = [outcome.message for outcome in error.outcomes if isinstance(outcome, Outcome)]
            numbers = [int(found[1]) for text in said if (found := re.match(r"number (\d+): ", text))]
            return (min(numbers) if numbers else 0 if len(programs) == 1 else None), error
        return None, None


def _described(error: RankFailure) -> tuple[str, str]:
    """Kind and message; of several ranks' errors that of the rank that others waited for."""
    if isinstance(error, RankHang):
        return "hang", str(error)
    outcomes = [outcome for outcome in error.outcomes if isinstance(outcome, Outcome)]
    texts = [re.sub(r"^number \d+: ", "", outcome.message) for outcome in outcomes]
    order = sorted(texts, key=lambda text: (not text.startswith("AssertionError"), "CommunicatorError" in text))
    if not order:
        return type(error).__name__, str(error)
    first = order[0].split("\n")[0]
    kind = re.sub(r"^AssertionError: rank \d+: ([\w ]+):.*", r"wrong \1", first)
    if kind == first:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+(\.\d+)?", "_", first)[:80]
    return kind, order[0].rstrip()
