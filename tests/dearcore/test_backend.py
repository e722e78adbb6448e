"""How the ranks choose what carries their collectives, and what they are told when it cannot be what they asked for."""

import os
import re
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

import dear
from dearcore import backend, nccl
from dearcore.backend import Capability, agree_on_backend, decide, probe
from dearcore.communicator import LocalCommunicator
from dearcore.errors import ArgumentError, CommunicatorError
from dearcore.nccl import NcclCommunicator
from dearcore.rendezvous import World, read_launch
from dearcore.streams import BlockingStream, InlineStream
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_nccl import FakeNccl

LIMIT = timedelta(seconds=20)


def capable(rank, host="a", gpu=None, version="2.30.7", shares=False, problem=""):
    return Capability(rank, host, f"GPU-{rank}" if gpu is None else gpu, version, shares, problem)


def test_auto_takes_nccl_where_every_rank_can():
    assert decide("auto", [capable(0), capable(1)]).backend == "nccl"
    assert decide("nccl", [capable(0), capable(1)]).backend == "nccl"
    assert decide("auto", [capable(0, "a", "GPU-0"), capable(1, "b", "GPU-0")]).backend == "nccl", "another host"


CANNOT = [
    ([capable(0), capable(1, problem="CuPy is not installed; pip install x")], "rank 1 on a: CuPy is not installed"),
    ([capable(0), capable(1, version="2.28.3")], r"rank 0 has NCCL 2\.30\.7, rank 1 NCCL 2\.28\.3; install the same"),
    ([capable(0), capable(1), capable(2, gpu="GPU-0")], "ranks 0 and 2 on a share a GPU.*NCCL_MULTI_RANK_GPU_ENABLE=1"),
    (
        [capable(0, version="2.28.3", shares=True), capable(1, gpu="GPU-0", version="2.28.3", shares=True)],
        r"share a GPU.*version 2\.30 on.*here: 2\.28\.3",
    ),
]


@pytest.mark.parametrize(("ranks", "reason"), CANNOT)
def test_what_cannot_be_is_said(ranks, reason):
    decision = decide("auto", ranks)
    assert decision.backend == "gloo"
    with pytest.raises(ArgumentError, match=rf"backend='nccl' cannot be used: .*{reason}.*backend='gloo'") as error:
        decide("nccl", ranks)
    assert decision.reason in str(error.value)


def test_ranks_may_share_a_gpu_where_nccl_has_been_told_so():
    ranks = [capable(0, shares=True), capable(1, gpu="GPU-0", shares=True)]
    assert decide("nccl", ranks).backend == "nccl"


def agree(monkeypatch, asked, capabilities):
    """What each rank learns: a decision, or what it raised."""
    monkeypatch.setattr(backend, "probe", lambda rank, device: capabilities[rank])
    store, size = HashStore(), len(capabilities)
    learned = [None] * size

    def rank_main(rank):
        try:
            learned[rank] = agree_on_backend(asked[rank], store, rank, size, torch.device("cpu"), LIMIT, "key")
        except Exception as error:
            learned[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return learned


def test_all_ranks_learn_the_same(monkeypatch):
    learned = agree(monkeypatch, ["auto"] * 3, [capable(0), capable(1), capable(2, problem="no GPU")])
    assert learned[0].backend == "gloo" and "rank 2" in learned[0].reason
    assert learned == [learned[0]] * 3
    assert {d.backend for d in agree(monkeypatch, ["auto"] * 2, [capable(0), capable(1)])} == {"nccl"}


def test_all_ranks_raise_the_same(monkeypatch):
    learned = agree(monkeypatch, ["nccl"] * 2, [capable(0), capable(1, problem="no GPU")])
    assert [type(error) for error in learned] == [ArgumentError] * 2 and "rank 1 on a: no GPU" in str(learned[0])
    learned = agree(monkeypatch, ["auto", "nccl"], [capable(0), capable(1)])
    assert str(learned[1]).startswith("rank 0 asks for backend='auto', rank 1 for 'nccl'.")


def test_a_rank_that_never_comes_is_an_error():
    limit = timedelta(seconds=0.2)
    with pytest.raises(CommunicatorError, match=r"rank 0 of 2: the ranks could not agree on a backend within 0.2 s"):
        agree_on_backend("auto", HashStore(), 0, 2, torch.device("cpu"), limit, "key")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu():
    mine = probe(0, torch.device("cpu"))
    assert "sees no GPU" in mine.problem
    with pytest.raises(ArgumentError, match=r"backend='nccl' cannot be used: rank 0 on .* sees no GPU.*nvidia-smi"):
        dear.init(backend="nccl")
    assert not dear.is_initialized()


@pytest.mark.parametrize(
    ("torch_cuda", "cupy_cuda", "problem"),
    [
        ("12.8", 13020, r"CuPy is built for CUDA 13, torch for CUDA 12\.8; pip uninstall cupy-cuda13x.*\[cuda12\]"),
        ("13.0", 13020, ""),
        (None, 13020, "built without CUDA"),
    ],
)
def test_versions_that_do_not_fit(monkeypatch, torch_cuda, cupy_cuda, problem):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nccl, "load_library", lambda: FakeNccl())
    monkeypatch.setattr(nccl, "_cupy_cuda_major", lambda: str(cupy_cuda // 1000))
    monkeypatch.setattr(nccl, "_cupy_release", lambda: (14, 2))
    found = nccl.library_problem()
    assert (found == "") == (problem == "")
    assert re.search(problem, found)


def test_an_old_cupy_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nccl, "load_library", lambda: FakeNccl())
    monkeypatch.setattr(nccl, "_cupy_cuda_major", lambda: "13")
    monkeypatch.setattr(nccl, "_cupy_release", lambda: (13, 6))
    assert nccl.library_problem() == (
        "CuPy 13.6 is too old, expected 14 or newer; pip install --upgrade 'dear-pytorch[cuda13]'"
    )


def test_a_library_that_does_not_load_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: object())

    def fails():
        raise ImportError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(nccl, "load_library", fails)
    assert nccl.library_problem() == (
        "CuPy or NCCL cannot be loaded (libnccl.so.2: cannot open shared object file); "
        "pip install 'dear-pytorch[cuda13]'"
    )
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
    assert nccl.library_problem() == "CuPy is not installed; pip install 'dear-pytorch[cuda13]'"


def test_versions_read_as_people_write_them():
    assert [nccl.library_version(FakeNccl(number)) for number in (23007, 22800, 21903)] == [
        "2.30.7",
        "2.28.0",
        "2.19.3",
    ]


@pytest.fixture
def gpu_world(monkeypatch):
    """A world of one rank that believes in a GPU."""
    library = FakeNccl()
    with fake_cuda(monkeypatch):
        monkeypatch.setattr("dearcore.rendezvous.local_device", lambda local_rank: torch.device("cuda", 0))
        monkeypatch.setattr(backend, "probe", lambda rank, device: capable(rank))
        monkeypatch.setattr("dearcore.nccl_world.load_library", lambda: library)
        yield World(read_launch({}), LIMIT, False, "nccl"), library


def test_all_communicators_of_a_world_share_one_group(gpu_world):
    world, _ = gpu_world
    device = torch.device("cuda", 0)
    assert world.decision.backend == "nccl" and isinstance(world.inline_stream(), InlineStream)
    first, _ = world.new_communicator((0,), device)
    second, _ = world.new_communicator((0,), device)
    assert isinstance(first, NcclCommunicator) and first is not second and first._group is second._group
    assert world.shared_stream((0,), device) is first._group.stream
    assert first._group.stream.cuda is world._nccl._stream.cuda, "groups of all sizes are on one stream"
    assert isinstance(world.inline_stream(), BlockingStream)
    on_cpu, _ = world.new_communicator((0,), torch.device("cpu"))
    assert isinstance(on_cpu, LocalCommunicator) and world.shared_stream((0,), torch.device("cpu")) is None
    first.close()
    assert first._group.comm.ended == ""
    world.close()
    assert first._group.comm.ended == "destroyed"


def test_tensors_of_another_gpu_are_refused(gpu_world):
    world, _ = gpu_world
    communicator, _ = world.new_communicator((0,), torch.device("cuda", 0))

    class Elsewhere:
        device, dtype = torch.device("cuda", 1), torch.float32

    with pytest.raises(
        ArgumentError, match=r"a tensor is on cuda:1, but rank 0 communicates on cuda:0.*dear.device\(\)"
    ):
        communicator.start_all_gather(Elsewhere(), InlineStream(), "all_gather[0]")
    world.close()


def chosen():
    dear.init()
    loaded = "cupy" in sys.modules
    return dear.context.current().world.decision.backend, loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_ranks_without_gpus_agree_on_gloo_and_load_no_cupy(pool):
    assert pool.run(chosen, size=2, init=False) == [("gloo", False)] * 2


CPU_PATH = """
import sys
sys.modules["cupy"] = sys.modules["triton"] = None  # any import of them fails from here on
import torch, dear
dear.init()
model = torch.nn.Linear(3, 2)
optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
dear.allreduce(torch.ones(2))
print(dear.__name__, [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends")])
"""


def test_the_cpu_path_imports_neither_cupy_nor_triton():
    run = subprocess.run(
        [sys.executable, "-c", CPU_PATH],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "dear ['cupy']"  # the None that stands in its place
