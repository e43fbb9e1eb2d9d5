"""The import contracts in setup.cfg name every module, and a breach of one is found."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_CORE = {"swap_adam.__init__", "swap_adam.__main__"}


@pytest.fixture(scope="module")
def core():
    modules = {f"swap_adam.{file.stem}" for file in (ROOT / "swap_adam").glob("*.py")} - NOT_CORE
    return modules | {"swap_adam.schedule"}


def contract(name, option):
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return set(config[f"importlinter:contract:{name}"][option].split())


def test_core_contract_covers_every_core_module(core):
    assert contract("core", "source_modules") == core


def test_pure_contract_forbids_every_core_module_that_is_not_pure(core):
    pure = contract("pure", "source_modules")
    schedule = {f"swap_adam.schedule.{file.stem}" for file in
                (ROOT / "swap_adam" / "schedule").glob("*.py") if file.stem != "__init__"}
    modules = core - {"swap_adam.schedule", "swap_adam.errors"} | schedule
    assert pure < modules
    assert modules - pure == contract("pure", "forbidden_modules") & modules


@pytest.mark.parametrize(
    "file, line, broken",
    [
        ("slot.py", "import torch", "The core imports no framework"),
        ("mixin.py", "import numpy", "The core imports no framework"),
        ("slabs.py", "import swap_adam.config", "What is pure arithmetic"),
        ("schedule/plan.py", "import swap_adam.schedule.pipeline", "A schedule knows"),
        ("torch/adam.py", "import swap_adam.mindspore", "The two halves are independent"),
        ("torch/adam.py", "import mindspore", "The torch half"),
        ("mindspore/adam.py", "import torch", "The MindSpore half does not know torch"),
        ("torch/backend.py", "import swap_adam.simulator", "The library never imports"),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, broken):
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "swap_adam", tmp_path / "swap_adam", ignore=ignore)
    with open(tmp_path / "swap_adam" / file, "a") as module:
        module.write(f"\n{line}\n")
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", lint], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(broken) for text in verdicts), done.stdout


def test_no_package_under_tests():
    """``tests/torch/__init__.py`` and its like would shadow the real framework."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []
