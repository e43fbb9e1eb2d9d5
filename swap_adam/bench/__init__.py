"""``python -m swap_adam bench``: what a step costs, beside others and beside the link's limit."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

NEEDED = ("torch", "matplotlib", "rich")


class _Command(Protocol):
    def main(self, argv: Sequence[str]) -> int: ...


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 if all was measured without a race, 1 with one, 2 if it cannot run."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"the benchmark needs {' and '.join(missing)}, not installed here: "
            "pip install 'swap_adam[torch,demo]'",
            file=sys.stderr,
        )
        return 2
    return cast(_Command, import_module("swap_adam.bench.command")).main(argv)
