"""What ran when, for a few iterations: communication beside the compute that hides it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dearcore.errors import ScheduleError
from dearcore.streams import Event
from dearcore.trace import Span

from .optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Timeline"]

COMPUTE, STEP_CALL, WAIT = "compute", "optimizer.step()", "wait"
LANES = (COMPUTE, "pack", "communication", "step")  # dearcore.streams.Streams has the last three
# "all_gather[3] (fc.weight, fc.bias) in step 17", "pack[3]", "wait[2, 3] (fc.weight)", "gradient norm in step 17"
_LABEL = re.compile(r"(?P<what>[^\[]+?)(?:\[(?P<buckets>[\d, ]+)\])?(?: \((?P<names>.*)\))?(?: in step (?P<step>\d+))?")

ROWS = (COMPUTE, "pack", "reduce-scatter", "step", "all-gather", "other collectives")
_COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    WAIT: "#d62728",
    STEP_CALL: "#08306b",
    "pack": "#969696",
    "reduce-scatter": "#fd8d3c",
    "step": "#9e7fc7",
    "all-gather": "#74c476",
    "other collectives": "#c49c94",
}
_SPARE_COLORS = ("#bcbddc", "#c7e9c0", "#fdd0a2", "#d9d9d9")  # spans of the user's own names
_DARK = ("backward", STEP_CALL, WAIT)
_FONT_POINTS = 7.5
_BOUNDARY: dict[str, Any] = {"color": "#525252", "linewidth": 0.8, "linestyle": ":"}


class Timeline:
    """Records a few iterations of this rank, to be saved as a trace or drawn.

        timeline = dear.Timeline(optimizer)
        with timeline:
            for data, target in batches:
                optimizer.zero_grad()
                with timeline.span("forward"):
                    loss = criterion(model(data), target)
                with timeline.span("backward"):
                    loss.backward()
                optimizer.step()
        timeline.save("timeline.json")
        timeline.plot("timeline.png")

    Packs, collectives, steps, waits for parameters and calls of `optimizer.step()` are recorded by themselves; an
    iteration ends with `optimizer.step()`. Nothing is collective: ranks may record or not. Times are the host's; on
    CUDA, those of compute say when it was launched.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._spans: list[Span] = []
        self._iterations: list[Span] = []
        self._hooks: list[Any] = []
        self._step_called_s = 0.0
        self._step_done: list[Event] = []  # all that the last step() has enqueued, on each stream

    def start(self) -> None:
        """Forgets what was recorded before and begins. Raises ScheduleError while recording."""
        if self._hooks:
            raise ScheduleError("this Timeline is recording already. Call stop() first.")
        optimizer, trace = self._optimizer, self._optimizer.trace
        self._hooks = [
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ended),
        ]
        self._spans, self._iterations, self._step_done = [], [], []
        trace.take()
        trace.enabled = True
        self._begin_s = time.perf_counter()

    def stop(self) -> None:
        """Blocks until what the last `optimizer.step()` has enqueued is done, and ends the recording.

        Raises CommunicatorError where that has failed; ScheduleError if not recording.
        """
        try:
            if self._hooks:
                for event in self._step_done:
                    event.wait_host()
        finally:
            self._end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:  # what was enqueued may never end
            self._end()

    def span(self, name: str) -> AbstractContextManager[None]:
        """A context whose time is shown on the lane of compute; while not recording it costs next to nothing.

        "forward" and "backward" have colours of their own; other names are welcome.
        """
        return self._optimizer.trace.span(COMPUTE, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes trace events as JSON, for ui.perfetto.dev or chrome://tracing: a process a rank, a thread a lane.

        Times are `time.perf_counter()` in microseconds, so events of ranks on one Linux host can be put into one file.
        Raises ScheduleError if nothing was recorded.
        """
        self._check_recorded()
        with open(path, "w", encoding="utf-8") as file:
            events = ",\n".join(json.dumps(event) for event in self._events())
            file.write(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the lanes over time in ms, with bucket numbers in the bars, into an image (the suffix says which kind).

        Raises ImportError if matplotlib is missing; ScheduleError if nothing was recorded.
        """
        self._check_recorded()
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Timeline.plot needs matplotlib: pip install 'dear-pytorch[demo]'") from error
        bars = _nested([_Bar.of(span) for span in self._spans])
        rows = [row for row in ROWS if any(bar.row == row for bar in bars)]
        begin_s, end_s = self._extent()
        width_inches = min(max(13.0, 4.0 * len(self._iterations)), 30.0)
        figure = Figure((width_inches, 1.6 + 0.55 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlim(0.0, 1.005e3 * (end_s - begin_s))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time in ms; numbers in bars are buckets, 0 holds the first layers of the forward")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        points_per_s = 72 * 0.88 * width_inches / (end_s - begin_s)
        _draw_bars(axes, bars, rows, begin_s, points_per_s)
        self._draw_iterations(axes, begin_s, points_per_s)
        communicator = self._optimizer._engine.communicator
        axes.set_title(f"rank {communicator.rank} of {communicator.size}", loc="left", pad=20, fontweight="bold")
        figure.legend(loc="outside lower center", ncols=len(_COLORS) + len(_SPARE_COLORS), frameon=False)
        figure.savefig(path, dpi=150)

    def _step_begins(self, *_: object) -> None:
        self._step_called_s = time.perf_counter()

    def _step_ended(self, *_: object) -> None:
        end_s = time.perf_counter()
        start_s = self._iterations[-1].end_s if self._iterations else self._begin_s
        number = self._optimizer._engine.replica.step - 1  # counted up a moment ago
        self._iterations.append(Span("iterations", f"iteration {number}", start_s, end_s))
        self._optimizer.trace.add(COMPUTE, STEP_CALL, self._step_called_s, end_s)
        self._step_done = self._optimizer._engine.streams.record_all()

    def _end(self) -> None:
        if not self._hooks:
            raise ScheduleError("this Timeline is not recording. Call start() first, or use it in a `with` statement.")
        while self._hooks:
            self._hooks.pop().remove()
        self._optimizer.trace.enabled = False
        self._spans = self._optimizer.trace.take()

    def _check_recorded(self) -> None:
        if self._hooks:
            raise ScheduleError("this Timeline is still recording. Call stop() first.")
        if not self._spans:
            raise ScheduleError("this Timeline has recorded nothing. Run some iterations inside `with timeline:`.")

    def _extent(self) -> tuple[float, float]:
        spans = [*self._spans, *self._iterations]
        return min(span.start_s for span in spans), max(span.end_s for span in spans)

    def _events(self) -> Iterator[dict[str, Any]]:
        communicator = self._optimizer._engine.communicator
        process = {"pid": communicator.rank}
        lanes = dict.fromkeys((*LANES, *(span.lane for span in self._spans)))
        thread_of = {lane: {**process, "tid": number} for number, lane in enumerate(lanes, 1)}
        yield {"ph": "M", **process, "name": "process_name", "args": {"name": f"rank {communicator.rank}"}}
        for lane, thread in thread_of.items():
            yield {"ph": "M", **thread, "name": "thread_name", "args": {"name": lane}}
            yield {"ph": "M", **thread, "name": "thread_sort_index", "args": {"sort_index": thread["tid"]}}
        for span in self._iterations:
            at = {"ts": _microseconds(span.end_s), **thread_of[COMPUTE]}
            yield {"ph": "i", "s": "p", **at, "name": f"end of {span.name}", "cat": "iteration"}
        for span in self._spans:
            bar, start = _Bar.of(span), _microseconds(span.start_s)
            yield {
                "ph": "X",
                "ts": start,
                "dur": round(_microseconds(span.end_s) - start, 3),
                **thread_of[span.lane],
                "name": bar.title,
                "cat": bar.kind,
                "args": bar.arguments,
            }

    def _draw_iterations(self, axes: Axes, begin_s: float, points_per_s: float) -> None:
        if self._iterations:
            axes.axvline(1e3 * (self._iterations[0].start_s - begin_s), **_BOUNDARY)
        for span in self._iterations:
            start_ms, end_ms = 1e3 * (span.start_s - begin_s), 1e3 * (span.end_s - begin_s)
            axes.axvline(end_ms, **_BOUNDARY)
            duration = f"{end_ms - start_ms:.1f} ms"
            text = f"{span.name}, {duration}"
            if _fits(text, span, points_per_s):
                axes.text((start_ms + end_ms) / 2, -0.72, text, ha="center", va="bottom", fontsize=9)
            elif _fits(duration, span, points_per_s):
                axes.text((start_ms + end_ms) / 2, -0.72, duration, ha="center", va="bottom", fontsize=9)


@dataclass(slots=True)
class _Bar:
    """A span with its label taken apart."""

    span: Span
    kind: str  # what it is, and its colour
    row: str  # where it is drawn
    buckets: tuple[int, ...]
    arguments: dict[str, Any]
    depth: int = 0  # how many bars of its row it lies in
    is_around: bool = False  # a bar lies in it

    @classmethod
    def of(cls, span: Span) -> _Bar:
        match = _LABEL.fullmatch(span.name)
        if match is None or span.name == STEP_CALL:
            return cls(span, span.name, span.lane if span.lane in LANES else ROWS[-1], (), {})
        buckets = tuple(int(number) for number in (match["buckets"] or "").split(",") if number.strip())
        kind = match["what"].replace("_", "-")
        row = span.lane
        if row == "communication":
            row = next((r for r in ("reduce-scatter", "all-gather") if kind.startswith(r)), ROWS[-1])
        arguments: dict[str, Any] = {}
        if buckets:
            arguments["bucket"] = buckets[0] if len(buckets) == 1 else list(buckets)
        if match["names"]:
            arguments["parameters"] = match["names"]
        if match["step"]:
            arguments["step"] = int(match["step"])
        return cls(span, kind, row, buckets, arguments)

    @property
    def number(self) -> str:
        """Parts of a split tensor stand in neighbouring buckets."""
        first, last = self.buckets[:1], self.buckets[1:][-1:]
        return "-".join(map(str, first + last))

    @property
    def title(self) -> str:
        return f"{self.kind}[{self.number}]" if self.buckets else self.kind


def _nested(bars: Sequence[_Bar]) -> list[_Bar]:
    """The bars in drawing order, with their depths; a wait lies inside the forward that waited."""
    ordered = sorted(bars, key=lambda bar: (bar.span.start_s, -bar.span.end_s))
    open_bars: dict[str, list[_Bar]] = {}
    for bar in ordered:
        around = open_bars.setdefault(bar.row, [])
        while around and around[-1].span.end_s <= bar.span.start_s:
            around.pop()
        bar.depth = len(around)
        if around:
            around[-1].is_around = True
        around.append(bar)
    return ordered


def _draw_bars(axes: Axes, bars: Sequence[_Bar], rows: Sequence[str], begin_s: float, points_per_s: float) -> None:
    colors = dict(_COLORS)
    order = {kind: place for place, kind in enumerate(_COLORS)}
    for key in sorted({_color_key(bar) for bar in bars}, key=lambda key: (order.get(key, len(order)), key)):
        color = colors.setdefault(key, _SPARE_COLORS[len(colors) % len(_SPARE_COLORS)])
        axes.barh([0], [0], color=color, label="wait for parameters" if key == WAIT else key)
    for bar in bars:
        key, row = _color_key(bar), rows.index(bar.row)
        start_ms, length_ms = 1e3 * (bar.span.start_s - begin_s), 1e3 * (bar.span.end_s - bar.span.start_s)
        # what lies inside another bar leaves the upper part of it free for its name
        top, bottom = row - 0.42 + 0.26 * min(bar.depth, 2), row + 0.42 - 0.05 * min(bar.depth, 2)
        edge = "#252525" if _fits("0", bar.span, points_per_s) else colors[key]  # edges would hide what is narrow
        axes.barh(
            (top + bottom) / 2, length_ms, bottom - top, start_ms,
            color=colors[key], edgecolor=edge, linewidth=0.3, zorder=2 + bar.depth,
        )  # fmt: skip
        text = bar.number or (bar.kind if bar.row == COMPUTE else "")
        if text and _fits(text, bar.span, points_per_s):
            axes.text(
                start_ms + length_ms / 2, top + 0.14 if bar.is_around else (top + bottom) / 2, text,
                ha="center", va="center", fontsize=_FONT_POINTS, color="white" if key in _DARK else "black", zorder=9,
            )  # fmt: skip


def _color_key(bar: _Bar) -> str:
    """Compute is coloured by name, everything else by its row."""
    return bar.kind if bar.row == COMPUTE else bar.row


def _fits(text: str, span: Span, points_per_s: float) -> bool:
    return (span.end_s - span.start_s) * points_per_s > len(text) * 0.62 * _FONT_POINTS


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
