"""Pictures of predictions: what runs when, and how iteration times change along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .methods import Outcome

__all__ = ["draw_gantt", "draw_sweep"]

LANES = ("compute", "network", "step")
COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "reduce_scatter": "#fd8d3c",
    "all_reduce": "#e6550d",
    "all_gather": "#74c476",
    "step": "#9e7fc7",
}


def draw_gantt(outcomes: Sequence[Outcome], title: str, path: str | Path) -> None:
    """One panel a method; a line at each start of an iteration."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 0.7 + 1.25 * len(outcomes)), layout="constrained")
    panels = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    for panel, outcome in zip(panels, outcomes, strict=True):
        boxes: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for span in outcome.prediction.spans:
            kind = span.lane if span.lane in ("forward", "backward") else span.name.partition("[")[0]
            lane = "compute" if span.lane in ("forward", "backward") else span.lane
            boxes.setdefault((lane, kind), []).append((span.start_s * 1e3, (span.end_s - span.start_s) * 1e3))
        for (lane, kind), ranges in boxes.items():
            style: dict[str, Any] = {"facecolor": COLORS[kind]}
            if lane == "network":
                style |= {"edgecolor": "white", "linewidth": 0.3}
            panel.broken_barh(ranges, (-LANES.index(lane) - 0.4, 0.8), **style)
        iteration_ms = outcome.prediction.iteration_s * 1e3
        for i in range(3):
            panel.axvline(i * iteration_ms, color="#525252", linewidth=0.8, linestyle=":")
        panel.set_yticks([-i for i in range(len(LANES))], LANES, fontsize=8)
        panel.set_title(f"{outcome.method}: {iteration_ms:.1f} ms, {len(outcome.plan.buckets)} buckets", fontsize=9)
    panels[-1].set_xlabel("ms since the end of a backward, in steady state")
    legend = [Patch(color=color, label=kind.replace("_", "-")) for kind, color in COLORS.items()]
    figure.legend(handles=legend, loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def draw_sweep(
    axis: str, points: Sequence[float], times_ms: Mapping[str, Sequence[float | None]], title: str, path: str | Path
) -> None:
    """A line for each method; the dotted one is compute alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for name, values in times_ms.items():
        style = {"color": "black", "linestyle": ":"} if name == "compute" else {"marker": "o", "markersize": 3}
        panel.plot(points, [float("nan") if v is None else v for v in values], label=name, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel(axis)
    panel.set_ylabel("iteration, ms")
    panel.grid(True, which="both", linewidth=0.3)
    panel.legend(fontsize=8)
    panel.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
