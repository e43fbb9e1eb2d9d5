"""``python -m swap_adam demo --framework mindspore``."""
from swap_adam.demo_mindspore.run import main

__all__ = ["main"]
