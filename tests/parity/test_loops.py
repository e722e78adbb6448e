"""Loops other than backward, step: accumulation, several backward passes, gradients dropped, kept, stepped twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.trainers import Case, Script, Trainer, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import (
    TOLERANCES,
    IntegerModel,
    OddMLP,
    ReusedModel,
    UnusedModel,
    make_batches,
    optimizer_of,
)

SGD = optimizer_of(torch.optim.SGD, lr=0.03125, momentum=0.5, weight_decay=0.125)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False, "fusion": 0.001}]


# ---------------------------------------------------------------------------------------------------- accumulation


def groups_of_three(trainer: Trainer) -> None:
    """The last group is short: 20 batches make 6 groups of 3 and one of 2."""
    for index in range(trainer.num_batches):
        if index % 3 == 0:
            trainer.zero_grad()
        trainer.backward(index)
        if index % 3 == 2 or index == trainer.num_batches - 1:
            trainer.step()


def two_epochs_of_groups(trainer: Trainer) -> None:
    groups_of_three(trainer)
    groups_of_three(trainer)


def groups_of_three_without_sync(trainer: Trainer) -> None:
    """All but the last backward pass of a group stay local."""
    for index in range(trainer.num_batches):
        last = index % 3 == 2 or index == trainer.num_batches - 1
        if index % 3 == 0:
            trainer.zero_grad()
        if last:
            trainer.backward(index)
            trainer.step()
        else:
            with trainer.no_sync():
                trainer.backward(index)


def everything_without_sync(trainer: Trainer) -> None:
    """Even the last backward pass is local: step() averages."""
    for index in range(0, trainer.num_batches - 1, 2):
        trainer.zero_grad()
        with trainer.no_sync():
            trainer.backward(index)
            trainer.backward(index + 1)
        trainer.step()


ACCUMULATING: dict[str, tuple[Script, dict[str, Any]]] = {
    "accumulate": (groups_of_three, {"accumulate": 3}),
    "two epochs": (two_epochs_of_groups, {"accumulate": 3}),
    "no_sync": (groups_of_three_without_sync, {}),
    "no_sync throughout": (everything_without_sync, {}),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("size", [2, 3])
def test_accumulation(pool: RankPool, size: int, name: str, options: dict[str, Any]) -> None:
    script, more = ACCUMULATING[name]
    case = Case(OddMLP(), ADAM, script, {**options, **more}, deterministic=True)
    got = check_parity(pool, case, size)
    assert len(got[0].losses) >= 20


# ---------------------------------------------------------------------------------------------------- several rounds


def two_backwards(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches - 1, 2):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.backward(index + 1)
        trainer.note_grads()
        trainer.step()


def one_to_four_backwards(trainer: Trainer) -> None:
    index = 0
    for num_backwards in (1, 4, 2, 3, 1, 2):
        trainer.zero_grad()
        for _ in range(num_backwards):
            trainer.backward(index)
            index += 1
        trainer.step()


def backward_zero_backward(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches - 1, 2):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.zero_grad()
        trainer.backward(index + 1)
        trainer.note_grads()
        trainer.step()


def backward_zero_backward_of_model(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches - 1, 2):
        trainer.zero_grad(of_model=True)
        trainer.backward(index)
        trainer.zero_grad(of_model=True)
        trainer.backward(index + 1)
        trainer.note_grads()
        trainer.step()


def backward_zero_backward_in_place(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches - 1, 2):
        of_model = index % 4 == 0
        trainer.zero_grad(False, of_model)
        trainer.backward(index)
        trainer.zero_grad(False, of_model)
        trainer.backward(index + 1)
        trainer.note_grads()
        trainer.step()


def zero_in_every_way(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad(set_to_none=bool(index & 1), of_model=bool(index & 2))
        trainer.backward(index)
        trainer.step()


def never_zero(trainer: Trainer) -> None:
    """Gradients of all steps add up."""
    for index in range(trainer.num_batches):
        trainer.backward(index)
        trainer.step()


def seldom_zero(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        if index % 5 == 0:
            trainer.zero_grad(of_model=index % 2 == 0)
        trainer.backward(index)
        trainer.step()


def zero_after_step(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.backward(index)
        trainer.step()
        trainer.zero_grad()


def step_twice(trainer: Trainer) -> None:
    """The same gradient is applied twice."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()
        trainer.step()


def step_first(trainer: Trainer) -> None:
    """Nothing happens in steps that have no gradient."""
    trainer.step()
    trainer.step()
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.step()
        trainer.backward(index)
        trainer.step()


def backward_without_step(trainer: Trainer) -> None:
    """A probe of the gradients now and then, which is not applied."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.note_grads()
        if index % 3:
            trainer.step()


LOOPS: dict[str, Script] = {
    script.__name__: script
    for script in (
        two_backwards,
        one_to_four_backwards,
        backward_zero_backward,
        backward_zero_backward_of_model,
        backward_zero_backward_in_place,
        zero_in_every_way,
        never_zero,
        seldom_zero,
        zero_after_step,
        step_twice,
        step_first,
        backward_without_step,
    )
}
# How often parts of a sum were averaged before they were added differs from plain PyTorch.
ROUNDS = ("two_backwards", "one_to_four_backwards", "never_zero", "seldom_zero")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [2, 3])
def test_loops_on_exact_gradients(pool: RankPool, size: int, loop: str, options: dict[str, Any]) -> None:
    got = check_parity(pool, Case(IntegerModel(), SGD, LOOPS[loop], options), size)
    assert got[0].losses


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_on_any_gradients(pool: RankPool, loop: str, options: dict[str, Any]) -> None:
    tolerance = TOLERANCES["summation order" if loop in ROUNDS else "exact"]
    got = check_parity(pool, Case(ReusedModel(), SGD, LOOPS[loop], options, num_steps=14), 2, tolerance)
    assert got[0].losses


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_use_a_layer_now_and_then(pool: RankPool, loop: str, options: dict[str, Any]) -> None:
    """A gradient of zeros is applied (decay, momentum), no gradient is not; which it is depends on the loop."""
    model = UnusedModel()
    used = [[(0, 3, 7, 8, 9, 13), (3, 4, 8, 13)][r] for r in range(2)]
    batches = [
        [(*batch, {"use_sometimes": index in used[r]}) for index, batch in enumerate(steps)]
        for r, steps in enumerate(make_batches(model, 2, 14))
    ]
    tolerance = TOLERANCES["summation order" if loop in ROUNDS else "exact"]
    got = check_parity(pool, Case(model, SGD, LOOPS[loop], options, batches=batches), 2, tolerance)
    for name in ("never.weight", "never.bias", "frozen"):
        assert torch.equal(got[0].parameters[name], model.get_parameter(name))
