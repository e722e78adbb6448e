"""I. Ranks that disagree: the same error on all ranks at once where all can know, else by the timeout, with a name."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import dear
from tests.cases.harness import Twin, assert_same_everywhere, close, made, on_ranks, ones, raises_at_once, sgd
from tests.support.ranks import RankPool, assert_raised

TIMEOUT_S = 1.5  # of a group in which somebody is missing


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Linear(4, 3))


def loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r, 2, 5)).square().mean()


def train(num_steps: int, act: Callable[[int, nn.Module], None] | None = None, **options: Any) -> str:
    model = Net()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, **options)
    for step in range(num_steps):
        optimizer.zero_grad()
        if act is not None:
            act(step, model)
        loss(model, dear.rank()).backward()
        optimizer.step()
    optimizer.synchronize()
    return "done"


# ---------------------------------------------------------------------------------------------------- batches


def uneven_batches() -> str:
    result = train(4 - dear.rank())
    if dear.rank() == 1:
        time.sleep(TIMEOUT_S + 3)  # it goes on with something else: evaluation, say
    return result


@pytest.fixture(scope="module")
def uneven(pool: RankPool) -> list[Any]:
    return pool.run(uneven_batches, size=2, group_timeout_s=TIMEOUT_S, expect_errors=True, timeout_s=20)


def test_case_070_pytorch_33148_uneven_number_of_batches(uneven: list[Any]) -> None:
    """Also pytorch/pytorch#38174, Lightning-AI/pytorch-lightning#20404: rank 0 has 4 batches, rank 1 has 3."""
    assert uneven[1] == "done"
    assert_raised(uneven, "CommunicatorError", "Rank 1 has not joined: it is in step 3", ranks=[0])
    assert_raised(uneven, "CommunicatorError", "on as many batches as the others", ranks=[0])


def test_case_076_gloo_511_the_error_names_rank_bucket_parameters_and_collective(uneven: list[Any]) -> None:
    """Also pytorch/pytorch#83289."""
    assert_raised(uneven, "CommunicatorError", r"^rank 0 of 2: reduce_scatter\[\d\] \([\w., ]*1\.\w+", ranks=[0])
    assert_raised(uneven, "CommunicatorError", r"in step 3 failed", ranks=[0])


@on_ranks(2)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_case_071_lightning_5243_one_rank_skips_backward(at: int, fusion: Any) -> None:
    """Also ecmwf/WeatherGenerator#2724, NVIDIA-NeMo/Automodel PR#2468: it counts as zero, and steps do not mix."""
    twin = Twin(Net(), sgd(momentum=0.9), fusion=fusion)
    for step in range(5):
        twin.train(lambda m, r, k=step: None if k == at and r == 1 else loss(m, r))
        twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["nobody", "part", "alternating", "twice_on_one", "nan_is_skipped"])
def test_case_071_other_ways_to_skip(how: str, fusion: Any) -> None:
    def of(m: nn.Module, r: int, step: int) -> Tensor | None:
        if how == "nobody":
            return None if step == 2 else loss(m, r)
        if how == "part":
            return m[0](ones(r, 2, 5)).mean() if r == 1 and step == 2 else loss(m, r)
        if how == "alternating":
            return loss(m, r) if step % 2 == r % 2 else None
        if how == "nan_is_skipped":
            value = loss(m, r) * (float("nan") if r == 1 and step == 2 else 1.0)
            return value if value.isfinite() else None
        return loss(m, r)

    twin = Twin(Net(), sgd(momentum=0.9), fusion=fusion)
    for step in range(5):
        twin.zero_grad()
        twin.backward(lambda m, r, k=step: of(m, r, k))
        if how == "twice_on_one":
            twin.backward(lambda m, r: loss(m, r) if r == 0 else None)
        twin.step()
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.parametrize("how", ["order", "branches", "set_of_parameters", "dict_of_losses"])
def test_case_072_byteps_112_rank_dependent_order(how: str, fusion: Any) -> None:
    """Also RLinf/RLinf PR#1355, horovod/horovod#763, DeepSpeed#1277: equal sizes, one fixed order of launches."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def of(m: Branches, r: int, step: int) -> Tensor:
        x = ones(r, 2, 5) / 5
        if how == "order":
            y = m.a(m.b(x)) if r == 0 else m.b(m.a(x))
        elif how == "branches":
            y = [m.a, m.b, m.c][(r + step) % 3](x)
        else:
            losses = {name: layer(x).square().mean() for name, layer in m.named_children()}
            names = sorted(losses, reverse=r % 2 == 1)
            return sum((losses[name] for name in names), torch.zeros(()))
        return y.square().mean()

    twin = Twin(Branches(), sgd(momentum=0.9), fusion=fusion)
    for step in range(4):
        twin.train(lambda m, r, k=step: of(m, r, k))
        twin.check()


@on_ranks(2)
def test_case_072_parameters_given_in_another_order() -> None:
    """Neighbour: an unsorted set of parameters; checkpoints would number them differently."""
    model = Net()
    params = list(model.parameters())
    with raises_at_once(dear.ArgumentError, r"'0\.weight': .*place 0.*place 3"):
        dear.DistributedOptimizer(optim.SGD(params[::-1] if dear.rank() else params, lr=0.1), model)


DIFFERENCES: dict[str, tuple[Callable[[bool], tuple[nn.Module, optim.Optimizer, dict[str, Any]]], str]] = {}


def difference(says: str) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        DIFFERENCES[build.__name__.strip("_")] = (build, says)
        return build

    return register


def _with_sgd(model: nn.Module, **options: Any) -> tuple[nn.Module, optim.Optimizer, dict[str, Any]]:
    return model, optim.SGD(model.parameters(), lr=0.1), options


@difference(r"rank 1 has parameter '2\.weight'")
def _extra_layer(odd: bool) -> Any:
    return _with_sgd(nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 + odd))))


@difference(r"'weight': shape \(2, 3\).*shape \(3, 3\)")
def _another_shape(odd: bool) -> Any:
    return _with_sgd(nn.Linear(3, 2 + odd))


@difference(r"'weight'.*float32.*float64")
def _another_dtype(odd: bool) -> Any:
    return _with_sgd(nn.Linear(3, 2).to(torch.float64 if odd else torch.float32))


@difference(r"'0\.bias'.*requires_grad True.*requires_grad False")
def _other_requires_grad(odd: bool) -> Any:
    model = Net()
    model[0].bias.requires_grad_(not odd)
    return _with_sgd(model)


@difference(r"'0\.weight'.*'a\.weight'")
def _other_names(odd: bool) -> Any:
    return _with_sgd(nn.ModuleDict({"a": nn.Linear(2, 2)}) if odd else nn.ModuleList([nn.Linear(2, 2)]))


@difference(r"'b'.*'a'|'a'.*'b'")
def _another_order_of_registration(odd: bool) -> Any:
    model = nn.Module()
    for name in "ba" if odd else "ab":
        model.register_parameter(name, nn.Parameter(torch.ones(3)))
    return _with_sgd(model)


@difference(r"'1\.weight'")
def _tied_on_one_rank(odd: bool) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if odd:
        model[1].weight = model[0].weight
    return _with_sgd(model)


@difference(r"rank 0 has buffer '1\.running_mean'")
def _buffers(odd: bool) -> Any:
    return _with_sgd(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=not odd)))


@difference(r"group 0: lr=0\.1; rank 1 has group 0: lr=0\.2")
def _another_lr(odd: bool) -> Any:
    model = Net()
    return model, optim.SGD(model.parameters(), lr=0.2 if odd else 0.1), {}


@difference(r"betas=\(0\.9, 0\.999\).*betas=\(0\.8, 0\.999\)")
def _other_betas(odd: bool) -> Any:
    model = Net()
    return model, optim.Adam(model.parameters(), betas=(0.8 if odd else 0.9, 0.999)), {}


@difference(r"optimizer class torch\.optim\.sgd\.SGD.*Adam")
def _another_optimizer(odd: bool) -> Any:
    model = Net()
    return model, (optim.Adam if odd else optim.SGD)(model.parameters(), lr=0.1), {}


@difference(r"fusion=25\.0.*fusion=1\.0")
def _another_fusion(odd: bool) -> Any:
    return _with_sgd(Net(), fusion=1.0 if odd else 25.0)


@difference(r"schedule='dear'.*schedule='wfbp'")
def _another_schedule(odd: bool) -> Any:
    return _with_sgd(Net(), schedule="wfbp" if odd else "dear")


@difference(r"accumulate=1.*accumulate=2")
def _another_accumulate(odd: bool) -> Any:
    return _with_sgd(Net(), accumulate=1 + odd)


@difference(r"reduce_dtype=None.*reduce_dtype=torch\.bfloat16")
def _another_reduce_dtype(odd: bool) -> Any:
    return _with_sgd(Net(), reduce_dtype=torch.bfloat16 if odd else None)


@difference(r"broadcast_buffers=False.*broadcast_buffers=True")
def _broadcast_buffers(odd: bool) -> Any:
    return _with_sgd(Net(), broadcast_buffers=odd)


@difference(r"sharded=True.*sharded=False")
def _sharded(odd: bool) -> Any:
    return _with_sgd(Net(), shard=False if odd else "auto")


@difference(r"'0\.weight'.*group 0.*group 1")
def _other_groups(odd: bool) -> Any:
    model = Net()
    first, *rest = model.parameters()
    groups = [{"params": rest}, {"params": [first]}] if odd else [{"params": [first]}, {"params": rest}]
    return model, optim.SGD(groups, lr=0.1), {}


@difference(r"'0\.weight'.*state \{\}.*momentum_buffer")
def _a_history_on_one_rank(odd: bool) -> Any:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if odd:
        loss(model, 0).backward()
        optimizer.step()
    return model, optimizer, {}


@on_ranks(3)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_case_073_pytorch_73547_different_models(name: str) -> None:
    """Also pytorch/pytorch#76449, #68803: the same sentence on all ranks, at wrap."""
    build, says = DIFFERENCES[name]
    model, optimizer, options = build(dear.rank() == 1)
    with raises_at_once(dear.ArgumentError, r"first difference: rank 0 has .*; rank 1 has .*Build the same model"):
        try:
            dear.DistributedOptimizer(optimizer, model, **options)
        except dear.ArgumentError as error:
            assert re.search(says, str(error)), str(error)
            assert dear.broadcast_object(str(error)) == str(error)
            raise


@on_ranks(3)
def test_case_073_ranks_that_agree_can_go_on_afterwards() -> None:
    """Neighbour: a failed construction leaves nothing behind."""
    model = Net()
    with raises_at_once(dear.ArgumentError, "first difference"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1 * (1 + dear.rank())), model)
    twin = Twin(model)
    twin.train(loss, 2)
    twin.check()


@on_ranks(3)
@pytest.mark.parametrize("what", ["weights", "buffers", "bf16", "after_a_wrong_load"])
def test_case_074_detr_544_seeds_differ(what: str, fusion: Any) -> None:
    """Also facebookresearch/fairscale#584: rank 0's weights everywhere after wrapping."""
    torch.manual_seed(dear.rank())
    model: nn.Module = Net() if what != "buffers" else nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    if what == "bf16":
        model = model.bfloat16()
    if what == "buffers":
        model[1].running_mean.fill_(dear.rank())
        model[1].num_batches_tracked.fill_(7 * dear.rank())
    torch.manual_seed(0)
    rank_0s = Net() if what != "buffers" else nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, fusion=fusion)
    for mine, theirs in zip(model.parameters(), rank_0s.parameters(), strict=True):
        assert torch.equal(mine.detach(), theirs.detach().to(mine.dtype))
    if what == "buffers":
        assert model[1].running_mean.tolist() == [0.0] * 4 and model[1].num_batches_tracked.item() == 0
    if what == "after_a_wrong_load":  # only rank 0 loads: broadcast_parameters mends it
        if dear.rank() == 0:
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        dear.broadcast_parameters(model.state_dict())
        optimizer.zero_grad()
        loss(model, dear.rank()).backward()
        optimizer.step()
        optimizer.synchronize()
    assert_same_everywhere(model)


def fails(where: str) -> str:
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("bomb in backward")

    def act(step: int, model: nn.Module) -> None:
        if dear.rank() == 1 and step == 2:
            if where == "forward":
                raise ValueError("bomb in forward")
            if where == "backward":
                model[1](Bomb.apply(model[0](ones(1, 2, 5)))).sum().backward()
            os._exit(3)

    return train(4, act)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_case_075_pith_train_31_one_rank_raises(pool: RankPool, where: str) -> None:
    """Also NVIDIA/nccl#1777, torchtitan PR#1342: its own traceback at once; the other one's error by the timeout."""
    start_s = time.monotonic()
    outcomes = pool.run(fails, where, size=2, group_timeout_s=TIMEOUT_S, expect_errors=True, timeout_s=20)
    assert time.monotonic() - start_s < TIMEOUT_S + 10
    assert_raised(outcomes, "ValueError", f"bomb in {where}", ranks=[1])
    assert_raised(outcomes, "CommunicatorError", r"rank 0 of 2: .*Rank 1 ", ranks=[0])


def test_case_075_one_rank_exits(pool: RankPool) -> None:
    outcomes = pool.run(
        fails, "exit", size=2, group_timeout_s=TIMEOUT_S, expect_errors=True, expect_lost=[1], timeout_s=20
    )
    assert_raised(outcomes, "CommunicatorError", r"rank 0 of 2: .*Rank 1 is silent: killed, stopped, exited", ranks=[0])


@on_ranks(2, ddp=True)
@pytest.mark.parametrize("where", ["backward_step", "step_forward", "in_forward", "async"])
def test_case_077_pytorch_68297_collectives_of_the_user_in_between(where: str) -> None:
    twin = Twin(Net(), made(optim.Adam, lr=0.01, eps=1e-3), fusion=None)

    def check_sum() -> None:
        tensor = torch.full((4, 5), dear.rank() + 1.0)  # as large as a weight
        if where == "async":
            work = dist.all_reduce(tensor, async_op=True)
            dear.allreduce(tensor.clone())
            work.wait()
        else:
            dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        assert dear.allreduce(torch.full((4, 5), dear.rank() + 1.0)).unique().tolist() == [1.5]

    if where == "in_forward":
        twin.model.register_forward_pre_hook(lambda *_: check_sum())
    for _ in range(4):
        twin.zero_grad()
        twin.backward(loss)
        if where in ("backward_step", "async"):
            check_sum()
        twin.step()
        if where in ("step_forward", "async"):
            check_sum()
    twin.check()


@on_ranks(4)
@pytest.mark.parametrize("kind", ["shards", "whole", "clip"])
def test_case_078_deepspeed_5555_mean_within_the_group(kind: str) -> None:
    group = [0, 1] if dear.rank() < 2 else [2, 3]
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    optimizer = dear.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.1), model, group=group, shard=False if kind == "whole" else "auto"
    )
    model(ones(dear.rank())).sum().backward()
    mean = sum(r + 1 for r in group) / 2
    close(optimizer.full_grad(model.weight), mean)
    if kind == "clip":
        close(optimizer.clip_grad_norm_(1e9), (4 * mean**2 + 1) ** 0.5)
    optimizer.step()
    close(model.weight, before - 0.1 * mean)
    others = dear.allgather(model.weight.detach())
    assert torch.equal(others[group[0]], others[group[1]])


@on_ranks(4)
def test_case_078_bad_groups() -> None:
    model = Net()
    for group in ([dear.rank(), 9], [(dear.rank() + 1) % 4], [dear.rank()] * 2, "all"):
        with raises_at_once(dear.ArgumentError, "group"):
            dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, group=group)
