"""Imports run one way, and every edge to a third party has one owner.

    dear -> dearcore -> dear_kernels        bench, tests -> all three; nobody imports bench or tests

Read from the ASTs, so an import inside a function counts too. Not seen: a module bound to a variable
(`c = torch.cuda; c.Event()`) and names made at run time. What stands under `if TYPE_CHECKING:` is no edge to a third
party, since it never runs, but it is one between our own packages.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

# Package -> what it may import of ours.
LAYERS: dict[str, set[str]] = {
    "dear_kernels": set(),
    "dearcore": {"dear_kernels"},
    "dear": {"dearcore"},
    "bench": {"dear", "dearcore", "dear_kernels"},
}
FOLDERS = {"dear_kernels": "kernels/dear_kernels", "dearcore": "dearcore", "dear": "dear", "bench": "bench"}
OURS = {*LAYERS, "kernels", "tests", "examples"}

ANYWHERE = ("",)  # every path starts with it
STREAMS = ("dearcore/streams.py",)
GROUPS = ("dearcore/gloo.py", "dearcore/rendezvous.py")

# Dotted name -> the files (or folders) that may use it; the longest name that fits decides. The installed packages
# only: bench times baselines, so it makes process groups and events of its own.
OWNERS: dict[str, tuple[str, ...]] = {
    "numpy": ANYWHERE,
    "torch": ANYWHERE,
    "triton": ("kernels/dear_kernels/",),
    "cupy": ("dearcore/nccl.py",),
    "matplotlib": ("dear/timeline.py",),  # imported when a picture is asked for
    "bayes_opt": ("dear/tuner.py",),  # imported when buckets are tuned
    "torch.distributed": GROUPS,
    "torch.distributed.Store": ANYWHERE,  # the key-value store, the tensors and the checkpoints are no process groups
    "torch.distributed.PrefixStore": ANYWHERE,
    "torch.distributed.tensor": ANYWHERE,
    "torch.distributed.checkpoint": ANYWHERE,
    "torch.cuda.Event": STREAMS,
    "torch.cuda.ExternalStream": STREAMS,
    "torch.cuda.Stream": STREAMS,
    "torch.cuda.StreamContext": STREAMS,
    "torch.cuda.current_stream": STREAMS,
    "torch.cuda.default_stream": STREAMS,
    "torch.cuda.set_stream": STREAMS,
    "torch.cuda.stream": STREAMS,
    "torch.cuda.streams": STREAMS,
    "torch.cuda.synchronize": STREAMS,
    "torch.Event": STREAMS,
    "torch.Stream": STREAMS,
    "torch.accelerator.current_stream": STREAMS,
    "torch.accelerator.set_stream": STREAMS,
    "torch.accelerator.synchronize": STREAMS,
}

NOT_OWNED = "no file owns it, since dear needs only torch and numpy"


def complaints(path: str, source: str) -> list[str]:
    """What the file at `path` (from the repository's root, with /) imports or uses against the rules."""
    tree = ast.parse(source, path)
    package = next(name for name, folder in FOLDERS.items() if path.startswith(folder + "/"))
    inside = (package, *Path(path).relative_to(FOLDERS[package]).parent.parts)
    reader = _Reader(inside)
    reader.read(tree)
    found = []
    for name in reader.imported + reader.imported_for_types:
        root = name.split(".")[0]
        if root in OURS and root != package and root not in LAYERS[package]:
            allowed = ", ".join(sorted(LAYERS[package])) or "none of our packages"
            found.append(f"{path} imports {root}; {package} may import only {allowed}")
        elif root == "":
            found.append(f"{path} imports from above {package}; a relative import stays in its package")
    if package != "bench":
        for name in reader.imported + reader.used:
            found.extend(_third_party_complaint(path, name))
    return list(dict.fromkeys(found))


def _third_party_complaint(path: str, name: str) -> Iterator[str]:
    root = name.split(".")[0]
    if root in OURS or root == "" or root in sys.stdlib_module_names:
        return
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    edge = next((prefix for prefix in prefixes if prefix in OWNERS), None)
    if edge is None:
        yield f"{path} uses {root}; {NOT_OWNED}"
    elif not path.startswith(OWNERS[edge]):
        yield f"{path} uses {edge}; only {' and '.join(OWNERS[edge])} may"


class _Reader:
    """Collects the dotted names that a module imports or reaches through an imported name."""

    def __init__(self, inside: tuple[str, ...]) -> None:
        self.inside = inside  # the package that relative imports start from
        self.imported: list[str] = []
        self.imported_for_types: list[str] = []
        self.used: list[str] = []
        self._names: dict[str, str] = {}  # name in this file -> dotted name it stands for

    def read(self, tree: ast.AST) -> None:
        self._imports(tree, for_types=False)
        self._uses(tree)

    def _imports(self, node: ast.AST, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    bound = alias.name if alias.asname else alias.name.split(".")[0]
                    self._add(alias.name, alias.asname or bound, bound, for_types)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    name = f"{self._origin(child)}.{alias.name}"
                    self._add(name, alias.asname or alias.name, name, for_types)
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for statement in child.body:
                    self._imports(ast.Module([statement], []), for_types=True)
                for statement in child.orelse:
                    self._imports(ast.Module([statement], []), for_types)
            else:
                self._imports(child, for_types)

    def _add(self, name: str, local: str, stands_for: str, for_types: bool) -> None:
        if for_types:
            self.imported_for_types.append(name)
        else:
            self.imported.append(name)
            self._names[local] = stands_for

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        base = self.inside[: len(self.inside) - node.level + 1] if node.level <= len(self.inside) else ()
        return ".".join([*base, node.module or ""]).rstrip(".") if base else ""

    def _uses(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            name = self._resolve(child)
            if name is not None and isinstance(child, ast.Attribute):
                self.used.append(name)
                continue  # its inner attributes are prefixes of the same name
            if isinstance(child, ast.Call) and self._resolve(child.func) in ("importlib.import_module", "__import__"):
                target = child.args[0] if child.args else None
                if isinstance(target, ast.Constant) and isinstance(target.value, str) and target.value[:1] != ".":
                    self.imported.append(target.value)
            self._uses(child)

    def _resolve(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return "__import__" if node.id == "__import__" else self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._resolve(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None


@pytest.mark.parametrize("package", LAYERS)
def test_package_keeps_to_its_imports(package: str) -> None:
    files = sorted((REPO / FOLDERS[package]).rglob("*.py"))
    assert files, f"no modules under {FOLDERS[package]}/"
    found = [line for file in files for line in complaints(file.relative_to(REPO).as_posix(), file.read_text())]
    assert not found, "\n" + "\n".join(found)


DEARCORE_RULE = "dearcore may import only dear_kernels"
GROUP_RULE = "uses torch.distributed; only dearcore/gloo.py and dearcore/rendezvous.py may"


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("dearcore/bucket.py", "import dear", f"dearcore/bucket.py imports dear; {DEARCORE_RULE}"),
        ("dearcore/bucket.py", "import dear.x as y", f"dearcore/bucket.py imports dear; {DEARCORE_RULE}"),
        ("dearcore/bucket.py", "from dear import x", f"dearcore/bucket.py imports dear; {DEARCORE_RULE}"),
        ("dearcore/bucket.py", "def f():\n import dear", f"dearcore/bucket.py imports dear; {DEARCORE_RULE}"),
        ("dearcore/bucket.py", "import tests.support", f"dearcore/bucket.py imports tests; {DEARCORE_RULE}"),
        ("dearcore/bucket.py", "import kernels", f"dearcore/bucket.py imports kernels; {DEARCORE_RULE}"),
        (
            "dearcore/bucket.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from dear import x",
            f"dearcore/bucket.py imports dear; {DEARCORE_RULE}",
        ),
        (
            "dearcore/bucket.py",
            "import importlib\nimportlib.import_module('dear.x')",
            f"dearcore/bucket.py imports dear; {DEARCORE_RULE}",
        ),
        (
            "dearcore/bucket.py",
            "from .. import dear",
            "dearcore/bucket.py imports from above dearcore; a relative import stays in its package",
        ),
        ("dear/opt.py", "import dear_kernels", "dear/opt.py imports dear_kernels; dear may import only dearcore"),
        ("dear/opt.py", "import bench", "dear/opt.py imports bench; dear may import only dearcore"),
        (
            "kernels/dear_kernels/pack.py",
            "import dearcore",
            "kernels/dear_kernels/pack.py imports dearcore; dear_kernels may import only none of our packages",
        ),
        (
            "bench/run.py",
            "import tests",
            "bench/run.py imports tests; bench may import only dear, dear_kernels, dearcore",
        ),
        ("dear/opt.py", "import triton", "dear/opt.py uses triton; only kernels/dear_kernels/ may"),
        ("dear/opt.py", "__import__('triton')", "dear/opt.py uses triton; only kernels/dear_kernels/ may"),
        ("dearcore/gloo.py", "from cupy.cuda import nccl", "dearcore/gloo.py uses cupy; only dearcore/nccl.py may"),
        (
            "dearcore/nccl.py",
            "import importlib as i\ndef f():\n i.import_module('cupy').x\nimport torch.distributed as dist",
            f"dearcore/nccl.py {GROUP_RULE}",
        ),
        ("dear/opt.py", "from torch import distributed as d", f"dear/opt.py {GROUP_RULE}"),
        ("dear/opt.py", "from torch.distributed import new_group", f"dear/opt.py {GROUP_RULE}"),
        ("dear/opt.py", "import torch\nx = torch.distributed.group.WORLD", f"dear/opt.py {GROUP_RULE}"),
        (
            "dear/opt.py",
            "import torch\ntorch.cuda.Event().record()",
            "dear/opt.py uses torch.cuda.Event; only dearcore/streams.py may",
        ),
        (
            "dear/opt.py",
            "from torch import cuda as c\nwith c.stream(x): pass",
            "dear/opt.py uses torch.cuda.stream; only dearcore/streams.py may",
        ),
        (
            "dear/opt.py",
            "from torch.cuda import current_stream",
            "dear/opt.py uses torch.cuda.current_stream; only dearcore/streams.py may",
        ),
        (
            "dear/opt.py",
            "import scipy.linalg",
            "dear/opt.py uses scipy; no file owns it, since dear needs only torch and numpy",
        ),
    ],
)
def test_checker_reports(path: str, source: str, complaint: str) -> None:
    assert complaints(path, source) == [complaint]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dear/opt.py", "import dearcore.plan\nfrom dear.errors import x\nfrom . import y\nfrom .z import w"),
        ("dear/sub/opt.py", "from .. import errors\nfrom ..errors import x"),
        ("dearcore/sub/opt.py", "from dear_kernels import pack_"),
        ("dear/opt.py", "import os, numpy as np, torch\ntorch.cuda.is_available()\nnp.zeros(1)"),
        ("dear/opt.py", "from torch.distributed import Store\nfrom torch.distributed.tensor import DTensor"),
        (
            "dear/opt.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from torch.distributed import ProcessGroup",
        ),
        ("kernels/dear_kernels/pack.py", "import triton.language as tl\ntl.load(1)"),
        ("dearcore/nccl.py", "def f():\n from cupy.cuda import nccl"),
        ("dearcore/gloo.py", "import torch.distributed as dist\ndist.new_group()"),
        ("dearcore/streams.py", "import torch\ntorch.cuda.current_stream()"),
        ("bench/run.py", "import dear, dearcore, dear_kernels, torch.distributed, matplotlib\nfrom . import other"),
    ],
)
def test_checker_accepts(path: str, source: str) -> None:
    assert complaints(path, source) == []


def _modules_after(statement: str) -> set[str]:
    path = os.pathsep.join([str(REPO), str(REPO / "kernels")])
    run = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_dear_loads_only_torch_and_numpy() -> None:
    # torch may load Triton by itself, so only what dear adds counts.
    added = _modules_after("import dear") - _modules_after("import numpy, torch")
    assert "dear" in added
    roots = {name.split(".")[0] for name in added}
    assert roots - sys.stdlib_module_names <= {"dear", "dearcore", "dear_kernels", "torch", "numpy"}


def test_probe_sees_a_third_package() -> None:
    assert "pytest" in _modules_after("import pytest") - _modules_after("import numpy, torch")
