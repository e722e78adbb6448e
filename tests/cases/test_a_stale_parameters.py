"""A. Stale parameters: whoever uses a parameter after `step()` gets this step's value, by whatever way."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dear
from tests.cases.harness import Twin, close, made, on_ranks, ones


class Chain(nn.Module):
    """Registered a, b, c; called in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, order: str = "acb") -> Tensor:
        for name in order:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


class Owner(nn.Module):
    """A root that owns a weight, with entries beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5))
        self.head = nn.Linear(5, 5)
        self.extra = nn.ParameterDict({"scale": nn.Parameter(torch.ones(5))})

    def encode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.head(self.encode(x)) * self.extra["scale"])
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)) * self.extra["scale"]


def loss_of(order: str) -> Callable[[nn.Module, int], Tensor]:
    return lambda m, r: m(ones(r, 2, 5), order).square().sum()


def square_loss(m: nn.Module, r: int) -> Tensor:
    return m(ones(r, 2, 5)).square().mean()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def num_collectives(twin: Twin) -> int:
    return getattr(twin.optimizer._engine.communicator, "_sequence", 0)  # one rank alone has none


@on_ranks(2)
def test_case_001_megatron_950_forward_order_differs_from_registration(fusion: Any) -> None:
    twin = Twin(Chain(), fusion=fusion)
    for _ in range(5):
        twin.train(loss_of("acb"))
        close(*twin.both(lambda m, _: m(ones(0, 2, 5), "acb")))
    twin.check()


@on_ranks(2)
def test_case_001_forward_order_changes_each_iteration(fusion: Any) -> None:
    twin = Twin(Chain(), fusion=fusion)
    for order in ("abc", "cba", "bac", "aabc", "cb", "acb"):
        twin.train(loss_of(order))
        twin.check()


@on_ranks(2)
def test_case_001_forward_order_changes_within_an_iteration() -> None:
    """Neighbour: two forwards of different order before one backward, Adam."""
    twin = Twin(Chain(), made(torch.optim.Adam, lr=0.1), fusion=None)
    for _ in range(3):
        twin.train(lambda m, r: loss_of("abc")(m, r) + loss_of("cab")(m, r))
    twin.check()


@on_ranks(2)
def test_case_002_nemo_rl_949_checkpoint_right_after_step(fusion: Any) -> None:
    """Also NVIDIA-NeMo/Megatron-Bridge#451."""
    twin = Twin(Chain(), fusion=fusion)
    for _ in range(3):
        twin.train(loss_of("abc"))
        state = saved(twin.model.state_dict())
        for name, value in twin.plain.state_dict().items():
            close(state[name], value)
            assert type(state[name]) is type(value)


@on_ranks(2)
@pytest.mark.parametrize("by", ["state_dict", "named_parameters", "numpy", "vector", "safetensors_like", "prefix"])
def test_case_002_other_ways_to_save(by: str) -> None:
    twin = Twin(Chain(), fusion=None)
    twin.train(loss_of("abc"), 2)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "state_dict": lambda m: {k: v.clone() for k, v in m.state_dict().items()},
        "named_parameters": lambda m: {k: p.detach().clone() for k, p in m.named_parameters()},
        "numpy": lambda m: {k: torch.from_numpy(v.numpy().copy()) for k, v in m.state_dict().items()},
        "vector": lambda m: {"all": nn.utils.parameters_to_vector(m.parameters()).detach()},
        "safetensors_like": lambda m: {
            k: torch.frombuffer(bytearray(bytes(v.contiguous().untyped_storage()))[: v.nbytes], dtype=v.dtype).view(
                v.shape
            )
            for k, v in ((k, v.clone()) for k, v in m.state_dict().items())
        },
        "prefix": lambda m: dict(m.state_dict(prefix="module.", keep_vars=True)),
    }
    got, expected = twin.both(lambda m, _: ways[by](m))
    for name, value in expected.items():
        close(got[name], value)


@on_ranks(2)
def test_case_003_megatron_4562_eval_between_training_steps(fusion: Any) -> None:
    twin = Twin(Chain(), fusion=fusion)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        twin.train(loss_of("acb"))

        def evaluate(m: nn.Module, _: Any, mode: Any = mode) -> Tensor:
            m.eval()
            with mode():
                y = m(ones(1, 3, 5), "cab") * 1
            m.train()
            return y.clone()

        close(*twin.both(evaluate))
        before = num_collectives(twin)
        close(*twin.both(evaluate))
        assert num_collectives(twin) == before, "a second evaluation starts no collective"
    twin.train(loss_of("abc"), 2)
    twin.check()


@on_ranks(2)
def test_case_003_evaluation_on_one_rank_only() -> None:
    """Neighbour: `if rank == 0: evaluate()` needs no other rank."""
    twin = Twin(Chain())
    for _ in range(3):
        twin.train(loss_of("abc"))
        if dear.rank() == 0:
            with torch.no_grad():
                close(*twin.both(lambda m, _: m(ones(0, 2, 5), "cba")))
    twin.check()


@on_ranks(2)
def test_case_004_fairscale_586_eval_forward_without_backward(fusion: Any) -> None:
    twin = Twin(Chain(), fusion=fusion)
    for _ in range(3):
        twin.train(loss_of("abc"))

        def forward_only(m: nn.Module, _: Any) -> Tensor:
            m.eval()
            y = m(ones(0, 2, 5), "abc")  # with a graph, which nobody uses
            m.train()
            return y

        close(*twin.both(forward_only))
    twin.check()


@on_ranks(2)
def test_case_004_forward_without_backward_between_backward_and_step() -> None:
    twin = Twin(Chain())
    for _ in range(3):
        twin.zero_grad()
        twin.backward(loss_of("abc"))
        close(*twin.both(lambda m, _: m(ones(0, 2, 5), "abc")))
        twin.step()
    twin.check()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


@on_ranks(2)
def test_case_005_pytorch_78109_multihead_attention_out_proj(fusion: Any) -> None:
    # eps: the key's bias has a gradient of zero but for rounding, which Adam would blow up
    twin = Twin(Attention(), made(torch.optim.Adam, lr=0.01, eps=0.01), fusion=fusion)
    for _ in range(3):
        twin.train(lambda m, r: (m(torch.linspace(-1, 1, 36).view(2, 3, 6) * (r + 1))).square().sum())
        close(*twin.both(lambda m, _: m(torch.linspace(-1, 1, 36).view(2, 3, 6))))
        close(*twin.both(lambda m, _: m.attention.out_proj.weight))
    assert not torch.equal(twin.plain.attention.out_proj.bias, torch.zeros(6)), "it was trained"
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["lstm", "encoder_layer", "grouped_conv", "embedding_bag", "bilinear"])
def test_case_005_modules_that_read_weights_below_their_forward(kind: str) -> None:
    """Neighbours: other modules whose children's hooks never run."""
    modules: dict[str, tuple[nn.Module, Callable[[nn.Module, int], Tensor]]] = {
        "lstm": (nn.LSTM(4, 3, 2, batch_first=True), lambda m, r: m(ones(r, 2, 3, 4))[0].sum()),
        "encoder_layer": (
            nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
            lambda m, r: (m(torch.linspace(-1, 1, 24).view(2, 3, 4) * (r + 1)) ** 2).sum(),
        ),
        "grouped_conv": (nn.Conv1d(4, 4, 3, groups=2), lambda m, r: m(ones(r, 2, 4, 5)).square().sum()),
        "embedding_bag": (nn.EmbeddingBag(5, 4), lambda m, r: m(torch.tensor([[r, 2, 3]])).square().sum()),
        "bilinear": (nn.Bilinear(4, 3, 2), lambda m, r: m(ones(r, 2, 4), ones(r, 2, 3)).sum()),
    }
    model, loss = modules[kind]
    twin = Twin(model, fusion=None)
    for _ in range(3):
        twin.train(loss)
        close(*twin.both(lambda m, _: loss(m, 0)))
        model.eval(), twin.plain.eval()
        with torch.no_grad():
            close(*twin.both(lambda m, _: loss(m, 1)))  # the fast paths
        model.train(), twin.plain.train()
    twin.check(exact=False)


@on_ranks(2)
@pytest.mark.parametrize("entry", ["encode", "generate", "call", "functional_call", "children", "bound_method"])
def test_case_006_pytorch_109385_custom_entry(entry: str) -> None:
    """Also pytorch/pytorch#103682."""
    entries: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "encode": lambda m, x: m.encode(x),
        "generate": lambda m, x: m.generate(x),
        "call": lambda m, x: m(x),
        "functional_call": lambda m, x: torch.func.functional_call(m, {}, (x,)),
        "children": lambda m, x: sum((child(x) for child in [m.head]), torch.zeros(())),
        "bound_method": lambda m, x: m.forward(x),
    }
    twin = Twin(Owner(), fusion=None)
    twin.train(square_loss, 3)
    close(*twin.both(lambda m, _: entries[entry](m, ones(0, 2, 5))))
    twin.train(lambda m, r: entries["encode"](m, ones(r, 2, 5)).square().mean(), 2)
    close(*twin.both(lambda m, _: entries[entry](m, ones(0, 2, 5))))
    twin.check()


@on_ranks(2)
@pytest.mark.parametrize("how", ["deepcopy", "averaged_model", "ema", "load_state_dict", "pickle", "copy_module"])
def test_case_007_pytorch_82070_copies_are_fresh_and_independent(how: str, fusion: Any) -> None:
    """Also pytorch/pytorch#149138."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "deepcopy": copy.deepcopy,
        "averaged_model": torch.optim.swa_utils.AveragedModel,
        "ema": lambda m: torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        ),
        "load_state_dict": _loaded,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "copy_module": lambda m: copy.deepcopy(nn.ModuleList([m]))[0],
    }
    twin = Twin(Chain(), fusion=fusion)
    twin.train(loss_of("abc"), 2)
    ema, plain_ema = twin.both(lambda m, _: ways[how](m))
    close(ema(ones(0, 2, 5)), plain_ema(ones(0, 2, 5)))
    before = num_collectives(twin)
    for _ in range(2):
        ema(ones(0, 2, 5)).sum().backward()
    assert num_collectives(twin) == before, "the copy starts no collective"
    kept = [p.detach().clone() for p in ema.parameters()]
    twin.train(loss_of("abc"), 2)
    for now, then in zip(ema.parameters(), kept, strict=True):
        assert torch.equal(now.detach(), then), "later steps do not reach the copy"
    if isinstance(ema, torch.optim.swa_utils.AveragedModel):
        ema.update_parameters(twin.model), plain_ema.update_parameters(twin.plain)
        close(ema(ones(0, 2, 5)), plain_ema(ones(0, 2, 5)))
    torch.optim.SGD(ema.parameters(), lr=1.0).step()
    twin.check()


def _loaded(model: nn.Module) -> nn.Module:
    other = Chain()
    other.load_state_dict(model.state_dict())
    return other


@on_ranks(2)
def test_case_007_copy_between_backward_and_step() -> None:
    twin = Twin(Chain())
    twin.train(loss_of("abc"))
    twin.backward(loss_of("abc"))
    duplicate, plain_duplicate = twin.both(lambda m, _: copy.deepcopy(m))
    twin.step()
    twin.check(exact=False)
    close(duplicate(ones(0, 2, 5)), plain_duplicate(ones(0, 2, 5)))


@on_ranks(2)
@pytest.mark.parametrize("when", ["wrapped", "after_step", "after_backward"])
def test_case_008_pytorch_11683_models_can_be_saved_whole(when: str) -> None:
    """Also Bluefog-Lib/bluefog#103."""
    twin = Twin(Owner())
    if when != "wrapped":
        twin.train(square_loss, 2)
    if when == "after_backward":
        twin.backward(square_loss)
    for again in (saved(twin.model), pickle.loads(pickle.dumps(twin.model)), copy.copy(twin.model)):
        close(again(ones(0, 2, 5)), twin.plain(ones(0, 2, 5)))
        assert all(type(p) is nn.Parameter for p in again.parameters())


@on_ranks(2)
def test_case_008_the_optimizer_says_what_to_save() -> None:
    """Neighbour: pickling or copying the wrapper itself."""
    twin = Twin(Owner())
    twin.train(square_loss)
    for act in (pickle.dumps, copy.deepcopy, saved):
        with pytest.raises(dear.DearError, match=r"state_dict\(\)"):
            act(twin.optimizer)
    twin.train(square_loss)
    twin.check()
