"""What a user gets who installs the package, not the repository."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy to build in: building writes into the tree it builds from."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "swap_adam", copy / "swap_adam", ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def expected(source):
    """Paths of the Python modules and of the data files that belong into a distribution."""
    package = source / "swap_adam"
    files = [
        *package.rglob("*.py"),
        *package.glob("simulator/csrc/*.cpp"),
        *package.glob("simulator/csrc/*.h"),
        package / "py.typed",
    ]
    return {str(file.relative_to(source)) for file in files}


def build(source, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(source):
    build(source, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", "dist")
    (path,) = source.glob("dist/*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_simulator_sources_are_there(expected):
    assert any(name.endswith(".cpp") for name in expected)


def test_wheel_has_the_package_and_nothing_else(wheel, expected):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_wheel_has_the_license(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_sdist_has_the_package(source, expected):
    build(source, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')")
    (path,) = source.glob("dist/*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert expected <= names


def test_core_depends_on_nothing(metadata):
    requirements = metadata.get_all("Requires-Dist")
    assert [line for line in requirements if "extra ==" not in line] == []


@pytest.mark.parametrize(
    "extra, frameworks",
    [
        ("torch", {"torch"}),
        ("npu", {"torch_npu"}),
        ("mindspore", {"mindspore", "numpy"}),
        ("mindformers", {"mindformers", "mindspore", "numpy"}),
        ("demo", set()),
        ("test", set()),
        ("docs", set()),
    ],
)
def test_extra_brings_only_its_own_framework(metadata, extra, frameworks):
    assert extra in metadata.get_all("Provides-Extra")
    names = {
        re.match(r"[\w-]+", line).group().replace("-", "_")
        for line in metadata.get_all("Requires-Dist")
        if re.search(rf"""extra == ['"]{extra}['"]""", line)
    }
    assert names & {"mindformers", "mindspore", "numpy", "torch", "torch_npu"} == frameworks


def test_no_link_of_the_readme_breaks_on_a_package_page(metadata):
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert links, "nothing to check"
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
