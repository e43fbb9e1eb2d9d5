"""Starts worker processes with MindSpore's own launcher."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def run_workers(script: str, count: int, *arguments: str, timeout_s: float = 240) -> None:
    """Run ``script`` of this folder in ``count`` processes; all must end well and say ``DONE``."""
    launcher = Path(sys.executable).with_name("msrun")
    msrun = str(launcher) if launcher.exists() else shutil.which("msrun")
    assert msrun is not None, "msrun comes with MindSpore, and was not found"
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])]),
            "OMP_NUM_THREADS": "1",
            # It starts whichever `python` comes first.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        result = subprocess.run(
            [
                msrun, f"--worker_num={count}", f"--local_worker_num={count}",
                "--master_addr=127.0.0.1", f"--master_port={port}", "--join=True",
                f"--log_dir={folder}", str(HERE / script), *arguments,
            ],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s,
        )
        logs = [path.read_text() for path in sorted(Path(folder).glob("worker_*.log"))]
    assert result.returncode == 0, "\n".join([result.stdout[-2000:], *(s[-3000:] for s in logs)])
    assert sum("DONE" in log for log in logs) == count, logs
