"""CPU streams and events: order, what an event means, what becomes of a failure.

Cannot see: CUDA's streams (tests/gpu).
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from dearcore.errors import CommunicatorError
from dearcore.streams import CpuEvent, CpuStream, InlineStream, Streams
from dearcore.trace import Trace

LIMIT_S = 10.0


@pytest.fixture
def new_stream() -> Iterator[Callable[[], CpuStream]]:
    streams: list[CpuStream] = []

    def make() -> CpuStream:
        streams.append(CpuStream(f"test{len(streams)}", Trace()))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def drained(stream: CpuStream) -> None:
    event = CpuEvent()
    stream.record(event)
    event.wait_host()


def hold(stream: CpuStream) -> threading.Event:
    """The stream stands still until the returned event is set."""
    release = threading.Event()

    def work() -> None:
        assert release.wait(LIMIT_S)

    stream.run("hold", work)
    return release


def test_work_runs_in_order_and_run_returns_at_once(new_stream: Callable[[], CpuStream]) -> None:
    stream, seen = new_stream(), []
    release = hold(stream)
    for number in range(100):
        stream.run("append", lambda number=number: seen.append(number))
    assert seen == []
    release.set()
    drained(stream)
    assert seen == list(range(100))


def test_work_runs_without_autograd_in_a_thread_of_the_streams_name(new_stream: Callable[[], CpuStream]) -> None:
    stream, seen = new_stream(), []
    stream.run("look", lambda: seen.append((torch.is_grad_enabled(), threading.current_thread().name)))
    drained(stream)
    assert seen == [(False, "dear-test0")]


def test_an_event_is_true_until_recorded() -> None:
    event = CpuEvent()
    assert event.is_done()
    event.wait_host()
    event.wait_compute()


def test_an_event_comes_true_when_its_stream_gets_there(new_stream: Callable[[], CpuStream]) -> None:
    stream, event, seen = new_stream(), CpuEvent(), []
    release = hold(stream)
    stream.run("append", lambda: seen.append(1))
    stream.record(event)
    assert not event.is_done()
    release.set()
    event.wait_host()
    assert event.is_done()
    assert seen == [1]


def test_a_stream_waits_and_the_host_goes_on(new_stream: Callable[[], CpuStream]) -> None:
    first, second, event, seen = new_stream(), new_stream(), CpuEvent(), []
    release = hold(first)
    first.run("append", lambda: seen.append("first"))
    first.record(event)
    second.wait(event)
    second.run("append", lambda: seen.append("second"))
    assert seen == []
    release.set()
    drained(second)
    assert seen == ["first", "second"]


def test_waiting_for_an_event_that_was_never_recorded_is_no_wait(new_stream: Callable[[], CpuStream]) -> None:
    stream, seen = new_stream(), []
    stream.wait(CpuEvent())
    stream.run("append", lambda: seen.append(1))
    drained(stream)
    assert seen == [1]


def test_recording_again_gives_a_new_meaning_to_later_waits_only(new_stream: Callable[[], CpuStream]) -> None:
    producer, early, late, event, seen = new_stream(), new_stream(), new_stream(), CpuEvent(), []
    first = hold(producer)
    producer.record(event)
    early.wait(event)
    early.run("append", lambda: seen.append("early"))
    second = hold(producer)
    producer.record(event)
    late.wait(event)
    late.run("append", lambda: seen.append("late"))
    first.set()
    drained(early)
    assert seen == ["early"], "the first recording holds for whoever waited before the second"
    assert not event.is_done()
    second.set()
    drained(late)
    assert seen == ["early", "late"]


def test_a_host_that_waits_keeps_the_meaning_it_began_with(new_stream: Callable[[], CpuStream]) -> None:
    stream, event, passed = new_stream(), CpuEvent(), threading.Event()
    first = hold(stream)
    stream.record(event)
    started = threading.Event()

    def host() -> None:
        started.set()
        event.wait_host()
        passed.set()

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    assert started.wait(LIMIT_S)
    time.sleep(0.02)  # it stands in wait_host now
    second = hold(stream)
    stream.record(event)
    first.set()
    assert passed.wait(LIMIT_S)
    second.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def fail() -> None:
    raise CommunicatorError("all_gather[3] failed")


def test_a_failure_stops_the_stream_and_is_raised_at_every_later_event(new_stream: Callable[[], CpuStream]) -> None:
    stream, before, after, again, seen = new_stream(), CpuEvent(), CpuEvent(), CpuEvent(), []
    stream.record(before)
    stream.run("fail", fail)
    stream.record(after)
    stream.run("append", lambda: seen.append(1))
    stream.record(again)
    for event in (after, after, again):
        with pytest.raises(CommunicatorError, match=r"all_gather\[3\] failed"):
            event.wait_host()
        with pytest.raises(CommunicatorError):
            event.wait_compute()
    before.wait_host()
    assert seen == []


def test_a_failure_travels_to_streams_that_wait_for_it(new_stream: Callable[[], CpuStream]) -> None:
    first, second, third, seen = new_stream(), new_stream(), new_stream(), []
    events = [CpuEvent() for _ in range(3)]
    first.run("fail", fail)
    first.record(events[0])
    second.wait(events[0])
    second.run("append", lambda: seen.append("second"))
    second.record(events[1])
    third.wait(events[1])
    third.run("append", lambda: seen.append("third"))
    third.record(events[2])
    with pytest.raises(CommunicatorError, match="failed"):
        events[2].wait_host()
    assert seen == []


def test_the_first_failure_is_the_one_that_is_told(new_stream: Callable[[], CpuStream]) -> None:
    stream, event = new_stream(), CpuEvent()
    stream.run("fail", fail)

    def fail_too() -> None:
        raise ValueError("a consequence")

    stream.run("fail too", fail_too)
    stream.record(event)
    with pytest.raises(CommunicatorError):
        event.wait_host()


def test_a_watchdog_can_fail_an_event_whose_stream_is_stuck(new_stream: Callable[[], CpuStream]) -> None:
    stream, event, passed = new_stream(), CpuEvent(), CpuEvent()
    stream.record(passed)
    passed.wait_host()
    passed.fail(CommunicatorError("too late"))
    passed.wait_host()
    release = hold(stream)
    stream.record(event)
    event.fail(CommunicatorError("stuck for 10 s"))
    with pytest.raises(CommunicatorError, match="stuck"):
        event.wait_host()
    release.set()
    drained(stream)
    with pytest.raises(CommunicatorError, match="stuck"):
        event.wait_host()


def test_close_drains_the_queue_and_ends_the_thread() -> None:
    stream, seen = CpuStream("closing", Trace()), []
    for number in range(50):
        stream.run("append", lambda number=number: seen.append(number))
    stream.close()
    assert seen == list(range(50))
    assert not any(thread.name == "dear-closing" for thread in threading.enumerate())


def test_close_gives_up_on_a_stuck_worker() -> None:
    stream = CpuStream("stuck", Trace())
    release = hold(stream)
    start_s = time.monotonic()
    stream.close(timeout_s=0.05)
    assert time.monotonic() - start_s < 5
    release.set()


def test_an_event_recorded_on_a_closed_stream_does_not_block_the_host_for_ever() -> None:
    stream, event = CpuStream("closed", Trace()), CpuEvent()
    stream.close()
    stream.record(event)
    outcome: list[object] = []

    def host() -> None:
        try:
            event.wait_host()
            outcome.append("passed")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    thread.join(1.0)
    assert outcome, "recorded after close(), the event never comes true and never fails"


def test_work_can_close_its_own_stream() -> None:
    stream = CpuStream("suicidal", Trace())
    stream.run("close", stream.close)
    stream._worker._thread.join(LIMIT_S)
    assert not stream._worker._thread.is_alive()


def test_closures_do_not_outlive_their_run(new_stream: Callable[[], CpuStream]) -> None:
    stream = new_stream()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    stream.run("use", lambda tensor=tensor: tensor.add_(1))
    del tensor
    drained(stream)
    for _ in range(100):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_spans_carry_the_streams_name() -> None:
    trace = Trace()
    trace.enabled = True
    stream = CpuStream("communication", trace)
    stream.run("reduce_scatter[3]", lambda: time.sleep(0.001))
    stream.close()
    (span,) = trace.take()
    assert (span.lane, span.name) == ("communication", "reduce_scatter[3]")
    assert span.end_s - span.start_s >= 0.001


def test_three_streams_of_an_optimizer_run_side_by_side() -> None:
    streams = Streams(torch.device("cpu"), Trace())
    try:
        meeting = threading.Barrier(3, timeout=LIMIT_S)
        events = []
        for stream in (streams.communication, streams.pack, streams.step):
            stream.run("meet", lambda: (meeting.wait(), None)[1])
            events.append(streams.new_event())
            stream.record(events[-1])
        streams.wait_gradients()
        streams.wait_compute()
        for event in events:
            event.wait_host()
        assert all(event.is_done() for event in events)
    finally:
        streams.close()


def test_inline_stream_runs_at_once(new_stream: Callable[[], CpuStream]) -> None:
    inline, stream, event, seen = InlineStream(), new_stream(), CpuEvent(), []
    stream.run("append", lambda: seen.append("stream"))
    stream.record(event)
    inline.wait(event)
    inline.run("append", lambda: seen.append(torch.is_grad_enabled()))
    inline.record(event)
    inline.close()
    assert seen == ["stream", False]


def test_a_listener_hears_of_spans_that_nobody_collects() -> None:
    trace = Trace()
    heard: list[str] = []
    trace.listener = lambda span: heard.append(span.name)
    with trace.span("step", "step[1]"):
        pass
    trace.listener = None
    with trace.span("step", "step[2]"):
        pass
    assert heard == ["step[1]"] and not trace.take()
