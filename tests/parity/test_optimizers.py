"""Every torch optimizer that steps on shards, against DistributedDataParallel with the same optimizer unwrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import dear
from tests.parity.models import WideMLP
from tests.parity.trainers import Case, Trained, breadth, check_parity, check_ranks, train
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, MakeOptimizer, OddMLP, TinyConv, optimizer_of

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": optimizer_of(torch.optim.SGD, lr=0.1),
    "sgd momentum": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd nesterov": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd weight decay": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "sgd maximize": optimizer_of(torch.optim.SGD, lr=0.001, maximize=True),
    "adam": optimizer_of(torch.optim.Adam, lr=0.01),
    "adam amsgrad": optimizer_of(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": optimizer_of(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": optimizer_of(torch.optim.RMSprop, lr=0.01),
    "rmsprop centered": optimizer_of(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": optimizer_of(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "nadam": optimizer_of(torch.optim.NAdam, lr=0.01),
    "radam": optimizer_of(torch.optim.RAdam, lr=0.01),
    "adamax": optimizer_of(torch.optim.Adamax, lr=0.01),
    "adadelta": optimizer_of(torch.optim.Adadelta, lr=0.5),
    "rprop": optimizer_of(torch.optim.Rprop, lr=0.01),
    "asgd": optimizer_of(torch.optim.ASGD, lr=0.01),
}
MAIN = (
    "sgd",
    "sgd momentum",
    "sgd nesterov",
    "sgd weight decay",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "nadam",
)
# Updates that divide by the size of the gradient: where that is near zero, its rounding is no longer small beside it.
SMOOTH = ("sgd", "sgd momentum", "sgd nesterov", "sgd weight decay", "adagrad")

TrainedBySize = Callable[[int], dict[str, Trained]]


@pytest.fixture(scope="module")
def odd_under_ddp(pool: RankPool) -> dict[str, Trained]:
    """20 steps of every optimizer on 2 ranks."""
    return train(pool, {name: Case(OddMLP(), make) for name, make in OPTIMIZERS.items()}, 2, ddp=True)


@pytest.fixture(scope="module")
def integer_under_ddp(pool: RankPool) -> Iterator[TrainedBySize]:
    """20 steps of the main optimizers on 3 or 4 ranks, where every gradient is an integer multiple of that."""
    model, made = IntegerModel(), {}

    def train_on(size: int) -> dict[str, Trained]:
        if size not in made:
            made[size] = train(pool, {name: Case(model, OPTIMIZERS[name]) for name in MAIN}, size, ddp=True)
        return made[size]

    yield train_on


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_20_steps_on_two_ranks_are_bit_equal_to_ddp(odd_under_ddp: dict[str, Trained], name: str) -> None:
    trained = odd_under_ddp[name]
    assert len(trained.got[0].losses) == 20
    check_ranks(trained, Case(OddMLP(), OPTIMIZERS[name]), 2)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", MAIN)
def test_20_steps_on_more_ranks_are_bit_equal_to_ddp_on_integer_multiples(
    integer_under_ddp: TrainedBySize, name: str, size: int
) -> None:
    trained = integer_under_ddp(size)[name]
    assert len(trained.got[0].losses) == 20
    check_ranks(trained, Case(IntegerModel(), OPTIMIZERS[name]), size)


@pytest.mark.parametrize("size", [3, 4])
def test_20_steps_on_more_ranks_are_close_to_ddp_on_any_gradients(pool: RankPool, size: int) -> None:
    model = OddMLP()
    cases = {name: Case(model, OPTIMIZERS[name], tolerance="summation order") for name in SMOOTH}
    got = check_parity(pool, cases, size, ddp=True)
    assert all(len(each[0].losses) == 20 for each in got.values())


@breadth
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_are_bit_equal_in_deterministic_mode(pool: RankPool, size: int, full: bool) -> None:
    model = OddMLP()
    names = OPTIMIZERS if full or size == 3 else ("sgd momentum", "adamw", "nadam")
    cases = {name: Case(model, OPTIMIZERS[name], num_steps=6, deterministic=True) for name in names}
    got = check_parity(pool, cases, size)
    assert len(got) == len(names)


@breadth
@pytest.mark.parametrize("size", [3, 4])
def test_the_other_optimizers_are_bit_equal_on_integer_multiples(pool: RankPool, size: int, full: bool) -> None:
    model = IntegerModel()
    names = OPTIMIZERS if full else (OPTIMIZERS.keys() - set(MAIN) if size == 3 else ("adam amsgrad", "asgd"))
    cases = {name: Case(model, OPTIMIZERS[name], num_steps=5) for name in sorted(names)}
    got = check_parity(pool, cases, size)
    assert len(got) == len(names)


def test_one_rank_is_bit_equal_to_the_plain_optimizer(pool: RankPool) -> None:
    model = OddMLP()
    got = check_parity(pool, {name: Case(model, make) for name, make in OPTIMIZERS.items()}, size=1)
    assert len(got) == len(OPTIMIZERS)


def test_other_models(pool: RankPool) -> None:
    models: dict[str, torch.nn.Module] = {"conv": TinyConv(), "wide": WideMLP()}
    cases = {
        f"{model}, {name}": Case(models[model], OPTIMIZERS[name], num_steps=10)
        for model in models
        for name in ("sgd momentum", "adamw")
    }
    got = check_parity(pool, cases, ddp=True)
    for name, results in got.items():
        assert results[0].parameters.keys() == dict(cases[name].model.named_parameters()).keys()


@breadth
def test_every_optimizer_in_several_buckets(pool: RankPool, full: bool) -> None:
    """Whose borders cut tensors."""
    model = OddMLP()
    fusions = [0.0002, *([None, dear.NearbyLayers(1)] if full else [])]
    cases = {
        f"{name}, fusion {fusion}": Case(model, make, options={"fusion": fusion}, num_steps=6)
        for name, make in OPTIMIZERS.items()
        for fusion in fusions
    }
    got = check_parity(pool, cases)
    assert len(got) == len(OPTIMIZERS) * len(fusions)


def test_flags_for_implementations_are_kept(pool: RankPool) -> None:
    model = OddMLP()
    flags = [{"foreach": True}, {"foreach": False}, {"fused": True}]
    cases = {
        f"{cls.__name__}, {flag}": Case(
            model,
            optimizer_of(cls, lr=0.01, **flag),
            num_steps=6,
            tolerance="exact" if flag.get("foreach") is False else "fused",
        )
        for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        for flag in flags
    }
    got = check_parity(pool, cases)
    for name, results in got.items():
        flag = next(flag for flag in flags if name.endswith(str(flag)))
        assert results[0].optimizer_state["param_groups"][0].items() >= flag.items()
