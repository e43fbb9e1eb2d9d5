"""``python -m swap_adam plan``: a forecast for the terminal."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from swap_adam.config import STATE_KEYS, SwapOptimizerConfig
from swap_adam.forecast.forecast import Forecast, forecast
from swap_adam.forecast.params import ITEMSIZE, ParamSpec, equal_params, parse_params
from swap_adam.simulator.costs import LINKS

DEFAULT_TENSORS = 300
DEFAULT_DTYPE = "float32"


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, or 2 for what cannot be planned."""
    arguments = _parser().parse_args(argv)
    try:
        params = _params(arguments)
        config = SwapOptimizerConfig(
            swap_times=arguments.swap_times,
            staging_nbytes=arguments.staging_nbytes,
            state_keys=arguments.state_keys,
            min_numel=arguments.min_numel,
            resident_nbytes=arguments.resident_nbytes,
            drain_in_step=arguments.drain_in_step,
            packed_swap=not arguments.per_tensor,
            split_tensors=not arguments.whole_tensors,
        )
        links = {
            name: costs.with_duplex(not arguments.half_duplex)
            for name, costs in LINKS.items()
            if arguments.link in (None, name)
        }
        found = forecast(
            params, config, amsgrad=arguments.amsgrad, implementation=arguments.implementation,
            links=links,
        )
    except (OSError, ValueError) as error:
        print(f"python -m swap_adam plan: {error}", file=sys.stderr)
        return 2
    print(describe(found))
    return 0


def _swap_times(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or auto, got {text!r}") from None


def _count(text: str) -> int:
    """A whole number, also as 7e9."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"a whole number such as 7e9, got {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam plan",
        description="What SwapAdamW will need for a model, per device: no device is used.",
        epilog="A shape is [COUNT*]SHAPE[:DTYPE], such as 32*4096x4096:bfloat16.",
    )
    model = parser.add_argument_group("the model: either its size or its shapes")
    model.add_argument("--params", type=_count, metavar="N", help="elements in all, such as 7e9")
    model.add_argument(
        "--tensors", type=_count, metavar="N",
        help=f"with --params: how many, all of the same size ({DEFAULT_TENSORS})",
    )
    model.add_argument(
        "--dtype", choices=sorted(ITEMSIZE), help=f"with --params: of all ({DEFAULT_DTYPE})"
    )
    model.add_argument("--shape", action="append", default=[], help="of a parameter; repeat it")
    model.add_argument("--shapes", type=Path, metavar="FILE", help="with a shape on each line")
    optimizer = parser.add_argument_group("the optimizer")
    optimizer.add_argument("--amsgrad", action="store_true")
    optimizer.add_argument(
        "--implementation", choices=("foreach", "for-loop", "fused"), default="foreach",
        help="of torch's functional: foreach is what foreach=None takes on accelerators",
    )
    config = parser.add_argument_group("the configuration, see docs/configuration.md")
    config.add_argument("--swap-times", type=_swap_times, default=16, metavar="N|auto")
    config.add_argument("--staging-nbytes", type=_count, metavar="N", help="with --swap-times auto")
    config.add_argument("--state-keys", nargs="+", choices=STATE_KEYS)
    config.add_argument("--min-numel", type=_count, default=SwapOptimizerConfig.min_numel)
    config.add_argument("--resident-nbytes", type=_count, default=0, metavar="N")
    config.add_argument("--drain-in-step", action="store_true")
    config.add_argument("--per-tensor", action="store_true", help="packed_swap=False")
    config.add_argument("--whole-tensors", action="store_true", help="split_tensors=False")
    link = parser.add_argument_group("the link, see docs/simulator.md")
    link.add_argument("--link", choices=sorted(LINKS), help="all of them unless said")
    link.add_argument("--half-duplex", action="store_true", help="its directions take turns")
    return parser


def _params(arguments: argparse.Namespace) -> list[ParamSpec]:
    lines: list[str] = list(arguments.shape)
    if arguments.shapes is not None:
        text = arguments.shapes.read_text()
        lines += [line for line in text.splitlines() if line.strip() and line[0] != "#"]
    if (arguments.params is None) == (not lines):
        raise ValueError("give either --params, or --shape or --shapes")
    if arguments.params is not None:
        return equal_params(
            arguments.params,
            DEFAULT_TENSORS if arguments.tensors is None else arguments.tensors,
            arguments.dtype or DEFAULT_DTYPE,
        )
    for option, value in (("--tensors", arguments.tensors), ("--dtype", arguments.dtype)):
        if value is not None:
            raise ValueError(
                f"{option} {value} goes with --params; a shape says both itself, "
                "such as 32*4096x4096:bfloat16"
            )
    return [spec for line in lines for spec in parse_params(line)]


def describe(found: Forecast) -> str:
    """The forecast as text of a dozen lines."""
    lines = [
        ("parameters", f"{found.param_count} tensors, {_size(found.param_nbytes)}"),
        ("moments", _size(found.state_nbytes)),
        ("  stay on the device", _size(found.resident_nbytes)),
        ("  swapped", _size(found.swapped_nbytes)),
        ("host memory, pinned", _size(found.pinned_nbytes)),
        ("batches", f"{found.batch_count}, the largest {_size(found.largest_batch_nbytes)}"),
        ("transfers per step", str(found.transfer_count)),
        ("device memory in step()", f"{_size(found.staging_nbytes)} of staging, up to "
         f"{_size(found.scratch_nbytes)} of temporaries"),
    ]
    for link, time in found.times.items():
        lines.append((
            f"step() on {link}",
            f"{_ms(time.step_s)}, the last copy lands at {_ms(time.landed_s)}; "
            f"the link alone needs {_ms(time.limit_s)}",
        ))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:{width}}  {value}" for label, value in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"
