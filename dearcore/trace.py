"""Spans of time on named lanes: what ran when, for timelines and statistics.

Off by default and then nearly free. Every span is also a range of torch's profiler, `dear::reduce_scatter[3]`, when
that is running.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["Span", "Trace"]


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    name: str
    start_s: float  # time.perf_counter()
    end_s: float


class Trace:
    """Collects spans from any thread while `enabled`. A `listener` hears of every span, collected or not."""

    def __init__(self) -> None:
        self.enabled = False
        self.listener: Callable[[Span], None] | None = None
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        profiling = torch.autograd.profiler._is_profiler_enabled
        if not (self.enabled or profiling or self.listener is not None):
            yield
            return
        start_s = time.perf_counter()
        with torch.profiler.record_function(f"dear::{name}") if profiling else contextlib.nullcontext():
            yield
        self.add(lane, name, start_s, time.perf_counter())

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        listener = self.listener
        if listener is not None:
            listener(Span(lane, name, start_s, end_s))
        if self.enabled:
            with self._lock:
                self._spans.append(Span(lane, name, start_s, end_s))

    def take(self) -> list[Span]:
        """Returns the spans collected so far, in order of their start, and forgets them."""
        with self._lock:
            spans, self._spans = self._spans, []
        return sorted(spans, key=lambda span: span.start_s)
