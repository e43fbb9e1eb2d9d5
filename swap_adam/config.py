"""The configuration of a swap optimizer, checked once when it is made."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

STATE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


@dataclass(frozen=True)
class SwapOptimizerConfig:
    """What a swap optimizer swaps, and how.

    Where a number is an integer, a float of the same value, such as ``12e9``, is taken for it.

    Args:
        swap_times: a batch is at most this fraction of the swapped bytes of a device; > 0.
            ``"auto"`` chooses it per device, from the swapped bytes and ``staging_nbytes``: see
            :func:`swap_adam.schedule.partition.choose_swap_times`.
        state_keys: which states to swap, any of ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``,
            ``master_param``; ``None`` swaps every eligible one.
        min_numel: states with fewer elements stay on the device; >= 0.
        include_master_params: also swap the optimizer's own fp32 masters (MindFormers only).
        packed_swap: ``True`` moves a batch as one transfer per contiguous run of host memory,
            ``False`` moves every state by itself, ``None`` takes the class's default.
        allow_closure: let ``step(closure)`` run the closure once, first, with gradients enabled.
        split_tensors: packed pipeline only: cut a tensor larger than a batch across batches.
        staging_nbytes: with ``swap_times="auto"``, the device bytes that a step may hold for
            staging; ``None`` leaves the choice to speed alone.
        resident_nbytes: per device, up to this many bytes of eligible states stay on the device.
        keep_staging: packed pipeline only: keep the staging memory between steps.
        drain_in_step: let the compute stream wait for the last copy-outs at the end of ``step()``,
            so that what follows can use the staging memory at once. The host does not wait.
        prefetch_in_backward: packed pipeline only: start the first copy-ins when backward
            finishes its first gradient. The staging memory then exists at backward's peak.

    Raises:
        ValueError: naming the field, the value and what is allowed.
        TypeError: a field of the wrong type.
    """

    swap_times: int | Literal["auto"] = 16
    state_keys: Sequence[str] | None = None
    min_numel: int = 1024
    include_master_params: bool = False
    packed_swap: bool | None = None
    allow_closure: bool = False
    split_tensors: bool = True
    staging_nbytes: int | None = None
    resident_nbytes: int = 0
    keep_staging: bool = False
    drain_in_step: bool = False
    prefetch_in_backward: bool = False

    def __post_init__(self) -> None:
        for field in ("swap_times", "min_numel", "staging_nbytes", "resident_nbytes"):
            value = getattr(self, field)
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if is_whole or (isinstance(value, float) and value.is_integer()):
                object.__setattr__(self, field, int(value))
        self._check_swap_times()
        self._check_int("min_numel", self.min_numel, minimum=0)
        self._check_int("resident_nbytes", self.resident_nbytes, minimum=0)
        for field in (
            "include_master_params", "allow_closure", "split_tensors", "keep_staging",
            "drain_in_step", "prefetch_in_backward",
        ):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field} must be True or False, got {getattr(self, field)!r}")
        if self.packed_swap is not None and not isinstance(self.packed_swap, bool):
            raise TypeError(f"packed_swap must be True, False or None, got {self.packed_swap!r}")
        for field in ("keep_staging", "prefetch_in_backward"):
            if getattr(self, field) and self.packed_swap is False:
                raise ValueError(
                    f"{field}=True needs the packed pipeline, got packed_swap=False: the "
                    "per-tensor one has no staging area"
                )
        if self.keep_staging and self.drain_in_step:
            raise ValueError(
                "keep_staging=True and drain_in_step=True exclude each other: draining is there to "
                "give the staging memory back"
            )
        self._check_state_keys()

    def _check_swap_times(self) -> None:
        if self.swap_times == "auto":
            if self.staging_nbytes is not None:
                self._check_int("staging_nbytes", self.staging_nbytes, minimum=1)
            return
        if isinstance(self.swap_times, str):
            raise ValueError(f'swap_times must be an int >= 1 or "auto", got {self.swap_times!r}')
        self._check_int("swap_times", self.swap_times, minimum=1)
        if self.staging_nbytes is not None:
            raise ValueError(
                f"staging_nbytes={self.staging_nbytes!r} needs swap_times=\"auto\", got "
                f"swap_times={self.swap_times!r}, which sets the staging bytes by itself"
            )

    @staticmethod
    def _check_int(field: str, value: object, minimum: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            remedy = ""
            if isinstance(value, str):  # what YAML makes of 12e9, without a point and a sign
                remedy = "; in a yaml file write the digits, or 1.2e+10"
            raise TypeError(f"{field} must be an int, got {value!r}{remedy}")
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


# What is taken for a configuration: one, or its fields as a mapping, such as a yaml file has them.
Configuration = SwapOptimizerConfig | Mapping[str, Any]
FIELDS = tuple(field.name for field in fields(SwapOptimizerConfig))


def as_config(config: Configuration | None) -> SwapOptimizerConfig:
    """The configuration that ``config`` stands for: itself, its fields by name, or the default.

    Raises:
        TypeError: it is none of them, or has unknown fields or one of the wrong type.
        ValueError: a field has a value that is not allowed.
    """
    if config is None:
        return SwapOptimizerConfig()
    if isinstance(config, SwapOptimizerConfig):
        return config
    if not isinstance(config, Mapping):
        raise TypeError(
            f"swap_config must be a SwapOptimizerConfig, a mapping of its fields or None, "
            f"got {config!r}"
        )
    unknown = ", ".join(repr(name) for name in config if name not in FIELDS)
    if unknown:
        raise TypeError(f"swap_config has the unknown fields {unknown}; allowed are: "
                        f"{', '.join(FIELDS)}")
    return SwapOptimizerConfig(**config)


def describe_difference(left: SwapOptimizerConfig, right: SwapOptimizerConfig) -> tuple[str, str]:
    """The fields in which two configurations differ, as each has them."""
    names = [name for name in FIELDS if getattr(left, name) != getattr(right, name)]
    first, second = (
        ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        for config in (left, right)
    )
    return first, second


def explains_keywords(init: Callable[P, R]) -> Callable[P, R]:
    """A decorator for constructors that take ``swap_config``: what is none of their arguments but
    says how to swap is a TypeError that names where it belongs."""
    known = signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name in known:
                continue
            if name in FIELDS:
                raise TypeError(
                    f"{name} is no argument of the optimizer but a field of its configuration: "
                    f"swap_config=SwapOptimizerConfig({name}={value!r})"
                )
            if name == "config":
                raise TypeError("the configuration is the argument swap_config, not config")
        return init(*args, **kwargs)

    return checked
