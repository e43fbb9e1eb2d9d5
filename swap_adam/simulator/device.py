"""``torch.simulated``: the module that torch and libraries ask for by the device's name."""

from __future__ import annotations

import functools
from collections import OrderedDict
from types import TracebackType
from typing import NamedTuple

import torch
from torch.types import Storage as PlainStorage

from swap_adam.simulator import native

_Device = torch.device | str | int | None

OutOfMemoryError = torch.OutOfMemoryError


class Properties(NamedTuple):
    name: str
    total_memory: int
    multi_processor_count: int


def _index(device: _Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return native.loaded()


def is_initialized() -> bool:
    return native.loaded()


def init() -> None:
    """Nothing to do: enable() did it."""


def _lazy_init() -> None:
    """Nothing to do: enable() did it."""


def _is_in_bad_fork() -> bool:
    return False


# torch.accelerator.device_count() asks this one, so it must not ask back.
def device_count() -> int:
    return int(native.number("device_count"))


def current_device() -> int:
    return int(torch._C._accelerator_getDeviceIndex())


def set_device(device: _Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def get_device_name(device: _Device = None) -> str:
    return f"simulated accelerator {_index(device)}"


def get_device_properties(device: _Device = None) -> Properties:
    return Properties(get_device_name(device), mem_get_info(device)[1], 1)


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    return (1, 0)


def synchronize(device: _Device = None) -> None:
    """The host waits for every stream of the device."""
    torch._C._accelerator_synchronizeDevice(_index(device))


class device:
    """Makes a device current in a block; None changes nothing."""

    def __init__(self, device: _Device) -> None:
        self._index = -1 if device is None else _index(device)
        self._before = -1

    def __enter__(self) -> None:
        if self._index >= 0:
            self._before = current_device()
            set_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before >= 0:
            set_device(self._before)


class device_of(device):
    """Makes the device of a tensor current in a block."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == "simulated" else None)


# --- streams and events: plain torch objects, which is what torch.accelerator hands out too


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:
    """A new stream of the device."""
    return torch.Stream(torch.device("simulated", _index(device)), priority=priority)


class Event(torch.Event):
    """An event; ``elapsed_time`` between two with timing is in virtual milliseconds.

    It tells the time also where ``torch.Event`` does not (``configure(strict=...)``).
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, "simulated", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end_event: torch.Event) -> float:
        return native.number("elapsed_ms", self.event_id, end_event.event_id)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type())


@functools.cache
def _device_type() -> int:
    return int(torch._C._accelerator_getStream(0).device_type)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


class StreamContext:
    """Makes a stream, and its device, current in a block; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._device_before = -1
        self._before: torch.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is None:
            return
        self._device_before = current_device()
        self._before = current_stream(self._stream.device)
        set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            set_stream(self._before)
            set_device(self._device_before)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


# --- memory, in bytes; a block counts as its size rounded up to 512


def memory_allocated(device: _Device = None) -> int:
    return native.integers("memory", _index(device))[0]


def max_memory_allocated(device: _Device = None) -> int:
    return native.integers("memory", _index(device))[1]


def memory_held(device: _Device = None) -> int:
    """Allocated, or freed while a recorded stream has not passed yet."""
    return native.integers("memory", _index(device))[2]


def max_memory_held(device: _Device = None) -> int:
    return native.integers("memory", _index(device))[3]


def memory_reserved(device: _Device = None) -> int:
    """The most that was held since empty_cache(): what a caching allocator would not give back."""
    return native.integers("memory", _index(device))[4]


def max_memory_reserved(device: _Device = None) -> int:
    return native.integers("memory", _index(device))[5]


def reset_peak_memory_stats(device: _Device = None) -> None:
    native.call("reset_peaks")(_index(device))


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Nothing accumulates."""


def reset_max_memory_allocated(device: _Device = None) -> None:
    reset_peak_memory_stats(device)


def empty_cache() -> None:
    native.call("empty_cache")()


def host_empty_cache() -> None:
    """Gives back the pinned blocks that nobody uses."""
    native.call("empty_host_cache")()


def memory_stats(device: _Device = None) -> OrderedDict[str, int]:
    """What a caching allocator's statistics say; ``active_bytes`` are those of ``memory_held``, but
    with ``strict`` "lazy_statistics" only an allocation notices that a stream has passed."""
    values = native.integers("memory", _index(device))
    stats: OrderedDict[str, int] = OrderedDict()
    for at, name in ((0, "allocated_bytes"), (7, "active_bytes"), (4, "reserved_bytes")):
        stats[f"{name}.all.current"] = values[at]
        stats[f"{name}.all.peak"] = values[at + 1]
    counters = native.integers("counters")
    stats["num_device_alloc"] = counters[9]
    stats["num_device_free"] = counters[10]
    stats["num_ooms"] = counters[11]
    stats["num_alloc_retries"] = 0
    return stats


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Free and total bytes; 2**40 in total where no capacity is configured."""
    values = native.integers("memory", _index(device))
    total = values[6] or 2**40
    return max(0, total - values[2]), total


# --- synchronisation as an error

_SYNC_DEBUG_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """A warning or an error at what blocks the host within an operation, as ``item()`` does; not at
    waits for events, streams or the device."""
    mode = debug_mode if isinstance(debug_mode, int) else _SYNC_DEBUG_MODES.index(debug_mode)
    native.call("set_sync_debug")(mode)


def get_sync_debug_mode() -> int:
    return int(native.number("sync_debug"))


# --- random numbers


def _generator(device: _Device) -> torch.Generator:
    generator = native.call("default_generator")(_index(device))
    assert isinstance(generator, torch.Generator)
    return generator


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> None:
    _generator(None).seed()


def seed_all() -> None:
    manual_seed_all(torch.seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: _Device = "simulated") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = "simulated") -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- torch.save reads storages without an operation that could be seen


def watch_saving() -> None:
    from torch.serialization import register_package

    register_package(1, _saving, _loading)


Storage = PlainStorage | torch.storage.TypedStorage | torch.UntypedStorage


def _saving(storage: Storage) -> str | None:
    """Asked for the tag of every storage that is saved; never has one, but looks."""
    if storage.device.type == "cpu" and storage.nbytes() > 0:
        native.call("host_reads")(storage.data_ptr(), storage.nbytes(), "torch.save")
    return None


def _loading(storage: Storage, location: str) -> Storage | None:
    """Never loads anything."""
    return None
