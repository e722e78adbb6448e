"""What a DistributedOptimizer does beside training in its first iterations: measure, plan, and perhaps try plans out.

A *program* is a generator that is resumed at the end of each `step()`; what it does between two of its yields happens
there, on all ranks alike. The user's iterations go on meanwhile, and no plan changes what they compute.

    step 1         the order of gradients is seen
    steps 2 to 4   recorded, with communication out of the way: nothing is launched before step(), which waits
    then           a sweep over message sizes, the plan, and with fusion='auto' trials of a few steps each
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from dearcore.errors import ArgumentError, DearError, ScheduleError
from dearcore.layout import ParamSpec, Plan
from dearcore.planners import MERGE, dear_fill
from dearcore.predict import predict_iteration_s
from dearcore.profile import Profile
from dearcore.schedule import Schedule

from .planning import AUTO, MIB, make_plan_and_schedule, sized_mib
from .recorder import Recorder, Times, agreed_layers
from .stats import Trial, Tuning
from .sweep import measure_links
from .tuner import Candidate, Point, Range, Tuner

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Beside", "Program", "measure", "measure_after_a_step", "measure_and_plan", "tuned_range"]

NUM_RECORDED = 3  # iterations
NUM_SETTLING = 1  # iterations after a change of plan: the first one finds all parameters there
NUM_TIMED = 5  # iterations of a trial; their median counts
LOW_MIB, HIGH_MIB = 1.0, 256.0
NUM_PREDICTED = 33  # bucket sizes that the predictor is asked about
PREDICTED_DENSITIES = (0.0, 0.25, 0.5, 0.75, 1.0)

Program = Generator[None, None, None]
Planned = tuple[Plan, Schedule]

_log = logging.getLogger("dear")


class Beside:
    """The program that goes on beside training, if any."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def start(self, program: Program) -> None:
        """Collective. Raises ScheduleError while another one is at it."""
        if self._program is not None:
            raise ScheduleError("the optimizer is still measuring or tuning. Go on training until it has ended.")
        self._program = program
        self.step_ended()

    def step_ended(self) -> None:
        if self._program is not None:
            try:
                next(self._program)
            except StopIteration:
                self._program = None

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None


def measure(engine: Engine) -> Program:
    """Takes a profile, which `engine.profile` is in the end."""
    engine.replica.wait_fresh()  # parameters have their own class when the recorder gets to know them
    recorder = engine.recorder = Recorder(engine.model, engine.tracked, engine.streams)
    try:
        for _ in range(NUM_RECORDED):
            _hold(engine)
            recorder.start_iteration(engine.replica.eager_params())
            yield
    finally:
        recorder.close()
        engine.recorder = None
    engine.replica.synchronize()
    specs = [tracked.spec for tracked in engine.tracked]
    largest = max(engine.replica.plan.buckets, key=lambda bucket: bucket.num_bytes)
    num_bytes = sum(spec.num_bytes for spec in specs)
    wire_dtype = engine.replica.numerics.wire_dtype(largest.dtype)
    links = measure_links(engine.communicator, engine.streams, largest.dtype, wire_dtype, num_bytes)
    by_rank: list[Times] = engine.gather_objects(recorder.times())
    num_ops = len(engine.replica.schedule.ops)
    stepped_bytes = num_bytes / engine.replica.plan.num_shards
    if max(len(times.ready_s) for times in by_rank):
        engine.profile = Profile(
            agreed_layers(specs, by_rank),
            engine.communicator.size,
            links.reduce_scatter,
            links.all_gather,
            links.all_reduce,
            statistics.mean(times.step_s for times in by_rank) / max(stepped_bytes, 1),
            statistics.mean(times.launch_s for times in by_rank) / num_ops,
        )


def measure_after_a_step(engine: Engine) -> Program:
    yield
    yield from measure(engine)


def measure_and_plan(engine: Engine) -> Program:
    """From the first step on: a profile if there is none yet, then the plan that follows from it, or the best found."""
    start_s, is_measured = time.perf_counter(), engine.profile is not None
    yield
    if not is_measured:
        start_s = time.perf_counter()
        yield from measure(engine)
    if engine.profile is None:
        raise ArgumentError("no gradient arrived in the first steps, so that there are no times to plan with.")
    if engine.options.fusion == AUTO:
        yield from _Search(engine, engine.profile, start_s, 0 if is_measured else NUM_RECORDED).program()
    elif not is_measured:
        engine.relayout(*_first_ranks(engine, lambda: _planned(engine, engine.options.fusion)))


def tuned_range(num_bytes: float, with_density: bool = False) -> Range:
    """1 to 256 MiB, but no bucket larger than the model; a model that is worth little may have smaller ones."""
    high_mib = min(HIGH_MIB, num_bytes / MIB)
    return Range(min(LOW_MIB, high_mib / 16), high_mib, with_density)


class _Search:
    """Tries plans out and goes on with the best. The first rank decides, from the times of all."""

    def __init__(self, engine: Engine, profile: Profile, start_s: float, num_before: int) -> None:
        self._engine, self._profile, self._start_s, self._num_iterations = engine, profile, start_s, num_before
        with_density = engine.options.schedule == "dear-fill"
        self._range = tuned_range(profile.num_bytes, with_density)
        self._plans: dict[int, Planned] = {}  # by number, on the first rank
        self._trials: list[Trial] = []
        self._replanning_s = 0.0
        self._moved_bytes = 0
        self._tuner: Tuner | None = None

    def program(self) -> Program:
        proposal: tuple[int, Point | None, Planned] | None
        while (proposal := self._next()) is not None:
            number, point, planned = proposal
            yield from self._try(number, point, planned)
        begin_s = time.perf_counter()
        chosen, iteration_s = _first_ranks(self._engine, self._best)
        self._moved_bytes += self._engine.relayout(*chosen)
        self._replanning_s += time.perf_counter() - begin_s
        spent_s = time.perf_counter() - self._start_s
        tuning = self._engine.log.tuning = Tuning(
            tuple(self._trials),
            chosen[0].fusion,
            self._num_iterations,
            max(0.0, spent_s - self._num_iterations * iteration_s),
            self._replanning_s,
            self._moved_bytes / 1e6,
        )
        if self._engine.communicator.rank == 0:
            _log.info("%s", tuning)

    def _next(self) -> tuple[int, Point | None, Planned] | None:
        begin_s = time.perf_counter()
        found: tuple[int, Point | None, Planned] | None = _first_ranks(self._engine, self._propose)
        self._replanning_s += time.perf_counter() - begin_s
        return found

    def _try(self, number: int, point: Point | None, planned: Planned) -> Program:
        begin_s = time.perf_counter()
        self._moved_bytes += self._engine.relayout(*planned)
        self._replanning_s += time.perf_counter() - begin_s
        for _ in range(NUM_SETTLING):
            yield
        times_s: list[float] = []
        last_s = time.perf_counter()
        for _ in range(NUM_TIMED):
            yield
            now_s = time.perf_counter()
            times_s.append(now_s - last_s)
            last_s = now_s
        self._num_iterations += NUM_SETTLING + NUM_TIMED
        everyone: list[list[float]] = self._engine.gather_objects(times_s)
        # ranks wait for each other: of an iteration their mean counts; of a trial the median, which one slow iteration
        # does not move
        agreed_s = [statistics.mean(same) for same in zip(*everyone, strict=True)]
        median_ms = 1e3 * statistics.median(agreed_s)
        self._trials.append(Trial(planned[0].fusion, len(planned[0].buckets), median_ms))
        if self._tuner is not None:
            self._tuner.observe(number, agreed_s, point)

    def _propose(self) -> tuple[int, Point | None, Planned] | None:
        """On the first rank: number, point and plan of the next trial."""
        if self._tuner is None:
            self._tuner = Tuner(self._range, self._guesses())
            merged = _planned(self._engine, MERGE)  # a plan without a bucket size: tried as it is
            return self._number_of(merged), None, merged
        while (proposal := self._tuner.propose()) is not None:
            if isinstance(proposal, Candidate):
                assert isinstance(proposal.key, int)
                return proposal.key, proposal.point, self._plans[proposal.key]
            planned = self._at(proposal)
            number = self._number_of(planned)
            if not self._tuner.knows(proposal, number):
                return number, proposal, planned
        return None

    def _best(self) -> tuple[Planned, float]:
        assert self._tuner is not None
        best = self._tuner.best()
        assert isinstance(best.key, int)
        return self._plans[best.key], best.best_s

    def _number_of(self, planned: Planned) -> int:
        """Plans that differ in nothing but what made them are one."""
        for number, (plan, schedule) in self._plans.items():
            if plan.buckets == planned[0].buckets and schedule.ops == planned[1].ops:
                return number
        self._plans[len(self._plans)] = planned
        return len(self._plans) - 1

    def _guesses(self) -> list[Point]:
        """What the predictor thinks best, its surroundings, the default, and the smallest buckets."""
        low_mib, high_mib = self._range.low_mib, self._range.high_mib
        sizes = [low_mib * (high_mib / low_mib) ** (i / (NUM_PREDICTED - 1)) for i in range(NUM_PREDICTED)]
        densities: Sequence[float | None] = PREDICTED_DENSITIES if self._range.with_density else (None,)
        points = [Point(mib, density) for mib, density in itertools.product(sizes, densities)]
        best = min(points, key=lambda point: predict_iteration_s(self._profile, *self._at(point)))
        others = [best.mib / 2, best.mib * 2, sized_mib(self._profile.num_bytes), low_mib]
        return [best, *(Point(min(max(mib, low_mib), high_mib), best.density) for mib in others)]

    def _at(self, point: Point) -> Planned:
        if point.density is None:
            return _planned(self._engine, point.mib)
        specs = _ordered(self._engine)
        return dear_fill(self._profile, specs, fusion=point.mib, density=point.density)


def _planned(engine: Engine, fusion: Any) -> Planned:
    size, options = engine.communicator.size, engine.options
    return make_plan_and_schedule(options.schedule, fusion, _ordered(engine), size, options.sharded, engine.profile)


def _ordered(engine: Engine) -> list[ParamSpec]:
    assert engine.profile is not None
    return engine.profile.order([tracked.spec for tracked in engine.tracked])


def _hold(engine: Engine) -> None:
    """Keeps communication out of the next iteration's forward and backward, so that they can be timed."""
    engine.replica.wait_fresh()
    engine.replica.scheduler.observing = True


def _first_ranks(engine: Engine, make: Callable[[], Any]) -> Any:
    """What `make` returns on the first rank, on every rank; so is what it raises. Collective."""
    made: tuple[Any, DearError | None] = None, None
    if engine.communicator.rank == 0:
        try:
            made = make(), None
        except DearError as error:
            made = None, error
        except Exception as error:  # the others wait for an answer
            made = None, ScheduleError(f"rank 0 could not choose a plan: {type(error).__name__}: {error}")
    result, problem = engine.gather_objects(made)[0]
    if problem is not None:
        raise problem
    return result
