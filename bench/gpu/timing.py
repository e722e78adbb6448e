"""Times of what a GPU does, without what the host does."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Timer"]

# Longer than L2 of any GPU so far: what was read by the call before must come from memory again.
FLUSH_BYTES = 256 * 2**20
AHEAD_CYCLES = 1_000_000  # the GPU idles that long first, so that the host is ahead of it when the time starts


class Timer:
    """Times calls on the current stream with CUDA events, each with a cold cache."""

    def __init__(self, device: torch.device, num_calls: int = 20) -> None:
        self._num_calls = num_calls
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def times_s(self, call: Callable[[], object]) -> list[float]:
        for _ in range(3):
            call()
        marks = []
        for _ in range(self._num_calls):
            self._flush.zero_()
            torch.cuda._sleep(AHEAD_CYCLES)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in marks]
