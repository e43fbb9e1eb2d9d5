"""The demo for torch: native AdamW, SwapAdamW per tensor, SwapAdamW packed, from one seed."""
from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.optim import AdamW

from swap_adam import SwapOptimizerConfig
from swap_adam.demo.accelerator import Accelerator, choose_accelerator
from swap_adam.demo.compare import differences
from swap_adam.demo.model import GPT, ModelSize
from swap_adam.demo.pictures import draw_memory, draw_timeline
from swap_adam.demo.table import make_table
from swap_adam.demo.text import standard_library
from swap_adam.demo.training import MakeOptimizer, Run, TrainingPlan, train
from swap_adam.simulator.costs import LINKS
from swap_adam.torch import SwapAdamW

TEXT_NBYTES = 4_000_000
LEARNING_RATE = 1e-3
SHOWN_DIFFERENCES = 5


def optimizers(swap_times: int) -> dict[str, MakeOptimizer]:
    """What is compared: a name and a constructor each, the reference first."""

    per_tensor, packed = (
        SwapOptimizerConfig(swap_times=swap_times, packed_swap=is_packed)
        for is_packed in (False, True)
    )
    return {
        "AdamW": lambda params: AdamW(params, lr=LEARNING_RATE),
        "SwapAdamW per tensor": lambda params: SwapAdamW(
            params, lr=LEARNING_RATE, swap_config=per_tensor
        ),
        "SwapAdamW packed": lambda params: SwapAdamW(
            params, lr=LEARNING_RATE, swap_config=packed
        ),
    }


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 if all runs are bitwise equal, 1 if not, 2 if it cannot run."""
    arguments = _parse(argv)
    console = Console()
    _make_deterministic()
    try:
        plan = TrainingPlan(ModelSize(arguments.layers, arguments.width), steps=arguments.steps)
        make_optimizers = optimizers(arguments.swap_times)
        accelerator = choose_accelerator(arguments.device, arguments.link)
        text = standard_library(TEXT_NBYTES)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        console.print(f"[red]{error}[/red]")
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(plan.size).parameters())
    console.print(
        f"A byte-level GPT of {numel / 1e6:.1f}M fp32 parameters reads the sources of Python's "
        f"standard library: {plan.steps} steps of {plan.batch_size} x {plan.size.length} bytes."
    )
    console.print(f"Device: {accelerator.description}; torch {torch.__version__}")
    runs = _train_all(plan, text, accelerator, make_optimizers, arguments.output, console)
    return _report(runs, accelerator, f"GPT of {numel / 1e6:.1f}M fp32 parameters; "
                   f"{accelerator.description}", arguments.output, console)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam demo", description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--framework", choices=("torch", "mindspore"), default="torch",
        help="mindspore runs another demo with options of its own",
    )
    parser.add_argument(
        "--device", default="auto",
        help="auto (the accelerator if there is one, else the simulated one), simulated, or cuda:1",
    )
    parser.add_argument(
        "--link", choices=sorted(LINKS), default="pcie4",
        help="link between host and device that the simulated accelerator has",
    )
    parser.add_argument("--steps", type=int, default=TrainingPlan.steps, help="per run")
    parser.add_argument("--layers", type=int, default=ModelSize.layers, help="of the GPT")
    parser.add_argument("--width", type=int, default=ModelSize.width, help="a multiple of 6")
    parser.add_argument("--swap-times", type=int, default=SwapOptimizerConfig.swap_times)
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for pictures and traces"
    )
    return parser.parse_args(argv)


def _make_deterministic() -> None:
    """Have forward and backward give the same bits in every run, also on a real device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    # Or every torch.empty would be a kernel, which would be timed.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def _train_all(
    plan: TrainingPlan,
    text: torch.Tensor,
    accelerator: Accelerator,
    make_optimizers: dict[str, MakeOptimizer],
    output: Path,
    console: Console,
) -> list[Run]:
    runs = []
    columns = (
        TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(name, total=plan.steps, loss="", start=False)
            for name in make_optimizers
        }
        for name, make_optimizer in make_optimizers.items():
            task = tasks[name]
            progress.start_task(task)

            def on_step(done: int, loss: float) -> None:
                progress.update(task, completed=done, loss=f"{loss:.4f}")

            trace = output / f"trace-{name.replace(' ', '-').lower()}.json"
            runs.append(train(name, make_optimizer, plan, text, accelerator, trace, on_step))
    return runs


def _report(
    runs: Sequence[Run], accelerator: Accelerator, caption: str, output: Path, console: Console
) -> int:
    found = [differences(runs[0].snapshot, run.snapshot) for run in runs]
    console.print(make_table(runs, [len(lines) for lines in found], accelerator.clock))
    console.print(accelerator.clock_note)
    draw_memory(runs, caption, accelerator.clock, output / "memory.png")
    drawn = [output / "memory.png"]
    if all(run.recording.spans for run in runs):
        draw_timeline(runs, caption, accelerator.clock, output / "timeline.png")
        drawn.append(output / "timeline.png")
    for path in [*drawn, *sorted(output.glob("trace-*.json"))]:
        console.print(f"written: {path}")
    for run, lines in zip(runs, found):
        for line in lines[:SHOWN_DIFFERENCES]:
            console.print(f"[red]{run.name}: {line}[/red]")
    return 1 if any(found) else 0
