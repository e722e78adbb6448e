"""Ways to train one model on several ranks, behind one interface, to be measured in turn.

| name | what |
|---|---|
| `none` | the model alone, no communication |
| `dear-none` | dear with a communicator that moves nothing |
| `ddp` | DistributedDataParallel, its default buckets (25 MiB, the first 1 MiB) |
| `ddp:5` | the same with buckets of 5 MiB |
| `ddp-best` | short for a sweep of `ddp:...`; the fastest is the one that counts |
| `fsdp2` | fully_shard of every layer, reshard_after_forward=False |
| `dear` | DistributedOptimizer, its default buckets |
| `dear:5`, `dear:unfused` | the same with fusion=5 MiB, with fusion=None |

Every method steps with plain SGD.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dear import DistributedOptimizer
from dear.context import moving_nothing

__all__ = ["DDP_SWEEP_MIB", "NONE", "Method", "Trainee", "build", "parse_methods"]

NONE = "none"
DDP_SWEEP_MIB = (1.0, 2.0, 4.0, 8.0)
_WITH_MIB = ("ddp", "dear")
_PLAIN = (NONE, "dear-none", "fsdp2")


@dataclass(frozen=True, slots=True)
class Method:
    """`mib`: bucket size, or None for the method's default; 0 for no fusion."""

    kind: str
    mib: float | None = None

    @property
    def name(self) -> str:
        if self.mib is None:
            return self.kind
        return f"{self.kind}:{self.mib:g}" if self.mib else f"{self.kind}:unfused"

    @property
    def communicates(self) -> bool:
        return self.kind not in (NONE, "dear-none")


def parse_methods(text: str) -> list[Method]:
    """The methods of "ddp,ddp-best,dear:5", `none` before them. Raises ValueError naming what it does not know."""
    methods = [Method(NONE)]
    for name in text.split(","):
        kind, _, mib = name.strip().partition(":")
        if kind == "ddp-best" and not mib:
            methods += [Method("ddp", size) for size in DDP_SWEEP_MIB]
        elif kind in (*_WITH_MIB, *_PLAIN) and not mib:
            methods.append(Method(kind))
        elif kind == "dear" and mib == "unfused":
            methods.append(Method(kind, 0.0))
        elif kind in _WITH_MIB and _positive(mib):
            methods.append(Method(kind, float(mib)))
        else:
            known = ", ".join([*_PLAIN, "ddp", "ddp:MIB", "ddp-best", "dear", "dear:MIB", "dear:unfused"])
            raise ValueError(f"method {name.strip()!r} is not known; expected {known}.")
    return list(dict.fromkeys(methods))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


@dataclass(slots=True)
class Trainee:
    """One method at work in one rank. `forward` is what the training loop calls."""

    method: Method
    model: nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    iteration: int = 0

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


def build(method: Method, model: nn.Module, layers: Sequence[nn.Module], lr: float) -> Trainee:
    """Wraps `model`, whose layers are `layers`. Collective; torch.distributed and dear are initialised."""
    if method.kind == "fsdp2":
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if method.kind == "ddp":
        forward = DistributedDataParallel(model, bucket_cap_mb=method.mib)
    elif method.kind in ("dear", "dear-none"):
        fusion: dict[str, Any] = {} if method.mib is None else {"fusion": method.mib or None}
        with moving_nothing() if method.kind == "dear-none" else contextlib.nullcontext():
            optimizer = DistributedOptimizer(optimizer, model, **fusion)
    return Trainee(method, model, forward, optimizer)
