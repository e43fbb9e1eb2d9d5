"""Builds the simulator's C++ once and keeps the result in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
_NAME = "swap_adam_simulator.so"


def cache_folder() -> Path:
    """Where builds are kept: ``SWAP_ADAM_SIMULATOR_CACHE``, or the user's cache folder."""
    chosen = os.environ.get("SWAP_ADAM_SIMULATOR_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "swap_adam" / "simulator"


def library() -> Path:
    """The built library, building it if the cache has none for these sources, torch and flags.

    Several processes may call this at once: one builds, the others wait for it. Raises RuntimeError
    when there is no C++ compiler or it fails.
    """
    flags = _flags()
    key = _key(flags)
    folder = cache_folder()
    target = folder / key / _NAME
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target, flags)
    return target


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(
            f"the simulated accelerator is built from C++ on first use, and there is no compiler "
            f"{name!r} here: install g++ (for example: apt-get install g++), or set CXX"
        )
    return found


def _flags() -> list[str]:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    include = Path(torch.__file__).parent / "include"
    return [
        "-std=c++20" if version >= (2, 14) else "-std=c++17",
        "-O1",
        "-DNDEBUG",  # without it RecordFunction::inputs() asserts
        "-fPIC",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]


def _key(flags: list[str]) -> str:
    import torch

    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    described = [torch.__version__, os.environ.get("CXX", "g++"), *flags]
    digest.update("\0".join(described).encode())
    return digest.hexdigest()[:20]


def _build(target: Path, flags: list[str]) -> None:
    import torch

    compiler = _compiler()
    print(
        "swap_adam: building the simulated accelerator "
        "(once, some two minutes of processor time) ...",
        file=sys.stderr,
        flush=True,
    )
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix="building-") as scratch:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [os.path.join(scratch, source.stem + ".o") for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", compiled]
            for source, compiled in zip(sources, objects)
        ]
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        built = Path(scratch) / _NAME
        linked = ["-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{libraries}"]
        _run([compiler, "-shared", *objects, "-o", str(built), f"-L{libraries}", *linked])
        target.parent.mkdir(exist_ok=True)
        os.replace(built, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            "building the simulated accelerator failed: " + " ".join(command) + "\n" + done.stderr
        )
