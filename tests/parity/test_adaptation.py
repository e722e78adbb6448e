"""Plans that follow from measured times, and tuned ones: they train as plain PyTorch does, on ranks that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dear
from dearcore.planners import mg_wfbp
from tests.parity.models import LayerwiseSGD, WideMLP
from tests.parity.trainers import Case, Trainer, check_parity, plain_steps
from tests.support.ranks import RankPool, assert_raised
from tests.support.reference import OddMLP, optimizer_of

SGD = optimizer_of(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = optimizer_of(torch.optim.Adam, lr=0.01)
MEASURED: dict[str, dict[str, Any]] = {
    "horovod": {"schedule": "horovod"},
    "mg-wfbp": {"schedule": "mg-wfbp"},
    "bytescheduler": {"schedule": "bytescheduler"},
    "merge": {"fusion": "merge"},
    "dear-fill": {"schedule": "dear-fill"},
    "dear-fill, 1 KiB": {"schedule": "dear-fill", "fusion": 1 / 1024},
    "dear-fill, merge": {"schedule": "dear-fill", "fusion": "merge"},
    "whole gradients, merge": {"shard": False, "fusion": "merge"},
    "whole gradients, mg-wfbp": {"shard": False, "schedule": "mg-wfbp"},
}
TUNED: dict[str, dict[str, Any]] = {
    "auto": {"fusion": "auto"},
    "dear-fill, auto": {"schedule": "dear-fill", "fusion": "auto"},
    "whole gradients, auto": {"shard": False, "fusion": "auto"},
}
TUNED_STEPS = 104  # 4 before the first trial, 15 trials of 6


def _twice_a_step(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches, 2):
        trainer.zero_grad()
        with trainer.no_sync():
            trainer.backward(index)
        trainer.backward(index + 1)
        trainer.step()


def _two_passes(trainer: Trainer) -> None:
    for index in range(0, trainer.num_batches, 2):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.backward(index + 1)
        trainer.step()


def _clipping(trainer: Trainer) -> None:
    for index in range(trainer.num_batches):
        trainer.zero_grad()
        trainer.backward(index)
        trainer.clip_value(0.01)
        trainer.step()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plans_from_measured_times_train_as_plain_pytorch(pool: RankPool, size: int) -> None:
    cases = {
        name: Case(WideMLP(), ADAM, options=options, num_steps=7, deterministic=size > 2)
        for name, options in MEASURED.items()
    }
    if size == 2:
        cases["no_sync"] = Case(OddMLP(), SGD, _twice_a_step, MEASURED["merge"], num_steps=14)
        accumulating = {"fusion": "merge", "accumulate": 2}
        cases["accumulate"] = Case(OddMLP(), SGD, _two_passes, accumulating, num_steps=14)
        cases["clipping"] = Case(OddMLP(), SGD, _clipping, MEASURED["merge"], num_steps=7)
        whole = optimizer_of(LayerwiseSGD)
        cases["an optimizer of its own"] = Case(OddMLP(), whole, plain_steps, MEASURED["merge"], num_steps=7)
    check_parity(pool, cases, size)


def test_tuning_changes_no_bit(pool: RankPool) -> None:
    cases = {name: Case(WideMLP(), SGD, options=options, num_steps=TUNED_STEPS) for name, options in TUNED.items()}
    check_parity(pool, cases, 2)


def _wrap(model: nn.Module, **options: Any) -> dear.DistributedOptimizer:
    return dear.DistributedOptimizer(SGD(model), model, **options)


def _train(model: nn.Module, optimizer: dear.DistributedOptimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()


def _measured(options: dict[str, Any], num_steps: int = 5) -> dict[str, Any]:
    model = WideMLP()
    optimizer = _wrap(model, **options)
    before = optimizer.profile
    _train(model, optimizer, num_steps)
    tuning = optimizer.stats().tuning
    found = {
        "before": before,
        "profile": optimizer.profile,
        "plan": optimizer.plan,
        "schedule": optimizer.schedule,
        "tuning": tuning,
        "printed": str(optimizer.stats()),
    }
    optimizer.close()
    return found


def test_a_profile_is_measured_and_planned_with(pool: RankPool) -> None:
    for name in ("mg-wfbp", "merge"):
        results = pool.run(_measured, MEASURED[name], size=2)
        profile = results[0]["profile"]
        assert all(r["before"] is None and r["profile"] == profile for r in results), "ranks agree"
        assert profile.world_size == 2 and profile.tf_s > 0 and profile.tb_s > 0
        assert profile.layers[0].fqn.startswith("fc1")
        for link in (profile.reduce_scatter, profile.all_gather, profile.all_reduce):
            assert link.time_s(1_000_000) > 0 and link.residual >= 0
        assert profile.step_s_per_byte > 0 and profile.host_s_per_op > 0
        plans = [(r["plan"], r["schedule"]) for r in results]
        assert plans[0] == plans[1]
        if name == "mg-wfbp":
            specs = profile.specs()
            numbers = {n: i for i, (n, _) in enumerate(WideMLP().named_parameters())}
            expected = mg_wfbp(profile, [replace(spec, index=numbers[spec.fqn]) for spec in specs])
            assert plans[0] == expected
        else:
            assert plans[0][0].fusion == "merged for both halves"


def test_tuning_ends_and_tells_what_it_cost(pool: RankPool) -> None:
    for result in pool.run(_measured, TUNED["auto"], TUNED_STEPS, size=2):
        tuning = result["tuning"]
        assert 1 < len(tuning.trials) <= 15
        assert tuning.chosen == result["plan"].fusion
        assert tuning.num_iterations <= TUNED_STEPS
        assert tuning.lost_s >= 0 and tuning.replanning_s > 0
        assert "tuned in" in result["printed"] and tuning.chosen in result["printed"]


def _measure_on_request() -> list[Any]:
    model = OddMLP()
    optimizer = _wrap(model)
    optimizer.measure()
    try:
        optimizer.measure()
    except dear.ScheduleError as error:
        refused = str(error)
    _train(model, optimizer, 4)
    result = [optimizer.profile, refused]
    optimizer.measure()  # and again
    _train(model, optimizer, 1)
    optimizer.close()  # in the middle of it
    assert all(type(p) is nn.Parameter for p in model.parameters()) and not model._forward_hooks
    return result


def test_a_profile_can_be_had_for_any_schedule(pool: RankPool) -> None:
    for profile, refused in pool.run(_measure_on_request, size=2):
        assert profile is not None and profile.tb_s > 0
        assert "still measuring" in refused


def _with_profile(path: str, case: str) -> list[Any]:
    model: nn.Module = WideMLP()
    profile = dear.Profile.load(path)
    options: dict[str, Any] = {"schedule": "mg-wfbp", "profile": profile}
    rank = int(dear.rank())
    if case == "another model":
        model = OddMLP()
    elif case == "one rank's differs":
        layers = list(profile.layers)
        layers[2] = replace(layers[2], backward_s=layers[2].backward_s + rank)
        options["profile"] = replace(profile, layers=tuple(layers))
    elif case == "one rank has none":
        options["profile"] = None if rank else profile
    elif case == "another world":
        options["profile"] = replace(profile, world_size=5)
    elif case == "no effect":
        options["schedule"] = "dear"
    elif case == "no profile":
        options["profile"] = path
    elif case == "auto":
        options = {"fusion": "auto", "schedule": "wfbp"}
    optimizer = _wrap(model, **options)
    planned = optimizer.plan
    _train(model, optimizer, 2)
    assert optimizer.plan == planned, "there is nothing to wait for"
    optimizer.close()
    return [planned, optimizer.profile == profile]


@pytest.fixture(scope="module")
def profile_path(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    pool.run(_measured, MEASURED["mg-wfbp"], size=2)[0]["profile"].save(path)
    return str(path)


def test_a_saved_profile_plans_from_the_start(pool: RankPool, profile_path: str) -> None:
    profile = dear.Profile.load(profile_path)
    numbers = {n: i for i, (n, _) in enumerate(WideMLP().named_parameters())}
    expected, _ = mg_wfbp(profile, [replace(spec, index=numbers[spec.fqn]) for spec in profile.specs()])
    assert pool.run(_with_profile, profile_path, "itself", size=2) == [[expected, True]] * 2


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("another model", "has a parameter 'fc1.weight'|does not train|Take a profile of this model"),
        ("one rank's differs", "The first difference: rank 0 has profile of LayerTime"),
        ("one rank has none", "The first difference: rank 0 has profile of 2 ranks.*; rank 1 has profile: none given"),
        ("another world", "taken on 5 ranks, this job has 2"),
        ("no effect", "no effect"),
        ("no profile", "expected a dear.Profile"),
        ("auto", "no effect: schedule='wfbp'"),
    ],
)
def test_profiles_that_do_not_fit_are_refused_on_every_rank(
    pool: RankPool, profile_path: str, case: str, says: str
) -> None:
    outcomes = pool.run(_with_profile, profile_path, case, size=2, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", says)


def test_a_tuned_plan_is_used_again(pool: RankPool) -> None:
    result = pool.run(_measured, TUNED["dear-fill, auto"], TUNED_STEPS, size=2)[0]
    plan = dear.Plan.from_json(result["plan"].to_json())
    schedule = dear.Schedule.from_json(result["schedule"].to_json())
    assert (plan, schedule) == (result["plan"], result["schedule"])
    again = pool.run(_measured, {"fusion": plan, "schedule": schedule}, 2, size=2)
    assert all((r["plan"], r["schedule"]) == (plan, schedule) for r in again)
