"""The measured lines as the rows of tables, for the terminal and for Markdown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from swap_adam.bench.contenders import NATIVE_FUSED, PACKED, SINGLE_STREAM, Contender
from swap_adam.bench.measurement import Line
from swap_adam.bench.workloads import Workload


@dataclass(frozen=True)
class Grid:
    """The first column is text, the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        lines = [
            f"**{self.title}**", "",
            _markdown_row(self.header),
            _markdown_row(["---", *("---:" for _ in self.header[1:])]),
            *(_markdown_row(row) for row in self.rows),
        ]
        return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def link_grid(workload: Workload, lines: Sequence[Line]) -> Grid:
    """Every link: ours at ``swap_times=16`` beside native and beside the one-stream schedule."""
    found = {(line.contender, line.link): line for line in lines if line.workload is workload}
    rows = []
    for link in dict.fromkeys(line.link for line in lines):
        packed = found.get((PACKED, link))
        native, single = found.get((NATIVE_FUSED, link)), found.get((SINGLE_STREAM, link))
        if packed is None or native is None or single is None:
            continue
        rows.append((
            link.label, _ms(packed.limit_ms), _ms(packed.step_ms), _ratio(packed.over_limit),
            _ratio(packed.repeated_over_limit), _ms(packed.tail_ms), _ms(native.step_ms),
            _times(packed.step_ms / native.step_ms), _ms(single.step_ms),
            _times(single.step_ms / packed.step_ms),
        ))
    return Grid(
        f"{_title(workload)}: packed 16, fused, on every link",
        (
            "link", "limit ms", "step ms", "step / limit", "in a row / limit", "tail ms",
            "native ms", "step / native", "one stream ms", "one stream / step",
        ),
        tuple(rows),
    )


def contender_grid(workload: Workload, link_label: str, lines: Sequence[Line]) -> Grid:
    """Every contender on one link."""
    chosen = [
        line for line in lines if line.workload is workload and line.link.label == link_label
    ]
    native = {line.contender.mode: line.step_ms for line in chosen if line.contender.is_native}
    return Grid(
        f"{_title(workload)}: every contender on {link_label}, limit {chosen[0].limit_ms:.2f} ms",
        (
            "optimizer", "step ms", "/ native fused", "/ native", "/ limit", "in a row / limit",
            "tail ms", "host ms", "idle MB", "before MB", "peak MB", "pinned / swapped",
            "transfers", "kernels", "host waits", "races",
        ),
        tuple(_contender_row(line, native) for line in chosen),
    )


def _contender_row(line: Line, native: dict[str, float]) -> tuple[str, ...]:
    def over(native_ms: float | None) -> str:
        return "" if native_ms is None else _times(line.step_ms / native_ms)

    is_native, counters = line.contender.is_native, line.counters
    return (
        label(line.contender, line.swap_times), _ms(line.step_ms),
        over(native.get("fused")), over(native.get(line.contender.mode)),
        "" if is_native else _ratio(line.over_limit),
        "" if is_native else _ratio(line.repeated_over_limit),
        _ms(line.tail_ms), _ms(line.host_ms),
        _mb(line.idle_nbytes), _mb(line.before_nbytes), _mb(line.peak_nbytes),
        "" if line.pinned_share is None else _ratio(line.pinned_share),
        "" if counters is None else str(counters.copies_in + counters.copies_out),
        "" if counters is None else str(counters.kernels),
        "" if counters is None else str(counters.host_waits + counters.device_synchronizations),
        str(len(line.races)),
    )


def label(contender: Contender, swap_times: int | None) -> str:
    chosen = f" ({swap_times})" if "auto" in contender.name else ""
    return f"{contender.name}{chosen}, {contender.mode}"


def _title(workload: Workload) -> str:
    return (
        f"{workload.name} ({workload.description}; {workload.numel / 1e6:.1f}M parameters in "
        f"{len(workload.shapes)} tensors)"
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}".replace("-0.00", "0.00")


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"
