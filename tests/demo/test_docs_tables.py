"""The tables in the documentation say what the code says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from swap_adam import SwapOptimizerConfig
from swap_adam.__main__ import main
from swap_adam.simulator.costs import LINKS, Costs

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, first_header: str) -> list[list[str]]:
    """The cells of the table in ``page`` whose first column is ``first_header``."""
    lines = (DOCS / page).read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(f"| {first_header} |")]
    (start,) = starts
    table = []
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return table


def test_every_field_of_the_configuration_has_its_row() -> None:
    documented = {row[0]: row[1] for row in rows("configuration.md", "field")}
    fields = {
        field.name: repr(field.default).replace("'", '"')
        for field in dataclasses.fields(SwapOptimizerConfig)
    }
    assert documented == fields


def test_every_link_has_its_row() -> None:
    presets = rows("simulator.md", "preset")
    documented = {row[0]: [float(cell) for cell in row[1:]] for row in presets}
    assert documented == {
        name: [
            costs.copy_in_gb_per_s, costs.copy_out_gb_per_s, costs.device_gb_per_s,
            costs.host_gb_per_s,
        ]
        for name, costs in LINKS.items()
    }


def test_every_fixed_cost_has_its_row() -> None:
    documented = [float(row[1]) for row in rows("simulator.md", "cost")]
    fixed = [field.name for field in dataclasses.fields(Costs) if field.name.endswith("_us")]
    order = ["launch_us", "kernel_us", "transfer_us", "wait_us", "event_us"]
    assert sorted(fixed) == sorted(order)
    for costs in LINKS.values():
        assert documented == [getattr(costs, name) for name in order]


def test_the_tutorial_shows_all_that_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "$ python -m swap_adam "
    page = (DOCS / "tutorial.md").read_text()
    command, shown = page[page.index(f"{prompt}plan"):].split("\n", 1)
    main(command.removeprefix(prompt).split())
    assert capsys.readouterr().out == shown.partition("```")[0]
