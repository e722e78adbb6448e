"""Shared memory between ranks: handed over, read in place, given back; sockets that fail soon.

The collectives on top of it are in test_gloo.py.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from dearcore.host_memory import Address, Door, HostMemory


@pytest.fixture
def pair() -> Iterator[tuple[HostMemory, HostMemory]]:
    """Two ranks in one process: the sockets hold what one says until the other listens."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (left, right):
        end.settimeout(0.3)
    memories = HostMemory(0, {1: left}), HostMemory(1, {0: right})
    yield memories
    for memory in memories:
        memory.close()


def both(pair: tuple[HostMemory, HostMemory], tensors: list[torch.Tensor], tag: int = 1) -> list[list[torch.Tensor]]:
    """What each rank finds when they meet with one tensor each."""
    found: list[list[torch.Tensor]] = [[], []]

    def meet(rank: int) -> None:
        found[rank] = pair[rank].meet(tag, tensors[rank])

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:dear" in line for line in maps)


def test_peers_read_what_is_written_later(pair: tuple[HostMemory, HostMemory]) -> None:
    tensors = [memory.new_tensor(10, torch.float64)[3:7] for memory in pair]
    found = both(pair, tensors)
    tensors[0].copy_(torch.arange(4.0))
    assert found[1][0].tolist() == [0, 1, 2, 3]
    assert found[1][0].dtype == torch.float64
    assert found[0][0].data_ptr() == tensors[0].data_ptr()
    assert found[1][0].data_ptr() != tensors[0].data_ptr(), "a mapping of its own"


def test_new_tensors_are_zeros_of_any_size(pair: tuple[HostMemory, HostMemory]) -> None:
    for numel in (0, 1, 1025):
        tensor = pair[0].new_tensor(numel, torch.bfloat16)
        assert tensor.shape == (numel,)
        assert not tensor.any()
        assert pair[0].owns(tensor)
        assert not pair[1].owns(tensor)
        assert not pair[0].owns(tensor.clone())


def test_memory_is_given_back_here_and_there(pair: tuple[HostMemory, HostMemory]) -> None:
    before = num_descriptors(), num_mappings()
    for _ in range(5):
        tensors = [memory.new_tensor(1000, torch.float32) for memory in pair]
        both(pair, tensors)
    del tensors
    gc.collect()
    last = [memory.new_tensor(1, torch.float32) for memory in pair]
    both(pair, last)  # tells what was freed
    mapped = 4  # two slabs, each mapped by both ranks; Python keeps a descriptor open with each mapping
    assert (num_descriptors(), num_mappings()) == (before[0] + mapped, before[1] + mapped)


def test_memory_that_no_peer_has_seen_is_given_back(pair: tuple[HostMemory, HostMemory]) -> None:
    before = num_descriptors(), num_mappings()
    tensor = pair[0].new_tensor(1000, torch.float32)
    del tensor
    gc.collect()
    assert (num_descriptors(), num_mappings()) == before


def test_exchange_copies_small_tensors(pair: tuple[HostMemory, HostMemory]) -> None:
    tensors = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]])]
    found: list[list[torch.Tensor]] = [[], []]
    thread = threading.Thread(target=lambda: found.__setitem__(1, pair[1].exchange(5, tensors[1])))
    thread.start()
    found[0] = pair[0].exchange(5, tensors[0])
    thread.join()
    for received in found:
        assert torch.equal(torch.cat(received), torch.tensor([[1, 2], [3, 4]]))


def test_another_collective_is_an_error(pair: tuple[HostMemory, HostMemory]) -> None:
    with pytest.raises(RuntimeError, match="rank 1: timed out"):
        pair[0].meet(1)
    with pytest.raises(RuntimeError, match="rank 0 has started another collective"):
        pair[1].meet(2)


def test_a_peer_that_closes_is_an_error_at_once(pair: tuple[HostMemory, HostMemory]) -> None:
    pair[1].close()
    with pytest.raises(RuntimeError, match="rank 1"):
        pair[0].meet(1)


def test_closing_wakes_who_waits(pair: tuple[HostMemory, HostMemory]) -> None:
    texts: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as caught:
            pair[0].meet(1)
        texts.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    pair[0].close()
    thread.join(timeout=5)
    assert texts


def test_ranks_that_are_not_all_on_one_host_do_not_meet() -> None:
    door = Door()
    elsewhere = Address(door.address.host + "1", "dear-elsewhere")
    assert door.meet(0, [door.address, elsewhere], timedelta(seconds=1)) is None
    cannot = Door()
    assert cannot.meet(0, [cannot.address, Address("", "")], timedelta(seconds=1)) is None


def test_a_peer_that_never_connects_is_an_error() -> None:
    door = Door()
    with pytest.raises(Exception, match="rank 0 of 2: the ranks of this host could not connect"):
        door.meet(0, [door.address, door.address], timedelta(seconds=0.2))
