"""Fits the simulator to published rows, and says how well it predicts each row from all the others.

Free are one latency for each network and one host cost per tensor for each method, shared by all models and networks;
the slopes are published. Parameters stand on grids, so a fit is a search over tables of predictions and has no start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dearcore.predict import predict_iteration_s
from dearcore.profile import Profile

from .cluster import CLUSTERS, on_cluster
from .methods import METHODS, with_host_cost
from .networks import NETWORKS, load_profile

__all__ = ["ROWS", "Calibration", "Fit", "Row", "calibrate", "order_of"]

LB_OPT = "LB-OPT"  # lzhangbv/last-batch-ddl
HKBU = "ddl-benchmarks"  # HKBU-HPML/ddl-benchmarks

LATENCIES_S = np.linspace(0.0, 30e-6, 61)  # of one step of the ring
HOSTS_S = np.linspace(0.0, 1.5e-3, 151)  # per tensor
COARSE = (6, 10)  # every so many of them are predicted, the rest interpolated


@dataclass(frozen=True, slots=True)
class Row:
    source: str
    model: str
    method: str
    network: str  # of CLUSTERS
    num_ranks: int
    published_s: float


def _images_per_s(images_per_s: float) -> float:
    return 32 * NETWORKS["resnet50"].batch / images_per_s


ROWS = (
    Row(LB_OPT, "resnet50", "horovod", "10gbe", 64, 0.3137),
    Row(LB_OPT, "densenet201", "horovod", "10gbe", 64, 0.4826),
    Row(LB_OPT, "bert-base", "horovod", "10gbe", 64, 0.9519),
    *(
        Row(HKBU, "resnet50", method, network, 32, _images_per_s(images_per_s))
        for method, ethernet, infiniband in (
            ("at-end", 4921, 7127),
            ("wfbp", 5113, 7327),
            ("mg-wfbp", 6884, 7877),
            ("bytescheduler", 4754, 4766),
        )
        for network, images_per_s in (("10gbe", ethernet), ("ib", infiniband))
    ),
)


@dataclass(frozen=True, slots=True)
class Fit:
    latency_s: Mapping[str, float]  # by network
    host_s: Mapping[str, float]  # by method; of the fitted rows


@dataclass(frozen=True, slots=True)
class Calibration:
    fit: Fit
    predicted_s: Sequence[float]  # by row
    left_out_s: Sequence[float]  # by row, fitted without it
    unfitted_s: Sequence[float]  # by row, with the fitted latency and no host cost

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "source": row.source,
                "model": row.model,
                "method": row.method,
                "network": row.network,
                "ranks": row.num_ranks,
                "published_ms": round(row.published_s * 1e3, 1),
                "predicted_ms": round(self.predicted_s[i] * 1e3, 1),
                "error_percent": round(100 * (self.predicted_s[i] / row.published_s - 1), 1),
                "left_out_error_percent": round(100 * (self.left_out_s[i] / row.published_s - 1), 1),
                "no_host_cost_ms": round(self.unfitted_s[i] * 1e3, 1),
                "step_latency_us": round(self.fit.latency_s[row.network] * 1e6, 1),
                "host_us_per_tensor": round(self.fit.host_s[row.method] * 1e6),
            }
            for i, row in enumerate(ROWS)
        ]


def calibrate(progress: Iterable[Row] = ROWS) -> Calibration:
    """`progress` yields ROWS, and may show how far it is."""
    tables = [_log_errors(row) for row in progress]
    fit = _search(tables, None)
    predicted_s = [_predict_s(row, fit) for row in ROWS]
    left_out_s = [_predict_s(row, _search(tables, i)) for i, row in enumerate(ROWS)]
    silent = replace(fit, host_s=dict.fromkeys(fit.host_s, 0.0))
    return Calibration(fit, predicted_s, left_out_s, [_predict_s(row, silent) for row in ROWS])


def order_of(network: str, times_s: Sequence[float]) -> list[str]:
    """The 32-rank methods on a network, fastest first."""
    rows = [(time_s, row.method) for row, time_s in zip(ROWS, times_s, strict=True)]
    ranked = [pair for pair, row in zip(rows, ROWS, strict=True) if row.network == network and row.num_ranks == 32]
    return [method for _, method in sorted(ranked)]


def _profile(row: Row, latency_s: float) -> Profile:
    cluster = replace(CLUSTERS[row.network], step_latency_s=latency_s)
    return on_cluster(load_profile(row.model), cluster, row.num_ranks)


def _predict_s(row: Row, fit: Fit) -> float:
    profile = _profile(row, fit.latency_s[row.network])
    return _iteration_s(profile, row.method, fit.host_s[row.method])


def _iteration_s(profile: Profile, method: str, host_s: float) -> float:
    slowed = with_host_cost(profile, host_s)
    plan, schedule = METHODS[method](slowed)
    return predict_iteration_s(slowed, plan, schedule)


def _log_errors(row: Row) -> npt.NDArray[np.float64]:
    """[latency, host]: logarithm of predicted over published."""
    latencies, hosts = LATENCIES_S[:: COARSE[0]], HOSTS_S[:: COARSE[1]]
    coarse = np.empty((len(latencies), len(hosts)))
    for i, latency_s in enumerate(latencies):
        profile = _profile(row, float(latency_s))
        for j, host_s in enumerate(hosts):
            coarse[i, j] = _iteration_s(profile, row.method, float(host_s))
    by_host = np.stack([np.interp(HOSTS_S, hosts, line) for line in coarse])
    full = np.stack([np.interp(LATENCIES_S, latencies, line) for line in by_host.T], axis=1)
    return np.log(full / row.published_s)


def _search(tables: Sequence[npt.NDArray[np.float64]], left_out: int | None) -> Fit:
    """The point of least squares; among equals the smallest parameters. A method without rows left has no host cost."""
    networks = list(CLUSTERS)
    methods = list(dict.fromkeys(row.method for row in ROWS))
    shape = (len(LATENCIES_S), len(LATENCIES_S))
    total = np.zeros(shape)
    best_host: dict[str, npt.NDArray[np.int64]] = {}
    for method in methods:
        squares = np.zeros((*shape, len(HOSTS_S)))
        for i, row in enumerate(ROWS):
            if row.method == method and i != left_out:
                by_latency = tables[i][:, None, :] if row.network == networks[0] else tables[i][None, :, :]
                squares += by_latency**2
        best_host[method] = squares.argmin(axis=2)
        total += squares.min(axis=2)
    first, second = np.unravel_index(total.argmin(), shape)
    return Fit(
        {networks[0]: float(LATENCIES_S[first]), networks[1]: float(LATENCIES_S[second])},
        {method: float(HOSTS_S[best_host[method][first, second]]) for method in methods},
    )
