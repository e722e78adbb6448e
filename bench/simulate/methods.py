"""The methods that the simulator compares: the planners of dearcore, with what their authors' code adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dearcore.layout import Plan, plan_threshold
from dearcore.planners import MERGE, PLANNERS, ddp, dear, dear_fill, horovod
from dearcore.predict import Prediction, predict
from dearcore.profile import Profile, dear_bound_s, dear_fill_bound_s, wfbp_bound_s
from dearcore.schedule import Schedule, plan_all_reduce

__all__ = ["BUCKETED", "HOST_S_PER_TENSOR", "METHODS", "Outcome", "bound_s", "simulate", "with_host_cost"]

AT_END = "at-end"
MIB = 1024 * 1024

# By `simulate --calibrate`: what each method's code costs the backward of every rank, for each tensor.
HOST_S_PER_TENSOR: Mapping[str, float] = {
    AT_END: 110e-6,
    "wfbp": 310e-6,
    "horovod": 450e-6,
    "mg-wfbp": 300e-6,
    "bytescheduler": 1240e-6,
}


def _at_end(profile: Profile) -> tuple[Plan, Schedule]:
    """One all-reduce of everything when the backward has ended."""
    plan = plan_threshold(profile.specs(), 1, float(profile.num_bytes + 1), "one bucket")
    return plan, plan_all_reduce(plan, AT_END, step=True)


METHODS: Mapping[str, Callable[[Profile], tuple[Plan, Schedule]]] = {
    AT_END: _at_end,
    **PLANNERS,
    "dear-merge": lambda profile: dear(profile, fusion=MERGE),
    "dear-fill-merge": lambda profile: dear_fill(profile, fusion=MERGE),
}
# Methods whose buckets have a size to choose, in MiB.
BUCKETED: Mapping[str, Callable[[Profile, float], tuple[Plan, Schedule]]] = {
    "ddp": lambda profile, mib: ddp(profile, bucket_bytes=mib * MIB),
    "horovod": lambda profile, mib: horovod(profile, fusion_bytes=mib * MIB),
    "dear": lambda profile, mib: dear(profile, fusion=mib),
    "dear-fill": lambda profile, mib: dear_fill(profile, fusion=mib),
}
_MAY_RUN_INTO_FORWARD = ("bytescheduler", "dear-fill", "dear-fill-merge")


@dataclass(frozen=True, slots=True)
class Outcome:
    method: str
    plan: Plan
    schedule: Schedule
    prediction: Prediction
    bound_s: float  # without latency, host cost and step


def simulate(
    profile: Profile,
    method: str,
    host_s_per_tensor: float = 0.0,
    num_spanned: int = 1,
    bucket_mib: float | None = None,
) -> Outcome:
    """`host_s_per_tensor` delays each gradient; planners see it, as a measured profile would show it."""
    slowed = with_host_cost(profile, host_s_per_tensor)
    plan, schedule = METHODS[method](slowed) if bucket_mib is None else BUCKETED[method](slowed, bucket_mib)
    prediction = predict(slowed, plan, schedule, num_spanned)
    return Outcome(method, plan, schedule, prediction, bound_s(profile, method))


def with_host_cost(profile: Profile, host_s_per_tensor: float) -> Profile:
    layers = (replace(layer, backward_s=layer.backward_s + host_s_per_tensor) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def bound_s(profile: Profile, method: str) -> float:
    """The shortest iteration that the method's idea allows."""
    if method in _MAY_RUN_INTO_FORWARD:
        return dear_fill_bound_s(profile)
    return dear_bound_s(profile) if method.startswith("dear") else wfbp_bound_s(profile)
