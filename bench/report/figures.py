"""Figures of the report: speed-up bars, timeline lanes, scaling curves. Each function returns one matplotlib figure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullFormatter

from bench.compare.rows import best_of, median_ms

__all__ = ["draw_lanes", "draw_overhead", "draw_scaling", "draw_speedups"]

Line = Mapping[str, Any]

OURS, PEER, BASELINE, REFERENCE = "#1b7837", "#8c96a6", "#c2a24c", "#d0d4da"
BREAKDOWNS = ("none", "dear-none", "dear-rs", "dear-ag")
SCHEDULES = ("wfbp", "horovod", "mg-wfbp", "bytescheduler")
LANE_COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "wait": "#d62728",
    "pack": "#969696",
    "reduce_scatter": "#fd8d3c",
    "all_reduce": "#e34a33",
    "all_gather": "#74c476",
    "step": "#9e7fc7",
    "other": "#c49c94",
}
SHOWN_ITERATIONS = 1.35  # of the slowest method: what an iteration leaves to the next ends in it
LANE_NAMES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_reduce": "all-reduce"}
CURVES = ("#1b7837", "#762a83", "#2166ac", "#b2182b", "#e08214", "#4d4d4d", "#35978f")


def draw_speedups(by_model: Mapping[str, Sequence[Line]], title: str) -> Figure:
    """A panel for each model: iteration time of DDP's default over that of each method, the fastest on top."""
    num_columns = min(3, len(by_model))
    num_rows = math.ceil(len(by_model) / num_columns)
    longest = max(sum(not line["absent"] for line in lines) for lines in by_model.values())
    size = (4.6 * num_columns, (0.21 * longest + 1.1) * num_rows + 0.5)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(hspace=0.06))
    axes = figure.subplots(num_rows, num_columns, squeeze=False).reshape(-1)
    for ax, (model, lines) in zip(axes, by_model.items(), strict=False):
        _speedups(ax, model, lines)
    for ax in axes[len(by_model) :]:
        ax.axis("off")
    figure.suptitle(title, fontsize=12)
    return figure


def _speedups(ax: Axes, model: str, lines: Sequence[Line]) -> None:
    default = next((line for line in lines if line["method"] == "ddp" and not line["absent"]), None)
    base_ms = median_ms(default) if default is not None else lines[0]["compute_ms"]
    ran = sorted((line for line in lines if not line["absent"]), key=median_ms, reverse=True)
    for place, line in enumerate(ran):
        ms, kind = line["iteration_ms"], line["method"].partition(":")[0]
        speedup = base_ms / ms["median"]
        color = REFERENCE if kind in BREAKDOWNS else OURS if kind in ("dear", "dear-fill") else PEER
        ax.barh(place, speedup, color=BASELINE if kind in SCHEDULES else color, height=0.72)
        ax.plot([base_ms / ms["p80"], base_ms / ms["p20"]], [place, place], color="#303030", linewidth=0.9)
        if kind not in BREAKDOWNS:
            bound = base_ms / line["bound_ms"]
            ax.plot([bound, bound], [place - 0.4, place + 0.4], color="#b2182b", linewidth=1.2)
        label, is_short = f"{ms['median']:.0f} ms", speedup < 0.25 * base_ms / median_ms(ran[-1])
        ink = "#202020" if is_short or kind in (*SCHEDULES, *BREAKDOWNS) else "white"
        at = base_ms / ms["p20"] if is_short else 0.0
        ax.text(at, place, f" {label}", fontsize=6.5, va="center", color=ink)
    ax.axvline(1.0, color="#303030", linewidth=0.7, linestyle=":")
    ax.set_yticks(range(len(ran)), [line["method"] for line in ran], fontsize=7.5)
    ax.set_ylim(-0.7, len(ran) - 0.3)
    ax.set_xlabel("speed-up over DDP's default (times)", fontsize=8)
    ax.tick_params(axis="x", labelsize=7.5)
    ratio = lines[0]["all_reduce_ms"] / lines[0]["compute_ms"]
    ax.set_title(f"{model}: all-reduce / compute = {ratio:.2f}", fontsize=9.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def draw_lanes(lines: Sequence[Line], title: str) -> Figure:
    """Lanes of each method: what computed and waited for parameters, what moved, what was packed and stepped.

    Only methods that dear's executor runs can tell what moves.
    """
    shown = _lane_choice(lines)
    figure = Figure(figsize=(11.5, 0.62 * len(shown) + 1.3), layout="constrained")
    ax = figure.subplots()
    seen: dict[str, Any] = {}
    end_ms = 0.0
    for place, line in enumerate(reversed(shown)):
        for lane, name, start, end in line["spans_ms"]:
            what = _what(lane, name)
            offset = 0.16 if what == "wait" else {"compute": 0.27, "step": -0.33, "pack": -0.33}.get(lane, -0.1)
            height = 0.05 if what == "wait" else 0.13 if lane in ("step", "pack") else 0.2
            color = LANE_COLORS.get(what, LANE_COLORS["other"])
            bar = ax.barh(place + offset, end - start, left=start, height=height, color=color, linewidth=0)
            seen.setdefault(what, bar)
            end_ms = max(end_ms, end)
        median = line["iteration_ms"]["median"]
        ax.plot([median, median], [place - 0.42, place + 0.42], color="#303030", linewidth=1.0, linestyle="--")
    ax.set_yticks(range(len(shown)), [line["method"] for line in reversed(shown)], fontsize=8.5)
    ax.set_ylim(-0.6, len(shown) - 0.4)
    ax.set_xlim(0, min(end_ms, SHOWN_ITERATIONS * max(median_ms(line) for line in shown)) * 1.01)
    ax.set_xlabel("ms since the start of the forward; dashed: median iteration", fontsize=8.5)
    ax.tick_params(axis="x", labelsize=8)
    order = [what for what in LANE_COLORS if what in seen]
    names = [LANE_NAMES.get(what, what) for what in order]
    figure.legend(
        [seen[what] for what in order], names, loc="outside lower center", ncols=len(order), fontsize=8, frameon=False
    )
    ax.set_title(title, fontsize=10.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


def _lane_choice(lines: Sequence[Line]) -> list[Line]:
    """The fastest of each family, and the references: a page has room for ten."""
    named = {line["method"]: line for line in lines if not line["absent"]}
    families = (("ddp",), ("fsdp2",), ("zero",), *((kind,) for kind in SCHEDULES), ("dear",), ("dear-fill",))
    best = [best_of(lines, *family) for family in families]
    chosen = ["none", "ddp", *(line["method"] for line in best if line is not None), "dear", "dear-rs", "dear-ag"]
    ordered = [named[name] for name in dict.fromkeys(chosen) if name in named and named[name].get("spans_ms")]
    limit_ms = 3 * min(median_ms(line) for line in ordered)
    return [line for line in ordered if median_ms(line) <= limit_ms]


def _what(lane: str, name: str) -> str:
    if lane in ("step", "pack"):
        return lane
    word = re.split(r"[\[ ]", name, maxsplit=1)[0]
    return word if word in LANE_COLORS else "other"


def draw_scaling(lines: Sequence[Line], title: str) -> Figure:
    """Iteration time against the number of hosts; the ratio of communication to compute is the same at each."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    ax = figure.subplots()
    methods = list(dict.fromkeys(line["method"] for line in lines if not line["absent"]))
    for color, method in zip(CURVES * len(methods), methods, strict=False):
        points = sorted((line["hosts"], line["iteration_ms"]) for line in lines if line["method"] == method)
        hosts, times = [p[0] for p in points], [p[1] for p in points]
        median = [ms["median"] for ms in times]
        errors = [[ms["median"] - ms["p20"] for ms in times], [ms["p80"] - ms["median"] for ms in times]]
        ax.errorbar(
            hosts, median, yerr=errors, marker="o", markersize=4, linewidth=1.3, capsize=2, label=method, color=color
        )
    hosts = sorted({line["hosts"] for line in lines})
    ax.set_xscale("log", base=2)
    ax.set_xticks(hosts, [str(host) for host in hosts])
    ax.set_xlabel("emulated hosts", fontsize=9)
    ax.set_ylabel("iteration (ms)", fontsize=9)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set_title(title, fontsize=10)
    return figure


def draw_overhead(rows: Sequence[Mapping[str, Any]], exponents: Mapping[str, float], title: str) -> Figure:
    """What a method adds to plain training, against the number of tensors."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    ax = figure.subplots()
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "local"))
    for color, method in zip(CURVES, methods, strict=False):
        points = sorted((row["tensors"], row["added_ms"]) for row in rows if row["method"] == method)
        label = f"{method}: grows as tensors^{exponents[method]:.2f}" if method in exponents else method
        ax.plot(
            [p[0] for p in points],
            [max(p[1], 1e-3) for p in points],
            marker="o",
            markersize=4,
            label=label,
            color=color,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = sorted({row["tensors"] for row in rows})
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("tensors", fontsize=9)
    ax.set_ylabel("CPU time of a rank added to an iteration (ms)", fontsize=8.5)
    ax.grid(alpha=0.25, which="both")
    ax.legend(fontsize=8, frameon=False)
    ax.set_title(title, fontsize=10)
    return figure
