"""The watchdog: what it counts as progress, when it speaks, and that it speaks once."""

import threading
import time

import pytest

from dearcore.watchdog import Watchdog

LIMIT_S = 20
TICK_S = 0.01


@pytest.fixture
def make():
    made = []

    def new(timeout_s, check=lambda: None):
        told = []
        spoken = threading.Event()

        def on_failure(label, reason):
            told.append((label, reason))
            spoken.set()

        made.append(Watchdog(timeout_s, check, on_failure, TICK_S))
        return made[-1], told, spoken

    yield new
    for watchdog in made:
        watchdog.close()


class Clock:
    """Takes the place of the module `time`: it stands still unless it is moved."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_slow_progress_is_progress(monkeypatch):
    """Twelve collectives that take longer together than the timeout, none of them alone; then one that does."""
    clock = Clock()
    monkeypatch.setattr("dearcore.watchdog.time", clock)
    watchdog = Watchdog(10.0, lambda: None, lambda label, reason: None, interval_s=3600.0)
    tickets = [watchdog.start(f"all_gather[{i}]") for i in range(12)]
    for ticket in tickets[:-1]:
        clock.now_s += 9.0
        assert watchdog._reason(watchdog.oldest) == ""
        ticket.launched(lambda: True)
        assert watchdog.oldest != ticket.label
    clock.now_s += 10.0
    assert watchdog.oldest == "all_gather[11]" and watchdog._reason("all_gather[11]") == "no progress for 10 s"
    watchdog.close()


def test_the_oldest_is_named_and_once(make):
    watchdog, told, spoken = make(timeout_s=0.1)
    watchdog.start("all_gather[0]").launched(lambda: True)
    watchdog.start("all_gather[1]").launched(lambda: False)
    watchdog.start("all_gather[2]").launched(lambda: False)
    assert spoken.wait(LIMIT_S)
    time.sleep(5 * TICK_S)
    ((label, reason),) = told
    assert label == "all_gather[1]" and reason.startswith("no progress for")


def test_a_launch_that_does_not_return_is_seen(make):
    watchdog, told, spoken = make(timeout_s=0.1)
    watchdog.start("reduce_scatter[3]")
    assert spoken.wait(LIMIT_S) and told[0][0] == "reduce_scatter[3]"


def test_idling_is_no_failure(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("dearcore.watchdog.time", clock)
    watchdog = Watchdog(10.0, lambda: None, lambda label, reason: None, interval_s=3600.0)
    watchdog.start("all_gather[0]").launched(lambda: True)
    clock.now_s += 100.0
    assert watchdog._reason(watchdog.oldest) == ""
    watchdog.start("all_gather[1]")
    assert watchdog._reason(watchdog.oldest) == "", "it began just now"
    watchdog.close()


def test_an_error_of_the_library_is_told_though_nothing_is_pending(make):
    def check():
        raise RuntimeError("remote process exited")

    _, told, spoken = make(timeout_s=LIMIT_S, check=check)
    assert spoken.wait(LIMIT_S)
    assert told == [("", "remote process exited")]


def test_drain_has_a_deadline(make):
    watchdog, _, _ = make(timeout_s=LIMIT_S)
    ticket = watchdog.start("all_gather[0]")
    assert not watchdog.drain(0.05)
    threading.Timer(0.05, lambda: ticket.launched(lambda: True)).start()
    assert watchdog.drain(LIMIT_S)
