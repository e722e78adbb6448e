"""Between backward and step `p.grad` is on its way: what is allowed works, everything else is an error that helps.

Cannot see: whether the average is right (parity).
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dear
from dear.gradients import InFlightGradient
from tests.support.ranks import RankPool
from tests.support.reference import TOLERANCES, assert_bit_equal, assert_close

LR = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        return y


def x(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[None, 25.0], ids=["a bucket a tensor", "one bucket"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    dear.init(backend="local")
    try:
        yield Pair(Net(), request.param)
    finally:
        dear.shutdown()


class Pair:
    """A model under dear and its twin under the plain optimizer: whatever is done to both must come to the same."""

    def __init__(self, model: nn.Module, fusion: float | None, **options: Any) -> None:
        self.model, self.reference = model, copy.deepcopy(model)
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
        self.optimizer = dear.DistributedOptimizer(sgd, model, fusion=fusion, **options)
        self.plain = torch.optim.SGD(self.reference.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
        self.both(lambda m, o: (m(x()).sum().backward(), o.step(), o.zero_grad()))  # lays out anew

    def both(self, action: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        action(self.reference, self.plain)
        action(self.model, self.optimizer)

    def backward(self, seed: int = 0) -> None:
        self.both(lambda m, o: m(x(seed)).square().sum().backward())

    def check_step(self) -> None:
        self.both(lambda m, o: (o.step(), o.zero_grad()))
        self.check()

    def check(self) -> None:
        got = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        assert_bit_equal(got, {name: p.detach().clone() for name, p in self.reference.named_parameters()})


def test_gradients_are_in_flight_from_backward_to_zero_grad(pair: Pair) -> None:
    assert all(p.grad is None for p in pair.model.parameters())
    pair.backward()
    grads = [p.grad for p in pair.model.parameters()]
    assert all(isinstance(grad, InFlightGradient) for grad in grads)
    assert [(g.shape, g.dtype, g.device) for g in grads] == [
        (p.shape, p.dtype, p.device) for p in pair.model.parameters()
    ]
    pair.check_step()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.backward()
    assert all(p.grad is grad for p, grad in zip(pair.model.parameters(), grads, strict=True)), "made anew each time"


USES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "torch's clip_grad_norm_": lambda p, g: torch.nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_norm_ without foreach": lambda p, g: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_value_": lambda p, g: torch.nn.utils.clip_grad_value_([p], 1.0),
    "get_total_norm": lambda p, g: torch.nn.utils.get_total_norm([g]),
    "norm": lambda p, g: g.norm(),
    "vector_norm": lambda p, g: torch.linalg.vector_norm(g),
    "abs": lambda p, g: g.abs().max(),
    "isnan": lambda p, g: torch.isnan(g).any(),
    "isfinite": lambda p, g: torch.isfinite(g).all(),
    "mul_": lambda p, g: g.mul_(0.5),
    "div_": lambda p, g: g.div_(2),
    "*=": lambda p, g: g.__imul__(0.5),
    "+": lambda p, g: g + 1,
    "a right operand": lambda p, g: 2 * g,
    "copy_ into": lambda p, g: g.copy_(torch.zeros_like(p)),
    "copy_ from": lambda p, g: torch.zeros_like(p).copy_(g),
    "add_ to another": lambda p, g: torch.zeros_like(p).add_(g),
    "clone": lambda p, g: g.clone(),
    "to": lambda p, g: g.to(torch.float64),
    "cpu, as numpy": lambda p, g: g.numpy(),
    "tolist": lambda p, g: g.tolist(),
    "item": lambda p, g: g.sum().item(),
    "float": lambda p, g: g.sum().__float__(),
    "index": lambda p, g: g[0],
    "assigning an element": lambda p, g: g.__setitem__(0, 1.0),
    "view": lambda p, g: g.view(-1),
    "flatten": lambda p, g: g.flatten(),
    "data": lambda p, g: g.data.mul_(2),
    "detach": lambda p, g: g.detach().mul_(2),
    "fill_": lambda p, g: g.fill_(1.0),
    "foreach_mul_": lambda p, g: torch._foreach_mul_([g], 0.5),
    "foreach_norm": lambda p, g: torch._foreach_norm([g]),
    "stack": lambda p, g: torch.stack([g, g]),
    "the plain optimizer": lambda p, g: torch.optim.SGD([p], lr=0.1).step(),
    "Adam": lambda p, g: torch.optim.Adam([p], lr=0.1).step(),
    "fused SGD": lambda p, g: torch.optim.SGD([p], lr=0.1, fused=True).step(),
    "deepcopy": lambda p, g: copy.deepcopy(g),
    "torch.save": lambda p, g: torch.save(g, io.BytesIO()),
    "pickle": lambda p, g: pickle.dumps(g),
    "equal": lambda p, g: torch.equal(g, torch.zeros_like(p)),
    "==": lambda p, g: (g == 0).all(),
    "parameters_to_vector": lambda p, g: torch.nn.utils.parameters_to_vector([g]),
    "all_reduce by hand": lambda p, g: torch.add(torch.zeros_like(p), g),
    "data_ptr": lambda p, g: g.data_ptr(),
    "add_ with alpha": lambda p, g: g.add_(torch.ones_like(p), alpha=2.0),
    "add_ a number": lambda p, g: g.add_(1.0),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_names_the_parameter_and_the_way_out(pair: Pair, use: str) -> None:
    pair.backward()
    before = pair.model.fc.weight.detach().clone()
    param = pair.model.fc.weight
    assert param.grad is not None
    with pytest.raises(dear.ScheduleError) as caught:
        USES[use](param, param.grad)
    text = str(caught.value)
    assert "'fc.weight'" in text
    for call in ("clip_grad_norm_", "clip_grad_value_", "full_grad"):
        assert call in text
    assert_bit_equal(param.detach(), before)
    pair.check_step()  # and nothing is broken by it


def test_repr_does_not_raise_and_says_what_to_do(pair: Pair) -> None:
    pair.backward()
    for text in (repr(pair.model.fc.weight.grad), str(pair.model.fc.weight.grad), f"{pair.model.fc.weight.grad}"):
        assert "fc.weight" in text
        assert "full_grad" in text


def test_metadata_may_be_read(pair: Pair) -> None:
    pair.backward()
    grad = pair.model.fc.weight.grad
    assert grad is not None
    assert (tuple(grad.shape), grad.dtype, grad.numel(), grad.is_sparse, grad.requires_grad) == (
        (2, 3),
        torch.float32,
        6,
        False,
        False,
    )


@pytest.mark.parametrize("by", ["optimizer", "model", "hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_the_step_forgets_the_gradient(pair: Pair, by: str, set_to_none: bool) -> None:
    pair.backward(1)

    def zero(m: nn.Module, o: torch.optim.Optimizer) -> None:
        if by == "optimizer":
            o.zero_grad(set_to_none=set_to_none)
        elif by == "model":
            m.zero_grad(set_to_none=set_to_none)
        else:
            for p in m.parameters():
                if set_to_none:
                    p.grad = None
                else:
                    assert p.grad is not None
                    p.grad.zero_()

    pair.both(zero)
    pair.check_step()  # with zeros: weight decay and momentum; with None: nothing
    pair.backward(2)
    pair.check_step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_then_another_backward(pair: Pair, set_to_none: bool) -> None:
    for seed in (1, 2):
        pair.both(lambda m, o: o.zero_grad(set_to_none=set_to_none))
        pair.backward(seed)
    pair.check_step()


def test_zero_grad_of_one_parameter(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m, o: setattr(m.fc.bias, "grad", None))
    pair.check_step()


def test_zero_grad_of_one_parameter_to_zeros(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m, o: m.fc.bias.grad.zero_())
    pair.check_step()


def test_autograd_accumulates_into_it(pair: Pair) -> None:
    for seed in range(2):
        pair.backward(seed)
    pair.check_step()


def test_later_gradients_are_summed_before_they_are_added_to_the_first(pair: Pair) -> None:
    for seed in range(4):
        pair.backward(seed)
    pair.both(lambda m, o: (o.step(), o.zero_grad()))
    for p, q in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), TOLERANCES["summation order"])


def test_gradients_kept_over_a_step_are_added_to(pair: Pair) -> None:
    pair.backward(1)
    pair.both(lambda m, o: o.step())  # no zero_grad
    pair.check()
    pair.backward(2)
    pair.check_step()


def test_a_graph_backwarded_twice(pair: Pair) -> None:
    def twice(m: nn.Module, o: torch.optim.Optimizer) -> None:
        loss = m(x()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    pair.both(twice)
    pair.check_step()


def test_backward_for_some_inputs_only(pair: Pair) -> None:
    pair.both(lambda m, o: m(x()).sum().backward(inputs=[m.scale]))
    assert pair.model.fc.weight.grad is None
    pair.check_step()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_gradient_with_a_graph_is_detached(pair: Pair) -> None:
    pair.both(lambda m, o: m(x()).square().sum().backward(create_graph=True))
    pair.both(lambda m, o: o.step())
    for p in [*pair.reference.parameters(), *pair.model.parameters()]:
        p.grad = None
    pair.check()


def test_a_gradient_penalty(pair: Pair) -> None:
    def penalised(m: nn.Module, o: torch.optim.Optimizer) -> None:
        loss = m(x()).square().sum()
        grads = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()

    pair.both(penalised)
    pair.check_step()


def test_an_assigned_gradient_replaces_the_local_one(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m, o: setattr(m.fc.weight, "grad", torch.full((2, 3), 0.25)))
    pair.check_step()


def test_gradients_assigned_without_a_backward(pair: Pair) -> None:
    def assign(m: nn.Module, o: torch.optim.Optimizer) -> None:
        for p in m.parameters():
            p.grad = torch.full_like(p, 0.5)

    pair.both(assign)
    pair.check_step()


def test_an_assigned_gradient_and_a_backward_on_top(pair: Pair) -> None:
    pair.both(lambda m, o: setattr(m.fc.weight, "grad", torch.full((2, 3), 0.25)))
    pair.backward()
    pair.check_step()


def test_an_assigned_gradient_in_another_memory_format(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m, o: setattr(m.fc.weight, "grad", torch.arange(6.0).view(3, 2).t()))
    pair.check_step()


def test_noise_added_to_it_is_applied(pair: Pair) -> None:
    pair.backward()
    noise = torch.linspace(-1, 1, 6).view(2, 3)
    pair.both(lambda m, o: m.fc.weight.grad.add_(noise))
    pair.check_step()
    assert noise.tolist() == torch.linspace(-1, 1, 6).view(2, 3).tolist()


def test_noise_added_twice(pair: Pair) -> None:
    pair.backward()
    for _ in range(2):
        pair.both(lambda m, o: m.fc.weight.grad.add_(torch.full((2, 3), 0.5)))
    pair.check_step()


def test_noise_in_place_by_operator(pair: Pair) -> None:
    pair.backward()

    def add(m: nn.Module, o: torch.optim.Optimizer) -> None:
        m.fc.weight.grad += torch.ones(2, 3)

    pair.both(add)
    pair.check_step()


def test_noise_of_another_dtype_or_shape_is_added_as_torch_would(pair: Pair) -> None:
    pair.backward()
    pair.both(lambda m, o: m.fc.weight.grad.add_(torch.full((3,), 0.5, dtype=torch.float64)))
    pair.check_step()


def test_full_grad_is_the_average_and_changes_nothing(pair: Pair) -> None:
    pair.backward()
    for p, q in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert_bit_equal(pair.optimizer.full_grad(p), q.grad)
    pair.check_step()


def test_a_model_is_copied_between_backward_and_step(pair: Pair) -> None:
    pair.backward()
    twin = copy.deepcopy(pair.model)
    assert all(type(p) is nn.Parameter and p.grad is None for p in twin.parameters())
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    pair.check_step()
    assert_bit_equal({name: p.detach().clone() for name, p in twin.named_parameters()}, before)
    twin(x()).sum().backward()
    assert all(type(p.grad) is Tensor for p in twin.parameters())


def test_a_model_is_saved_between_backward_and_step(pair: Pair) -> None:
    pair.backward()
    file = io.BytesIO()
    torch.save(pair.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_bit_equal(dict(loaded.state_dict()), dict(pair.reference.state_dict()))
    assert all(p.grad is None for p in loaded.parameters())
    pair.check_step()


def test_a_hook_of_the_users_sees_the_local_gradient(pair: Pair) -> None:
    seen: list[Tensor] = []
    pair.model.fc.weight.register_hook(lambda grad: seen.append(grad.clone()))
    pair.backward()
    assert_bit_equal(seen[0], pair.reference.fc.weight.grad)
    pair.check_step()


def test_a_frozen_parameter_is_left_alone(pair: Pair) -> None:
    pair.both(lambda m, o: m.fc.weight.requires_grad_(False))
    pair.backward()
    assert pair.model.fc.weight.grad is None
    pair.check_step()
    pair.both(lambda m, o: m.fc.weight.requires_grad_(True))
    pair.backward()
    pair.check_step()


def test_close_leaves_no_gradient_in_flight(pair: Pair) -> None:
    pair.backward()
    pair.optimizer.close()
    assert not any(isinstance(p.grad, InFlightGradient) for p in pair.model.parameters())
    pair.model(x()).sum().backward()
    assert all(type(p.grad) is Tensor for p in pair.model.parameters())


def test_no_sync_leaves_plain_local_gradients(pair: Pair) -> None:
    with pair.optimizer.no_sync():
        pair.backward()
    assert all(type(p.grad) is Tensor for p in pair.model.parameters())
    pair.backward(1)
    pair.check_step()


# Sparse gradients


class Tokens(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(tokens))
        return y


@pytest.mark.parametrize("fusion", [None, 25.0])
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_sparse_gradients_become_dense(fusion: float | None, num_backwards: int) -> None:
    dear.init(backend="local")
    try:
        model = Tokens(sparse=True)
        reference = Tokens(sparse=False)
        reference.load_state_dict(model.state_dict())
        optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model, fusion=fusion)
        plain = torch.optim.SGD(reference.parameters(), lr=LR)
        for step in range(3):
            for m in (model, reference):
                for i in range(num_backwards):
                    m(torch.tensor([step, step + i + 1])).square().sum().backward()
            assert isinstance(model.table.weight.grad, InFlightGradient)
            for o in (optimizer, plain):
                o.step()
                o.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert_bit_equal(p.detach(), q.detach())
    finally:
        dear.shutdown()


# Two ranks


def changed_gradients(name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Gradients of 1 and 2 on two ranks, changed before the step. Returns the average, and the weights after it."""
    model = nn.Linear(8, 3, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.full((1, 8), float(dear.rank() + 1))).sum().backward()
    assert model.weight.grad is not None
    if name == "noise" or (name == "noise on one rank" and dear.rank() == 1):
        model.weight.grad.add_(torch.full((3, 8), 2.0 * dear.rank()))
    if name == "assigned":
        model.weight.grad = torch.full((3, 8), 4.0 * dear.rank())
    if name == "forgotten" or (name == "forgotten on one rank" and dear.rank() == 1):
        model.weight.grad = None
    if name == "zeroed" or (name == "zeroed on one rank" and dear.rank() == 1):
        model.weight.grad.zero_()
    average = optimizer.full_grad(model.weight).tolist()
    optimizer.step()
    return average, model.weight.tolist()


@pytest.mark.parametrize(
    ("name", "average"),
    [
        ("nothing", 1.5),
        ("noise", 2.5),
        ("assigned", 2.0),
        ("forgotten", 0.0),
        ("zeroed", 0.0),
        ("noise on one rank", 2.5),
        ("forgotten on one rank", 0.5),
        ("zeroed on one rank", 0.5),
    ],
)
def test_what_is_done_to_gradients_is_averaged_too(pool: RankPool, name: str, average: float) -> None:
    results = pool.run(changed_gradients, name, size=2, group_timeout_s=4)
    expected = ([[average] * 8] * 3, [[1.0 - average] * 8] * 3)
    assert results == [expected, expected]


# Memory


def num_live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, Tensor))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(("create_graph", "backwards"), [(False, 1), (False, 2), (True, 1)])
def test_fifty_iterations_leave_nothing_behind(create_graph: bool, backwards: int) -> None:
    dear.init(backend="local")
    try:
        model = Net()
        optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)

        def iterate() -> None:
            for _ in range(backwards):
                F.mse_loss(model(x()), torch.zeros(4, 2)).backward(create_graph=create_graph)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()

        counts = []
        for step in range(50):
            iterate()
            if step in (4, 49):
                counts.append(num_live_tensors())
        assert counts[1] <= counts[0]
    finally:
        dear.shutdown()
