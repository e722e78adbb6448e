"""Ways to train one model on several ranks, behind one interface, to be measured in turn.

| name | what |
|---|---|
| `none` | the model alone, no communication |
| `dear-none` | dear with a communicator that moves nothing |
| `ddp` | DistributedDataParallel, its default buckets (25 MiB, the first 1 MiB) |
| `ddp:5` | the same with buckets of 5 MiB |
| `ddp-view` | `ddp` with gradient_as_bucket_view=True |
| `ddp-best` | short for a sweep of `ddp:...`; the fastest is the one that counts |
| `fsdp2` | fully_shard of every layer, reshard_after_forward=False |
| `fsdp2:25` | the same with layers grouped as buckets of 25 MiB would, and the next group prefetched |
| `zero` | DistributedDataParallel and ZeroRedundancyOptimizer |
| `horovod-package` | Horovod itself, where it is installed |
| `wfbp`, `horovod`, `mg-wfbp`, `bytescheduler`, `dear-fill` | schedules of dear, planned with measured times |
| `dear` | DistributedOptimizer, its default buckets (a tenth of the model, 1 to 25 MiB) |
| `dear:5`, `dear:unfused`, `dear:auto` | the same with fusion=5 MiB, None, "auto" |
| `dear:merge` | buckets chosen from measured times |
| `dear-fill:5`, `dear-fill:merge`, `dear-fill:auto` | likewise |
| `dear-rs`, `dear-ag` | DeAR's breakdowns: only reduce-scatters, only all-gathers (wrong weights) |

A new method is one more entry of `BUILDERS`. What cannot be built here is told by whoever builds it: see `try_build`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dear import DistributedOptimizer
from dear.context import moving_nothing
from dear.planning import sized_mib
from dearcore.communicator import NullCommunicator
from dearcore.layout import Plan
from dearcore.planners import NEEDS_TIMES, PLANNERS, bytescheduler, dear_fill, horovod
from dearcore.planners import dear as plan_dear_from_profile
from dearcore.profile import Profile
from dearcore.schedule import Schedule

__all__ = [
    "BUILDERS",
    "DDP_SWEEP_MIB",
    "NONE",
    "Method",
    "Setting",
    "Trainee",
    "build",
    "parse_methods",
    "try_build",
]

MIB = 1024 * 1024
NONE = "none"
DDP_SWEEP_MIB = (1.0, 2.0, 4.0, 8.0)
FIRST_DDP_BUCKET_MIB, DDP_BUCKET_MIB = 1.0, 25.0
# Exceptions by which a method says that it does not exist here.
ABSENT = (ValueError, ImportError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Method:
    """`mib`: bucket size, or None for the method's default; 0 for no fusion. `variant`: another rule of fusion."""

    kind: str
    mib: float | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        if self.variant:
            return f"{self.kind}:{self.variant}"
        if self.mib is None:
            return self.kind
        return f"{self.kind}:{self.mib:g}" if self.mib else f"{self.kind}:unfused"

    @property
    def communicates(self) -> bool:
        return self.kind not in (NONE, "dear-none")

    @property
    def is_right(self) -> bool:
        """Trains the weights that it should."""
        return self.communicates and self.kind not in ("dear-rs", "dear-ag")

    @property
    def is_ours(self) -> bool:
        """A schedule of reduce-scatters and all-gathers; not a peer."""
        return self.kind in ("dear", "dear-fill")


@dataclass(frozen=True, slots=True)
class Setting:
    """What methods need to know beside the model. Sizes of buckets count as `size_scale` times what is asked for."""

    optimizer_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    profile: Profile | None = None  # with the parameters' names as in the model; planners need it
    size_scale: float = 1.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.optimizer_class(model.parameters(), **self.options)  # type: ignore[call-arg]

    def measured(self) -> Profile:
        if self.profile is None:
            raise ValueError("this method plans with measured times, and nobody has measured them.")
        return self.profile


@dataclass(slots=True)
class Trainee:
    """One method at work in one rank. `forward` is what the training loop calls."""

    method: Method
    model: nn.Module
    forward: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    iteration: int = 0
    others: list[Any] = field(default_factory=list)  # what has to live as long

    def settle(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.synchronize()

    @property
    def num_buckets(self) -> int | None:
        return len(self.optimizer.plan.buckets) if isinstance(self.optimizer, DistributedOptimizer) else None

    def whole_params(self) -> list[torch.Tensor]:
        """Every parameter, whole. Collective for some methods."""
        params = [p.detach() for p in self.model.parameters()]
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]

    def close(self) -> None:
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.close()


def build(
    method: Method, model: nn.Module, layers: Sequence[nn.Module], lr: float, setting: Setting | None = None
) -> Trainee:
    """Wraps `model`, whose layers are `layers`. Collective; torch.distributed and dear are initialised.

    Without a `setting` every method steps with plain SGD.
    """
    setting = setting or Setting(torch.optim.SGD, {"lr": lr})
    return BUILDERS[method.kind](method, model, layers, setting)


def try_build(method: Method, model: nn.Module, layers: Sequence[nn.Module], setting: Setting) -> Trainee | str:
    """The trainee, or why there is none: the same on every rank."""
    try:
        built: Trainee | str = build(method, model, layers, 0.0, setting)
    except ABSENT as error:
        built = f"{type(error).__name__}: {error}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, built if isinstance(built, str) else None)
    reason = next((r for r in reasons if r is not None), None)
    if reason is not None and isinstance(built, Trainee):
        built.close()
    return built if reason is None else reason


# --------------------------------------------------------------------------------------------------------- the methods

Builder = Callable[[Method, nn.Module, Sequence[nn.Module], Setting], Trainee]


def _none(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    return Trainee(method, model, model, setting.optimizer(model))


def _ddp(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    return Trainee(method, model, _data_parallel(method, model, setting), setting.optimizer(model))


def _zero(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    wrapped = _data_parallel(method, model, setting)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), setting.optimizer_class, **setting.options)
    return Trainee(method, model, wrapped, optimizer)


def _data_parallel(method: Method, model: nn.Module, setting: Setting) -> DistributedDataParallel:
    view = method.kind == "ddp-view"
    if method.mib is not None:
        cap_mib = method.mib * setting.size_scale
        return DistributedDataParallel(model, bucket_cap_mb=cap_mib, gradient_as_bucket_view=view)
    if setting.size_scale == 1.0:
        return DistributedDataParallel(model, gradient_as_bucket_view=view)
    first_mib, cap_mib = FIRST_DDP_BUCKET_MIB * setting.size_scale, DDP_BUCKET_MIB * setting.size_scale
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(model, bucket_cap_mb_list=[first_mib, cap_mib], gradient_as_bucket_view=view)
    with _first_bucket(first_mib):  # before torch had lists of sizes
        return DistributedDataParallel(model, bucket_cap_mb=cap_mib, gradient_as_bucket_view=view)


@contextlib.contextmanager
def _first_bucket(mib: float) -> Any:
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(mib * MIB)
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def _fsdp2(method: Method, model: nn.Module, layers: Sequence[nn.Module], setting: Setting) -> Trainee:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    groups = [[layer] for layer in layers]
    if method.mib is not None:
        groups = _grouped(layers, method.mib * setting.size_scale * MIB)
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], mesh=mesh, reshard_after_forward=False)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if method.mib is not None:
        heads = [group[0] for group in groups]
        for head, following in itertools.pairwise(heads):
            assert isinstance(head, FSDPModule) and isinstance(following, FSDPModule)
            head.set_modules_to_forward_prefetch([following])
    return Trainee(method, model, model, setting.optimizer(model))


def _grouped(layers: Sequence[nn.Module], limit_bytes: float) -> list[list[nn.Module]]:
    """Whole layers, filled from the last backwards as dear fills its buckets."""
    groups: list[list[nn.Module]] = []
    filled = float("inf")
    for layer in reversed(layers):
        num_bytes = sum(p.numel() * p.element_size() for p in layer.parameters())
        if filled + num_bytes > limit_bytes:
            groups.insert(0, [])
            filled = 0.0
        groups[0].insert(0, layer)
        filled += num_bytes
    return groups


def _horovod_package(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]

    hvd.init()
    if hvd.size() != dist.get_world_size():
        raise NotImplementedError(
            f"Horovod sees {hvd.size()} ranks of {dist.get_world_size()}; start it by its own launcher."
        )
    optimizer = hvd.DistributedOptimizer(setting.optimizer(model), named_parameters=model.named_parameters())
    return Trainee(method, model, model, optimizer)


def _dear(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    fusion: dict[str, Any] = {}
    if method.variant == "merge" and setting.profile is not None:
        plan, schedule = plan_dear_from_profile(setting.measured(), fusion="merge")
        return _planned(method, model, setting, plan, schedule)
    if method.variant:
        fusion["fusion"] = method.variant
    elif method.mib is not None:
        fusion["fusion"] = method.mib * setting.size_scale or None
    elif setting.size_scale != 1.0:
        fusion["fusion"] = _default_mib(model, setting) * setting.size_scale
    with moving_nothing() if method.kind == "dear-none" else contextlib.nullcontext():
        optimizer = DistributedOptimizer(setting.optimizer(model), model, **fusion)
    return Trainee(method, model, model, optimizer)


def _default_mib(model: nn.Module, setting: Setting) -> float:
    """dear's default for the model of the full size."""
    return sized_mib(sum(p.numel() * p.element_size() for p in model.parameters()) / setting.size_scale)


def _dear_half(method: Method, model: nn.Module, layers: Sequence[nn.Module], setting: Setting) -> Trainee:
    trainee = _dear(replace(method, kind="dear"), model, layers, setting)
    assert isinstance(trainee.optimizer, DistributedOptimizer)
    communicator = trainee.optimizer._engine.communicator
    left_out = "start_all_gather" if method.kind == "dear-rs" else "start_reduce_scatter"
    nothing = NullCommunicator(communicator.rank, communicator.size)
    setattr(communicator, left_out, getattr(nothing, left_out))
    trainee.method = method
    return trainee


def _schedule(method: Method, model: nn.Module, _: Sequence[nn.Module], setting: Setting) -> Trainee:
    """Every other schedule of dear; thresholds of its authors count as `size_scale` times as large."""
    if method.kind not in NEEDS_TIMES or method.variant == "auto" or setting.profile is None:  # it measures by itself
        wanted = method.variant or (None if method.mib is None else method.mib * setting.size_scale)
        fusion: dict[str, Any] = {"fusion": wanted} if wanted else {}
        optimizer = DistributedOptimizer(setting.optimizer(model), model, schedule=method.kind, **fusion)
        return Trainee(method, model, model, optimizer)
    profile, scale = setting.measured(), setting.size_scale
    if method.kind == "horovod":
        plan, schedule = horovod(profile, fusion_bytes=128 * MIB * scale)
    elif method.kind == "bytescheduler":
        parts = {"partition_numel": max(1, round(4e6 * scale)), "credit_numel": max(1, round(16e6 * scale))}
        plan, schedule = bytescheduler(profile, **parts)
    elif method.kind == "dear-fill":
        mib = _default_mib(model, setting) if method.mib is None else method.mib
        plan, schedule = dear_fill(profile, fusion=method.variant or mib * scale)
    else:
        plan, schedule = PLANNERS[method.kind](profile)
    return _planned(method, model, setting, plan, schedule)


def _planned(method: Method, model: nn.Module, setting: Setting, plan: Plan, schedule: Schedule) -> Trainee:
    optimizer = DistributedOptimizer(setting.optimizer(model), model, fusion=plan, schedule=schedule)
    return Trainee(method, model, model, optimizer)


BUILDERS: Mapping[str, Builder] = {
    NONE: _none,
    "dear-none": _dear,
    "ddp": _ddp,
    "ddp-view": _ddp,
    "fsdp2": _fsdp2,
    "zero": _zero,
    "horovod-package": _horovod_package,
    "wfbp": _schedule,
    "horovod": _schedule,
    "mg-wfbp": _schedule,
    "bytescheduler": _schedule,
    "dear": _dear,
    "dear-fill": _schedule,
    "dear-rs": _dear_half,
    "dear-ag": _dear_half,
}
_WITH_MIB = ("ddp", "ddp-view", "fsdp2", "zero", "dear", "dear-none", "dear-fill", "dear-rs", "dear-ag")
_VARIANTS = {"dear": ("auto", "merge"), "dear-fill": ("auto", "merge")}


def parse_methods(text: str) -> list[Method]:
    """The methods of "ddp,ddp-best,dear:5", `none` before them. Raises ValueError naming what it does not know."""
    methods = [Method(NONE)]
    for name in text.split(","):
        kind, _, mib = name.strip().partition(":")
        if kind == "ddp-best" and not mib:
            methods += [Method("ddp", size) for size in DDP_SWEEP_MIB]
        elif kind in BUILDERS and not mib:
            methods.append(Method(kind))
        elif kind == "dear" and mib == "unfused":
            methods.append(Method(kind, 0.0))
        elif mib in _VARIANTS.get(kind, ()):
            methods.append(Method(kind, None, mib))
        elif kind in _WITH_MIB and _positive(mib):
            methods.append(Method(kind, float(mib)))
        else:
            known = [*BUILDERS, *(f"{kind}:MIB" for kind in _WITH_MIB), "ddp-best", "dear:unfused"]
            known += [f"{kind}:{variant}" for kind, variants in _VARIANTS.items() for variant in variants]
            raise ValueError(f"method {name.strip()!r} is not known; expected {', '.join(known)}.")
    return list(dict.fromkeys(methods))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
