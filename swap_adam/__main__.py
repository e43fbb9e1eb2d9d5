"""``python -m swap_adam demo | plan | bench | check``."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

# A command's module is imported when it is asked for: each has a main(argv) that returns the
# exit status, and an argument parser of its own.
MODULE_OF_COMMAND = {
    "demo": "swap_adam.demo.command",
    "plan": "swap_adam.forecast.command",
    "bench": "swap_adam.bench",
    "check": "swap_adam.check.command",
}
HELP_OF_COMMAND = {
    "demo": "train a small GPT with AdamW and with SwapAdamW, and compare",
    "plan": "what a model and a configuration will need; no device is used",
    "bench": "time and memory of a step against other optimizers and the link's limit",
    "check": "whether swapping works, bit by bit, on the device of this machine",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` names; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:6} {text}" for name, text in HELP_OF_COMMAND.items())
        + "\n\nEach command has a --help of its own.",
    )
    parser.add_argument("command", choices=sorted(MODULE_OF_COMMAND))
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    rest.required = False  # argparse takes it for required, and would name it beside the command
    arguments = parser.parse_args(argv)
    module = import_module(MODULE_OF_COMMAND[arguments.command])
    run = cast(Callable[[Sequence[str]], int], module.main)
    return run(arguments.arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
