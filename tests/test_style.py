"""House rules that a linter does not know, for every module of the three packages."""

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("dear", "dearcore", "kernels/dear_kernels")
HOST_WIDE_SYNC = {"torch.cuda.synchronize", "cuda.synchronize", "torch.accelerator.synchronize"}


def complaints(path: str, source: str) -> list[str]:
    """What the module at `path` does against the rules."""
    tree = ast.parse(source, path)
    found = []
    if not path.endswith("__main__.py") and not _assigns_all(tree):
        found.append(f"{path} has no __all__; list what other modules may use, or write `__all__: list[str] = []`")
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME)\b", line):
            found.append(f"{path}:{number} is unfinished: {line.strip()}")
    for node in ast.walk(tree):
        if _names_host_wide_sync(node):
            found.append(f"{path}:{node.lineno} stops the whole device; wait for an event instead")
    return found


def _assigns_all(tree: ast.Module) -> bool:
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _names_host_wide_sync(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in HOST_WIDE_SYNC
    if isinstance(node, ast.ImportFrom):
        return any(f"{node.module}.{alias.name}" in HOST_WIDE_SYNC for alias in node.names)
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_package_follows_the_house_rules(package: str) -> None:
    files = sorted((REPO / package).rglob("*.py"))
    assert files, f"no modules under {package}/"
    found = [line for file in files for line in complaints(file.relative_to(REPO).as_posix(), file.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import os", "a.py has no __all__"),
        ("def f():\n    __all__ = ['f']", "a.py has no __all__"),
        ("__all__: list[str]", "a.py has no __all__"),
        ("__all__ = []\nx = 1  # TODO later", "a.py:2 is unfinished: x = 1  # TODO later"),
        ("__all__ = []\n# FIXME", "a.py:2 is unfinished: # FIXME"),
        ("__all__ = []\nimport torch\ntorch.cuda.synchronize()", "a.py:3 stops the whole device"),
        ("__all__ = []\nfrom torch.cuda import synchronize", "a.py:2 stops the whole device"),
        ("__all__ = []\nfrom torch import cuda\nf = cuda.synchronize", "a.py:3 stops the whole device"),
    ],
)
def test_checker_reports(source: str, complaint: str) -> None:
    (found,) = complaints("a.py", source)
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__main__.py", "import os"),
        ("a.py", '"""Never torch.cuda.synchronize()."""\n__all__ = ["f"]\ndef f(event):\n    event.synchronize()'),
    ],
)
def test_checker_accepts(path: str, source: str) -> None:
    assert complaints(path, source) == []
