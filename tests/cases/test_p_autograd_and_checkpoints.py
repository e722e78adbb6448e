"""P. What autograd can do with gradients and graphs, and the checkpoints of other programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dear
from tests.cases.harness import Twin, on_ranks, ones, raises_at_once, sgd


class Curved(nn.Sequential):
    """Its gradients have gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1), nn.Tanh())


def curved(m: nn.Module, r: int) -> Tensor:
    return m(ones(r, 2, 5)).square().mean()


def graph_backward(twin: Twin, loss=curved) -> None:
    """As `Twin.backward`, with create_graph=True on both sides."""
    loss(twin.model, dear.rank()).backward(create_graph=True)
    params = list(twin.plain.parameters())
    grads = [torch.autograd.grad(loss(twin.plain, r), params) for r in range(dear.size())]
    for param, *of_ranks in zip(params, *grads, strict=True):
        average = sum(of_ranks) / dear.size()
        param.grad = average if param.grad is None else param.grad + average


def penalty(m: nn.Module, r: int) -> Tensor:
    grads = torch.autograd.grad(curved(m, r), list(m.parameters()), create_graph=True)
    return torch.stack([grad.square().sum() for grad in grads]).sum()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("shard", ["auto", False])
@pytest.mark.parametrize("order", ["graph", "graph graph", "penalty graph", "graph penalty", "graph penalty graph"])
def test_field_h6_backward_with_create_graph(order: str, shard: bool | str) -> None:
    """Autograd adds to p.grad out of place then. The graphs hold for a backward within the iteration."""
    twin = Twin(Curved(), sgd(momentum=0.5), shard=shard)
    for _ in range(3):
        twin.zero_grad()
        for what in order.split():
            if what == "graph":
                graph_backward(twin)
            else:
                twin.backward(penalty)
        twin.step()
    twin.check(exact=False)  # several backwards are summed before their mean is taken


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["retained", "no_sync", "accumulate", "zeros"])
def test_field_h6_create_graph_on_top_of_what_is_there(how: str) -> None:
    """An average of the step before; gradients of no_sync before and behind the averaged one; zeros."""
    twin = Twin(Curved(), accumulate=2 if how == "accumulate" else 1)
    for step in range(3):
        if how != "retained" or step == 0:
            twin.zero_grad(set_to_none=how != "zeros")
        if how == "no_sync":
            with twin.optimizer.no_sync():
                graph_backward(twin)
            graph_backward(twin)
            with twin.optimizer.no_sync():
                graph_backward(twin)
                graph_backward(twin)
        elif how == "accumulate":
            graph_backward(twin)
        graph_backward(twin)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_field_h6_a_sum_made_by_hand_counts_once() -> None:
    """`p.grad = p.grad + x`, and sums that are dropped again."""
    twin = Twin(Curved())
    twin.zero_grad()
    twin.backward(curved)
    with torch.no_grad():
        for param in [*twin.model.parameters(), *twin.plain.parameters()]:
            _ = param.grad + 7 * torch.ones_like(param)
            param.grad = param.grad + 0.5 * torch.ones_like(param)
            param.grad = param.grad + 0.25 * torch.ones_like(param)
    twin.step()
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_field_h6_differentiating_the_average_names_create_graph() -> None:
    """Hessian-vector products through `p.grad`: the average has no graph; gradients of no_sync have one."""
    twin = Twin(Curved())
    curved(twin.model, dear.rank()).backward(create_graph=True)
    with raises_at_once(dear.ScheduleError, "create_graph=True.*autograd.grad"):
        sum((p.grad * torch.ones_like(p)).sum() for p in twin.model.parameters()).backward()
    twin.optimizer.zero_grad()
    with twin.optimizer.no_sync():
        curved(twin.model, 0).backward(create_graph=True)
        graded = [p.grad for p in twin.model.parameters()]
        twin.model.zero_grad()
        sum(g.square().sum() for g in graded).backward()
    penalty(twin.plain, 0).backward()
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
