"""Micro-benchmarks with pytest-benchmark: `python -m pytest bench/micro`, or `make bench`."""

__all__: list[str] = []
