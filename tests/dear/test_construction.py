"""What is refused when an optimizer is wrapped, or at the next step: alike on every rank, in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import dear
from tests.support.ranks import RankPool, assert_raised


def _sgd(model: nn.Module, **options: Any) -> dear.DistributedOptimizer:
    return dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, **options)


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _different_shape() -> Any:
    return _sgd(nn.Linear(3, 2 + dear.rank()))


def _different_dtype() -> Any:
    return _sgd(nn.Linear(3, 2).to(torch.float64 if dear.rank() else torch.float32))


def _extra_layer() -> Any:
    return _sgd(nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 + dear.rank()))))


def _different_requires_grad() -> Any:
    model = _two_layers()
    model[0].bias.requires_grad_(dear.rank() == 0)
    return _sgd(model)


def _different_lr() -> Any:
    model = _two_layers()
    return dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1 * (1 + dear.rank())), model)


def _different_class() -> Any:
    model = _two_layers()
    return dear.DistributedOptimizer((optim.Adam if dear.rank() else optim.AdamW)(model.parameters()), model)


def _different_fusion() -> Any:
    return _sgd(_two_layers(), fusion=1.0 + dear.rank())


def _different_state() -> Any:
    model = _two_layers()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dear.rank():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return dear.DistributedOptimizer(optimizer, model)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (_different_shape, r"'weight'"),
        (_different_dtype, r"'weight'.*float64"),
        (_extra_layer, r"'2.weight'"),
        (_different_requires_grad, r"'0.bias'.*requires_grad"),
        (_different_lr, r"lr"),
        (_different_class, r"AdamW.*Adam"),
        (_different_fusion, r"fusion"),
        (_different_state, r"momentum_buffer"),
    ],
)
def test_ranks_that_wrap_different_things(pool: RankPool, build: Callable[[], Any], names: str) -> None:
    """pytorch#73547, #76449: the same error on all ranks, with the first difference."""
    outcomes = pool.run(build, size=3, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", names)
    assert len({outcome.message for outcome in outcomes}) == 1, "the same sentence on every rank"


@pytest.fixture
def alone() -> Any:
    dear.init(backend="local")
    yield
    dear.shutdown()


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: _sgd(_two_layers(), fusion=0), "expected MiB"),
    (lambda: _sgd(_two_layers(), fusion=-1.0), "expected MiB"),
    (lambda: _sgd(_two_layers(), fusion=float("nan")), "expected MiB"),
    (lambda: _sgd(_two_layers(), fusion=True), "expected MiB"),
    (lambda: dear.NearbyLayers(0), "layers >= 1"),
    (lambda: _sgd(_two_layers(), schedule="ring"), "expected one of"),
    (lambda: _sgd(_two_layers(), shard="yes"), "'auto'"),
    (lambda: _sgd(_two_layers(), accumulate=0), "backward passes"),
    (lambda: _sgd(_two_layers(), reduce_dtype=torch.int32), "floating-point"),
    (lambda: _sgd(_two_layers(), group=[5]), "ranks"),
    (lambda: dear.DistributedOptimizer(_sgd(_two_layers()), _two_layers()), "already"),
    (lambda: dear.DistributedOptimizer(nn.Linear(2, 2), _two_layers()), "torch.optim.Optimizer"),  # type: ignore[arg-type]
    (lambda: dear.DistributedOptimizer(optim.SGD(nn.Linear(2, 2).parameters()), "model"), "nn.Module"),  # type: ignore[arg-type]
    (lambda: dear.DistributedOptimizer(optim.SGD(nn.Linear(2, 2).parameters()), _two_layers()), "not in the model"),
    (lambda: dear.DistributedOptimizer(optim.LBFGS(m := [*_two_layers().parameters()]), nn.ParameterList(m)), "LBFGS"),
    (
        lambda: dear.DistributedOptimizer(optim.SparseAdam(m := [*_two_layers().parameters()]), nn.ParameterList(m)),
        "dense",
    ),
    (
        lambda: dear.DistributedOptimizer(optim.Adafactor((m := _two_layers()).parameters()), m, shard=True),
        "element-wise",
    ),
    (lambda: _sgd(nn.Sequential(nn.LazyLinear(3))), "Run one forward"),
    (lambda: _sgd(nn.ParameterList([torch.ones(2, dtype=torch.complex64)])), "complex64"),
    (lambda: _sgd(nn.Linear(2, 2).requires_grad_(False)), "no trainable parameter"),
]


@pytest.mark.parametrize(("call", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_arguments(alone: None, call: Callable[[], Any], says: str) -> None:
    with pytest.raises(dear.ArgumentError, match=says):
        call()


def test_a_parameter_has_one_optimizer(alone: None) -> None:
    model = _two_layers()
    first = _sgd(model)
    with pytest.raises(dear.ArgumentError, match=r"'0\.weight' is trained by another"):
        _sgd(model)
    first.close()
    _sgd(model).close()


def test_shared_memory_is_not_a_tie(alone: None) -> None:
    model = _two_layers()
    model.register_parameter("alias", nn.Parameter(model[0].weight.data[1:]))
    with pytest.raises(dear.ArgumentError, match="share memory"):
        _sgd(model)


def test_wrapping_without_init() -> None:
    with pytest.raises(dear.ScheduleError, match=r"dear\.init\(\)"):
        _sgd(_two_layers())
    with pytest.raises(dear.ScheduleError, match=r"dear\.init\(\)"):
        dear.rank()


def _step(model: nn.Module, optimizer: dear.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _unfreeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(True)


def _new_head(model: nn.Sequential) -> None:
    model[1] = nn.Linear(3, 2)


def _one_more(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def _halve(model: nn.Sequential) -> None:
    model.zero_grad()
    model[1].to(torch.float64)
    model[1].register_forward_pre_hook(lambda _, args: args[0].double())


def _assign(model: nn.Sequential) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _weight_norm(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_unfreeze, r"'0\.weight' was frozen"),
        (_new_head, r"'1\.weight' is no longer part"),
        (_one_more, "'2.weight' was added"),
        (_halve, r"'1\.weight' was torch.float32"),
        (_assign, "is no longer part"),
        (_weight_norm, "is no longer part"),
    ],
)
def test_changes_after_wrapping_are_reported_at_the_next_step(
    alone: None, change: Callable[[nn.Sequential], None], says: str
) -> None:
    model = _two_layers()
    model[0].weight.requires_grad_(False)
    optimizer = _sgd(model)
    _step(model, optimizer)
    change(model)
    with pytest.raises(dear.ScheduleError, match=says):
        _step(model, optimizer)


def test_modules_may_be_replaced_around_their_parameters(alone: None) -> None:
    """convert_sync_batchnorm keeps Parameters but makes new modules."""
    model = _two_layers()
    optimizer = _sgd(model)
    _step(model, optimizer)
    other = nn.Linear(3, 2)
    other.weight, other.bias = model[1].weight, model[1].bias
    model[1] = other
    before = other.bias.detach().clone()
    _step(model, optimizer)
    torch.testing.assert_close(model[1].bias.detach(), before - 0.1 * 2)


def test_new_memory_is_taken_back(alone: None) -> None:
    """`.data = ...` and `.to()` there and back give other memory; training goes on with the new values."""
    model, plain = _two_layers(), _two_layers()
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = _sgd(model), optim.SGD(plain.parameters(), lr=0.1)
    for m, o in ((model, optimizer), (plain, plain_optimizer)):
        for _ in range(2):
            o.zero_grad()
            m(torch.ones(2, 4)).sum().backward()
            o.step()
            m[0].weight.data = torch.full((3, 4), 5.0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_close_gives_everything_back(alone: None) -> None:
    model = _two_layers()
    optimizer = _sgd(model)
    _step(model, optimizer)
    params = list(model.parameters())
    optimizer.close()
    optimizer.close()
    for param in params:
        assert type(param) is nn.Parameter
        assert param.untyped_storage().nbytes() == param.numel() * 4, "memory of its own"
        assert param.grad is None
    model(torch.ones(2, 4)).sum().backward()
    assert params[0].grad is not None and type(params[0].grad) is torch.Tensor
    with pytest.raises(dear.ScheduleError, match="was closed"):
        optimizer.step()


def test_init_twice_and_bad_arguments() -> None:
    with pytest.raises(dear.ArgumentError, match="expected one of"):
        dear.init(backend="mpi")
    with pytest.raises(dear.ArgumentError, match="timedelta"):
        dear.init(timeout=5)  # type: ignore[arg-type]
    dear.init()
    dear.init(backend="gloo")
    assert (dear.rank(), dear.size(), dear.local_rank(), dear.local_size()) == (0, 1, 0, 1)
    assert dear.is_initialized()
    dear.shutdown()
    assert not dear.is_initialized()
