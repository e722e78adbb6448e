"""The NCCL communicator over a library that is NCCL in all but the GPUs: data, pointers, counts, order, failures.

What this ring cannot see: NCCL itself, and what CUDA makes of the streams (tests/gpu does where there is a GPU).
"""

import inspect
import re
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from dearcore import nccl
from dearcore.communicator import LocalCommunicator
from dearcore.cpu_streams import CpuEvent, CpuStream, InlineStream
from dearcore.errors import ArgumentError, CommunicatorError
from dearcore.gloo import GlooCommunicator
from dearcore.nccl_group import NcclGroup
from dearcore.trace import Trace
from tests.support.fake_nccl import FakeNccl

CPU = torch.device("cpu")
LIMIT_S = 30


class Ranks:
    """`size` ranks, each a thread with a group of its own."""

    def __init__(self, size, deterministic=False, library=None, timeout_s=20.0, control="gloo", interval_s=0.02):
        self.size, self.library = size, library or FakeNccl()
        store = HashStore()

        def build(rank):
            limit = timedelta(seconds=timeout_s)
            control_comm = (
                GlooCommunicator(PrefixStore("control", store), rank, size, limit, deterministic)
                if control == "gloo" and size > 1
                else LocalCommunicator()
            )
            stream = CpuStream(f"communication-{rank}", Trace())
            args = (self.library, PrefixStore("nccl", store), rank, size, CPU, stream, control_comm, limit)
            return NcclGroup(*args, deterministic, interval_s=interval_s)

        self.groups = self.each(build)
        self.communicators = [nccl.NcclCommunicator(group) for group in self.groups]

    def each(self, work):
        """Runs work(rank) on a thread a rank and returns the results by rank; an exception is raised here."""
        results = [None] * self.size
        errors = []

        def guarded(rank):
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]
        return results

    def close(self):
        self.each(lambda rank: self.groups[rank].close())


@pytest.fixture
def make_ranks(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = []

    def make(*args, **kwargs):
        made.append(Ranks(*args, **kwargs))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def run_on_stream(group, start):
    """Enqueues on the group's stream and waits."""
    passed = CpuEvent()
    start(group.stream)
    group.stream.record(passed)
    passed.wait_host()


def integers(rank, numel, dtype, size):
    """Whole multiples of the world size: any order of summation and the division are exact."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-4, 5, (numel,), generator=generator) * size).to(dtype)


# ------------------------------------------------------------------------------------------------ the library's face


def parameters_in_docstring(method):
    """["sendbuf", "recvbuf", ...] from Cython's embedded "NcclCommunicator.allGather(self, intptr_t sendbuf, ...)"."""
    inside = re.match(r"[\w.]+\((.*?)\)", method.__doc__)[1]
    return [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip() != "self"]


def test_the_fake_has_cupys_signatures():
    real = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    fake = FakeNccl()
    names = [name for name in vars(fake.NcclCommunicator.__mro__[1]) if not name.startswith("_")]
    assert {"reduceScatter", "allGather", "allReduce", "broadcast", "send", "recv", "abort", "destroy"} <= set(names)
    for name in names:
        mine = list(inspect.signature(getattr(fake.NcclCommunicator, name)).parameters)[1:]
        assert mine == parameters_in_docstring(getattr(real.NcclCommunicator, name)), name
    mine = list(inspect.signature(fake.NcclCommunicator).parameters)
    assert mine == parameters_in_docstring(real.NcclCommunicator)
    for name in ("groupStart", "groupEnd", "get_unique_id", "get_version"):
        assert callable(getattr(real, name))
    assert issubclass(real.NcclError, RuntimeError)
    assert isinstance(real.get_unique_id(), bytes) and len(real.get_unique_id()) == 128


def test_every_name_of_the_tables_is_cupys():
    real = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    for name in [*nccl.DTYPES.values(), *nccl.OPS.values()]:
        assert getattr(real, name) == getattr(FakeNccl, name), name


def test_the_dtype_table_is_right_and_complete():
    from dear.tracked import WIRE_DTYPES

    assert set(WIRE_DTYPES) <= set(nccl.DTYPES), "a gradient's dtype is missing from the table"
    for dtype, name in nccl.DTYPES.items():
        assert FakeNccl.DTYPES[getattr(FakeNccl, name)] == dtype
    assert {torch.uint8, torch.int8, torch.int32, torch.int64} <= set(nccl.DTYPES)


# ---------------------------------------------------------------------------------------------------- right results


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("wire", "output"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
    ],
    ids=str,
)
def test_sums_and_gathers(make_ranks, size, deterministic, wire, output):
    ranks = make_ranks(size, deterministic)
    numel = 5
    flats = [integers(rank, numel * size, wire, size) for rank in range(size)]
    total = sum(flat.to(output) for flat in flats)
    divisor = size if wire.is_floating_point else 1

    def work(rank):
        communicator, group = ranks.communicators[rank], ranks.groups[rank]
        shard, whole = torch.full((numel,), 9).to(output), torch.full((numel * size - 1,), 9).to(output)
        gathered = torch.full((numel * size,), 9).to(wire)
        gathered[rank * numel : (rank + 1) * numel] = flats[rank][:numel]
        sent = communicator.bytes_sent

        def start(stream):
            communicator.start_reduce_scatter(shard, flats[rank].clone(), divisor, stream, "reduce_scatter[0]")
            communicator.start_all_reduce(whole, flats[rank].clone(), divisor, stream, "all_reduce[1]")
            communicator.start_all_gather(gathered, stream, "all_gather[0]")

        run_on_stream(group, start)
        half = (size - 1) * numel * wire.itemsize
        assert communicator.bytes_sent - sent == 4 * half
        return shard, whole, gathered

    for rank, (shard, whole, gathered) in enumerate(ranks.each(work)):
        assert torch.equal(shard, (total / divisor).to(output)[rank * numel : (rank + 1) * numel])
        assert torch.equal(whole, (total / divisor).to(output)[:-1])
        assert torch.equal(gathered, torch.cat([flat[:numel] for flat in flats]))


def test_the_deterministic_sum_is_in_rank_order(make_ranks):
    """Values whose sum depends on the order, against the sum taken by hand; and the shared group call."""
    size, numel = 3, 4
    ranks = make_ranks(size, deterministic=True)
    flats = [torch.full((numel * size,), value) for value in (1e8, 1.0, -1e8)]
    expected = (flats[0] + flats[1] + flats[2]) / 3

    def work(rank):
        shard = torch.empty(numel)
        start = ranks.communicators[rank].start_reduce_scatter
        run_on_stream(ranks.groups[rank], lambda s: start(shard, flats[rank].clone(), 3, s, "reduce_scatter[0]"))
        return shard

    for shard in ranks.each(work):
        assert torch.equal(shard, expected[:numel])
    names = [call.name for call in ranks.library.calls if call.rank == 1]
    assert names == ["send", "recv"] * 2
    assert all(call.group == 1 for call in ranks.library.calls)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_the_deterministic_sum_is_gloos_bit_for_bit(make_ranks, size, wire):
    ranks = make_ranks(size, deterministic=True)
    flats = [torch.randn(7 * size).mul(10.0 ** torch.randint(-4, 4, (7 * size,))).to(wire) for _ in range(size)]

    def work(rank):
        communicator, group = ranks.communicators[rank], ranks.groups[rank]
        over_nccl, over_gloo = torch.empty(7), torch.empty(7)

        def start(stream):
            communicator.start_reduce_scatter(over_nccl, flats[rank].clone(), size, stream, "reduce_scatter[0]")
            group.control.start_reduce_scatter(over_gloo, flats[rank].clone(), size, stream, "reduce_scatter[0]")

        run_on_stream(group, start)
        return over_nccl, over_gloo

    for over_nccl, over_gloo in ranks.each(work):
        assert torch.equal(over_nccl, over_gloo)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64], ids=str)
def test_what_cannot_be_summed_can_be_moved(make_ranks, dtype):
    ranks = make_ranks(2)
    value = torch.arange(6).to(dtype)

    def work(rank):
        moved = value.clone() if rank == 1 else torch.zeros_like(value)
        gathered = torch.zeros(2, 6).to(dtype)
        gathered[rank] = value

        def start(stream):
            ranks.communicators[rank].start_broadcast(moved, 1, stream, "broadcast")
            ranks.communicators[rank].start_all_gather(gathered.view(-1), stream, "all_gather[0]")

        run_on_stream(ranks.groups[rank], start)
        return moved, gathered

    for moved, gathered in ranks.each(work):
        assert torch.equal(moved, value) and torch.equal(gathered, torch.stack([value, value]))


def test_a_dtype_that_nccl_cannot_sum_is_refused(make_ranks):
    (communicator,) = make_ranks(1).communicators
    with pytest.raises(ArgumentError, match=r"reduce_scatter\[0\].*cannot sum int16.*float32.*Cast it first"):
        communicator.start_reduce_scatter(
            torch.zeros(1), torch.zeros(1, dtype=torch.int16), 1, InlineStream(), "reduce_scatter[0]"
        )


def test_small_things_of_the_host(make_ranks):
    ranks = make_ranks(3)

    def work(rank):
        communicator, group = ranks.communicators[rank], ranks.groups[rank]
        total, largest, objects = torch.tensor([rank + 1.0]), torch.tensor([rank, 9 - rank], dtype=torch.uint8), []

        def start(stream):
            communicator.start_combine(total, "sum", stream, "sum")
            communicator.start_combine(largest, "max", stream, "max")
            communicator.start_gather_objects({"rank": rank}, objects, stream, "objects")

        run_on_stream(group, start)
        return total.item(), largest.tolist(), objects

    assert ranks.each(work) == [(6.0, [2, 9], [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3
    assert ranks.library.calls == [], "none of these needs the GPU"


# ---------------------------------------------------------------------------------------- what exactly NCCL is given


def recorded(start, size=2, deterministic=False, stream=None):
    """The calls that rank 0 of 2 makes, without anybody to answer."""

    class Recorder(FakeNccl):
        def __init__(self):
            super().__init__()
            mine = self

            class NcclCommunicator:
                def __init__(self, ndev, commId, rank):
                    pass

                def __getattr__(self, name):
                    def call(*args):
                        mine.calls.append((name, *args))

                    return call

            self.NcclCommunicator = NcclCommunicator

        def groupStart(self):
            self.calls.append(("groupStart",))

        def groupEnd(self):
            self.calls.append(("groupEnd",))

    library, store = Recorder(), HashStore()
    for rank in range(1, size):
        store.set(f"here/{rank}", "")
    limit = timedelta(seconds=5)
    group = NcclGroup(library, store, 0, size, CPU, CpuStream("c", Trace()), LocalCommunicator(), limit, deterministic)
    start(nccl.NcclCommunicator(group), stream or InlineStream())
    group._watchdog.close()
    return [call for call in library.calls if call[0] not in ("check_async_error", "abort", "destroy")]


def test_counts_are_elements_and_pointers_are_bytes():
    flat, output = torch.zeros(8), torch.zeros(4)
    calls = recorded(lambda c, s: c.start_reduce_scatter(output, flat, 2, s, "reduce_scatter[0]"))
    assert calls == [("reduceScatter", flat.data_ptr(), output.data_ptr(), 4, 7, FakeNccl.NCCL_AVG, 0)]
    calls = recorded(lambda c, s: c.start_all_gather(flat, s, "all_gather[0]"))
    assert calls == [("allGather", flat.data_ptr(), flat.data_ptr(), 4, 7, 0)]
    half = torch.zeros(8, dtype=torch.bfloat16)
    calls = recorded(lambda c, s: c.start_reduce_scatter(output, half, 1, s, "reduce_scatter[0]"))
    assert calls == [("reduceScatter", half.data_ptr(), half.data_ptr(), 4, 9, FakeNccl.NCCL_SUM, 0)]
    calls = recorded(lambda c, s: c.start_all_reduce(torch.zeros(7), flat, 2, s, "all_reduce[0]"))
    assert calls == [("allReduce", flat.data_ptr(), flat.data_ptr(), 8, 7, FakeNccl.NCCL_AVG, 0)]
    bools = torch.zeros(3, dtype=torch.bool)
    calls = recorded(lambda c, s: c.start_broadcast(bools, 1, s, "broadcast"))
    assert calls == [("broadcast", bools.data_ptr(), bools.data_ptr(), 3, 1, 1, 0)]


def test_averages_that_would_round_are_sums():
    flat, output = torch.zeros(9), torch.full((3,), 3.0)
    ((name, *_, op, _),) = recorded(lambda c, s: c.start_reduce_scatter(output, flat, 3, s, "rs"), size=3)
    assert (name, op) == ("reduceScatter", FakeNccl.NCCL_SUM)
    assert output.tolist() == [1, 1, 1], "divided afterwards"


def test_group_calls_enclose_the_exchange():
    flat, output = torch.zeros(8), torch.zeros(4)
    calls = recorded(lambda c, s: c.start_reduce_scatter(output, flat, 2, s, "rs"), deterministic=True)
    assert [call[0] for call in calls] == ["groupStart", "send", "recv", "groupEnd"]
    assert calls[1][1:] == (flat.data_ptr() + 16, 4, 7, 1, 0)


class Huge:
    """As much of a tensor as the communicator looks at, with more elements than 32 bits can count."""

    def __init__(self, numel, dtype, pointer=2**40):
        self._numel, self.dtype, self._pointer, self.device = numel, dtype, pointer, CPU
        self.itemsize = dtype.itemsize

    def numel(self):
        return self._numel

    def element_size(self):
        return self.itemsize

    def data_ptr(self):
        return self._pointer

    def is_contiguous(self):
        return True

    def __getitem__(self, span):
        return Huge(span.stop - span.start, self.dtype, self._pointer + span.start * self.itemsize)


def test_offsets_beyond_32_bits():
    numel = 2**33
    flat, output = Huge(2 * numel, torch.float32), Huge(numel, torch.float32, 2**50)

    def start(communicator, stream):
        communicator.rank = 1
        communicator.start_reduce_scatter(output, flat, 2, stream, "reduce_scatter[0]")
        communicator.start_all_gather(flat, stream, "all_gather[0]")

    calls = recorded(start)
    assert calls == [
        ("reduceScatter", 2**40, 2**50, numel, 7, FakeNccl.NCCL_AVG, 0),
        ("allGather", 2**40 + 4 * numel, 2**40, numel, 7, 0),
    ]


def test_nothing_is_sent_for_nothing():
    empty = torch.zeros(0)

    def start(communicator, stream):
        communicator.start_reduce_scatter(empty, empty, 2, stream, "rs")
        communicator.start_all_gather(empty, stream, "ag")
        communicator.start_all_reduce(empty, empty, 2, stream, "ar")
        communicator.start_broadcast(empty, 0, stream, "broadcast")

    assert recorded(start) == []


# --------------------------------------------------------------------------------------------------- order, failures


def test_ranks_that_start_different_collectives_are_told(make_ranks):
    """Equal sizes in another order: NCCL mixes sums without a word; the next agreement does not."""
    ranks = make_ranks(2)

    def work(rank):
        communicator, flat, output = ranks.communicators[rank], torch.ones(4), torch.ones(2)
        for bucket in (0, 1) if rank == 0 else (1, 0):
            label = f"reduce_scatter[{bucket}] (w) in step 3"
            communicator.start_reduce_scatter(output, flat, 2, ranks.groups[rank].stream, label)
        told = torch.zeros(3, dtype=torch.uint8)
        with pytest.raises(
            CommunicatorError, match=r"before agreement in step 3.*another order.*call backward for each"
        ):
            run_on_stream(
                ranks.groups[rank], lambda s: communicator.start_combine(told, "max", s, "agreement in step 3")
            )

    ranks.each(work)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_order_travels_in_any_dtype(make_ranks, dtype):
    ranks = make_ranks(2)
    ranks.each(lambda rank: setattr(ranks.groups[rank], "order", 0xFFFFFFFF))

    def work(rank):
        tensor = torch.tensor([rank]).to(dtype)
        start = ranks.communicators[rank].start_combine
        run_on_stream(ranks.groups[rank], lambda s: start(tensor, "max", s, "agreement"))
        return tensor.item()

    assert ranks.each(work) == [1, 1]


def test_a_collective_that_does_not_end_is_aborted_and_named(make_ranks):
    library = FakeNccl()
    library.stuck = {"allGather"}
    ranks = make_ranks(2, library=library, timeout_s=0.3)

    def work(rank):
        group, flat = ranks.groups[rank], torch.ones(4)
        passed = CpuEvent()
        ranks.communicators[rank].start_all_gather(flat, group.stream, "all_gather[7] (fc.weight) in step 12")
        group.stream.record(passed)
        with pytest.raises(CommunicatorError) as error:
            passed.wait_host()
        return str(error.value)

    for rank, message in enumerate(ranks.each(work)):
        assert message.startswith(f"rank {rank} of 2: all_gather[7] (fc.weight) in step 12 failed.")
    deadline = time.monotonic() + 10
    while {group.comm.ended for group in ranks.groups} != {"aborted"} and time.monotonic() < deadline:
        time.sleep(0.01)  # the other rank's error may wake a waiter a moment before NCCL is gone
    assert [group.comm.ended for group in ranks.groups] == ["aborted"] * 2
    with pytest.raises(CommunicatorError):
        ranks.groups[0].start(InlineStream(), "later", lambda handle: None)


def test_an_error_that_nccl_finds_by_itself_wakes_the_waiting(make_ranks):
    ranks = make_ranks(1)
    (group,) = ranks.groups
    release, passed = threading.Event(), CpuEvent()
    group.stream.run("compute", lambda: (release.wait(LIMIT_S), None)[1])
    group.stream.record(passed)
    group.comm.async_error = "remote process exited"
    with pytest.raises(CommunicatorError, match="remote process exited"):
        passed.wait_host()
    release.set()
    assert group.comm.ended == "aborted"


def test_the_unique_id_waits_for_every_rank(monkeypatch):
    limit = timedelta(seconds=0.2)
    start_s = time.monotonic()
    with pytest.raises(CommunicatorError, match=r"rank 0 of 2: not all ranks came.*within 0.2 s"):
        NcclGroup(FakeNccl(), HashStore(), 0, 2, CPU, CpuStream("c", Trace()), LocalCommunicator(), limit, False)
    assert time.monotonic() - start_s < LIMIT_S


def test_a_connection_that_never_comes_is_an_error():
    library = FakeNccl()

    class NeverConnects:
        def __init__(self, *_):
            threading.Event().wait(LIMIT_S)

    library.NcclCommunicator = NeverConnects
    limit = timedelta(seconds=0.2)
    with pytest.raises(CommunicatorError, match=r"rank 0 of 1: NCCL could not connect on cpu.*NCCL_DEBUG=INFO"):
        NcclGroup(library, HashStore(), 0, 1, CPU, CpuStream("c", Trace()), LocalCommunicator(), limit, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_the_real_library_says_without_a_gpu():
    real = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
    limit = timedelta(seconds=LIMIT_S)
    with pytest.raises(CommunicatorError, match=r"rank 0 of 1: NCCL could not connect on cpu: NCCL_ERROR_\w+"):
        NcclGroup(real, HashStore(), 0, 1, CPU, CpuStream("c", Trace()), LocalCommunicator(), limit, False)


def test_close_destroys_when_all_have_drained(make_ranks):
    ranks = make_ranks(2)
    ranks.close()
    assert [group.comm.ended for group in ranks.groups] == ["destroyed"] * 2


def test_close_alone_aborts_in_time(make_ranks, monkeypatch):
    monkeypatch.setattr("dearcore.nccl_group.CLOSE_S", 0.1)
    ranks = make_ranks(2)
    start_s = time.monotonic()
    ranks.groups[0].close()
    assert time.monotonic() - start_s < 5
    assert ranks.groups[0].comm.ended == "aborted"


def test_close_returns_though_the_library_never_does(make_ranks, monkeypatch):
    monkeypatch.setattr("dearcore.nccl_group.CLOSE_S", 0.1)
    ranks = make_ranks(1)
    release = threading.Event()
    monkeypatch.setattr(ranks.groups[0].comm, "destroy", lambda: release.wait(LIMIT_S))
    start_s = time.monotonic()
    ranks.groups[0].close()
    assert time.monotonic() - start_s < 5
    release.set()
