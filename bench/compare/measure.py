"""What one rank does: build every method, let them take turns, compare their weights.

The same for a replay and for real training: a `Workload` says how to make a model and how to run it forward and back.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import dear
from bench.launch import World
from bench.methods import NONE, Method, Setting, Trainee, try_build
from bench.replay import time_all_reduce
from dear import DistributedOptimizer
from dear.sweep import measure_links
from dearcore.profile import Link, Profile

__all__ = [
    "Measurement",
    "RankResult",
    "Timing",
    "Workload",
    "heap_bytes",
    "measure_methods",
    "with_progress",
]

MB = 1_000_000
INTERFACE = "eth0"
WARMUP_ITERATIONS = 2  # before the first that counts: DDP and dear settle their buckets in them
MAX_TUNING_ITERATIONS = 200  # that fusion="auto" may take in their place


class Workload(Protocol):
    """What is trained. Factors of gradients, in turn: warm-up has to leave the weights as they were."""

    exact: bool  # weights of all methods have to be equal bit for bit
    warmup_scales: Sequence[float]
    scales: Sequence[float]

    def make(self) -> tuple[nn.Module, Sequence[nn.Module]]:
        """A model with the same weights each time, and its layers in forward order."""

    def forward(self, trainee: Trainee) -> torch.Tensor: ...

    def backward(self, result: torch.Tensor, scale: float) -> None: ...

    def settle_memory(self, in_own_memory: bool) -> None:
        """True: gradients as autograd makes them, so that memory can be counted; False: as cheap as possible."""

    def spans(self, on: bool) -> list[tuple[str, float, float]]:
        """Begins (ends) to note when layers computed: name, start, end."""

    def profile(self, trainee: Trainee, links: Sequence[Link]) -> Profile:
        """How long layers take without communication."""


@dataclass(frozen=True, slots=True)
class Timing:
    blocks: int
    iterations: int  # a block
    rate_mb: float


@dataclass(slots=True)
class Measurement:
    """Of one method in one rank, an entry for each iteration. forward_s and backward_s are the host's."""

    iteration_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)  # an iteration, by block; empty where nobody counts
    live_bytes: int = 0
    num_buckets: int | None = None
    note: str = ""
    params_equal: bool | None = None
    max_difference: float | None = None  # to the first method's weights, relative to their largest
    absent: str = ""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)  # lane, name, start and end in s


@dataclass(slots=True)
class RankResult:
    measurements: list[Measurement]
    all_reduce_s: list[float]  # gloo's, of Timing.rate_mb
    profile: Profile


def measure_methods(world: World, *args: Any) -> RankResult:
    """`measure_inside` in a process that has no ranks to talk to yet."""
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="auto", timeout=world.timeout)
    try:
        return measure_inside(*args)
    finally:
        dear.shutdown()
        dist.destroy_process_group()


def measure_inside(
    methods: Sequence[Method],
    timing: Timing,
    make_workload: Callable[[], Workload],
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    size_scale: float,
) -> RankResult:
    """`methods` begin with `none`, whose times the planners of the others use.

    Collective; torch.distributed and dear are initialised.
    """
    assert methods[0] == Method(NONE)
    all_reduce_s = time_all_reduce(timing.rate_mb)
    workload = make_workload()
    links = _measured_links(workload.make()[0])
    measurements = [Measurement() for _ in methods]
    trainees: list[tuple[Trainee, Measurement]] = []
    setting = Setting(*optimizer, size_scale=size_scale)
    for method, measurement in zip(methods, measurements, strict=True):
        trainee = _begin(method, workload, setting, measurement)
        if trainee is None:
            continue
        trainees.append((trainee, measurement))
        if method.kind == NONE:
            profile = _agreed(workload.profile(trainee, links))
            setting = Setting(*optimizer, profile=profile, size_scale=size_scale)
    _take_turns(trainees, workload, timing)
    _compare_weights(trainees, workload)
    for trainee, measurement in trainees:
        measurement.num_buckets = trainee.num_buckets
        trainee.close()
    gc.unfreeze()
    return RankResult(measurements, all_reduce_s, profile)


def _begin(method: Method, workload: Workload, setting: Setting, measurement: Measurement) -> Trainee | None:
    """Builds and warms up one method, and counts the memory that this takes."""
    gc.collect()
    gc.freeze()  # collections are for what comes from here on
    before = heap_bytes()
    workload.settle_memory(in_own_memory=True)
    model, layers = workload.make()
    built = try_build(method, model, layers, setting)
    if isinstance(built, str):
        measurement.absent = built
        return None
    _warm_up(built, workload)
    built.settle()
    built.iteration = 0
    gc.collect()
    measurement.live_bytes = heap_bytes() - before
    workload.settle_memory(in_own_memory=False)
    if isinstance(built.optimizer, DistributedOptimizer):
        measurement.note = f"{built.optimizer.schedule.name}, {built.optimizer.plan.fusion}"
    return built


def _warm_up(trainee: Trainee, workload: Workload) -> None:
    num_done, cycle = 0, len(workload.warmup_scales)
    while (
        num_done < WARMUP_ITERATIONS or num_done % cycle or (_is_tuning(trainee) and num_done < MAX_TUNING_ITERATIONS)
    ):
        _train(trainee, workload, workload.warmup_scales[num_done % cycle])
        num_done += 1


def _is_tuning(trainee: Trainee) -> bool:
    optimizer = trainee.optimizer
    return (
        trainee.method.variant == "auto"
        and isinstance(optimizer, DistributedOptimizer)
        and optimizer.stats().tuning is None
    )


def _train(trainee: Trainee, workload: Workload, scale: float) -> None:
    trainee.optimizer.zero_grad()
    workload.backward(workload.forward(trainee), scale)
    trainee.optimizer.step()


def _take_turns(trainees: Sequence[tuple[Trainee, Measurement]], workload: Workload, timing: Timing) -> None:
    gc.collect()
    gc.disable()  # a collection would hit whichever method is running
    order = [(block + i) % len(trainees) for block in range(timing.blocks) for i in range(len(trainees))]
    for number, index in with_progress(list(enumerate(order)), "measuring", dist.get_rank() == 0):
        trainee, measurement = trainees[index]
        is_last = number >= (timing.blocks - 1) * len(trainees)
        _iterate(trainee, workload, timing.iterations, measurement, traced=is_last)
    gc.enable()


def _iterate(
    trainee: Trainee, workload: Workload, num_iterations: int, into: Measurement, traced: bool = False
) -> None:
    """One iteration and then `num_iterations` that count, each from the start of its forward to that of the next."""
    dist.barrier()
    sent = _sent_bytes()
    last_s = 0.0
    trace = trainee.optimizer.trace if isinstance(trainee.optimizer, DistributedOptimizer) else None
    for i in range(num_iterations + 2):
        start_s = time.perf_counter()
        if i > 1:
            into.iteration_s.append(start_s - last_s)
        if i == num_iterations + 1:
            break
        if traced and i == num_iterations:  # the last one, and what it leaves to the next
            workload.spans(True)
            traced_s = start_s
            if trace is not None:
                trace.enabled = True
        last_s = start_s
        trainee.optimizer.zero_grad()
        result = workload.forward(trainee)
        forward_s = time.perf_counter()
        workload.backward(result, workload.scales[trainee.iteration % len(workload.scales)])
        backward_s = time.perf_counter()
        trainee.optimizer.step()
        trainee.iteration += 1
        if i:
            into.forward_s.append(forward_s - start_s)
            into.backward_s.append(backward_s - forward_s)
    trainee.settle()
    dist.barrier()
    if sent is not None:
        into.sent_bytes.append(((_sent_bytes() or 0) - sent) / (num_iterations + 1))
    if traced:
        spans = [("compute", *span) for span in workload.spans(False)]
        if trace is not None:
            trace.enabled = False
            spans += [(span.lane, span.name, span.start_s, span.end_s) for span in trace.take()]
        into.spans = [(lane, name, start - traced_s, end - traced_s) for lane, name, start, end in spans]


def _compare_weights(trainees: Sequence[tuple[Trainee, Measurement]], workload: Workload) -> None:
    """With the first method that trains right; and on every rank with the first rank."""
    reference: torch.Tensor | None = None
    for trainee, measurement in trainees:
        if not trainee.method.is_right:
            continue
        whole = torch.cat([p.reshape(-1) for p in trainee.whole_params()]).cpu()
        first = whole.clone()
        dist.broadcast(first, 0)
        if reference is None:
            reference = whole
        difference = float((whole - reference).abs().max() / reference.abs().max().clamp_min(1e-30))
        same = torch.equal(whole, first) and (not workload.exact or torch.equal(whole, reference))
        worst = torch.tensor([0.0 if same else 1.0, difference], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        measurement.max_difference = float(worst[1])
        measurement.params_equal = not worst[0] and (workload.exact or measurement.max_difference < 1e-4)


# ------------------------------------------------------------------------------------------------------------- network


def _measured_links(model: nn.Module) -> list[Link]:
    """Of dear's own reduce-scatter, all-gather and all-reduce, as dear measures them for `fusion="merge"`."""
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    engine = optimizer._engine
    links = measure_links(engine.communicator, engine.streams, torch.float32, torch.float32, num_bytes)
    optimizer.close()
    return [links.reduce_scatter, links.all_gather, links.all_reduce]


def _agreed(mine: Any) -> Any:
    """The first rank's."""
    boxed = [mine]
    dist.broadcast_object_list(boxed, 0)
    return boxed[0]


def _sent_bytes() -> int | None:
    """What has left through the interface of this emulated host; None on loopback, where ranks share one."""
    table = Path("/proc/thread-self/net/dev")
    if table.exists():
        for line in table.read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE and os.environ.get("GLOO_SOCKET_IFNAME") == INTERFACE:
                return int(counters.split()[8])
    return None


# -------------------------------------------------------------------------------------------------------------- memory


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def heap_bytes() -> int:
    """Bytes of this process that the C library has given out and not taken back: tensors of every thread, above all.

    Python's small objects are not among them. On CUDA: what torch's allocator has given out on the device.
    """
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # musl, or glibc before 2.33
        return 0
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def with_progress(items: Sequence[Any], what: str, shown: bool = True) -> Iterable[Any]:
    """A progress bar where somebody watches."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return items
    return tqdm(items, desc=what, disable=None if shown else True, leave=False)  # type: ignore[no-any-return,unused-ignore]
