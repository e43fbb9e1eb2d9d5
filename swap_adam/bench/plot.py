"""The picture: how close a step is to the limit of every link, and what memory costs in time."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import NullFormatter, StrMethodFormatter  # noqa: E402

from swap_adam.bench.contenders import PACKED, SINGLE_STREAM  # noqa: E402
from swap_adam.bench.grids import label  # noqa: E402
from swap_adam.bench.measurement import Line  # noqa: E402
from swap_adam.bench.workloads import Workload  # noqa: E402

SERIES = ((PACKED, "#2b6cb0"), (SINGLE_STREAM, "#d9731a"))
# By the first words of a contender's name: its colour, and what the legend says.
FAMILIES = {
    "native": ("#6b7680", "AdamW, all states on the device"),
    "packed": ("#2b6cb0", "SwapAdamW, packed"),
    "per tensor": ("#2a9d5c", "SwapAdamW, per tensor"),
    "one copy": ("#d9731a", "one copy stream (the RFC's schedule)"),
    "torchao": ("#8250a6", "torchao's CPUOffloadOptimizer"),
}
# They lie on top of others, as the packed ones in other modes do.
UNDRAWN = (
    "packed 16, prefetch", "packed 16, kept staging", "packed 16, drained", "packed auto 8 MiB",
)
FUSED = PACKED.mode
BAR = 0.38


def draw(
    path: Path, workload: Workload, scattered_link: str, lines: Sequence[Line], caption: str
) -> None:
    """``workload`` on every link, left, and all its contenders on ``scattered_link``, right."""
    chosen = [line for line in lines if line.workload is workload]
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_links(left, chosen)
    _draw_contenders(right, [line for line in chosen if line.link.label == scattered_link])
    figure.suptitle(
        f"optimizer.step() of {workload.numel / 1e6:.1f}M parameters in {len(workload.shapes)} "
        f"tensors ({workload.name})\n{caption}", fontsize=11,
    )
    figure.savefig(path, dpi=120)


def _draw_links(axes: Axes, lines: Sequence[Line]) -> None:
    labels = list(dict.fromkeys(line.link.label for line in lines))
    for at, (contender, colour) in enumerate(SERIES):
        of_link = {line.link.label: line for line in lines if line.contender == contender}
        places = [index + (at - 0.5) * BAR for index in range(len(labels))]
        values = [of_link[name].over_limit for name in labels]
        bars = axes.bar(places, values, width=BAR, color=colour, label=label(contender, None))
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(
        range(len(labels)), labels=[name.replace(" half", "\nhalf") for name in labels]
    )
    axes.set_ylabel("step time on the compute stream / the link's limit")
    axes.set_ylim(0, 2.4)
    axes.set_title("How close to the link's limit", loc="left", fontsize=11, fontweight="bold")
    axes.legend(loc="upper right", fontsize=9, frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_contenders(axes: Axes, lines: Sequence[Line]) -> None:
    by_family: dict[str, list[Line]] = {}
    for line in lines:
        is_hidden = line.contender.name.startswith("packed") and line.contender.mode != FUSED
        if not is_hidden and line.contender.name not in UNDRAWN:
            family = next(name for name in FAMILIES if line.contender.name.startswith(name))
            by_family.setdefault(family, []).append(line)
    for family, members in by_family.items():
        colour, name = FAMILIES[family]
        axes.scatter(
            [line.peak_nbytes / 1e6 for line in members], [line.step_ms for line in members],
            s=42, color=colour, label=name, zorder=3,
        )
        for line in members:
            _annotate(axes, line, _short(line, family))
    axes.set_xscale("log")
    axes.set_yscale("log")
    limit_ms = lines[0].limit_ms
    axes.axhline(limit_ms, color="black", linewidth=1)
    axes.annotate(
        f"limit of the link, {limit_ms:.2f} ms", (0.99, limit_ms), xytext=(0, 4),
        xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8, ha="right",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("device bytes at the peak of step(), above parameters and gradients (MB)")
    axes.set_ylabel("step time (ms)")
    axes.set_title(
        f"Memory against time on {lines[0].link.label}; numbers are swap_times", loc="left",
        fontsize=11, fontweight="bold",
    )
    axes.grid(which="major", color="#e3e6e8", linewidth=0.8, zorder=0)
    axes.legend(loc="lower left", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _short(line: Line, family: str) -> str:
    name = line.contender.name.removeprefix(family).removeprefix(" stream").strip()
    mode = line.contender.mode
    return f"{name} {mode}".strip() if mode != FUSED or not name else name


def _annotate(axes: Axes, line: Line, text: str) -> None:
    """Packed ones have their label below, or above where another is close; others at the side."""
    if line.contender.name.startswith("packed"):
        shift, align = (0, 7 if text == "auto" else -14), "center"
    else:
        shift, align = (7, -3), "left"
    axes.annotate(
        text, (line.peak_nbytes / 1e6, line.step_ms), xytext=shift, ha=align,
        textcoords="offset points", fontsize=8,
    )
