"""The comparison as a table for the terminal."""
from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from swap_adam.demo.training import Run


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def make_table(runs: Sequence[Run], differing: Sequence[int], clock: str) -> Table:
    """A column per run, the first one being what the others are compared with.

    ``differing`` counts, per run, what is not bitwise equal to the first.
    """
    table = Table(title="The same training three times", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name.replace(" ", "\n", 1), justify="right")

    needs = [run.needs for run in runs]

    def row(label: str, values: Sequence[str], end_section: bool = False) -> None:
        table.add_row(label, *values, end_section=end_section)

    def bytes_row(label: str, values: Sequence[int], end_section: bool = False) -> None:
        row(label, [megabytes(value) for value in values], end_section)

    steps = len(runs[0].snapshot.losses)
    row(f"loss after {steps} steps", [f"{run.last_loss:.6f}" for run in runs])
    row(
        "bitwise equal",
        ["reference", *(_verdict(count) for count in differing[1:])],
        end_section=True,
    )
    bytes_row("device, between steps", [need.idle_nbytes for need in needs])
    bytes_row("  above parameters", [need.idle_extra_nbytes for need in needs])
    bytes_row("device, peak", [need.peak_nbytes for need in needs])
    bytes_row("device, peak in step()", [need.update_peak_nbytes for need in needs])
    bytes_row(
        "  above parameters, gradients", [need.update_extra_nbytes for need in needs]
    )
    bytes_row("host, pinned", [need.host_nbytes for need in needs], end_section=True)
    row(f"step() ({clock})", [f"{need.update_ms:.2f} ms" for need in needs])
    row("  with forward and backward", [f"{need.step_ms:.2f} ms" for need in needs])
    return table


def _verdict(count: int) -> str:
    return f"[red]NO, {count} differ[/red]" if count else "[green]yes[/green]"
