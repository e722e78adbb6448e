"""D. Clipping, scaling, access to gradients: every number is the whole model's and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, ones, raises_at_once, sgd

NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by


class ThreeFour(nn.Module):
    """Gradients 3 and 4 in different tensors, and so in different shards; `pad` makes the shards odd."""

    def __init__(self, between: int = 0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.between = nn.Parameter(torch.zeros(between))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self) -> Tensor:
        return (3 * self.a + 4 * self.b).sum() + 0 * self.between.sum()


def weighted(m: nn.Module, r: int) -> Tensor:
    return m()


@on_ranks(2)
@pytest.mark.parametrize("between", [0, 5, 129])
def test_case_032_fairscale_167_global_norm(between: int, fusion: Any) -> None:
    """Also fairscale#98, NVIDIA/Megatron-LM#580, pytorch/pytorch#170862."""
    for norm_type, expected in (
        (2.0, 5.0),
        (math.inf, 4.0),
        (1.0, 7.0),
        (3.0, 91 ** (1 / 3)),
        (0.5, (3**0.5 + 2) ** 2),
    ):
        twin = Twin(ThreeFour(between), fusion=fusion)
        twin.backward(weighted)
        norm = twin.optimizer.clip_grad_norm_(1.0, norm_type)
        close(norm.to(twin.model.a.dtype), expected)
        assert torch.equal(dear.broadcast(norm), norm)
        factor = 1 / (expected + NORM_EPS)
        close(twin.optimizer.full_grad(twin.model.a), 3 * factor)
        close(twin.optimizer.full_grad(twin.model.b), 4 * factor)
        twin.step()
        close(twin.model.a, -0.1 * 3 * factor)
        close(twin.model.b, -0.1 * 4 * factor)
        twin.optimizer.close()


@on_ranks(2)
@pytest.mark.parametrize("what", ["unused", "frozen", "value", "no_limit", "zero_gradients", "whole", "inf_limit"])
def test_case_032_neighbours_of_the_norm(what: str) -> None:
    twin = Twin(ThreeFour(5), shard=False if what == "whole" else "auto")
    if what == "frozen":
        twin.model.a.requires_grad_(False), twin.plain.a.requires_grad_(False)
    factor = {"zero_gradients": 0.0}.get(what, 1.0)
    twin.zero_grad()
    twin.backward(lambda m, r: factor * (m.b * 4).sum() if what in ("unused", "frozen") else factor * m() * (r + 1))
    if what == "value":
        twin.optimizer.clip_grad_value_(5.0)
        nn.utils.clip_grad_value_(twin.plain.parameters(), 5.0)
    else:
        limit = {"no_limit": 1e9, "inf_limit": math.inf}.get(what, 1.0)
        norm = twin.optimizer.clip_grad_norm_(limit)
        close(norm, nn.utils.clip_grad_norm_(twin.plain.parameters(), limit))
    twin.step()
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        close(mine, theirs)
    assert_same_everywhere(twin.model)


@on_ranks(2)
def test_case_033_horovod_1099_clip_reduces_once(fusion: Any) -> None:
    twin = Twin(ThreeFour(), fusion=fusion)
    for _ in range(3):
        sent = twin.optimizer.bytes_sent
        twin.zero_grad()
        twin.backward(weighted)
        twin.optimizer.synchronize()
        twin.optimizer.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(twin.plain.parameters(), 1.0)
        twin.step()
        twin.optimizer.synchronize()
        each = twin.optimizer.bytes_sent - sent
    close(twin.model.a, -0.1 * 3 * 3 / (5 + NORM_EPS))
    twin.zero_grad()
    sent = twin.optimizer.bytes_sent
    twin.backward(weighted)
    twin.step()
    twin.optimizer.synchronize()
    assert twin.optimizer.bytes_sent - sent == each, "clipping sends no bucket again"


@on_ranks(2)
@pytest.mark.parametrize(
    "use", ["clip_norm", "clip_value", "get_total_norm", "clip_with_norm", "foreach", "norm", "mul_", "wrapped_step"]
)
def test_case_034_torchs_clip_right_after_backward(use: str) -> None:
    twin = Twin(ThreeFour())
    utils = nn.utils
    for _ in range(2):  # the first backward is handled apart
        twin.zero_grad()
        twin.backward(weighted)
        params = [p for p in twin.model.parameters() if p.grad is not None]
        start = [p.detach().clone() for p in params]
        with raises_at_once(
            dear.ScheduleError, r"gradient of '\w+' is being averaged.*opt\.clip_grad_norm_\(max_norm\)"
        ):
            if use == "clip_norm":
                utils.clip_grad_norm_(params, 1.0)
            elif use == "clip_value":
                utils.clip_grad_value_(params, 1.0)
            elif use == "get_total_norm":
                utils.get_total_norm([p.grad for p in params])
            elif use == "clip_with_norm":
                utils.clip_grads_with_norm_(params, 1.0, torch.tensor(5.0))
            elif use == "foreach":
                torch._foreach_mul_([p.grad for p in params], 0.5)
            elif use == "norm":
                _ = [float(p.grad.norm()) for p in params]
            elif use == "mul_":
                params[0].grad.mul_(0.5)
            else:
                twin.wrapped.step()
        assert all(torch.equal(p.detach(), before) for p, before in zip(params, start, strict=True)), "untouched"
        twin.step()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adam", "whole"])
def test_case_035_fairscale_180_inf_in_one_shard(kind: str, fusion: Any) -> None:
    """Also fairscale PR#179: all ranks skip, or none."""
    make = {"sgd": sgd(momentum=0.9), "adam": made(optim.Adam, lr=0.1), "whole": sgd(momentum=0.9)}[kind]
    torch.manual_seed(0)
    twin = Twin(nn.Linear(5, 3), make, fusion=fusion, **({"shard": False} if kind == "whole" else {}))
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) for _ in range(2))

    def iteration(bad: bool) -> None:
        def scaled(m: nn.Module, r: int) -> Tensor:
            y = m(ones(r, 2, 5))
            if bad and r == dear.size() - 1:  # one element, of one rank: the last of the buffer
                y = y * torch.tensor([1.0, 1.0, math.inf])
            return scaler.scale(y.sum()) if m is twin.model else plain_scaler.scale(y.sum())

        twin.zero_grad()
        twin.backward(scaled)
        scaler.step(twin.optimizer)
        plain_scaler.step(twin.plain_optimizer)
        scaler.update()
        plain_scaler.update()

    iteration(bad=False)
    before = [p.detach().clone() for p in twin.model.parameters()]
    state = str(twin.optimizer.state_dict()["state"])
    iteration(bad=True)
    assert all(torch.equal(p.detach(), then) for p, then in zip(twin.model.parameters(), before, strict=True))
    assert str(twin.optimizer.state_dict()["state"]) == state
    assert scaler.get_scale() == plain_scaler.get_scale() == 4.0
    iteration(bad=False)
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.parametrize("zero", ["optimizer", "model", "to_zeros"])
def test_case_036_horovod_3160_skipped_iterations(zero: str, fusion: Any) -> None:
    twin = Twin(nn.Linear(5, 3), sgd(momentum=0.9), fusion=fusion)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) for _ in range(2))
    for bad in (True, True, False, True, False, False):
        twin.both(lambda m, o: (m if zero == "model" else o).zero_grad(set_to_none=zero != "to_zeros"))
        factor = math.inf if bad else 1.0
        twin.backward(
            lambda m, r, f=factor: (scaler if m is twin.model else plain_scaler).scale(m(ones(r, 2, 5)).sum() * f)
        )
        scaler.unscale_(twin.optimizer)
        plain_scaler.unscale_(twin.plain_optimizer)
        if not bad:
            norm = twin.optimizer.clip_grad_norm_(1.0).to(twin.model.weight.dtype)
            close(norm, nn.utils.clip_grad_norm_(twin.plain.parameters(), 1.0))
        scaler.step(twin.optimizer)
        plain_scaler.step(twin.plain_optimizer)
        scaler.update()
        plain_scaler.update()
    assert scaler.get_scale() == plain_scaler.get_scale() == 1.0
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.parametrize("how", ["parameters", "reduce_dtype", "whole", "deterministic"])
def test_case_037_horovod_1699_fp16_overflow(how: str) -> None:
    """Also pytorch/pytorch#78774, fairscale PR#565."""
    dtype = torch.float32 if how == "reduce_dtype" else torch.float16
    model = nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=dtype))])
    options: dict[str, Any] = {"reduce_dtype": torch.float16} if how == "reduce_dtype" else {}
    twin = Twin(model, sgd(lr=2.0**-12), **options, **({"shard": False} if how == "whole" else {}))
    for _ in range(2):
        twin.zero_grad()
        twin.backward(lambda m, r: (m[0] * 40000.0).sum())
        grad = twin.optimizer.full_grad(model[0])
        assert grad.float().tolist() == [40000.0] * 5
        twin.step()
    close(model[0].float() / (2 * 40000 * 2.0**-12), -1.0)


READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda grad: float(grad[0, 0]),
    "item": lambda grad: grad.sum().item(),
    "numpy": lambda grad: grad.numpy(),
    "sum": lambda grad: grad.abs().sum(),
    "compare": lambda grad: bool((grad == 0).all()),
    "index": lambda grad: grad[0],
    "clone": lambda grad: grad.detach().clone(),
}


@on_ranks(2)
@pytest.mark.parametrize("way", ["print", *READS])
def test_case_038_deepspeed_2329_gradient_logging(way: str) -> None:
    """Also DeepSpeed#4555, #6768, huggingface/transformers#11850: never zeros, never a local value by accident."""
    twin = Twin(nn.Linear(4, 1))
    for _ in range(2):
        twin.zero_grad()
        twin.backward(lambda m, r: m(ones(r)).sum())
        grad: Any = twin.model.weight.grad
        if way == "print":
            assert "full_grad" in repr(grad) and "'weight'" in repr(grad) and "full_grad" in f"{grad}"
        else:
            with raises_at_once(dear.ScheduleError, r"opt\.full_grad\(param\)"):
                READS[way](grad)
        assert twin.optimizer.full_grad(twin.model.weight).tolist() == [[1.5] * 4]
        assert twin.optimizer.full_grad(twin.model.bias).tolist() == [1.0]
        twin.step()
    twin.check()


@on_ranks(2)
def test_case_038_full_grad_of_what_has_no_gradient() -> None:
    """Neighbours: a parameter that nobody used, a frozen one, one of another model."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    twin = Twin(model, fusion=None)
    twin.backward(lambda m, r: m[0](ones(r)).sum())
    assert twin.optimizer.full_grad(model[1].weight).abs().sum() == 0
    for param in (model[1].bias, nn.Parameter(torch.ones(3))):
        with raises_at_once(dear.ArgumentError, "full_grad expects a parameter that this optimizer trains"):
            twin.optimizer.full_grad(param)
    with raises_at_once(dear.ArgumentError, "full_grad expects a parameter"):
        twin.optimizer.full_grad("0.weight")  # type: ignore[arg-type]
    twin.step()
    twin.check()


@on_ranks(3)
@pytest.mark.parametrize("kind", ["shards", "whole", "frozen_part"])
def test_case_039_ms_swift_8341_logged_norm(kind: str) -> None:
    twin = Twin(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)), shard=False if kind == "whole" else "auto")
    if kind == "frozen_part":
        twin.model[0].requires_grad_(False), twin.plain[0].requires_grad_(False)
    for _ in range(3):
        twin.zero_grad()
        twin.backward(lambda m, r: m(ones(r, 2, 5)).square().mean())
        norm = twin.optimizer.clip_grad_norm_(math.inf)
        close(norm, nn.utils.get_total_norm([p.grad for p in twin.plain.parameters() if p.grad is not None]))
        assert torch.equal(dear.broadcast(norm), norm), "the same number on every rank"
        twin.step()
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("argument", [(-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -1.0)])
def test_case_032_bad_limits(argument: tuple[float, float]) -> None:
    twin = Twin(ThreeFour())
    twin.backward(weighted)
    with raises_at_once(dear.ArgumentError, "clip_grad_norm_ expects"):
        twin.optimizer.clip_grad_norm_(*argument)
    twin.step()
    twin.check()


@on_ranks(2)
def test_case_034_clip_before_the_backward_is_over() -> None:
    """Neighbours: a clip with no gradients, and a clip, then a further backward."""
    twin = Twin(ThreeFour())
    close(twin.optimizer.clip_grad_norm_(1.0), 0.0)
    twin.step()
    twin.backward(weighted)
    close(twin.optimizer.clip_grad_norm_(1.0), 5.0)
    nn.utils.clip_grad_norm_(twin.plain.parameters(), 1.0)
    twin.backward(weighted)
    twin.step()
    for mine, theirs in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
        close(mine, theirs)
