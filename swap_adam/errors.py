"""What an error says beyond its message."""
from __future__ import annotations

from importlib import import_module


def add_note(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error``: as a note where Python has them, else to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (*error.args[:-1], f"{error.args[-1]}\n{note}") if error.args else (note,)


def require(package: str, extra: str) -> None:
    """Import ``package``, which this part of swap_adam cannot do without.

    Raises:
        ModuleNotFoundError: it is not installed; with the extra that installs it.
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # it is there and lacks something of its own
        raise ModuleNotFoundError(
            f'{package} is not installed here: pip install "swap_adam[{extra}]"', name=package
        ) from None
