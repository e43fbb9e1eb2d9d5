"""The two pictures: device memory over a training step, and what ran when around step()."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from swap_adam.demo.spans import ROWS  # noqa: E402
from swap_adam.demo.training import Run  # noqa: E402

COLOURS = {"host": "#8a8a8a", "compute": "#2a9d5c", "copy-in": "#2b6cb0", "copy-out": "#d9731a"}
LATER_COLOUR = "#b9dfc8"
DASHES = (0, (4, 2))
NATIVE_COLOUR, OWN_COLOUR, UPDATE_COLOUR = "#9aa3ad", "#2b6cb0", "#fbe7b2"
# How much of the next forward pass the timeline shows, as a share of step().
SHOWN_AFTER = 0.12


def draw_memory(runs: Sequence[Run], caption: str, clock: str, path: Path) -> None:
    """Device memory over one training step, a panel per run, the first run behind the others."""
    figure = Figure(figsize=(10, 2.5 * len(runs) + 1.1), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    native = runs[0]
    native_times, native_held = _held_in_step(native)
    for axes, run in zip(panels, runs):
        times, held = _held_in_step(run)
        moments = run.moments
        update = [moments.update_called_ms, moments.update_ended_ms]
        axes.axvspan(*(at - moments.step_called_ms for at in update), color=UPDATE_COLOUR, zorder=0)
        colour = NATIVE_COLOUR if run is native else OWN_COLOUR
        axes.fill_between(times, held, step="post", color=colour, linewidth=0)
        if run is not native:
            axes.step(
                native_times, native_held, where="post", color="black", linewidth=1,
                linestyle=DASHES,
            )
        axes.axhline(run.needs.param_nbytes / 1e6, color="white", linewidth=1, linestyle=":")
        axes.annotate(
            f"parameters, {run.needs.param_nbytes / 1e6:.0f} MB", (0, run.needs.param_nbytes / 1e6),
            xytext=(4, -11), textcoords="offset points", fontsize=8, color="white",
        )
        axes.set_title(
            f"{run.name}: peak {run.needs.peak_nbytes / 1e6:.0f} MB, "
            f"between steps {run.needs.idle_nbytes / 1e6:.0f} MB",
            loc="left", fontsize=11, fontweight="bold",
        )
        axes.set_ylabel("device memory (MB)")
        axes.spines[["top", "right"]].set_visible(False)
        if run is not native:
            _draw_saving(axes, native.needs.peak_nbytes / 1e6, run.needs.peak_nbytes / 1e6)
    figure.legend(
        handles=[
            Patch(color=NATIVE_COLOUR, label=native.name),
            Line2D([], [], color="black", linewidth=1, linestyle=DASHES,
                   label=f"{native.name}, for comparison"),
            Patch(color=OWN_COLOUR, label=" or ".join(run.name for run in runs[1:])),
            Patch(color=UPDATE_COLOUR, label="optimizer.step(), until the device is done"),
        ],
        loc="outside lower center", ncols=2, fontsize=9, frameon=False,
    )
    panels[0].set_ylim(bottom=0, top=1.1 * max(run.needs.peak_nbytes for run in runs) / 1e6)
    longest_ms = max(run.moments.next_called_ms - run.moments.step_called_ms for run in runs)
    panels[0].set_xlim(left=0, right=1.17 * longest_ms)  # room for the arrows
    panels[-1].set_xlabel(f"time since the training step began (ms, {clock})")
    figure.suptitle(f"Device memory over one training step\n{caption}", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_saving(axes: Axes, native_mb: float, own_mb: float) -> None:
    """An arrow from the native peak down to this one, right of the curves."""
    axes.annotate(
        "", (0.985, own_mb), (0.985, native_mb), xycoords=("axes fraction", "data"),
        textcoords=("axes fraction", "data"),
        arrowprops={"arrowstyle": "->", "color": "black", "shrinkA": 0, "shrinkB": 0},
    )
    axes.annotate(
        f"peak {own_mb - native_mb:+.0f} MB".replace("-", "\N{MINUS SIGN}"),
        (0.978, (own_mb + native_mb) / 2), xycoords=("axes fraction", "data"), ha="right",
        va="center", fontsize=10,
    )
    for level in (own_mb, native_mb):
        axes.plot([0.97, 1.0], [level, level], transform=axes.get_yaxis_transform(),
                  color="black", linewidth=1)


def _held_in_step(run: Run) -> tuple[list[float], list[float]]:
    """Milliseconds since the step was called and megabytes held from then on."""
    begin, end = run.moments.step_called_ms, run.moments.next_called_ms
    before = [held for at, held in run.recording.memory if at <= begin]
    inside = [(at, held) for at, held in run.recording.memory if begin < at < end]
    times = [0.0, *(at - begin for at, _ in inside), end - begin]
    values = [before[-1] if before else 0, *(held for _, held in inside)]
    return times, [held / 1e6 for held in [*values, values[-1]]]


def draw_timeline(runs: Sequence[Run], caption: str, clock: str, path: Path) -> None:
    """What each engine did from the start of step() into the next forward pass."""
    figure = Figure(figsize=(11, 1.7 * len(runs) + 1.5), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest_ms = max(run.moments.update_ended_ms - run.moments.update_began_ms for run in runs)
    for axes, run in zip(panels, runs):
        _draw_rows(axes, run, SHOWN_AFTER * longest_ms)
    panels[-1].set_xlabel(f"time since optimizer.step() began on the device (ms, {clock})")
    figure.legend(
        handles=[
            Patch(color=COLOURS["host"], label="host issues work"),
            Patch(color=COLOURS["compute"], label="update"),
            Patch(color=COLOURS["copy-in"], label="states, host to device"),
            Patch(color=COLOURS["copy-out"], label="states, device to host"),
            Patch(color=LATER_COLOUR, label="next forward pass"),
        ],
        loc="outside lower center", ncols=5, fontsize=9, frameon=False,
    )
    figure.suptitle(f"One optimizer.step(), engine by engine\n{caption}", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_rows(axes: Axes, run: Run, shown_after_ms: float) -> None:
    begin = run.moments.update_began_ms
    duration = run.moments.update_ended_ms - begin
    rows = [row for row in ROWS if row in {span.row for span in run.recording.spans}]
    for height, row in enumerate(reversed(rows)):
        boxes: dict[str, list[tuple[float, float]]] = {}
        for span in run.recording.spans:
            start, end = span.start_ms - begin, span.end_ms - begin
            if span.row == row and end > 0 and start < duration + shown_after_ms:
                end = min(end, duration + shown_after_ms)
                is_later = row == "compute" and start >= duration
                colour = LATER_COLOUR if is_later else COLOURS[row]
                boxes.setdefault(colour, []).append((max(start, 0.0), end - max(start, 0.0)))
        for colour, ranges in boxes.items():
            axes.broken_barh(ranges, (height - 0.4, 0.8), facecolors=colour)
    axes.axvline(duration, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), labels=list(reversed(rows)))
    axes.set_title(
        f"{run.name}: the compute stream goes on after {duration:.2f} ms", loc="left",
        fontsize=11, fontweight="bold",
    )
    axes.spines[["top", "right"]].set_visible(False)
