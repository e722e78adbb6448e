"""`sharded_state_dict()` through `torch.distributed.checkpoint`: saved on some ranks, loaded on others.

What it must come to is plain PyTorch: its optimizer goes on from the same point, or reads the checkpoint itself.
Cannot see: CUDA tensors, storage other than files.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import dear
from tests.parity.models import Transposed, WideMLP
from tests.parity.trainers import Case, run_plainly
from tests.support.ranks import Outcome, RankPool, assert_raised, rank, world_size
from tests.support.reference import (
    IntegerModel,
    MakeOptimizer,
    TinyConv,
    UnusedModel,
    assert_bit_equal,
    integer_batches,
    make_batches,
    mse_loss,
    optimizer_of,
    weighted_sum_loss,
)

MODELS: dict[str, nn.Module] = {
    "integer": IntegerModel(),
    "conv": TinyConv(channels_last=True),
    "transposed": Transposed(),
    "unused": UnusedModel(),
    "wide": WideMLP(),
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": optimizer_of(torch.optim.SGD, lr=0.05),
    "momentum": optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": optimizer_of(torch.optim.Adam, lr=0.01, amsgrad=True),
    "nadam": optimizer_of(torch.optim.NAdam, lr=0.01),
    "asgd": optimizer_of(torch.optim.ASGD, lr=0.01),
}
# name -> (model, optimizer, options when saving, options when loading)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "integer, sgd": ("integer", "sgd", {}, {}),
    "integer, momentum": ("integer", "momentum", {"fusion": None}, {}),
    "integer, adam": ("integer", "adam", {}, {"fusion": None}),
    "integer, nadam": ("integer", "nadam", {"fusion": None}, {"fusion": None}),
    "integer, asgd": ("integer", "asgd", {}, {}),
    "conv, adam": ("conv", "adam", {"fusion": None}, {}),
    "transposed, adam": ("transposed", "adam", {}, {}),
    "unused, momentum": ("unused", "momentum", {}, {"fusion": None}),
    "wide and split, adam": ("wide", "adam", {"fusion": 0.02}, {"fusion": 0.05}),
    "all-reduce, adam": ("integer", "adam", {"schedule": "wfbp"}, {}),
    "to all-reduce, adam": ("integer", "adam", {}, {"schedule": "wfbp"}),
    "whole, adam": ("integer", "adam", {"shard": False}, {"shard": False}),
}


def batches_of(model: nn.Module, num_ranks: int, num_steps: int) -> Any:
    make = integer_batches if isinstance(model, IntegerModel) else make_batches
    return make(model, num_ranks, num_steps)


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    loss_fn = weighted_sum_loss if isinstance(model, IntegerModel) else mse_loss
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def save_all(names: list[str], folder: str, asynchronously: bool) -> dict[str, Any]:
    """Trains 3 steps and saves each case; returns model and whole state of each."""
    results = {}
    for name in names:
        model_name, optimizer_name, options, _ = CASES[name]
        model = copy.deepcopy(MODELS[model_name])
        optimizer = dear.DistributedOptimizer(OPTIMIZERS[optimizer_name](model), model, **options)
        train(model, optimizer, batches_of(model, world_size(), 3)[rank()])
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        whole = {n: p.detach().clone() for n, p in model.named_parameters()}, copy.deepcopy(optimizer.state_dict())
        path = f"{folder}/{name}"
        if asynchronously:
            saving = dcp.async_save(state, checkpoint_id=path)
            train(model, optimizer, batches_of(model, world_size(), 2)[rank()])  # must not reach the checkpoint
            saving.result()
        else:
            dcp.save(state, checkpoint_id=path)
        results[name] = whole
        optimizer.close()
    return results


def load_all(names: list[str], folder: str, contiguous: bool) -> dict[str, Any]:
    """Into optimizers that have never stepped, of models with other weights; then goes on for 2 steps."""
    results = {}
    for name in names:
        model_name, optimizer_name, _, options = CASES[name]
        model = copy.deepcopy(MODELS[model_name])
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        if contiguous:
            model = model.to(memory_format=torch.contiguous_format)
            for param in model.parameters():
                param.data = param.data.contiguous()
        optimizer = dear.DistributedOptimizer(OPTIMIZERS[optimizer_name](model), model, **options)
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state["model"])
        optimizer.load_sharded_state_dict(state["optimizer"])
        loaded = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, batches_of(model, world_size(), 2)[rank()])
        results[name] = loaded, {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.close()
    return results


def going_on(name: str, saved: Any, num_ranks: int) -> dict[str, Tensor]:
    """Plain PyTorch from the same point."""
    model_name, optimizer_name, _, _ = CASES[name]
    model = copy.deepcopy(MODELS[model_name])
    with torch.no_grad():
        for n, param in model.named_parameters():
            param.copy_(saved[0][n])
    batches = batches_of(model, num_ranks, 2)
    case = Case(model, OPTIMIZERS[optimizer_name], batches=batches, optimizer_state=saved[1]).resolved(num_ranks)
    return run_plainly(case)[0].parameters


@pytest.mark.parametrize(("saved_on", "loaded_on", "asynchronously"), [(2, 3, False), (4, 1, False), (1, 2, True)])
def test_resharding(pool: RankPool, tmp_path: Path, saved_on: int, loaded_on: int, asynchronously: bool) -> None:
    names = list(CASES)
    saved = pool.run(save_all, names, str(tmp_path), asynchronously, size=saved_on, ddp=True)[0]
    loaded = pool.run(load_all, names, str(tmp_path), saved_on == 4, size=loaded_on, ddp=True)
    for name in names:
        expected = going_on(name, saved[name], loaded_on)
        for r in range(loaded_on):
            state, parameters = loaded[r][name]
            assert_bit_equal(state, saved[name][1], (f"{name}, loaded on rank {r}", "saved"))
            if loaded_on == 3 or CASES[name][0] in ("wide", "conv", "transposed"):  # other sums, other strides
                for n, param in parameters.items():
                    torch.testing.assert_close(param, expected[n], rtol=1e-5, atol=1e-6)
            else:
                assert_bit_equal(parameters, expected, (name, "plain PyTorch"))


def test_plain_pytorch_reads_it(pool: RankPool, tmp_path: Path) -> None:
    """Whole tensors of the parameters' shapes, under the names that torch gives them."""
    saved = pool.run(save_all, ["conv, adam", "transposed, adam"], str(tmp_path), False, size=3, ddp=True)[0]
    for name, model in (("conv, adam", MODELS["conv"]), ("transposed, adam", MODELS["transposed"])):
        fresh = {n: {"exp_avg": torch.zeros(p.shape), "step": torch.zeros(())} for n, p in model.named_parameters()}
        state = {"model": {n: torch.zeros(p.shape) for n, p in model.named_parameters()}, "optimizer": {"state": fresh}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        for number, (n, _) in enumerate(model.named_parameters()):
            assert torch.equal(state["model"][n], saved[name][0][n])
            assert torch.equal(fresh[n]["exp_avg"], saved[name][1]["state"][number]["exp_avg"])
            assert float(fresh[n]["step"]) == 3


def bf16(stop_at: int, folder: str) -> dict[str, Any]:
    """10 steps that are too small for bf16; stops at some and goes on from files, in both formats."""
    torch.manual_seed(0)

    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()
        return model, dear.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=2**-12), model, fusion=None)

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + rank())
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=generator).bfloat16()).float().square().sum().backward()
            optimizer.step()

    model, optimizer = make()
    steps(model, optimizer, range(stop_at))
    state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{rank()}.pt")
    steps(model, optimizer, range(stop_at, 10))
    results = {"unbroken": ({n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.state_dict())}
    optimizer.close()
    for how in ("dcp", "torch.save"):
        model, optimizer = make()
        if how == "dcp":
            state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/dcp")
            optimizer.load_sharded_state_dict(state["optimizer"])
        else:
            state = torch.load(f"{folder}/{rank()}.pt")
            optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])
        steps(model, optimizer, range(stop_at, 10))
        results[how] = ({n: p.detach().clone() for n, p in model.named_parameters()}, optimizer.state_dict())
        optimizer.close()
    return results


def test_masters_are_kept_exactly(pool: RankPool, tmp_path: Path) -> None:
    for results in pool.run(bf16, 5, str(tmp_path), size=2, ddp=True):
        assert_bit_equal(results["dcp"], results["unbroken"], ("dcp", "unbroken"))
        assert_bit_equal(results["torch.save"], results["unbroken"], ("torch.save", "unbroken"))
        assert "master_param" in results["unbroken"][1]["state"][0]


# ------------------------------------------------------------------------------------------------ saves that end early


def killed_while_saving(folder: str, delay_s: float) -> None:
    model = nn.Linear(300, 300)
    optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)

    def save(name: str) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{name}")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    step()
    save("step-1")
    step()
    if rank() == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save("step-2")
    time.sleep(1)  # the kill may come late


def resumed(folder: str) -> list[Any]:
    """Which checkpoints can be loaded, and how many steps they hold."""
    found: list[Any] = []
    for path in sorted(Path(folder).iterdir()):
        model = nn.Linear(300, 300)
        optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
        try:
            dcp.load(state, checkpoint_id=path)
        except dcp.CheckpointException as error:
            found.append((path.name, type(error).__name__))
            continue
        model.load_state_dict(state["model"])
        optimizer.load_sharded_state_dict(state["optimizer"])
        steps = {float(s["step"]) for s in optimizer.state_dict()["state"].values()}
        found.append((path.name, steps))
        optimizer.close()
    return found


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_an_interrupted_save_leaves_the_previous_one(pool: RankPool, tmp_path: Path, delay_s: float) -> None:
    """A checkpoint is there or it is not: without its last file nothing loads, and the one before is as it was."""
    outcomes = pool.run(
        killed_while_saving,
        str(tmp_path),
        delay_s,
        size=2,
        ddp=True,
        expect_lost=[1],
        expect_errors=True,
        group_timeout_s=4,
    )
    assert isinstance(outcomes[1], Outcome)
    found = dict(pool.run(resumed, str(tmp_path), size=1, ddp=True)[0])
    assert found["step-1"] == {1.0}
    assert found.get("step-2", {2.0}) in ({2.0}, "CheckpointException")


# ------------------------------------------------------------------------------------------------ errors


def without_a_group() -> None:
    model = nn.Linear(3, 2)
    dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model).sharded_state_dict()


def test_several_ranks_without_a_process_group_are_told_what_to_do(pool: RankPool) -> None:
    outcomes = pool.run(without_a_group, size=2, expect_errors=True)
    assert_raised(outcomes, "ScheduleError", r"init_process_group\(\) before dear\.init")
    pool.run(without_a_group, size=1)


def misused(how: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = dear.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    if how == "whole format":
        optimizer.load_sharded_state_dict(optimizer.state_dict())
    elif how == "read":
        print(optimizer.sharded_state_dict()["state"]["weight"]["exp_avg"] + 1)
    elif how == "groups":
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        other = nn.Linear(3, 2)
        theirs = dear.DistributedOptimizer(
            torch.optim.Adam([{"params": [other.bias]}, {"params": [other.weight]}]), other
        )
        optimizer.close()
        optimizer = dear.DistributedOptimizer(torch.optim.Adam(groups), model)
        optimizer.load_sharded_state_dict(theirs.sharded_state_dict())
    elif how == "other model":
        other = nn.Linear(4, 2)
        theirs = dear.DistributedOptimizer(torch.optim.Adam(other.parameters()), other)
        optimizer.load_sharded_state_dict(theirs.sharded_state_dict())


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("whole format", "expects what sharded_state_dict"),
        ("read", "torch.distributed.checkpoint only"),
        ("groups", "parameter group 0 is another one: 'bias'"),
        ("other model", "not of the part"),
    ],
)
def test_misuse_is_named(pool: RankPool, how: str, text: str) -> None:
    assert_raised(pool.run(misused, how, size=1, expect_errors=True), "ArgumentError", text)
