"""What importing the package needs, and what it must leave alone.

Every case runs in a fresh interpreter, in which the named packages look as if they were not
installed.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {"hyper_parallel", "mindformers", "mindspore", "numpy", "torch", "torch_npu"}

PACKAGE = Path(__file__).parents[2] / "swap_adam"
CORE = ["swap_adam"] + [
    f"swap_adam.{file.stem}"
    for file in sorted(PACKAGE.glob("*.py"))
    if file.stem not in ("__init__", "__main__")
]

PROGRAM = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, Absent())
{code}
loaded = sorted(name for name in {unwanted!r} if name in sys.modules)
assert not loaded, f"{{loaded}} should not have been imported"
"""


def run(code, *, absent=(), unwanted=()):
    """Runs ``code`` without the packages ``absent``; fails if it loads a module ``unwanted``."""
    program = PROGRAM.format(absent=set(absent), code=code, unwanted=set(unwanted))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def needs(name):
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
    )


@pytest.mark.parametrize("module", CORE)
def test_core_imports_without_any_framework(module):
    run(f"import {module}", absent=FRAMEWORKS)


def test_public_names_work_without_any_framework():
    run(
        "from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer\n"
        "assert SwapOptimizerConfig(swap_times=4).swap_times == 4\n"
        "assert callable(swap_optimizer) and callable(unswap_optimizer)",
        absent=FRAMEWORKS,
    )


def test_core_leaves_installed_frameworks_alone():
    run(
        "import " + ", ".join(CORE),
        unwanted=FRAMEWORKS | {"swap_adam.mindspore", "swap_adam.simulator", "swap_adam.torch"},
    )


@needs("torch")
def test_torch_half_imports_without_mindspore():
    run(
        "from swap_adam.torch import SwapAdam, SwapAdamW, SwapHyperAdamW",
        absent={"hyper_parallel", "mindformers", "mindspore", "torch_npu"},
        unwanted={"swap_adam.mindspore", "swap_adam.simulator"},
    )


@needs("mindspore")
def test_mindspore_half_imports_without_torch_and_mindformers():
    run(
        "from swap_adam.mindspore import SwapAdamWeightDecay, SwapMSAdam",
        absent={"hyper_parallel", "mindformers", "torch", "torch_npu"},
        unwanted={"swap_adam.simulator", "swap_adam.torch"},
    )


@pytest.mark.parametrize(
    "module, package, extra",
    [
        ("swap_adam.torch", "torch", "torch"),
        ("swap_adam.torch.adam", "torch", "torch"),
        ("swap_adam.mindspore", "mindspore", "mindspore"),
    ],
)
def test_a_half_without_its_framework_names_the_extra(module, package, extra):
    run(
        "try:\n"
        f"    import {module}\n"
        "except ModuleNotFoundError as error:\n"
        f"    assert error.name == {package!r}\n"
        f"    assert 'pip install \"swap_adam[{extra}]\"' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('imported')",
        absent=FRAMEWORKS,
    )


@needs("mindspore")
def test_the_mindformers_class_without_mindformers_names_the_extra():
    run(
        "try:\n"
        "    from swap_adam.mindspore import SwapMFAdamW\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'pip install \"swap_adam[mindformers]\"' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('imported')",
        absent={"mindformers"},
    )


def test_the_simulator_without_torch_names_the_extra():
    run(
        "import swap_adam.simulator\n"
        "try:\n"
        "    swap_adam.simulator.enable()\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'pip install \"swap_adam[torch]\"' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('enabled')",
        absent={"torch"},
    )


@pytest.mark.parametrize(
    "name, half",
    [
        ("SwapAdam", "torch"), ("SwapAdamW", "torch"), ("SwapHyperAdamW", "torch"),
        ("SwapMSAdam", "mindspore"), ("SwapAdamWeightDecay", "mindspore"),
        ("SwapMFAdamW", "mindspore"),
    ],
)
def test_importing_a_class_from_the_package_prints_where_it_is(name, half):
    program = f"from swap_adam import {name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"ImportError: {name} is in swap_adam.{half}: from swap_adam.{half} import {name}"
    )


@needs("torch")
@needs("mindspore")
def test_every_swap_class_is_known_to_the_package():
    for half in ("torch", "mindspore"):
        run(
            f"import swap_adam, swap_adam.{half} as half\n"
            "for name in half.__all__:\n"
            "    if name not in swap_adam.__all__:\n"
            f"        assert swap_adam._HALF_OF_CLASS[name] == {half!r}, name"
        )
