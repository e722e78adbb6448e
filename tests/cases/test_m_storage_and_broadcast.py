"""Field cases: storage objects (S2), aliases of trained parameters (S6), what construction sends (S3), overlaps (H12).

The twin is the same model in plain PyTorch. Where a case needs aliases it builds both models itself: a deep copy
keeps no alias between a parameter and a buffer, in plain PyTorch neither.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn, optim

import dear
from dear.planning import make_plan_and_schedule
from tests.cases.harness import Twin, assert_same_everywhere, close, on_ranks, ones, raises_at_once, sgd


class Net(nn.Module):
    """Two tied layers, a head, odd sizes, and an empty parameter; used in another order than defined."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(7, 3)
        self.embed = nn.Linear(5, 7, bias=False)
        self.wide = nn.Linear(7, 300)
        self.narrow = nn.Linear(300, 7)
        self.unembed = nn.Linear(5, 7, bias=False)
        self.unembed.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.narrow(torch.tanh(self.wide(self.embed(x)))))
        return self.head(hidden) + 0.1 * torch.tanh(nn.functional.linear(hidden, self.unembed.weight.t())).mean()


def loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.arange(10.0).view(2, 5).sin() + rank).square().mean()


def relayout(optimizer: dear.DistributedOptimizer) -> None:
    """Another plan: one bucket a tensor where there were several in one, and the other way round."""
    engine = optimizer._engine
    plan = engine.replica.plan
    fusion = None if len(plan.buckets) == 1 else 25.0
    specs = [t.spec for t in engine.tracked]
    engine.relayout(*make_plan_and_schedule("dear", fusion, specs, dear.size(), True))


def storages(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    """Names by storage, as finders of tied weights do it."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        storage = param.untyped_storage()
        if storage.nbytes():
            found.setdefault((storage.data_ptr(), storage.nbytes()), []).append(name)
    return found


# ---------------------------------------------------------------------------------------------------- S2: storage


@on_ranks(2)
def test_field_s2_every_parameter_has_a_storage_of_its_own(fusion: Any) -> None:
    twin = Twin(Net(), fusion=fusion)

    def check() -> None:
        for param in twin.model.parameters():
            assert param.untyped_storage().nbytes() == param.numel() * param.itemsize and param.storage_offset() == 0
        tied = [names for names in storages(twin.model).values() if len(names) > 1]
        assert tied == [["embed.weight", "unembed.weight"]]

    check()
    twin.train(loss)  # the first backward shows the order of gradients: another layout
    check()
    relayout(twin.optimizer)
    check()
    flats = [bucket.param_flat for bucket in twin.optimizer._engine.replica.buckets]
    inside = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
    assert all(any(a <= p.data_ptr() < b for a, b in inside) for p in twin.model.parameters() if p.numel())
    twin.train(loss, 2)
    twin.check()
    twin.optimizer.close()
    check()


@on_ranks(1)
def test_field_s2_parameters_outlive_the_optimizer() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    strides = model.weight.stride()
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    model.weight.data.fill_(5)
    kept, old = model.weight.detach(), model.weight.data_ptr()
    optimizer.close()
    del optimizer
    gc.collect()
    junk = [torch.zeros(n) for n in (18, 54, 64, 128) for _ in range(20)]
    assert kept.eq(5).all() and model.weight.eq(5).all() and kept.data_ptr() == old != model.weight.data_ptr()
    assert model.weight.stride() == strides and len(junk) == 80


@on_ranks(2)
@pytest.mark.parametrize("when", ["wrapped", "stepped", "closed"])
def test_field_s2_safetensors_saves_every_tensor(when: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    twin = Twin(Net())
    if when != "wrapped":
        twin.train(loss, 2)
    if when == "closed":
        twin.optimizer.close()
    with tempfile.TemporaryDirectory() as folder:
        safetensors.save_model(twin.model, f"{folder}/mine.safetensors")  # right after step(): gathers under way
        safetensors.save_model(twin.plain, f"{folder}/plain.safetensors")
        mine, plain = (safetensors.load_file(f"{folder}/{name}.safetensors") for name in ("mine", "plain"))
        assert list(mine) == list(plain), f"{list(mine)}; plain: {list(plain)}"
        assert all(torch.equal(mine[key], plain[key]) for key in mine)
        fresh = Net()
        assert safetensors.load_model(fresh, f"{folder}/mine.safetensors") == (set(), [])
        torch.testing.assert_close(fresh.state_dict(), twin.plain.state_dict(), rtol=0, atol=0)
        if when == "stepped":  # into the wrapped model, which trains on
            twin.train(loss)
            for model in (twin.model, twin.plain):
                safetensors.load_model(model, f"{folder}/mine.safetensors")
            twin.train(loss)
            twin.check()


@on_ranks(2)
def test_field_s2_a_part_is_saved_as_a_part(fusion: Any) -> None:
    twin = Twin(Net(), fusion=fusion)
    twin.train(loss, 2)

    def saved(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    for part in (lambda m: m.head.state_dict(), lambda m: m.head.weight, lambda m: m.head):
        mine, plain = saved(part(twin.model)), saved(part(twin.plain))
        assert abs(len(mine) - len(plain)) < 2000, f"{len(mine)} bytes; plain torch writes {len(plain)}"
    loaded = torch.load(io.BytesIO(saved(twin.model.head.state_dict())))
    assert loaded["weight"].untyped_storage().nbytes() == loaded["weight"].nbytes
    torch.testing.assert_close(loaded, dict(twin.plain.head.state_dict()), rtol=0, atol=0)
    for model in (copy.deepcopy(twin.model), pickle.loads(pickle.dumps(twin.model))):
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
        assert model.unembed.weight is model.embed.weight and type(model.head.weight) is nn.Parameter
        model.head.weight.data.zero_()
    twin.train(loss)
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["model", "parameter", "before_wrapping"])
def test_field_s2_shared_memory_is_adopted_back_and_says_so(how: str, fusion: Any) -> None:
    model = Net()
    if how == "before_wrapping":
        model.share_memory()
        with pytest.warns(UserWarning, match="parameter '.*' was in shared memory .* Send parameters again"):
            twin = Twin(model, sgd(momentum=0.9), fusion=fusion)
        twin.train(loss, 2)
        twin.check()
        return
    twin = Twin(model, sgd(momentum=0.9), fusion=fusion)
    twin.train(loss, 2)
    twin.zero_grad()
    twin.optimizer.synchronize()
    model.share_memory() if how == "model" else model.wide.weight.share_memory_()
    shared = model.wide.weight.detach()
    assert shared.is_shared() and model.head.weight.is_shared() == (how == "model")
    with torch.no_grad():
        twin.both(lambda m, _: m.wide.weight.mul_(2))  # what was written there counts
    assert torch.equal(shared, twin.plain.wide.weight)
    named = r"'head\.weight'" if how == "model" else r"'wide\.weight'"
    with pytest.warns(UserWarning, match=named + " was in shared memory .* Send parameters again"):
        twin.train(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.train(loss)
    twin.check()


def reply(pipe: Any) -> None:
    """In another process: tells sums and sizes of what it is sent, and overwrites it."""
    for _ in range(2):
        sent = pipe.recv()
        pipe.send({name: (value.sum().item(), value.untyped_storage().nbytes()) for name, value in sent.items()})
        for value in sent.values():
            value.detach().zero_()
        pipe.send("written")
    pipe.recv()
    os._exit(0)  # nothing of this rank's is ended here


@pytest.mark.filterwarnings("ignore:parameter .* was in shared memory")
@on_ranks(1)
def test_field_s2_parameters_are_sent_to_another_process() -> None:
    """As in plain PyTorch the receiver gets the parameter's memory itself, and no other; here until the next step."""
    twin = Twin(Net())
    context = mp.get_context("fork")
    pipe, others_end = context.Pipe()
    process = context.Process(target=reply, args=(others_end,), daemon=True)
    process.start()
    for what in (lambda m: m.state_dict(), lambda m: dict(m.named_parameters())):
        twin.train(loss, 2)
        pipe.send(what(twin.model.head))  # right after step()
        received = pipe.recv()
        for name, value in what(twin.plain.head).items():
            close(torch.tensor(received[name][0]), value.sum())
            assert received[name][1] == value.nbytes
        assert pipe.recv() == "written"
        assert not twin.model.head.weight.any() and not twin.model.head.bias.any(), "shared memory"
        twin.plain.head.weight.data.zero_()
        twin.plain.head.bias.data.zero_()
    pipe.send("end")
    process.join()
    twin.train(loss, 2)
    twin.check()


@on_ranks(2, ddp=True)
def test_field_s2_torch_distributed_checkpoints(fusion: Any) -> None:
    twin = Twin(Net(), fusion=fusion)
    twin.train(loss, 2)
    folder = dear.broadcast_object(tempfile.mkdtemp() if dear.rank() == 0 else None)
    dcp.save({"model": twin.model.state_dict()}, checkpoint_id=folder)
    twin.train(loss)
    state = {"model": twin.model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    twin.model.load_state_dict(state["model"])
    fresh = {"model": Net().state_dict()}
    dcp.load(fresh, checkpoint_id=folder)
    twin.plain.load_state_dict(fresh["model"])
    twin.check()
    twin.train(loss)
    twin.check()
    of_plain = dear.broadcast_object(tempfile.mkdtemp() if dear.rank() == 0 else None)
    dcp.save({"model": Net().state_dict()}, checkpoint_id=of_plain)
    mine, plain = (sum(file.stat().st_size for file in Path(name).iterdir()) for name in (folder, of_plain))
    assert abs(mine - plain) < 2000, f"{mine} bytes; of a plain model {plain}"


# ---------------------------------------------------------------------------------------------------- S6: aliases


class Tied(nn.Module):
    """`make_alias(model)` puts a tensor over the memory of `first.weight` into the model."""

    def __init__(self, make_alias: Callable[[Tied], None]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 4, bias=False), nn.Linear(4, 2)
        self.other = nn.Linear(6, 4, bias=False)
        make_alias(self)

    def alias(self) -> Tensor:
        for place in (getattr(self, "view", None), getattr(self, "held", None), self.other.weight):
            if place is not None:
                return place["it"] if isinstance(place, dict) else place
        raise AssertionError

    def forward(self, x: Tensor) -> Tensor:
        # the alias is read before any parameter is
        extra = self.alias().detach().contiguous().view(torch.uint8).view(torch.float32).float().sum()
        return self.last(torch.tanh(self.first(x))) + 0.01 * extra


def freeze_other(model: Tied) -> None:
    model.other.weight.data = model.first.weight.data
    model.other.weight.requires_grad_(False)


ALIASES: dict[str, Callable[[Tied], Any]] = {
    "data": lambda m: m.register_buffer("view", m.first.weight.data),
    "detached": lambda m: m.register_buffer("view", m.first.weight.detach(), persistent=False),
    "rows": lambda m: m.register_buffer("view", m.first.weight.data[1:3]),
    "column": lambda m: m.register_buffer("view", m.first.weight.data[:, 2]),
    "transposed": lambda m: m.register_buffer("view", m.first.weight.data.t()),
    "flat": lambda m: m.register_buffer("view", m.first.weight.data.view(-1)),
    "bits": lambda m: m.register_buffer("view", m.first.weight.data.view(torch.int32)),
    "expanded": lambda m: m.register_buffer("view", m.first.weight.data[0, :1].expand(5)),
    "differentiable": lambda m: m.register_buffer("view", m.first.weight.t()),
    "attribute": lambda m: setattr(m, "held", m.first.weight.data[2:]),
    "in_a_dict": lambda m: setattr(m, "held", {"it": m.first.weight.data[:2]}),
    "frozen": freeze_other,
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def lr_sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(trainable(model), lr=0.1, momentum=0.9)


class TiedTwin(Twin):
    def __init__(self, make_alias: Callable[[Tied], None], **options: Any) -> None:
        self.model, self.plain = Tied(make_alias), Tied(make_alias)
        self.plain_optimizer, self.wrapped = lr_sgd(self.plain), lr_sgd(self.model)
        self.alias = self.model.alias()
        self.optimizer = dear.DistributedOptimizer(self.wrapped, self.model, **options)

    def check_alias(self) -> None:
        assert self.model.alias() is self.alias, "the same object"
        assert torch.equal(self.model.alias(), self.plain.alias()), "the alias is fresh, also when it is read first"
        mine, theirs = self.model.alias(), self.plain.alias()
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        weight, plain = self.model.first.weight, self.plain.first.weight
        assert mine.data_ptr() - weight.data_ptr() == theirs.data_ptr() - plain.data_ptr()
        assert mine.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def tied_loss(model: nn.Module, rank: int) -> Tensor:
    return model(ones(rank, 3, 6) / 7).square().mean()


@on_ranks(2, dtypes=(torch.float32,))
@pytest.mark.parametrize("kind", ALIASES)
def test_field_s6_aliases_stay_aliases(kind: str, fusion: Any) -> None:
    twin = TiedTwin(ALIASES[kind], fusion=fusion)
    twin.check_alias()
    for _ in range(3):
        twin.train(tied_loss)
        twin.check_alias()
    relayout(twin.optimizer)
    twin.check_alias()
    if kind != "expanded":
        with torch.no_grad():  # right after step(), through the alias
            twin.both(lambda m, _: m.alias().zero_())
        assert torch.equal(twin.model.first.weight, twin.plain.first.weight)
    with torch.enable_grad():
        twin.train(tied_loss, 2)
    twin.check()
    twin.optimizer.close()
    twin.check_alias()
    twin.both(lambda m, _: m.first.weight.data.fill_(2))
    twin.check_alias()


@on_ranks(2)
def test_field_s6_what_is_written_through_an_alias_is_trained_on() -> None:
    """Right after step(), while the parameters are on their way."""
    twin = TiedTwin(ALIASES["rows"])
    for value in (0.5, 0.25):
        twin.train(tied_loss)
        twin.both(lambda m, _: m.alias().fill_(value))  # noqa: B023  called at once
        twin.check_alias()
    twin.train(tied_loss)
    twin.check()


@on_ranks(2)
def test_field_s6_broadcast_buffers_leaves_aliases_to_the_parameter(fusion: Any) -> None:
    twin = TiedTwin(ALIASES["data"], fusion=fusion, broadcast_buffers=True)
    twin.train(tied_loss, 4)
    twin.check()
    twin.check_alias()


@on_ranks(2)
def test_field_s6_an_alias_that_was_given_up_is_left_alone() -> None:
    """`p.data = ...` leaves the alias behind in plain PyTorch; `share_memory_` takes it along."""
    twin = TiedTwin(ALIASES["rows"])
    twin.train(tied_loss, 2)
    twin.optimizer.synchronize()
    twin.model.first.weight.share_memory_()
    twin.check_alias()
    with pytest.warns(UserWarning, match=r"'first\.weight' was in shared memory"):
        twin.train(tied_loss)
    twin.check_alias()

    def give_other_memory(model: nn.Module, _: Any) -> None:
        model.first.weight.data = model.first.weight.data * 2

    twin.both(give_other_memory)
    for _ in range(2):
        twin.train(tied_loss)
        assert torch.equal(twin.model.alias(), twin.plain.alias())
    twin.check()


def over_two(model: Tied) -> None:
    memory = torch.ones(48)
    model.first.weight.data, model.other.weight.data = memory[:24].view(4, 6), memory[24:].view(4, 6)
    model.register_buffer("view", memory[20:28])


def part_of_more(model: Tied) -> None:
    memory = torch.ones(30)
    model.first.weight.data = memory[:24].view(4, 6)
    model.register_buffer("view", memory)


def part_with_gaps(model: Tied) -> None:
    memory = torch.ones(4, 8)
    model.first.weight.data = memory[:, :6]
    model.register_buffer("view", memory[1, :6])


REFUSED = {
    "over_two": (over_two, r"'view' shares memory with .* 'first\.weight', and with 'other\.weight'"),
    "part_of_more": (part_of_more, r"'view' shares memory with the trained parameter 'first\.weight', but is no part"),
    "part_with_gaps": (part_with_gaps, r"'view' shares memory with the trained parameter 'first\.weight', but is no"),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_field_s6_what_cannot_stay_an_alias_is_refused(kind: str) -> None:
    make_alias, says = REFUSED[kind]
    model = Tied(make_alias)
    place = model.first.weight.data_ptr()
    with raises_at_once(dear.ArgumentError, says):
        dear.DistributedOptimizer(lr_sgd(model), model)
    assert model.first.weight.data_ptr() == place and "view" in dict(model.named_buffers())
    del model.view  # type: ignore[attr-defined]
    twin = Twin(model, lr_sgd)
    twin.train(lambda m, r: m.last(torch.tanh(m.first(ones(r, 3, 6)))).square().mean(), 2)
    twin.check()


@on_ranks(2)
def test_field_s6_an_alias_that_another_optimizer_trains_is_refused() -> None:
    model = Tied(lambda m: None)
    model.other.weight.data = model.first.weight.data[:]
    with raises_at_once(dear.ArgumentError, r"'first\.weight' and 'other\.weight' share memory"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    first = dear.DistributedOptimizer(optim.SGD(model.first.parameters(), lr=0.1), model)
    with raises_at_once(dear.ArgumentError, r"'first\.weight' shares memory .* 'other\.weight', and is trained by"):
        dear.DistributedOptimizer(optim.SGD(model.other.parameters(), lr=0.1), model)
    first.close()
    assert model.other.weight.data_ptr() == model.first.weight.data_ptr()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["rows", "data", "only_on_one_rank"])
def test_field_s6_ranks_with_other_memory_formats_or_aliases(kind: str) -> None:
    def make_alias(model: Tied) -> None:
        if dear.rank() == 1:
            model.first.weight.data = model.first.weight.data.t().contiguous().t()
        if kind != "only_on_one_rank" or dear.rank() == 1:
            ALIASES["data" if kind == "only_on_one_rank" else kind](model)

    model = Tied(make_alias)
    if kind == "data":  # an alias of the whole goes into any format
        optimizer = dear.DistributedOptimizer(lr_sgd(model), model)
        assert model.alias().stride() == model.first.weight.stride() == (6, 1)
        assert model.alias().data_ptr() == model.first.weight.data_ptr()
        optimizer.close()
        assert model.alias().data_ptr() == model.first.weight.data_ptr()
        return
    says = r"'view' is a part of .* 'first\.weight', whose strides are \(1, 4\) on rank 1 and \(6, 1\) on rank 0"
    with raises_at_once(dear.ArgumentError, says if kind == "rows" else "first difference.*'view' in the memory of"):
        dear.DistributedOptimizer(lr_sgd(model), model)


@on_ranks(1)
def test_field_s6_columns_of_one_matrix_are_no_aliases() -> None:
    """Neighbour: what only interleaves is moved apart, as nobody can tell."""
    memory = torch.ones(4, 3)
    model = nn.Module()
    model.a, model.b = nn.Parameter(memory[:, 0]), nn.Parameter(memory[:, 1])
    model.register_buffer("c", memory[:, 2])
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=1.0), model)
    ((model.a * model.c).sum() + 2 * model.b.sum()).backward()
    optimizer.step()
    assert model.a.tolist() == [0.0] * 4 and model.b.tolist() == [-1.0] * 4 and model.c.tolist() == [1.0] * 4


# ---------------------------------------------------------------------------------------------------- S3: broadcast


class Experts(nn.Module):
    """A gate that is trained; an expert and a frozen trunk that are other ones on each rank; buffers everywhere."""

    def __init__(self, other_shapes: bool = False) -> None:
        super().__init__()
        rank = dear.rank()
        torch.manual_seed(rank)
        self.gate = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
        self.expert = nn.Sequential(nn.Linear(4, 4 + other_shapes * rank), nn.BatchNorm1d(4 + other_shapes * rank))
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.register_buffer("place", torch.full((2 + other_shapes * rank,), float(rank)))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.fill_(rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.trunk(x)) + self.expert(x).tanh().mean()


GATE = {"gate.0.weight", "gate.0.bias", "gate.1.weight", "gate.1.bias"}
GATE |= {f"gate.{n}.{name}" for n in (1, 2) for name in ("running_mean", "running_var", "num_batches_tracked")}


@on_ranks(3, dtypes=(torch.float32,))
@pytest.mark.parametrize("broadcast", ["trained", "all", "default"])
def test_field_s3_only_what_is_trained_is_sent(broadcast: str, fusion: Any) -> None:
    model = Experts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rank_0s = dear.broadcast_object(before)
    options = {} if broadcast == "default" else {"broadcast": broadcast}
    dear.DistributedOptimizer(optim.SGD(model.gate.parameters(), lr=0.1), model, fusion=fusion, **options).close()
    for name, value in model.state_dict().items():
        expected = rank_0s if broadcast == "all" or name in GATE else before
        assert torch.equal(value, expected[name]), name
    assert dear.rank() == 0 or not torch.equal(before["expert.0.weight"], rank_0s["expert.0.weight"])


@on_ranks(2)
def test_field_s3_experts_of_other_shapes_train_on() -> None:
    """Different experts on each rank on purpose: trained by a plain optimizer, never touched by ours."""
    model = Experts(other_shapes=True)
    plain = copy.deepcopy(model)
    optimizer = dear.DistributedOptimizer(optim.SGD(model.gate.parameters(), lr=0.1), model)
    locally = optim.SGD(model.expert.parameters(), lr=0.1)
    for _ in range(2):
        locally.zero_grad()
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        locally.step()
        optimizer.step()
    optimizer.synchronize()
    assert_same_everywhere(model.gate)
    assert not torch.equal(model.expert[0].weight, plain.expert[0].weight)
    assert torch.equal(model.trunk[0].weight, plain.trunk[0].weight) and torch.equal(model.place, plain.place)
    optimizer.close()
    with raises_at_once(dear.ArgumentError, r"difference: rank 0 has parameter 'expert\.0\.weight': shape \(4, 4"):
        dear.DistributedOptimizer(optim.SGD(model.gate.parameters(), lr=0.1), model, broadcast="all")
    with raises_at_once(dear.ArgumentError, r"first difference: rank 0 has buffer 'place': shape \(2,\)"):
        dear.DistributedOptimizer(optim.SGD(model.gate.parameters(), lr=0.1), model, broadcast_buffers=True)


@on_ranks(2)
def test_field_s3_an_ordinary_model_is_sent_whole() -> None:
    """What DDP's users rely on: weights and buffers wherever they stand, and each rank's own after that."""
    torch.manual_seed(dear.rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4, affine=False)), nn.BatchNorm1d(4))
    model.append(nn.BatchNorm1d(4).requires_grad_(False)).append(nn.Linear(4, 4).requires_grad_(False))
    model.register_buffer("mask", torch.rand(3))
    for name, buffer in model.named_buffers():
        buffer.fill_(dear.rank() + len(name))
    dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
    assert_same_everywhere(model)  # frozen parameters as well
    for name, buffer in model.named_buffers():
        assert buffer.unique().tolist() == [len(name)]


@on_ranks(3)
def test_field_s3_nothing_is_sent_on_request() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(memory_format=torch.channels_last)
    model[1].running_mean.fill_(dear.rank())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast="none")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.close()
    if dear.rank() == 2:
        with torch.no_grad():
            model[0].bias[1] += 1e-6
    with raises_at_once(dear.ArgumentError, r"broadcast='none', but parameter '0\.bias' has other values on rank 2"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast="none")
    for wrong in ("buffers", None, True):
        with raises_at_once(dear.ArgumentError, "expected 'trained', 'all' or 'none'"):
            dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, broadcast=wrong)
    say = {"broadcast": "all"} if dear.rank() == 1 else {}
    with raises_at_once(dear.ArgumentError, "first difference.*broadcast='trained'.*broadcast='all'"):
        dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, **say)


# ---------------------------------------------------------------------------------------------------- H12: overlaps


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rank = dear.rank()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((1,), rank + 1.0).expand(4))
        self.register_buffer("windows", (torch.arange(5.0) + rank).unfold(0, 3, 1))
        self.register_buffer("number", torch.tensor(7 * rank).expand(2, 2))
        # the first rank's values have no room in one element
        self.register_buffer("rank_0s", torch.arange(3.0) if rank == 0 else torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


def check_rank_0s(model: Overlapping) -> None:
    assert model.scale.tolist() == [1.0] * 4 and model.number.tolist() == [[0, 0], [0, 0]]
    assert model.windows.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]] and model.rank_0s.tolist() == [0, 1, 2]
    assert model.scale.stride() == (0,) and model.windows.stride() == (1, 1)


@on_ranks(2, dtypes=(torch.float32,))
@pytest.mark.parametrize("how", ["construction", "each_forward", "broadcast_parameters"])
def test_field_h12_buffers_that_overlap_themselves(how: str) -> None:
    model = Overlapping()
    if how == "broadcast_parameters":
        dear.broadcast_parameters(model.state_dict(keep_vars=True))
        check_rank_0s(model)
    optimizer = dear.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.1), model, broadcast_buffers=how == "each_forward"
    )
    check_rank_0s(model)
    for step in range(3):
        if how == "each_forward":
            model.scale[:1] = 10.0 * step + dear.rank()
        optimizer.zero_grad()
        model(ones(dear.rank())).sum().backward()
        if how == "each_forward":
            assert model.scale.tolist() == [10.0 * step] * 4
        optimizer.step()
    optimizer.synchronize()
    assert_same_everywhere(model)
