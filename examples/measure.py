"""Where the time of an iteration goes: the same iterations with and without communication, side by side."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn, optim
from torch.nn import functional as F

import dear
from dear.context import moving_nothing

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]

NUM_WARMUP = 5
NUM_ROUNDS = 6  # rounds alternate, so that a busy moment of the machine hits both sides
NUM_PER_ROUND = 12
NUM_DRAWN = 3  # iterations in the timeline


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the iterations, means over the ranks. `print` shows a table."""

    iteration_ms: float
    compute_ms: float  # the same iterations with a communicator that moves nothing
    num_iterations: int
    stats: dear.Stats  # of this rank
    plan: dear.Plan
    files: Sequence[Path]

    @property
    def exposed_ms(self) -> float:
        return self.iteration_ms - self.compute_ms

    def __str__(self) -> str:
        ranks = f"{dear.size()} rank" + "s" * (dear.size() > 1)
        table = Table(title=f"{ranks}, median of {self.num_iterations} iterations", title_justify="left")
        table.add_column("what")
        table.add_column("value", justify="right")
        table.add_row("iteration", f"{self.iteration_ms:.2f} ms")
        table.add_row("compute", f"{self.compute_ms:.2f} ms")
        table.add_row("exposed communication", f"{self.exposed_ms:.2f} ms")
        table.add_row("sent per rank and step", f"{self.stats.mb_sent_per_step:.2f} MB")
        table.add_row("buckets", str(len(self.plan.buckets)))
        waits = Table(title="longest waits of rank 0", title_justify="left")
        for column in ("bucket", "mean ms", "longest ms"):
            waits.add_column(column, justify="right")
        waits.add_column("touched first by module")
        waits.add_column("parameters")
        for wait in self.stats.waits[:4]:
            names = self.plan.buckets[wait.bucket].first_names()
            waits.add_row(str(wait.bucket), f"{wait.mean_ms:.2f}", f"{wait.longest_ms:.2f}", wait.module, names)
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table, waits, sep="\n")
        files = f"wrote {' and '.join(map(str, self.files))}; open the first at ui.perfetto.dev" if self.files else ""
        return f"{captured.get()}{files}"


def measure(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], optim.Optimizer],
    fusion: float,
    batches: Batches,
    folder: Path,
) -> Measurement:
    """Trains two copies of `model` in turns, one of them without communication; `model` stays as it is.

    Rank 0 writes timeline.json and timeline.png into `folder`. Collective.
    """
    real = _Trainer(model, make_optimizer, fusion, batches)
    with moving_nothing():
        alone = _Trainer(model, make_optimizer, fusion, batches)
    for trainer in (real, alone):
        trainer.iterate(NUM_WARMUP)
    real_s: list[float] = []
    alone_s: list[float] = []
    for _ in range(NUM_ROUNDS):
        for trainer, times_s in ((real, real_s), (alone, alone_s)):
            dear.barrier()
            times_s += trainer.iterate(NUM_PER_ROUND)
    medians = torch.tensor([statistics.median(real_s), statistics.median(alone_s)], dtype=torch.float64)
    iteration_s, compute_s = dear.allreduce(medians).tolist()
    stats = real.optimizer.stats()
    dear.barrier()
    with real.timeline:
        real.iterate(NUM_DRAWN)
    files = _write(real.timeline, folder) if dear.rank() == 0 else []
    plan = real.optimizer.plan
    for trainer in (alone, real):
        trainer.optimizer.close()
    return Measurement(1e3 * iteration_s, 1e3 * compute_s, len(real_s), stats, plan, files)


class _Trainer:
    """A copy of the model with an optimizer and a timeline of its own."""

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], optim.Optimizer], fusion: float, batches: Batches
    ) -> None:
        self._model, self._batches = copy.deepcopy(model), batches
        self.optimizer = dear.DistributedOptimizer(make_optimizer(self._model), self._model, fusion=fusion)
        self.timeline = dear.Timeline(self.optimizer)

    def iterate(self, count: int) -> list[float]:
        """Seconds of each of `count` iterations."""
        times_s: list[float] = []
        for number in range(count):
            images, labels = self._batches[number % len(self._batches)]
            start_s = time.perf_counter()
            self.optimizer.zero_grad()
            with self.timeline.span("forward"):
                loss = F.cross_entropy(self._model(images), labels)
            with self.timeline.span("backward"):
                loss.backward()
            self.optimizer.step()
            times_s.append(time.perf_counter() - start_s)
        return times_s


def _write(timeline: dear.Timeline, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "timeline.json", folder / "timeline.png"]
    timeline.save(files[0])
    timeline.plot(files[1])
    return files
