"""bf16, fp16 and fp64 parameters, fp32 masters, and narrower dtypes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.models import MixedDtypes
from tests.parity.trainers import Case, DearTrainer, Trainer, breadth, check_parity, run_all, run_plainly
from tests.support.ranks import RankPool
from tests.support.reference import IntegerModel, OddMLP, assert_bit_equal, integer_batches, optimizer_of

OPTIMIZERS = {
    "sgd": optimizer_of(torch.optim.SGD, lr=2**-6, momentum=0.5, weight_decay=2**-4),
    "adam": optimizer_of(torch.optim.Adam, lr=2**-6),
}
OPTIONS: list[dict[str, Any]] = [{}, {"fusion": None}]


def run_from_ones(case: Case) -> Tensor:
    trainer = DearTrainer(case)
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.fill_(1.0)
    case.script(trainer)
    trainer.optimizer.synchronize()
    return torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_masters_keep_small_updates(pool: RankPool, size: int) -> None:
    """24 steps of 2^-10, of which bf16 at 1.0 keeps none."""
    model = IntegerModel(dtype=torch.bfloat16)
    batches = [[tuple(torch.ones_like(p) for p in model.parameters())] * 24] * size
    sgd = optimizer_of(torch.optim.SGD, lr=2**-10)
    expected = {torch.float32: 1 - 24 * 2**-10, None: 1.0}
    cases = {
        f"{master}, {options}": Case(model, sgd, options={"master_dtype": master, **options}, batches=batches)
        for master in expected
        for options in (OPTIONS if size == 2 else OPTIONS[:1])
    }
    for by_case in run_all(pool, cases, size, run_dear=run_from_ones):
        for name, (final, _) in by_case.items():
            assert final.dtype == torch.bfloat16
            assert final.float().sub(expected[cases[name].options["master_dtype"]]).abs().max() == 0, f"case '{name}'"


@breadth
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masters_are_an_fp32_run(pool: RankPool, size: int, full: bool) -> None:
    """With exact gradients the parameters are those of an fp32 run, rounded."""
    wide, num_steps = IntegerModel(), 20 if full else 6
    cases, expected = {}, {}
    for dtype in (torch.bfloat16, torch.float16):
        narrow = IntegerModel(dtype=dtype)
        batches = integer_batches(narrow, size, num_steps)
        wide_batches = [[tuple(c.float() for c in batch) for batch in steps] for steps in batches]
        for optimizer, make_optimizer in OPTIMIZERS.items():
            plain = run_plainly(Case(wide, make_optimizer, batches=wide_batches).resolved(size))[0]
            for options in OPTIONS if full or (size == 2 and optimizer == "sgd") else OPTIONS[:1]:
                name = f"{dtype}, {optimizer}, {options}"
                cases[name] = Case(narrow, make_optimizer, options=options, batches=batches)
                expected[name] = {k: v.to(dtype) for k, v in plain.parameters.items()}
    by_rank = run_all(pool, cases, size)
    for name in cases:
        got = [by_case[name][0].parameters for by_case in by_rank]
        for r in range(size):
            assert_bit_equal(got[r], expected[name], (f"case '{name}', rank {r}", "an fp32 run"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_masters_the_step_is_torchs_own(pool: RankPool, size: int) -> None:
    cases = {
        f"{dtype}, {optimizer}": Case(
            IntegerModel(dtype=dtype), make_optimizer, options={"master_dtype": None}, num_steps=5
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        for optimizer, make_optimizer in OPTIMIZERS.items()
    }
    for name, results in check_parity(pool, cases, size).items():
        assert all(str(p.dtype) == name.split(",")[0] for p in results[0].parameters.values())


def steps_with_grads(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.note_grads()
        trainer.step()


@pytest.mark.parametrize("deterministic", [False, True], ids=["ring", "exchange"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_fp16_gradients_do_not_overflow(pool: RankPool, size: int, deterministic: bool) -> None:
    model = IntegerModel([(5,), (3, 3)], dtype=torch.float16)
    batches = [[tuple(torch.full_like(p, 40000.0) for p in model.parameters())] * 2] * size
    sgd = optimizer_of(torch.optim.SGD, lr=2**-12)
    variants: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]
    cases = {str(options): Case(model, sgd, steps_with_grads, options, batches=batches) for options in variants}
    for by_case in run_all(pool, cases, size, deterministic):
        for name, (result, _) in by_case.items():
            for grad in [grad for grads in result.notes for grad in grads]:
                # a third of 40000 is rounded to 11 bits before the wire
                limit = 32 if size == 3 else 0
                assert ((grad.float() - 40000).abs() <= limit).all(), f"case '{name}'"


@pytest.mark.parametrize("size", [1, 2])
def test_mixed_layers(pool: RankPool, size: int) -> None:
    model = MixedDtypes()
    variants: list[dict[str, Any]] = [{}, {"fusion": None}, {"shard": False}]
    cases = {
        f"{optimizer}, {options}": Case(
            model, make_optimizer, steps_with_grads, {"master_dtype": None, **options}, num_steps=6
        )
        for optimizer, make_optimizer in OPTIMIZERS.items()
        for options in (variants if optimizer == "sgd" else variants[:1])
    }
    for results in check_parity(pool, cases, size).values():
        dtypes = {p.dtype for p in results[0].parameters.values()}
        assert dtypes == {torch.float32, torch.bfloat16, torch.float64}


def _mixed_integers() -> IntegerModel:
    model = IntegerModel()
    for number, dtype in enumerate((torch.bfloat16, torch.float64, torch.float32) * 2):
        model.weights[number] = nn.Parameter(model.weights[number].detach().to(dtype))
    return model


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mixed_parameters_on_integer_multiples(pool: RankPool, size: int) -> None:
    model = _mixed_integers()
    case = Case(model, OPTIMIZERS["sgd"], options={"master_dtype": None}, num_steps=6)
    got = check_parity(pool, {"mixed": case}, size)
    assert [p.dtype for p in got["mixed"][0].parameters.values()] == [p.dtype for p in model.parameters()]


@breadth
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reduce_dtype_on_integer_multiples(pool: RankPool, size: int, full: bool) -> None:
    model, sgd = IntegerModel(), OPTIMIZERS["sgd"]
    cases = {
        f"{wire}, {options}": Case(model, sgd, options={"reduce_dtype": wire, **options}, num_steps=20 if full else 4)
        for wire in (torch.bfloat16, torch.float16, torch.float64)
        for options in ([*OPTIONS, {"shard": False}] if full or size == 2 else OPTIONS[:1])
    }
    for results in check_parity(pool, cases, size).values():
        assert all(p.dtype == torch.float32 for p in results[0].parameters.values())


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_dtype_on_any_gradients(pool: RankPool, size: int) -> None:
    model, sgd = OddMLP(), optimizer_of(torch.optim.SGD, lr=0.1)
    cases = {
        f"{wire}, shard {shard}": Case(
            model,
            sgd,
            options={"reduce_dtype": dtype, "shard": shard},
            num_steps=10,
            tolerance=f"{wire} gradients",
        )
        for wire, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items()
        for shard in ("auto", False)
    }
    got = check_parity(pool, cases, size)
    assert len(got) == 4
