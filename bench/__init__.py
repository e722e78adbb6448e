"""Benchmarks of dear, run from the repository: `python -m bench --help`."""

__all__: list[str] = []
