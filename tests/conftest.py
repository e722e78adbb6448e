"""Seeds and threads for every test. The time limit of one test is `timeout` in pyproject.toml."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores, and one thread sums in one order

import random
import signal

import numpy as np
import pytest
import torch

pytest_plugins = ["tests.support.fixtures"]

try:
    import hypothesis
except ImportError:  # a GPU machine may lack it; tests/gpu needs pytest alone
    pass
else:
    # The same examples in every run (others: --hypothesis-profile default), and no deadline per example: a busy machine
    # would fail it.
    hypothesis.settings.register_profile("dear", derandomize=True, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("dear")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a script: processes of the tests would inherit it, and Ctrl-C is what some test.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of random, numpy and torch, set before each test")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (change it with --seed)"


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
