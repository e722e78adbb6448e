"""The norm twin."""

import threading

import pytest
import torch

from dear_kernels import found_nonfinite, norm_stats, reference, sum_of_squares
from tests.kernels.kernel_cases import DTYPES

NONFINITE = (float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
def test_sum_of_squares(monkeypatch, dtype, numel):
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 64)
    torch.manual_seed(0)
    shard = torch.randn(numel).to(dtype)
    result = sum_of_squares(shard)
    assert result.shape == () and result.dtype == torch.float64
    torch.testing.assert_close(result, shard.double().square().sum(), rtol=1e-14, atol=0)
    assert found_nonfinite(shard).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("position", [0, 63, 64, 999])
def test_one_bad_element_is_found(monkeypatch, dtype, value, position):
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 64)
    shard = torch.ones(1000, dtype=dtype)
    shard[position] = value
    found = found_nonfinite(shard)
    assert found.shape == () and found.dtype == torch.float32 and found.item() == 1.0


def test_large_finite_values_are_finite():
    assert found_nonfinite(torch.tensor([3e38, -3e38])).item() == 0.0
    assert sum_of_squares(torch.tensor([1e30])).item() == pytest.approx(1e60)
    assert norm_stats(torch.tensor([1e200], dtype=torch.float64)).tolist() == [float("inf"), 0.0]


def test_out_receives_both():
    out = torch.empty(2, dtype=torch.float64)
    assert norm_stats(torch.tensor([3.0, 4.0]), out=out) is out
    assert out.tolist() == [25, 0]
    with pytest.raises(ValueError, match="expected float64"):
        norm_stats(torch.ones(2), out=torch.empty(2))
    with pytest.raises(ValueError, match="expected contiguous"):
        norm_stats(torch.ones(4)[::2])


def test_threads_do_not_share_work_space():
    shards = [torch.full((200_000,), float(value)) for value in range(1, 5)]
    wrong = []

    def work(shard, value):
        for _ in range(10):
            if sum_of_squares(shard).item() != 200_000 * value**2:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(s, v)) for v, s in enumerate(shards, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
