"""A newcomer's mistakes: each gives one sentence that says what to do, at the call where it was made."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import dear
from tests.support.ranks import RankPool, assert_raised


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Linear(3, 2))


def wrapped(model: nn.Module, **options: object) -> dear.DistributedOptimizer:
    return dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1), model, **options)  # type: ignore[arg-type]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def trained() -> tuple[Net, dear.DistributedOptimizer]:
    """After one whole step and the next backward."""
    model = Net()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    return model, optimizer


# ------------------------------------------------------------------------------------ before and while wrapping


def forgot_init() -> None:
    dear.shutdown()
    wrapped(Net())


def asked_for_the_rank_before_init() -> None:
    dear.shutdown()
    dear.rank()


def wrapped_twice() -> None:
    model = Net()
    dear.DistributedOptimizer(wrapped(model), model)


def wrapped_the_same_model_again() -> None:
    model = Net()
    optimizer = wrapped(model)
    wrapped(model)
    optimizer.close()


def wrong_model() -> None:
    dear.DistributedOptimizer(optim.SGD(Net().parameters(), lr=0.1), Net())


def swapped_the_arguments() -> None:
    model = Net()
    dear.DistributedOptimizer(model, optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


def passed_the_class_of_the_optimizer() -> None:
    dear.DistributedOptimizer(optim.SGD, Net())  # type: ignore[arg-type]


def everything_is_frozen() -> None:
    wrapped(Net().requires_grad_(False))


def lazy_module_before_its_first_forward() -> None:
    wrapped(nn.LazyLinear(3))


def lbfgs() -> None:
    model = Net()
    dear.DistributedOptimizer(optim.LBFGS(model.parameters()), model)


def bucket_size_zero() -> None:
    wrapped(Net(), fusion=0)


def schedule_that_does_not_exist() -> None:
    wrapped(Net(), schedule="ring")


# ------------------------------------------------------------------------------------ in the training loop


def clipped_by_torchs_function() -> None:
    model, _ = trained()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def logged_p_grad() -> None:
    model, _ = trained()
    print(model[0].weight.grad.norm().item())


def stepped_the_torch_optimizer() -> None:
    model = Net()
    plain = optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(plain, model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        plain.step()


def replaced_the_head() -> None:
    model, optimizer = trained()
    model[1] = nn.Linear(3, 5)
    optimizer.step()


def unfroze_a_layer() -> None:
    model = Net()
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    model[0].requires_grad_(True)
    backward(model)
    optimizer.step()


def added_a_parameter_group() -> None:
    _, optimizer = trained()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def loaded_with_assign_after_wrapping() -> None:
    model, optimizer = trained()
    model.load_state_dict(copy.deepcopy(Net().state_dict()), assign=True)
    optimizer.step()


def moved_the_model_after_wrapping() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    model.double()
    optimizer.step()


def loaded_the_models_file_into_the_optimizer() -> None:
    model, optimizer = trained()
    optimizer.load_state_dict(model.state_dict())


def pickled_the_optimizer() -> None:
    _, optimizer = trained()
    copy.deepcopy(optimizer)


def used_it_after_close() -> None:
    _, optimizer = trained()
    optimizer.close()
    optimizer.step()


def averaged_whole_numbers() -> None:
    dear.allreduce(torch.tensor([3]))


MISTAKES: dict[Callable[[], None], str] = {
    forgot_init: "dear is not initialised. Call dear.init() first",
    asked_for_the_rank_before_init: "Call dear.init() first",
    wrapped_twice: "is a DistributedOptimizer already. Wrap the torch optimizer once",
    wrapped_the_same_model_again: "is trained by another DistributedOptimizer already.*or close() the other one first",
    wrong_model: "is not in the model. Pass the model that owns all parameters of the optimizer",
    swapped_the_arguments: "optimizer expects a torch.optim.Optimizer, got Net",
    passed_the_class_of_the_optimizer: "optimizer expects a torch.optim.Optimizer, got type",
    everything_is_frozen: "the optimizer has no trainable parameter of this model. Pass the model that it trains",
    lazy_module_before_its_first_forward: "'weight' has no shape yet (a lazy module). Run one forward before",
    lbfgs: "LBFGS cannot be distributed.*Choose another optimizer",
    bucket_size_zero: "fusion=0; expected MiB a bucket (> 0)",
    schedule_that_does_not_exist: "schedule='ring'; expected one of",
    clipped_by_torchs_function: "Call opt.clip_grad_norm_(max_norm)",
    logged_p_grad: "opt.full_grad(param) to read the averaged gradient",
    stepped_the_torch_optimizer: "step through the DistributedOptimizer only",
    replaced_the_head: "'1.weight' is no longer part of the model.*close(), and wrap again",
    unfroze_a_layer: "'0.weight' was frozen when the optimizer was wrapped and is trainable now. Call close() and wrap",
    added_a_parameter_group: "Call close(), add the group to the torch optimizer, and wrap again",
    loaded_with_assign_after_wrapping: "load_state_dict(assign=True).*close(), and wrap again",
    moved_the_model_after_wrapping: "Convert the model first, then wrap it",
    loaded_the_models_file_into_the_optimizer: "expects a dict with 'state' and 'param_groups'",
    pickled_the_optimizer: "Save its state_dict()",
    used_it_after_close: "was closed. Wrap the torch optimizer again",
    averaged_whole_numbers: "Use dear.Sum, or cast to float",
}


@pytest.fixture
def alone() -> Iterator[None]:
    dear.init(backend="local")
    try:
        yield
    finally:
        dear.shutdown()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_answered_with_what_to_do(alone: None, mistake: Callable[[], None]) -> None:
    says = ".*".join(re.escape(part) for part in MISTAKES[mistake].split(".*"))
    with pytest.raises(dear.DearError, match=says) as caught:
        mistake()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, "one sentence or two"
    assert message.endswith(".") and "  " not in message


# ------------------------------------------------------------------------------------ no mistake here


def test_a_step_without_a_backward_changes_nothing(alone: None) -> None:
    """As in plain PyTorch, where there is no gradient to apply."""
    model = Net()
    optimizer = wrapped(model)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_weights_loaded_after_wrapping_are_trained_on(alone: None) -> None:
    model = Net()
    optimizer = wrapped(model)
    other = Net()
    model.load_state_dict(other.state_dict())
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_forgetting_zero_grad_accumulates_as_in_torch(alone: None) -> None:
    model = nn.Linear(4, 1)
    optimizer = wrapped(model)
    before = model.bias.detach().clone()
    for _ in range(2):
        backward(model)
        optimizer.step()
    torch.testing.assert_close(model.bias.detach(), before - 0.1 * (2 + 4))


# ------------------------------------------------------------------------------------ one rank among several


def saves_on_rank_0_only(folder: str) -> None:
    _, optimizer = trained()
    if dear.rank() == 0:
        torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
    optimizer.step()
    optimizer.synchronize()


def has_another_learning_rate() -> None:
    model = Net()
    dear.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1 * (1 + dear.rank())), model)


def test_a_collective_method_on_rank_0_only(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(
        saves_on_rank_0_only, str(tmp_path), size=2, group_timeout_s=1.5, expect_errors=True, timeout_s=30
    )
    assert_raised(outcomes, "CommunicatorError", "Every rank calls the collective methods .* alike", ranks=[0])


def wraps_it_in_ddp_too() -> None:
    model = nn.parallel.DistributedDataParallel(Net())
    wrapped(model)


def wraps_a_sharded_model() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    wrapped(distribute_module(Net(), init_device_mesh("cpu", (dear.size(),))))


def test_models_that_others_have_distributed_already(pool: RankPool) -> None:
    outcomes = pool.run(wraps_it_in_ddp_too, size=2, ddp=True, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", r"wrapped in DistributedDataParallel.*`model\.module`")
    outcomes = pool.run(wraps_a_sharded_model, size=2, ddp=True, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", r"'0\.weight' is a DTensor; expected a plain nn\.Parameter")


def test_ranks_with_different_options(pool: RankPool) -> None:
    outcomes = pool.run(has_another_learning_rate, size=2, expect_errors=True)
    assert_raised(outcomes, "ArgumentError", r"lr=0\.1; .*lr=0\.2\. Build the same model, optimizer and options")
