"""A step reserves what its updates allocate: no byte less, so that running out of memory strikes
before anything has changed, and no more, so that it strikes only where there is no room."""
from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_adam import SwapOptimizerConfig
from swap_adam.forecast import ParamSpec, forecast
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.backend import TorchBackend

pytestmark = pytest.mark.simulator_only

BLOCK = 512
BF16, F32, F64, C64 = torch.bfloat16, torch.float32, torch.float64, torch.complex64
HAS_GRAD_DTYPE = hasattr(torch.empty(0), "grad_dtype")

# Of the parameter, its gradient, exp_avg, exp_avg_sq and max_exp_avg_sq: what torch's functional
# takes; some only with a gradient of its own making, or without.
PLAIN = [(BF16,) * 5, (F32,) * 5]
MIXED = [
    (BF16, F32, F32, F32, F32),  # fp32 gradients and moments of bf16 parameters
    (F32, BF16, BF16, F32, F32),
    (BF16, BF16, BF16, F32, F32),
    (BF16, BF16, BF16, F32, BF16),
    (F32, F32, F32, F32, F64),
    (F32, F32, F32, F64, F32),
    (F32, F32, F32, BF16, F32),
    (F64, F32, F32, F32, F32),
    (F32, F32, F32, BF16, BF16),
]
DECAYED = [(F32, BF16, F32, F32, F32), (BF16, F32, F32, BF16, BF16)]
SIZES = [3000, 30000, 1100, 9000]  # the second is cut into many pieces
MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False}, "foreach": {}, "fused": {"fused": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.0},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "lr": {"lr": torch.tensor(1e-3)},
}
COUPLED: dict[str, dict[str, Any]] = {
    "coupled": {"weight_decay": 0.1},
    "coupled-maximize": {"weight_decay": 0.1, "maximize": True},
    "coupled-amsgrad": {"weight_decay": 0.1, "amsgrad": True},
}
Dtypes = tuple[torch.dtype, ...]


def make_param(numel: int, dtypes: Dtypes) -> Tensor:
    if dtypes[0] != dtypes[1] and not HAS_GRAD_DTYPE:
        pytest.skip("a gradient has its parameter's dtype in this version of torch")
    param = torch.zeros(numel, dtype=dtypes[0], device="simulated").requires_grad_()
    set_gradient(param, dtypes[1])
    return param


def set_gradient(param: Tensor, dtype: torch.dtype) -> None:
    param.grad = None
    if HAS_GRAD_DTYPE:
        setattr(param, "grad_dtype", dtype)
    param.grad = torch.ones(param.shape, dtype=dtype, device="simulated")


def set_states(optimizer: Optimizer, dtypes: Dtypes) -> None:
    for group in optimizer.param_groups:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        for param in group["params"]:
            device = "simulated" if group["fused"] else "cpu"
            optimizer.state[param] = {"step": torch.zeros((), device=device)}
            for name, dtype in zip(names, dtypes[2:]):
                optimizer.state[param][name] = torch.zeros(
                    param.shape, dtype=dtype, device="simulated"
                )


@pytest.fixture(autouse=True)
def _fast_garbage_collection() -> Iterator[None]:
    """What is there already is no garbage: without it a collection takes milliseconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Meter:
    """Peaks of steps, with what a step reserves, and without, which is what it really uses."""

    def __init__(self, simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._simulator = simulator
        self._monkeypatch = monkeypatch

    def used(self, optimizer: Any) -> int:
        """The most that a step holds, beyond what it returns with."""
        with self._monkeypatch.context() as patch:
            patch.setattr(TorchBackend, "reserve", lambda self, nbytes: None)
            return self._peak(optimizer)

    def reserved(self, optimizer: Any) -> int:
        """The same, what it reserves included; it must be what the report says."""
        peak = self._peak(optimizer)
        report = optimizer.swap_report()["simulated:0"]
        assert peak == report.staging_nbytes + report.scratch_nbytes
        return peak

    def _peak(self, optimizer: Any) -> int:
        torch.accelerator.synchronize()
        before = self._simulator.memory_held()
        torch.get_device_module("simulated").reset_peak_memory_stats()
        optimizer.step()
        torch.accelerator.synchronize()
        assert self._simulator.memory_held() == before
        peak: int = self._simulator.max_memory_held()
        return peak - before


@pytest.fixture
def meter(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(simulator, monkeypatch)


def check(
    meter: Meter, optimizer: Any, spare_nbytes: int = 0
) -> None:
    optimizer.step()
    for _ in range(2):
        used = meter.used(optimizer)
        assert used <= meter.reserved(optimizer) <= used + spare_nbytes


def cases() -> Iterable[Any]:
    for mode in MODES:
        for name, options in OPTIONS.items():
            for dtypes in PLAIN + MIXED:
                if mode == "fused" and dtypes in MIXED:
                    continue  # the kernel refuses them
                if name == "lr" and (mode == "foreach" or dtypes in MIXED):
                    continue  # takes the for-loop
                yield SwapAdamW, mode, name, options, dtypes
    for mode in ("for-loop", "foreach"):
        for name, options in COUPLED.items():
            for dtypes in PLAIN + MIXED + DECAYED:
                negated_dtype = dtypes[1] if mode == "foreach" and "maximize" in name else None
                grad_dtype = negated_dtype or torch.promote_types(dtypes[0], dtypes[1])
                if grad_dtype == dtypes[2]:  # else an error of the original's
                    yield SwapAdam, mode, name, options, dtypes


@pytest.mark.parametrize(
    "kind, mode, name, options, dtypes",
    [
        pytest.param(*case, id="-".join([case[1], case[2], *(str(d)[6:] for d in case[4])]))
        for case in cases()
    ],
)
def test_what_is_reserved_is_what_the_update_uses(
    meter: Meter, kind: Any, mode: str, name: str, options: dict[str, Any], dtypes: Dtypes
) -> None:
    params = [make_param(numel, dtypes) for numel in SIZES]
    optimizer = kind(
        params, **{"lr": 1e-3, **options}, **MODES[mode],
        swap_config=SwapOptimizerConfig(swap_times=4),
    )
    set_states(optimizer, dtypes)
    check(meter, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swap_times", [1, 3, 300])
def test_several_groups_in_a_batch_and_the_pieces_of_a_tensor(
    meter: Meter, mode: str, swap_times: int
) -> None:
    """With 300 batches the counters of a fused tensor's pieces are more than one block."""
    options = [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}]
    groups = [
        {"params": [make_param(numel, (F32,) * 5) for numel in SIZES], **option}
        for option in options
    ]
    optimizer = SwapAdamW(
        groups, **MODES[mode], swap_config=SwapOptimizerConfig(swap_times=swap_times)
    )
    check(meter, optimizer)


@pytest.mark.parametrize("mode", ["for-loop", "foreach"])
def test_dtypes_mixed_in_one_group(meter: Meter, mode: str) -> None:
    """foreach takes one dtype after the other and keeps the roots of the last meanwhile.

    In which order is not said: the reserve is for the worst, which is the same for two dtypes
    whose gradients take no memory.
    """
    params = [make_param(numel, (dtype,) * 5) for numel in SIZES[2:] for dtype in (F32, BF16)]
    check(meter, SwapAdamW(params, **MODES[mode], swap_config=SwapOptimizerConfig(swap_times=1)))


def test_three_dtypes_and_gradients_of_the_updates_own(meter: Meter) -> None:
    """Which order foreach takes is not said, so the reserve may be too large, within a dtype."""
    params = [
        make_param(numel, (dtype,) * 5) for numel in SIZES[2:] for dtype in (F32, BF16, F64)
    ]
    optimizer = SwapAdam(
        params, weight_decay=0.1, maximize=True, swap_config=SwapOptimizerConfig(swap_times=1)
    )
    check(meter, optimizer, spare_nbytes=8 * sum(SIZES[2:]))


@pytest.mark.parametrize("mode", ["for-loop", "foreach"])
def test_a_gradient_of_another_dtype_in_a_later_step_is_counted(
    meter: Meter, mode: str
) -> None:
    if not HAS_GRAD_DTYPE:
        pytest.skip("a gradient has its parameter's dtype in this version of torch")
    params = [make_param(numel, (BF16,) * 5) for numel in SIZES]
    optimizer = SwapAdam(
        params, weight_decay=0.1, **MODES[mode], swap_config=SwapOptimizerConfig(swap_times=2)
    )
    for name, dtype in (("bf16", BF16), ("fp32", F32)):
        set_states(optimizer, (BF16, dtype, dtype, BF16, BF16))
        for param in params:
            set_gradient(param, dtype)
        optimizer.step()
        used = meter.used(optimizer)
        assert used == meter.reserved(optimizer), name


def test_gradients_alone_that_change_their_dtype_are_counted_at_the_next_step(
    meter: Meter,
) -> None:
    """The moments stay: with maximize the gradient that the update makes is of the new dtype."""
    if not HAS_GRAD_DTYPE:
        pytest.skip("a gradient has its parameter's dtype in this version of torch")
    params = [make_param(numel, (F32, BF16, F32, F32, F32)) for numel in SIZES]
    optimizer = SwapAdam(
        params, weight_decay=0.1, foreach=False, swap_config=SwapOptimizerConfig(swap_times=2)
    )
    for param in params:
        set_gradient(param, F32)
    optimizer.step()
    optimizer.param_groups[0]["maximize"] = True
    peaks = []
    for dtype in (F32, BF16, F32):
        for param in params:
            set_gradient(param, dtype)
        # The first step with them must already have it: nothing is used that is not reserved.
        used = meter.used(optimizer)
        assert used == meter.reserved(optimizer)
        peaks.append(used)
    assert peaks[0] == peaks[2]


@pytest.mark.parametrize("where", ["cpu", "simulated"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("what", ["lr", "betas", "all"])
def test_hyperparameters_on_the_device_cost_a_block_each(
    meter: Meter, what: str, dtype: torch.dtype, where: str
) -> None:
    def value(name: str, number: float) -> float | Tensor:
        return torch.tensor(number, device=where) if what in (name, "all") else number

    params = [make_param(numel, (dtype,) * 5) for numel in (2000, 5000)]
    optimizer = SwapAdam(
        params, lr=value("lr", 1e-3), betas=(value("betas", 0.9), value("betas", 0.99)),
        weight_decay=0.1, foreach=False, swap_config=SwapOptimizerConfig(swap_times=2),
    )
    check(meter, optimizer, spare_nbytes=2 * BLOCK)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtypes", [(F32,) * 5, (BF16, F32, F32, F32, F32)], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    "config",
    [
        {"resident_nbytes": 240_100},  # the tensor larger than a batch
        {"resident_nbytes": 60_000},
        {"min_numel": 2500},
        {"state_keys": ["exp_avg"]},
        {"state_keys": ["exp_avg_sq"]},
    ],
    ids=str,
)
def test_states_on_the_device_by_choice(
    meter: Meter, config: dict[str, Any], mode: str, dtypes: Dtypes
) -> None:
    if mode == "fused" and dtypes[0] != dtypes[1]:
        pytest.skip("the kernel refuses them")
    params = [make_param(numel, dtypes) for numel in [*SIZES, 500, 700]]
    optimizer = SwapAdamW(
        params, **MODES[mode], swap_config=SwapOptimizerConfig(swap_times=5, **config)
    )
    set_states(optimizer, dtypes)
    check(meter, optimizer)


def test_a_large_resident_tensor_runs_out_of_memory_before_anything_has_changed(
    simulator: ModuleType,
) -> None:
    params = [make_param(numel, (F32,) * 5) for numel in [200_000, 2000, 2000]]
    optimizer = SwapAdamW(
        params, swap_config=SwapOptimizerConfig(swap_times=2, resident_nbytes=1_600_100)
    )
    optimizer.step()
    torch.accelerator.synchronize()
    held = simulator.memory_held()
    report = optimizer.swap_report()["simulated:0"]
    assert report.scratch_nbytes == 800_256
    before = [param.detach().cpu() for param in params]
    simulator.configure(capacity_nbytes=held + 400_000)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    simulator.configure(capacity_nbytes=0)
    assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, params))
    optimizer.state_dict()  # nothing is torn
    optimizer.step()


@pytest.mark.parametrize("mode", ["for-loop", "foreach"])
@pytest.mark.parametrize("options", [*OPTIONS.values()][:4], ids=[*OPTIONS][:4])
def test_complex_parameters_which_stay_are_counted(
    meter: Meter, mode: str, options: dict[str, Any]
) -> None:
    params = [make_param(numel, (dtype,) * 5) for numel in SIZES for dtype in (C64, F32)]
    groups = [{"params": params[::2]}, {"params": params[1::2]}]
    config = SwapOptimizerConfig(swap_times=5)
    check(meter, SwapAdamW(groups, **{**MODES[mode], **options}, swap_config=config))


def test_a_resident_moment_that_gets_another_dtype_is_counted(meter: Meter) -> None:
    params = [make_param(numel, (F32,) * 5) for numel in SIZES]
    optimizer = SwapAdamW(
        params, swap_config=SwapOptimizerConfig(swap_times=5, state_keys=["exp_avg"])
    )
    optimizer.step()
    for param in params:
        optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"].double()
    check(meter, optimizer)


def test_steps_on_the_device_without_fused_are_counted(meter: Meter) -> None:
    """A checkpoint of a fused optimizer leaves them there."""
    params = [make_param(numel, (F32,) * 5) for numel in SIZES]
    optimizer = SwapAdamW(params, swap_config=SwapOptimizerConfig(swap_times=5))
    set_states(optimizer, (F32,) * 5)
    for param in params:
        optimizer.state[param]["step"] = torch.zeros((), device="simulated")
    check(meter, optimizer)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [{}, {"swap_times": 3}, {"resident_nbytes": 1_250_000}, {"resident_nbytes": 330_000},
     {"min_numel": 0}, {"state_keys": ["exp_avg"]}, {"split_tensors": False},
     {"packed_swap": False}],
    ids=str,
)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_plan_says_what_the_library_reserves(
    implementation: Any, dtype: str, config: dict[str, Any], amsgrad: bool
) -> None:
    numels = [4096 * 64, 1000, 40_000, 40_000, 1024, 300_001, 7]
    swap_config = SwapOptimizerConfig(**config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    params = [make_param(numel, (torch_dtype,) * 5) for numel in numels]
    optimizer = SwapAdamW(
        params, amsgrad=amsgrad, **MODES[implementation], swap_config=swap_config
    )
    optimizer.step()
    report = optimizer.swap_report()["simulated:0"]
    specs = [ParamSpec((numel,), dtype) for numel in numels]
    found = forecast(
        specs, swap_config, amsgrad=amsgrad, implementation=implementation
    )
    assert found.scratch_nbytes == report.scratch_nbytes
    assert found.staging_nbytes == report.staging_nbytes
    assert found.swapped_nbytes == report.swapped_nbytes
    assert found.batch_count == len(swap_of(optimizer).devices[params[0].device].plan.batches)


def test_a_plan_of_large_tensors_counts_one_root_per_batch_of_them() -> None:
    found = forecast([ParamSpec((4096, 4096))] * 32)
    assert found.scratch_nbytes == 4 * 4096 * 4096
