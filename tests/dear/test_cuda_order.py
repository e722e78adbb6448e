"""The engine over NCCL and CUDA streams, both simulated: right weights, and no two accesses that only luck orders.

What this ring cannot see: that CUDA and NCCL are what the simulation takes them for.
"""

import threading
import time

import pytest
import torch
from torch import nn, optim

from dear.engine import Engine
from dear.foreign import ForeignCollectives
from dear.options import Options
from dear.planning import make_plan_and_schedule
from dearcore.errors import CommunicatorError
from dearcore.layout import ParamSpec, plan_unfused
from dearcore.schedule import After, Op, OpKind, Schedule
from dearcore.streams import BlockingStream, CudaWorkerStream, Streams
from dearcore.trace import Trace
from tests.support import fake_cuda
from tests.support.fake_world import gpu_ranks

CPU = torch.device("cpu")
STEPS = 3


SEED = threading.Lock()  # ranks are threads and share one generator


def make_model():
    with SEED:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))


def batch(rank, step):
    """Small whole numbers: with two ranks every average is exact."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-2, 3, (4, 5), generator=generator).float()


def loss_of(model, x):
    return model(x).square().mean()


def make_optimizer(kind, model):
    if kind == "sgd":
        return optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return optim.AdamW(model.parameters(), lr=0.01)


def expected(kind, size):
    model = make_model()
    optimizer = make_optimizer(kind, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = []
        for rank in range(size):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for index, param in enumerate(model.parameters()):
            param.grad = sum(g[index] for g in grads) / size
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def options(schedule="dear", fusion=None, accumulate=1, reduce_dtype=None, sharded=True):
    return Options(schedule, fusion, None, sharded, accumulate, reduce_dtype, torch.float32, False, ())


def filling():
    """Every bucket is reduced, stepped and gathered inside the backward."""
    model = make_model()
    specs = [ParamSpec(i, name, tuple(p.shape), p.dtype) for i, (name, p) in enumerate(model.named_parameters())]
    plan = plan_unfused(specs, 2)
    ops = []
    for bucket in reversed(plan.buckets):
        ops.append(Op(OpKind.REDUCE_SCATTER, bucket.index, After.GRAD_READY))
        ops.append(Op(OpKind.STEP, bucket.index, After.DONE))
        ops.append(Op(OpKind.ALL_GATHER, bucket.index, After.DONE))
    return options(Schedule("dear-fill", tuple(ops)), plan)


def train(detector, kind="sgd", opts=None, late=False, peek=False):
    """`late`: two backward passes without zero_grad, the second of which is reduced in a further round.

    `peek`: weights are read once more between backward and step.
    """

    def work(world):
        with detector.mode():
            model = make_model()
            engine = Engine(make_optimizer(kind, model), model, opts or options(), world, tuple(range(world.size)))
            for step in range(STEPS):
                engine.zero_grad(True)
                x = batch(world.rank, step)
                for part in x.chunk(2) if late else [x]:
                    loss_of(model, part).div(2 if late else 1).backward()
                if peek:
                    loss_of(model, x)
                engine.step()
            result = [p.detach().clone() for p in model.parameters()]
            engine.close()
            return result

    return work


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "opts",
    [options(), options(fusion=25.0), options("ddp", "sized"), options("ddp", "sized", sharded=False), "fill"],
    ids=["unfused", "one bucket", "all-reduce", "user's own step", "steps in the backward"],
)
def test_training_is_right_and_free_of_races(monkeypatch, kind, deterministic, opts):
    with gpu_ranks(monkeypatch, 2, deterministic) as (detector, library, run):
        results = run(train(detector, kind, filling() if opts == "fill" else opts))
        for result in results:
            for got, want in zip(result, expected(kind, 2), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert len(detector.accesses) > 100
        assert detector.races()[:20] == []
        one_stream = {(call.rank, call.args["stream"]) for call in library.calls}
        assert len(one_stream) == 2, "all of a rank's collectives are on one stream"


def test_gradients_that_come_late_are_free_of_races(monkeypatch):
    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        results = run(train(detector, late=True))
        for result in results:
            for got, want in zip(result, expected("sgd", 2), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert detector.races()[:20] == []
        assert any(name.startswith("agreement") for name, *_ in detector.work)


def test_what_reads_and_changes_averages_is_free_of_races(monkeypatch):
    """Clipping, a whole gradient, the state, another plan: between streams, and back to the compute stream."""

    def work(world):
        with detector.mode():
            model = make_model()
            engine = Engine(make_optimizer("sgd", model), model, options(), world, (0, 1))
            for step in range(STEPS):
                engine.zero_grad(True)
                loss_of(model, batch(world.rank, step)).backward()
                engine.finish_gradients()
                engine.update.full_grad(engine.tracked[0]).mul_(2)
                engine.clip_norm(0.5, 2.0)
                engine.clip_value(0.25)
                engine.step()
                engine.export_state()
                if step == 1:
                    specs = [t.spec for t in engine.tracked]
                    engine.relayout(*make_plan_and_schedule("dear", 25.0, specs, 2, True))
            result = [p.detach().clone() for p in model.parameters()]
            engine.close()
            return result

    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        first, second = run(work)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        assert detector.races()[:20] == []


class OntoSideStream(torch.autograd.Function):
    """From here on the backward of this branch runs on another stream, as where a user's forward has switched."""

    @staticmethod
    def forward(ctx, x, side):
        ctx.side = side
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ready = fake_cuda.FakeEvent()
        ready.record()
        ctx.side.wait_event(ready)
        fake_cuda.enter_stream(ctx.side)
        return grad.clone(), None


def train_with_two_branches(detector):
    def work(world):
        with detector.mode():
            first, second = make_model(), nn.Linear(5, 3, bias=False)
            model = nn.ModuleList([first, second])
            engine = Engine(make_optimizer("sgd", model), model, options(fusion=25.0), world, (0, 1))
            side = fake_cuda.new_stream()
            second.weight.register_post_accumulate_grad_hook(lambda _: fake_cuda.leave_stream())
            for step in range(STEPS):
                engine.zero_grad(True)
                x = batch(world.rank, step)
                (loss_of(first, x) + OntoSideStream.apply(second(x), side).sum()).backward()
                assert fake_cuda.current().name == "compute"
                engine.step()
            engine.close()

    return work


def test_a_branch_on_another_stream_is_waited_for(monkeypatch):
    """Its gradients come first; the bucket is launched from the compute stream, which knows nothing of them."""
    with gpu_ranks(monkeypatch, 2) as (detector, _, run):
        run(train_with_two_branches(detector))
        assert detector.races()[:20] == []


def test_collectives_come_in_the_order_of_the_schedule(monkeypatch):
    with gpu_ranks(monkeypatch, 2) as (detector, library, run):
        run(train(detector))
        buckets = [*(f"reduce_scatter[{b}]" for b in (4, 3, 2, 1, 0)), *(f"all_gather[{b}]" for b in range(5))]
        for rank in (0, 1):
            calls = [call for call in library.calls if call.rank == rank and call.name != "broadcast"]
            # one iteration more: the first warms up
            assert [call.name for call in calls] == (["reduceScatter"] * 5 + ["allGather"] * 5) * (STEPS + 1)
            handle = calls[0].args["stream"]
            labels = [name.split()[0] for name, stream, *_ in detector.work if stream.cuda_stream == handle]
            assert [name for name in labels if "[" in name] == buckets * (STEPS + 1)


def test_a_collective_that_never_ends_is_an_error_where_its_weights_are_touched(monkeypatch):
    def work(world):
        model = make_model()
        engine = Engine(make_optimizer("sgd", model), model, options(), world, (0, 1))
        loss_of(model, batch(world.rank, 0)).backward()
        engine.step()
        loss_of(model, batch(world.rank, 1)).backward()
        library.stuck.add("allGather")
        engine.step()
        with pytest.raises(CommunicatorError) as error:
            model(batch(world.rank, 2))
        engine.close()
        deadline = time.monotonic() + 10
        while not world.group.comm.ended and time.monotonic() < deadline:
            time.sleep(0.01)  # the other rank's error may wake a waiter a moment before NCCL is gone
        return str(error.value), world.group.comm.ended

    with gpu_ranks(monkeypatch, 2, timeout_s=2.0) as (_, library, run):
        for rank, (message, ended) in enumerate(run(work)):
            assert message.startswith(f"rank {rank} of 2: all_gather[") and " in step 1 failed." in message
            assert ended == "aborted"


def test_every_gradient_is_kept_until_its_pack_is_done(monkeypatch):
    """The caching allocator would hand its memory out again; events here say "not done" until they may."""
    done = []

    def work(world):
        model = make_model()
        engine = Engine(make_optimizer("sgd", model), model, options(), world, (0, 1))
        engine.zero_grad(True)
        loss_of(model, batch(world.rank, 0)).backward()
        engine.step()
        waited(engine.streams, engine.streams.communication)
        meet.wait()
        engine.streams.drop_kept()
        kept = sum(tensor is not None for _, tensors in engine.streams._kept for tensor in tensors)
        meet.wait()
        done.append(True)
        engine.streams.iteration_ended()
        left = len(engine.streams._kept)
        engine.close()
        return kept, left

    meet = threading.Barrier(2, timeout=60)
    with gpu_ranks(monkeypatch, 2) as (_, _, run):
        monkeypatch.setattr(fake_cuda.FakeEvent, "query", lambda self: bool(done))
        # five gradients, and five parameters that stood for them in the warm-up
        assert run(work) == [(10, 0)] * 2


def test_several_optimizers_share_one_stream_and_one_order(monkeypatch):
    def work(world):
        first, second = make_model(), make_model()
        engines = [Engine(make_optimizer("sgd", m), m, options(fusion=25.0), world, (0, 1)) for m in (first, second)]
        for step in range(2):
            for model, engine in zip((first, second), engines, strict=True):
                engine.zero_grad(True)
                loss_of(model, batch(world.rank, step)).backward()
            for engine in engines:
                engine.step()
        equal = [torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)]
        for engine in engines:
            engine.close()
        return equal

    with gpu_ranks(monkeypatch, 2) as (detector, library, run):
        assert run(work) == [[True] * 5] * 2
        assert detector.races()[:20] == []
        assert len({call.args["stream"] for call in library.calls}) == 2


# --------------------------------------------------------------------------------------------- streams by themselves


@pytest.fixture
def detector(monkeypatch):
    with fake_cuda.fake_cuda(monkeypatch) as found:
        yield found


@pytest.fixture
def streams(detector):
    made = Streams(CPU, Trace(), shared=CudaWorkerStream("communication", Trace(), CPU))
    yield made
    made.close()


def waited(streams, stream):
    event = streams.new_event()
    stream.record(event)
    event.wait_host()


def test_pack_waits_for_every_stream_that_produced_a_gradient(detector, streams):
    grads, side = [torch.zeros(4), torch.zeros(4)], fake_cuda.new_stream()
    with detector.working("backward"):
        grads[0].fill_(1)
        streams.note_gradient()
    with fake_cuda.stream_context(side), detector.working("backward on a side stream"):
        grads[1].fill_(2)
        streams.note_gradient()
    streams.wait_gradients()
    streams.pack.run("pack[0]", lambda: [g.clone() for g in grads])
    waited(streams, streams.pack)
    assert detector.races()[:20] == []


def test_the_detector_sees_a_stream_that_nobody_waits_for(detector, streams):
    grad = torch.zeros(4)
    with detector.working("backward"):
        grad.fill_(1)
    streams.pack.run("pack[0]", grad.clone)
    waited(streams, streams.pack)
    (race,) = detector.races()
    assert "backward" in race and "pack[0]" in race


def test_streams_have_priority_over_the_backward(streams):
    assert {s.cuda.priority for s in (streams.communication, streams.pack, streams.step)} == {-1}
    assert len({s.cuda.cuda_stream for s in (streams.communication, streams.pack, streams.step)}) == 3


def test_gradients_are_kept_until_they_are_packed(monkeypatch, streams):
    done = []
    monkeypatch.setattr(fake_cuda.FakeEvent, "query", lambda self: bool(done))
    event = streams.new_event()
    streams.pack.record(event)
    streams.keep_until(event, [torch.ones(3)])
    waited(streams, streams.pack)
    streams.drop_kept()
    assert len(streams._kept) == 1
    done.append(True)
    streams.iteration_ended()
    assert not streams._kept


def test_a_blocking_call_is_ordered_on_both_sides(detector, streams):
    value = torch.zeros(4)
    with detector.working("before"):
        value.fill_(1)
    BlockingStream(streams.communication).run("allreduce", lambda: value.add_(1))
    with detector.working("after"):
        value.add_(1)
    assert detector.races() == [] and value.tolist() == [3] * 4


def test_events_are_no_spans_of_a_trace(streams):
    streams.trace.enabled = True
    event = streams.new_event()
    streams.pack.run("pack[0]", lambda: None)
    streams.pack.record(event)
    streams.communication.wait(event)
    streams.communication.run("reduce_scatter[0]", lambda: None)
    waited(streams, streams.communication)
    spans = [(span.lane, span.name) for span in streams.trace.take()]
    assert spans == [("pack", "pack[0]"), ("communication", "reduce_scatter[0]")]


def test_an_error_after_the_launch_is_raised_by_later_waits(streams):
    event = streams.new_event()
    streams.communication.record(event)
    event.wait_host()
    streams.communication.fail(RuntimeError("aborted"))
    for wait in (event.wait_host, event.wait_compute):
        with pytest.raises(RuntimeError, match="aborted"):
            wait()


# --------------------------------------------------------------------------------------------- SyncBatchNorm


class StandIn(torch.autograd.Function):
    """A collective of torch's in forward and backward: on the CPU there is none."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log("torch's forward collective")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log("torch's backward collective")
        return grad.clone(), None


class FakeSync(nn.SyncBatchNorm):
    def forward(self, x):
        return StandIn.apply(x, self.log)


@pytest.mark.parametrize("ordered", [True, False])
def test_collectives_of_synchronised_batch_norm_are_ordered_against_ours(detector, streams, ordered):
    """Both touch one buffer here, which stands for the GPU's multiprocessors: any two that overlap are a race."""
    multiprocessors = torch.zeros(1)

    def collective(name):
        with detector.working(name):
            multiprocessors.add_(1)

    model = nn.Sequential(nn.Linear(3, 3), FakeSync(3), nn.ReLU(inplace=True))
    model[1].log = collective
    foreign = ForeignCollectives(model, streams) if ordered else None

    def ours(name):
        streams.communication.run(name, lambda: multiprocessors.add_(1))

    for _ in range(2):
        ours("all_gather[0]")
        out = model(torch.ones(2, 3))
        ours("reduce_scatter[1]")
        out.sum().backward()
        ours("reduce_scatter[0]")
    waited(streams, streams.communication)
    assert multiprocessors.item() == 10
    assert (detector.races() == []) == ordered
    if foreign is not None:
        foreign.close()
        assert not model[1]._forward_hooks and not model[1]._forward_pre_hooks
