"""Random programs under dear against plain PyTorch, and proof that the tester finds, names and shrinks what is wrong.

Cannot see: what torch itself does wrong on both sides, more than three ranks, other devices than the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
from dear.gradients import InFlightGradient
from dear.parameters import Gate
from dearcore.bucket import BucketRuntime
from dearcore.shard import TorchStepper
from tests.differential.draw import LATER, draw, objection
from tests.differential.program import (
    Backward,
    ClipValue,
    Compare,
    Evaluate,
    Layer,
    Optimizer,
    Options,
    Program,
    StepNow,
    ZeroGrad,
    from_json,
    own_part,
    script,
    to_json,
)
from tests.differential.running import Failure, Limits, Runner, Setup
from tests.differential.shrinking import shrink
from tests.support.ranks import RankPool, rank

REPO = Path(__file__).resolve().parents[2]
NUM_SEEDS = 33  # on 2 and on 3 ranks
# Programs that the library is known to fail: (seed, ranks) -> why.
KNOWN: dict[tuple[int, int], str] = {}


def check_programs(pool: RankPool, seeds: range, ranks: int, folder: Path) -> None:
    """Fails with the shrunk script of each program that fails; the whole scripts are in `folder`."""
    __tracebackhide__ = True
    programs = [draw(seed, ranks) for seed in seeds if (seed, ranks) not in KNOWN]
    runner = Runner(pool)
    reports = []
    for number, failure in enumerate(runner.failures(programs)):
        shrunk = shrink(failure, runner, max_seconds=20) if number < 3 else failure
        file = folder / f"seed_{failure.program.seed}_on_{ranks}.py"
        file.write_text(script(shrunk.program))
        reports.append(f"{shrunk}\nthe whole script: {file}\nas data: {to_json(shrunk.program)}")
    assert not reports, f"{len(reports)} of {len(programs)} programs\n\n" + "\n\n".join(reports)


@pytest.mark.timeout(300)  # a failure takes time to shrink
@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_come_to_what_plain_pytorch_comes_to(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    check_programs(pool, range(NUM_SEEDS), ranks, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(0, 800, 100))
@pytest.mark.parametrize("ranks", [2, 3])
def test_many_more_programs(pool: RankPool, tmp_path: Path, ranks: int, start: int) -> None:
    check_programs(pool, range(NUM_SEEDS + start, NUM_SEEDS + start + 100), ranks, tmp_path)


# ---------------------------------------------------------------------------------------------------- reader threads


def with_readers(num_steps: int, num_readers: int) -> tuple[int, list[torch.Tensor]]:
    """How many of the main thread's own copies were stale, and the weights in the end."""
    import threading

    from tests.differential.prelude import read  # what the programs run

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, fusion=None)
    stop, stale = threading.Event(), 0
    readers = [threading.Thread(target=read, args=(model, stop), daemon=True) for _ in range(num_readers)]
    for reader in readers:
        reader.start()
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 16), (step % 7) / 7 + dear.rank())).square().mean().backward()
        optimizer.step()
        seen = [p.detach().clone() for p in model.parameters()]
        optimizer.synchronize()
        stale += not all(map(torch.equal, seen, [p.detach() for p in model.parameters()]))
    stop.set()
    for reader in readers:
        reader.join()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return stale, weights


@pytest.mark.skipif("readers" in LATER, reason="S1 is not mended: tests/differential/draw.py, LATER")
@pytest.mark.parametrize("num_steps", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_reading_threads_change_nothing(pool: RankPool, num_steps: int) -> None:
    alone = pool.run(with_readers, num_steps, 0, timeout_s=1200)
    read = pool.run(with_readers, num_steps, 2, timeout_s=2400)
    assert [stale for stale, _ in read] == [0, 0]
    assert all(map(torch.equal, alone[0][1], read[0][1])) and all(map(torch.equal, read[0][1], read[1][1]))


# ---------------------------------------------------------------------------------------------------- planted defects


def patched(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def without_weight_decay() -> Callable[[], None]:
    step = TorchStepper.step

    def forgetful(self: Any, used: torch.Tensor, hyper: Any) -> None:
        step(self, used, [{**group, "weight_decay": 0.0} for group in hyper])

    return patched(TorchStepper, "step", forgetful)


def without_gates() -> Callable[[], None]:
    """Nobody waits for parameters, and they come late."""
    gather = BucketRuntime.start_all_gather

    def late(self: Any, step: int) -> None:
        self._streams.communication.run("a slow network", lambda: time.sleep(0.05))
        gather(self, step)

    undo = patched(Gate, "arm", lambda self: None), patched(BucketRuntime, "start_all_gather", late)

    def undo_both() -> None:
        for each in undo:
            each()

    return undo_both


def zeros_are_forgotten() -> Callable[[], None]:
    """zero_grad(set_to_none=False) keeps what was averaged."""
    return patched(InFlightGradient, "zero", lambda self: None)


def rank_1_steps_otherwise() -> Callable[[], None]:
    step = TorchStepper.step

    def own(self: Any, used: torch.Tensor, hyper: Any) -> None:
        step(self, used, [{**group, "lr": group["lr"] * (1 + rank() / 4)} for group in hyper])

    return patched(TorchStepper, "step", own)


def rank_1_hangs() -> Callable[[], None]:
    def stuck(self: Any, closure: Any = None) -> None:
        if rank() == 1:
            time.sleep(3600)

    return patched(dear.DistributedOptimizer, "step", stuck)


def every_step_raises() -> Callable[[], None]:
    def refuse(self: Any, closure: Any = None) -> None:
        raise RuntimeError(f"no step {rank()} today")

    return patched(dear.DistributedOptimizer, "step", refuse)


PLENTY = Program(
    layers=(Layer(sizes=(7, 3)), Layer("bare", (13,)), Layer(sizes=(5, 5), twice=True)),
    optimizer=Optimizer(options={"momentum": 0.5, "weight_decay": 0.25}),
    options=Options(fusion=None),
    whole_numbers=True,
    steps=(
        (ZeroGrad(), Backward(1), StepNow(), Evaluate(2)),
        (ZeroGrad(), Backward(3, local=True), Backward(4), ClipValue(), StepNow(), Compare()),
        (ZeroGrad(to_none=False), Backward(5), StepNow()),
    ),
)


@pytest.mark.parametrize(
    ("defect", "kind", "is_needed"),
    [
        (without_weight_decay, "wrong", "weight_decay"),
        (without_gates, "wrong", "Evaluate|Compare"),
        (zeros_are_forgotten, "wrong", "to_none"),
        (rank_1_steps_otherwise, "wrong", "StepNow"),
        (every_step_raises, "RuntimeError: no step _ today", "StepNow"),
    ],
    ids=["weight decay", "waits", "zeros", "one rank", "error"],
)
def test_a_planted_defect_is_found_and_shrunk(pool: RankPool, defect: Setup, kind: str, is_needed: str) -> None:
    runner = Runner(pool, defect)
    (failure,) = runner.failures([replace(PLENTY, steps=()), PLENTY])
    assert failure.program == PLENTY and failure.kind.startswith(kind), failure
    shrunk = shrink(failure, runner, max_runs=8)
    assert shrunk.kind == failure.kind
    assert len(shrunk.program.steps) <= 2 and len(str(shrunk)) < len(str(failure))
    assert any(word in repr(shrunk.program) for word in is_needed.split("|"))


def test_a_program_that_hangs_is_named_and_the_others_run(pool: RankPool) -> None:
    runner = Runner(pool, rank_1_hangs, Limits(group_timeout_s=30.0, timeout_s=8.0))
    (failure,) = runner.failures([replace(PLENTY, steps=((Evaluate(1),),)), PLENTY])
    assert (failure.program, failure.kind) == (PLENTY, "hang")
    assert "seed 0 on 2 ranks" in str(failure) and "stuck" in str(failure)


# ---------------------------------------------------------------------------------------------------- programs as data


def test_shrinking_keeps_what_the_failure_needs() -> None:
    """On a made-up failure: a rate that is set before a bare parameter is clipped."""

    def run(program: Program) -> Failure | None:
        text = own_part(program)
        wrong = "nn.Parameter(" in text and "clip_grad_value_" in text and "set_lr(" in text
        return Failure(program, "made up", "") if wrong else None

    found = (failure for seed in range(500) if (failure := run(draw(seed, 3))) is not None)
    shrunk = shrink(next(found), run, max_runs=2000).program
    assert (shrunk.ranks, len(shrunk.steps), len(shrunk.layers), shrunk.options) == (2, 1, 1, Options())
    assert sorted(type(op).__name__ for op in shrunk.steps[0]) == ["ClipValue", "SetLr"]


def test_a_failure_of_another_kind_is_not_followed() -> None:
    def run(program: Program) -> Failure | None:
        return Failure(program, "the same" if len(program.steps) > 1 else "another", "")

    first = run(draw(1))
    assert first is not None
    assert len(shrink(first, run).program.steps) == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_survive_json_and_are_the_same_every_time(ranks: int) -> None:
    for seed in range(50):
        program = draw(seed, ranks)
        assert draw(seed, ranks) == program == from_json(to_json(program))
        assert not objection(program)
        compile(script(program), "", "exec")


def test_what_is_drawn_covers_what_is_promised() -> None:
    texts = [own_part(draw(seed, ranks)) for seed in range(400) for ranks in (2, 3)]
    promised = """no_sync join() GradScaler inf') full_grad clip_grad_norm_ clip_grad_value_ set_to_none=False
        model.zero_grad copy.deepcopy(model) load_state_dict optimizer.close() replan( fail= closure clamp(model)
        scheduler.step set_lr( channels_last .t() float64 bfloat16 BatchNorm1d (0, requires_grad_(False) accumulate=
        reduce_dtype= master_dtype=None shard=False NearbyLayers "horovod" "mg-wfbp" "bytescheduler" "dear-fill"
        all_early "ddp" "wfbp" Lars Subclass NAdam RAdam Adagrad RMSprop Adadelta Adamax AdamW torch.tensor( nesterov
        deterministic=True rank&>&0 if&False: .weight&=&self skip= only= evaluation
        retain_graph p.grad&=&None p.grad&=&torch.full plain.optimizer.load_state_dict checkpoint( float16"""
    for word in promised.split():
        count = sum(word.replace("&", " ") in text for text in texts)
        assert count >= 3, f"{word} is in {count} of {len(texts)} programs"


def test_a_printed_script_runs_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "printed.py"
    file.write_text(script(PLENTY))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")]), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
