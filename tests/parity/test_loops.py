"""Loops other than backward, step: accumulation, several backward passes, gradients dropped, kept, stepped twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.trainers import (
    Case,
    Script,
    Trained,
    Trainer,
    breadth,
    check_parity,
    check_ranks,
    run_plainly,
    run_under_dear,
)
from tests.support.ranks import Outcome, RankPool, assert_raised
from tests.support.reference import (
    IntegerModel,
    OddMLP,
    ReusedModel,
    UnusedModel,
    make_batches,
    optimizer_of,
)

SGD = optimizer_of(torch.optim.SGD, lr=0.03125, momentum=0.5, weight_decay=0.125)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
NUM_BATCHES = 14
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


@pytest.mark.parametrize("size", [2, 3])
def test_accumulation_with_a_short_last_group(pool: RankPool, size: int) -> None:
    model = OddMLP()
    cases = {
        f"{name}, {options}": Case(model, ADAM, script, {**options, **more}, deterministic=size > 2)
        for name, (script, more) in ACCUMULATING.items()
        for options in (OPTIONS if size == 2 and name != "two epochs" else OPTIONS[::2])
    }
    got = check_parity(pool, cases, size)
    assert all(len(results[0].losses) >= 20 for results in got.values())


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


@breadth
@pytest.mark.parametrize("size", [2, 3])
def test_loops_on_integer_multiples(pool: RankPool, size: int, full: bool) -> None:
    model = IntegerModel()
    cases = {
        f"{loop}, {options}": Case(model, SGD, LOOPS[loop], options, num_steps=NUM_BATCHES)
        for loop in LOOPS
        for options in (OPTIONS if full else [OPTIONS[1]] if size == 2 else OPTIONS[::2])
    }
    got = check_parity(pool, cases, size)
    assert all(results[0].losses for results in got.values())


@breadth
def test_loops_on_any_gradients(pool: RankPool, full: bool) -> None:
    model = ReusedModel()
    cases = {
        f"{loop}, {options}": Case(
            model, SGD, LOOPS[loop], options, num_steps=NUM_BATCHES, tolerance=tolerance_of(loop)
        )
        for loop in LOOPS
        for options in (OPTIONS if full else OPTIONS[:1])
    }
    got = check_parity(pool, cases)
    assert all(results[0].losses for results in got.values())


def tolerance_of(loop: str) -> str:
    return "summation order" if loop in ROUNDS else "exact"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loops_that_use_a_layer_now_and_then(pool: RankPool, options: dict[str, Any]) -> None:
    """A gradient of zeros is applied (decay, momentum), no gradient is not; which it is depends on the loop."""
    model = UnusedModel()
    used = [[(0, 3, 7, 8, 9, 13), (3, 4, 8, 13)][r] for r in range(2)]
    batches = [
        [(*batch, {"use_sometimes": index in used[r]}) for index, batch in enumerate(steps)]
        for r, steps in enumerate(make_batches(model, 2, NUM_BATCHES))
    ]
    cases = {
        loop: Case(model, SGD, script, options, batches=batches, tolerance=tolerance_of(loop))
        for loop, script in LOOPS.items()
        if loop not in UNHEARD
    }
    for results in check_parity(pool, cases).values():
        for name in ("never.weight", "never.bias", "frozen"):
            assert torch.equal(results[0].parameters[name], model.get_parameter(name))


# model.zero_grad() between two passes, of which the optimizer hears nothing: by then a bucket may have left on one rank
# and not on another that does not use all of its parameters.
UNHEARD = ("backward_zero_backward_of_model", "backward_zero_backward_in_place")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loop", UNHEARD)
def test_zeroing_unheard_where_ranks_use_different_layers_is_right_or_refused(
    pool: RankPool, loop: str, options: dict[str, Any]
) -> None:
    model = UnusedModel()
    batches = [
        [(*batch, {"use_sometimes": index in ((0, 3), (3, 4))[r]}) for index, batch in enumerate(steps)]
        for r, steps in enumerate(make_batches(model, 2, 7))
    ]
    case = Case(model, SGD, LOOPS[loop], options, batches=batches).resolved(2)
    got = pool.run(run_under_dear, case, expect_errors=True)
    if any(isinstance(result, Outcome) for result in got):
        assert_raised(got, "ScheduleError", "zero_grad")
    else:
        check_ranks(Trained(got, run_plainly(case)), case, 2)


# ---------------------------------------------------------------------------------------------------- skipped passes


def skipping_steps(trainer: Trainer) -> None:
    """A rank without a batch (its data set is shorter) takes part in the step alone; now and then all of them do."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index, not_on=SKIPPED_BY[index % len(SKIPPED_BY)])
        trainer.step()


def skipping_clipped_steps(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad(set_to_none=index % 2 == 0)
        trainer.backward(index, not_on=SKIPPED_BY[index % len(SKIPPED_BY)])
        trainer.clip_value(0.02)
        trainer.note_grads()
        trainer.step()


def skipping_passes_of_groups(trainer: Trainer) -> None:
    """Of two passes before each step a rank runs two, one or none."""
    for index in range(0, trainer.num_batches - 1, 2):
        trainer.zero_grad()
        trainer.backward(index, not_on=SKIPPED_BY[index // 2 % len(SKIPPED_BY)])
        trainer.backward(index + 1, not_on=SKIPPED_BY[(index // 2 + index % 3) % len(SKIPPED_BY)])
        trainer.step()


SKIPPED_BY = ((1,), (), (0,), (0, 1, 2), (1,), (0, 2))  # by step; the first step is the one that shows the order


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_skips_its_backward_still_steps(pool: RankPool, size: int) -> None:
    model = ReusedModel()
    scripts: list[tuple[Script, str, dict[str, Any]]] = [
        (skipping_steps, "exact", {}),
        (skipping_clipped_steps, "exact", {}),
        (skipping_passes_of_groups, "summation order", {}),
        (skipping_passes_of_groups, "exact", {"accumulate": 2}),
    ]
    cases = {
        f"{script.__name__}, { ({**options, **more}) }": Case(
            model, SGD, script, {**options, **more}, num_steps=12, tolerance=tolerance, deterministic=True
        )
        for script, tolerance, more in scripts
        for options in (OPTIONS if size == 2 else OPTIONS[::2])
    }
    for results in check_parity(pool, cases, size).values():
        assert all(0 < len(result.losses) < 12 for result in results), "nobody skipped a pass"
