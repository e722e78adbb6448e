"""What the printed scripts of differential programs are made of: each script holds copies of what it uses of this file.

So everything here needs torch, dear and what is imported below, and no other part of the tests.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import dear

IMPORTS = """\
from __future__ import annotations
import contextlib, copy, threading, time
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
import dear
"""

problems: list[str] = []  # the first differences found; every rank runs to the end, so that no rank waits for another


def draw(shape: Sequence[int], *key: int) -> Tensor:
    """Random numbers that depend on the key alone, on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def multiples(shape: Sequence[int], *key: int) -> Tensor:
    """Small whole multiples of the number of ranks: sums in any order and the mean are exact in every dtype."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return dear.size() * torch.randint(-2, 3, tuple(shape), generator=generator).float()


def weighted(layer: nn.Module | nn.Parameter, *key: int) -> Tensor:
    """Its gradients are those multiples, whatever the parameters are."""
    params = [layer] if isinstance(layer, nn.Parameter) else list(layer.parameters())
    return sum(
        ((p * multiples(p.shape, *key, n).to(p.dtype)).sum().float() for n, p in enumerate(params)), torch.zeros(())
    )


def own(model: nn.Module, *layers: str) -> list[nn.Parameter]:
    """The parameters of these layers; one that is tied belongs to the first layer that has it."""
    return [p for name, p in model.named_parameters() if name.split(".")[0] in layers]


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("a backward that fails on purpose")


class Lars(optim.Optimizer):
    """Not element-wise: on a part of a parameter it would compute something else."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.add(p, alpha=group["weight_decay"])
                    p.sub_(grad * (group["lr"] * (1 + p.norm()) / (1 + grad.norm())))


class Subclass(optim.SGD):
    """What a user's own class looks like: nobody knows what its `step` does."""


class Plain:
    """What one process computes in plain PyTorch with the mean of all ranks' gradients.

    `replicas[r]` is what rank r would have: its gradients until they are averaged, its buffers. `model` is what
    `optimizer` steps, on the averages: with `masters` in fp32 where the parameters are narrower.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], optim.Optimizer], masters: bool) -> None:
        self.replicas = [copy.deepcopy(model) for _ in range(dear.size())]
        self.ranks = list(range(dear.size()))  # that have batches
        self.model = copy.deepcopy(model)
        for p in self.model.parameters():
            if masters and p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()
        self.make = make
        self.optimizer = make(self.model)

    def backward(self, loss: Callable[[nn.Module, int], Tensor], skip: int = -1, twice: bool = False) -> None:
        for r in self.ranks:
            if r != skip:
                one = loss(self.replicas[r], r)
                if twice:
                    one.backward(retain_graph=True)
                one.backward()

    def forward(self, loss: Callable[[nn.Module, int], Tensor], only: int = -1) -> dict[int, Tensor]:
        ranks = [r for r in self.ranks if only in (-1, r)]
        with torch.no_grad():
            return {r: loss(self.replicas[r], r) for r in ranks}

    def fail(self, loss: Callable[[nn.Module, int], Tensor]) -> None:
        for r in self.ranks:
            with contextlib.suppress(ArithmeticError):
                loss(self.replicas[r], r)
        self.zero_grad()

    def average(self) -> None:
        """What ranks have left becomes part of the averages, with zeros from those that have none."""
        for leader, *same in zip(self.model.parameters(), *(m.parameters() for m in self.replicas), strict=True):
            if any(p.grad is not None for p in same):
                sums = torch.float64 if leader.dtype == torch.float64 else torch.float32
                total = torch.zeros_like(leader, dtype=sums)
                for p in same:
                    if p.grad is not None:
                        total += p.grad
                    p.grad = None
                mean = (total / len(same)).to(same[0].dtype).to(leader.dtype)
                leader.grad = mean if leader.grad is None else leader.grad + mean

    def zero_grad(self, set_to_none: bool = True) -> None:
        for m in [self.model, *self.replicas]:
            m.zero_grad(set_to_none)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self.average()
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.spread()

    def spread(self) -> None:
        with torch.no_grad():
            for leader, *same in zip(self.model.parameters(), *(m.parameters() for m in self.replicas), strict=True):
                for p in same:
                    p.copy_(leader)

    def clip_norm(self, max_norm: float, norm_type: float) -> Tensor:
        self.average()
        norm: Tensor = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return norm

    def clip_value(self, value: float) -> None:
        self.average()
        nn.utils.clip_grad_value_(self.model.parameters(), value)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        self.average()
        scaler.unscale_(self.optimizer)

    def grad(self, name: str) -> Tensor:
        self.average()
        param, shown = dict(self.model.named_parameters())[name], dict(self.replicas[0].named_parameters())[name]
        return torch.zeros_like(shown) if param.grad is None else param.grad.to(shown.dtype)

    def set_grad(self, name: str, value: Callable[[nn.Parameter, int], Tensor | None]) -> None:
        """What was averaged before is forgotten."""
        self.model.get_parameter(name).grad = None
        for r in self.ranks:
            p = self.replicas[r].get_parameter(name)
            p.grad = value(p, r)

    def edit(self, change: Callable[[nn.Module], Any]) -> None:
        """Where a parameter is not its master's rounding any more, it becomes the master."""
        for m in self.replicas:
            change(m)
        with torch.no_grad():
            for leader, p in zip(self.model.parameters(), self.replicas[0].parameters(), strict=True):
                leader.copy_(torch.where(leader.to(p.dtype) != p, p.to(leader.dtype), leader))

    def freeze(self, layer: str, frozen: bool) -> None:
        for m in [self.model, *self.replicas]:
            getattr(m, layer).requires_grad_(not frozen)

    def save(self) -> Any:
        return copy.deepcopy(
            (self.model.state_dict(), self.optimizer.state_dict(), [m.state_dict() for m in self.replicas])
        )

    def load(self, saved: Any) -> None:
        model, optimizer, replicas = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for m, state in zip(self.replicas, replicas, strict=True):
            m.load_state_dict(state)

    def rewrap(self) -> None:
        self.zero_grad()
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.make(self.model)
        self.optimizer.load_state_dict(state)


def set_lr(optimizer: optim.Optimizer, group: int, lr: float) -> None:
    options = optimizer.param_groups[group]
    if isinstance(options["lr"], Tensor):
        options["lr"].fill_(lr)
    else:
        options["lr"] = lr


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)


def halve_first(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def replan(optimizer: Any, threshold_bytes: int) -> None:
    """Other buckets in mid-training, as `fusion="auto"` changes them: 0: one bucket a tensor."""
    from dearcore.layout import plan_threshold, plan_unfused
    from dearcore.schedule import plan_all_reduce, plan_dear

    engine = optimizer._engine
    specs, shards = [t.spec for t in engine.tracked], optimizer.plan.num_shards
    plan = plan_threshold(specs, shards, threshold_bytes) if threshold_bytes else plan_unfused(specs, shards)
    sharded = engine.options.sharded
    engine.relayout(plan, plan_dear(plan) if shards > 1 and sharded else plan_all_reduce(plan, "whole", step=sharded))


def all_early(model: nn.Module) -> dict[str, Any]:
    """`schedule=` and `fusion=` of a "dear-fill" that steps and gathers every bucket inside the backward."""
    from dearcore.layout import ParamSpec, plan_unfused
    from dearcore.schedule import After, Op, OpKind, Schedule

    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plan = plan_unfused([ParamSpec(i, n, tuple(p.shape), p.dtype) for i, (n, p) in enumerate(trained)], dear.size())
    ops = []
    for bucket in reversed(plan.buckets):
        ops.append(Op(OpKind.REDUCE_SCATTER, bucket.index, After.GRAD_READY))
        ops += [Op(OpKind.STEP, bucket.index, After.DONE), Op(OpKind.ALL_GATHER, bucket.index, After.DONE)]
    return {"fusion": plan, "schedule": Schedule("dear-fill", tuple(ops))}


def read(model: nn.Module, stop: threading.Event) -> None:
    while not stop.is_set():
        for p in model.parameters():
            p.detach()
            time.sleep(0)


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict()` without what plain PyTorch has not."""
    states = {n: {key: v for key, v in s.items() if key != "master_param"} for n, s in state["state"].items()}
    return {"state": {n: s for n, s in states.items() if s}, "param_groups": state["param_groups"]}


def difference(got: Any, expected: Any, tolerance: float, path: str = "") -> str:
    """Where `got` is not `expected`, or ""; bit for bit where the tolerance is 0."""
    if isinstance(expected, dict | list | tuple):
        if isinstance(expected, dict):
            keys: Any = expected.keys()
            if keys != got.keys():
                return f"{path} has the keys {list(got)}, expected {list(expected)}"
        else:
            keys = range(len(expected))
            if len(got) != len(expected):
                return f"{path} has {len(got)} entries, expected {len(expected)}"
        found = (difference(got[key], expected[key], tolerance, f"{path}[{key!r}]") for key in keys)
        return next(filter(None, found), "")
    if not isinstance(expected, Tensor | float):
        return "" if got == expected else f"{path} is {got!r}, expected {expected!r}"
    a, b = torch.as_tensor(got).detach(), torch.as_tensor(expected).detach()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{path} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
    equal = (a == b) | ((a != a) & (b != b))
    if tolerance and a.is_floating_point():
        allowed = max(tolerance, 2e-2) if a.dtype in (torch.bfloat16, torch.float16) else tolerance
        equal |= (a.double() - b.double()).abs() <= allowed * (1 + b.double().abs())
    if equal.all():
        return ""
    at = tuple((~equal).nonzero()[0].tolist())
    count = f"{int((~equal).sum())} of {a.numel()}"
    return f"{path}: {count} elements differ; at {at} {a[at].item()!r}, expected {b[at].item()!r}"


def check(what: str, got: Any, expected: Any, tolerance: float) -> None:
    found = difference(got, expected, tolerance)
    if found:
        problems.append(f"{what}: {found}")


def check_ranks(model: nn.Module) -> None:
    """Bit-identical parameters on all ranks."""
    mine = [p.detach().clone() for p in model.parameters()]
    check("ranks differ", mine, dear.broadcast_object(mine), 0.0)


def finish() -> None:
    assert not problems, f"rank {dear.rank()}: {problems[0]}"
