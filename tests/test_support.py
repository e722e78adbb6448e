"""The pool of ranks, the references and the comparisons that other tests stand on.

Cannot see: whether `dear` shuts down well between runs (nothing here calls it).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import ROOT
from tests.support.ranks import (
    Outcome,
    RankDied,
    RankError,
    RankHang,
    RankPool,
    assert_raised,
    rank,
    world_size,
)
from tests.support.reference import (
    TOLERANCES,
    IntegerModel,
    OddMLP,
    ReusedModel,
    TiedModel,
    TinyConv,
    UnusedModel,
    assert_bit_equal,
    assert_close,
    assert_same_on_all_ranks,
    ddp_steps,
    integer_batches,
    make_batches,
    mean_in_rank_order,
    mse_loss,
    optimizer_of,
    reference_steps,
    weighted_sum_loss,
)

SGD = optimizer_of(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    with RankPool(max_ranks=4) as pool:
        yield pool


# What ranks run: at module level, where ranks can import it.


def where_am_i(greeting: str, punctuation: str = "?") -> tuple[str, int, int, int]:
    return greeting + punctuation, rank(), world_size(), os.getpid()


def sum_of_ranks() -> torch.Tensor:
    total = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(total)
    return total


def scaled(tensor: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensor *= rank() + 1
    return {"tensor": tensor, "weight": next(iter(model.parameters())) * (rank() + 1)}


def fail_on(ranks: tuple[int, ...]) -> int:
    if rank() in ranks:
        raise ArithmeticError(f"rank {rank()} will not")
    return rank()


def fail_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise KeyError("the first cause")
    dist.all_reduce(torch.ones(3))


def hang_on(ranks: tuple[int, ...]) -> int:
    while rank() in ranks:
        time.sleep(0.05)
    return rank()


def die_on(ranks: tuple[int, ...], how: str) -> int:
    if rank() in ranks:
        print("my last words", flush=True)
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        time.sleep(60)
    return rank()


def unpicklable() -> object:
    return lambda: None


def talk() -> None:
    print(f"rank {rank()} says hello")


def skip_here() -> None:
    pytest.skip("no such device")


def change_process_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["RANK_POOL_TEST"] = "left over"
    os.chdir("/")


def process_state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        os.environ.get("RANK_POOL_TEST"),
        os.environ.get("FROM_THE_TEST"),
        os.getcwd(),
        dist.is_initialized(),
        torch.rand(1).item(),
        random.random(),
    )


# Results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_by_rank_and_ranks_stay_alive(own_pool: RankPool, size: int) -> None:
    first = own_pool.run(where_am_i, "hello", size=size, init=False, punctuation="!")
    assert [result[:3] for result in first] == [("hello!", r, size) for r in range(size)]
    assert len(own_pool.pids) <= max(size, 4)
    second = own_pool.run(where_am_i, "hello", size=size, init=False)
    assert [result[3] for result in second] == [result[3] for result in first] == own_pool.pids[:size]


def test_only_as_many_ranks_start_as_a_run_needs() -> None:
    with RankPool(max_ranks=3) as pool:
        assert pool.pids == []
        pool.run(where_am_i, "", size=2, init=False)
        pids = pool.pids
        assert len(pids) == 2
        pool.run(where_am_i, "", size=3, init=False)
        assert pool.pids[:2] == pids
        assert len(pool.pids) == 3


@pytest.mark.parametrize("size", [2, 4, 2, 1])
def test_each_run_has_fresh_process_groups_and_starts_at_once(own_pool: RankPool, size: int) -> None:
    for _ in range(8):
        start = time.monotonic()
        results = own_pool.run(sum_of_ranks, size=size, init=False, ddp=True)
        assert time.monotonic() - start < 4, "name lookups? see _NO_NAME_SERVER"
        assert [result.tolist() for result in results] == [[sum(range(size))] * 3] * size


def test_tensors_and_models_travel_by_value(own_pool: RankPool) -> None:
    tensor, model = torch.arange(5.0), OddMLP()
    results = own_pool.run(scaled, tensor, model, size=2, init=False)
    assert_bit_equal([result["tensor"] for result in results], [torch.arange(5.0), 2 * torch.arange(5.0)])
    assert_bit_equal(tensor, torch.arange(5.0))
    assert_bit_equal(results[1]["weight"], 2 * next(iter(model.parameters())))


def test_a_run_leaves_no_trace_in_the_next(own_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "seen")
    before = own_pool.run(process_state, init=False)
    own_pool.run(change_process_state, init=False, ddp=True)
    after = own_pool.run(process_state, init=False)
    assert before == after
    assert after[0] == after[1], "seeds are the same on all ranks"
    assert after[0][:8] == (torch.float32, False, True, 1, None, "seen", os.getcwd(), False)


def test_output_of_ranks_is_printed_by_the_test(own_pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    own_pool.run(talk, init=False)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] rank 0 says hello", "[rank 1] rank 1 says hello"]


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    with RankPool(max_ranks=2) as pool:
        with pytest.raises(ValueError, match="1 to 2 ranks"):
            pool.run(where_am_i, "", size=3)
        with pytest.raises(ValueError, match="not a module-level function"):
            pool.run(lambda: None)
        with pytest.raises(ValueError, match=r"expect_lost=\[2\]"):
            pool.run(where_am_i, "", expect_lost=[2])
        assert pool.pids == []


# Failures


def test_an_exception_names_its_ranks_and_shows_every_traceback(own_pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        own_pool.run(fail_on, (0, 2), size=3, init=False)
    text = str(caught.value)
    assert "ranks 0, 2 of 3" in text
    assert "ArithmeticError: rank 0 will not" in text
    assert "ArithmeticError: rank 2 will not" in text
    assert "in fail_on" in text
    assert caught.value.ranks == (0, 2)
    assert caught.value.outcomes[1] == 1
    assert own_pool.run(fail_on, (), size=3, init=False) == [0, 1, 2]


def test_expected_errors_are_outcomes(own_pool: RankPool) -> None:
    results = own_pool.run(fail_on, (1,), init=False, expect_errors=True)
    assert results[0] == 0
    assert isinstance(results[1], Outcome)
    assert (results[1].error_type_name, results[1].message) == ("ArithmeticError", "rank 1 will not")
    assert_raised(results, "Exception", match="will not", ranks=[1])
    with pytest.raises(AssertionError, match="rank 0 raised nothing"):
        assert_raised(results, "ArithmeticError")
    pids = own_pool.pids
    own_pool.run(fail_on, (), init=False)
    assert own_pool.pids == pids, "a library must survive the errors that it is expected to raise"


def test_the_first_cause_is_told_and_waiting_ranks_are_freed(own_pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="KeyError: 'the first cause'"):
        own_pool.run(fail_while_others_wait, init=False, ddp=True, group_timeout_s=30)
    assert time.monotonic() - start < 15, "rank 1 waited for its group's timeout"


def test_a_result_that_cannot_travel_is_an_error(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match="lambda"):
        own_pool.run(unpicklable, init=False, size=1)


def test_a_skip_in_ranks_skips_the_test(own_pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        own_pool.run(skip_here, init=False)


def test_a_hang_is_named_with_its_stack_and_replaced(own_pool: RankPool) -> None:
    own_pool.run(where_am_i, "", init=False)
    pids = own_pool.pids
    with pytest.raises(RankHang) as caught:
        own_pool.run(hang_on, (1,), init=False, timeout_s=0.5)
    text = str(caught.value)
    assert "rank 1 of 2 did not finish" in text
    assert "within 0.5 s" in text
    assert "in hang_on" in text
    assert "rank 0: returned" in text
    assert caught.value.ranks == (1,)
    assert not any(is_alive(pid) for pid in pids)
    start = time.monotonic()
    assert own_pool.run(hang_on, (), init=False) == [0, 1]
    assert time.monotonic() - start < 3, "replacing ranks should not import torch again"


@pytest.mark.parametrize(("how", "text"), [("kill", "killed by SIGKILL"), ("exit", "exited with code 7")])
def test_a_death_is_named_with_its_last_words(own_pool: RankPool, how: str, text: str) -> None:
    with pytest.raises(RankDied) as caught:
        own_pool.run(die_on, (1,), how, size=3, init=False)
    assert f"rank 1 of 3 died in {__name__}.die_on: {text}" in str(caught.value)
    assert "my last words" in str(caught.value)
    assert caught.value.outcomes[0] == 0
    assert own_pool.run(die_on, (), how, size=3, init=False) == [0, 1, 2]


def test_a_death_frees_ranks_that_wait_for_it(own_pool: RankPool) -> None:
    with pytest.raises(RankDied) as caught:
        own_pool.run(die_before_collective, init=False, ddp=True)
    assert caught.value.ranks == (0,)


def die_before_collective() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("how", "name"), [("kill", "RankDied"), ("stop", "RankHang")])
def test_expected_losses_leave_the_survivors_results(own_pool: RankPool, how: str, name: str) -> None:
    results = own_pool.run(die_on, (1,), how, size=3, init=False, expect_lost=[1])
    assert (results[0], results[2]) == (0, 2)
    assert results[1].error_type_name == name
    assert own_pool.run(die_on, (), how, size=3, init=False) == [0, 1, 2]


def test_a_rank_killed_between_runs_is_replaced(own_pool: RankPool) -> None:
    own_pool.run(where_am_i, "", init=False)
    pid = own_pool.pids[0]
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)
    results = own_pool.run(where_am_i, "", init=False)
    assert [result[1] for result in results] == [0, 1]


def test_nothing_outlives_a_parent_that_is_killed_in_the_middle_of_a_hang(tmp_path: Path) -> None:
    script = (
        "from tests.support.ranks import RankPool; import tests.test_support as t\n"
        "pool = RankPool(); pool.run(t.where_am_i, '', init=False)\n"
        "print(*pool.pids, pool._nursery._process.pid, flush=True)\n"
        "pool.run(t.hang_on, (0, 1), init=False)\n"
    )
    command = [sys.executable, "-c", script]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent cannot remove its logs
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


def test_ctrl_c_ends_ranks_and_leaves_the_pool_usable(own_pool: RankPool) -> None:
    own_pool.run(where_am_i, "", init=False)
    pids = own_pool.pids

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    remaining = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's own use of this timer
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            own_pool.run(hang_on, (0, 1), init=False)
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *remaining)
    assert not any(is_alive(pid) for pid in pids)
    assert own_pool.run(hang_on, (), init=False) == [0, 1]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# References


@pytest.mark.parametrize("model_class", [OddMLP, TinyConv, TiedModel, UnusedModel, ReusedModel])
def test_ddp_on_two_ranks_equals_the_reference_bit_for_bit(own_pool: RankPool, model_class: type) -> None:
    model = model_class()
    batches = make_batches(model, num_ranks=2, num_steps=3)
    expected = reference_steps(model, SGD, batches, mse_loss)
    got = own_pool.run(
        ddp_steps, model, SGD, batches, mse_loss, find_unused_parameters=True, size=2, init=False, ddp=True
    )
    assert_bit_equal(got, expected, names=("DDP", "reference"))
    assert_same_on_all_ranks([dict(trained.parameters) for trained in got])


def test_accumulation_is_the_mean_of_sums(own_pool: RankPool) -> None:
    model = OddMLP()
    batches = make_batches(model, num_ranks=2, num_steps=2, num_backwards=3)
    expected = reference_steps(model, SGD, batches, mse_loss)
    got = own_pool.run(ddp_steps, model, SGD, batches, mse_loss, size=2, init=False, ddp=True)
    assert_bit_equal(got, expected)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_integer_gradients_are_exact_at_any_world_size(own_pool: RankPool, num_ranks: int) -> None:
    model = IntegerModel()
    batches = integer_batches(model, num_ranks=num_ranks, num_steps=3)
    expected = reference_steps(model, SGD, batches, weighted_sum_loss)
    for scale in ("multiply", "divide"):
        again = reference_steps(model, SGD, batches, weighted_sum_loss, scale=scale)
        assert_bit_equal(again, expected)
    got = own_pool.run(ddp_steps, model, SGD, batches, weighted_sum_loss, size=num_ranks, init=False, ddp=True)
    assert_bit_equal(got, expected)


def test_other_gradients_agree_within_the_table(own_pool: RankPool) -> None:
    model = OddMLP()
    batches = make_batches(model, num_ranks=4, num_steps=3)
    expected = reference_steps(model, SGD, batches, mse_loss)
    got = own_pool.run(ddp_steps, model, SGD, batches, mse_loss, size=4, init=False, ddp=True)
    assert_close([t.states for t in got], [t.states for t in expected], TOLERANCES["summation order"])


def test_mean_in_rank_order() -> None:
    grads = [torch.tensor([1.0, 1e8]), torch.tensor([2.0, 1.0]), torch.tensor([3.0, -1e8])]
    assert mean_in_rank_order(grads).tolist() == [2.0, 0.0]  # 1e8 + 1 is 1e8 in fp32
    assert mean_in_rank_order([None, torch.tensor([3.0]), None]).tolist() == [1.0]
    assert mean_in_rank_order([None, None]) is None
    half = [torch.tensor([40000.0], dtype=torch.float16)] * 2
    assert mean_in_rank_order(half).tolist() == [40000.0]


def test_the_reference_leaves_the_model_alone() -> None:
    model = OddMLP()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = reference_steps(model, SGD, make_batches(model, num_ranks=2, num_steps=1), mse_loss)
    assert_bit_equal(dict(model.state_dict()), before)
    with pytest.raises(AssertionError):
        assert_bit_equal(trained[0].states[0], before)


# Comparisons


def test_bit_equality_says_where_and_how_much() -> None:
    a = {"w": torch.zeros(2, 3), "b": torch.ones(3)}
    b = {"w": torch.zeros(2, 3), "b": torch.ones(3)}
    assert_bit_equal(a, b)
    b["w"][1, 2] = 0.5
    b["w"][0, 1] = 0.25
    message = r"\['w'\]: 2 of 6 elements differ.*max abs diff 0\.5.*first at \(0, 1\): ours 0\.0, DDP 0\.25"
    with pytest.raises(AssertionError, match=message):
        assert_bit_equal(a, b, names=("ours", "DDP"))
    with pytest.raises(AssertionError, match="rank 1 and rank 0"):
        assert_same_on_all_ranks([a, b])


@pytest.mark.parametrize(
    ("got", "expected", "match"),
    [
        (torch.zeros(2), torch.zeros(3), "shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        ({"a": 1}, {"b": 1}, "keys"),
        ([1, 2], [1], "length"),
        ([1.0], [2.0], r"\[0\]"),
        (torch.tensor([float("nan")]), torch.tensor([0.0]), "1 of 1"),
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor(2.0)), "1 of 1"),
        (torch.zeros(2), None, "NoneType"),
    ],
)
def test_bit_equality_refuses(got: object, expected: object, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        assert_bit_equal(got, expected)


def test_bit_equality_takes_nan_for_nan_and_empty_tensors() -> None:
    assert_bit_equal(torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0]))
    assert_bit_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_bit_equal(torch.tensor([True]), torch.tensor([True]))


def test_closeness_gives_its_reason() -> None:
    with pytest.raises(AssertionError, match=TOLERANCES["clip"].reason[:20]):
        assert_close({"w": torch.ones(2)}, {"w": torch.full((2,), 1.1)}, TOLERANCES["clip"])
