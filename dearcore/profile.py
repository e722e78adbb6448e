"""What was measured of a model and a network: the input of every planner. Pure data, no device touched.

    layer  forward        backward           forward_s of a layer begins when its parameter is needed;
      0    |f0|           .......|b0|        backward_s ends when its gradient is ready.
      1       |f1|        ....|b1|
      2          |f2|     |b2|

The bounds are those of an ideal network: no latency, no host cost, no step, the true order and sizes of the layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from .checked_json import dtype_name, read_json
from .errors import ArgumentError
from .layout import ParamSpec

__all__ = [
    "Bounds",
    "LayerTime",
    "Link",
    "Profile",
    "dear_bound_s",
    "dear_fill_bound_s",
    "fit_link",
    "layer_times",
    "plan_bounds",
    "wfbp_bound_s",
]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One parameter. Times between the event of the previous parameter and this one's; 0 for the second of a layer.

    forward_s: from the moment it is needed to the moment the next one is (or the forward ends).
    backward_s: from the previous gradient (or the start of the backward) to its own.
    """

    fqn: str  # as in model.named_parameters()
    shape: tuple[int, ...]
    dtype: torch.dtype
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s"):
            _check_time(f"{name} of '{self.fqn}'", getattr(self, name))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Link:
    """A collective of n bytes takes alpha_s + n * beta_s_per_byte. `residual`: relative error of the fit (RMS)."""

    alpha_s: float
    beta_s_per_byte: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "residual"):
            _check_time(f"{name} of a link", getattr(self, name))

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes * self.beta_s_per_byte

    def slower(self, times: float) -> Link:
        return replace(self, alpha_s=self.alpha_s * times, beta_s_per_byte=self.beta_s_per_byte * times)


def fit_link(samples: Sequence[tuple[float, float]]) -> Link:
    """Fits (bytes, seconds) by least squares, errors weighted by 1 / seconds, neither constant below zero.

    Between absolute and relative errors, since sizes span several orders of magnitude: an absolute fit would let the
    largest decide alone and leave alpha to its noise; a relative one would let the jitter of many small messages decide
    how long a large one takes. Example: (0 B, 1 ms), (1 MB, 2 ms), (4 MB, 5 ms) -> alpha 1 ms, beta 1 ns/B, residual 0.

    Raises: ArgumentError for fewer than two sizes or a time that is not above zero.
    """
    if len({num_bytes for num_bytes, _ in samples}) < 2:
        raise ArgumentError(
            f"fit_link got {len(samples)} samples of {len({n for n, _ in samples})} sizes; expected at least two "
            "different sizes, or latency and bandwidth cannot be told apart."
        )
    for num_bytes, time_s in samples:
        if not (math.isfinite(time_s) and time_s > 0 and math.isfinite(num_bytes) and num_bytes >= 0):
            raise ArgumentError(f"fit_link got {num_bytes!r} bytes in {time_s!r} s; expected bytes >= 0, seconds > 0.")
    weights = [1.0 / time_s for _, time_s in samples]
    weight = sum(weights)
    mean_bytes = sum(w * n for w, (n, _) in zip(weights, samples, strict=True)) / weight
    mean_s = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / weight
    covariance = sum(w * (n - mean_bytes) * (t - mean_s) for w, (n, t) in zip(weights, samples, strict=True))
    variance = sum(w * (n - mean_bytes) ** 2 for w, (n, _) in zip(weights, samples, strict=True))
    beta = covariance / variance
    alpha = mean_s - beta * mean_bytes
    if beta < 0:
        alpha, beta = mean_s, 0.0
    elif alpha < 0:
        squares = sum(w * n * n for w, (n, _) in zip(weights, samples, strict=True))
        alpha, beta = 0.0, sum(w * n * t for w, (n, t) in zip(weights, samples, strict=True)) / squares
    errors = [(alpha + beta * num_bytes) / time_s - 1.0 for num_bytes, time_s in samples]
    return Link(alpha, beta, math.sqrt(sum(error**2 for error in errors) / len(errors)))


@dataclass(frozen=True, slots=True)
class Profile:
    """`print(profile)` shows a table. Layers stand in forward order, one for each parameter."""

    layers: tuple[LayerTime, ...]
    world_size: int
    reduce_scatter: Link
    all_gather: Link
    all_reduce: Link
    step_s_per_byte: float = 0.0  # of the parameters that one rank steps
    host_s_per_op: float = 0.0  # that the host spends to launch an op of the schedule

    def __post_init__(self) -> None:
        _check_time("step_s_per_byte", self.step_s_per_byte)
        _check_time("host_s_per_op", self.host_s_per_op)
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ArgumentError(f"a profile has world_size={self.world_size!r}; expected a whole number >= 1.")
        if not self.layers:
            raise ArgumentError("a profile needs at least one layer.")
        seen: set[str] = set()
        for layer in self.layers:
            if layer.fqn in seen:
                raise ArgumentError(f"a profile names parameter '{layer.fqn}' twice; expected each once.")
            seen.add(layer.fqn)

    @property
    def tf_s(self) -> float:
        """The forward alone."""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def tb_s(self) -> float:
        """The backward alone."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def tc_s(self) -> float:
        """One all-reduce of everything, without latency."""
        return self.num_bytes * self.all_reduce.beta_s_per_byte

    def ready_s(self) -> list[float]:
        """When each gradient is ready, counted from the start of the backward, by layer."""
        times = [0.0] * len(self.layers)
        now_s = 0.0
        for position in reversed(range(len(self.layers))):
            now_s += self.layers[position].backward_s
            times[position] = now_s
        return times

    def specs(self) -> list[ParamSpec]:
        """The parameters as planners want them, numbered in forward order."""
        return [ParamSpec(i, layer.fqn, layer.shape, layer.dtype) for i, layer in enumerate(self.layers)]

    def order(self, params: Sequence[ParamSpec]) -> list[ParamSpec]:
        """`params` (with the numbers their optimizer gave them) in the forward order of this profile.

        Raises: ArgumentError unless the profile was taken from exactly these parameters.
        """
        by_name = {spec.fqn: spec for spec in params}
        for layer in self.layers:
            spec = by_name.get(layer.fqn)
            if spec is None:
                raise ArgumentError(
                    f"the profile has a parameter '{layer.fqn}' that this optimizer does not train. "
                    "Take a profile of this model."
                )
            if (spec.shape, spec.dtype) != (layer.shape, layer.dtype):
                raise ArgumentError(
                    f"the profile has '{layer.fqn}' as {_kind(layer.shape, layer.dtype)}, this model has it as "
                    f"{_kind(spec.shape, spec.dtype)}. Take a profile of this model."
                )
        missing = set(by_name) - {layer.fqn for layer in self.layers}
        if missing:
            first = next(spec.fqn for spec in params if spec.fqn in missing)
            raise ArgumentError(f"the profile has no times of parameter '{first}'. Take a profile of this model.")
        return [by_name[layer.fqn] for layer in self.layers]

    def check_fits(self, params: Sequence[ParamSpec], world_size: int) -> None:
        """Raises ArgumentError unless this profile was taken from `params` on `world_size` ranks."""
        self.order(params)
        if self.world_size != world_size:
            raise ArgumentError(
                f"the profile was taken on {self.world_size} ranks, this job has {world_size}: latency and bandwidth "
                "differ. Take a profile of this job."
            )

    def __str__(self) -> str:
        rows = [("layer", "forward us", "backward us", "KiB", "dtype", "parameter")]
        for i, layer in enumerate(self.layers):
            dtype = str(layer.dtype).removeprefix("torch.")
            times = (f"{layer.forward_s * 1e6:.1f}", f"{layer.backward_s * 1e6:.1f}")
            rows.append((str(i), *times, f"{layer.num_bytes / 1024:.1f}", dtype, layer.fqn))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.rjust(w) if i < 4 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        links = [
            f"{name:14s}  alpha {link.alpha_s * 1e6:.1f} us, beta {link.beta_s_per_byte * 1e9:.4f} ns/B, "
            f"residual {100 * link.residual:.1f} %"
            for name, link in self._links().items()
        ]
        head = (
            f"profile: {len(self.layers)} parameters, {self.num_bytes / 1e6:.1f} MB, {self.world_size} ranks, "
            f"tf {self.tf_s * 1e3:.2f} ms, tb {self.tb_s * 1e3:.2f} ms, tc {self.tc_s * 1e3:.2f} ms, "
            f"step {self.step_s_per_byte * 1e9:.4f} ns/B, host {self.host_s_per_op * 1e6:.1f} us/op"
        )
        return "\n".join([head, *links, *(line.rstrip() for line in lines)])

    def to_json(self) -> str:
        record = asdict(self)
        for layer in record["layers"]:
            layer["dtype"] = dtype_name(layer["dtype"])
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Raises ArgumentError if `text` is no profile; it names the field."""
        return read_json(cls, text, "profile")

    def save(self, path: str | Path) -> None:
        """Writes `to_json()`; `load` reads it."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises ArgumentError if the file holds no profile."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from error

    @classmethod
    def from_shapes(cls, params: Sequence[ParamSpec], world_size: int) -> Profile:
        """A profile without any time, for planners that need only sizes. `params` stand in forward order."""
        layers = tuple(LayerTime(spec.fqn, spec.shape, spec.dtype, 0.0, 0.0) for spec in params)
        return cls(layers, world_size, Link(0.0, 0.0), Link(0.0, 0.0), Link(0.0, 0.0))

    def scaled_compute(self, factor: float) -> Profile:
        """The same model on a device that takes `factor` times as long."""
        layers = tuple(
            replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def _links(self) -> Mapping[str, Link]:
        return {"reduce_scatter": self.reduce_scatter, "all_gather": self.all_gather, "all_reduce": self.all_reduce}


def layer_times(
    params: Sequence[ParamSpec],
    needed_s: Mapping[str, float],
    forward_end_s: float,
    backward_start_s: float,
    ready_s: Mapping[str, float],
) -> tuple[LayerTime, ...]:
    """From time stamps to layers, in the order in which the forward needed the parameters.

    needed_s, ready_s: name of a parameter -> when the forward first touched it, when its gradient was ready. A
    parameter that was never touched (ready) counts as touched last (ready last) and takes no time.
    """
    specs = sorted(params, key=lambda spec: needed_s.get(spec.fqn, forward_end_s))
    starts = [needed_s.get(spec.fqn, forward_end_s) for spec in specs]
    ends = [*starts[1:], forward_end_s]
    backward_s: dict[str, float] = {}
    last_s = backward_start_s
    for fqn, time_s in sorted(ready_s.items(), key=lambda item: item[1]):
        backward_s[fqn] = max(0.0, time_s - last_s)
        last_s = max(last_s, time_s)
    return tuple(
        LayerTime(spec.fqn, spec.shape, spec.dtype, max(0.0, end - start), backward_s.get(spec.fqn, 0.0))
        for spec, start, end in zip(specs, starts, ends, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shortest possible iterations, in seconds."""

    compute_s: float  # without communication
    wfbp_s: float
    dear_s: float
    dear_fill_s: float


def plan_bounds(profile: Profile, all_reduce_s_per_byte: float | None = None) -> Bounds:
    """All bounds, for the rate of an all-reduce (default: the profile's). Each half of it costs half of that."""
    compute_s = profile.tf_s + profile.tb_s
    bounds: list[Callable[[Profile, float | None], float]] = [wfbp_bound_s, dear_bound_s, dear_fill_bound_s]
    return Bounds(compute_s, *(bound(profile, all_reduce_s_per_byte) for bound in bounds))


def wfbp_bound_s(profile: Profile, all_reduce_s_per_byte: float | None = None) -> float:
    """Each all-reduce leaves when its gradient is ready; the forward begins when all are done.

    Uniform layers, many of them: tf + max(tb, tc).
    """
    beta = _rate(profile, all_reduce_s_per_byte)
    return profile.tf_s + max(profile.tb_s, _reduced_s(profile, beta))


def dear_bound_s(profile: Profile, all_reduce_s_per_byte: float | None = None) -> float:
    """Reduce-scatters in backward order; then all-gathers in forward order, each layer waiting for its own.

    Uniform layers, many of them: max(tb, tc / 2) + max(tf, tc / 2).
    """
    half = _rate(profile, all_reduce_s_per_byte) / 2
    gathered_s = compute_s = max(profile.tb_s, _reduced_s(profile, half))
    for layer in profile.layers:
        gathered_s += layer.num_bytes * half
        compute_s = max(compute_s, gathered_s) + layer.forward_s
    return compute_s


def dear_fill_bound_s(profile: Profile, all_reduce_s_per_byte: float | None = None) -> float:
    """All-gathers may run inside the backward too: only what a layer itself waits for is left.

    Between the gradient of layer l and its next forward, both halves of layers 0 to l must pass the network, and all
    other compute lies outside. The largest of these is the bound. Uniform layers, many of them: max(tf + tb, tc).
    """
    beta = _rate(profile, all_reduce_s_per_byte)
    bound_s = compute_s = profile.tf_s + profile.tb_s
    inside_s = communication_s = 0.0  # compute and communication between gradient and forward of the layer
    for layer in profile.layers:
        communication_s += layer.num_bytes * beta
        bound_s = max(bound_s, compute_s - inside_s + max(inside_s, communication_s))
        inside_s += layer.forward_s + layer.backward_s
    return bound_s


def _reduced_s(profile: Profile, s_per_byte: float) -> float:
    """When the last reduction ends, counted from the start of the backward."""
    end_s = 0.0
    for layer, ready_s in zip(reversed(profile.layers), reversed(profile.ready_s()), strict=True):
        end_s = max(end_s, ready_s) + layer.num_bytes * s_per_byte
    return end_s


def _rate(profile: Profile, all_reduce_s_per_byte: float | None) -> float:
    return profile.all_reduce.beta_s_per_byte if all_reduce_s_per_byte is None else all_reduce_s_per_byte


def _check_time(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ArgumentError(f"{name} is {value!r}; expected a finite number >= 0.")


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
