"""``python -m swap_adam bench``: what is measured, and where the results go."""
from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from swap_adam.bench.accelerators import Accelerator, Link, choose_accelerator
from swap_adam.bench.contenders import MAIN, Contender, all_contenders
from swap_adam.bench.grids import Grid, contender_grid, link_grid
from swap_adam.bench.host_cost import HostCost, host_cost_grid, measure_host_costs
from swap_adam.bench.json_report import write_json
from swap_adam.bench.measurement import Line, measure
from swap_adam.bench.plot import draw
from swap_adam.bench.workloads import GPT, RFC, WORKLOADS, Workload

OUTPUT = Path("bench-output")
# What every contender is measured with, unless all are measured with everything.
COMPARED = (RFC, GPT)


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 if no line has a race, 1 if one has, 2 if the device is not there."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    try:
        accelerator = choose_accelerator(arguments.device)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 240)
    links = accelerator.links()
    console.print(f"{accelerator.description}; times {accelerator.clock}")
    workloads = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    lines: list[Line] = []
    grids: list[Grid] = []
    for workload in workloads:
        crossing = list(_crossing(workload, links, arguments.full))
        for index, (contender, on_links) in enumerate(crossing):
            with console.status(f"{workload.name}, {index + 1} of {len(crossing)}"):
                lines.extend(measure(accelerator, workload, contender, on_links))
                gc.collect()  # optimizers are large, and may be parts of cycles
        for grid in _grids(workload, links, lines, arguments.full):
            grids.append(grid)
            console.print(grid.as_table())
    costs = list(_host_costs(accelerator, console)) if arguments.host_cost else []
    if costs:
        grids.append(host_cost_grid(costs))
        console.print(grids[-1].as_table())
    _write(arguments.output, accelerator, workloads, links, lines, costs, grids)
    console.print(f"written to {arguments.output}: bench.json, bench.md, bench-*.png")
    return int(any(line.races for line in lines))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam bench",
        description="Times, bytes and counts of optimizer.step(), beside the native optimizers, "
        "the RFC's schedule and the limit of the link.",
    )
    parser.add_argument(
        "--device", default="auto",
        help="auto (the accelerator that is there, else the simulated one), simulated, or a name",
    )
    parser.add_argument(
        "--workload", action="append", choices=sorted(WORKLOADS), help="may be repeated"
    )
    parser.add_argument(
        "--full", action="store_true", help="every optimizer, workload and link crossed (an hour)"
    )
    parser.add_argument(
        "--no-host-cost", dest="host_cost", action="store_false",
        help="leave out what depends on this machine's speed and load",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="a folder (%(default)s)")
    return parser.parse_args(argv)


def _crossing(
    workload: Workload, links: Sequence[Link], full: bool
) -> Iterator[tuple[Contender, Sequence[Link]]]:
    """Those of ``MAIN`` on every link, and for some workloads all others on the first."""
    for contender in all_contenders():
        if full or contender in MAIN:
            yield contender, links
        elif workload in COMPARED:
            yield contender, links[:1]


def _grids(
    workload: Workload, links: Sequence[Link], lines: Sequence[Line], full: bool
) -> Iterator[Grid]:
    yield link_grid(workload, lines)
    if full or workload in COMPARED:
        for link in links if full else links[:1]:
            yield contender_grid(workload, link.label, lines)


def _host_costs(accelerator: Accelerator, console: Console) -> Iterator[HostCost]:
    with console.status("host cost"):
        yield from measure_host_costs(accelerator)


def _write(
    folder: Path, accelerator: Accelerator, workloads: Sequence[Workload], links: Sequence[Link],
    lines: Sequence[Line], costs: Sequence[HostCost], grids: Sequence[Grid],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", accelerator, lines, costs)
    text = "\n".join(grid.as_markdown() for grid in grids)
    (folder / "bench.md").write_text(text, encoding="utf-8")
    for workload in workloads:
        if workload in COMPARED:
            draw(
                folder / f"bench-{workload.name}.png", workload, links[0].label, lines,
                f"{accelerator.description}; times {accelerator.clock}",
            )
