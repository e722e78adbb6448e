"""Going on after a failure: in the same processes after an exception on all ranks, in new ones after a kill.

Cannot see: a machine that is lost for good (torchrun on several hosts).
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dear
from tests.faults.resumable import train
from tests.launchers.commands import torchrun
from tests.support.ranks import RankPool, rank
from tests.support.reference import (
    IntegerModel,
    assert_bit_equal,
    integer_batches,
    optimizer_of,
    reference_steps,
    weighted_sum_loss,
)

NUM_STEPS = 5
FORWARD = -1  # else: the number of the parameter whose gradient was to come next
# where each rank raises
POINTS: dict[str, tuple[int, int]] = {
    "in forward": (FORWARD, FORWARD),
    "in backward": (2, 2),
    "at the end of backward": (0, 0),
    "in forward and backward": (FORWARD, 3),
    "in backward and forward": (1, FORWARD),
    "here and there in backward": (5, 1),
}


class Broken(Exception):
    pass


def broken_off(where: dict[str, tuple[int, int]], options: dict[str, Any], at_step: int) -> list[Any]:
    """One exception at a point of the step; the step is then done again."""
    results = []
    for points in where.values():
        model = IntegerModel()
        sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        optimizer = dear.DistributedOptimizer(sgd, model, **options)
        batches = integer_batches(model, 2, NUM_STEPS)[rank()]
        for number, batch in enumerate(batches):
            if number == at_step:
                for _ in range(2):  # it may happen again
                    with pytest.raises(Broken):
                        optimizer.zero_grad()
                        _raise_at(points[rank()], model, batch)
            optimizer.zero_grad()
            weighted_sum_loss(model, batch).backward()
            optimizer.step()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
        optimizer.close()
    return results


def _raise_at(point: int, model: IntegerModel, batch: Any) -> None:
    if point == FORWARD:
        next(model.parameters()).sum()  # its first layer
        raise Broken

    def refuse(_: Tensor) -> None:
        raise Broken

    param = list(model.parameters())[point]
    handle = param.register_hook(refuse)  # type: ignore[no-untyped-call]
    try:
        weighted_sum_loss(model, batch).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [{}, {"fusion": None}, {"shard": False}, {"schedule": "wfbp"}], ids=str)
@pytest.mark.parametrize("at_step", [0, 2])
def test_zero_grad_begins_anew_after_an_exception(pool: RankPool, options: dict[str, Any], at_step: int) -> None:
    model = IntegerModel()
    sgd = optimizer_of(torch.optim.SGD, lr=0.125, momentum=0.5)
    expected = reference_steps(model, sgd, integer_batches(model, 2, NUM_STEPS), weighted_sum_loss)[0].parameters
    got = pool.run(broken_off, POINTS, options, at_step, size=2, group_timeout_s=8)
    for results in got:
        for name, result in zip(POINTS, results, strict=True):
            assert_bit_equal(result, expected, (name, "plain PyTorch"))


def accumulating() -> dict[str, Tensor]:
    """The second of two backwards raises, on both ranks; both are done again."""
    model = IntegerModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = dear.DistributedOptimizer(sgd, model, fusion=None, accumulate=2)
    batches = integer_batches(model, 2, 4)[rank()]
    for first, second in ((0, 1), (2, 3)):
        optimizer.zero_grad()
        weighted_sum_loss(model, batches[first]).backward()
        with pytest.raises(Broken):
            _raise_at((3, FORWARD)[rank()], model, batches[second])
        optimizer.zero_grad()
        for index in (first, second):
            weighted_sum_loss(model, batches[index]).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_passes_are_counted_from_zero_grad(pool: RankPool) -> None:
    model = IntegerModel()
    batches = [[[b[0], b[1]], [b[2], b[3]]] for b in integer_batches(model, 2, 4)]
    expected = reference_steps(model, optimizer_of(torch.optim.SGD, lr=0.125), batches, weighted_sum_loss)[0].parameters
    assert_bit_equal(pool.run(accumulating, size=2), [expected] * 2)


def zeroing_twice(num_steps: int) -> tuple[list[int], dict[str, Tensor]]:
    model = nn.Linear(50, 50)
    torch.manual_seed(0)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    sent = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        optimizer.zero_grad()
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        sent.append(optimizer.bytes_sent)
    return sent, dict(model.named_parameters())


def test_zeroing_twice_sends_nothing_more(pool: RankPool) -> None:
    for sent, _ in pool.run(zeroing_twice, 4, size=2):
        assert len({b - a for a, b in itertools.pairwise(sent)}) == 1
        assert sent[1] - sent[0] <= 2 * (50 * 51 + 64) * 4 * 0.5 * 1.02


def reading_on_one_rank() -> dict[str, Tensor]:
    """A forward without a backward, on one rank, between two calls of zero_grad."""
    model = IntegerModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer = dear.DistributedOptimizer(sgd, model)
    for batch in integer_batches(model, 2, NUM_STEPS)[rank()]:
        optimizer.zero_grad()
        if rank() == 0:
            weighted_sum_loss(model, batch)
        optimizer.zero_grad()
        weighted_sum_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_forward_on_one_rank_between_two_zero_grads(pool: RankPool) -> None:
    model = IntegerModel()
    sgd = optimizer_of(torch.optim.SGD, lr=0.125, momentum=0.5)
    expected = reference_steps(model, sgd, integer_batches(model, 2, NUM_STEPS), weighted_sum_loss)[0].parameters
    assert_bit_equal(pool.run(reading_on_one_rank, size=2, group_timeout_s=8), [expected] * 2)


# ------------------------------------------------------------------------------------------------ new processes


def undisturbed(folder: str, num_steps: int) -> dict[str, Any]:
    return train(Path(folder), num_steps, [], 0)


def kills_of(seed: int, num_kills: int, num_ranks: int, num_steps: int) -> list[str]:
    """At growing steps, so that each life comes to its end."""
    choose = random.Random(seed)
    steps = sorted(choose.sample(range(5, num_steps - 5), num_kills))
    return [f"{choose.randrange(num_ranks)}:{step}:{choose.random() * 0.01:.4f}" for step in steps]


def killed_and_restarted(pool: RankPool, folder: Path, seed: int, num_kills: int, num_ranks: int) -> None:
    kills = kills_of(seed, num_kills, num_ranks, 200)
    print(f"seed {seed}: kills {kills}")
    (folder / "undisturbed").mkdir()
    (folder / "killed").mkdir()
    expected = pool.run(undisturbed, str(folder / "undisturbed"), 200, size=num_ranks)[0]
    arguments = [argument for kill in kills for argument in ("--kill", kill)]
    job = torchrun(
        "tests/faults/resumable.py", str(folder / "killed"), *arguments, ranks=num_ranks, max_restarts=num_kills
    )
    output = job.wait(50 * num_kills)  # a life begins with imports, 3 s or, on a busy machine, 20
    assert job.status == 0, output
    result = torch.load(folder / "killed" / "result.pt")
    assert result["life"] == num_kills, output
    assert_bit_equal(result["parameters"], expected["parameters"], ("restarted", "undisturbed"))
    assert job.survivors() == []


def test_a_killed_job_ends_as_if_nothing_had_been(pool: RankPool, tmp_path: Path) -> None:
    killed_and_restarted(pool, tmp_path, seed=0, num_kills=2, num_ranks=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_killed_jobs(pool: RankPool, tmp_path: Path, seed: int) -> None:
    killed_and_restarted(pool, tmp_path, seed, num_kills=4, num_ranks=2 + seed % 2)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (1, 2)], ids=str)
def test_going_on_with_another_number_of_ranks(pool: RankPool, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Stopped after 40 of 60 steps. The same data on other ranks: other sums, so to rounding."""
    (tmp_path / "undisturbed").mkdir()
    expected = pool.run(undisturbed, str(tmp_path / "undisturbed"), 60, size=sizes[0])[0]
    pool.run(undisturbed, str(tmp_path), 40, size=sizes[0])
    got = pool.run(undisturbed, str(tmp_path), 60, size=sizes[1])
    for result in got:
        assert result["first"] == 40
        for name, param in result["parameters"].items():
            torch.testing.assert_close(param, expected["parameters"][name], rtol=1e-3, atol=1e-5)
