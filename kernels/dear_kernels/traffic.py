"""How many bytes each kernel has to move, and how long that takes at a given memory bandwidth: the floor of its time.

`python -m dear_kernels.traffic --gbps 3350 --mib 25` prints a table; 1 GB/s is 10^9 bytes per second. What is counted:
every element once for each stream that reads or writes it, and the tables that a launch reads. A kernel cannot be
faster unless what it reads is in the cache; how near it comes is measured by `python -m bench gpu`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "Traffic",
    "adam_traffic",
    "copy_traffic",
    "main",
    "norm_traffic",
    "pack_traffic",
    "sgd_traffic",
    "sum_rows_traffic",
]

TILE_NUMEL = {"pack": 4096, "step": 1024}  # elements a row of the tile tables stands for
TILE_BYTES = {"pack": 5 * 8, "step": 3 * 8}
ADDRESS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one call. `table_bytes`: what it reads to find its way."""

    read_bytes: int
    written_bytes: int
    table_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.written_bytes + self.table_bytes

    def floor_us(self, gbps: float) -> float:
        """Microseconds at `gbps` GB/s (10^9 bytes per second), reads and writes together."""
        return self.total_bytes / gbps / 1e3


def copy_traffic(numel: int, dtype: torch.dtype) -> Traffic:
    """A device-to-device copy: what a bandwidth is measured against."""
    return Traffic(numel * dtype.itemsize, numel * dtype.itemsize)


def pack_traffic(numel: int, source: torch.dtype, target: torch.dtype, num_tensors: int) -> Traffic:
    """`pack_`, and `unpack_` with the roles exchanged: each element is read once and written once."""
    tiles = -(-numel // TILE_NUMEL["pack"]) * TILE_BYTES["pack"]
    return Traffic(numel * source.itemsize, numel * target.itemsize, tiles + num_tensors * ADDRESS_BYTES)


def sgd_traffic(
    numel: int, param: torch.dtype, grad: torch.dtype, momentum: bool = True, copy: torch.dtype | None = None
) -> Traffic:
    """Reads parameter, gradient and momentum, writes parameter and momentum, and the narrow copy if there is one."""
    states = param.itemsize * momentum
    return _step_traffic(numel, param, grad, states, copy)


def adam_traffic(
    numel: int, param: torch.dtype, grad: torch.dtype, amsgrad: bool = False, copy: torch.dtype | None = None
) -> Traffic:
    """As SGD, with two averages, three with amsgrad."""
    states = param.itemsize * (3 if amsgrad else 2)
    return _step_traffic(numel, param, grad, states, copy)


def norm_traffic(numel: int, dtype: torch.dtype) -> Traffic:
    """Reads the shard once; the partial sums are at most 16 KiB."""
    return Traffic(numel * dtype.itemsize, 0)


def sum_rows_traffic(numel: int, num_rows: int, row: torch.dtype, output: torch.dtype) -> Traffic:
    """Reads `num_rows` values and writes one for each of `numel` elements."""
    return Traffic(numel * num_rows * row.itemsize, numel * output.itemsize)


def _step_traffic(
    numel: int, param: torch.dtype, grad: torch.dtype, state_bytes: int, copy: torch.dtype | None
) -> Traffic:
    copied = 0 if copy is None else copy.itemsize
    tiles = -(-numel // TILE_NUMEL["step"]) * TILE_BYTES["step"]
    read = numel * (param.itemsize + grad.itemsize + state_bytes)
    return Traffic(read, numel * (param.itemsize + state_bytes + copied), tiles)


def _rows(mib: float) -> list[tuple[str, str, Traffic]]:
    """For a bucket of `mib` MiB of fp32 parameters (half as many bytes where they are bf16)."""
    fp32, bf16 = torch.float32, torch.bfloat16
    numel = int(mib * 2**20) // 4
    return [
        ("copy", "fp32", copy_traffic(numel, fp32)),
        ("pack, unpack", "fp32 to fp32", pack_traffic(numel, fp32, fp32, 50)),
        ("pack, unpack", "fp32 to bf16", pack_traffic(numel, fp32, bf16, 50)),
        ("pack, unpack", "bf16 to bf16", pack_traffic(numel, bf16, bf16, 50)),
        ("sgd", "fp32 with momentum", sgd_traffic(numel, fp32, fp32)),
        ("sgd", "fp32 with momentum, copy bf16", sgd_traffic(numel, fp32, fp32, copy=bf16)),
        ("adam", "fp32", adam_traffic(numel, fp32, fp32)),
        ("adam", "fp32 with amsgrad", adam_traffic(numel, fp32, fp32, amsgrad=True)),
        ("adam", "fp32, copy bf16", adam_traffic(numel, fp32, fp32, copy=bf16)),
        ("norm", "fp32", norm_traffic(numel, fp32)),
        ("sum_rows", "8 rows, fp32", sum_rows_traffic(numel // 8, 8, fp32, fp32)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m dear_kernels.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("--gbps", type=float, required=True, help="memory bandwidth in 10^9 bytes per second")
    parser.add_argument("--mib", type=float, default=25.0, help="size of the bucket in MiB of fp32 (25)")
    options = parser.parse_args(argv)
    if options.gbps <= 0 or options.mib <= 0:
        parser.error("--gbps and --mib are positive")
    print(f"bucket of {options.mib:g} MiB of fp32, {options.gbps:g} GB/s")
    print(f"{'kernel':14s}{'dtypes':32s}{'read_mb':>9s}{'written_mb':>12s}{'tables_mb':>11s}{'floor_us':>10s}")
    for kernel, dtypes, traffic in _rows(options.mib):
        mb = (traffic.read_bytes / 1e6, traffic.written_bytes / 1e6, traffic.table_bytes / 1e6)
        floor_us = traffic.floor_us(options.gbps)
        print(f"{kernel:14s}{dtypes:32s}{mb[0]:9.2f}{mb[1]:12.2f}{mb[2]:11.2f}{floor_us:10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
