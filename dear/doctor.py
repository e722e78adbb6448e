"""What this machine has, what dear would use of it, what is wrong, and the command that mends it.

`python -m dear doctor` prints a table, with `--json` one JSON object. The exit status is 1 if something is wrong, and 0
otherwise: a machine without a GPU is not wrong, it uses the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from dearcore.backend import decide, local_device, probe
from dearcore.errors import ArgumentError
from dearcore.nccl import library_version, load_library, loaded_from
from dearcore.rendezvous import read_launch

__all__ = ["Finding", "Report", "examine", "main"]

OLDEST_TORCH = (2, 11)
OLDEST_TRITON = (3, 6)
NOT_INSTALLED = "not installed"
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `problem` is "" if nothing is wrong with it; `mend` is a command or a deed."""

    what: str
    value: str
    problem: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    found: Sequence[Finding]
    device: str
    backend: str
    kernels: str
    why_not_gpu: str  # "" if the GPU path will be used

    @property
    def is_healthy(self) -> bool:
        return not any(finding.problem for finding in self.found)

    def as_json(self) -> str:
        return json.dumps({"healthy": self.is_healthy, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        width = max(len(finding.what) for finding in self.found)
        lines = []
        for finding in self.found:
            lines.append(f"{finding.what:{width}s}  {finding.value}")
            if finding.problem:
                lines.append(f"{'':{width}s}  WRONG: {finding.problem}")
                lines.append(f"{'':{width}s}  mend it: {finding.mend}")
        lines += ["", f"will be used: {self.device}, collectives over {self.backend}, {self.kernels}"]
        if self.why_not_gpu:
            lines.append(f"the GPU path will not be used: {self.why_not_gpu}")
        num_wrong = sum(bool(finding.problem) for finding in self.found)
        lines.append(f"{num_wrong} wrong" if num_wrong else "nothing is wrong")
        return "\n".join(lines)


def examine(env: Mapping[str, str] = os.environ) -> Report:
    """Looks at this process's machine and environment. Loads CuPy and NCCL where they are installed."""
    launch = _launcher(env)
    local_rank = 0 if launch.problem else read_launch(env).local_rank
    device = local_device(local_rank)
    found = [_python(), _torch(), _cuda(), _driver(), *_gpus(), _triton(device), *_cupy(device), _nccl(device)]
    found += [*_interfaces(env), *_variables(env), launch]
    capability = probe(0, device, env)
    decision = decide("auto", [capability])
    if capability.problem and device.type == "cuda":
        found.append(Finding("GPU path", "not usable", *_split(capability.problem)))
    has_triton = importlib.util.find_spec("triton") is not None
    on_gpu = device.type == "cuda"
    return Report(
        found,
        f"GPU ({device})" if on_gpu else "CPU",
        decision.backend,
        "Triton kernels" if on_gpu and has_triton else "plain-PyTorch kernels",
        capability.problem,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dear", description="dear's commands")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what will be used, what is wrong")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    report = examine()
    print(report.as_json() if options.json else report)
    return 0 if report.is_healthy else 1


def _python() -> Finding:
    return Finding("Python", platform.python_version())


def _torch() -> Finding:
    problem = ""
    if _numbers(torch.__version__) < OLDEST_TORCH:
        problem = f"torch {torch.__version__} is too old; expected {_dotted(OLDEST_TORCH)} or newer"
    return Finding("torch", torch.__version__, problem, "pip install --upgrade torch" if problem else "")


def _cuda() -> Finding:
    return Finding("CUDA of torch", torch.version.cuda or "none (a CPU build)")


def _driver() -> Finding:
    """The NVIDIA driver, which may be there although torch sees no GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Finding("driver", "none found (no nvidia-smi)")
    command = [smi, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("driver", "unknown", f"nvidia-smi does not answer ({error})", "nvidia-smi; see what it says")
    lines = shown.stdout.strip().splitlines()
    if shown.returncode or not lines:
        said = (shown.stderr or shown.stdout).strip().splitlines()
        return Finding("driver", f"nvidia-smi found no GPU ({said[0] if said else 'no output'})")
    version = lines[0].split(",")[0].strip()
    if not torch.cuda.is_available():
        mend = "unset CUDA_VISIBLE_DEVICES; else a torch build for the CUDA that nvidia-smi shows"
        return Finding("driver", version, f"nvidia-smi sees {len(lines)} GPUs, torch sees none", mend)
    return Finding("driver", version)


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPUs", "none that torch can use")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        value = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        found.append(Finding(f"GPU {index}", value))
    return found


def _triton(device: torch.device) -> Finding:
    version = _version("triton")
    needed = device.type == "cuda"
    mend = "pip install 'triton>=3.6' (torch's CUDA build brings it)"
    if version is None:
        problem = "the kernels for the GPU need Triton" if needed else ""
        return Finding("Triton", NOT_INSTALLED, problem, mend if problem else "")
    problem = ""
    if needed and _numbers(version) < OLDEST_TRITON:
        problem = f"Triton {version} is too old; expected {_dotted(OLDEST_TRITON)} or newer"
    return Finding("Triton", version, problem, mend if problem else "")


def _cupy(device: torch.device) -> list[Finding]:
    wheels = [
        (name, version)
        for name in ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
        if (version := _version(name))
    ]
    if not wheels:
        return [Finding("CuPy", NOT_INSTALLED)]
    value = ", ".join(f"{name} {version}" for name, version in wheels)
    found = [Finding("CuPy", value)]
    if len(wheels) > 1:
        spare = " ".join(name for name, _ in wheels)
        mend = f"pip uninstall {spare}, then pip install 'dear-pytorch[cuda{_torch_major() or '13'}]'"
        found = [Finding("CuPy", value, "several builds overwrite each other", mend)]
    return found


def _nccl(device: torch.device) -> Finding:
    wheels = [name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if _version(name)]
    if len(wheels) > 1:
        other = "nvidia-nccl-cu12" if _torch_major() == "13" else "nvidia-nccl-cu13"
        keep = next(name for name in wheels if name != other)
        mend = f"pip uninstall {other}, then pip install --force-reinstall {keep}"
        return Finding("NCCL", ", ".join(wheels), "two wheels write the same file", mend)
    installed = ", ".join(f"{name} {_version(name)}" for name in wheels) or "no wheel"
    if importlib.util.find_spec("cupy") is None:
        return Finding("NCCL", f"{installed}; not loaded without CuPy")
    try:
        version = library_version(load_library())
    except Exception as error:  # whatever loading somebody else's binary raises
        return Finding("NCCL", f"{installed}; cannot be loaded ({error})")
    return Finding("NCCL", f"{version} from {loaded_from() or 'an unknown place'} ({installed})")


def _interfaces(env: Mapping[str, str]) -> list[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    found = [Finding("network", ", ".join(names))]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = env.get(variable, "")
        exact = variable.startswith("GLOO") or asked.startswith("=")
        missing = [
            name
            for name in filter(None, asked.lstrip("=").split(","))
            if not asked.startswith("^") and not any(has == name if exact else has.startswith(name) for has in names)
        ]
        if missing:
            mend = f"export {variable}=<one of {', '.join(names)}>, or unset it"
            found.append(Finding(variable, asked, f"no interface {', '.join(missing)} on this host", mend))
    return found


def _variables(env: Mapping[str, str]) -> list[Finding]:
    shown = [f"{name}={env[name]}" for name in LAUNCHER_VARIABLES if name in env]
    return [Finding("variables", " ".join(shown) or "none of a launcher")]


def _launcher(env: Mapping[str, str]) -> Finding:
    try:
        launch = read_launch(env)
    except ArgumentError as error:
        return Finding("launcher", "cannot be read", str(error), "start all ranks with one launcher, such as torchrun")
    if launch.source == "none":
        return Finding("launcher", "none: one rank")
    return Finding(
        "launcher", f"{launch.source}: rank {launch.rank} of {launch.size}, {launch.local_size} on this host"
    )


def _split(problem: str) -> tuple[str, str]:
    """ "what is wrong; what mends it" in its two parts."""
    what, _, mend = problem.partition("; ")
    return what, mend or "see above"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_major() -> str:
    return (torch.version.cuda or "").partition(".")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
