"""Storage objects over a part of a buffer, overlaps, and writing where elements share memory."""

import gc
import weakref

import pytest
import torch

from dearcore.storage import overlap, overlaps_itself, own_storage, put_values, span_bytes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = {  # shape, strides
    "plain": ((3, 5), (5, 1)),
    "transposed": ((3, 5), (1, 3)),
    "channels_last": ((2, 3, 2, 2), (12, 1, 6, 3)),
    "one_element": ((1, 1), (7, 9)),
    "ones_inside": ((3, 1, 2), (2, 77, 1)),
    "number": ((), ()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_storage_is_the_same_memory_and_no_longer(layout, dtype):
    shape, strides = LAYOUTS[layout]
    flat = torch.arange(64.0).to(dtype)
    view = flat.as_strided(shape, strides, 17)
    own = own_storage(view)
    assert (own.shape, own.stride(), own.dtype, own.device) == (view.shape, view.stride(), dtype, flat.device)
    assert own.data_ptr() == view.data_ptr() == own.untyped_storage().data_ptr() and own.storage_offset() == 0
    assert own.untyped_storage().nbytes() == view.numel() * dtype.itemsize
    own.add_(1)
    assert torch.equal(view, own) and flat[17] == 18
    flat.zero_()
    assert not own.any()
    assert not own.requires_grad and own._version == 1, "a counter of its own"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_own_storage_of_nothing(shape):
    own = own_storage(torch.zeros(64).as_strided(shape, (3,) * len(shape), 5))
    assert own.shape == shape and own.untyped_storage().nbytes() == 0
    assert own.untyped_storage()._cdata != own_storage(own).untyped_storage()._cdata


def test_own_storage_keeps_the_buffer_alive_and_lets_go_of_it():
    flat = torch.arange(1000.0)
    storage = flat.untyped_storage()
    alive = weakref.ref(storage)
    own = own_storage(flat[10:13])
    del flat, storage
    gc.collect()
    junk = [torch.zeros(1000) for _ in range(8)]
    assert own.tolist() == [10.0, 11.0, 12.0] and alive() is not None
    del own, junk
    gc.collect()
    assert alive() is None


def test_own_storage_takes_part_in_autograd():
    param = torch.nn.Parameter(torch.empty(3))
    param.data = own_storage(torch.arange(8.0)[2:5])
    loss = (param * param).sum()
    with torch.no_grad():
        param.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (param * param).sum().backward()
    assert param.grad.tolist() == [6.0, 8.0, 10.0]


def test_own_storage_replaced_by_share_memory_leaves_the_buffer():
    flat = torch.arange(8.0)
    own = own_storage(flat[2:5])
    own.share_memory_()
    own.zero_()
    assert own.is_shared() and not flat.is_shared() and flat.tolist() == list(range(8))
    with pytest.raises(RuntimeError, match="resiz"):
        own_storage(flat[2:5]).untyped_storage().resize_(0)


def test_span_and_overlap():
    matrix = torch.zeros(4, 3)
    start = matrix.data_ptr()
    assert span_bytes(matrix[:, 1]) == (start + 4, start + 4 + 10 * 4)
    assert span_bytes(matrix[1, :1].expand(5)) == (start + 12, start + 16)
    assert overlap(matrix, matrix) and overlap(matrix[0], matrix) and overlap(matrix[:, 1], matrix[2])
    assert not overlap(matrix[:, 0], matrix[:, 1]) and not overlap(matrix[:2], matrix[2:])
    assert overlap(matrix.view(-1)[:6].view(torch.float64), matrix[1:]), "of another dtype: by addresses"
    assert not overlap(matrix, torch.zeros(4, 3))


OVERLAPPING = {
    "expanded": lambda: torch.zeros(1).expand(4),
    "expanded_number": lambda: torch.zeros(()).expand(2, 3),
    "expanded_inside": lambda: torch.zeros(2, 1, 3).expand(2, 5, 3),
    "windows": lambda: torch.zeros(6).unfold(0, 3, 1),
    "expanded_windows": lambda: torch.zeros(6).unfold(0, 3, 2).unsqueeze(1).expand(2, 2, 3),
    "diagonal": lambda: torch.zeros(5).as_strided((3, 3), (1, 1)),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_values_are_put_where_elements_share_memory(kind):
    source, target = OVERLAPPING[kind](), OVERLAPPING[kind]()
    assert overlaps_itself(target)
    memory = source.as_strided((source.untyped_storage().nbytes() // 4,), (1,))
    memory.copy_(torch.arange(1.0, memory.numel() + 1))
    memory[0] = float("nan")
    place = target.data_ptr()
    assert put_values(target, source.clone(memory_format=torch.contiguous_format))
    assert target.data_ptr() == place and torch.equal(target.nan_to_num(-1), source.nan_to_num(-1))
    different = torch.arange(float(target.numel())).view(target.shape)
    assert not put_values(target, different), "elements that share memory cannot differ"


def test_values_are_put_anywhere_else():
    for tensor in (torch.zeros(3, 2), torch.zeros(2, 3).t(), torch.zeros(()), torch.zeros(0, 3), torch.zeros(8)[::3]):
        assert not overlaps_itself(tensor)
        values = torch.arange(1.0, tensor.numel() + 1).view(tensor.shape)
        assert put_values(tensor, values) and torch.equal(tensor, values)
    assert not overlaps_itself(torch.zeros(1).expand(1)) and not overlaps_itself(torch.zeros(0, 1).expand(0, 4))
