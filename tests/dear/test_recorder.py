"""Times of layers, by a clock that only the layers move: what is recorded is exactly what they took.

Cannot see: CUDA events.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dear.recorder import Recorder, Times, agreed_layers
from dear.tracked import TrackedParameter, track
from dearcore.layout import ParamSpec
from dearcore.profile import LayerTime
from dearcore.streams import Stamp
from dearcore.trace import Trace


class Clock:
    """Stands in for the streams."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.trace = Trace()

    def __deepcopy__(self, memo: object) -> Clock:
        return self

    def new_stamp(self) -> Stamp:
        return Stamp(self.now_s)


class Layer(nn.Module):
    """A matrix that takes a while, and a bias that is needed and ready at the same time."""

    def __init__(self, clock: Clock, forward_s: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.clock, self.forward_s = clock, forward_s

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        self.clock.now_s += self.forward_s
        return y


class Net(nn.Module):
    """Calls its layers in another order than it has them in, and reads one without calling its module."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.last, self.first = Layer(clock, 3.0), Layer(clock, 1.0)
        self.functional = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = nn.functional.linear(x, self.functional.weight, self.functional.bias)
        self.clock.now_s += 2.0
        return self.last(x)  # type: ignore[no-any-return]


ORDER = ["first.weight", "first.bias", "functional.weight", "functional.bias", "last.weight", "last.bias"]


def _tracked(model: nn.Module) -> list[TrackedParameter]:
    return track(optim.SGD(model.parameters(), lr=0.1), model, lambda *_: [])


def _backward(recorder: Recorder, clock: Clock, tracked: list[TrackedParameter], slow: float = 1.0) -> None:
    clock.now_s += 0.5  # the loss
    index_of = {t.spec.fqn: t.spec.index for t in tracked}
    for name, seconds in (("last", 6.0), ("functional", 4.0), ("first", 2.0)):
        clock.now_s += seconds * slow
        recorder.grad_arrived(index_of[f"{name}.bias"])
        recorder.grad_arrived(index_of[f"{name}.weight"])


def _record(iterate: Callable[[nn.Module, Recorder, int], None]) -> tuple[Times, list[TrackedParameter], nn.Module]:
    clock = Clock()
    model = Net(clock)
    tracked = _tracked(model)
    recorder = Recorder(model, tracked, clock)  # type: ignore[arg-type]
    for number in range(3):
        recorder.start_iteration()
        clock.now_s += 7.0  # loading data
        iterate(model, recorder, number)
        recorder.end_iteration()
    recorder.close()
    return recorder.times(), tracked, model


def _layers(times: Times, tracked: list[TrackedParameter]) -> list[LayerTime]:
    return list(agreed_layers([t.spec for t in tracked], [times]))


def _check_plain(layers: list[LayerTime]) -> None:
    assert [layer.fqn for layer in layers[:6]] == ORDER
    assert [layer.forward_s for layer in layers[:6]] == [0.0, 1.0, 0.0, 2.0, 0.0, 3.0]
    assert {layer.fqn: layer.backward_s for layer in layers if layer.backward_s} == pytest.approx(
        {"last.bias": 6.5, "functional.bias": 4.0, "first.bias": 2.0}
    )
    assert all(layer.forward_s == layer.backward_s == 0.0 for layer in layers[6:])


def test_layers_take_what_they_took() -> None:
    def iterate(model: nn.Module, recorder: Recorder, number: int) -> None:
        model(torch.ones(3))
        _backward(recorder, model.clock, tracked_of[0])  # type: ignore[arg-type]

    tracked_of: list[Any] = [_tracked(Net(Clock()))]
    times, tracked, model = _record(iterate)
    assert times.forward_s == 6.0
    _check_plain(_layers(times, tracked))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not model._forward_hooks and not copy.deepcopy(model)._forward_hooks


def test_one_slow_iteration_does_not_count() -> None:
    def iterate(model: nn.Module, recorder: Recorder, number: int) -> None:
        model(torch.ones(3))
        _backward(recorder, model.clock, tracked_of[0], slow=1.0 if number != 1 else 50.0)  # type: ignore[arg-type]

    tracked_of: list[Any] = [_tracked(Net(Clock()))]
    times, tracked, _ = _record(iterate)
    _check_plain(_layers(times, tracked))


def test_of_several_passes_the_first_forward_and_the_last_backward_count() -> None:
    """As communication sees it: gathers are awaited in the first forward, reductions leave in the last backward."""

    def iterate(model: nn.Module, recorder: Recorder, number: int) -> None:
        for slow in (9.0, 1.0):
            model(torch.ones(3))
            _backward(recorder, model.clock, tracked_of[0], slow)  # type: ignore[arg-type]

    tracked_of: list[Any] = [_tracked(Net(Clock()))]
    times, tracked, _ = _record(iterate)
    _check_plain(_layers(times, tracked))


def test_without_gradients_there_is_nothing_to_tell() -> None:
    times, _, _ = _record(lambda model, recorder, number: model(torch.ones(3)))
    assert not times.ready_s


def test_a_moment_has_come_when_the_slowest_rank_is_there() -> None:
    specs = [ParamSpec(i, name, (2,), torch.float32) for i, name in enumerate("ab")]
    fast = Times({"a": 0.0, "b": 1.0}, 2.0, {"b": 1.0, "a": 3.0}, 0.1, 0.2)
    slow = Times({"a": 0.0, "b": 3.0}, 5.0, {"b": 2.0, "a": 3.0}, 0.1, 0.2)
    for by_rank in ([fast, slow], [slow, fast]):
        layers = agreed_layers(specs, by_rank)
        assert [(layer.fqn, layer.forward_s, layer.backward_s) for layer in layers] == [
            ("a", 3.0, 1.0),
            ("b", 2.0, 2.0),
        ]
    turned = Times({"a": 0.5, "b": 0.0}, 2.0, {"a": 1.0, "b": 3.0}, 0.1, 0.2)
    assert [layer.fqn for layer in agreed_layers(specs, [turned, fast])] == ["b", "a"]


def test_compiled_parameters_are_needed_when_the_forward_begins() -> None:
    clock = Clock()
    model = Net(clock)
    tracked = _tracked(model)
    hidden = {id(p) for p in model.last.parameters()}
    recorder = Recorder(model, tracked, clock)  # type: ignore[arg-type]
    recorder.start_iteration(hidden)
    assert all(type(p) is nn.Parameter for p in model.last.parameters())
    model(torch.ones(3))
    _backward(recorder, clock, tracked)
    recorder.end_iteration()
    recorder.close()
    layers = {layer.fqn: layer for layer in _layers(recorder.times(), tracked)}
    names = list(layers)
    assert names.index("last.weight") < names.index("functional.weight")
    assert layers["last.bias"].backward_s == 6.5
    assert sum(layer.forward_s for layer in layers.values()) == 6.0


def test_an_iteration_in_which_a_compiler_worked_is_left_out() -> None:
    """It met the gates, which therefore stay away from then on: all parameters are needed when the forward begins."""

    def iterate(model: nn.Module, recorder: Recorder, number: int) -> None:
        assert (type(next(model.parameters())) is nn.Parameter) == (number > 0)
        model(torch.ones(3))
        if number == 0:
            recorder._gates[0].compiler_touched = True
            model.clock.now_s += 1000.0  # type: ignore[operator,union-attr]
        _backward(recorder, model.clock, tracked_of[0])  # type: ignore[arg-type]

    tracked_of: list[Any] = [_tracked(Net(Clock()))]
    times, tracked, _ = _record(iterate)
    layers = _layers(times, tracked)
    assert sum(layer.forward_s for layer in layers) == 7.0 + 6.0  # loading data cannot be told from the forward
    assert {layer.fqn: layer.backward_s for layer in layers if layer.backward_s} == pytest.approx(
        {"last.bias": 6.5, "functional.bias": 4.0, "first.bias": 2.0}
    )
