"""The communication core of dear: layout, streams, communicators, shards, and schedules as data."""

__all__: list[str] = []
