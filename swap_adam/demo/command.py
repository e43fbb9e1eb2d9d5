"""``python -m swap_adam demo``: the three runs, the table, the pictures."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

NEEDED_BY_FRAMEWORK = {
    "torch": ("torch", "matplotlib", "rich"),
    "mindspore": ("mindspore",),
}


class _Demo(Protocol):
    def main(self, argv: Sequence[str]) -> int: ...


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 if all runs are bitwise equal, 1 if not, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m swap_adam demo", add_help=False)
    parser.add_argument("--framework", choices=("torch", "mindspore"), default="torch")
    chosen, rest = parser.parse_known_args(argv)
    missing = [name for name in NEEDED_BY_FRAMEWORK[chosen.framework] if find_spec(name) is None]
    if missing:
        print(
            f"the demo needs {' and '.join(missing)}, not installed here: "
            f"pip install 'swap_adam[{chosen.framework},demo]'",
            file=sys.stderr,
        )
        return 2
    # Both are big imports, and torch and MindSpore must not share a process.
    name = "swap_adam.demo.run" if chosen.framework == "torch" else "swap_adam.demo_mindspore"
    return cast(_Demo, import_module(name)).main(rest)
