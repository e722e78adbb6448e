"""bf16, fp16 and fp64 parameters, fp32 masters, and narrower dtypes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.models import MixedDtypes
from tests.parity.trainers import Case, DearTrainer, Trainer, check_parity, run_plainly, run_under_dear
from tests.support.ranks import RankPool
from tests.support.reference import (
    TOLERANCES,
    IntegerModel,
    OddMLP,
    assert_bit_equal,
    assert_same_on_all_ranks,
    integer_batches,
    optimizer_of,
    weighted_sum_loss,
)

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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("master_dtype", "expected"), [(torch.float32, 1 - 100 * 2**-10), (None, 1.0)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_masters_keep_small_updates(
    pool: RankPool, size: int, master_dtype: torch.dtype | None, expected: float, options: dict[str, Any]
) -> None:
    model = IntegerModel(dtype=torch.bfloat16)
    ones = tuple(torch.ones_like(p) for p in model.parameters())
    case = Case(
        model,
        optimizer_of(torch.optim.SGD, lr=2**-10),
        options={"master_dtype": master_dtype, **options},
        batches=[[ones] * 100] * size,
    ).resolved(size)
    for final in pool.run(run_from_ones, case, size=size):
        assert final.dtype == torch.bfloat16
        assert final.float().sub(expected).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masters_are_an_fp32_run(
    pool: RankPool, size: int, optimizer: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """With exact gradients the parameters are those of an fp32 run, rounded."""
    narrow, wide = IntegerModel(dtype=dtype), IntegerModel()
    batches = integer_batches(narrow, size, 20)
    case = Case(narrow, OPTIMIZERS[optimizer], options=options, batches=batches).resolved(size)
    wide_batches = [[tuple(c.float() for c in batch) for batch in steps] for steps in batches]
    expected = run_plainly(Case(wide, OPTIMIZERS[optimizer], batches=wide_batches).resolved(size))
    got = pool.run(run_under_dear, case, size=size)
    assert_same_on_all_ranks([r.parameters for r in got])
    assert_bit_equal(got[0].parameters, {k: v.to(dtype) for k, v in expected[0].parameters.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_masters_the_step_is_torchs_own(pool: RankPool, size: int, optimizer: str, dtype: torch.dtype) -> None:
    case = Case(IntegerModel(dtype=dtype), OPTIMIZERS[optimizer], options={"master_dtype": None})
    got = check_parity(pool, case, size)
    assert all(p.dtype == dtype for p in got[0].parameters.values())


def steps_with_grads(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.note_grads()
        trainer.step()


@pytest.mark.parametrize("options", [{}, {"fusion": None}, {"shard": False}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["ring", "exchange"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_fp16_gradients_do_not_overflow(
    pool: RankPool, size: int, deterministic: bool, options: dict[str, Any]
) -> None:
    model = IntegerModel([(5,), (3, 3)], dtype=torch.float16)
    large = tuple(torch.full_like(p, 40000.0) for p in model.parameters())
    case = Case(
        model, optimizer_of(torch.optim.SGD, lr=2**-12), steps_with_grads, options, batches=[[large] * 2] * size
    ).resolved(size)
    for result in pool.run(run_under_dear, case, size=size, deterministic=deterministic):
        for grads in result.notes:
            # a third of 40000 is rounded to 11 bits before the wire
            assert all(((grad.float() - 40000).abs() <= (32 if size == 3 else 0)).all() for grad in grads)


@pytest.mark.parametrize("options", [*OPTIONS, {"shard": False}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2])
def test_mixed_layers(pool: RankPool, size: int, optimizer: str, options: dict[str, Any]) -> None:
    case = Case(MixedDtypes(), OPTIMIZERS[optimizer], steps_with_grads, {"master_dtype": None, **options}, num_steps=8)
    got = check_parity(pool, case, size)
    assert {p.dtype for p in got[0].parameters.values()} == {torch.float32, torch.bfloat16, torch.float64}


def _mixed_integers() -> nn.Module:
    model = IntegerModel()
    for number, dtype in enumerate((torch.bfloat16, torch.float64, torch.float32) * 2):
        model.weights[number] = nn.Parameter(model.weights[number].detach().to(dtype))
    return model


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mixed_parameters_on_exact_gradients(pool: RankPool, size: int) -> None:
    model = _mixed_integers()
    assert isinstance(model, IntegerModel)
    case = Case(model, OPTIMIZERS["sgd"], options={"master_dtype": None}, num_steps=6, loss_fn=weighted_sum_loss)
    got = check_parity(pool, case, size)
    assert [p.dtype for p in got[0].parameters.values()] == [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reduce_dtype_on_exact_gradients(pool: RankPool, size: int, wire: torch.dtype, options: dict[str, Any]) -> None:
    case = Case(IntegerModel(), OPTIMIZERS["sgd"], options={"reduce_dtype": wire, **options})
    got = check_parity(pool, case, size)
    assert all(p.dtype == torch.float32 for p in got[0].parameters.values())


@pytest.mark.parametrize("shard", ["auto", False])
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_dtype_on_any_gradients(pool: RankPool, size: int, wire: str, shard: Any) -> None:
    dtype = torch.bfloat16 if wire == "bf16" else torch.float16
    case = Case(
        OddMLP(),
        optimizer_of(torch.optim.SGD, lr=0.1),
        options={"reduce_dtype": dtype, "shard": shard},
        num_steps=10,
    )
    got = check_parity(pool, case, size, TOLERANCES[f"{wire} gradients"])
    assert len(got) == size
