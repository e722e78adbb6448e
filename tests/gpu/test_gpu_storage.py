"""Storage objects over a part of a CUDA buffer: what `dearcore.storage.own_storage` says of them by reading torch."""

import io

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

from dearcore.storage import own_storage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LONG_CYCLES = 400_000_000  # some 200 ms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_own_storage_is_the_same_memory_and_no_longer(dtype):
    flat = torch.arange(64.0, device="cuda").to(dtype)
    for shape, strides in (((3, 5), (5, 1)), ((3, 5), (1, 3)), ((3, 1, 2), (2, 77, 1)), ((), ())):
        view = flat.as_strided(shape, strides, 17)
        own = own_storage(view)
        assert (own.shape, own.stride(), own.dtype, own.device) == (view.shape, view.stride(), dtype, flat.device)
        assert own.data_ptr() == view.data_ptr() == own.untyped_storage().data_ptr()
        assert own.untyped_storage().nbytes() == view.numel() * dtype.itemsize
        own.add_(1)
        assert torch.equal(view, own)
    empty = own_storage(flat.as_strided((0, 3), (3, 1), 5))
    assert empty.is_cuda and empty.untyped_storage().nbytes() == 0


def test_own_storage_waits_for_nothing_and_keeps_the_buffer():
    flat = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    flat.fill_(3)
    asleep = torch.cuda.Event()
    asleep.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        own = own_storage(flat[100:200])
        passed = torch.cuda.Event()
        passed.record()
        passed.synchronize()
        assert not asleep.query(), "neither the host nor the other stream has waited"
    before = torch.cuda.memory_allocated()
    del flat
    assert torch.cuda.memory_allocated() == before
    junk = torch.zeros(1 << 20, device="cuda")
    assert own.eq(3).all()
    del own, junk
    assert torch.cuda.memory_allocated() < before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_own_storage_does_not_ask_for_the_current_device():
    flat = torch.zeros(64, device="cuda:1")
    with torch.cuda.device(0):
        assert own_storage(flat[3:5]).device == flat.device


def test_own_storage_is_saved_alone_and_sent_only_as_a_clone():
    flat = torch.zeros(1 << 20, device="cuda")
    own = own_storage(flat[100:200])
    file = io.BytesIO()
    torch.save(own, file)
    assert len(file.getvalue()) < 4000
    own.share_memory_()  # CUDA memory always is
    assert own.data_ptr() == flat[100:].data_ptr()
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        reduce_tensor(own)
    reduce_tensor(own.clone())
    own.record_stream(torch.cuda.Stream())
