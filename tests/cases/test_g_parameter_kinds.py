"""G. Kinds of parameters: empty, tiny, mixed, frozen, sparse, strided, lazy, whole numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, close, made, on_ranks, ones, raises_at_once, sgd

FP32 = (torch.float32,)  # for bodies that set their own dtypes


class WithEmpty(nn.Module):
    """Linear(8, 0) at a place among other layers, or alone with one scalar (somebody must have a gradient)."""

    def __init__(self, place: str) -> None:
        super().__init__()
        empty: Callable[[], nn.Module] = lambda: nn.Linear(8, 0, bias=False)  # noqa: E731
        full: Callable[[], nn.Module] = lambda: nn.Linear(8, 3)  # noqa: E731
        layers = {
            "first": [empty(), full(), full()],
            "middle": [full(), empty(), full()],
            "last": [full(), full(), empty()],
            "several": [empty(), full(), empty(), empty(), full(), empty()],
        }
        self.layers = nn.ModuleList(layers.get(place, [empty()]))
        if place == "with_scalar":
            self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        total = sum((layer(x).sum() for layer in self.layers), torch.zeros(()))
        return total * self.scalar if hasattr(self, "scalar") else total


@on_ranks(2)
@pytest.mark.parametrize("place", ["first", "middle", "last", "several", "only", "with_scalar"])
def test_case_056_deepspeed_8279_zero_element_parameters(place: str, fusion: Any) -> None:
    """Also DeepSpeed#8297, PR#8467."""
    twin = Twin(WithEmpty(place), made(optim.Adam, lr=0.1), fusion=fusion)
    twin.train(lambda m, r: m(ones(r, 2, 8)), 3)
    assert all(p.shape == q.shape for p, q in zip(twin.model.parameters(), twin.plain.parameters(), strict=True))
    norm = twin.optimizer.clip_grad_norm_(1.0)
    assert norm.isfinite()
    state = twin.optimizer.state_dict()
    twin.optimizer.load_state_dict(state)
    twin.train(lambda m, r: m(ones(r, 2, 8)), 2)
    twin.check()
    twin.optimizer.close()
    assert [tuple(p.shape) for p in twin.model.parameters()] == [tuple(p.shape) for p in twin.plain.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("path", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_case_057_transformer_engine_3207_other_updates_are_not_skipped(
    path: dict[str, bool], kind: type[optim.Optimizer]
) -> None:
    """Triton kernels: tests/kernels/test_kernels_step.py, on CUDA and in the interpreter."""
    for place, fusion in itertools.product(("first", "last", "several"), (None, 25.0)):
        twin = Twin(WithEmpty(place), made(kind, lr=0.1, **path), fusion=fusion)
        before = [p.detach().clone() for p in twin.model.parameters()]
        twin.train(lambda m, r: m(ones(r, 2, 8)))
        for p, then in zip(twin.model.parameters(), before, strict=True):
            assert p.numel() == 0 or not torch.equal(p.detach(), then)
        twin.train(lambda m, r: m(ones(r, 2, 8)))
        twin.check(exact=False)
        twin.optimizer.close()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


@on_ranks(4)
@pytest.mark.parametrize("make", [Scalar, functools.partial(nn.Linear, 1, 1)], ids=["scalar", "weight_and_bias"])
def test_case_058_deepspeed_129_fewer_elements_than_ranks(make: Callable[[], nn.Module]) -> None:
    """Also inclusionAI/AReno PR#512."""
    for fusion in (None, 25.0):
        twin = Twin(make(), made(optim.Adam, lr=0.1), fusion=fusion)
        for _ in range(3):
            twin.train(lambda m, r: m(ones(r, 1, 1)).sum())
            twin.optimizer.clip_grad_norm_(1e9)
        assert len(twin.optimizer.state_dict()["state"]) == len(list(twin.model.parameters()))
        twin.check(exact=False)
        twin.optimizer.close()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(5, 5).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


@on_ranks(2, dtypes=FP32)
def test_case_059_trl_1723_mixed_dtypes(fusion: Any) -> None:
    """Also huggingface/peft#484, pytorch/pytorch#156784."""
    model = Mixed()
    with torch.no_grad():
        model.layers[2].weight[0, 0] = 1 + 1e-12  # fp32 would lose it
    twin = Twin(model, sgd(momentum=0.9), fusion=fusion, master_dtype=None)
    dtypes = [p.dtype for p in twin.plain.parameters()]
    assert float(twin.model.layers[2].weight[0, 0]) == 1 + 1e-12
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    assert [p.dtype for p in twin.model.parameters()] == dtypes
    assert all(len({b.dtype}) == 1 for b in twin.optimizer.plan.buckets)
    if dear.size() == 2:
        twin.check()


class Half(nn.Module):
    """A frozen weight and a trainable bias in one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)
        self.a.weight.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_case_060_pytorch_104690_mixed_requires_grad(kind: str, fusion: Any) -> None:
    make = made(optim.AdamW, lr=0.1, weight_decay=0.5) if kind == "adamw" else sgd(weight_decay=0.5)
    twin = Twin(Half(), make, fusion=fusion)
    frozen = [twin.model.a.weight.detach().clone(), twin.model.b.bias.detach().clone()]
    twin.train(lambda m, r: m(ones(r, 2, 5)).square().mean(), 3)
    assert torch.equal(twin.model.a.weight.detach(), frozen[0])
    assert torch.equal(twin.model.b.bias.detach(), frozen[1])
    twin.check(exact=False if kind == "adamw" else None)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["embedding", "embedding_bag", "two_backwards", "no_sync", "coo_by_hand"])
def test_case_061_pytorch_80496_sparse_gradients(kind: str, fusion: Any) -> None:
    """Also pytorch/pytorch#79542, horovod/horovod#3529: densified, as a dense embedding would train."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = (nn.EmbeddingBag if kind == "embedding_bag" else nn.Embedding)(7, 3, sparse=True)
            self.unused = nn.Embedding(4, 3, sparse=True)
            self.head = nn.Linear(3, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens)).square().mean()

    def loss(m: nn.Module, r: int) -> Tensor:
        return m(torch.tensor([[r, 2, 2, 5]]))

    torch.manual_seed(0)
    twin = Twin(Net(), sgd(), fusion=fusion)
    twin.plain.table.sparse = twin.plain.unused.sparse = False  # REF: dense
    for _ in range(3):
        twin.zero_grad()
        if kind == "coo_by_hand":
            for m in (twin.model, twin.plain):
                grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (7, 3))
                m.table.weight.grad = grad if m is twin.model else grad.to_dense()
        else:
            twin.backward(loss, local=kind == "no_sync")
            if kind in ("two_backwards", "no_sync"):
                twin.backward(loss)
        twin.step()
    twin.check(exact=False)


def strided(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "channels_last":
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1)).to(memory_format=torch.channels_last)
    if kind == "transposed":
        return nn.ParameterList([nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(5))])
    if kind == "permuted":
        return nn.ParameterList([nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1)), nn.Parameter(torch.randn(5))])
    if kind == "expanded":
        return nn.ParameterList([nn.Parameter(torch.randn(1, 3).expand(4, 3).clone())])
    if kind == "sliced":
        return nn.ParameterList([nn.Parameter(torch.randn(4, 6)[:, ::2]), nn.Parameter(torch.randn(9)[2:7])])
    if kind == "channels_last_3d":
        return nn.Conv3d(3, 2, 2).to(memory_format=torch.channels_last_3d)
    return nn.Conv2d(3, 1, 1).to(memory_format=torch.channels_last)  # ambiguous strides


def strided_loss(m: nn.Module, r: int) -> Tensor:
    if isinstance(m, nn.ParameterList):
        weights = [torch.arange(p.numel(), dtype=p.dtype).view(p.shape) for p in m]
        return sum(((p * w).square().mean() for p, w in zip(m, weights, strict=True)), torch.zeros(())) * (r + 1) / 100
    x = (
        torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
        if not isinstance(m, nn.Conv3d)
        else torch.ones(1, 3, 3, 3, 3)
    )
    return (m(x) * (r + 1)).square().mean()


@on_ranks(2)
@pytest.mark.parametrize(
    "kind", ["channels_last", "transposed", "permuted", "expanded", "sliced", "channels_last_3d", "ambiguous"]
)
def test_case_062_bitsandbytes_1185_strides(kind: str, fusion: Any) -> None:
    """Also NVIDIA/apex PR#1148, pytorch/pytorch#47163."""
    twin = Twin(strided(kind), made(optim.Adam, lr=0.01, eps=1e-3), fusion=fusion)
    if kind != "sliced":  # which is not dense
        for p, q in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
            assert p.stride() == q.stride(), "strides are kept"
    twin.train(strided_loss, 3)
    twin.check(exact=False)


@on_ranks(2)
def test_case_062_gradients_in_another_memory_format(fusion: Any) -> None:
    twin = Twin(
        nn.ParameterList([nn.Parameter(torch.randn(3, 4, 2, 2)), nn.Parameter(torch.randn(6, 4))]), fusion=fusion
    )
    for _ in range(2):
        twin.zero_grad()
        for m in (twin.model, twin.plain):
            grad = torch.arange(48.0).view(3, 4, 2, 2)
            m[0].grad = grad.to(m[0].dtype).contiguous(memory_format=torch.channels_last)
            m[1].grad = torch.arange(24.0).view(4, 6).t().to(m[1].dtype)
        twin.step()
    twin.check()


@on_ranks(2)
def test_case_062_memory_formats_differ_between_ranks(fusion: Any) -> None:
    """Rank 0 is channels_last, the others contiguous: the same by logical index."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1))
    if dear.rank() == 0:
        model = model.to(memory_format=torch.channels_last)
    twin = Twin(model, sgd(momentum=0.9), fusion=fusion)
    twin.train(strided_loss, 3)
    twin.check(exact=False)
    state = twin.optimizer.state_dict()["state"][0]["momentum_buffer"]
    close(state, twin.plain_optimizer.state_dict()["state"][0]["momentum_buffer"])


@on_ranks(2)
@pytest.mark.parametrize("kind", ["linear", "conv", "norm", "mixed"])
def test_case_063_torchrec_740_lazy_modules(kind: str) -> None:
    """Also Lightning-AI/pytorch-lightning#13764."""
    model: nn.Module = {
        "linear": lambda: nn.LazyLinear(3),
        "conv": lambda: nn.LazyConv2d(3, 2),
        "norm": lambda: nn.LazyBatchNorm1d(),
        "mixed": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)),
    }[kind]()
    lazy = next(name for name, p in model.named_parameters() if nn.parameter.is_lazy(p))
    with raises_at_once(dear.ArgumentError, rf"'{lazy}' has no shape yet \(a lazy module\)\. Run one forward"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    if kind in ("linear", "mixed"):
        with torch.no_grad():
            model(torch.ones(1, 4))
        twin = Twin(model)
        twin.train(lambda m, r: m(ones(r)).sum(), 2)
        twin.check()


class WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.table = nn.Parameter(torch.arange(5) + 10 * (dear.rank() + 1), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.register_buffer("count", torch.tensor(dear.rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, self.mask].sum() * (self.table[0] / 10).floor()


@on_ranks(2)
def test_case_064_pytorch_32018_integer_parameters(fusion: Any) -> None:
    twin = Twin(WithIntegers(), fusion=fusion)
    assert twin.model.table.tolist() == [10, 11, 12, 13, 14], "rank 0's"
    assert twin.model.count.item() == 0
    with torch.no_grad():
        twin.plain.table.copy_(twin.model.table)
    twin.train(lambda m, r: m(ones(r)), 2)
    twin.check()
    assert twin.model.table.dtype == torch.int64
    names = {slot.fqn for bucket in twin.optimizer.plan.buckets for slot in bucket.slots}
    assert names == {"fc.weight", "fc.bias"}


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_case_064_dtypes_that_the_wire_does_not_know(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3).to(dtype))])
    with raises_at_once(dear.ArgumentError, r"parameter '1' has dtype (complex64|float8).*the wire supports"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
