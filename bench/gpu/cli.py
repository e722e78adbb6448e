"""Kernels against a copy and against torch, the schedule on one GPU, and on several against DDP and FSDP2.

Everything in one run, each row with its correctness. `--json` appends one line for each part. Without a GPU it says so
and prints the targets. Ends within `--budget-s`: parts that no longer fit are left out, and named.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from ..record import Record, append_json, format_table
from . import targets

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "kernels, schedule and overlap on GPUs, with targets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget-s", type=float, default=240.0, help="no part is begun after this (240)")
    parser.add_argument("--sizes-mib", type=float, nargs="+", help="bucket sizes of the kernels")
    parser.add_argument("--sweep", action="store_true", help="try launch settings instead, and print the fastest")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device. `python -m dear doctor` says more.\n")
        print(format_table(targets.table({})))
        return 0
    device = torch.device("cuda", 0)
    if args.sweep:
        return _sweep(args, device)
    deadline_s = time.monotonic() + args.budget_s
    measured: dict[str, float] = {}
    wrong = 0
    for name, part in (("kernels", _kernels), ("schedule", _schedule), ("several GPUs", _several)):
        if time.monotonic() >= deadline_s:
            print(f"left out after {args.budget_s:g} s: {name}")
            continue
        rows, found = part(args, device, deadline_s - time.monotonic())
        if not rows:
            continue
        measured |= found
        wrong += sum(row.get("correct") is False for row in rows)
        print(f"\n{name} on {torch.cuda.get_device_name(device)}\n{format_table(rows)}")
        if args.json:
            append_json(args.json, Record(f"gpu {name}", vars_of(args), rows, (), {"measured": found}))
    print("\n" + format_table(targets.table(measured)))
    if wrong:
        print(f"{wrong} rows are WRONG")
        return 1
    return 1 if args.check and targets.missed(measured) else 0


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"sizes_mib": args.sizes_mib, "budget_s": args.budget_s}


def _kernels(args: argparse.Namespace, device: torch.device, _: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    from . import kernels  # Triton is imported where there is a GPU only

    rows = kernels.measure(device, args.sizes_mib or kernels.SIZES_MIB)
    return rows, kernels.summary(rows)


def _schedule(_: argparse.Namespace, device: torch.device, __: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    from . import training

    row = training.measure_one(device)
    return [row], {"num_syncs": float(row["num_syncs"])}


def _several(_: argparse.Namespace, __: torch.device, left_s: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    from . import training

    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        print("\nseveral GPUs: left out, this host has one")
        return [], {}
    return training.measure_several(num_gpus, max(left_s, 60.0)), {}


def _sweep(args: argparse.Namespace, device: torch.device) -> int:
    from .sweep import sweep

    rows = sweep(device)
    print(format_table(rows))
    if args.json:
        append_json(args.json, Record("gpu sweep", vars_of(args), rows))
    return 0
