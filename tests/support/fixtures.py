"""Fixtures for `tests/conftest.py` to import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """One pool of up to 4 ranks for the whole session; ranks start when a test first asks for that many."""
    with RankPool(max_ranks=4) as ranks:
        yield ranks
