"""Other threads touch the model while the main thread trains: evaluation, EMA, saving, logging, closing."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, on_ranks
from tests.support.ranks import RankPool


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])


@contextlib.contextmanager
def readers(*touches: Callable[[], object]) -> Iterator[None]:
    """Threads that call these without an end; what one of them raises is raised at the end of the block."""
    stop, errors = threading.Event(), []

    def read(touch: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                touch()
                time.sleep(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(touch,)) for touch in touches]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"
    if errors:
        raise errors[0]


def train(steps: int, touches: Callable[[nn.Module], list[Callable[[], object]]]) -> tuple[int, list[Tensor]]:
    """Trains beside readers. Returns after how many steps the main thread saw stale weights, and the weights."""
    model = layers()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model, fusion=None)
    batch = torch.full((4, 16), dear.rank() + 1.0)
    num_stale = 0
    with readers(*touches(model)):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            seen = [p.detach().clone() for p in model.parameters()]
            optimizer.synchronize()
            now = [p.detach().clone() for p in model.parameters()]
            num_stale += any(not torch.equal(one, other) for one, other in zip(seen, now, strict=True))
    assert_same_everywhere(model)
    optimizer.close()
    return num_stale, [p.detach().clone() for p in model.parameters()]


def nobody(model: nn.Module) -> list[Callable[[], object]]:
    return []


def two_readers(model: nn.Module) -> list[Callable[[], object]]:
    def read() -> None:
        for param in model.parameters():
            param.detach()
            time.sleep(0)

    return [read, read]


def evaluator_and_saver(model: nn.Module) -> list[Callable[[], object]]:
    ema = [param.detach().clone() for param in layers().parameters()]

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 16))
        copy.deepcopy(model)(torch.ones(2, 16)).sum().backward()

    def save() -> None:
        torch.save(model.state_dict(), io.BytesIO())
        torch._foreach_lerp_(ema, [param.detach() for param in model.parameters()], 0.1)

    return [evaluate, save]


def check_readers(steps: int) -> None:
    _, alone = train(steps, nobody)
    for touches in (two_readers, evaluator_and_saver):
        num_stale, weights = train(steps, touches)
        assert num_stale == 0, f"stale in {num_stale} of {steps} steps beside {touches.__name__}"
        assert all(torch.equal(one, other) for one, other in zip(weights, alone, strict=True))


@on_ranks(2)
def test_field_s1_threads_that_read_while_the_main_thread_trains() -> None:
    check_readers(40)


def two_readers_for_long(steps: int) -> None:
    _, alone = train(steps, nobody)
    num_stale, weights = train(steps, two_readers)
    assert num_stale == 0, f"stale in {num_stale} of {steps} steps"
    assert all(torch.equal(one, other) for one, other in zip(weights, alone, strict=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_field_s1_two_readers_for_20000_steps(pool: RankPool) -> None:
    pool.run(two_readers_for_long, 20_000, size=2, timeout_s=1700)


@on_ranks(2)
def test_field_s1_stats_timeline_and_metadata_from_other_threads() -> None:
    twin = Twin(layers())

    def look() -> None:
        str(twin.optimizer.stats())
        str(twin.optimizer.plan)
        repr(twin.optimizer)
        for param in twin.model.parameters():
            assert param.shape[-1] == 16 and param.requires_grad

    def touch() -> None:
        for param in twin.model.parameters():
            param.detach().sum()

    with readers(look, touch):
        timeline = dear.Timeline(twin.optimizer)
        with timeline:
            twin.train(lambda model, rank: model(torch.full((2, 16), rank + 1.0)).square().mean(), steps=30)
    twin.check()


@on_ranks(2)
def test_field_s1_no_grad_evaluation_during_the_backward() -> None:
    """A hook in the backward evaluates the model in another thread, and waits for it."""
    twin = Twin(layers())
    outputs: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            outputs.append(twin.model(torch.ones(1, 16)))

    def in_backward(_: Tensor) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join(20)

    def loss(model: nn.Module, rank: int) -> Tensor:
        hidden = model[:3](torch.full((2, 16), rank + 1.0))  # type: ignore[index]
        if model is twin.model:
            hidden.register_hook(in_backward)
        return model[3:](hidden).square().mean()  # type: ignore[index, no-any-return]

    for _ in range(5):
        with torch.no_grad():
            expected = twin.plain(torch.ones(1, 16))
        twin.train(loss)
        assert torch.equal(outputs[-1], expected)
    twin.check()


@on_ranks(2)
def test_field_s1_close_while_another_thread_waits() -> None:
    for _ in range(20):
        twin = Twin(layers(), fusion=None)
        started = threading.Event()
        sums: list[Tensor] = []

        def read(twin: Twin = twin, started: threading.Event = started, sums: list[Tensor] = sums) -> None:
            started.set()
            sums.extend(param.detach().clone() for param in twin.model.parameters())

        twin.train(lambda model, rank: model(torch.full((2, 16), rank + 1.0)).square().mean())
        thread = threading.Thread(target=read)
        thread.start()
        started.wait(20)
        twin.optimizer.close()
        thread.join(20)
        assert not thread.is_alive()
        assert all(torch.equal(one, other) for one, other in zip(sums, twin.plain.parameters(), strict=True))
        assert all(type(param) is nn.Parameter for param in twin.model.parameters())
