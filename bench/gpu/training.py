"""The DeAR schedule on GPUs: its cost on one, what it hides on several, and how often the host waits."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import dear

from ..launch import World, run_ranks
from ..methods import build, parse_methods
from .overlap import hidden

__all__ = ["count_syncs", "measure_one", "measure_several", "new_model", "trace"]

WIDTH, DEPTH, BATCH = 2048, 12, 512
METHODS = "ddp,ddp:5,fsdp2,dear-none,dear,dear:5"


def new_model(device: torch.device, width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers).to(device)


def iterate(forward: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    with record_function("forward"):
        loss = forward(x).square().mean()
    with record_function("backward"):
        loss.backward()
    optimizer.step()


def iteration_ms(step: Callable[[], None], num_iterations: int = 20) -> float:
    """Of a steady run, from event to event: what the host does counts where the GPU waits for it."""
    for _ in range(5):
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_iterations):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / num_iterations


def count_syncs(step: Callable[[], None], num_iterations: int = 5) -> float:
    """Synchronising calls of an iteration, on any thread, as torch's debug mode counts them."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(num_iterations):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught) / num_iterations


def trace(step: Callable[[], None], num_iterations: int = 3) -> list[dict[str, Any]]:
    """Events of a steady run, with the ranges of our own threads."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        for _ in range(num_iterations):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def measure_one(device: torch.device) -> dict[str, Any]:
    """World size 1 over NCCL (gloo's stand-in where NCCL is not usable) against the plain fused optimizer."""
    x = torch.randn(BATCH, WIDTH, device=device)
    plain = new_model(device)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    plain_ms = iteration_ms(lambda: iterate(plain, fused, x))
    try:
        dear.init(backend="nccl")
        backend = "nccl"
    except dear.ArgumentError as error:
        print(f"world size 1 without NCCL: {error}")
        dear.init(backend="auto")
        backend = "local"
    model = new_model(device)
    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)

    def step() -> None:
        iterate(model, optimizer, x)

    ours_ms = iteration_ms(step)
    num_syncs = count_syncs(step)
    events = trace(step)
    rs, ag = hidden(events, "reduce_scatter", "backward"), hidden(events, "all_gather", "forward")
    optimizer.close()
    dear.shutdown()
    return {
        "backend": backend,
        "plain_ms": round(plain_ms, 3),
        "dear_ms": round(ours_ms, 3),
        "num_syncs": num_syncs,
        "reduce_scatters": rs.num_collectives,
        "reduce_scatter_hidden_fraction": round(rs.fraction, 3),
        "all_gathers": ag.num_collectives,
        "all_gather_hidden_fraction": round(ag.fraction, 3),
    }


def measure_several(num_gpus: int, timeout_s: float) -> list[dict[str, Any]]:
    """DDP, FSDP2 and ours on all GPUs of this host; exposed time is against the model alone."""
    by_rank = run_ranks(_rank, num_gpus, timeout_s=timeout_s)
    rows: list[dict[str, Any]] = by_rank[0]
    for index, row in enumerate(rows):
        row["iteration_ms"] = round(max(rank[index]["iteration_ms"] for rank in by_rank), 3)
    alone_ms = rows[0]["iteration_ms"]
    for row in rows:
        row["exposed_ms"] = round(row["iteration_ms"] - alone_ms, 3)
    return rows


def _rank(world: World) -> list[dict[str, Any]]:
    device = torch.device("cuda", world.rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    dear.init(backend="nccl", timeout=world.timeout)
    torch.manual_seed(world.rank)
    x = torch.randn(BATCH, WIDTH, device=device)
    rows: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    for method in parse_methods(METHODS):
        model = new_model(device)
        trainee = build(method, model, list(model), lr=1e-3)

        def step(trainee: Any = trainee) -> None:
            iterate(trainee.forward, trainee.optimizer, x)

        for _ in range(3):
            step()
        trainee.settle()
        params = [param.clone() for param in trainee.whole_params()]
        expected = params if method.kind == "ddp" and not expected else expected
        row: dict[str, Any] = {"method": method.name, "iteration_ms": median(iteration_ms(step) for _ in range(3))}
        if method.kind == "dear":
            events = trace(step)
            row["rs_hidden_fraction"] = round(hidden(events, "reduce_scatter", "backward").fraction, 3)
            row["ag_hidden_fraction"] = round(hidden(events, "all_gather", "forward").fraction, 3)
        if method.communicates:
            pairs = zip(params, expected, strict=True)
            row["correct"] = all(torch.allclose(mine, ddp, rtol=1e-4, atol=1e-6) for mine, ddp in pairs)
        rows.append(row)
        trainee.settle()
        trainee.close()
        del trainee, model
        torch.cuda.empty_cache()
    dear.shutdown()
    dist.destroy_process_group()
    return rows
