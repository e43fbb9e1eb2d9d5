"""``python -m swap_adam check``: versions, device, pinned memory, and PASS or FAIL."""
from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product

import swap_adam

PINNED_NBYTES = 1 << 26
SHOWN_FINDINGS = 3


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 for PASS, 1 for FAIL, 2 if there is nothing to check."""
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam check",
        description="Trains a tiny model natively and swapped on this machine's device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--device", default="auto",
        help="auto (the accelerator if there is one, else the simulated one), simulated, or cuda:1",
    )
    arguments = parser.parse_args(argv)
    if find_spec("torch") is None:
        print("check needs torch, not installed here: pip install 'swap_adam[torch]'",
              file=sys.stderr)
        return 2
    return _check(arguments.device)


def _check(device_name: str) -> int:
    import torch

    from swap_adam.check.trial import CASES, DTYPES, pin, run_case
    from swap_adam.demo.accelerator import choose_accelerator

    print(f"swap_adam  {swap_adam.__version__}")
    print(f"torch      {torch.__version__}")
    print(f"Python     {platform.python_version()} on {platform.machine()}")
    try:
        accelerator = choose_accelerator(device_name, link="pcie4")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"device     {accelerator.device}: {accelerator.description}")
    passed = [_report(f"{PINNED_NBYTES >> 20} MiB of pinned host memory",
                      partial(pin, PINNED_NBYTES, accelerator.device))]
    for case, dtype, packed in product(CASES, DTYPES, (True, False)):
        name = f"{case.name}, {str(dtype)[6:]}, {'packed' if packed else 'per tensor'}"
        passed.append(_report(name, partial(run_case, case, packed, dtype, accelerator.device)))
    if all(passed):
        print("PASS: bitwise equal to the native optimizers")
        return 0
    print("FAIL")
    return 1


def _report(name: str, trial: Callable[[], Sequence[str]]) -> bool:
    """Print what ``trial`` finds wrong; an error of any kind is a finding, not an end."""
    try:
        found = list(trial())
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    print(f"{'FAIL' if found else 'ok':4}  {name}")
    for line in found[:SHOWN_FINDINGS]:
        print(f"      {line}")
    return not found
