"""Runs a function of a test module on several ranks: one process each, with a simulated device.

>>> def worker(rank: int, scale: float) -> torch.Tensor:  # in the test module
...     tensor = torch.full((2,), scale, device="simulated")
...     dist.all_reduce(tensor)
...     return tensor.cpu()
>>>
>>> def test_sum(on_ranks: OnRanks) -> None:
...     first, second = on_ranks(worker, 2, 0.5)

A worker starts inside an initialized process group, with one thread, the race detector raising, and
must leave no race behind. What it returns comes back through ``torch.save``.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

OnRanks = Callable[..., list[Any]]
DEADLINE_S = 240.0  # for all ranks; on an idle core they need a few seconds
COLLECTIVE_S = 120.0  # for one collective, whose error says more than the deadline's


def run_on_ranks(
    folder: Path, worker: Callable[..., Any], world_size: int, *arguments: Any,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """Calls ``worker(rank, *arguments)`` on ``world_size`` ranks and returns their results.

    ``worker`` is a function at the top of a module, ``folder`` an empty folder of the caller.
    Raises AssertionError with the output of the rank that failed first, or of every rank that was
    not done within the deadline; no process is left.
    """
    torch.save(arguments, folder / "arguments.pt")
    processes = []
    for rank in range(world_size):
        with open(folder / f"{rank}.txt", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, inspect.getfile(worker),
                     worker.__name__, str(rank), str(world_size), str(folder)],
                    env=_environment(), stdout=output, stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + deadline_s
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    # Where one rank fails, the others fail too, or wait for it.
    failed = [rank for rank, code in enumerate(codes) if code] or [
        rank for rank, code in enumerate(codes) if code is None
    ]
    if failed:
        raise AssertionError("\n".join(_account(folder, rank, codes[rank]) for rank in failed))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _account(folder: Path, rank: int, code: int | None) -> str:
    fate = "was not done in time" if code is None else f"ended with {code}"
    return f"--- rank {rank} {fate}\n{(folder / f'{rank}.txt').read_text()[-8000:]}"


def _environment() -> dict[str, str]:
    import swap_adam

    here = Path(__file__).parent
    tests = here.parents[1]
    paths = [
        Path(swap_adam.__file__).parents[1], here, tests / "with_torch" / "support",
        tests / "reference",
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _main(file: str, name: str, rank: int, world_size: int, folder: Path) -> None:
    import torch.distributed as dist

    import swap_adam.simulator as simulator

    torch.set_num_threads(1)
    simulator.enable()
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    result = getattr(module, name)(rank, *arguments)
    torch.accelerator.synchronize()
    assert simulator.violations() == []
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()  # or a rank that is done takes the store of the others with it
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
