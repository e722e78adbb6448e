"""The worked examples of the docstrings, on the twins and on the public functions."""

import pytest

import dear_kernels
from dear_kernels import reference
from tests.kernels import kernel_cases


@pytest.mark.parametrize("module", [reference, dear_kernels], ids=["reference", "public"])
@pytest.mark.parametrize(
    ("check", "function"),
    [
        (kernel_cases.check_pack_example, "pack_"),
        (kernel_cases.check_unpack_example, "unpack_"),
        (kernel_cases.check_sgd_example, "sgd_step_"),
        (kernel_cases.check_adam_example, "adam_step_"),
        (kernel_cases.check_norm_example, "norm_stats"),
        (kernel_cases.check_sum_rows_example, "sum_rows_"),
    ],
    ids=["pack", "unpack", "sgd", "adam", "norm", "sum_rows"],
)
def test_worked_example(module, check, function):
    check(getattr(module, function))
