"""P. What autograd can do with gradients and graphs, and the checkpoints of other programs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, ones, raises_at_once, sgd


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


# ------------------------------------------------------------------------------------------------- dtypes of gradients


class OddDtypes(nn.Module):
    """Gradients of 0.bias in `grad_dtype`, which may be None: any. All else as ever."""

    def __init__(self, dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.linspace(-1, 1, n).to(dtype)) for n in (7, 5, 3))
        self.b.grad_dtype = self.c.grad_dtype = grad_dtype

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a * x).sum() + (self.b.exp() * x).sum() + (self.c.sin() * x).sum()).float().square() * 1e-2


def odd_loss(m: nn.Module, r: int) -> Tensor:
    return m(torch.tensor(0.1 * (r + 1)))


def same_grad_dtypes(twin: Twin) -> Twin:
    """`deepcopy` of a parameter forgets its grad_dtype."""
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        theirs.grad_dtype = mine.grad_dtype
    return twin


@on_ranks(2)
@pytest.mark.parametrize("shard", ["auto", False])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, None),
        (torch.float32, torch.float32),
    ],
)
def test_field_h8_gradients_of_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype | None, shard: bool | str
) -> None:
    """Summed over ranks at least in that dtype, rounded to it, and stepped in it: momentum is kept in it, too."""
    sums_round = grad_dtype == torch.bfloat16  # in plain PyTorch: here they are taken in fp32
    for make in (
        sgd(),
        sgd(momentum=0.5),
        sgd(momentum=0.5, weight_decay=0.1),
        made(optim.RMSprop, lr=0.01),
        made(optim.Adagrad, lr=0.1),
    ):
        twin = same_grad_dtypes(Twin(OddDtypes(dtype, grad_dtype), make, shard=shard, master_dtype=None, fusion=3e-5))
        for step in range(5):
            if step != 3 or sums_round or not shard:  # whole averages are averaged again, and rounded again
                twin.zero_grad()
            twin.backward(odd_loss)
            if step == 1 and not sums_round:
                twin.backward(odd_loss)
            if step == 2:
                grad = twin.optimizer.full_grad(twin.model.b)
                assert grad.dtype == twin.plain.b.grad.dtype
                assert torch.equal(grad, twin.plain.b.grad)
            twin.step()
            if step == 3:
                twin.both(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
        twin.check(exact=True)
        twin.optimizer.close()


@on_ranks(2)
def test_field_h8_masters_are_stepped_with_wide_gradients() -> None:
    """bf16 weights with fp32 gradients: as plain PyTorch on fp32 weights that are rounded before each use."""
    model = OddDtypes(torch.bfloat16, torch.float32)
    twin = Twin(model, made(optim.AdamW, lr=0.01))
    masters = [nn.Parameter(p.detach().float()) for p in twin.plain.parameters()]
    adam = optim.AdamW(masters, lr=0.01)
    for _ in range(3):
        twin.optimizer.zero_grad()
        odd_loss(model, dear.rank()).backward()
        twin.optimizer.step()
        grads = []
        for rank in range(2):
            grads.append(torch.autograd.grad(odd_loss(twin.plain, rank), list(twin.plain.parameters())))
        for master, first, second in zip(masters, *grads, strict=True):
            master.grad = (first.float() + second.float()) / 2
        adam.step()
        with torch.no_grad():
            for param, master in zip(twin.plain.parameters(), masters, strict=True):
                param.copy_(master)
    for name, param in model.named_parameters():
        close(param, twin.plain.get_parameter(name))


@on_ranks(2)
def test_field_h8_what_plain_torch_cannot_step_is_an_error_at_wrap() -> None:
    model = OddDtypes(torch.float32, torch.bfloat16)
    with raises_at_once(dear.ArgumentError, r"'b' .*grad_dtype torch\.bfloat16; AdamW cannot step.*before wrapping"):
        dear.DistributedOptimizer(optim.AdamW(model.parameters()), model)
    model.b.grad_dtype = model.c.grad_dtype = torch.float32
    dear.DistributedOptimizer(optim.AdamW(model.parameters()), model)


@on_ranks(2)
@pytest.mark.parametrize("how", ["backward", "assigned"])
def test_field_h8_grad_dtype_that_is_set_after_wrapping(how: str) -> None:
    twin = Twin(OddDtypes(torch.float32, torch.float32))
    twin.train(odd_loss, 2)
    twin.zero_grad()
    twin.model.c.grad_dtype = torch.bfloat16
    with raises_at_once(dear.ScheduleError, r"'c' took gradients of torch\.float32.*before wrapping"):
        if how == "backward":
            odd_loss(twin.model, dear.rank()).backward()
        else:
            twin.model.c.grad = torch.zeros(3, dtype=torch.bfloat16)
            twin.optimizer.step()


@on_ranks(2)
def test_field_h8_ranks_that_differ_in_it() -> None:
    model = OddDtypes(torch.float32, torch.bfloat16 if dear.rank() else torch.float32)
    with raises_at_once(dear.ArgumentError, r"'b'.*grad_dtype torch\.float32.*grad_dtype torch\.bfloat16"):
        dear.DistributedOptimizer(optim.SGD(model.parameters()), model)


# ------------------------------------------------------------------------------------------------- version counters


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).square().mean(), self.b(x).square().mean()


def two_heads(**options: Any) -> Twin:
    twin = Twin(Heads(), sgd(momentum=0.5, weight_decay=0.1), **options)
    for _ in range(5):  # past the measurements of a schedule that needs them
        twin.train(lambda m, r: sum(m(ones(r, 2, 4))))
    return twin


def forwards(twin: Twin) -> Callable[[int], Callable[[nn.Module, int], Tensor]]:
    """Runs both heads of both models, and gives the loss of a head made now."""
    losses = {id(m): [m(ones(r, 2, 4)) for r in range(2)] for m in (twin.model, twin.plain)}
    return lambda head: lambda m, r: losses[id(m)][r][head]


@on_ranks(2)
@pytest.mark.parametrize("how", ["dear", "split", "ddp", "dear-fill", "whole"])
def test_field_h9_a_late_backward_through_what_no_rank_has_used(how: str) -> None:
    """Forwards of two heads, backward and step of one, then backward of the other, and round again."""
    options = {"split": {"fusion": 3e-5}, "whole": {"shard": False}, "dear": {}}.get(how, {"schedule": how})
    twin = two_heads(**options)
    for turn in range(4):
        twin.zero_grad()
        first, second = (0, 1) if turn % 2 else (1, 0)
        loss_of = forwards(twin)
        for head in (first, second):
            twin.zero_grad()
            twin.backward(loss_of(head))
            twin.step()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["dear", "ddp", "dear-fill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_field_h9_a_late_backward_through_what_one_rank_has_used_is_an_error(rank: int, schedule: str) -> None:
    """Also on the rank that has not used it, and before anything waits for the new values."""
    twin = two_heads(schedule=schedule)
    twin.zero_grad()
    losses = twin.model(ones(dear.rank(), 2, 4))
    twin.backward(lambda m, r: m(ones(r, 2, 4))[0])
    twin.backward_plain(lambda m, r: m(ones(r, 2, 4))[1] if r == rank else None)
    if dear.rank() == rank:
        if schedule == "dear-fill":
            twin.optimizer.zero_grad()
            sum(twin.model(ones(dear.rank(), 2, 4))).backward()
        else:
            twin.model(ones(dear.rank(), 2, 4))[1].backward()
    elif schedule == "dear-fill":
        twin.optimizer.zero_grad()
        twin.model(ones(dear.rank(), 2, 4))[0].backward()
    twin.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()
    twin.check()


@on_ranks(2)
def test_field_h9_an_average_that_stands_counts_until_it_is_dropped() -> None:
    twin = two_heads()
    twin.zero_grad()
    twin.backward(lambda m, r: m(ones(r, 2, 4))[1])
    twin.step()
    for again in (True, False):
        if not again:
            twin.both(lambda _, optimizer: optimizer.zero_grad())
        loss_of = forwards(twin)
        twin.backward(loss_of(0))  # b's gradient of before is applied once more
        twin.step()
        if again:
            for model in (twin.model, twin.plain):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss_of(1)(model, dear.rank()).backward()
        else:
            twin.zero_grad()
            twin.backward(loss_of(1))
            twin.step()
    twin.check()


@on_ranks(2)
def test_field_h9_inside_join() -> None:
    """A rank that follows has used nothing: it waits for the agreement as well."""
    twin = two_heads()
    with twin.optimizer.join():
        for _ in range(1 + 2 * dear.rank()):
            twin.optimizer.zero_grad()
            losses = twin.model(ones(dear.rank(), 2, 4))
            losses[0].backward()
            twin.optimizer.step()
            losses[1].backward()
    assert_same_everywhere(twin.model)


# ------------------------------------------------------------------------------------------------- timelines


@on_ranks(2)
@pytest.mark.parametrize("how", ["dear", "ddp", "wfbp", "dear-fill", "whole"])
def test_field_h14_a_timeline_has_every_span_of_the_last_step(how: str) -> None:
    """Each stream is held up until stop() has been called, so that nothing is there by luck."""
    twin = two_heads(**({"shard": False} if how == "whole" else {"schedule": how}))
    timeline = dear.Timeline(twin.optimizer)
    num_buckets = len(twin.optimizer.plan.buckets)
    started, go_on = threading.Event(), threading.Event()
    stopped: list[BaseException | None] = []

    def stop() -> None:
        started.set()
        timeline.stop()
        stopped.append(None)

    twin.optimizer.synchronize()
    timeline.start()
    twin.train(lambda m, r: sum(m(ones(r, 2, 4))))
    twin.zero_grad()
    twin.backward(lambda m, r: sum(m(ones(r, 2, 4))))
    streams = twin.optimizer._engine.streams
    if how != "whole":  # there step() itself waits
        streams.communication.run("", lambda: go_on.wait(10) and None)
        streams.step.run("", lambda: go_on.wait(10) and None)
    twin.step()
    stopper = threading.Thread(target=stop)
    stopper.start()
    started.wait(10)
    go_on.set()
    stopper.join(10)
    assert stopped == [None]
    names = [span.name for span in timeline._spans]
    assert sum(name.startswith(("all_reduce[", "reduce_scatter[")) for name in names) == 2 * num_buckets, names
    assert sum(name.startswith("agreement on late") for name in names) == 2, names
    if how != "whole":
        assert sum(name.startswith("step[") for name in names) == 2 * num_buckets, names
    twin.check()
