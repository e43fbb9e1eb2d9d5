"""What a user would lose to a mistake in states or options that can be mended: the run."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import AdamW, Optimizer

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdamW

MODES: dict[str, dict[str, bool]] = {
    "foreach": {}, "for-loop": {"foreach": False}, "fused": {"fused": True}
}


def make(cls: type[Optimizer], **options: Any) -> Any:
    """Several batches' worth, one parameter that is cut and one too small to be swapped."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 50), (90, 90), (10,), (2000,), (33, 32)]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes
    ]
    if cls is SwapAdamW:
        options["swap_config"] = SwapOptimizerConfig(swap_times=8)
    return cls(params, lr=1e-2, **options)  # type: ignore[call-arg]


def step(optimizer: Any, number: int) -> None:
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = torch.full_like(param, 0.1 * number - index)
    optimizer.step()


def outcome(optimizer: Any) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    states = [value.cpu() for param in params for value in optimizer.state[param].values()]
    return [*(param.detach().cpu() for param in params), *states]


def entries(optimizer: Any) -> list[dict[str, Any]]:
    return list(optimizer.state.values())


def set_steps(optimizer: Any, value: Callable[[Tensor], Any]) -> None:
    for entry in entries(optimizer):
        entry["step"] = value(entry["step"])


def mend_steps(optimizer: Any) -> None:
    device = DEVICE if optimizer.param_groups[0]["fused"] else "cpu"
    set_steps(optimizer, lambda step: torch.tensor(float(step), device=device))


def pop_moment(optimizer: Any) -> None:
    entry = entries(optimizer)[1]
    optimizer.kept = entry.pop("exp_avg").clone()


def group_of(optimizer: Any) -> dict[str, Any]:
    group: dict[str, Any] = optimizer.param_groups[0]
    return group


MISTAKES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "int step": (lambda o: set_steps(o, int), mend_steps),
    "float step": (lambda o: set_steps(o, float), mend_steps),
    "int64 step": (lambda o: set_steps(o, lambda step: step.to(torch.int64)), mend_steps),
    "no eps": (lambda o: group_of(o).pop("eps"), lambda o: group_of(o).update(eps=1e-8)),
    "no lr": (lambda o: group_of(o).pop("lr"), lambda o: group_of(o).update(lr=1e-2)),
    "one beta": (
        lambda o: group_of(o).update(betas=(0.9,)), lambda o: group_of(o).update(betas=(0.9, 0.999))
    ),
    "string lr": (lambda o: group_of(o).update(lr="1e-2"), lambda o: group_of(o).update(lr=1e-2)),
    "no decay": (
        lambda o: group_of(o).update(weight_decay=None),
        lambda o: group_of(o).update(weight_decay=1e-2),
    ),
    "no moment": (pop_moment, lambda o: entries(o)[1].update(exp_avg=o.kept)),
    "no step": (
        lambda o: entries(o)[3].pop("step"),
        lambda o: entries(o)[3].update(
            step=torch.tensor(1.0, device=DEVICE if group_of(o)["fused"] else "cpu")
        ),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_adamw_refuses_is_refused_with_nothing_torn_and_training_goes_on_once_it_is_mended(
    mistake: str, mode: str
) -> None:
    outcomes = []
    for cls in (AdamW, SwapAdamW):
        optimizer = make(cls, **MODES[mode])
        step(optimizer, 1)
        spoil, mend = MISTAKES[mistake]
        spoil(optimizer)
        error: BaseException | None = None
        try:
            step(optimizer, 2)
        except Exception as caught:
            error = caught
        else:
            step(optimizer, 2)
        mend(optimizer)
        if cls is SwapAdamW and error is not None:
            optimizer.state_dict()  # nothing is torn
        step(optimizer, 3)
        outcomes.append((type(error), outcome(optimizer)))
    (native_error, native), (error_type, swapped) = outcomes
    assert error_type is native_error
    for left, right in zip(native, swapped):
        assert torch.equal(left, right)


def test_running_out_of_memory_says_that_nothing_has_changed_and_stepping_again_is_right(
    simulator: Any,
) -> None:
    native, swapped = make(AdamW), make(SwapAdamW)
    for optimizer in (native, swapped):
        step(optimizer, 1)
    step(native, 2)
    torch.accelerator.synchronize()
    for param in swapped.param_groups[0]["params"]:
        param.grad = torch.empty_like(param)  # the memory of step 2's gradients is there
    simulator.configure(capacity_nbytes=simulator.memory_held(0) + 2048)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        swapped.step()
    simulator.configure(capacity_nbytes=0)
    (note,) = caught.value.__notes__
    assert "0 of 5 parameters" in note and "Nothing has changed" in note
    assert "call step() again" in note and "swap_times=16" in note
    assert "not a retry" not in note
    step(swapped, 2)
    for left, right in zip(outcome(native), outcome(swapped)):
        assert torch.equal(left, right)


def other_models_states() -> dict[str, Any]:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in
              [(64, 50), (80, 90), (10,), (2000,), (33, 32)]]
    other = AdamW(params, lr=1e-2)
    for param in params:
        param.grad = torch.ones_like(param)
    other.step()
    return other.state_dict()


@pytest.mark.parametrize("mode", ["foreach", "for-loop"])
def test_another_models_checkpoint_is_refused_by_name_before_anything_has_changed(
    mode: str
) -> None:
    optimizer = make(SwapAdamW, **MODES[mode])
    step(optimizer, 1)
    good = copy.deepcopy(optimizer.state_dict())
    with pytest.warns(UserWarning, match=r"another shape .* parameter 1 of its group"):
        optimizer.load_state_dict(other_models_states())
    params = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter 1 .*\(90, 90\).*\(80, 90\)"):
            step(optimizer, 2)
    for param, before in zip(optimizer.param_groups[0]["params"], params):
        assert torch.equal(param, before)
    optimizer.load_state_dict(good)
    step(optimizer, 2)
    native = make(AdamW, **MODES[mode])
    step(native, 1)
    step(native, 2)
    for left, right in zip(outcome(native), outcome(optimizer)):
        assert torch.equal(left, right)


def test_a_moment_of_another_shape_put_in_by_hand_is_refused_by_name() -> None:
    optimizer = make(SwapAdamW)
    step(optimizer, 1)
    entry = entries(optimizer)[3]
    kept = entry["exp_avg_sq"].clone()
    entry["exp_avg_sq"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 3 .*\(2000,\).*\(7,\)"):
        step(optimizer, 2)
    entries(optimizer)[3]["exp_avg_sq"] = kept
    step(optimizer, 2)
    native = make(AdamW)
    step(native, 1)
    step(native, 2)
    for left, right in zip(outcome(native), outcome(optimizer)):
        assert torch.equal(left, right)


def test_a_wrong_shape_does_no_harm_while_its_parameter_has_no_gradient() -> None:
    optimizer = make(SwapAdamW)
    step(optimizer, 1)
    entries(optimizer)[1]["exp_avg"] = torch.zeros(7)
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = None if index == 1 else torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("key", ["global_step", 3, ("a", "b")])
def test_values_under_keys_that_are_no_parameters_are_left_alone(key: Any) -> None:
    outcomes = []
    for cls in (AdamW, SwapAdamW):
        optimizer = make(cls)
        step(optimizer, 1)
        optimizer.state[key] = 11
        step(optimizer, 2)
        copied = copy.deepcopy(optimizer)
        assert copied.state[key] == 11
        step(copied, 3)
        saved = optimizer.state_dict()
        if key == "global_step":
            assert saved["state"][key] == 11
            optimizer.load_state_dict(saved)
            assert optimizer.state[key] == 11
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=DEVICE))]})
        optimizer.param_groups.pop()
        if cls is SwapAdamW:
            unswap_optimizer(optimizer)
            assert optimizer.state[key] == 11 and type(optimizer) is AdamW
            swap_optimizer(optimizer)
            assert optimizer.state[key] == 11
        step(optimizer, 3)
        del optimizer.state[key]
        outcomes.append(outcome(optimizer))
    for left, right in zip(*outcomes):
        assert torch.equal(left, right)


class Delegates:
    """Part of a wrapper made of the optimizer's own class, with a part of its attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        copied = {key: value for key, value in vars(optimizer).items()
                  if key not in ("state", "param_groups", "defaults", "step")}
        vars(self).update(copied, optimizer=optimizer)
        name = f"Wrapped{type(optimizer).__name__}"
        self.__class__ = type(name, (Wrapper, type(optimizer)), {})  # type: ignore[assignment]


class Wrapper(Delegates):
    state = property(lambda self: self.optimizer.state)
    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, value: setattr(self.optimizer, "param_groups", value),
    )
    defaults = property(lambda self: self.optimizer.defaults)


def test_a_wrapper_made_of_the_class_with_part_of_the_attributes_works_as_natively() -> None:
    outcomes = []
    for cls in (AdamW, SwapAdamW):
        optimizer = make(cls)
        step(optimizer, 1)
        wrapper: Any = Delegates(optimizer)
        held = wrapper.state_dict()
        before = copy.deepcopy(held)
        wrapper.load_state_dict(held)
        step(optimizer, 2)
        step(optimizer, 3)
        if cls is SwapAdamW:  # a dict taken through the wrapper is a snapshot too
            for index, entry in before["state"].items():
                for name, value in entry.items():
                    assert torch.equal(value, held["state"][index][name]), name
            for convert in (unswap_optimizer, swap_optimizer):
                with pytest.raises(TypeError, match=r"attribute `optimizer`"):
                    convert(wrapper)
        outcomes.append(outcome(optimizer))
    for left, right in zip(*outcomes):
        assert torch.equal(left, right)


def test_a_shallow_copy_trains_on_and_so_does_the_original() -> None:
    outcomes = []
    for cls in (AdamW, SwapAdamW):
        optimizer = make(cls)
        step(optimizer, 1)
        other = copy.copy(optimizer)
        step(other, 2)
        step(optimizer, 3)
        step(other, 4)
        outcomes.append(outcome(optimizer))
    for left, right in zip(*outcomes):
        assert torch.equal(left, right)
