"""Kill, stall and exception at random points of training: the others end in time, name the culprit, and never compute
with what is wrong.

Cannot see: a host that is gone with its network, and the store's own host (tests/launchers kills that one).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.injection import NUM_STEPS, Injection, Witness, injection_of, train_until_it_fails
from tests.support.ranks import Outcome, RankPool
from tests.support.reference import IntegerModel, integer_batches, optimizer_of, reference_steps, weighted_sum_loss

# Construction has to be done within it, too; only after a stall does anybody wait for it.
TIMEOUT_S = {"kill": 6.0, "raise": 6.0, "stall": 2.5}
SOAK_TIMEOUT_S = 6.0
MARGIN_S = 5.0
QUICK, SOAK = range(15), range(15, 135)


def check(pool: RankPool, injection: Injection, folder: Path, timeout_s: float) -> None:
    print(injection)
    model = IntegerModel()
    sgd = optimizer_of(torch.optim.SGD, lr=0.125, momentum=0.5)
    batches = integer_batches(model, injection.size, NUM_STEPS)
    expected = reference_steps(model, sgd, batches, weighted_sum_loss)[0].states
    outcomes = pool.run(
        train_until_it_fails,
        injection,
        expected,
        str(folder),
        size=injection.size,
        group_timeout_s=timeout_s,
        timeout_s=40,
        expect_errors=True,
        expect_lost=[] if injection.kind == "raise" else [injection.culprit],
    )
    injected_s = float((folder / "injected").read_text())
    for r, outcome in enumerate(outcomes):
        if r == injection.culprit:
            assert isinstance(outcome, Outcome), f"{injection}: the culprit went on"
            assert (
                outcome.error_type_name
                == {"kill": "RankDied", "stall": "RankHang", "raise": "Injected"}[injection.kind]
            )
            continue
        assert isinstance(outcome, Witness), f"{injection}: rank {r} gave {outcome!r}"
        assert outcome.error_type == "CommunicatorError", outcome.error
        assert not outcome.wrong, f"{injection}: rank {r}: {outcome.wrong}"
        assert outcome.at_s - injected_s <= timeout_s + MARGIN_S, (
            f"{injection}: rank {r} took {outcome.at_s - injected_s}"
        )
        assert f"Rank {injection.culprit} " in outcome.error, f"{injection}: rank {r} says: {outcome.error}"
        others = [x for x in range(injection.size) if x not in (r, injection.culprit)]
        for other in others:
            assert f"Rank {other} is silent" not in outcome.error, f"{injection}: rank {r} blames {outcome.error}"
            assert f"Rank {other} has not joined" not in outcome.error, f"{injection}: rank {r} blames {outcome.error}"
        assert "in step" in outcome.error, outcome.error
        assert outcome.late_step == "CommunicatorError", f"{injection}: step() after the error: {outcome.late_step}"


@pytest.mark.parametrize("seed", QUICK)
def test_injection(pool: RankPool, tmp_path: Path, seed: int) -> None:
    injection = injection_of(seed)
    check(pool, injection, tmp_path, TIMEOUT_S[injection.kind])


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK)
def test_many_injections(pool: RankPool, tmp_path: Path, seed: int) -> None:
    check(pool, injection_of(seed), tmp_path, SOAK_TIMEOUT_S)
