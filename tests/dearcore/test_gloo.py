"""The gloo communicator against naive sums, on 2 to 4 ranks.

Cannot see: speed (bench), links that are slow or break (faults).
"""

from __future__ import annotations

import time
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dearcore import rings
from dearcore.errors import CommunicatorError
from dearcore.gloo import GlooCommunicator
from dearcore.rings import PIECE_BYTES
from dearcore.streams import CpuEvent, CpuStream, InlineStream, Stream
from dearcore.trace import Trace
from tests.support.ranks import Outcome, RankPool, rank, world_size
from tests.support.reference import assert_bit_equal

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMELS = (0, 1, 3, 7, 64, 1000, 4099)
HOST_MEMORY = -1
WAYS = (PIECE_BYTES, 64, 24, HOST_MEMORY)  # over the network in pieces of so many bytes, or through memory


def connect(
    deterministic: bool = False, way: int = PIECE_BYTES, timeout_s: float = 20, name: str = ""
) -> GlooCommunicator:
    """A communicator over the store that `ddp=True` has set up."""
    store = dist.PrefixStore(f"gloo-test/{name}", dist.distributed_c10d._get_default_store())
    timeout, through_memory = timedelta(seconds=timeout_s), way == HOST_MEMORY
    piece_bytes = PIECE_BYTES if through_memory else way
    made = GlooCommunicator(
        store, rank(), world_size(), timeout, deterministic, piece_bytes, use_host_memory=through_memory
    )
    assert made.peers_read == through_memory, "all ranks of a test are on one host"
    return made


def flat_of(communicator: GlooCommunicator, values: Tensor) -> Tensor:
    return communicator.new_flat(values.numel(), values.dtype, values.device).copy_(values)


def inputs(numel: int, dtype: torch.dtype, exact: bool) -> list[Tensor]:
    """Every rank's [size * numel]; integers whose sums are exact in any order, or reals."""
    generator = torch.Generator().manual_seed(numel)
    shape = (world_size() * numel,)
    if exact:
        return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(world_size())]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world_size())]


def shard(flat: Tensor, numel: int) -> Tensor:
    return flat[rank() * numel : (rank() + 1) * numel]


def sum_in_rank_order(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = tensors[0].to(dtype)
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def check_reduce_scatter(deterministic: bool, exact: bool) -> int:
    num_checked = 0
    for way in WAYS:
        communicator = connect(deterministic, way, name=f"{way}")
        for dtype in DTYPES:
            for output_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
                for numel in NUMELS:
                    everyone = inputs(numel, dtype, exact)
                    output = torch.full((numel,), float("nan"), dtype=output_dtype)
                    flat = flat_of(communicator, everyone[rank()])
                    communicator.start_reduce_scatter(output, flat, world_size(), InlineStream(), "reduce_scatter[0]")
                    parts = [shard(tensor, numel) for tensor in everyone]
                    what = f"{dtype} to {output_dtype}, {numel} elements, way {way}"
                    if exact or deterministic or way == HOST_MEMORY:
                        expected = sum_in_rank_order(parts, output_dtype) / world_size()
                        assert_bit_equal(output, expected, names=(what, "the naive sum"))
                    else:
                        expected = sum_in_rank_order([p.double() for p in parts], torch.float64) / world_size()
                        eps = torch.finfo(dtype).eps * world_size()
                        torch.testing.assert_close(output.double(), expected, rtol=eps, atol=4 * eps, msg=what)
                    num_checked += 1
        communicator.close()
    return num_checked


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("deterministic", "exact"), [(False, True), (False, False), (True, False)])
def test_reduce_scatter(pool: RankPool, size: int, deterministic: bool, exact: bool) -> None:
    checked = pool.run(check_reduce_scatter, deterministic, exact, size=size, init=False, ddp=True)
    assert checked == [len(WAYS) * len(NUMELS) * 6] * size


def check_all_gather() -> int:
    num_checked = 0
    for way in WAYS:
        communicator = connect(way=way, name=f"{way}")
        for dtype in DTYPES:
            for numel in NUMELS:
                everyone = inputs(numel, dtype, exact=False)
                expected = torch.cat([t[r * numel : (r + 1) * numel] for r, t in enumerate(everyone)])
                flat = torch.full_like(expected, float("nan"))
                shard(flat, numel).copy_(shard(everyone[rank()], numel))
                communicator.start_all_gather(flat, InlineStream(), "all_gather[0]")
                assert_bit_equal(flat, expected)
                num_checked += 1
        communicator.close()
    return num_checked


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_gather(pool: RankPool, size: int) -> None:
    assert pool.run(check_all_gather, size=size, init=False, ddp=True) == [len(WAYS) * len(NUMELS) * 4] * size


def all_reduced(deterministic: bool, way: int, numel: int, dtype: torch.dtype, wide: bool) -> tuple[Tensor, Tensor]:
    communicator = connect(deterministic, way)
    per_rank = -(-numel // world_size())
    everyone = inputs(per_rank, dtype, exact=True)
    output = torch.full((numel,), float("nan"), dtype=torch.float32 if wide else dtype)
    flat = flat_of(communicator, everyone[rank()])
    communicator.start_all_reduce(output, flat, world_size(), InlineStream(), "all_reduce[0]")
    communicator.start_combine(torch.zeros(1), "max", InlineStream(), "the flat buffer has been read")
    communicator.close()
    mean = sum_in_rank_order(everyone, output.dtype) / world_size()
    return output, mean.to(dtype).to(output.dtype)[:numel]  # across the wire in the dtype of the input


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("deterministic", "way"), [(False, 64), (True, 64), (False, HOST_MEMORY)])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.float64, False), (torch.bfloat16, True)])
def test_all_reduce(pool: RankPool, size: int, deterministic: bool, way: int, dtype: torch.dtype, wide: bool) -> None:
    results = pool.run(all_reduced, deterministic, way, 101, dtype, wide, size=size, init=False, ddp=True)
    for got, expected in results:
        assert_bit_equal(got, expected)
    assert_bit_equal([got for got, _ in results], [results[0][0]] * size)


def other_collectives(way: int) -> dict[str, Any]:
    communicator, stream = connect(way=way), InlineStream()
    total = torch.tensor([1.0 + rank(), 1e8 if rank() == 0 else 1.0])
    communicator.start_combine(total, "sum", stream, "sum")
    largest = torch.tensor([rank(), -rank()])
    communicator.start_combine(largest, "max", stream, "max")
    broadcasts = []
    for root in range(world_size()):
        for value in (torch.arange(5.0) * (rank() + 1), torch.tensor(rank() + 1), torch.ones(0), torch.ones(2, 2) == 1):
            communicator.start_broadcast(value, root, stream, "broadcast")
            broadcasts.append(value)
    objects: list[Any] = []
    communicator.start_gather_objects({"rank": rank(), "text": "x" * rank() * 1000}, objects, stream, "agreement")
    nothing: list[Any] = []
    communicator.start_gather_objects(None, nothing, stream, "agreement")
    many = torch.full((30_000,), rank())  # more than a message holds
    communicator.start_combine(many, "sum", stream, "sum")
    assert many.eq(sum(range(world_size()))).all()
    private = torch.arange(2.0 * world_size()) * (rank() + 1)  # not a flat buffer of the communicator
    shard_of_sum = torch.empty(2)
    communicator.start_reduce_scatter(shard_of_sum, private.clone(), 1, stream, "reduce_scatter")
    whole = torch.empty(private.numel())
    communicator.start_all_reduce(whole, private.clone(), 1, stream, "all_reduce")
    assert_bit_equal(whole, torch.arange(2.0 * world_size()) * sum(range(1, world_size() + 1)))
    assert_bit_equal(shard_of_sum, whole.view(world_size(), -1)[rank()])
    communicator.close()
    return {"total": total, "largest": largest, "broadcasts": broadcasts, "objects": objects, "nothing": nothing}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", [64, HOST_MEMORY])
def test_small_collectives(pool: RankPool, size: int, way: int) -> None:
    results = pool.run(other_collectives, way, size=size, init=False, ddp=True)
    for result in results:
        assert_bit_equal(result["total"], torch.tensor([sum(range(1, size + 1)), 1e8]).float())
        assert result["largest"].tolist() == [size - 1, 0]
        assert [o["rank"] for o in result["objects"]] == list(range(size))
        assert [len(o["text"]) for o in result["objects"]] == [1000 * r for r in range(size)]
        assert result["nothing"] == [None] * size
        for root in range(size):
            vector, number, empty, flags = result["broadcasts"][4 * root : 4 * root + 4]
            assert vector.tolist() == [v * (root + 1) for v in range(5)]
            assert number.item() == root + 1
            assert empty.numel() == 0
            assert flags.all()


def determinism(way: int, split: bool) -> list[Tensor]:
    """The same sums in one collective or in three."""
    communicator = connect(deterministic=way != HOST_MEMORY, way=way)
    numel, reduced = 999, []
    everyone = inputs(numel, torch.float32, exact=False)
    mine = everyone[rank()].view(world_size(), numel)
    for cut in [slice(0, 999)] if not split else [slice(0, 10), slice(10, 500), slice(500, 999)]:
        output = torch.empty(cut.stop - cut.start)
        flat = flat_of(communicator, mine[:, cut].reshape(-1))
        communicator.start_reduce_scatter(output, flat, world_size(), InlineStream(), "reduce_scatter[0]")
        reduced.append(output)
    communicator.close()
    return [torch.cat(reduced)]


def test_deterministic_sums_do_not_depend_on_how_buckets_are_cut(pool: RankPool) -> None:
    ways = [
        pool.run(determinism, way, split, size=3, init=False, ddp=True)
        for way, split in ((PIECE_BYTES, False), (64, False), (PIECE_BYTES, True), (HOST_MEMORY, True))
    ]
    for way in ways[1:]:
        assert_bit_equal(way, ways[0])


def bytes_of_both_halves(deterministic: bool, way: int, numel: int, dtype: torch.dtype) -> list[int]:
    communicator, sent = connect(deterministic, way), []
    flat = flat_of(communicator, torch.ones(world_size() * numel, dtype=dtype))
    output = torch.empty(numel, dtype=dtype)
    communicator.start_reduce_scatter(output, flat, world_size(), InlineStream(), "reduce_scatter[0]")
    sent.append(communicator.bytes_sent)
    communicator.start_all_gather(flat, InlineStream(), "all_gather[0]")
    sent.append(communicator.bytes_sent)
    communicator.close()
    return sent


@pytest.mark.parametrize(("deterministic", "way"), [(False, 64), (True, 64), (False, HOST_MEMORY)])
@pytest.mark.parametrize(("size", "numel", "dtype"), [(2, 7, torch.float32), (4, 33, torch.bfloat16)])
def test_bytes_sent(pool: RankPool, deterministic: bool, way: int, size: int, numel: int, dtype: torch.dtype) -> None:
    half = (size - 1) * numel * dtype.itemsize  # (P - 1)/P of the buffer
    sent = pool.run(bytes_of_both_halves, deterministic, way, numel, dtype, size=size, init=False, ddp=True)
    assert sent == [[half, 2 * half]] * size


def back_to_back(way: int, num_collectives: int) -> Tensor:
    """Many collectives enqueued at once on a stream, ranks running apart."""
    communicator, stream = connect(way=way), CpuStream("communication", Trace())
    outputs = [torch.empty(50) for _ in range(num_collectives)]
    for number, output in enumerate(outputs):
        if number % 7 == rank():
            stream.run("dawdle", lambda: time.sleep(0.002))
        flat = flat_of(communicator, torch.full((50 * world_size(),), float(number * (rank() + 1))))
        communicator.start_reduce_scatter(output, flat, 1, stream, f"reduce_scatter[{number}] in step {number}")
        communicator.start_all_gather(flat, stream, f"all_gather[{number}] in step {number}")
    done = CpuEvent()
    stream.record(done)
    done.wait_host()
    stream.close()
    communicator.close()
    return torch.stack([output[0] for output in outputs])


@pytest.mark.parametrize("way", [64, HOST_MEMORY])
def test_collectives_in_a_row_do_not_mix(pool: RankPool, way: int) -> None:
    expected = torch.arange(60) * 6.0  # 1 + 2 + 3
    assert_bit_equal(pool.run(back_to_back, way, 60, size=3, init=False, ddp=True), [expected] * 3)


def begun_early(way: int, radix: int) -> None:
    """Combinations begin before a reduce-scatter and end after it, in turn with others that begin at once."""
    communicator = connect(way=way)
    with unittest.mock.patch.object(rings, "RADIX", radix):
        check_begun_early(communicator)
    communicator.close()


def check_begun_early(communicator: GlooCommunicator) -> None:
    generator = torch.Generator().manual_seed(7)
    for turn in range(4):
        everyone = torch.randint(0, 100, (world_size(), 11 + turn), generator=generator)
        tensors = {op: everyone[rank()].clone() for op in ("max", "min", "sum")}
        ends = [communicator.begin_combine(tensor, op, "agreement in step 1") for op, tensor in tensors.items()]
        flat, output = flat_of(communicator, torch.full((2 * world_size(),), 1.0 + rank())), torch.zeros(2)
        at_once = everyone[rank()].clone()
        communicator.start_combine(at_once, "max", InlineStream(), "agreement in step 1")
        communicator.start_reduce_scatter(output, flat, 1, InlineStream(), "reduce_scatter[0] in step 1")
        for end in ends:
            end()
        assert_bit_equal(output, torch.full((2,), sum(range(world_size() + 1)) * 1.0))
        expected = {"max": everyone.amax(0), "min": everyone.amin(0), "sum": everyone.sum(0)}
        assert_bit_equal(tensors, expected)
        assert_bit_equal(at_once, expected["max"])


# radix 2: a second round over the network, in which one of three ranks hears of some twice
@pytest.mark.parametrize(
    ("size", "way", "radix"), [(2, 64, 4), (3, 64, 4), (4, 64, 4), (3, 64, 2), (4, 64, 2), (3, HOST_MEMORY, 4)]
)
def test_a_combination_may_begin_before_others(pool: RankPool, size: int, way: int, radix: int) -> None:
    pool.run(begun_early, way, radix, size=size, init=False, ddp=True)


def begun_alone() -> str:
    """Rank 1 never begins. Only the end of it fails, with the label."""
    communicator = connect(timeout_s=1.0)
    if rank() == 1:
        time.sleep(2.0)
        communicator.close()
        return ""
    end = communicator.begin_combine(torch.zeros(3), "max", "agreement in step 1")
    try:
        end()
    except CommunicatorError as error:
        communicator.close()
        return str(error)
    return "no error"


def test_a_combination_that_others_do_not_begin_fails_at_its_end(pool: RankPool) -> None:
    texts = pool.run(begun_alone, size=2, init=False, ddp=True)
    assert "rank 0 of 2: agreement in step 1 failed" in texts[0]


# What differs between ranks must not mix


def mismatched(what: str, way: int) -> str:
    """Rank 0 and rank 1 start different collectives of the same size. Returns the error's text."""
    communicator, stream = connect(way=way, timeout_s=1.5), InlineStream()
    flat, output = flat_of(communicator, torch.full((8,), float(rank() + 1))), torch.full((4,), float("nan"))
    first = rank() == 0

    def reduce(bucket: int, step: int = 0, into: Stream = stream) -> None:
        communicator.start_reduce_scatter(output, flat, 2, into, f"reduce_scatter[{bucket}] (a) in step {step}")

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "two buckets": (lambda: reduce(0), lambda: reduce(1)),
        "two kinds": (
            lambda: reduce(0),
            lambda: communicator.start_all_gather(flat, stream, "all_gather[0] (a) in step 0"),
        ),
        "one rank is ahead": (lambda: (reduce(0), reduce(0, 1))[0], lambda: reduce(0)),
        "one rank stays away": (lambda: reduce(0), lambda: time.sleep(2.5)),
    }
    start_s = time.monotonic()
    try:
        ways[what][0 if first else 1]()
        text = ""
    except CommunicatorError as error:
        text = str(error)
        assert communicator.failed
    assert time.monotonic() - start_s < 10
    communicator.close()
    return text


@pytest.mark.parametrize("what", ["two buckets", "two kinds"])
@pytest.mark.parametrize("way", [64, HOST_MEMORY])
def test_different_collectives_are_an_error_on_both_ranks(pool: RankPool, what: str, way: int) -> None:
    texts = pool.run(mismatched, what, way, size=2, init=False, ddp=True)
    assert "rank 0 of 2: reduce_scatter[0] (a) in step 0 failed" in texts[0]
    assert "rank 1 of 2" in texts[1]


@pytest.mark.parametrize(("what", "step"), [("one rank is ahead", 1), ("one rank stays away", 0)])
@pytest.mark.parametrize("way", [64, HOST_MEMORY])
def test_a_rank_without_a_partner_is_an_error(pool: RankPool, what: str, step: int, way: int) -> None:
    texts = pool.run(mismatched, what, way, size=2, init=False, ddp=True)
    assert f"rank 0 of 2: reduce_scatter[0] (a) in step {step} failed" in texts[0]
    assert texts[1] == ""


def different_sizes(way: int) -> str:
    communicator = connect(way=way, timeout_s=1.5)
    numel = 8 if rank() == 0 else 12
    output = torch.full((numel // 2,), float("nan"))
    flat = flat_of(communicator, torch.ones(numel))
    communicator.start_reduce_scatter(output, flat, 2, InlineStream(), "reduce_scatter[0] in step 0")
    communicator.close()
    return f"no error, {output.tolist()}"


@pytest.mark.parametrize("way", [64, HOST_MEMORY])
def test_buffers_of_different_sizes_are_an_error(pool: RankPool, way: int) -> None:
    results = pool.run(different_sizes, way, size=2, init=False, ddp=True, expect_errors=True)
    assert any(isinstance(result, Outcome) and result.is_a("CommunicatorError") for result in results), results


def cannot_connect() -> str:
    try:
        if rank() == 0:
            connect(timeout_s=1.0)
    except CommunicatorError as error:
        return str(error)
    return ""


def test_a_rank_that_never_comes_is_an_error_at_connection(pool: RankPool) -> None:
    texts = pool.run(cannot_connect, size=2, init=False, ddp=True)
    assert "rank 0 of 2: gloo could not connect" in texts[0]
