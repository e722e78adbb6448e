"""The wheel holds exactly our three packages and needs neither Triton nor CuPy nor this checkout to be imported.

No network: the wheel is built with the hatchling of this environment and installed without dependencies.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SOURCES = {"dear": REPO / "dear", "dearcore": REPO / "dearcore", "dear_kernels": REPO / "kernels" / "dear_kernels"}

# Takes the checkout off the path (an editable install adds it), puts `site` first, and refuses the blocked packages.
PREAMBLE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.path[:] = [{site!r}] + [entry for entry in sys.path if entry not in {checkout!r}]
"""


def _run(args: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


def _python(code: str, site: Path, cwd: Path, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    checkout = (str(REPO), str(REPO / "kernels"))
    preamble = PREAMBLE.format(blocked=blocked, site=str(site), checkout=checkout)
    return _run(["-P", "-c", preamble + code], cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run = _run(["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPO)], folder)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run = _run(["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_wheel_holds_exactly_the_three_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    distribution, version = wheel.name.split("-")[:2]
    assert distribution == "dear_pytorch"
    assert {name.split("/")[0] for name in names} == {*SOURCES, f"dear_pytorch-{version}.dist-info"}
    expected = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for file in folder.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert any(name.endswith("/LICENSE") for name in names)


def test_installed_wheel_imports_without_triton_and_cupy(site: Path, tmp_path: Path) -> None:
    code = "import dear, dearcore, dear_kernels\nprint(dear.__file__, dearcore.__file__, dear_kernels.__file__)"
    run = _python(code, site, tmp_path, blocked=("triton", "cupy"))
    assert run.returncode == 0, run.stderr
    expected = [str(site / package / "__init__.py") for package in ("dear", "dearcore", "dear_kernels")]
    assert run.stdout.split() == expected


@pytest.mark.parametrize("package", ["triton", "cupy"])
def test_blocked_package_cannot_be_imported(package: str, site: Path, tmp_path: Path) -> None:
    run = _python(f"import {package}.x", site, tmp_path, blocked=("triton", "cupy"))
    assert run.returncode == 1
    assert f"ModuleNotFoundError: No module named '{package}'" in run.stderr


def test_checkout_cannot_be_imported_by_the_probe(tmp_path: Path) -> None:
    run = _python("import dear", tmp_path, tmp_path)
    assert "ModuleNotFoundError: No module named 'dear'" in run.stderr


HUGGING_FACE = "import dear, dear_kernels, kernels\nprint(kernels.__file__)\nkernels.get_kernel"


def test_hugging_face_kernels_imports_beside_the_wheel(site: Path, tmp_path: Path) -> None:
    run = _python(HUGGING_FACE, site, tmp_path)
    assert run.returncode == 0, run.stderr
    assert not Path(run.stdout.strip()).is_relative_to(site)


def test_hugging_face_kernels_imports_in_the_checkout() -> None:
    # Here kernels/ stands on the path too, and stays behind a real package because it has no __init__.py.
    run = _run(["-c", "import sys\nsys.path.append('kernels')\n" + HUGGING_FACE], REPO)
    assert run.returncode == 0, run.stderr
    assert not Path(run.stdout.strip()).is_relative_to(REPO / "kernels")


def test_probe_sees_a_package_that_hides_hugging_faces(site: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    run = _python(f"sys.path.append({str(site)!r})\n{HUGGING_FACE}", tmp_path, tmp_path)
    assert "AttributeError: module 'kernels' has no attribute 'get_kernel'" in run.stderr
