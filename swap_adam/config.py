"""The configuration of a swap optimizer, checked once when it is made."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STATE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


@dataclass(frozen=True)
class SwapOptimizerConfig:
    """What a swap optimizer swaps, and how.

    Args:
        swap_times: a batch is at most this fraction of the swapped bytes of a device; > 0.
        state_keys: which states to swap, any of ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``,
            ``master_param``; ``None`` swaps every eligible one.
        min_numel: states with fewer elements stay on the device; >= 0.
        include_master_params: also swap the optimizer's own fp32 masters (MindFormers only).
        packed_swap: ``True`` moves a batch as one transfer per contiguous run of host memory,
            ``False`` moves every state by itself, ``None`` takes the class's default.
        allow_closure: let ``step(closure)`` run the closure once, first, with gradients enabled.
        split_tensors: packed pipeline only: cut a tensor larger than a batch across batches.

    Raises:
        ValueError: naming the field, the value and what is allowed.
        TypeError: a field of the wrong type.
    """

    swap_times: int = 16
    state_keys: Sequence[str] | None = None
    min_numel: int = 1024
    include_master_params: bool = False
    packed_swap: bool | None = None
    allow_closure: bool = False
    split_tensors: bool = True

    def __post_init__(self) -> None:
        self._check_int("swap_times", self.swap_times, minimum=1)
        self._check_int("min_numel", self.min_numel, minimum=0)
        for field in ("include_master_params", "allow_closure", "split_tensors"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field} must be True or False, got {getattr(self, field)!r}")
        if self.packed_swap is not None and not isinstance(self.packed_swap, bool):
            raise TypeError(f"packed_swap must be True, False or None, got {self.packed_swap!r}")
        self._check_state_keys()

    @staticmethod
    def _check_int(field: str, value: object, minimum: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{field} must be an int, got {value!r}")
        if value < minimum:
            raise ValueError(f"{field} must be >= {minimum}, got {value!r}")

    def _check_state_keys(self) -> None:
        if self.state_keys is None:
            return
        if isinstance(self.state_keys, str):
            raise TypeError(
                f"state_keys must be a sequence of names, got the string {self.state_keys!r}; "
                f"write state_keys=({self.state_keys!r},)"
            )
        keys = tuple(self.state_keys)
        allowed = ", ".join(STATE_KEYS)
        if not keys:
            raise ValueError(
                f"state_keys must not be empty, got {self.state_keys!r}; use None to swap every "
                f"eligible state, or name some of: {allowed}"
            )
        for key in keys:
            if key not in STATE_KEYS:
                raise ValueError(f"state_keys has the unknown key {key!r}; allowed are: {allowed}")
        if len(set(keys)) != len(keys):
            raise ValueError(f"state_keys must not repeat a key, got {keys!r}")
        if "master_param" in keys and not self.include_master_params:
            raise ValueError(
                f"state_keys={keys!r} names master_param, which needs include_master_params=True"
            )
        if self.include_master_params and "master_param" not in keys:
            raise ValueError(
                f"include_master_params=True, but state_keys={keys!r} omits master_param; add it "
                "or use state_keys=None"
            )
        # A tuple keeps the frozen configuration hashable and safe from later edits of a list.
        object.__setattr__(self, "state_keys", keys)

    def wants(self, key: str) -> bool:
        """Whether the state ``key`` is to be swapped where it is eligible."""
        if key == "master_param" and not self.include_master_params:
            return False
        return self.state_keys is None or key in self.state_keys
