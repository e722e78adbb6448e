"""The calibration as a section of docs/simulator.md, written by a command and never by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dearcore.profile import Profile

from .calibrate import ROWS, Calibration, order_of
from .cluster import CLUSTERS, on_cluster
from .methods import HOST_S_PER_TENSOR, simulate
from .networks import NETWORKS, load_profile

__all__ = ["calibration_section", "update_document"]

BEGIN = "<!-- written by: python -m bench simulate --calibrate --document docs/simulator.md -->"
END = "<!-- end of what the command writes -->"
COLUMNS = {
    "source": "source",
    "model": "model",
    "method": "method",
    "network": "network",
    "ranks": "P",
    "published_ms": "published ms",
    "predicted_ms": "predicted ms",
    "error_percent": "error %",
    "left_out_error_percent": "error % if left out",
    "no_host_cost_ms": "without host cost ms",
    "step_latency_us": "latency us",
    "host_us_per_tensor": "host us/tensor",
}


def calibration_section(result: Calibration) -> str:
    published_s = [row.published_s for row in ROWS]
    lines = [_markdown(result.table(), COLUMNS), ""]
    for network in CLUSTERS:
        published, predicted = order_of(network, published_s), order_of(network, result.predicted_s)
        verdict = "the same" if published == predicted else "not the same: " + " < ".join(predicted)
        lines.append(f"Order of the 32-rank methods on `{network}`: {' < '.join(published)}; predicted: {verdict}.")
    lines += ["", *_claim_lines()]
    return "\n".join(lines)


def update_document(path: str | Path, result: Calibration) -> None:
    """Replaces what stands between the markers; the file has to have them."""
    file = Path(path)
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    section = f"{BEGIN}\n\n{calibration_section(result)}\n\n{END}"
    text, num_found = pattern.subn(lambda _: section, file.read_text())
    if num_found != 1:
        raise ValueError(f"{file} has {num_found} sections between '{BEGIN}' and '{END}'; expected one.")
    file.write_text(text)


def _markdown(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    lines = ["| " + " | ".join(names.values()) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _claim_lines() -> list[str]:
    """Predicted gains of dear over the best of the published baselines on 64 ranks."""
    rows = []
    for network, cluster in CLUSTERS.items():
        for model in NETWORKS:
            profile = on_cluster(load_profile(model), cluster, 64)
            best_s, best = min(
                (_iteration_s(profile, name, cost_s), name) for name, cost_s in HOST_S_PER_TENSOR.items()
            )
            row = {"network": network, "model": model, "best": best, "best_ms": f"{best_s * 1e3:.1f}"}
            for method in ("dear-merge", "dear-fill-merge"):
                for cost_s, label in ((HOST_S_PER_TENSOR["mg-wfbp"], "same"), (0.0, "none")):
                    row[f"{method}, {label}"] = f"{best_s / _iteration_s(profile, method, cost_s):.2f}"
            rows.append(row)
    names = {"network": "network", "model": "model", "best": "best baseline", "best_ms": "its ms"}
    names |= {
        f"{method}, {label}": f"`{method}`, {text}"
        for method in ("dear-merge", "dear-fill-merge")
        for label, text in (("same", "host cost of mg-wfbp"), ("none", "no host cost"))
    }
    return ["Predicted speedup over the best baseline (with its host cost) on 64 ranks:", "", _markdown(rows, names)]


def _iteration_s(profile: Profile, method: str, host_s: float) -> float:
    return simulate(profile, method, host_s).prediction.iteration_s
