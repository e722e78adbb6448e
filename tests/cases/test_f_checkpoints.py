"""F. State and checkpoints: whole, in torch's own format, at any number of ranks, on every rank or an error."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, made, on_ranks, ones, raises_at_once, sgd
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import TOLERANCES, assert_bit_equal, assert_close


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r, 2, 5)).square().mean()


def same_on_all(m: nn.Module, r: int) -> Tensor:
    """A loss that does not depend on the rank, so that the mean is the same at any number of ranks."""
    return m(ones(0, 2, 5)).square().mean()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


MAKES: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adam": made(optim.Adam, lr=0.01, amsgrad=True),
    "momentum": sgd(momentum=0.9),
    "sgd": sgd(),
    "rmsprop": made(optim.RMSprop, momentum=0.9, centered=True),
}


def three_steps(kind: str, checkpoint: Any) -> Any:
    torch.manual_seed(0)
    twin = Twin(Net(), MAKES[kind])
    if checkpoint is not None:
        twin.model.load_state_dict(checkpoint["model"])
        twin.optimizer.load_state_dict(checkpoint["optimizer"])
    for _ in range(3):
        twin.optimizer.zero_grad()
        same_on_all(twin.model, 0).backward()
        twin.optimizer.step()
    return saved({"model": twin.model.state_dict(), "optimizer": twin.optimizer.state_dict()})


def plain_steps(kind: str, num_steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = MAKES[kind](model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        same_on_all(model, 0).backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("kind", MAKES)
def test_case_051_pytorch_65650_resume_on_another_number_of_ranks(pool: RankPool, kind: str) -> None:
    """Also deepspeedai/Megatron-DeepSpeed#439. The seed is `torch.manual_seed(0)` on both sides."""
    checkpoint = pool.run(three_steps, kind, None, size=2)[0]
    assert_close(checkpoint, plain_steps(kind, 3), TOLERANCES["summation order"])
    expected = plain_steps(kind, 6)
    for size in (3, 1, 2):
        for resumed in pool.run(three_steps, kind, checkpoint, size=size):
            assert_close(resumed, expected, TOLERANCES["summation order"])


@on_ranks(2)
@pytest.mark.parametrize("direction", ["to_plain", "from_plain"])
@pytest.mark.parametrize("kind", MAKES)
def test_case_051_the_plain_optimizers_own_format_both_ways(kind: str, direction: str) -> None:
    twin = Twin(Net(), MAKES[kind])
    twin.train(loss, 3)
    if direction == "to_plain":
        twin.plain_optimizer.load_state_dict(saved(twin.optimizer.state_dict()))
    else:
        twin.optimizer.load_state_dict(saved(twin.plain_optimizer.state_dict()))
    assert_bit_equal(twin.optimizer.state_dict(), twin.plain_optimizer.state_dict())
    twin.train(loss, 3)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("what", ["other_groups", "other_optimizer", "other_shapes", "not_a_state", "a_model"])
def test_case_051_checkpoints_that_do_not_fit(what: str) -> None:
    twin = Twin(Net(), MAKES["adam"])
    twin.train(loss)
    wrong: dict[str, Callable[[], Any]] = {
        "other_groups": lambda: made(optim.Adam)(nn.Linear(5, 7)).state_dict(),
        "other_optimizer": lambda: sgd()(Net()).state_dict(),
        "other_shapes": lambda: _with(twin.optimizer.state_dict(), 0, "exp_avg", torch.zeros(3, 3)),
        "not_a_state": lambda: {"lr": 0.1},
        "a_model": lambda: twin.model.state_dict(),
    }
    state = wrong[what]()
    with raises_at_once(dear.ArgumentError, r"(Build|Load|expects)"):
        twin.optimizer.load_state_dict(state)
    twin.train(loss)
    twin.check()  # nothing has changed


def _with(state: dict[str, Any], number: int, key: str, value: Any) -> dict[str, Any]:
    state["state"][number] = {**state["state"][number], key: value}
    return state


def save_on_rank_0_only(how: str) -> None:
    twin = Twin(Net(), MAKES["adam"])
    twin.train(loss)
    if dear.rank() == 0:
        saved(twin.optimizer.state_dict())
    if how == "goes_on":
        twin.train(loss)
    twin.optimizer.synchronize()


@pytest.mark.parametrize("how", ["goes_on", "ends"])
def test_case_052_transformers_48569_state_dict_on_rank_0_only(pool: RankPool, how: str) -> None:
    """Also EleutherAI/bergson PR#380, pytorch/pytorch#143536: an error that names the call and the other rank."""
    outcomes = pool.run(save_on_rank_0_only, how, size=2, group_timeout_s=3, expect_errors=True, timeout_s=20)
    assert_raised(outcomes, "CommunicatorError", r"state_dict\(\) of bucket 0.*[Rr]ank 1", ranks=[0])
    assert_raised(outcomes, "CommunicatorError", "Every rank calls the collective methods", ranks=[0])


@on_ranks(2)
def test_case_052_model_state_dict_on_rank_0_only_is_fine() -> None:
    twin = Twin(Net(), MAKES["adam"])
    for _ in range(2):
        twin.train(loss)
        if dear.rank() == 0:
            saved(twin.model.state_dict())
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("kind", MAKES)
def test_case_053_transformers_23111_rank_0s_file_is_whole(kind: str, fusion: Any) -> None:
    twin = Twin(Net(), MAKES[kind], fusion=fusion)
    twin.train(loss, 3)
    mine = saved({"model": twin.model.state_dict(), "optimizer": twin.optimizer.state_dict()})
    rank_0s = dear.broadcast_object(mine)
    assert_bit_equal(mine, rank_0s)
    for number, param in enumerate(twin.plain.parameters()):
        for value in rank_0s["optimizer"]["state"].get(number, {}).values():
            assert not isinstance(value, Tensor) or value.dim() == 0 or value.shape == param.shape, "whole, no shard"
    twin.optimizer.close()
    again = Twin(Net(), MAKES[kind], fusion=25.0)
    again.model.load_state_dict(rank_0s["model"])
    again.plain.load_state_dict(twin.plain.state_dict())
    again.optimizer.load_state_dict(rank_0s["optimizer"])
    again.plain_optimizer.load_state_dict(twin.plain_optimizer.state_dict())
    again.train(loss, 3)
    again.check()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", ["same_object", "new_object", "file"])
def test_case_054_apex_1842_masters_are_saved_exactly(dtype: torch.dtype, through: str) -> None:
    """Also TensorAuto/OpenTau#185."""

    def build() -> tuple[nn.Module, dear.DistributedOptimizer]:
        torch.manual_seed(0)
        model = Net().to(dtype)
        return model, dear.DistributedOptimizer(optim.Adam(model.parameters(), lr=1e-3), model)

    def train(model: nn.Module, optimizer: dear.DistributedOptimizer, num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(ones(dear.rank(), 2, 5).to(dtype)).float().square().mean().backward()
            optimizer.step()

    unbroken, first = build(), build()
    train(*unbroken, 10)
    train(*first, 5)
    state = {"model": first[0].state_dict(), "optimizer": first[1].state_dict()}
    state = saved(state) if through != "same_object" else state
    if through != "same_object":
        first[1].close()
        first = build()
    first[0].load_state_dict(state["model"])
    first[1].load_state_dict(state["optimizer"])
    train(*first, 5)
    assert_bit_equal(dict(first[0].state_dict()), dict(unbroken[0].state_dict()))
    assert_bit_equal(first[1].state_dict(), unbroken[1].state_dict())


def resume_masters(checkpoint: Any, num_steps: int) -> Any:
    torch.manual_seed(0)
    model = Net().bfloat16()
    optimizer = dear.DistributedOptimizer(optim.Adam(model.parameters(), lr=1e-3), model)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(ones(0, 2, 5).bfloat16()).float().square().mean().backward()
        optimizer.step()
    return saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_case_054_masters_on_another_number_of_ranks(pool: RankPool) -> None:
    checkpoint = pool.run(resume_masters, None, 5, size=2)[0]
    unbroken = pool.run(resume_masters, None, 10, size=2)[0]
    # the mean of two equal bf16 gradients is exact; of three or more it is rounded on the wire
    assert_bit_equal(pool.run(resume_masters, checkpoint, 5, size=1)[0], unbroken)


@on_ranks(2)
@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_055_apex_1728_masters_are_really_kept(master: bool, dtype: torch.dtype, fusion: Any) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(5, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))])
    options: dict[str, Any] = {} if master else {"master_dtype": None}
    lr = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-13
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=lr), model, fusion=fusion, **options)
    for _ in range(100):
        optimizer.zero_grad()
        (model[0].sum() + model[1].sum()).backward()
        optimizer.step()
    expected = torch.tensor(1 - 100 * lr if master else 1.0, dtype=dtype)
    for p in model:
        assert torch.equal(p.detach(), expected.expand_as(p)), f"{p} is not {expected}"


@on_ranks(2)
def test_case_054_weights_of_a_checkpoint_without_masters() -> None:
    """Neighbour: a plain optimizer's checkpoint into masters: they start from the model's weights."""
    model = Net().bfloat16()
    plain = Net().bfloat16()
    plain.load_state_dict(model.state_dict())
    plain_optimizer = optim.Adam(plain.parameters(), lr=1e-3)
    plain(ones(0, 2, 5).bfloat16()).float().square().mean().backward()
    plain_optimizer.step()
    optimizer = dear.DistributedOptimizer(optim.Adam(model.parameters(), lr=1e-3), model)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(saved(plain_optimizer.state_dict()))
    optimizer.synchronize()
    assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()))
    for number, param in enumerate(model.parameters()):
        assert torch.equal(optimizer.state_dict()["state"][number]["master_param"], param.detach().float())


@on_ranks(2)
@pytest.mark.parametrize("order", ["optimizer_first", "model_first"])
def test_case_053_order_of_loading_does_not_matter(order: str) -> None:
    twin = Twin(Net(), MAKES["momentum"])
    twin.train(loss, 2)
    model_state, state = saved(twin.model.state_dict()), saved(twin.optimizer.state_dict())
    twin.train(lambda m, r: 2.0 * loss(m, r), 2)
    for m, o in ((twin.model, twin.optimizer), (twin.plain, twin.plain_optimizer)):
        acts = [lambda o=o: o.load_state_dict(state), lambda m=m: m.load_state_dict(model_state)]
        for act in acts if order == "optimizer_first" else acts[::-1]:
            act()
    twin.train(loss, 2)
    twin.check()


@on_ranks(2)
def test_case_053_a_state_dict_is_a_copy() -> None:
    """Neighbour: training on does not change what was saved, nor does changing it reach the optimizer."""
    twin = Twin(Net(), MAKES["momentum"])
    twin.train(loss, 2)
    state = twin.optimizer.state_dict()
    kept = saved(state)
    twin.train(loss, 2)
    assert_bit_equal(state, kept)
    for each in state["state"].values():
        each["momentum_buffer"].fill_(100.0)
    twin.train(loss)
    twin.check()
