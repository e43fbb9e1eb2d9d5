"""Whether swapping works on this machine's device: ``python -m swap_adam check``."""
