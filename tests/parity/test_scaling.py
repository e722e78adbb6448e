"""torch's own GradScaler: all ranks skip together, and a skipped step leaves no trace."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.parity.trainers import Case, Trainer, breadth, check_parity
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, OddMLP, integer_batches, optimizer_of

ADAM = optimizer_of(torch.optim.Adam, lr=0.125)
OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]
SHAPES = [(7, 13), (13,), (), (5, 13)]


def scaled_steps(max_norm: float | None, trainer: Trainer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index, scaler.scale)
        if max_norm is not None:
            trainer.unscale(scaler)
            trainer.clip_norm(max_norm)
        trainer.step_scaled(scaler)
        scaler.update()
        trainer.note(scaler.get_scale())
        trainer.note([p.detach() for p in trainer.model.parameters()])
        trainer.note(trainer.optimizer.state_dict()["state"])


def batches_with(size: int, bad: dict[int, tuple[int, int, float]]) -> list[list[tuple[torch.Tensor, ...]]]:
    """In step s, `bad[s] = (rank, element of the flat model, value)`: that rank's gradient has the value there."""
    batches = integer_batches(IntegerModel(SHAPES), size, 8)
    for step, (rank, element, value) in bad.items():
        parts = [c.clone() for c in batches[rank][step]]
        for part in parts:
            if element < part.numel():
                part.view(-1)[element] = value
                break
            element -= part.numel()
        batches[rank][step] = tuple(parts)
    return batches


LAST, FIRST = 7 * 13 + 13 + 1 + 5 * 13 - 1, 0
BAD = {
    "good steps": {},
    "inf of the first rank in the last shard": {3: (0, LAST, float("inf"))},
    "inf of the last rank in the first shard": {3: (-1, FIRST, float("inf"))},
    "nan in the first step": {0: (0, LAST, float("nan"))},
    "two in a row": {3: (0, LAST, float("inf")), 4: (-1, FIRST, float("-inf"))},
    "inf and -inf": {2: (0, FIRST, float("inf")), 3: (-1, FIRST, float("-inf"))},
}
MOST_TELLING = ("inf of the last rank in the first shard", "nan in the first step")


@breadth
@pytest.mark.parametrize("size", [2, 3, 4])
def test_scaler(pool: RankPool, size: int, full: bool) -> None:
    model = IntegerModel(SHAPES)
    script = functools.partial(scaled_steps, None)
    batches = {bad: batches_with(size, BAD[bad]) for bad in BAD}
    cases = {
        (bad, str(options)): Case(model, ADAM, script, options, batches=batches[bad])
        for bad in BAD
        for options in OPTIONS
        if full or (options == {} and size == 2) or (bad in MOST_TELLING and (size == 2 or options == {}))
    }
    results = check_parity(pool, {f"{bad}, {options}": case for (bad, options), case in cases.items()}, size)
    for bad, options in cases:
        name = f"{bad}, {options}"
        got = results[name]
        scales, parameters, states = (got[0].notes[start::3] for start in range(3))
        for step in BAD[bad]:
            before = [p.detach() for p in model.parameters()] if step == 0 else parameters[step - 1]
            assert all(torch.equal(a, b) for a, b in zip(parameters[step], before, strict=True)), f"case '{name}'"
            assert scales[step] == (scales[step - 1] if step else 1024.0) / 2, f"case '{name}'"
        assert states[-1][0]["step"] == 8 - len(BAD[bad]), f"case '{name}'"


def test_scaler_with_clipping(pool: RankPool) -> None:
    sgd = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9)
    script = functools.partial(scaled_steps, 0.5)
    models = {"odd": OddMLP(), "integer": IntegerModel()}
    cases = {
        f"{name}, {options}": Case(model, sgd, script, options, num_steps=6, tolerance="clip")
        for name, model in models.items()
        for options in OPTIONS
    }
    got = check_parity(pool, cases)
    assert all(len(results[0].notes) == 24 for results in got.values())


def test_an_inf_is_gone_when_its_step_was_skipped(pool: RankPool) -> None:
    """Buckets of different sizes share buffers: what one leaves behind must not reach another's padding."""
    model = IntegerModel([(33,), (5,), (129,), (7,)])
    batches = integer_batches(model, 2, 8)
    batches[0][2] = tuple(torch.full_like(p, float("inf")) for p in model.parameters())
    script = functools.partial(scaled_steps, None)
    got = check_parity(pool, {str(options): Case(model, ADAM, script, options, batches=batches) for options in OPTIONS})
    assert all(results[0].notes[-1][0]["step"] == 7 for results in got.values())
