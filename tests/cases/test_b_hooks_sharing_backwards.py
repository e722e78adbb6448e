"""B. Hooks, sharing, several backward passes: every contribution counts once, on every rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dear
from tests.cases.harness import Twin, close, made, on_ranks, ones, raises_at_once, sgd


class Two(nn.Module):
    """loss = sums of x over a and over b, so that a weight's gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1, bias=False)
        self.b = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        return sum((self.get_submodule(name)(x).sum() for name in which), torch.zeros((), requires_grad=True))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        self.f, self.g = nn.Linear(3, 1), nn.Linear(3, 1)


def ab(which: str) -> Callable[[nn.Module, int], Tensor]:
    return lambda m, r: m(ones(r), which)


@on_ranks(2)
def test_case_009_pytorch_112152_declared_but_never_used_layer(fusion: Any) -> None:
    twin = Twin(Two(), fusion=fusion)
    start = {name: p.detach().clone() for name, p in twin.model.named_parameters()}
    twin.train(ab("b"))
    mean = (dear.size() + 1) / 2
    close(twin.model.b.weight, start["b.weight"] - 0.1 * mean)
    assert torch.equal(twin.model.a.weight.detach(), start["a.weight"])
    twin.train(ab("b"), 3)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["decay", "zeros", "adamw"])
def test_case_009_an_unused_parameter_does_not_decay(how: str, fusion: Any) -> None:
    """Neighbour: weight decay and momentum leave it alone too, unless its gradient was set to zeros, as in torch."""
    make = made(torch.optim.AdamW, lr=0.1, weight_decay=0.5) if how == "adamw" else sgd(momentum=0.9, weight_decay=0.5)
    twin = Twin(Two(), make, fusion=fusion)
    for which in ("ab", "b", "b", "a", "b"):
        twin.zero_grad(set_to_none=how != "zeros")
        twin.backward(ab(which))
        twin.step()
    twin.check()


@on_ranks(2)
def test_case_010_pytorch_57473_unused_in_some_iterations(fusion: Any) -> None:
    """Also pytorch/pytorch#43259."""
    twin = Twin(Two(), fusion=fusion)
    for iteration in range(6):
        twin.train(ab("ab" if iteration % 2 == 0 else "b"))
    twin.check()


@on_ranks(2)
def test_case_010_a_step_in_which_nothing_is_used() -> None:
    twin = Twin(Two(), sgd(momentum=0.9))
    for which in ("ab", "", "b", ""):
        twin.train(ab(which))
    twin.check()


@on_ranks(2)
def test_case_011_pytorch_41101_unused_on_one_rank_only(fusion: Any) -> None:
    twin = Twin(Two(), fusion=fusion)
    before = twin.model.a.weight.detach().clone()
    twin.zero_grad()
    twin.backward(lambda m, r: m(ones(r), "ab" if r == 0 else "b"))
    close(twin.optimizer.full_grad(twin.model.a.weight), 1 / dear.size())
    twin.step()
    close(twin.model.a.weight, before - 0.1 / dear.size())
    twin.train(lambda m, r: m(ones(r), "ab"[r % 2]), 3)  # each rank another one
    twin.check()


class Tied(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        if how == "register_parameter":
            del self.head.weight
            self.head.register_parameter("weight", self.emb.weight)
            self.register_parameter("another_name", self.emb.weight)
        elif how == "module":
            self.again = self.body
        else:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.body(self.emb(tokens))))))


@on_ranks(2)
@pytest.mark.parametrize("how", ["assignment", "register_parameter", "module"])
def test_case_012_deepspeed_684_tied_weights(how: str, fusion: Any) -> None:
    twin = Twin(Tied(how), made(torch.optim.Adam, lr=0.01, eps=1e-4), fusion=fusion)
    slots = [slot.fqn for bucket in twin.optimizer.plan.buckets for slot in bucket.slots if slot.start == 0]
    assert len(slots) == len(list(twin.model.parameters())), "a tied parameter has one slot"
    twin.train(lambda m, r: m(torch.tensor([[r, 2, 3], [4, r + 1, 6]])).square().mean(), 3)
    assert len({p.data_ptr() for _, p in twin.model.named_parameters(remove_duplicate=False)}) == len(slots)
    twin.check()


@on_ranks(2)
def test_case_012_a_tie_given_twice_to_the_optimizer_is_refused_by_torch_alone() -> None:
    """Neighbour: the optimizer got the parameter once, under a tie made after it was built."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.b.weight = model.a.weight
    with raises_at_once(dear.ArgumentError, "not in the model"):
        dear.DistributedOptimizer(optimizer, model)


@on_ranks(2)
@pytest.mark.parametrize("auxiliary", [False, True])
def test_case_013_deepspeed_8224_submodule_applied_twice(auxiliary: bool, fusion: Any) -> None:
    def loss(m: Encoder, r: int) -> Tensor:
        x1, x2 = ones(r, 2, 5), ones(r + 3, 2, 5)
        total = m.f(m.enc(x1)).square().mean() + m.g(m.enc(x2)).square().mean()
        return total + m.enc[0](x1).square().mean() if auxiliary else total

    twin = Twin(Encoder(), fusion=fusion)
    twin.train(loss, 4)
    twin.check()


@on_ranks(2)
def test_case_013_applied_twice_with_two_backwards(fusion: Any) -> None:
    """Neighbour: the two losses are backwarded one after the other."""
    twin = Twin(Encoder(), fusion=fusion)
    for _ in range(3):
        twin.zero_grad()
        twin.backward(lambda m, r: m.f(m.enc(ones(r, 2, 5))).square().mean())
        twin.backward(lambda m, r: m.g(m.enc(ones(r + 3, 2, 5))).square().mean())
        twin.step()
    twin.check(exact=False)


class Split(nn.Module):
    """`wide` is split over several small buckets; the last of them waits for `rare`, which is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.rare = nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, use_rare: bool) -> Tensor:
        y = (self.wide * x.mean() * torch.arange(40)).square().mean() / 100
        return y + (self.rare * x.mean()).sum() if use_rare else y


@on_ranks(2)
@pytest.mark.parametrize(
    "how", ["all_used", "last_part_waits", "assigned", "forgotten", "zeros", "zeros_waiting", "three"]
)
@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_case_013_a_tensor_split_over_buckets_with_several_backwards(how: str, kind: str) -> None:
    """Neighbour: each part of a split tensor gets every contribution once."""
    for num_elements in (9, 16, 23):
        torch.manual_seed(0)
        options: dict[str, Any] = {"shard": False} if kind == "whole" else {}
        twin = Twin(Split(), sgd(momentum=0.9), fusion=num_elements * 4 / 2**20, **options)
        for step in range(4):
            twin.zero_grad()
            for k in range(3 if how == "three" else 2):
                twin.backward(lambda m, r, k=k: m(ones(r) + k, not how.endswith(("waits", "waiting"))))
                if k == 0 and how.startswith("zeros"):
                    twin.both(lambda m, _: m.zero_grad(set_to_none=False))
                if k == 0 and step and how in ("assigned", "forgotten"):
                    for m in (twin.model, twin.plain):
                        m.wide.grad = torch.full((40,), 0.5) if how == "assigned" else None
            twin.step()
        assert len(twin.optimizer.plan.buckets) > 2
        twin.check(exact=False)
        twin.optimizer.close()


@on_ranks(2)
def test_case_014_pytorch_81296_reentrant_checkpoint_and_direct_use(fusion: Any) -> None:
    """Also deepspeedai/DeepSpeed#988: both contributions count."""

    def loss(m: nn.Linear, r: int) -> Tensor:
        x = ones(r, 2, 5).requires_grad_()
        return m(checkpoint(m, x, use_reentrant=True)).square().mean()

    twin = Twin(nn.Linear(5, 5), fusion=fusion)
    twin.train(loss, 3)
    twin.check(exact=False)


@on_ranks(2)
def test_case_014_reentrant_checkpoints_in_a_row() -> None:
    def loss(m: nn.ModuleList, r: int) -> Tensor:
        x = ones(r, 2, 5).requires_grad_()
        for layer in (*m, m[0]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return checkpoint_sequential([*m], 2, x, use_reentrant=True).square().mean()

    twin = Twin(nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), fusion=None)
    twin.train(loss, 3)
    twin.check(exact=False)


@on_ranks(2)
def test_case_015_pytorch_70865_non_reentrant_checkpoints(fusion: Any) -> None:
    def loss(m: nn.ModuleList, r: int) -> Tensor:
        x = ones(r, 2, 5)
        for block in m:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False))
        return x.square().mean()

    twin = Twin(nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), fusion=fusion)
    started = []
    for _ in range(3):
        twin.train(loss)
        twin.check()
        communicator = twin.optimizer._engine.communicator
        started.append(sum(getattr(communicator, name, 0) for name in ("_sequence", "_num_early")))
    each_step = 2 * len(twin.optimizer.plan.buckets) + 1  # both halves, and one agreement on late gradients
    if dear.size() > 1:
        assert started[2] - started[1] == each_step, "the forward that runs again starts nothing"


@on_ranks(2)
@pytest.mark.parametrize("zero", [True, False])
def test_case_016_pytorch_106637_two_backwards_on_one_forward(zero: bool, fusion: Any) -> None:
    twin = Twin(Encoder(), fusion=fusion)

    def losses(m: Encoder, r: int) -> tuple[Tensor, Tensor]:
        y = m.enc(ones(r, 2, 5))
        return m.f(y).square().mean(), m.g(y).square().mean()

    for _ in range(3):
        twin.zero_grad()
        first, second = losses(twin.model, dear.rank())
        first.backward(retain_graph=True)
        if zero:
            twin.optimizer.zero_grad()
        second.backward()
        if not zero:
            twin.backward_plain(lambda m, r: losses(m, r)[0])
        twin.backward_plain(lambda m, r: losses(m, r)[1])
        twin.step()
    twin.check(exact=zero and dear.size() <= 2)


@on_ranks(2)
@pytest.mark.parametrize("of", ["optimizer", "model", "wrapped", "by_hand", "set_to_zeros"])
def test_case_017_horovod_2420_backward_zero_grad_backward(of: str, fusion: Any) -> None:
    """Also horovod/horovod PR#1116."""
    twin = Twin(Two(), sgd(momentum=0.9), fusion=fusion)

    def zero(m: nn.Module, o: torch.optim.Optimizer) -> None:
        if of == "optimizer":
            o.zero_grad()
        elif of == "wrapped":
            (twin.wrapped if m is twin.model else o).zero_grad()
        elif of == "by_hand":
            for p in m.parameters():
                p.grad = None
        elif of == "model":
            m.zero_grad()
        else:
            m.zero_grad(set_to_none=False)

    for _ in range(4):
        twin.backward(lambda m, r: 100.0 * m(ones(r), "ab"))
        twin.both(zero)
        twin.backward(ab("ab"))
        twin.step()
        twin.both(zero)
    twin.check()


@on_ranks(2)
def test_case_017_gradient_probe_by_autograd_grad() -> None:
    """Neighbour: `autograd.grad` rings no hook and leaves no trace."""
    twin = Twin(Encoder())
    for _ in range(3):
        twin.zero_grad()
        twin.both(lambda m, _: torch.autograd.grad(m.f(m.enc(ones(0, 2, 5))).sum(), [*m.enc.parameters()]))
        twin.backward(lambda m, r: m.f(m.enc(ones(r, 2, 5))).mean())
        twin.step()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("fake", ["shared", "detached"])
def test_case_018_horovod_796_gan_with_two_optimizers(fake: str, fusion: Any) -> None:
    """Also horovod/horovod#784."""
    generator, discriminator = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    g, d = Twin(generator, fusion=fusion), Twin(discriminator, fusion=fusion)

    def rounds(gen: nn.Module, dis: nn.Module, r: int, of: str) -> Tensor:
        made_up = gen(ones(r, 2, 3))
        if of == "G":
            return F.softplus(-dis(made_up)).mean()
        return F.softplus(-dis(ones(r, 2, 5))).mean() + F.softplus(dis(made_up.detach())).mean()

    def plain(of: str) -> None:  # both models' gradients are averages
        params = [*g.plain.parameters(), *d.plain.parameters()]
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        for r in range(dear.size()):
            rounds(g.plain, d.plain, r, of).backward()
        for p, old in zip(params, before, strict=True):
            if p.grad is not None:
                p.grad /= dear.size()
            if old is not None:
                p.grad = old if p.grad is None else old + p.grad

    for _ in range(4):
        g.zero_grad()
        rounds(g.model, d.model, dear.rank(), "G").backward()
        plain("G")
        g.step()
        d.zero_grad()
        rounds(g.model, d.model, dear.rank(), "D").backward()
        plain("D")
        if fake == "shared":  # a second loss of the generator before the discriminator's step
            rounds(g.model, d.model, dear.rank(), "G").backward()
            plain("G")
            d.zero_grad()
            rounds(g.model, d.model, dear.rank(), "D").backward()
            plain("D")
        d.step()
    g.check(exact=False)
    d.check(exact=False)


@on_ranks(2)
def test_case_019_horovod_3077_overlapping_parameter_sets() -> None:
    model = Two()
    everything = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for owner in (model, model.a):
        with raises_at_once(dear.ArgumentError, r"weight' is trained by another DistributedOptimizer"):
            dear.DistributedOptimizer(torch.optim.Adam(model.a.parameters()), owner)
    everything.close()
    part = dear.DistributedOptimizer(torch.optim.SGD(model.a.parameters(), lr=0.1), model)
    rest = dear.DistributedOptimizer(torch.optim.SGD(model.b.parameters(), lr=0.1), model)  # disjoint sets are fine
    before = model.b.weight.detach().clone()
    for optimizer in (part, rest):
        optimizer.zero_grad()
    model(ones(dear.rank())).backward()
    part.step()
    rest.step()
    close(model.b.weight, before - 0.15)


@on_ranks(2)
@pytest.mark.parametrize("penalty", [False, True])
def test_case_020_pytorch_63812_create_graph(penalty: bool) -> None:
    """Also pytorch/pytorch#63929. Torch warns of the cycle that this makes; nothing may be left behind."""

    def loss(m: nn.Linear, r: int) -> Tensor:
        value = m(ones(r, 2, 5)).square().mean()
        if penalty:
            grads = torch.autograd.grad(value, [*m.parameters()], create_graph=True)
            value = value + sum(grad.square().sum() for grad in grads)
        return value

    twin = Twin(nn.Linear(5, 5), sgd(lr=0.01))
    alive = []
    for iteration in range(50):
        twin.zero_grad()
        loss(twin.model, dear.rank()).backward(create_graph=not penalty)
        twin.backward_plain(loss)
        twin.step()
        if iteration in (10, 49):
            gc.collect()
            alive.append(sum(isinstance(obj, Tensor) for obj in gc.get_objects()))
    assert abs(alive[0] - alive[1]) < 10, f"tensors alive after 10 and 50 iterations: {alive}"
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["inputs", "no_grad_body", "detach"])
def test_case_021_partial_backward(how: str, fusion: Any) -> None:
    twin = Twin(Encoder(), sgd(momentum=0.9, weight_decay=0.5), fusion=fusion)
    start = [p.detach().clone() for p in twin.model.enc.parameters()]

    def backward(m: Encoder, r: int) -> None:
        x = ones(r, 2, 5)
        if how == "no_grad_body":
            with torch.no_grad():
                y = m.enc(x)
        else:
            y = m.enc(x).detach() if how == "detach" else m.enc(x)
        m.f(y).square().mean().backward(inputs=[*m.f.parameters()] if how == "inputs" else None)

    for _ in range(3):
        twin.zero_grad()
        backward(twin.model, dear.rank())
        for r in range(dear.size()):
            backward(twin.plain, r)
        for p in twin.plain.parameters():
            if p.grad is not None:
                p.grad /= dear.size()
        twin.step()
    for p, then in zip(twin.model.enc.parameters(), start, strict=True):
        assert torch.equal(p.detach(), then)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "in_place", "layer", "train_function"])
def test_case_022_pytorch_109774_compiled_models(when: str) -> None:
    torch._dynamo.reset()
    model = Two()
    plain = Twin(model)  # the REF half; its wrapper is closed again
    plain.optimizer.close()
    if when == "in_place":
        model.compile(backend="eager")
    if when == "layer":
        model.a = torch.compile(model.a, backend="eager")
    compiled: Any = torch.compile(model, backend="eager") if when == "before" else model
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
    if when == "after":
        compiled = torch.compile(model, backend="eager")

    def train_step(x: Tensor) -> None:
        optimizer.zero_grad()
        compiled(x).backward()
        optimizer.step()

    step = torch.compile(train_step, backend="eager") if when == "train_function" else train_step
    for _ in range(4):
        step(ones(dear.rank()))
        plain.plain_optimizer.zero_grad()
        plain.backward_plain(ab("ab"))
        plain.plain_optimizer.step()
    optimizer.synchronize()
    for mine, theirs in zip(model.parameters(), plain.plain.parameters(), strict=True):
        assert torch.equal(mine.detach(), theirs.detach())


@on_ranks(2)
def test_case_023_accelerate_3967_wrapping_twice() -> None:
    """Also horovod/horovod#2017."""
    twin = Twin(Two())
    with raises_at_once(dear.ArgumentError, "is a DistributedOptimizer already"):
        dear.DistributedOptimizer(twin.optimizer, twin.model)
    with raises_at_once(dear.ArgumentError, r"'a\.weight' is trained by another.*close\(\)"):
        dear.DistributedOptimizer(torch.optim.SGD(twin.model.parameters(), lr=0.1), twin.model)
    twin.train(ab("ab"), 2)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["close", "drop"])
def test_case_023_a_second_optimizer_after_the_first_is_gone(how: str) -> None:
    twin = Twin(Two(), sgd(lr=0.2))
    twin.train(ab("ab"))
    if how == "close":
        twin.optimizer.close()
    del twin.optimizer
    gc.collect()
    twin.wrapped = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    twin.plain_optimizer = torch.optim.SGD(twin.plain.parameters(), lr=0.1)
    twin.optimizer = dear.DistributedOptimizer(twin.wrapped, twin.model)
    twin.train(ab("ab"), 3)
    twin.check()
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in twin.model.parameters()), "hooks of one optimizer"


@on_ranks(2)
@pytest.mark.parametrize("how", ["close", "drop"])
def test_case_024_pytorch_63211_models_are_freed(how: str) -> None:
    alive: list[weakref.ref[Any]] = []
    tensors = []
    for iteration in range(20):
        twin = Twin(Two(), broadcast_buffers=iteration % 2 == 0)
        twin.train(ab("ab"))
        if iteration % 3 == 0:
            twin.backward(ab("ab"))  # gradients in flight
        alive += [weakref.ref(twin.model.a.weight), weakref.ref(twin.model), weakref.ref(twin.optimizer)]
        if how == "close":
            twin.optimizer.close()
        del twin
        gc.collect()
        tensors.append(sum(isinstance(obj, Tensor) for obj in gc.get_objects()))
    assert not [ref for ref in alive if ref() is not None]
    assert tensors[5] == tensors[-1], f"tensors alive: {tensors}"
