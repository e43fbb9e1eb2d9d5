"""What an error says beyond its message."""
from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error``: as a note where Python has them, else to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (*error.args[:-1], f"{error.args[-1]}\n{note}") if error.args else (note,)
