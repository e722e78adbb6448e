"""One user's training loop (a *script*), run in three ways: plain PyTorch, DistributedDataParallel, and dear.

    def script(trainer):                        # module level: ranks import it by name
        for k in range(trainer.num_batches):
            trainer.zero_grad()
            trainer.backward(k)
            trainer.step()

    sgd = optimizer_of(torch.optim.SGD, lr=0.1)
    cases = {f"fusion {fusion}": Case(OddMLP(), sgd, script, {"fusion": fusion}) for fusion in (None, 25.0)}
    check_parity(pool, cases, size=2)

A script sees the same `Trainer` methods in each; what it `note`s (norms, learning rates) is compared as well. Many
cases share one run of the pool, which costs more than most cases do, and cases that differ in nothing but dear's
options share their reference.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

import dear
from dear.context import current, over_the_network
from tests.support.ranks import Outcome, RankError, RankPool, rank
from tests.support.reference import (
    TOLERANCES,
    Batches,
    IntegerModel,
    LossFn,
    MakeOptimizer,
    assert_bit_equal,
    assert_close,
    assert_same_on_all_ranks,
    integer_batches,
    make_batches,
    mean_in_rank_order,
    mse_loss,
    weighted_sum_loss,
)
from tests.support.worker import dumps, loads

NUM_STEPS = 20
# The full cross products only where there is time: `make soak`.
breadth = pytest.mark.parametrize(
    "full", [pytest.param(False, id="thin"), pytest.param(True, id="full", marks=pytest.mark.soak)]
)


class Trainer(Protocol):
    model: nn.Module
    optimizer: torch.optim.Optimizer  # the one that the script would hold: wrapped, under dear
    original: torch.optim.Optimizer  # torch's own
    num_batches: int

    prepared: Any  # what `Case.prepare` returned

    def backward(
        self, index: int, scale: Callable[[Tensor], Tensor] | None = None, not_on: Collection[int] = ()
    ) -> None:
        """Forward and backward on this rank's batch `index`, of `scale(loss)` where given; nothing on some ranks."""

    def step(self) -> None: ...

    def unscale(self, scaler: torch.amp.GradScaler) -> None: ...

    def step_scaled(self, scaler: torch.amp.GradScaler) -> None: ...

    def zero_grad(self, set_to_none: bool = True, of_model: bool = False) -> None:
        """The optimizer's, or the model's."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clips and notes the norm."""

    def clip_value(self, value: float) -> None: ...

    def note_grads(self) -> None:
        """Notes every parameter's averaged gradient, zeros where there is none."""

    def note(self, value: Any) -> None: ...


Script = Callable[[Trainer], None]


def plain_steps(trainer: Trainer) -> None:
    """The loop of every tutorial, one batch a step."""
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.step()


@dataclass(frozen=True, slots=True)
class Case:
    """`options` are DistributedOptimizer's. `prepare(model, optimizer)` runs before wrapping.

    `optimizer_state` is loaded before the script starts, by the wrapper, or by torch's optimizer before wrapping.
    """

    model: nn.Module
    make_optimizer: MakeOptimizer
    script: Script = plain_steps
    options: dict[str, Any] = field(default_factory=dict)
    num_steps: int = NUM_STEPS
    batches: Batches | None = None
    loss_fn: LossFn = mse_loss
    prepare: Callable[[nn.Module, torch.optim.Optimizer], Any] | None = None
    optimizer_state: dict[str, Any] | None = None
    load_before_wrapping: bool = False
    deterministic: bool = False
    tolerance: str = "exact"  # a key of TOLERANCES
    model_of: Callable[[int], nn.Module] | None = None  # rank -> what this rank wraps, where it is not `model`

    def resolved(self, size: int) -> Case:
        """With batches for `size` ranks, and the loss that belongs to the model."""
        integer = isinstance(self.model, IntegerModel)
        batches = self.batches
        if batches is None:
            make = integer_batches if integer else make_batches
            batches = make(self.model, size, self.num_steps)
        return replace(self, batches=batches, loss_fn=weighted_sum_loss if integer else self.loss_fn)

    @property
    def reference_key(self) -> tuple[Any, ...]:
        """Equal for cases of one run that plain PyTorch trains alike."""
        parts = (self.model, self.make_optimizer, self.script, self.batches, self.prepare, self.optimizer_state)
        buffers = self.options.get("broadcast_buffers", False)
        return (*map(id, parts), self.num_steps, self.loss_fn, buffers)


@dataclass(frozen=True, slots=True)
class Result:
    """What a script came to on one rank; tensors are copies. Losses and buffers differ from rank to rank."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[Tensor]
    notes: list[Any]
    optimizer_state: dict[str, Any]


# ---------------------------------------------------------------------------------------------------- comparing


def check_parity(
    pool: RankPool,
    cases: Mapping[str, Case],
    size: int = 2,
    ddp: bool = False,
    run_dear: Callable[[Case], Result] | None = None,
) -> dict[str, list[Result]]:
    """Runs every case under dear on `size` ranks; every rank must come to what plain PyTorch (or DDP) comes to.

    Parameters are bit-identical on all ranks, whatever the tolerance. Returns dear's results by case and rank. Raises
    one AssertionError that names every case that went wrong.
    """
    __tracebackhide__ = True
    trained = train(pool, cases, size, ddp, run_dear)
    problems = []
    for name, each in trained.items():
        try:
            check_ranks(each, cases[name], size)
        except AssertionError as error:
            problems.append(f"case '{name}' on {size} ranks: {error}")
    assert not problems, f"{len(problems)} of {len(cases)} cases differ\n" + "\n".join(problems)
    return {name: each.got for name, each in trained.items()}


@dataclass(frozen=True, slots=True)
class Trained:
    """One case: what dear's ranks came to, and what they should have come to."""

    got: list[Result]
    expected: list[Result]


def train(
    pool: RankPool,
    cases: Mapping[str, Case],
    size: int = 2,
    ddp: bool = False,
    run_dear: Callable[[Case], Result] | None = None,
) -> dict[str, Trained]:
    """Runs every case both ways and compares nothing. The message of what ranks raise names the case."""
    __tracebackhide__ = True
    assert cases, "no cases"
    trained: dict[str, Trained] = {}
    for deterministic in (False, True):
        chosen = {name: case for name, case in cases.items() if case.deterministic == deterministic}
        if not chosen:
            continue
        by_rank = run_all(pool, chosen, size, deterministic, ddp, run_dear or run_under_dear)
        references: dict[tuple[Any, ...], list[Result]] = {}
        resolve = _Resolver(size)
        for name, case in chosen.items():
            if ddp:
                expected = [ranks[name][1] for ranks in by_rank]
            else:
                case = resolve(case)
                if case.reference_key not in references:
                    references[case.reference_key] = run_plainly(case)
                expected = references[case.reference_key]
            trained[name] = Trained([ranks[name][0] for ranks in by_rank], expected)
    return {name: trained[name] for name in cases}


def run_all(
    pool: RankPool,
    cases: Mapping[str, Case],
    size: int,
    deterministic: bool = False,
    ddp: bool = False,
    run_dear: Callable[[Case], Any] | None = None,
    torch_groups: bool = False,
) -> list[dict[str, tuple[Any, Any]]]:
    """By rank and case, what dear came to and (with `ddp`) what DistributedDataParallel came to.

    A case that raises is left out of a second run, so that one bug does not hide another.
    """
    __tracebackhide__ = True
    left, problems = dict(cases), []
    while True:
        payload = dumps((left, run_dear or run_under_dear))
        timeout_s = 30.0 + 2 * len(left)
        try:
            by_rank = pool.run(
                _run_cases,
                payload,
                ddp,
                size=size,
                ddp=ddp or torch_groups,
                deterministic=deterministic,
                group_timeout_s=15,
                timeout_s=timeout_s,
            )
        except RankError as error:
            said = [outcome.message for outcome in error.outcomes if isinstance(outcome, Outcome)]
            found = re.match("case '(.*)' on", said[0]) if said else None
            if found is None or found[1] not in left or len(problems) == 4:
                raise
            problems.append(str(error))
            del left[found[1]]
            if left:
                continue
            by_rank = []
        assert not problems, "\n".join(problems)
        return [pickle.loads(packed) for packed in by_rank]


def _run_cases(payload: bytes, ddp: bool) -> bytes:
    cases, run_dear = loads(payload)
    results: dict[str, tuple[Any, Any]] = {}
    references: dict[tuple[Any, ...], Result] = {}
    resolve = _Resolver(size=int(dear.size()))
    for name, case in cases.items():
        print(f"case '{name}'")  # a run that hangs shows what its ranks printed
        try:
            case = resolve(case)
            with transport():
                got = run_dear(case)
            if ddp and case.reference_key not in references:
                references[case.reference_key] = run_under_ddp(case)
        except Exception as error:
            raise RuntimeError(
                f"case '{name}' on rank {dear.rank()} of {dear.size()}: {type(error).__name__}: {error}"
            ) from error
        results[name] = got, references.get(case.reference_key)
    return _pack(results)


def transport() -> AbstractContextManager[None]:
    """Three ranks, and all in deterministic mode, talk as ranks of several hosts do; the others through memory."""
    network = dear.size() == 3 or current().world.deterministic
    return over_the_network() if network else nullcontext()


class _Resolver:
    """Cases of the same model and length get the same batches, made once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: dict[tuple[int, int], Case] = {}

    def __call__(self, case: Case) -> Case:
        if case.batches is not None:
            return case.resolved(self._size)
        key = (id(case.model), case.num_steps)
        if key not in self._made:
            self._made[key] = case.resolved(self._size)
        return replace(case, batches=self._made[key].batches, loss_fn=self._made[key].loss_fn)


class _TensorPickler(pickle.Pickler):
    """Small tensors by value, 20 times as fast as torch.save."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            tensor = obj.detach().contiguous()
            return _unpack_tensor, (bytes(tensor.view(-1).view(torch.uint8).numpy()), tensor.dtype, tensor.shape)
        return NotImplemented


def _unpack_tensor(content: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _pack(obj: Any) -> bytes:
    stream = io.BytesIO()
    _TensorPickler(stream, pickle.HIGHEST_PROTOCOL).dump(obj)
    return stream.getvalue()


def check_ranks(trained: Trained, case: Case, size: int) -> None:
    """All ranks alike, and each one as its reference."""
    __tracebackhide__ = True
    assert len(trained.got) == len(trained.expected) == size
    assert_same_on_all_ranks([(r.parameters, r.notes, r.optimizer_state) for r in trained.got])
    for r in range(size):
        compare(trained.got[r], trained.expected[r], case, f"rank {r} of {size}")


def compare(got: Result, expected: Result, case: Case, name: str) -> None:
    __tracebackhide__ = True
    names = (name, "plain PyTorch")
    if case.tolerance == "exact":
        assert_bit_equal(got, expected, names)
    else:
        assert_close(got, expected, TOLERANCES[case.tolerance], names)


# ---------------------------------------------------------------------------------------------------- the three ways


def run_plainly(case: Case) -> list[Result]:
    """In this process, one result a rank. The case has its batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = PlainTrainer(case)
        case.script(trainer)
        return trainer.results()
    finally:
        torch.set_num_threads(threads)


def run_under_ddp(case: Case) -> Result:
    trainer = DdpTrainer(case)
    case.script(trainer)
    return trainer.result()


def run_under_dear(case: Case) -> Result:
    trainer = DearTrainer(case)
    case.script(trainer)
    result = trainer.result()
    trainer.optimizer.close()
    return result


class _OneRank:
    """What a rank under DDP and one under dear have in common."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case) -> None:
        assert case.batches is not None
        self.model = copy.deepcopy(case.model) if case.model_of is None else case.model_of(rank())
        self.original = case.make_optimizer(self.model)
        self.prepared = case.prepare(self.model, self.original) if case.prepare is not None else None
        self.batches = case.batches[rank() % len(case.batches)]
        self.num_batches = len(self.batches)
        self.loss_fn = case.loss_fn
        self.losses: list[Tensor] = []
        self.notes: list[Any] = []
        self.forward: nn.Module = self.model

    def backward(
        self, index: int, scale: Callable[[Tensor], Tensor] | None = None, not_on: Collection[int] = ()
    ) -> None:
        if rank() in not_on:
            return
        loss = self.loss_fn(self.forward, self.batches[index])
        (loss if scale is None else scale(loss)).backward()
        self.losses.append(loss.detach().clone())

    def step(self) -> None:
        self.optimizer.step()

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)

    def step_scaled(self, scaler: torch.amp.GradScaler) -> None:
        scaler.step(self.optimizer)

    def zero_grad(self, set_to_none: bool = True, of_model: bool = False) -> None:
        (self.model if of_model else self.optimizer).zero_grad(set_to_none)

    def note(self, value: Any) -> None:
        self.notes.append(copy.deepcopy(value))

    def _result(self, optimizer: torch.optim.Optimizer) -> Result:
        return _result(self.model, optimizer, self.losses, self.notes)


class DearTrainer(_OneRank):
    optimizer: dear.DistributedOptimizer

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        state = copy.deepcopy(case.optimizer_state)
        if state is not None and case.load_before_wrapping:
            self.original.load_state_dict(state)
        self.optimizer = dear.DistributedOptimizer(self.original, self.model, **case.options)
        if state is not None and not case.load_before_wrapping:
            self.optimizer.load_state_dict(state)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.note(self.optimizer.clip_grad_norm_(max_norm, norm_type))

    def clip_value(self, value: float) -> None:
        self.optimizer.clip_grad_value_(value)

    def note_grads(self) -> None:
        self.note([self.optimizer.full_grad(p) for p in self.model.parameters() if p.requires_grad])

    def result(self) -> Result:
        return self._result(self.optimizer)


class DdpTrainer(_OneRank):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer = self.original
        with warnings.catch_warnings():  # newer versions of torch have another name for it
            warnings.simplefilter("ignore", FutureWarning)
            self.ddp = nn.parallel.DistributedDataParallel(
                self.model, broadcast_buffers=case.options.get("broadcast_buffers", False)
            )
        self.forward = self.ddp

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.ddp.no_sync()
        return context

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type))

    def clip_value(self, value: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), value)

    def note_grads(self) -> None:
        self.note([_grad_or_zeros(p) for p in self.model.parameters() if p.requires_grad])

    def result(self) -> Result:
        return self._result(self.original)


class PlainTrainer:
    """All ranks in one process: a replica each, gradients that stay where autograd left them, one optimizer.

    The averaged gradients exist between `backward` and the next one, in the first replica, as clipping would see them.
    Buffers stay local.
    """

    def __init__(self, case: Case) -> None:
        assert case.batches is not None
        self.batches = case.batches
        self.num_batches = len(case.batches[0])
        self.loss_fn = case.loss_fn
        self.replicas = [copy.deepcopy(case.model) for _ in case.batches]
        self.model = self.replicas[0]
        self.optimizer = self.original = case.make_optimizer(self.model)
        self.prepared = case.prepare(self.model, self.original) if case.prepare is not None else None
        if case.optimizer_state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(case.optimizer_state))
        self.losses: list[list[Tensor]] = [[] for _ in case.batches]
        self.notes: list[Any] = []
        self._local: list[Tensor | None] | None = None  # the first replica's own gradients while it holds the averages

    def backward(
        self, index: int, scale: Callable[[Tensor], Tensor] | None = None, not_on: Collection[int] = ()
    ) -> None:
        self._restore()
        for r, (replica, batches, losses) in enumerate(zip(self.replicas, self.batches, self.losses, strict=True)):
            if r in not_on:
                continue
            loss = self.loss_fn(replica, batches[index])
            (loss if scale is None else scale(loss)).backward()
            losses.append(loss.detach().clone())

    def step(self) -> None:
        self._average()
        self.optimizer.step()
        self._copy_to_replicas()

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        self._average()
        scaler.unscale_(self.optimizer)

    def step_scaled(self, scaler: torch.amp.GradScaler) -> None:
        self._average()
        scaler.step(self.optimizer)
        self._copy_to_replicas()

    def zero_grad(self, set_to_none: bool = True, of_model: bool = False) -> None:
        self._restore()
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> None:
        self._average()
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type))

    def clip_value(self, value: float) -> None:
        self._average()
        nn.utils.clip_grad_value_(self.model.parameters(), value)

    def note_grads(self) -> None:
        self._average()
        self.note([_grad_or_zeros(p) for p in self.model.parameters() if p.requires_grad])

    def note(self, value: Any) -> None:
        self.notes.append(copy.deepcopy(value))

    def results(self) -> list[Result]:
        pairs = zip(self.replicas, self.losses, strict=True)
        return [_result(replica, self.optimizer, losses, self.notes) for replica, losses in pairs]

    def _copy_to_replicas(self) -> None:
        with torch.no_grad():
            for first, *others in zip(*(replica.parameters() for replica in self.replicas), strict=True):
                for other in others:
                    other.copy_(first)

    def _average(self) -> None:
        if self._local is None:
            self._local = [p.grad for p in self.model.parameters()]
            for same in zip(*(replica.parameters() for replica in self.replicas), strict=True):
                same[0].grad = mean_in_rank_order([p.grad for p in same])

    def _restore(self) -> None:
        if self._local is not None:
            for param, grad in zip(self.model.parameters(), self._local, strict=True):
                param.grad = grad
            self._local = None


def _grad_or_zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.clone()


def _result(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor], notes: list[Any]) -> Result:
    return Result(
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: b.detach().clone() for name, b in model.named_buffers()},
        losses,
        notes,
        copy.deepcopy(optimizer.state_dict()),
    )


__all__ = [
    "NUM_STEPS",
    "Case",
    "DearTrainer",
    "Result",
    "Trained",
    "Trainer",
    "breadth",
    "check_parity",
    "check_ranks",
    "compare",
    "plain_steps",
    "run_all",
    "run_plainly",
    "run_under_dear",
    "train",
]
