"""The search for bucket sizes: Bayesian optimization over what a few iterations take. Touches no rank and no device.

    tuner = Tuner(Range(1.0, 40.0), guesses=[Point(4.0), Point(25.0)])
    while (proposal := tuner.propose()) is not None:       # a point, or a candidate that is to be tried once more
        tuner.observe(key_of_its_plan, times_s, point)
    tuner.best().key

Trials go in three parts: the guesses; then points that a Gaussian process expects to improve on the best (Snoek et al.,
arXiv 1206.2944), and sizes beside the best where it has no new ones; then the best two or three once more, in turn,
since what is chosen should not have been lucky.
Points that come to the same plan are one candidate.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import statistics
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dearcore.errors import ArgumentError

__all__ = ["MAX_TRIALS", "Candidate", "Point", "Range", "Tuner", "check_installed", "is_installed"]

MAX_TRIALS = 15
NUM_CONFIRMED = 4  # of them: what is best so far, measured again
IMPROVEMENT = 0.005  # of the iteration: `xi` of the expected improvement
CLOSE = 1.1  # candidates within this factor of the best are measured again
MAX_REPEATS = 3  # proposals in a row that are known already: look beside the best instead
GAP = 0.2  # of the sizes' logarithm (base 2): closer ones are not told apart
EXTRA = "bayesian-optimization is not installed, which fusion='auto' needs: pip install 'dear-pytorch[tune]'"


@dataclass(frozen=True, slots=True)
class Point:
    """Where the search may look. `density`: which part of the buckets dear-fill may gather early; None: no such."""

    mib: float
    density: float | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """Of the bucket size, searched on a logarithmic scale."""

    low_mib: float
    high_mib: float
    with_density: bool = False


@dataclass(slots=True)
class Candidate:
    """A plan that was tried. `point`: the first that came to it, None for a plan that has no bucket size."""

    key: Hashable
    point: Point | None
    medians_s: list[float] = field(default_factory=list)  # of each trial: a slow iteration does not move them

    @property
    def best_s(self) -> float:
        """Of its best trial: what disturbs a machine for a while makes trials slower, never faster."""
        return min(self.medians_s)


class Tuner:
    """Args:
    guesses: tried first, in this order; those that a predictor thinks best.
    """

    def __init__(
        self, searched: Range, guesses: Sequence[Point], max_trials: int = MAX_TRIALS, random_state: int = 0
    ) -> None:
        check_installed()
        package = importlib.import_module("bayes_opt")
        self._range, self._guesses, self._max_trials = searched, list(guesses), max_trials
        bounds = {"log2_mib": (math.log2(searched.low_mib), math.log2(searched.high_mib))}
        if searched.with_density:
            bounds["density"] = (0.0, 1.0)
        self._optimizer: Any = package.BayesianOptimization(
            f=None,
            pbounds=bounds,
            acquisition_function=package.acquisition.ExpectedImprovement(xi=IMPROVEMENT),
            random_state=random_state,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(alpha=1e-4)  # times of one plan differ by about a hundredth
        self._sizes: set[float] = set()  # logarithms of those that were tried, or found to come to a known plan
        self._registered: set[tuple[float, ...]] = set()
        self.candidates: dict[Hashable, Candidate] = {}
        self.num_trials = 0
        self._num_repeats = 0
        self._num_confirmed = 0

    def propose(self) -> Point | Candidate | None:
        """Where to look next; None when the search is over."""
        if self.num_trials >= self._max_trials:
            return None
        if self._guesses:
            return self._guesses.pop(0)
        if not self._num_confirmed and self._max_trials - self.num_trials > NUM_CONFIRMED:
            point = self._suggested() if self._num_repeats < MAX_REPEATS else self._beside_the_best()
            if point is not None:
                return point
        return self._to_confirm()

    def observe(self, key: Hashable, times_s: Sequence[float], point: Point | None = None) -> None:
        """Hears of a trial's iterations. `key` tells plans apart."""
        self.num_trials += 1
        candidate = self.candidates.setdefault(key, Candidate(key, point))
        candidate.medians_s.append(statistics.median(times_s))
        self._register(point or candidate.point, candidate.medians_s[-1])

    def knows(self, point: Point, key: Hashable) -> bool:
        """True if the plan of a proposed point was tried: it need not be again, and the search hears what it took."""
        known = self.candidates.get(key)
        if known is None:
            self._num_repeats = 0
            return False
        self._num_repeats += 1
        self._register(point, known.best_s)
        return True

    def best(self) -> Candidate:
        return min(self.candidates.values(), key=lambda candidate: candidate.best_s)

    def _suggested(self) -> Point:
        with warnings.catch_warnings():  # of a fit at the border of its parameters
            warnings.simplefilter("ignore")
            found = self._optimizer.suggest()
        density = float(found["density"]) if self._range.with_density else None
        return Point(min(max(2.0 ** float(found["log2_mib"]), self._range.low_mib), self._range.high_mib), density)

    def _beside_the_best(self) -> Point | None:
        """The middle of the wider gap between the best size and those around it; None if there is no gap left."""
        sized = [c for c in self.candidates.values() if c.point is not None]
        if not sized:
            return None
        best = min(sized, key=lambda candidate: candidate.best_s).point
        assert best is not None
        ends = {math.log2(self._range.low_mib), math.log2(self._range.high_mib)}
        tried = sorted(self._sizes | ends)
        at = tried.index(self._size(best))
        around = tried[max(at - 1, 0) : at + 2]
        width, middle = max((right - left, (left + right) / 2) for left, right in itertools.pairwise(around))
        return Point(2.0**middle, best.density) if width > GAP else None

    def _size(self, point: Point) -> float:
        return math.log2(min(max(point.mib, self._range.low_mib), self._range.high_mib))

    def _register(self, point: Point | None, iteration_s: float) -> None:
        """The target is the logarithm of the speed, so that a hundredth means the same everywhere."""
        if point is None:
            return
        params = {"log2_mib": self._size(point)}
        self._sizes.add(params["log2_mib"])
        if self._range.with_density:
            params["density"] = 0.0 if point.density is None else point.density
        at = tuple(round(value, 6) for value in params.values())
        if at not in self._registered:  # what a repeated trial says counts in `best`
            self._registered.add(at)
            self._optimizer.register(params=params, target=-math.log(iteration_s))

    def _to_confirm(self) -> Candidate | None:
        """The least often tried of those that are close to the best; None if nothing is close."""
        self._num_confirmed += 1
        best_s = self.best().best_s
        close = [c for c in self.candidates.values() if c.best_s <= best_s * CLOSE]
        if len(close) == 1 or self._num_confirmed > NUM_CONFIRMED:
            return None
        close = sorted(close, key=lambda candidate: candidate.best_s)[:3]
        return min(close, key=lambda candidate: len(candidate.medians_s))


def is_installed() -> bool:
    return importlib.util.find_spec("bayes_opt") is not None


def check_installed() -> None:
    """Raises ArgumentError that names the extra."""
    if not is_installed():
        raise ArgumentError(f"{EXTRA}, on every rank.")
