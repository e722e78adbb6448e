"""H. Changes of the model after wrapping: right, or an error at the next step that names the parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import prune

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, on_ranks, ones, raises_at_once, sgd


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Linear(4, 3))


def loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r, 2, 5)).square().mean()


@on_ranks(2)
def test_case_065_detectron2_2486_unfreezing_is_reported() -> None:
    """Also JDAI-CV/fast-reid#178, NVIDIA/apex PR#46: frozen at wrap, trainable at step 3."""
    model = Net()
    model[0].requires_grad_(False)
    twin = Twin(model)
    twin.train(loss, 2)
    model[0].requires_grad_(True)
    twin.optimizer.zero_grad()
    loss(model, dear.rank()).backward()
    with raises_at_once(
        dear.ScheduleError, r"'0\.weight' was frozen when the optimizer was wrapped.*close\(\) and wrap"
    ):
        twin.optimizer.step()
    twin.optimizer.close()  # what the error says to do
    for p in model.parameters():
        p.grad = None
    twin.plain[0].requires_grad_(True)
    twin.optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    twin.train(loss, 2)
    twin.check()


@on_ranks(2)
def test_case_065_freezing_and_thawing(fusion: Any) -> None:
    """Trainable at wrap, frozen at step 3, thawed at step 6."""
    twin = Twin(Net(), sgd(momentum=0.9, weight_decay=0.1), fusion=fusion)
    for step in range(8):
        for m in (twin.model, twin.plain):
            m[0].requires_grad_(not 3 <= step < 6)
        twin.train(loss)
        twin.check()


@on_ranks(2)
def test_case_065_freezing_between_backward_and_step() -> None:
    twin = Twin(Net(), sgd(momentum=0.9))
    for step in range(4):
        twin.zero_grad()
        twin.backward(loss)
        for m in (twin.model, twin.plain):
            m[1].bias.requires_grad_(step % 2 == 0)
        twin.step()
    twin.check()


@on_ranks(2)
def test_case_065_a_parameter_that_never_was_in_the_optimizer_may_be_unfrozen() -> None:
    model = Net()
    model[0].requires_grad_(False)
    twin = Twin(model, lambda m: optim.SGD(m[1].parameters(), lr=0.1))
    twin.train(loss)
    for m in (twin.model, twin.plain):
        m[0].requires_grad_(True)
    twin.train(loss, 2)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["requires_grad", "no_grad", "eval", "only_head_in_optimizer"])
def test_case_066_fairscale_610_frozen_trunk_trained_head(how: str, fusion: Any) -> None:
    """Also fairscale#643."""

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5) if how == "eval" else nn.Tanh())
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(how != "no_grad"):
                y = self.trunk(x)
            return self.head(y)

    model = Trunk()
    if how in ("requires_grad", "eval"):
        model.trunk.requires_grad_(False)
    if how == "eval":
        model.trunk.eval()
    if how == "only_head_in_optimizer":
        twin = Twin(model, lambda m: optim.SGD(m.head.parameters(), lr=0.1), fusion=fusion)
    else:
        twin = Twin(model, fusion=fusion)
    for _ in range(3):
        twin.both(lambda m, _: m.zero_grad())
        twin.train(loss)
    twin.check()


@on_ranks(2)
def test_case_067_torchtitan_4282_nothing_is_registered_anew(fusion: Any) -> None:
    model = Net()
    model[0].bias.requires_grad_(False)
    before = [(name, id(p), p.requires_grad, type(p)) for name, p in model.named_parameters()]
    modules = [(name, id(m)) for name, m in model.named_modules()]
    keys = list(model.state_dict())
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    twin = Twin(model, fusion=fusion)
    twin.train(loss, 2)
    twin.optimizer.synchronize()
    for _ in range(2):
        assert [(name, id(p), p.requires_grad, type(p)) for name, p in model.named_parameters()] == before
        assert [(name, id(m)) for name, m in model.named_modules()] == modules
        assert list(model.state_dict()) == keys
        assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
        twin.optimizer.close()


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "double": (lambda m: m.double(), r"'0\.weight' was torch\.float32.*is torch\.float64.*Convert the model first"),
    "half": (lambda m: m.half(), r"'0\.weight' was torch\.float32.*is torch\.float16"),
    "bfloat16_of_a_part": (lambda m: m[1].bfloat16(), r"'1\.weight' was torch\.float32.*is torch\.bfloat16"),
    "to_meta": (lambda m: m.to("meta"), r"'0\.weight'.*(meta|no longer part)"),
    "data_of_another_shape": (lambda m: setattr(m[0].bias, "data", torch.ones(7)), r"'0\.bias'.*shape \(7,\)"),
    "assign": (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        r"'0\.weight' is no longer part of the model.*load_state_dict\(assign=True\).*close\(\), and wrap again",
    ),
    "a_new_parameter_object": (
        lambda m: setattr(m[1], "bias", nn.Parameter(m[1].bias.detach().clone())),
        r"'1\.bias' is no longer part",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_case_068_to_half_double_assign(name: str) -> None:
    change, says = CHANGES[name]
    model = Net()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.zero_grad()
    loss(model, dear.rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    change(model)
    with raises_at_once(dear.ScheduleError, says):
        x = ones(dear.rank(), 2, 5)
        if name != "to_meta" and name != "data_of_another_shape":
            for layer in model:
                x = layer(x.to(layer.weight.dtype))
            x.float().square().mean().backward()
        optimizer.step()


@on_ranks(2, dtypes=(torch.float32, torch.float64))  # weights that double lose more than bf16 has
@pytest.mark.parametrize("how", ["to_cpu", "there_and_back", "data", "memory_format", "share_memory", "apply"])
def test_case_068_changes_that_training_survives(how: str, fusion: Any) -> None:
    """Re-bound with the new values, in whichever memory they are now."""

    def change(m: nn.Module) -> None:
        if how == "to_cpu":
            m.to("cpu")
        elif how == "there_and_back":
            m.double().to(torch.get_default_dtype())
        elif how == "data":
            for p in m.parameters():
                p.data = p.data.clone() * 2
        elif how == "memory_format":
            m.to(memory_format=torch.channels_last)
        elif how == "share_memory":
            twin.optimizer.synchronize()
            m.share_memory()
        else:
            m.apply(lambda layer: layer.weight.data.mul_(0.5) if isinstance(layer, nn.Linear) else None)

    twin = Twin(Net(), sgd(momentum=0.9), fusion=fusion)
    for _ in range(3):
        twin.train(loss)
        if how != "to_cpu":  # which moves nothing; else gradients would be moved along
            twin.zero_grad()
        twin.both(lambda m, _: change(m))
        close(*twin.both(lambda m, _: m(ones(0, 2, 5))))
    twin.train(loss)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["share_memory", "double", "data"])
def test_case_068_a_module_is_not_moved_with_gradients_in_flight(how: str) -> None:
    """Neighbour: `.to()`, `.share_memory()` and `p.grad.data = ...` take gradients along."""
    twin = Twin(Net())
    twin.train(loss, 2)
    says = r"the memory of '0\.weight' cannot be moved.*synchronize\(\)" if how == "share_memory" else "being averaged"
    with raises_at_once(dear.ScheduleError, says):
        if how == "data":
            twin.model[0].weight.grad.data = torch.ones(4, 5)
        else:
            getattr(twin.model, how)()
    if how == "share_memory":
        twin.optimizer.synchronize()
        with raises_at_once(dear.ScheduleError, r"the gradient of '0\.weight' is being averaged"):
            twin.model.share_memory()
    if how != "double":
        twin.train(loss)
        twin.check()


MORE_CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "parametrizations_weight_norm": (
        lambda m: nn.utils.parametrizations.weight_norm(m[1]),
        r"'1\.weight' is no longer part of the model.*weight_norm",
    ),
    "old_weight_norm": (lambda m: nn.utils.weight_norm(m[1]), r"'1\.weight(_v)?' (is no longer part|was added)"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m[1]), r"'1\.weight(_orig)?'"),
    "parametrizations_spectral_norm": (
        lambda m: nn.utils.parametrizations.spectral_norm(m[1]),
        r"'1\.(weight|parametrizations\.weight\.original)'",
    ),
    "new_head": (lambda m: m.__setitem__(1, nn.Linear(4, 3)), r"'1\.weight' is no longer part of the model"),
    "one_layer_more": (lambda m: m.append(nn.Linear(3, 3)), r"'2\.weight' was added to the model after wrapping"),
    "a_registered_parameter": (
        lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2))),
        r"'extra' was added",
    ),
    "a_layer_less": (lambda m: m.pop(1), r"'1\.weight' is no longer part"),
    "prune": (
        lambda m: prune.l1_unstructured(m[1], "weight", 0.5),
        r"'1\.weight(_orig)?' (is no longer part|was added)",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", MORE_CHANGES)
def test_case_069_pytorch_61470_new_parameters_are_reported(name: str) -> None:
    change, says = MORE_CHANGES[name]
    if name == "old_weight_norm":
        torch.set_default_dtype(torch.float32)
    model = Net()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, dear.rank()).backward()
        optimizer.step()

    step()
    change(model)
    if name in ("spectral_norm", "old_weight_norm", "prune", "parametrizations_spectral_norm"):
        # these keep the Parameter under a new name: right, or reported
        try:
            step()
            step()
            optimizer.synchronize()
        except dear.ScheduleError as error:
            assert "close()" in str(error)
        else:
            assert_same_everywhere(model)
        return
    with raises_at_once(dear.ScheduleError, says):
        step()


@on_ranks(2)
def test_case_069_convert_sync_batchnorm() -> None:
    """New modules around the same Parameters: they see fresh weights and train on."""
    twin = Twin(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), sgd(momentum=0.9))
    for converted in (False, True):
        if converted:
            twin.model = nn.SyncBatchNorm.convert_sync_batchnorm(twin.model).eval()
            twin.plain.eval()
        for _ in range(2):
            twin.zero_grad()
            twin.backward(lambda m, r: (m.eval()(ones(r, 3, 5)) * torch.arange(4.0)).sum())
            twin.step()
        close(*twin.both(lambda m, _: m.eval()(ones(0, 3, 5))))
    assert isinstance(twin.model[1], nn.SyncBatchNorm)
    twin.check()


@on_ranks(2)
def test_case_069_modules_may_move_and_change_names() -> None:
    twin = Twin(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), sgd(momentum=0.9))
    twin.train(loss)
    for m in (twin.model, twin.plain):
        m[0] = nn.Sequential(m[0], nn.Tanh())
    twin.train(loss, 2)
    twin.check()


@on_ranks(2, group_timeout_s=3)
def test_case_069_a_change_on_one_rank_only_is_an_error_there_and_no_endless_wait() -> None:
    model = Net()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, dear.rank()).backward()
        optimizer.step()
    if dear.rank() == 1:
        model.append(nn.Linear(3, 3))
        optimizer.zero_grad()
        loss(model, 1).backward()
        with raises_at_once(dear.ScheduleError, r"'2\.weight' was added"):
            optimizer.step()
        optimizer.close()
        return
    optimizer.zero_grad()
    loss(model, 0).backward()
    with pytest.raises(
        dear.CommunicatorError, match=r"rank 0 of 2: .* failed\. Rank 1 (is silent|has not joined|failed)"
    ):
        optimizer.step()
        optimizer.synchronize()
