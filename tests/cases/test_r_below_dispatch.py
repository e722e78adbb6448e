"""Right after `step()`, while new weights are on their way: what torch does without asking a parameter's class."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn, optim

import dear

LATE_S = 0.05


def parameter_of_a_parameter(model: nn.Linear) -> Tensor:
    return nn.Parameter(model.weight).detach().clone()


def parameter_subclass(model: nn.Linear) -> Tensor:
    class Mine(nn.Parameter):
        pass

    return Mine(model.weight).detach().clone()


def data_of_a_tensor(model: nn.Linear) -> Tensor:
    tensor = torch.zeros(1)
    tensor.data = model.weight
    return tensor.clone()


def data_of_another_layer(model: nn.Linear) -> Tensor:
    layer = nn.Linear(3, 3)
    layer.weight.data = model.weight
    return layer.weight.detach().clone()


def traced(model: nn.Linear) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        trace = torch.jit.trace(model, torch.ones(1, 3))
    assert torch.equal(trace(torch.ones(1, 3)), model(torch.ones(1, 3)))
    return trace.weight.detach().clone()  # type: ignore[no-any-return]


def as_subclass(model: nn.Linear) -> Tensor:
    return model.weight.as_subclass(Tensor).detach().clone()  # type: ignore[no-any-return]


def buffer(model: nn.Linear) -> Tensor:
    return nn.Buffer(model.weight).detach().clone()


TOUCHES = [
    parameter_of_a_parameter, parameter_subclass, data_of_a_tensor, data_of_another_layer, traced, as_subclass, buffer
]  # fmt: skip


@pytest.fixture
def local() -> Iterator[None]:
    dear.init(backend="local")
    yield
    dear.shutdown()


@pytest.mark.parametrize("touch", TOUCHES)
def test_field_h13_what_torch_takes_below_its_dispatch_is_fresh(local: None, touch: Callable[..., Tensor]) -> None:
    model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = optim.SGD(plain.parameters(), lr=1.0)
    plain(torch.ones(1, 3)).sum().backward()
    plain_optimizer.step()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.ones(1, 3)).sum().backward()
    released = threading.Event()
    optimizer._engine.streams.step.run("hold", lambda: _wait_for(released))  # the new values come late
    optimizer.step()
    timer = threading.Timer(LATE_S, released.set)
    timer.start()
    assert torch.equal(touch(model), plain.weight)
    optimizer.close()


def _wait_for(event: threading.Event) -> None:
    event.wait(20)
