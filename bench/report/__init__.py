"""One HTML page out of the JSON lines of `compare`, `memory` and `scaling`."""

__all__: list[str] = []
