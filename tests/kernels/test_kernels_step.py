"""The optimizer twins: the same bits as torch.optim's single-tensor path, whatever is used when."""

import itertools
import random

import pytest
import torch

from dear_kernels import AdamHyper, SGDHyper, StepSegment, StepTable, adam_step_, reference, sgd_step_

SHAPES = [(3, 5), (1,), (), (0,), (33,), (17, 3), (64,), (7,)]


class Twin:
    """Parameters of odd shapes under torch.optim, and the same numbers in a flat shard under our step."""

    def __init__(self, seed, dtype, groups, num_states, *, gap=1):
        torch.manual_seed(seed)
        random.seed(seed)
        self.params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        self.group_of = [random.randrange(groups) for _ in SHAPES]
        segments, offset = [], 2
        for param, group in zip(self.params, self.group_of, strict=True):
            segments.append(StepSegment(offset, param.numel(), group))
            offset += param.numel() + random.randint(0, gap)
        self.table = StepTable(segments, offset + 3)
        self.flat = torch.full((offset + 3,), 9.0, dtype=dtype)
        self.grad = torch.full_like(self.flat, 5.0)
        self.state = [torch.zeros_like(self.flat) for _ in range(num_states)]
        self.steps = torch.zeros(len(segments))
        for segment, param in zip(segments, self.params, strict=True):
            self.view(self.flat, segment).copy_(param.detach().flatten())

    @staticmethod
    def view(flat, segment):
        return flat[segment.offset : segment.offset + segment.numel]

    def groups(self, options):
        return [
            {"params": [p for p, g in zip(self.params, self.group_of, strict=True) if g == group], **option}
            for group, option in enumerate(options)
        ]

    def set_gradients(self, probability):
        """Random gradients, missing with the given probability. Returns the used-flags, None if all are used."""
        used = []
        for segment, param in zip(self.table.segments, self.params, strict=True):
            is_used = random.random() >= probability
            param.grad = torch.randn(param.shape).to(param.dtype) if is_used else None
            self.view(self.grad, segment).copy_(param.grad.flatten() if is_used else torch.tensor(5.0))
            used.append(float(is_used))
        return None if probability == 0 else torch.tensor(used)

    def assert_equal(self, optimizer, state_names):
        for index, (segment, param) in enumerate(zip(self.table.segments, self.params, strict=True)):
            assert torch.equal(self.view(self.flat, segment), param.detach().flatten())
            state = optimizer.state.get(param, {})
            for flat, name in zip(self.state, state_names, strict=True):
                if state.get(name) is not None:
                    assert torch.equal(self.view(flat, segment), state[name].flatten()), name
            if "step" in state:
                assert self.steps[index] == state["step"]
        inside = torch.zeros_like(self.flat, dtype=torch.bool)
        for segment in self.table.segments:
            self.view(inside, segment).fill_(True)
        assert (self.flat[~inside] == 9).all() and all((s[~inside] == 0).all() for s in self.state)


SGD_FLAGS = [
    dict(zip(("momentum", "dampening", "weight_decay", "nesterov", "maximize"), values, strict=True))
    for values in itertools.product((0.0, 0.9), (0.0, 0.1), (0.0, 0.01), (False, True), (False, True))
    if not (values[3] and (values[0] == 0 or values[1] != 0))
]
ADAM_FLAGS = [
    dict(zip(("amsgrad", "maximize", "weight_decay", "decoupled_weight_decay"), values, strict=True))
    for values in itertools.product((False, True), (False, True), (0.0, 0.01), (False, True))
]


@pytest.mark.parametrize("probability", [0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", range(len(SGD_FLAGS)))
def test_sgd_has_the_bits_of_torch(index, dtype, probability):
    twin = Twin(index, dtype, 2, 1)
    flags = [SGD_FLAGS[index], SGD_FLAGS[(index + 5) % len(SGD_FLAGS)]]
    optimizer = torch.optim.SGD(twin.groups([{"lr": 0.1, **flags[0]}, {"lr": 0.3, **flags[1]}]), foreach=False)
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        hyper = [SGDHyper(g["lr"], **f) for g, f in zip(optimizer.param_groups, flags, strict=True)]
        used = twin.set_gradients(probability if step else min(probability, 0.1))
        optimizer.step()
        sgd_step_(twin.flat, twin.grad, twin.state[0], twin.table, hyper, twin.steps, used)
        twin.assert_equal(optimizer, ["momentum_buffer"])


@pytest.mark.parametrize("probability", [0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", range(len(ADAM_FLAGS)))
def test_adam_has_the_bits_of_torch(index, dtype, probability):
    twin = Twin(index, dtype, 2, 3)
    flags = [ADAM_FLAGS[index], ADAM_FLAGS[(index + 7) % len(ADAM_FLAGS)]]
    options = [{"lr": 1e-2, "betas": (0.9, 0.99)}, {"lr": 3e-2, "betas": (0.3, 0.999), "eps": 1e-6}]
    optimizer = torch.optim.Adam(
        twin.groups([{**o, **f} for o, f in zip(options, flags, strict=True)]), foreach=False, fused=False
    )
    for _ in range(5):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        hyper = [
            AdamHyper(g["lr"], *g["betas"], g["eps"], **f) for g, f in zip(optimizer.param_groups, flags, strict=True)
        ]
        used = twin.set_gradients(probability)
        optimizer.step()
        adam_step_(twin.flat, twin.grad, *twin.state, twin.table, hyper, twin.steps, used)
        twin.assert_equal(optimizer, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])


def test_narrow_parameters_have_the_bits_of_torch_when_sliced_alike():
    """PyTorch's bf16 `add_(alpha=)` rounds otherwise in a vector's body than in its tail, so slices matter."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(77).bfloat16())
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    flat, buffer, steps = param.detach().clone(), torch.zeros(77, dtype=torch.bfloat16), torch.zeros(1)
    for _ in range(3):
        param.grad = torch.randn(77).bfloat16()
        optimizer.step()
        hyper = [SGDHyper(0.1, 0.9, weight_decay=0.01)]
        sgd_step_(flat, param.grad, buffer, StepTable([StepSegment(0, 77)], 77), hyper, steps, None)
        assert torch.equal(flat, param.detach())


def test_adamw_has_the_bits_of_torch():
    twin = Twin(0, torch.float32, 1, 3)
    optimizer = torch.optim.AdamW(twin.params, lr=1e-2, foreach=False, fused=False)
    hyper = [AdamHyper(1e-2, weight_decay=1e-2, decoupled_weight_decay=True)]
    for _ in range(5):
        used = twin.set_gradients(0.3)
        optimizer.step()
        adam_step_(twin.flat, twin.grad, twin.state[0], twin.state[1], None, twin.table, hyper, twin.steps, used)
        twin.assert_equal(optimizer, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])


def flat_case(numel, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(numel) for _ in range(2)] + [torch.rand(numel) for _ in range(3)]


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_change_no_bit(monkeypatch, chunk):
    table = StepTable([StepSegment(1, 300), StepSegment(301, 50)], 352)
    results = []
    for numel in (chunk, 1 << 20):
        monkeypatch.setattr(reference, "CHUNK_NUMEL", numel)
        tensors, buffer, steps = flat_case(352), torch.zeros(352), torch.zeros(2)
        for _ in range(2):
            sgd_step_(*tensors[:2], buffer, table, [SGDHyper(0.1, 0.9, 0.0, 0.01, True, True)], steps, None)
        steps.zero_()
        hyper = [AdamHyper(0.1, weight_decay=0.01, amsgrad=True, maximize=True)]
        adam_step_(*tensors, table, hyper, steps, None)
        results.append([*tensors, buffer])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cut", [1, 7, 31, 32, 64])
def test_a_shard_boundary_changes_no_bit(cut):
    """A parameter stepped whole, and in two shards cut at an odd element."""
    hyper = [AdamHyper(0.1, weight_decay=0.01, amsgrad=True)]
    whole = flat_case(100)
    adam_step_(*whole, StepTable([StepSegment(0, 100)], 100), hyper, torch.ones(1), None)
    parts = []
    for begin, end in ((0, cut), (cut, 100)):
        part = [t[begin:end].clone() for t in flat_case(100)]
        adam_step_(*part, StepTable([StepSegment(0, end - begin)], end - begin), hyper, torch.ones(1), None)
        parts.append(part)
    for tensor, *pieces in zip(whole, *parts, strict=True):
        assert torch.equal(tensor, torch.cat(pieces))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_copy_follows_and_unused_parts_of_it_stay(low):
    table = StepTable([StepSegment(0, 10), StepSegment(10, 10)], 20)
    tensors, copy, steps = flat_case(20), torch.full((20,), 9.0, dtype=low), torch.zeros(2)
    used = torch.tensor([True, False])
    adam_step_(*tensors, table, [AdamHyper(0.1)], steps, used, low_precision_param=copy)
    assert torch.equal(copy[:10], tensors[0][:10].to(low)) and (copy[10:] == 9).all()
    sgd_step_(*tensors[:2], None, table, [SGDHyper(0.1)], steps, None, low_precision_param=copy)
    assert torch.equal(copy, tensors[0].to(low))


def test_gradients_of_another_dtype_are_converted_first():
    table = StepTable([StepSegment(0, 20)], 20)
    param, grad, *_ = flat_case(20)
    narrow = grad.to(torch.bfloat16)
    one, other = param.clone(), param.clone()
    sgd_step_(one, narrow, None, table, [SGDHyper(0.1, weight_decay=0.1)], torch.zeros(1), None)
    sgd_step_(other, narrow.float(), None, table, [SGDHyper(0.1, weight_decay=0.1)], torch.zeros(1), None)
    assert torch.equal(one, other)


def test_momentum_switched_on_later_starts_with_the_gradient():
    """As torch does: the buffer is born at the first update that has momentum, not at the first update."""
    twin = Twin(0, torch.float32, 1, 1)
    optimizer = torch.optim.SGD(twin.params, lr=0.1, foreach=False)
    for momentum in (0.0, 0.9, 0.9):
        optimizer.param_groups[0].update(momentum=momentum, dampening=0.5)
        twin.set_gradients(0)
        optimizer.step()
        hyper = [SGDHyper(0.1, momentum, 0.5)]
        sgd_step_(twin.flat, twin.grad, twin.state[0], twin.table, hyper, twin.steps, None)
        twin.assert_equal(optimizer, ["momentum_buffer"])
    assert twin.steps.tolist() == [2.0] * len(SHAPES)


def test_first_update_ignores_what_the_buffer_held():
    param, grad, *_ = flat_case(4)
    buffer = torch.full((4,), float("nan"))
    sgd_step_(param, grad, buffer, StepTable([StepSegment(0, 4)], 4), [SGDHyper(0.1, 0.9)], torch.zeros(1), None)
    assert torch.equal(buffer, grad) and param.isfinite().all()


def test_absorbed_gaps_give_the_same_segments():
    segments = [StepSegment(0, 5), StepSegment(8, 5), StepSegment(16, 4)]
    results = []
    for absorb in (False, True):
        tensors = flat_case(20)
        table = StepTable(segments, 20, absorb_gaps=absorb)
        adam_step_(*tensors[:4], None, table, [AdamHyper(0.1)], torch.zeros(3), None)
        results.append(torch.cat([tensors[0][s.offset : s.offset + s.numel] for s in segments]))
    assert torch.equal(*results)


def test_empty_shards():
    for segments in ([], [StepSegment(0, 0)]):
        table, steps = StepTable(segments, 0), torch.zeros(len(segments))
        empty = [torch.zeros(0) for _ in range(4)]
        adam_step_(*empty, None, table, [AdamHyper(0.1)], steps, None)
        sgd_step_(*empty[:2], None, table, [SGDHyper(0.1)], steps, None)
        assert steps.tolist() == [1.0] * len(segments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(3)}, "grad has shape"),
        ({"exp_avg": torch.zeros(4, dtype=torch.float64)}, "exp_avg has dtype torch.float64; expected that of param"),
        ({"steps": torch.zeros(2)}, "steps has shape"),
        ({"steps": torch.zeros(1, dtype=torch.int64)}, "expected contiguous float32"),
        ({"used": torch.zeros(2)}, "used has shape"),
        ({"hyper": []}, "got hyper-parameters of 0 groups; the step table names 1"),
        ({"hyper": [AdamHyper(0.1, amsgrad=True)]}, "max_exp_avg_sq is None"),
    ],
)
def test_bad_arguments_raise(change, message):
    arguments = {
        **{name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")},
        "max_exp_avg_sq": None,
        "table": StepTable([StepSegment(0, 4)], 4),
        "hyper": [AdamHyper(0.1)],
        "steps": torch.zeros(1),
        "used": None,
    }
    with pytest.raises(ValueError, match=message):
        adam_step_(**(arguments | change))


def test_momentum_without_a_buffer_raises():
    with pytest.raises(ValueError, match="momentum_buffer is None"):
        table = StepTable([StepSegment(0, 4)], 4)
        sgd_step_(torch.zeros(4), torch.zeros(4), None, table, [SGDHyper(0.1, 0.9)], torch.zeros(1), None)
