"""What training must come to: one plain PyTorch process (`reference_steps`) or torch's own DDP (`ddp_steps`).

    model = OddMLP()
    batches = make_batches(model, num_ranks=2, num_steps=3)
    sgd = optimizer_of(torch.optim.SGD, lr=0.1)
    expected = reference_steps(model, sgd, batches, mse_loss)                                # one `Trained` per rank
    got = pool.run(ddp_steps, model, sgd, batches, mse_loss, init=False, ddp=True)           # one `Trained` per rank
    assert_bit_equal(got, expected)

Every function leaves the model it is given alone, so the same one can be trained in several ways.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Any
# batches[rank][step]: what one rank is given in one step. A `list` in place of a batch means several backward passes.
Batches = Sequence[Sequence[Batch]]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
LossFn = Callable[[nn.Module, Batch], Tensor]
BeforeStep = Callable[[nn.Module, torch.optim.Optimizer, int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """One rank's training, step by step; tensors are copies."""

    states: list[dict[str, Tensor]]  # state_dict after each step, buffers included
    losses: list[Tensor]  # of each step, summed over its backward passes
    parameters: dict[str, Tensor]  # at the end
    optimizer_state: dict[str, Any]  # at the end, in torch's own format


# ---------------------------------------------------------------------------------------------------- training


def optimizer_of(cls: type[torch.optim.Optimizer], **kwargs: Any) -> MakeOptimizer:
    """`cls(model.parameters(), **kwargs)`, as something that can be sent to ranks."""
    return functools.partial(_build_optimizer, cls, kwargs)


def _build_optimizer(
    cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], model: nn.Module
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls(model.parameters(), **kwargs)
    return optimizer


def reference_steps(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches_by_rank_and_step: Batches,
    loss_fn: LossFn,
    *,
    before_step: BeforeStep | None = None,
    scale: Literal["divide", "multiply"] = "divide",
) -> list[Trained]:
    """Train in this process on the mean over ranks of each rank's gradient, with the unwrapped optimizer.

    Each rank has a replica with its own buffers (BatchNorm statistics stay local) and the same parameters. Gradients
    are averaged by `mean_in_rank_order`. `before_step(model, optimizer, step)` sees the averaged gradients: clip,
    or change a learning rate. Runs on one thread, as ranks do: on more, matrix products may round differently.
    """
    num_ranks = len(batches_by_rank_and_step)
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    parameters = [list(replica.parameters()) for replica in replicas]
    optimizer = make_optimizer(replicas[0])
    states: list[list[dict[str, Tensor]]] = [[] for _ in range(num_ranks)]
    losses: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    with _one_thread():
        for step in range(len(batches_by_rank_and_step[0])):
            for r, replica in enumerate(replicas):
                replica.zero_grad()
                losses[r].append(_backward(replica, loss_fn, batches_by_rank_and_step[r][step]))
            for same in zip(*parameters, strict=True):
                same[0].grad = mean_in_rank_order([p.grad for p in same], scale)
            if before_step is not None:
                before_step(replicas[0], optimizer, step)
            optimizer.step()
            with torch.no_grad():
                for same in zip(*parameters, strict=True):
                    for other in same[1:]:
                        other.copy_(same[0])
            for r, replica in enumerate(replicas):
                states[r].append(snapshot(replica))
    return [_trained(replicas[r], optimizer, states[r], losses[r]) for r in range(num_ranks)]


def mean_in_rank_order(
    grads: Sequence[Tensor | None], scale: Literal["divide", "multiply"] = "divide"
) -> Tensor | None:
    """Sum in rank order in fp32 (fp64 for fp64), then 1/P; None where no rank has a gradient, else None counts as 0.

    `scale`: divide by P, or multiply by 1/P. They round differently where P is not a power of two.
    """
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    dtype = present[0].dtype
    accumulator_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    zero = torch.zeros_like(present[0])
    total = torch.zeros_like(present[0], dtype=accumulator_dtype)
    for grad in grads:
        total += (zero if grad is None else grad).to(accumulator_dtype)
    total = total / len(grads) if scale == "divide" else total * (1 / len(grads))
    return total.to(dtype)


def ddp_steps(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches_by_rank_and_step: Batches,
    loss_fn: LossFn,
    *,
    before_step: BeforeStep | None = None,
    **ddp_kwargs: Any,
) -> Trained:
    """The same training under DistributedDataParallel, on this rank: `pool.run(ddp_steps, ..., init=False, ddp=True)`.

    Buffers stay local, as in `reference_steps`, unless `broadcast_buffers=True`. All but the last backward pass of a
    step run under `no_sync()`.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    ddp = nn.parallel.DistributedDataParallel(model, **{"broadcast_buffers": False, **ddp_kwargs})
    states: list[dict[str, Tensor]] = []
    losses: list[Tensor] = []
    for step, batch in enumerate(batches_by_rank_and_step[dist.get_rank()]):
        optimizer.zero_grad()
        losses.append(_backward(ddp, loss_fn, batch))
        if before_step is not None:
            before_step(model, optimizer, step)
        optimizer.step()
        states.append(snapshot(model))
    return _trained(model, optimizer, states, losses)


def _backward(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    batches = batch if isinstance(batch, list) else [batch]
    total = torch.zeros((), dtype=torch.float64)
    for index, each in enumerate(batches):
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        with model.no_sync() if is_ddp and index < len(batches) - 1 else contextlib.nullcontext():
            loss = loss_fn(model, each)
            loss.backward()
        total += loss.detach().double().cpu()
    return total


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict's tensors, copied, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: list[dict[str, Tensor]], losses: list[Tensor]
) -> Trained:
    parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return Trained(states, losses, parameters, copy.deepcopy(optimizer.state_dict()))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# ---------------------------------------------------------------------------------------------------- models
# Small and odd: sizes that divide by nothing, a 0-dim parameter, one element, biases. Weights depend on `seed` only.
# Each gives `example(generator, num_samples) -> (input, target)`.


class _Seeded(nn.Module):
    """Builds under its own seed and leaves the global random state as it was."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.build()

    def build(self) -> None:
        raise NotImplementedError

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 7, generator=generator), torch.randn(num_samples, 5, generator=generator)


class OddMLP(_Seeded):
    """7 -> 13 -> 5 with LayerNorm and a 0-dim scale: 7 parameters, 201 elements."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)

    def build(self) -> None:
        self.fc1 = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fc2 = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.norm(self.fc1(x))) * self.scale)
        return y


class TinyConv(_Seeded):
    """3 x 6 x 6 images, a convolution without bias, BatchNorm, a depthwise one; optionally channels_last weights."""

    def __init__(self, seed: int = 0, channels_last: bool = False) -> None:
        self.channels_last = channels_last
        super().__init__(seed)

    def build(self) -> None:
        self.conv = nn.Conv2d(3, 5, 3, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.depthwise = nn.Conv2d(5, 5, 3, groups=5)
        self.head = nn.Linear(5, 5)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.to(memory_format=torch.channels_last)
        y: Tensor = self.head(self.depthwise(F.relu(self.norm(self.conv(x)))).mean(dim=(2, 3)))
        return y

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(num_samples, 3, 6, 6, generator=generator),
            torch.randn(num_samples, 5, generator=generator),
        )


class TiedModel(_Seeded):
    """An embedding whose weight is also the output layer's: one parameter under two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)

    def build(self) -> None:
        self.embedding = nn.Embedding(11, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return y

    def example(self, generator: torch.Generator, num_samples: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randint(11, (num_samples, 3), generator=generator),
            torch.randn(num_samples, 3, 11, generator=generator),
        )


class UnusedModel(_Seeded):
    """`never` is used by nobody, `frozen` needs no gradient, `sometimes` is used where the batch's third item says so.

    A batch is `(x, target)` or `(x, target, {"use_sometimes": False})`.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)

    def build(self) -> None:
        self.never = nn.Linear(3, 3)
        self.always = nn.Linear(7, 5)
        self.sometimes = nn.Linear(7, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, use_sometimes: bool = True) -> Tensor:
        y: Tensor = self.always(x) * self.frozen
        return y + self.sometimes(x) if use_sometimes else y


class ReusedModel(_Seeded):
    """One encoder applied twice in a forward, the two results used by different heads."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)

    def build(self) -> None:
        self.encoder = nn.Linear(7, 7)
        self.head_a = nn.Linear(7, 5)
        self.head_b = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.encoder(x))
        y: Tensor = self.head_a(once) + self.head_b(torch.tanh(self.encoder(once)))
        return y


def mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    """`batch` is `(input, target)` or `(input, target, keyword arguments of forward)`."""
    x, target, *rest = batch
    return F.mse_loss(model(x, **(rest[0] if rest else {})), target)


def make_batches(
    model: Any, num_ranks: int, num_steps: int, *, num_samples: int = 3, num_backwards: int = 1, seed: int = 0
) -> list[list[Batch]]:
    """`batches[rank][step]` for one of the models above; different on every rank. Lists where `num_backwards` > 1."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        if num_backwards == 1:
            return model.example(generator, num_samples)
        return [model.example(generator, num_samples) for _ in range(num_backwards)]

    return [[batch() for _ in range(num_steps)] for _ in range(num_ranks)]


# ---------------------------------------------------------------------------------------------------- exact gradients

ODD_SHAPES: tuple[tuple[int, ...], ...] = ((7, 13), (13,), (), (5, 13), (1,), (3, 1, 2), (129,))


class IntegerModel(nn.Module):
    """loss = sum of parameter * coefficient, so that every gradient is exactly its coefficient.

    With integer multiples of P as coefficients every order of summation and the division by P are exact: what differs
    then is a bug, not rounding. Parameters start at small integers.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]] = ODD_SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randint(-8, 9, shape, generator=generator).to(dtype)) for shape in shapes
        )

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        terms = [(weight * c).sum() for weight, c in zip(self.weights, coefficients, strict=True)]
        return torch.stack(terms).sum()


def weighted_sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def integer_batches(
    model: IntegerModel, num_ranks: int, num_steps: int, *, num_backwards: int = 1, largest: int = 4, seed: int = 0
) -> list[list[Batch]]:
    """`batches[rank][step]` for `weighted_sum_loss`: gradients are P times integers up to `largest` (exact in bf16)."""
    generator = torch.Generator().manual_seed(seed)

    def coefficients() -> tuple[Tensor, ...]:
        return tuple(
            num_ranks * torch.randint(-largest, largest + 1, weight.shape, generator=generator).to(weight.dtype)
            for weight in model.weights
        )

    def batch() -> Batch:
        return coefficients() if num_backwards == 1 else [coefficients() for _ in range(num_backwards)]

    return [[batch() for _ in range(num_steps)] for _ in range(num_ranks)]


# ---------------------------------------------------------------------------------------------------- comparisons


@dataclass(frozen=True, slots=True)
class Tolerance:
    rtol: float
    atol: float
    reason: str


# For the small models above (values near 1, gradients below 10, up to about 10 steps at lr 0.1).
TOLERANCES: dict[str, Tolerance] = {
    "exact": Tolerance(0, 0, "P <= 2, integer multiples of P, or deterministic mode: the arithmetic is the same"),
    "summation order": Tolerance(
        1e-5,
        1e-6,
        "fp32, P > 2: P - 1 additions in another order and 1/P before or after them, each off by up to 2^-24 of the "
        "largest partial sum, carried through about 10 steps",
    ),
    "summation order fp64": Tolerance(1e-13, 1e-14, "the same in fp64: up to 2^-53 each, carried through 10 steps"),
    "fused": Tolerance(
        1e-5,
        1e-6,
        "fused and foreach optimizers use vector code whose tails round differently from its bodies, and a shard moves "
        "elements between the two",
    ),
    "clip": Tolerance(1e-6, 1e-7, "the norm is a sum of squares over shards: partial sums in another order, fp32"),
    "bf16 gradients": Tolerance(
        2**-7,
        2**-7,
        "8 bits: each rank's gradient and their mean are rounded to 2^-9 of themselves; 10 steps at lr 0.1",
    ),
    "fp16 gradients": Tolerance(
        2**-10, 2**-10, "11 bits: each rank's gradient and their mean are rounded to 2^-12 of themselves; 10 steps"
    ),
    "bf16 parameters": Tolerance(
        2**-8, 2**-8, "fp32 master shards round to the nearest bf16: half a unit in the last of 8 bits, twice"
    ),
}


def assert_bit_equal(got: Any, expected: Any, names: tuple[str, str] = ("got", "expected")) -> None:
    """Equal to the last bit: tensors, numbers, and dicts, lists, tuples and dataclasses of them.

    Types, keys, shapes and dtypes must agree as well. NaN equals NaN, and 0.0 equals -0.0.
    """
    __tracebackhide__ = True
    problem = "\n".join(_differences(got, expected, "", names, TOLERANCES["exact"]))
    assert not problem, f"{names[0]} and {names[1]} are not bit-equal\n{problem}"


def assert_close(got: Any, expected: Any, tolerance: Tolerance, names: tuple[str, str] = ("got", "expected")) -> None:
    """As `assert_bit_equal`, but |got - expected| <= atol + rtol |expected| for floating-point tensors and numbers."""
    __tracebackhide__ = True
    problem = "\n".join(_differences(got, expected, "", names, tolerance))
    assert not problem, (
        f"{names[0]} and {names[1]} differ by more than rtol {tolerance.rtol:g}, atol {tolerance.atol:g} "
        f"({tolerance.reason})\n{problem}"
    )


def assert_same_on_all_ranks(by_rank: Sequence[Any]) -> None:
    """Every rank's state (a state_dict, a list, ...) is bit-equal to rank 0's."""
    __tracebackhide__ = True
    for r, state in enumerate(by_rank[1:], start=1):
        assert_bit_equal(state, by_rank[0], names=(f"rank {r}", "rank 0"))


def _differences(got: Any, expected: Any, path: str, names: tuple[str, str], tolerance: Tolerance) -> Iterator[str]:
    """One line for each leaf that differs."""
    where = path or "the value"
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        difference = _tensor_difference(got.detach().cpu(), expected.detach().cpu(), names, tolerance)
        if difference:
            yield f"{where}: {difference}"
    elif isinstance(got, Mapping) and isinstance(expected, Mapping):
        if got.keys() != expected.keys():
            only = [sorted(map(str, a.keys() - b.keys())) for a, b in ((got, expected), (expected, got))]
            yield f"{where}: other keys; only {names[0]}: {only[0]}, only {names[1]}: {only[1]}"
            return
        for key in got:
            yield from _differences(got[key], expected[key], f"{path}[{key!r}]", names, tolerance)
    elif type(got) is not type(expected):
        yield f"{where}: {names[0]} is a {type(got).__name__}, {names[1]} a {type(expected).__name__}"
    elif isinstance(got, list | tuple):
        if len(got) != len(expected):
            yield f"{where}: {names[0]} has length {len(got)}, {names[1]} {len(expected)}"
            return
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            yield from _differences(a, b, f"{path}[{index}]", names, tolerance)
    elif is_dataclass(got):
        for each in fields(got):
            pair = getattr(got, each.name), getattr(expected, each.name)
            yield from _differences(*pair, f"{path}.{each.name}", names, tolerance)
    elif isinstance(got, float):
        difference = _tensor_difference(
            torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), names, tolerance
        )
        if difference:
            yield f"{where}: {difference}"
    elif got != expected:
        yield f"{where}: {names[0]} is {got!r}, {names[1]} {expected!r}"


def _tensor_difference(got: Tensor, expected: Tensor, names: tuple[str, str], tolerance: Tolerance) -> str | None:
    if got.shape != expected.shape:
        return f"{names[0]} has shape {tuple(got.shape)}, {names[1]} {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"{names[0]} has dtype {got.dtype}, {names[1]} {expected.dtype}"
    wrong = got != expected
    if got.is_floating_point():
        wrong &= ~(got.isnan() & expected.isnan())
        if tolerance.rtol or tolerance.atol:
            distance = (got.double() - expected.double()).abs()
            wrong &= ~(distance <= tolerance.atol + tolerance.rtol * expected.double().abs())
    if not wrong.any():
        return None
    wide = torch.complex128 if got.is_complex() else torch.float64
    distance = (got.to(wide) - expected.to(wide)).abs()[wrong]
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {got.numel()} elements differ, max abs diff {distance.max().item():.9g}; "
        f"first at {first}: {names[0]} {got[first].item()!r}, {names[1]} {expected[first].item()!r}"
    )
