"""How a case runs: its body runs on every rank, where `Twin` trains the same model under dear and in plain PyTorch.

    @on_ranks(2)
    def test_case_009_unused_layer() -> None:       # this body runs on ranks 0 and 1
        twin = Twin(Net())
        twin.train(lambda model, rank: model(ones(rank)).sum(), steps=5)
        twin.check()

A body that takes `fusion` is repeated with one bucket a tensor and one bucket for all, each on 2 and on 3 ranks; under
`make soak` with the full cross of ranks, bucket sizes and dtypes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.support.ranks import RankPool

__all__ = ["GROUP_TIMEOUT_S", "Twin", "assert_same_everywhere", "close", "on_ranks", "ones", "raises_at_once", "sgd"]

GROUP_TIMEOUT_S = 8.0
LR = 0.1
Loss = Callable[[nn.Module, int], Tensor | None]  # (model, rank) -> loss, or None: this rank has no backward
MakeOptimizer = Callable[[nn.Module], optim.Optimizer]

Setting = tuple[Any, torch.dtype]  # fusion and dtype
_FP32 = (torch.float32,)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_FUSIONS = (None, 3e-5, dear.NearbyLayers(2), 25.0)  # 3e-5 MiB: a few elements


def on_ranks(
    size: int, dtypes: Sequence[torch.dtype] = _DTYPES, **run_options: Any
) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a body that runs on `size` ranks. `dtypes` of the full cross, if not all."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        params = list(inspect.signature(body).parameters.values())
        crossed = any(param.name == "fusion" for param in params)

        def test(pool: RankPool, layout: tuple[int, Sequence[Setting]] = (size, ()), **kw: Any) -> None:
            num_ranks, settings = layout
            options = {"group_timeout_s": GROUP_TIMEOUT_S, "timeout_s": 30 * max(1, len(settings) // 2), **run_options}
            pool.run(run_body, body.__module__, body.__name__, kw, settings, size=num_ranks, **options)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["pool", "layout"] if crossed else ["pool"]
        names += [param.name for param in params if param.name != "fusion"]
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        test.pytestmark = getattr(body, "pytestmark", [])  # type: ignore[attr-defined]
        if crossed:
            # bodies with parameters of their own are many: on 3 ranks they run with one bucket a tensor only
            thin = {2: (None, 25.0), 3: (None, 25.0) if len(params) == 1 else (None,)}
            full = list(itertools.product(_FUSIONS, dtypes))
            cells = [pytest.param((n, list(itertools.product(thin[n], _FP32))), id=f"{n}_ranks") for n in thin]
            cells += [pytest.param((n, full), id=f"{n}_ranks_full_cross", marks=pytest.mark.soak) for n in (1, 2, 3, 4)]
            return pytest.mark.parametrize("layout", cells)(test)
        return test

    return decorate


def run_body(module: str, name: str, kwargs: dict[str, Any], settings: Sequence[Setting]) -> None:
    """On a rank: what `on_ranks` was given, once for each setting where it takes a `fusion`."""
    body = getattr(importlib.import_module(module), name).body
    if not settings:
        body(**kwargs)
    for fusion, dtype in settings:
        torch.set_default_dtype(dtype)
        try:
            body(**kwargs, fusion=fusion)
        except BaseException as error:
            error.add_note(f"with fusion={fusion}, {dtype}")
            raise
        gc.collect()


# ---------------------------------------------------------------------------------------------------- on a rank


def ones(rank: int, *shape: int) -> Tensor:
    """The input of `rank`: filled with rank + 1."""
    return torch.full(shape or (1, 4), rank + 1.0)


def sgd(**options: Any) -> MakeOptimizer:
    return functools.partial(_make, optim.SGD, {"lr": LR, **options})


def made(cls: type[optim.Optimizer], **options: Any) -> MakeOptimizer:
    return functools.partial(_make, cls, options)


def _make(cls: Callable[..., optim.Optimizer], options: dict[str, Any], model: nn.Module) -> optim.Optimizer:
    return cls(model.parameters(), **options)


class Twin:
    """`model` under dear on this rank, and `plain`: REF, which sees every rank's loss and averages the gradients."""

    def __init__(self, model: nn.Module, make: MakeOptimizer | None = None, **options: Any) -> None:
        make = make or sgd()
        self.model, self.plain = model, copy.deepcopy(model)
        self.plain_optimizer = make(self.plain)
        self.wrapped = make(model)
        if torch.get_default_dtype() == torch.bfloat16:
            options.setdefault("master_dtype", None)  # REF has none
        self.optimizer = dear.DistributedOptimizer(self.wrapped, model, **options)

    def train(self, loss: Loss, steps: int = 1) -> None:
        for _ in range(steps):
            self.zero_grad()
            self.backward(loss)
            self.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.plain_optimizer.zero_grad(set_to_none)

    def backward(self, loss: Loss, local: bool = False) -> None:
        """`local`: under no_sync."""
        with self.optimizer.no_sync() if local else contextlib.nullcontext():
            mine = loss(self.model, dear.rank())
            if mine is not None:
                mine.backward()
        self.backward_plain(loss)

    def backward_plain(self, loss: Loss) -> None:
        params = list(self.plain.parameters())
        before = [param.grad for param in params]
        grads: list[list[Tensor | None]] = []
        for rank in range(dear.size()):
            for param in params:
                param.grad = None
            theirs = loss(self.plain, rank)
            if theirs is not None:
                theirs.backward()
            grads.append([param.grad for param in params])
        for index, param in enumerate(params):
            average = _mean([of_rank[index] for of_rank in grads])
            old = before[index]
            param.grad = old if average is None else average if old is None else old + average

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def both(self, act: Callable[[nn.Module, optim.Optimizer], Any]) -> tuple[Any, Any]:
        """What `act(model, optimizer)` gives under dear and in plain PyTorch."""
        return act(self.model, self.optimizer), act(self.plain, self.plain_optimizer)

    def check(self, exact: bool | None = None) -> None:
        """Parameters are REF's (bit-equal on up to two ranks) and bit-identical on all ranks.

        Not bit-equal in bf16, where torch rounds differently in the vectorised body of a loop and in its tail.
        """
        exact = dear.size() <= 2 if exact is None else exact
        exact = exact and torch.get_default_dtype() != torch.bfloat16
        self.optimizer.synchronize()
        for (name, mine), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            if exact:
                assert torch.equal(mine.detach(), theirs.detach()), f"{name}: {mine} is not REF's {theirs}"
            else:
                close(mine, theirs)
        assert_same_everywhere(self.model)


def _mean(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    sums = torch.float64 if present[0].dtype == torch.float64 else torch.float32
    total = torch.zeros_like(present[0], dtype=sums)
    for grad in present:
        total += grad
    return (total / len(grads)).to(present[0].dtype)


def assert_same_everywhere(model: nn.Module) -> None:
    """Bit-identical parameters on all ranks. Collective."""
    for name, param in model.named_parameters():
        first = dear.broadcast(param.detach())
        assert torch.equal(first, param.detach()), f"{name}: rank {dear.rank()} has {param}, rank 0 has {first}"


def close(got: Tensor | float, expected: Tensor | float) -> None:
    got = torch.as_tensor(got).detach()
    expected = torch.as_tensor(expected, dtype=got.dtype).detach()
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}.get(got.dtype, 1e-5)
    torch.testing.assert_close(got, expected.expand_as(got), rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def raises_at_once(error: type[BaseException], match: str, within_s: float = GROUP_TIMEOUT_S / 2) -> Iterator[None]:
    """A clear error on this rank that nobody had to wait for: in half the timeout at most."""
    start_s = time.monotonic()
    with pytest.raises(error, match=match):
        yield
    assert time.monotonic() - start_s < within_s, "it waited"
