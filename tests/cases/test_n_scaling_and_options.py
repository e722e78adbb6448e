"""N. Loss scaling, options and hooks: what the ranks do with them is one thing, and happens once.

The names carry the lines of the second list of field reports.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dear
from dear.agreed_options import AgreedOptions, difference, is_unanimous
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, ones, raises_at_once, sgd

SCALE = 1024.0


class Two(nn.Module):
    """A parameter of each of two dtypes: a GradScaler asks for them one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(5))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))


class Own(optim.SGD):
    """Not known to be element-wise, so it steps itself, on whole gradients."""


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": SCALE, "growth_interval": 1000, **options})


def nearly(got: Tensor, expected: Tensor) -> None:
    """After a clip: torch takes the norm of what is fp32 in fp32."""
    torch.testing.assert_close(got.detach(), expected.detach().to(got.dtype), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- loss scaling


@on_ranks(1)
def test_field_s4_the_script() -> None:
    model = Two()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    scale = scaler()
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            scale.scale(model.a.sum()).backward()
        scale.scale(model.b.sum()).backward()
        scale.step(optimizer)
        scale.update()
    close(model.a, 0.8)
    close(model.b, 0.8)


MIXTURES = ["a_local", "b_local", "both_local", "late", "a_assigned", "b_assigned", "on_one_rank"]


@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True], ids=["shards", "whole"])
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_field_s4_unscaled_once_in_every_mixture(mixture: str, explicit: bool, whole: bool) -> None:
    twin = Twin(Two(), made(Own, lr=0.1) if whole else None)
    scales = {twin.model: scaler(), twin.plain: scaler()}

    def loss(names: str) -> Callable[[nn.Module, int], Tensor]:
        return lambda m, r: scales[m].scale(sum((getattr(m, name) * (r + 1)).sum() for name in names))

    for _ in range(3):
        twin.zero_grad()
        if mixture == "both_local":
            twin.backward(loss("ab"), local=True)
        elif mixture == "late":
            twin.backward(loss("a"), local=True)
            twin.backward(loss("ab"))
            twin.backward(loss("b"), local=True)
            twin.backward(loss("a"))
        elif mixture == "on_one_rank":
            twin.backward(loss("a"), local=dear.rank() == 0)
            twin.backward(loss("b"), local=dear.rank() == 1)
        elif mixture.endswith("local"):
            twin.backward(loss(mixture[0]), local=True)
            twin.backward(loss("b" if mixture[0] == "a" else "a"))
        else:
            twin.backward(loss("b" if mixture[0] == "a" else "a"))
            mine, theirs = (getattr(m, mixture[0]) for m in (twin.model, twin.plain))
            mine.grad, theirs.grad = (torch.full_like(mine, SCALE * v) for v in (dear.rank() + 1.0, 1.5))
        for model, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
            if explicit:
                scales[model].unscale_(optimizer)
            scales[model].step(optimizer)
            scales[model].update()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("local", [False, True], ids=["mixed", "all local"])
def test_field_s4_unscaled_then_clipped(local: bool) -> None:
    """Also where everything is local: clipping before the average would be by each rank's own norm."""
    twin = Twin(Two())
    scales = {twin.model: scaler(), twin.plain: scaler()}
    for _ in range(2):
        twin.zero_grad()
        twin.backward(lambda m, r: scales[m].scale((m.a * (r + 1)).sum()), local=True)
        twin.backward(lambda m, r: scales[m].scale((m.b * (r + 1)).sum()), local=local)
        for model, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
            scales[model].unscale_(optimizer)
        nearly(twin.optimizer.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(twin.plain.parameters(), 1.0))
        for model, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
            scales[model].step(optimizer)
            scales[model].update()
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        nearly(mine, theirs)
    assert_same_everywhere(twin.model)


@on_ranks(2)
@pytest.mark.parametrize("container", [False, True], ids=["one by one", "one list of groups"])
def test_field_s4_several_optimizers_and_one_scaler(container: bool) -> None:
    """`container`: a user's own optimizer holds both, so that a scaler asks for gradients of both in one breath."""
    twins = [Twin(Two()), Twin(Two(), sgd(lr=0.2))]
    mine, plain = scaler(), scaler()

    class Both:
        def __init__(self, *optimizers: optim.Optimizer) -> None:
            self.optimizers = optimizers

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return [group for optimizer in self.optimizers for group in optimizer.param_groups]

        def step(self) -> None:
            for optimizer in self.optimizers:
                optimizer.step()

    for bad in (False, True, False):
        for number, twin in enumerate(twins):
            twin.zero_grad()
            factor = math.inf if bad and number == 1 else 1.0
            twin.backward(
                lambda m, r, f=factor, t=twin: (mine if m is t.model else plain).scale((m.a * f).sum()), local=True
            )
            twin.backward(lambda m, r, t=twin: (mine if m is t.model else plain).scale((m.b * (r + 1)).sum()))
        if container:
            mine.step(Both(*(twin.optimizer for twin in twins)))  # type: ignore[arg-type]
            plain.step(Both(*(twin.plain_optimizer for twin in twins)))  # type: ignore[arg-type]
        else:
            mine.unscale_(twins[1].optimizer)
            plain.unscale_(twins[1].plain_optimizer)
            for twin in twins:
                mine.step(twin.optimizer)
                plain.step(twin.plain_optimizer)
        mine.update()
        plain.update()
    assert mine.get_scale() == plain.get_scale() == SCALE / 2
    for twin in twins:
        twin.check()


@on_ranks(2)
def test_field_s4_asked_again_after_a_skipped_step() -> None:
    """Without zero_grad or a backward in between the gradients are still not finite."""
    twin = Twin(Two())
    mine = scaler()
    before = [param.detach().clone() for param in twin.model.parameters()]
    mine.scale((twin.model.a.sum() + twin.model.b.sum()) * math.inf).backward()
    for _ in range(3):
        mine.step(twin.optimizer)
        mine.update()
    assert mine.get_scale() == SCALE / 8
    assert all(torch.equal(param.detach(), then) for param, then in zip(twin.model.parameters(), before, strict=True))


@on_ranks(2)
def test_field_s4_one_found_inf_for_every_iteration() -> None:
    """As scalers of other libraries keep it, which write zeros to it and ask again."""
    model = Two()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    found, inverse = torch.zeros(1), torch.full((1,), 1 / SCALE)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            (model.a.sum() * SCALE).backward()
        (model.b.sum() * SCALE).backward()
        found.zero_()
        for param in [p for group in optimizer.param_groups for p in group["params"]]:
            torch._amp_foreach_non_finite_check_and_unscale_([param.grad], found, inverse)
        assert not found.item()
        optimizer.step()
    close(model.a, 0.7)
    close(model.b, 0.7)


@on_ranks(2)
def test_field_s4_sparse_gradients() -> None:
    model = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)])
    twin = Twin(model)
    scales = {twin.model: scaler(), twin.plain: scaler()}
    for _ in range(2):
        twin.zero_grad()
        twin.backward(lambda m, r: scales[m].scale(m[0](torch.tensor([r, 2, 2])).sum()), local=True)
        twin.backward(lambda m, r: scales[m].scale(m[1](ones(r, 1, 2)).sum()))
        for m, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
            scales[m].step(optimizer)
            scales[m].update()
    twin.check()


@on_ranks(2)
def test_field_s4_inside_join() -> None:
    model = Two()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    mine = scaler()
    with optimizer.join():
        for _ in range(2 + dear.rank()):
            optimizer.zero_grad()
            with optimizer.no_sync():
                mine.scale(model.a.sum()).backward()
            mine.scale(model.b.sum()).backward()
            mine.step(optimizer)
            mine.update()
    close(model.a, 0.75)  # the third step: a gradient of one on one of two ranks
    close(model.b, 0.75)
    assert_same_everywhere(model)


@on_ranks(2)
def test_field_s4_local_gradients_stay_what_they_are() -> None:
    """What a scaler, or a scheduler, has looked at is an ordinary tensor to everybody else."""
    model = Two()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    with optimizer.no_sync():
        model.a.sum().backward()
    grad = model.a.grad
    uses: list[Callable[[Tensor], Any]] = [
        repr,
        copy.deepcopy,
        pickle.dumps,
        torch.sum,
        lambda g: g[0],
        lambda g: g.mul_(1.0),
        lambda g: g + model.a,
        lambda g: g.numpy(),
        lambda g: torch._foreach_norm([g]),
        lambda g: nn.utils.clip_grad_norm_([model.a], 1e9),
    ]
    for use in uses:
        _ = optimizer.param_groups
        assert model.a.grad is grad and isinstance(grad, Tensor) and grad.dtype == torch.float32
        use(grad)
        assert type(grad) is Tensor, use
    _ = optimizer.param_groups
    assert type(grad.clone()) is Tensor and type(copy.deepcopy(grad)) is Tensor
    _ = optimizer.param_groups
    with optimizer.no_sync():
        model.a.sum().backward()
    assert model.a.grad is grad and grad.tolist() == [2.0] * 5
    _ = optimizer.param_groups
    model.b.sum().backward()
    optimizer.step()
    close(model.a, 0.8)
    _ = optimizer.param_groups
    optimizer.close()
    model.a.grad = torch.full((5,), 2.0)
    assert type(model.a.grad * 1) is Tensor and type(optimizer.param_groups[0]["params"][0].grad) is Tensor


@on_ranks(2)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and clip"])
@pytest.mark.parametrize("kind", ["shards", "whole", "assigned", "all_reduce"])
def test_field_h4_ranks_skip_together_where_all_is_local(kind: str, explicit: bool) -> None:
    options = {"whole": {"shard": False}, "all_reduce": {"schedule": "ddp"}}.get(kind, {})
    twin = Twin(Two(), sgd(momentum=0.9), **options)
    scales = {twin.model: scaler(), twin.plain: scaler()}
    for bad in (False, True, False, True, True, False):
        twin.zero_grad()
        factor = math.inf if bad else 1.0
        for _ in range(2):
            twin.backward(
                lambda m, r, f=factor: scales[m].scale(((m.a * (r + 1)).sum() + m.b.sum()) * (f if r == 1 else 1.0)),
                local=True,
            )
        if kind == "assigned":
            for param in twin.model.parameters():
                assert param.grad is not None
                param.grad = param.grad.clone()
        for model, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
            if explicit:
                scales[model].unscale_(optimizer)
                if model is twin.model:
                    twin.optimizer.clip_grad_norm_(3.0)
                else:
                    nn.utils.clip_grad_norm_(twin.plain.parameters(), 3.0)
            scales[model].step(optimizer)
            scales[model].update()
        assert scales[twin.model].state_dict() == scales[twin.plain].state_dict()
        assert dear.allgather(torch.tensor([scales[twin.model].get_scale()])).unique().numel() == 1
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        nearly(mine, theirs)
    assert_same_everywhere(twin.model)


# ------------------------------------------------------------------------------------------------------------- options


def options_differ(name: str, first: str, second: str) -> str:
    return rf"In parameter group 0, '{name}' is {first} on rank 0 and {second} on rank 1\. No weight"


KINDS: dict[str, tuple[Callable[[nn.Module], optim.Optimizer], dict[str, Any]]] = {
    "shards": (sgd(), {}),
    "adam": (made(optim.Adam, lr=0.1), {}),
    "one_bucket_each": (sgd(), {"fusion": None}),
    "all_reduce": (sgd(), {"schedule": "ddp"}),
    "whole": (made(Own, lr=0.1), {}),
    "shard_false": (sgd(), {"shard": False}),
}


@contextlib.contextmanager
def refused(twin: Twin, message: str) -> Iterator[None]:
    """The step inside is an error on every rank, and no weight changes."""
    memory = [param.data for param in twin.model.parameters()]  # what waits for the failed step cannot be read
    before = [weight.clone() for weight in memory]
    with raises_at_once(dear.ScheduleError, message):
        yield
    twin.optimizer.close()
    assert all(torch.equal(weight, then) for weight, then in zip(memory, before, strict=True))


def step_and_wait(twin: Twin) -> None:
    twin.optimizer.step()
    twin.optimizer.synchronize()


def loss(m: nn.Module, r: int) -> Tensor:
    out: Tensor = m(ones(r)).square().sum()
    return out


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_step", [False, True], ids=["later", "first step"])
def test_field_s5_a_learning_rate_set_on_one_rank(kind: str, first_step: bool) -> None:
    make, options = KINDS[kind]
    twin = Twin(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), make, **options)
    if not first_step:
        twin.train(loss, 2)
    twin.zero_grad()
    twin.optimizer.synchronize()
    twin.backward(loss)
    if dear.rank() == 0:  # between backward and step
        twin.optimizer.param_groups[0]["lr"] = 0.05
    with refused(twin, options_differ("lr", r"0\.05", r"0\.1") + r".*per_rank_options=\('lr',\)"):
        step_and_wait(twin)


@on_ranks(3)
def test_field_s5_each_ranks_own_loss_in_reduce_lr_on_plateau() -> None:
    twin = Twin(nn.Linear(4, 3))
    plateau = optim.lr_scheduler.ReduceLROnPlateau(twin.optimizer, patience=0, factor=0.5)
    twin.train(loss, 1)
    for epoch in range(2):
        plateau.step(1.0 if dear.rank() == 1 else 1.0 - epoch / 2)  # on rank 1 it does not improve
    twin.zero_grad()
    twin.optimizer.synchronize()
    twin.backward(loss)
    with refused(
        twin, r"In parameter group 0, 'lr' is 0\.1 on ranks 0, 2 and 0\.05 on rank 1.*dear\.allreduce\(loss\)"
    ):
        step_and_wait(twin)


@on_ranks(2)
@pytest.mark.parametrize("name", ["betas", "weight_decay", "lr"])
def test_field_s5_other_options_other_groups_and_tensors(name: str) -> None:
    def make(m: nn.Module) -> optim.Optimizer:
        groups = [{"params": [m.weight]}, {"params": [m.bias]}]
        return optim.Adam(groups, lr=torch.tensor(0.5), foreach=False)

    twin = Twin(nn.Linear(4, 3), make)
    twin.train(loss, 2)
    twin.zero_grad()
    twin.optimizer.synchronize()
    twin.backward(loss)
    group = twin.optimizer.param_groups[1]
    if dear.rank() == 1:
        if name == "lr":
            group["lr"].fill_(0.25)  # the same tensor
        else:
            group[name] = {"betas": (0.5, 0.999), "weight_decay": 0.25}[name]
    values = {
        "betas": (r"\[0\.9, 0\.999\]", r"\[0\.5, 0\.999\]"),
        "weight_decay": ("0.0", "0.25"),
        "lr": ("0.5", "0.25"),
    }
    first, second = values[name]
    with refused(twin, rf"In parameter group [01], '{name}' is {first} on rank 0 and {second} on rank 1"):
        step_and_wait(twin)


@on_ranks(2)
def test_field_s5_filled_schedules_read_options_in_the_backward() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    specs = None
    twin = Twin(model, fusion=None)
    twin.optimizer.measure()
    twin.train(loss, 5)
    specs = twin.optimizer.profile
    twin.check(exact=False)
    twin.optimizer.close()
    twin = Twin(model, fusion=None, schedule="dear-fill", profile=specs)
    twin.train(loss, 2)
    twin.zero_grad()
    twin.optimizer.synchronize()
    if dear.rank() == 0:
        twin.optimizer.param_groups[0]["lr"] = 0.05
    twin.backward(loss)
    with refused(twin, options_differ("lr", r"0\.05", r"0\.1")):
        step_and_wait(twin)


@on_ranks(2)
def test_field_s5_no_alarm_for_what_means_the_same() -> None:
    def make(m: nn.Module) -> optim.Optimizer:
        return optim.Adam(m.parameters(), lr=0.5, weight_decay=0.0)

    twin = Twin(nn.Linear(4, 3), make)
    twin.train(loss, 1)
    group, other = twin.optimizer.param_groups[0], dear.rank() == 1
    changes: list[Callable[[], Any]] = [
        lambda: group.update(lr=1 if other else 1.0),
        lambda: group.update(lr=numpy.float64(0.5) if other else 0.5),
        lambda: group.update(lr=torch.tensor(0.25) if other else 0.25),
        lambda: group.update(lr=0.25, weight_decay=-0.0 if other else 0),
        lambda: group.update(betas=[0.5, 0.75] if other else (0.5, 0.75)),
        lambda: group.update(foreach=False if other else None),
        lambda: optim.lr_scheduler.LambdaLR(twin.optimizer, lambda _: 1.0) if other else None,  # adds a key
        lambda: group.update(name=f"of rank {dear.rank()}", seen=object()),
        lambda: group.update(eps=float("nan")),
    ]
    for change in changes:
        twin.zero_grad()
        twin.optimizer.synchronize()
        twin.backward(loss)
        change()
        step_and_wait(twin)


@on_ranks(2)
def test_field_s5_options_that_differ_until_the_step_only() -> None:
    """What counts is what the step uses, not what a clip or a look at a gradient came across."""
    twin = Twin(nn.Linear(4, 3))
    for step in range(3):
        twin.zero_grad()
        twin.backward(loss)
        twin.optimizer.param_groups[0]["lr"] = 0.1 + dear.rank()
        twin.optimizer.clip_grad_norm_(1e9)
        twin.optimizer.full_grad(twin.model.weight)
        for group in (twin.optimizer.param_groups[0], twin.plain_optimizer.param_groups[0]):
            group["lr"] = 0.5 / (step + 1)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
def test_field_s5_options_of_each_rank_on_purpose() -> None:
    model = nn.Linear(4, 3)
    torch.manual_seed(0)
    wrapped = optim.SGD(model.parameters(), lr=0.1 * (dear.rank() + 1), weight_decay=0.0)
    optimizer = dear.DistributedOptimizer(wrapped, model, per_rank_options=("lr",))
    for inside_join in (False, True):
        with optimizer.join() if inside_join else contextlib.nullcontext():
            for _ in range(2 + (dear.rank() if inside_join else 0)):
                optimizer.zero_grad()
                loss(model, 0).backward()
                optimizer.step()
    assert wrapped.param_groups[0]["lr"] == 0.1 * (dear.rank() + 1), "followers keep what is theirs"
    assert_same_everywhere(model)
    if dear.rank() == 1:
        wrapped.param_groups[0]["weight_decay"] = 0.5
    optimizer.zero_grad()
    loss(model, 0).backward()
    with raises_at_once(dear.ScheduleError, r"'weight_decay' is 0\.0 on rank 0 and 0\.5 on rank 1"):
        optimizer.step()
        optimizer.synchronize()


@on_ranks(2)
def test_field_s5_declarations_that_cannot_be() -> None:
    model = nn.Linear(4, 3)
    for names in ("lr", ("learning_rate",), (3,), None):
        with raises_at_once(dear.ArgumentError, "per_rank_options"):
            dear.DistributedOptimizer(optim.SGD(model.parameters()), model, per_rank_options=names)  # type: ignore[arg-type]
    for options in ({"schedule": "ddp"}, {"shard": False}):
        with raises_at_once(dear.ArgumentError, "would let the ranks' weights drift apart"):
            dear.DistributedOptimizer(optim.SGD(model.parameters()), model, per_rank_options=["lr"], **options)
    dear.DistributedOptimizer(Own(model.parameters()), model, per_rank_options=["lr"]).close()  # its own business


@on_ranks(2)
def test_field_s5_inside_join() -> None:
    """A rank without batches takes over options; those that have some must agree; keys of schedulers do not count."""
    twin = Twin(nn.Linear(4, 3))
    if dear.rank() == 1:
        optim.lr_scheduler.StepLR(twin.wrapped, 10)
    with twin.optimizer.join():
        for step in range(2 + dear.rank()):
            twin.optimizer.param_groups[0]["lr"] = 0.5 / (step + 1)
            twin.optimizer.zero_grad()
            loss(twin.model, dear.rank()).backward()
            twin.optimizer.step()
    assert twin.optimizer.param_groups[0]["lr"] == 0.5 / 3
    assert_same_everywhere(twin.model)
    with raises_at_once(dear.ScheduleError, r"rank 0 with lr=1\.0, rank 1 with lr=2\.0"), twin.optimizer.join():
        twin.optimizer.param_groups[0]["lr"] = 1 + dear.rank()
        twin.optimizer.zero_grad()
        loss(twin.model, dear.rank()).backward()
        step_and_wait(twin)


def test_field_s5_a_ballot_is_made_again_only_if_something_changed() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = optim.Adam([{"params": [param]}], lr=0.5)
    agreed = AgreedOptions(optimizer, ())
    assert agreed.take_ballot().values is None, "not at a step"

    def ballot() -> Any:
        agreed.ask()
        return agreed.take_ballot()

    first = ballot()
    assert ballot() is first
    group = optimizer.param_groups[0]
    group["lr"] = 0.25
    second = ballot()
    assert second.code != first.code and ballot() is second
    both = [max(pair) for pair in zip(first.code, second.code, strict=True)]
    assert is_unanimous(first.code) and is_unanimous([0] * 8) and not is_unanimous(both)
    assert "'lr' is 0.5 on rank 0 and 0.25 on rank 2." in difference([first.values, None, second.values])
    group["betas"] = [0.5, 0.75]
    third = ballot()
    group["betas"][0] = 0.25  # in place
    assert ballot().code != third.code
    group["lr"] = torch.tensor([0.25])
    fourth = ballot()
    group["lr"].mul_(2)
    assert ballot().code != fourth.code
    last = ballot()
    del group["eps"]
    assert "'eps' is 1e-08 on rank 0 and None on rank 1" in difference([last.values, ballot().values])


# --------------------------------------------------------------------------------------------------------------- hooks


@on_ranks(2)
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "with a scheduler"])
@pytest.mark.parametrize("kind", ["shards", "one_bucket_each", "all_reduce", "whole", "shard_false"])
def test_field_s8_global_hooks_run_once_a_step(kind: str, scheduled: bool) -> None:
    make, options = KINDS[kind]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    wrapped = make(model)
    schedule = optim.lr_scheduler.ConstantLR(wrapped) if scheduled else None
    optimizer = dear.DistributedOptimizer(wrapped, model, **options)
    calls: list[tuple[str, bool, bool]] = []

    def hook(when: str, optimizer_of_hook: optim.Optimizer, *_: Any) -> None:
        calls.append((when, optimizer_of_hook is optimizer, threading.current_thread() is threading.main_thread()))

    own: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(functools.partial(hook, "before")),
        register_optimizer_step_post_hook(functools.partial(hook, "after")),
        wrapped.register_step_pre_hook(lambda o, *_: own.append(("before", o is wrapped))),
        wrapped.register_step_post_hook(lambda o, *_: own.append(("after", o is wrapped))),
    ]
    try:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, dear.rank()).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.synchronize()
        optimizer.state_dict()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("before", True, True), ("after", True, True)] * 3
    assert own == [("before", True), ("after", True)] * 3


@on_ranks(2)
@pytest.mark.parametrize("cls", [optim.SGD, Own])
def test_field_s8_profilers_see_one_step(cls: type[optim.SGD]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = dear.DistributedOptimizer(cls(model.parameters(), lr=0.1), model, fusion=None)
    for profiled in (False, True):
        optimizer.zero_grad()
        loss(model, dear.rank()).backward()
        with torch.autograd.profiler.profile() if profiled else contextlib.nullcontext() as profile:
            optimizer.step()
            optimizer.synchronize()
    names = [event.name for event in profile.function_events if event.name.startswith("Optimizer.step")]
    assert names == ["Optimizer.step#DistributedOptimizer.step"]


@on_ranks(2)
def test_field_s8_hooks_that_change_arguments_and_steps_that_were_replaced() -> None:
    """Neighbours: as in plain PyTorch, a hook of a whole optimizer may change what its `step` is called with."""

    class Scaled(optim.SGD):
        def step(self, closure: Any = None, *, times: int = 1) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad * self.param_groups[0]["lr"] * times)

    def make(m: nn.Module) -> optim.Optimizer:
        made_one = Scaled(m.parameters(), lr=0.1)
        made_one.register_step_pre_hook(lambda o, args, kwargs: (args, {**kwargs, "times": 2}))
        return made_one

    twin = Twin(nn.Linear(4, 3), make)
    twin.train(loss, 2)
    twin.check()

    def replaced(m: nn.Module) -> optim.Optimizer:
        made_one = optim.SGD(m.parameters(), lr=0.1)
        original = made_one.step

        @functools.wraps(original)
        def twice() -> None:
            original()
            original()

        made_one.step = twice  # type: ignore[method-assign]
        return made_one

    twin = Twin(nn.Linear(4, 3), replaced)
    twin.train(loss, 2)
    twin.check()
