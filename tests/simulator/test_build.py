"""The simulator builds itself once, also when several processes want it at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swap_adam.simulator import build

# Stands in for g++: counts its calls and makes an empty result.
COMPILER = """#!{python}
import os, sys, time
with open({log!r}, "a") as log:
    log.write("called\\n")
time.sleep(0.05)
open(sys.argv[sys.argv.index("-o") + 1], "w").close()
"""

ASK = "from swap_adam.simulator.build import library; print(library())"


def environment(cache: Path, **more: str) -> dict[str, str]:
    root = str(Path(build.__file__).parents[2])
    return {**os.environ, "SWAP_ADAM_SIMULATOR_CACHE": str(cache), "PYTHONPATH": root, **more}


def ask(env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(python=sys.executable, log=str(tmp_path / "log")))
    script.chmod(0o755)
    return script


def test_two_processes_at_once_build_once(device: str, tmp_path: Path, compiler: Path) -> None:
    env = environment(tmp_path / "cache", CXX=str(compiler))
    processes = [ask(env) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] and Path(outputs[0][0].strip()).exists()
    assert sorted("building" in err for _, err in outputs) == [False, True]
    sources = len(list((Path(build.__file__).parent / "csrc").glob("*.cpp")))
    assert len((tmp_path / "log").read_text().splitlines()) == sources + 1
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(left) == 2 and left[1] == left[0] + ".lock"  # no scratch folder


def test_no_compiler_is_said_clearly(device: str, tmp_path: Path) -> None:
    process = ask(environment(tmp_path / "cache", CXX="no-such-compiler"))
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "no compiler 'no-such-compiler'" in error and "install g++" in error


def test_failing_compiler_shows_its_message(device: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    _, error = ask(environment(tmp_path / "cache", CXX=str(broken))).communicate(timeout=60)
    assert "building the simulated accelerator failed" in error and "it is broken" in error


def test_importing_the_simulator_imports_no_framework(device: str, tmp_path: Path) -> None:
    code = (
        "import sys, swap_adam.simulator as s\n"
        "s.enable, s.configure, s.record_operations, s.trace, s.Costs\n"
        "assert not {'torch', 'mindspore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=True)


def test_using_it_before_enable_is_an_error(device: str, tmp_path: Path) -> None:
    code = "import swap_adam.simulator as s; s.now()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True
    )
    assert "call swap_adam.simulator.enable() first" in done.stderr


def test_enabling_twice_is_once_and_another_count_is_an_error(device: str) -> None:
    import swap_adam.simulator as simulator

    simulator.enable()
    simulator.enable(device_count=2)
    with pytest.raises(ValueError, match="device_count=2.*cannot become 3"):
        simulator.enable(device_count=3)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"link": "pcie9"}, "link='pcie9': one of pcie4, pcie5, c2c, hccs"),
        ({"races": "maybe"}, "races='maybe': one of off, collect, raise"),
        ({"capacity_nbytes": -1}, "capacity_nbytes=-1"),
    ],
)
def test_wrong_configuration_is_refused(device: str, wrong: dict[str, object], match: str) -> None:
    import swap_adam.simulator as simulator

    with pytest.raises(ValueError, match=match):
        simulator.configure(**wrong)


def test_violation_of_the_last_operation_is_not_lost(device: str, tmp_path: Path) -> None:
    code = (
        "import torch, swap_adam.simulator as s\n"
        "s.enable()\n"
        "state, host = torch.ones(8, device='simulated'), torch.ones(8).pin_memory()\n"
        "other = torch.ones(8, device='simulated')\n"
        "torch.accelerator.synchronize()\n"
        "with torch.Stream('simulated'): host.copy_(state, non_blocking=True)\n"
        "del state\n"
        "other + 1"
    )
    env = environment(build.cache_folder())
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "1 violations that nobody was told of, the first: freed in flight" in done.stderr
