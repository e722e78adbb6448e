"""What the launchers start: `python program.py train`, or `1 sleeps` after it; the rest is in the environment."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn

import dear


def train(num_steps: int) -> None:
    """Ends right after the last step: nobody waits for what is under way."""
    torch.manual_seed(dear.rank())
    model = nn.Linear(4, 3)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), dear.rank() + 1.0)).sum().backward()
        optimizer.step()
    weights = dear.allgather(model.weight.detach().view(1, -1))
    assert bool((weights == weights[0]).all())
    print(
        f"rank {dear.rank()} of {dear.size()}, {dear.local_rank()} of {dear.local_size()} here: "
        f"sum {dear.allreduce(torch.tensor([dear.rank() + 1.0]), dear.Sum).item():g}",
        flush=True,
    )
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def main() -> None:
    what = sys.argv[1]
    dear.init(backend="gloo", timeout=timedelta(seconds=float(os.environ.get("PROGRAM_TIMEOUT_S", "600"))))
    train(3)
    if what == "train":
        return
    print("waiting", flush=True)
    if what == f"{dear.rank()} sleeps":
        time.sleep(600)
    dear.barrier()


if __name__ == "__main__":
    main()
