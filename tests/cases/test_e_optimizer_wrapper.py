"""E. The wrapper is the optimizer that it wraps: options, groups, state, schedulers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, ones, raises_at_once, sgd

lr_scheduler = optim.lr_scheduler


def loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r)).sum()


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.5, anneal_epochs=3),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_case_040_apex_978_schedulers(name: str) -> None:
    twin = Twin(nn.Linear(4, 1), sgd(momentum=0.9))
    assert isinstance(twin.optimizer, optim.Optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "scheduler.step() before optimizer.step()" is wrong here
        schedulers = twin.both(lambda m, o: SCHEDULERS[name](o))
        for _ in range(6):
            twin.train(loss)
            for scheduler in schedulers:
                scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            rates = [group["lr"] for group in twin.wrapped.param_groups]
            assert rates == schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    twin.check()


@on_ranks(2)
def test_case_040_a_scheduler_is_saved_and_loaded() -> None:
    twin = Twin(nn.Linear(4, 1))
    schedulers = twin.both(lambda m, o: SCHEDULERS["OneCycleLR"](o))
    for _ in range(3):
        twin.train(loss)
        for scheduler in schedulers:
            scheduler.step()
    state = schedulers[0].state_dict()
    schedulers = twin.both(lambda m, o: SCHEDULERS["OneCycleLR"](o))
    for scheduler in schedulers:
        scheduler.load_state_dict(state)
    for _ in range(3):
        twin.train(loss)
        for scheduler in schedulers:
            scheduler.step()
    twin.check()


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "lr": lambda group: group.update(lr=0.01),
    "momentum": lambda group: group.update(momentum=0.5),
    "weight_decay": lambda group: group.update(weight_decay=0.3),
    "maximize": lambda group: group.update(maximize=True),
    "nesterov": lambda group: group.update(nesterov=True, dampening=0),
}


@on_ranks(2)
@pytest.mark.parametrize("through", ["wrapper", "original", "scheduler_made_before", "kept_group"])
def test_case_041_fairscale_66_edits_of_param_groups(through: str) -> None:
    """Also microsoft/dp-transformers#43, pytorch/ignite#545."""
    for name, edit in EDITS.items():
        twin = Twin(nn.Linear(4, 1), sgd(momentum=0.9), fusion=None)
        group = twin.wrapped.param_groups[0]
        before, plain = (SCHEDULERS["StepLR"](o) for o in (twin.wrapped, twin.plain_optimizer))
        for k in range(4):
            twin.train(loss)
            if through == "scheduler_made_before":
                before.step(), plain.step()
            if k == 1:
                groups = {"wrapper": twin.optimizer.param_groups[0], "kept_group": group}
                edit(groups.get(through, twin.wrapped.param_groups[0]))
                edit(twin.plain_optimizer.param_groups[0])
        twin.check()
        assert twin.optimizer.param_groups[0] is group, name
        twin.optimizer.close()


@on_ranks(2)
def test_case_041_betas_and_tensor_options() -> None:
    twin = Twin(nn.Linear(4, 1), made(optim.Adam, lr=torch.tensor(0.1)))
    for k in range(4):
        twin.train(loss)
        for group in (twin.optimizer.param_groups[0], twin.plain_optimizer.param_groups[0]):
            group["lr"].mul_(0.5)  # in place: must not reach the step that is under way
            if k == 1:
                group["betas"], group["weight_decay"], group["eps"] = (0.5, 0.7), 0.1, 1e-3
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax])
def test_case_042_megatron_5974_no_warm_up_step(kind: type[optim.Optimizer]) -> None:
    """Also pytorch/torchtitan PR#4382, DeepSpeed PR#5104."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(5))])
    twin = Twin(model, made(kind, lr=0.1, weight_decay=0.1))
    assert twin.optimizer.state_dict()["state"] == {}, "no state before the first step"
    twin.train(lambda m, r: m[0].sum())
    if kind is optim.AdamW:
        close(model[0], -0.1)
    twin.check()
    assert float(twin.optimizer.state_dict()["state"][0]["step"]) == 1.0


@on_ranks(2)
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "fill_", "data", "assign_data", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_043_megatron_174_weights_loaded_after_wrapping(how: str, dtype: torch.dtype, fusion: Any) -> None:
    """Also NovaSky-AI/SkyRL PR#2149."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 1).to(dtype), nn.Parameter(torch.zeros(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.to(dtype)).sum() + self.b.sum()

    def load(m: nn.Module) -> None:
        with torch.no_grad():
            if how == "load_state_dict":
                m.load_state_dict({name: torch.full_like(value, 5.0) for name, value in m.state_dict().items()})
            elif how == "vector":
                nn.utils.vector_to_parameters(torch.full((9,), 5.0, dtype=dtype), m.parameters())
            for p in m.parameters():
                if how == "copy_":
                    p.copy_(torch.full_like(p, 5.0))
                elif how == "fill_":
                    p.fill_(5.0)
                elif how == "data":
                    p.data.fill_(5.0)
                elif how == "assign_data":
                    p.data = torch.full_like(p, 5.0)

    model = Net()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.0), model, fusion=fusion)
    for pending in (False, True):
        if pending:  # a gather is on its way when the weights are loaded
            optimizer.param_groups[0]["lr"] = 0.5
            model(ones(dear.rank(), 1, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.0
        load(model)
        for lr, expected in ((0.0, 5.0), (0.1, 5.0 - 0.1 * (dear.size() + 1) / 2)):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            model(ones(dear.rank(), 1, 5)).backward()
            optimizer.step()
            for found, value in ((model.a.weight, expected), (model.b, 5.0 - lr)):
                torch.testing.assert_close(found.detach(), torch.full_like(found, value), rtol=4e-3, atol=0)
        assert_same_everywhere(model)


@on_ranks(2)
def test_case_043_small_updates_go_on_after_loading_into_masters() -> None:
    """Neighbour: loading the very same bf16 values must not throw the masters' bits away, other values must."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=2.0**-10), model)

    def step() -> None:
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step()

    for _ in range(50):
        step()
    with torch.no_grad():
        model[0].fill_(2.0)
    for _ in range(50):
        step()
    close(model[0].float(), torch.tensor(2.0 - 50 * 2.0**-10).bfloat16().float())


class TwoLayers(nn.Sequential):
    def __init__(self, size: int = 5) -> None:
        super().__init__(nn.Linear(size, 4), nn.Linear(4, 3))


def grouped(**options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    def make(m: nn.Module) -> optim.Optimizer:
        weights = [p for p in m.parameters() if p.dim() > 1]
        biases = [p for p in m.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": 0.5, **options},
            {"params": biases, "lr": 0.3},
        ]
        return optim.SGD(groups, lr=0.1)

    return make


@on_ranks(2)
@pytest.mark.parametrize("named", [False, True])
def test_case_044_pytorch_59973_parameter_groups(named: bool, fusion: Any) -> None:
    """Also pytorch/pytorch#71347."""

    def make(m: nn.Module) -> optim.Optimizer:
        if not named:
            return grouped()(m)
        pairs = list(m.named_parameters())
        return optim.Adam(
            [{"params": pairs[1:]}, {"params": pairs[:1], "lr": 0.01, "weight_decay": 0.2}], lr=0.1, eps=0.1
        )

    twin = Twin(TwoLayers(), make, fusion=fusion)
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    assert [len(g["params"]) for g in twin.optimizer.param_groups] == [
        len(g["params"]) for g in twin.plain_optimizer.param_groups
    ]
    assert list(twin.optimizer.state_dict()) == list(twin.plain_optimizer.state_dict())
    twin.check()


@on_ranks(3)
@pytest.mark.parametrize("order", ["weights_first", "biases_first"])
def test_case_045_fairscale_697_decay_stops_at_group_borders(order: str) -> None:
    """Also pytorch/pytorch#101343."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for k in range(5):
                self.register_parameter(f"w{k}", nn.Parameter(torch.ones(5)))
                self.register_parameter(f"b{k}", nn.Parameter(torch.ones(4)))

    for fusion in (None, 25.0, 4e-5, dear.NearbyLayers(3)):
        model = Layers()
        named = dict(model.named_parameters())
        weights, biases = ([p for n, p in named.items() if n[0] == c] for c in "wb")
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        optimizer = dear.DistributedOptimizer(
            optim.SGD(groups if order == "weights_first" else groups[::-1], lr=1.0), model, fusion=fusion
        )
        for half in (0.5, 0.25):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            for p in weights:
                assert p.tolist() == [half] * 5
            for p in biases:
                assert p.tolist() == [1.0] * 4
        optimizer.close()


@on_ranks(2)
def test_case_046_soup_336_an_empty_group_stays() -> None:
    def make(m: nn.Module) -> optim.Optimizer:
        return optim.SGD([{"params": [*m.parameters()]}, {"params": [], "lr": 0.7}], lr=0.1)

    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(192))
    twin = Twin(model, make)
    schedulers = twin.both(lambda m, o: lr_scheduler.StepLR(o, 1, gamma=0.5))
    for _ in range(2):
        twin.train(lambda m, r: torch.stack([p.sum() for p in m]).sum() * (r + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert [len(g["params"]) for g in twin.optimizer.param_groups] == [192, 0]
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [0.025, 0.175]
    state = twin.optimizer.state_dict()
    assert [len(g["params"]) for g in state["param_groups"]] == [192, 0]
    twin.optimizer.load_state_dict(state)
    twin.check()


@on_ranks(2)
def test_case_047_horovod_2181_part_of_the_model(fusion: Any) -> None:
    """Also horovod/horovod#1389, hpcaitech/ColossalAI#5909: body trainable, optimizer over the head only."""
    twin = Twin(TwoLayers(), lambda m: optim.SGD(m[1].parameters(), lr=0.1), fusion=fusion)
    start = twin.model[0].weight.detach().clone()
    for _ in range(3):
        twin.zero_grad()
        twin.model.zero_grad()
        twin.plain.zero_grad()
        twin.backward(lambda m, r: m(ones(r, 2, 5)).square().mean())
        twin.step()
    assert torch.equal(twin.model[0].weight.detach(), start)
    names = [slot.fqn for bucket in twin.optimizer.plan.buckets for slot in bucket.slots]
    assert set(names) == {"1.weight", "1.bias"}, "the body is not communicated"
    assert twin.model[0].weight.grad is not None and twin.model[0].weight.grad.isfinite().all(), "plain local gradients"
    twin.check()


@on_ranks(2)
def test_case_047_parameters_that_are_not_in_the_model() -> None:
    model, other = TwoLayers(), nn.Linear(2, 2)
    with raises_at_once(dear.ArgumentError, r"parameter 4 of group 0 \(shape \(2, 2\)\).*not in the model.*ModuleList"):
        dear.DistributedOptimizer(optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), model)
    both = nn.ModuleList([model, other])
    dear.DistributedOptimizer(optim.SGD(both.parameters(), lr=0.1), both).close()


class Layerwise(optim.Optimizer):
    """p -= lr * g * |p| / |g|, as LARS and LAMB scale."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["layerwise", "adafactor", "muon"])
def test_case_048_deepspeed_490_layerwise_optimizers(kind: str, fusion: Any) -> None:
    """Also DeepSpeed#88, BaguaSys/bagua#335."""
    make = {
        "layerwise": made(Layerwise),
        "adafactor": made(optim.Adafactor, lr=0.1),
        "muon": made(getattr(optim, "Muon", optim.Adafactor), lr=0.1),
    }[kind]
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    twin = Twin(model, make, fusion=fusion)
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    if kind == "muon" and torch.get_default_dtype() == torch.bfloat16:
        # These gradients have rank one; orthogonalised, their rounding becomes as large as they are.
        twin.optimizer.synchronize()
        assert_same_everywhere(model)
    else:
        twin.check()
    with raises_at_once(dear.ArgumentError, "not known to be element-wise"):
        other = copy.deepcopy(twin.plain)
        dear.DistributedOptimizer(make(other), other, shard=True)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adam_amsgrad", "frozen", "asgd"])
def test_case_049_horovod_392_broadcast_of_optimizer_state(kind: str) -> None:
    """Also horovod/horovod#526, PR#548, PR#2624."""
    makes: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
        "sgd": sgd(lr=0.5),
        "momentum": sgd(lr=0.5, momentum=0.9),
        "adam": made(optim.Adam, lr=0.5, betas=(0.5, 0.6)),
        "adam_amsgrad": made(optim.Adam, lr=0.5, amsgrad=True, foreach=None),
        "frozen": sgd(lr=0.5, momentum=0.9),
        "asgd": made(optim.ASGD, lr=0.5),
    }
    model = TwoLayers()
    if kind == "frozen":
        model[0].requires_grad_(False)
    optimizer = makes[kind](model)
    if dear.rank() == 0:  # "a checkpoint": other options, and a history
        optimizer.param_groups[0]["lr"] = 0.01
        for _ in range(3):
            optimizer.zero_grad()
            model(ones(4, 2, 5)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    dear.broadcast_optimizer_state(optimizer)
    dear.broadcast_parameters(model.state_dict())
    described = dear.broadcast_object(str(optimizer.state_dict()))
    assert str(optimizer.state_dict()) == described
    assert optimizer.param_groups[0]["lr"] == 0.01
    twin = Twin(model, lambda m: _with_state(makes[kind](m), optimizer.state_dict()))
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    twin.check()


def _with_state(optimizer: optim.Optimizer, state: dict[str, Any]) -> optim.Optimizer:
    optimizer.load_state_dict(state)
    return optimizer


class SignSGD(optim.SGD):
    """A user's subclass with its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


@on_ranks(2)
def test_case_050_horovod_3529_users_own_step(fusion: Any) -> None:
    twin = Twin(TwoLayers(), made(SignSGD, lr=0.1), fusion=fusion)
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["patched_step", "hooks", "patched_instance_of_adam"])
def test_case_050_other_ways_to_change_a_step(how: str) -> None:
    """Neighbours: a step replaced on the instance, and hooks around `step`: run, or refused; never left out."""
    model = TwoLayers()
    wrapped: Any = optim.Adam(model.parameters()) if how.endswith("adam") else optim.SGD(model.parameters(), lr=0.1)
    if how == "hooks":
        calls = []
        wrapped.register_step_pre_hook(lambda *_: calls.append("before"))
        wrapped.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer = dear.DistributedOptimizer(wrapped, model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("wrapper"))
        optimizer.zero_grad()
        model(ones(dear.rank(), 2, 5)).sum().backward()
        optimizer.step()
        assert calls == ["wrapper", "before", "after"]
    else:
        wrapped.step = lambda closure=None: None
        start = model[0].weight.detach().clone()
        optimizer = dear.DistributedOptimizer(wrapped, model)
        optimizer.zero_grad()
        model(ones(dear.rank(), 2, 5)).sum().backward()
        optimizer.step()
        assert torch.equal(dear.broadcast(start), model[0].weight.detach()), "the user's own step, which does nothing"
        with raises_at_once(dear.ArgumentError, "not known to be element-wise"):
            optimizer.close()
            dear.DistributedOptimizer(wrapped, model, shard=True)


@on_ranks(2)
def test_case_050_hooks_around_state_dict() -> None:
    twin = Twin(TwoLayers(), sgd(momentum=0.9))
    calls = []
    for _, o in ((0, twin.optimizer), (1, twin.plain_optimizer)):
        o.register_state_dict_pre_hook(lambda _: calls.append("pre"))
        o.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        o.register_load_state_dict_pre_hook(lambda _, state: {**state, "mine": calls.append(state["mine"])})
        o.register_load_state_dict_post_hook(lambda _: calls.append("post"))
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean())
    for o in (twin.optimizer, twin.plain_optimizer):
        o.load_state_dict(o.state_dict())
    assert calls == ["pre", 1, "post"] * 2
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean())
    twin.check()


@on_ranks(2)
def test_case_050_sparse_adam_is_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with raises_at_once(dear.ArgumentError, "SparseAdam cannot be distributed: it needs sparse gradients"):
        dear.DistributedOptimizer(optim.SparseAdam(model.parameters()), model)


@on_ranks(2)
def test_case_042_helpers_for_checkpoints_take_no_hidden_step() -> None:
    """Neighbour: torch.distributed.checkpoint.state_dict takes a step to create a state that it finds missing."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    twin = Twin(TwoLayers(), made(optim.Adam, lr=0.1, eps=0.01))
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 2)
    twin.zero_grad()
    states = [get_optimizer_state_dict(twin.model, twin.optimizer) for _ in range(2)]
    expected = get_optimizer_state_dict(twin.plain, twin.plain_optimizer)
    for state in states:
        for name, per_param in expected["state"].items():
            for key, value in per_param.items():
                assert torch.equal(state["state"][name][key], value), f"{name} {key}"
    set_optimizer_state_dict(twin.model, twin.optimizer, states[0])
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 2)
    twin.check()


@on_ranks(2)
def test_case_049_the_state_is_divided_and_says_so() -> None:
    """Neighbour: `optimizer.state[p]`, `optimizer.state.clear()`, an assigned state."""
    twin = Twin(TwoLayers(), made(optim.Adam, lr=0.1, eps=0.01))
    param = twin.model[0].weight
    assert not twin.optimizer.state
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean())
    assert len(twin.optimizer.state) == 4 and param in list(twin.optimizer.state)
    acts: list[Callable[[Any], Any]] = [
        lambda state: state[param],
        lambda state: state.clear(),
        lambda state: state.pop(param),
        lambda state: state.update({param: {}}),
        lambda state: state.get(param),
    ]
    for act in acts:
        with raises_at_once(dear.ScheduleError, r"the optimizer state of '0\.weight' is divided.*load_state_dict\(\)"):
            act(twin.optimizer.state)
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean())
    twin.check()


@on_ranks(2)
def test_case_041_groups_are_assigned() -> None:
    """Neighbour: `optimizer.param_groups = [...]` and `optimizer.state = ...`."""
    twin = Twin(TwoLayers(), sgd(momentum=0.9))
    for _, o in ((0, twin.optimizer), (1, twin.plain_optimizer)):
        o.param_groups = [{**o.param_groups[0], "lr": 0.03}]
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 2)
    twin.check()
    with raises_at_once(dear.ScheduleError, r"load_state_dict\(\)"):
        twin.optimizer.state = {}
