"""Our streams on a real device: order, no wait of the host, and memory that outlives its reads."""

import time

import pytest
import torch

from dearcore.streams import BlockingStream, Streams, record_mark
from dearcore.trace import Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LONG_CYCLES = 400_000_000  # some 200 ms
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def streams():
    made = Streams(DEVICE, Trace())
    yield made
    made.close()
    torch.cuda.synchronize()


def test_work_waits_for_the_event_and_the_host_does_not(streams):
    value, packed = torch.zeros(1000, device=DEVICE), streams.new_event()
    streams.wait_gradients()
    start_s = time.monotonic()

    def slow():
        torch.cuda._sleep(LONG_CYCLES)
        value.fill_(1)

    streams.pack.run("pack[0]", slow)
    streams.pack.record(packed)
    streams.communication.wait(packed)
    streams.communication.run("reduce_scatter[0]", lambda: value.mul_(3))
    done = streams.new_event()
    streams.communication.record(done)
    done.wait_compute()
    result = value + 0
    assert time.monotonic() - start_s < 0.1, "the host waited"
    assert not done.is_done()
    assert result.eq(3).all()


def test_compute_that_produces_a_gradient_on_a_side_stream_is_waited_for(streams):
    grad, flat, side = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_CYCLES // 4)
        grad.fill_(2)
        streams.note_gradient()
    streams.wait_gradients()
    streams.pack.run("pack[0]", lambda: flat.copy_(grad))
    packed = streams.new_event()
    streams.pack.record(packed)
    packed.wait_compute()
    assert flat.eq(2).all()


def test_memory_of_a_gradient_is_not_handed_out_while_it_is_packed(streams):
    flat = torch.zeros(2**20, device=DEVICE)
    grad = torch.ones(2**20, device=DEVICE)
    streams.wait_gradients()

    def slow(held=[grad]):  # noqa: B006
        torch.cuda._sleep(LONG_CYCLES // 4)
        flat.copy_(held.pop())

    streams.pack.run("pack[0]", slow)
    packed = streams.new_event()
    streams.pack.record(packed)
    streams.keep_until(packed, [grad])
    slow.__defaults__ = ()
    del grad
    time.sleep(0.02)  # the worker has launched, and dropped its reference
    overwriting = [torch.full((2**20,), 7.0, device=DEVICE) for _ in range(4)]
    packed.wait_compute()
    assert flat.eq(1).all() and len(overwriting) == 4
    torch.cuda.synchronize()
    streams.drop_kept()
    assert not streams._kept


def test_priority_and_marks(streams):
    assert streams.communication.cuda.priority < torch.cuda.current_stream().priority
    torch.cuda._sleep(LONG_CYCLES // 4)
    reached = record_mark(DEVICE)
    assert not reached()
    torch.cuda.synchronize()
    assert reached()


def test_a_blocking_call_orders_both_sides(streams):
    value = torch.zeros(1000, device=DEVICE)
    torch.cuda._sleep(LONG_CYCLES // 4)
    value.fill_(1)
    BlockingStream(streams.communication).run("allreduce", lambda: value.add_(1))
    assert value.add(1).eq(3).all()
