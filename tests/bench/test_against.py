"""Two trees in turn: what is compared, and how."""

from __future__ import annotations

from bench.against import compare


def test_times_are_compared_round_by_round_and_what_one_side_lacks_is_left_out() -> None:
    both, mine = ("", "dear", "median_ms"), ("", "new", "median_ms")
    rounds = [({both: 10.0, mine: 1.0}, {both: 10.0}), ({both: 30.0, mine: 1.0}, {both: 20.0})]
    rounds.append(({both: 12.0, mine: 1.0}, {both: 10.0}))
    (row,) = compare(rounds)
    assert (row["method"], row["time"]) == ("dear", "median_ms")
    assert (row["this_ms"], row["other_ms"]) == (12.0, 10.0)
    assert (row["least_ratio"], row["median_ratio"], row["largest_ratio"]) == (1.0, 1.2, 1.5)
