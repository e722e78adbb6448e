"""A training script that survives: it saves every few steps, and goes on from the last checkpoint when it is restarted.

    torchrun --nproc-per-node 2 --max-restarts 3 tests/faults/resumable.py FOLDER --steps 200

`--kill 1:57:0.004` kills rank 1 by SIGKILL 4 ms after it began step 57, in the first life (0) of the job; repeat it for
later lives. The data of a step are the same whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dear

SAMPLES = 12  # of a step, shared by all ranks


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 2))


def data_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    share = slice(dear.rank() * SAMPLES // dear.size(), (dear.rank() + 1) * SAMPLES // dear.size())
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    return x[share], y[share]


def save(folder: Path, step: int, model: nn.Module, optimizer: dear.DistributedOptimizer) -> None:
    """On all ranks. The checkpoint is replaced in one move: whoever dies meanwhile leaves the old one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if dear.rank() == 0:
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def train(folder: Path, num_steps: int, kills: list[tuple[int, int, float]], life: int) -> dict[str, Any]:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = dear.DistributedOptimizer(adam, model, fusion=None)
    first = 0
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, num_steps):
        if life < len(kills) and kills[life][:2] == (dear.rank(), step):
            threading.Timer(kills[life][2], os.kill, (os.getpid(), signal.SIGKILL)).start()
        x, y = data_of(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            save(folder, step + 1, model, optimizer)
    if life < len(kills) and kills[life][0] == dear.rank():
        threading.Event().wait(10)  # the signal is on its way
    return {"first": first, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill", action="append", default=[])
    args = parser.parse_args()
    kills = [(int(rank), int(step), float(delay)) for rank, step, delay in (text.split(":") for text in args.kill)]
    dear.init(backend="gloo")
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    result = train(args.folder, args.steps, kills, life)
    if dear.rank() == 0:
        torch.save({**result, "life": life}, args.folder / "result.pt")


if __name__ == "__main__":
    main()
