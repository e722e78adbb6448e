"""`python -m dear doctor`: what it finds, what it says of it, and its exit status."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dear import doctor
from dearcore.backend import Capability


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "dear", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def of(report, what):
    return next(finding for finding in report.found if finding.what == what)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_healthy():
    shown = run("doctor")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "will be used: CPU, collectives over gloo, plain-PyTorch kernels" in shown.stdout
    assert f"the GPU path will not be used: torch {torch.__version__} sees no GPU" in shown.stdout
    assert shown.stdout.rstrip().endswith("nothing is wrong")
    for what in ("Python", "torch", "CUDA of torch", "driver", "GPUs", "Triton", "CuPy", "NCCL", "network", "launcher"):
        assert f"\n{what} " in "\n" + shown.stdout


def test_json_and_status_of_a_broken_environment(monkeypatch, capsys):
    for name, value in {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False
    (launcher,) = [finding for finding in report["found"] if finding["what"] == "launcher"]
    assert launcher["problem"].startswith("RANK=3 but WORLD_SIZE=2") and "torchrun" in launcher["mend"]
    assert "RANK=3" in next(f["value"] for f in report["found"] if f["what"] == "variables")


def test_an_unknown_command_is_an_error():
    with pytest.raises(SystemExit):
        doctor.main(["nurse"])


def test_an_interface_that_is_not_there():
    report = doctor.examine({"GLOO_SOCKET_IFNAME": "lo,ib7", "NCCL_SOCKET_IFNAME": "^docker"})
    finding = of(report, "GLOO_SOCKET_IFNAME")
    assert finding.problem == "no interface ib7 on this host" and "lo" in finding.mend
    assert not report.is_healthy and "mend it: export GLOO_SOCKET_IFNAME=" in str(report)
    assert all(f.what != "NCCL_SOCKET_IFNAME" for f in report.found)


def test_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert of(doctor.examine({}), "torch").mend == "pip install --upgrade torch"
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git12")
    assert of(doctor.examine({}), "torch").problem == ""


def test_wheels_that_overwrite_each_other(monkeypatch):
    installed = {
        "cupy-cuda12x": "14.2.0",
        "cupy-cuda13x": "14.2.0",
        "nvidia-nccl-cu12": "2.28",
        "nvidia-nccl-cu13": "2.30",
    }
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    report = doctor.examine({})
    assert of(report, "CuPy").mend == (
        "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'dear-pytorch[cuda13]'"
    )
    assert of(report, "NCCL").mend == (
        "pip uninstall nvidia-nccl-cu12, then pip install --force-reinstall nvidia-nccl-cu13"
    )
    assert not report.is_healthy


@pytest.fixture
def gpu(monkeypatch):
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_can_be_used(monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda *_: Capability(0, "a", "GPU-1", "2.30.7", False, ""))
    monkeypatch.setattr(doctor, "_version", {"triton": "3.6.0", "cupy-cuda13x": "14.2.0"}.get)
    report = doctor.examine({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert report.is_healthy and report.why_not_gpu == ""
    assert of(report, "GPU 1").value == "Some GPU, sm_90, 80 GiB"
    assert "will be used: GPU (cuda:1), collectives over nccl, Triton kernels" in str(report)
    assert of(report, "launcher").value == "torchrun: rank 1 of 2, 2 on this host"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_lacks_something(monkeypatch):
    problem = "CuPy is not installed; pip install 'dear-pytorch[cuda13]'"
    monkeypatch.setattr(doctor, "probe", lambda *_: Capability(0, "a", "GPU-1", "", False, problem))
    monkeypatch.setattr(doctor, "_version", {}.get)
    report = doctor.examine({})
    assert not report.is_healthy and report.backend == "gloo" and report.why_not_gpu == problem
    assert of(report, "GPU path").mend == "pip install 'dear-pytorch[cuda13]'"
    assert of(report, "Triton").problem == "the kernels for the GPU need Triton"
    assert str(report).endswith("2 wrong")


def test_a_driver_whose_gpus_torch_does_not_see(monkeypatch):
    shown = SimpleNamespace(stdout="580.1, Some GPU\n", stderr="", returncode=0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: shown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = of(doctor.examine({}), "driver")
    assert finding.value == "580.1" and finding.problem == "nvidia-smi sees 1 GPUs, torch sees none"
