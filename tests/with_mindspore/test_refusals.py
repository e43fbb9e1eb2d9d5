"""What cannot be honoured is refused, with a remedy, before anything has changed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.train import Model
from ms_mindformers import AdamW, mf_case
from ms_training import (
    ADAM_CASES,
    ADAM_WEIGHT_DECAY_CASES,
    Case,
    gradients_of,
    make_optimizer,
    make_params,
    values_of,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.mindspore import SwapAdamWeightDecay, SwapMFAdamW, SwapMSAdam
from swap_adam.simulator.mindspore import SimulatedDevice, mindspore_device

ADAM = ADAM_CASES[0]
ADAM_WEIGHT_DECAY = ADAM_WEIGHT_DECAY_CASES[0]
AMSGRAD = Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True})
MF = mf_case("non-fused", "bf16")


def assert_conversion_refused(
    optimizer: nn.Optimizer, config: SwapOptimizerConfig | None, told: str
) -> None:
    original, before = type(optimizer), values_of(optimizer)
    attributes = set(optimizer.__dict__)
    with pytest.raises(ValueError, match=told):
        swap_optimizer(optimizer, config)
    assert type(optimizer) is original
    assert set(optimizer.__dict__) == attributes
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("case, config, told", [
    (ADAM, {"packed_swap": True}, "packed_swap=True is not supported for Adam"),
    (ADAM_WEIGHT_DECAY, {"packed_swap": True}, "packed_swap=True is not supported for AdamWeig"),
    (ADAM, {"include_master_params": True}, "needs an optimizer that owns fp32 masters"),
    (ADAM_WEIGHT_DECAY, {"include_master_params": True}, "needs an optimizer that owns fp32"),
    (ADAM, {"state_keys": ("max_exp_avg_sq",)}, "exists only with AMSGrad"),
    (ADAM_WEIGHT_DECAY, {"state_keys": ("max_exp_avg_sq",)}, "exists only with AMSGrad"),
    (MF, {"state_keys": ("max_exp_avg_sq",)}, "exists only with AMSGrad"),
    (ADAM, {"keep_staging": True}, "keep_staging=True is for PyTorch only"),
    (MF, {"drain_in_step": True}, "drain_in_step=True is for PyTorch only"),
    (MF, {"allow_closure": True}, "allow_closure=True is for PyTorch only"),
], ids=str)
def test_a_configuration_that_the_optimizer_cannot_honour_is_refused(
    device: SimulatedDevice | None, case: Case, config: dict[str, Any], told: str
) -> None:
    assert_conversion_refused(make_optimizer(case), SwapOptimizerConfig(**config), told)
    with pytest.raises(ValueError, match=told):
        make_optimizer(case, SwapOptimizerConfig(**config))


@pytest.mark.parametrize("config, told", [
    ({"state_keys": ("master_param",)}, "needs include_master_params=True"),
    ({"state_keys": ("exp_avg",), "include_master_params": True}, "omits master_param"),
    ({"state_keys": ()}, "must not be empty"),
    ({"state_keys": ("exp_avg", "exp_avg")}, "must not repeat"),
    ({"state_keys": ("moment1",)}, "unknown key 'moment1'"),
], ids=str)
def test_state_keys_that_contradict_themselves_are_refused(
    config: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        SwapOptimizerConfig(**config)


@pytest.mark.parametrize("option", ["use_lazy", "use_offload"])
def test_another_offload_of_adam_is_refused(device: SimulatedDevice | None, option: str) -> None:
    optimizer = nn.Adam(make_params(), **{option: True})
    assert_conversion_refused(optimizer, None, f"{option}=True is not supported")
    with pytest.raises(ValueError, match=f"{option}=True is not supported"):
        SwapMSAdam(make_params(), **{option: True})


def test_mindformers_own_offload_is_refused(device: SimulatedDevice | None) -> None:
    with pytest.raises(ValueError, match="enable_cpu_offload"):
        SwapMFAdamW(make_params(), enable_cpu_offload=True)
    # The original refuses it too; a version that does not must not get through.
    optimizer = make_optimizer(MF)
    optimizer.enable_cpu_offload = True
    assert_conversion_refused(optimizer, None, "enable_cpu_offload=True is not supported")


@pytest.mark.parametrize("case", [ADAM, ADAM_WEIGHT_DECAY, MF], ids=lambda c: c.original.__name__)
def test_the_parallel_optimizer_is_refused(device: SimulatedDevice | None, case: Case) -> None:
    optimizer = make_optimizer(case)
    optimizer.use_parallel = True  # what enable_parallel_optimizer does, on Ascend only
    assert_conversion_refused(optimizer, None, "use_parallel=True .* is not supported")


def _graph_step(optimizer: nn.Optimizer, gradients: tuple[Tensor, ...]) -> object:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    return optimizer(gradients)


def _jitted_step(optimizer: nn.Optimizer, gradients: tuple[Tensor, ...]) -> object:
    @mindspore.jit
    def step(*grads: Tensor) -> object:
        return optimizer(grads)

    return step(*gradients)


@pytest.mark.parametrize("case", [ADAM, ADAM_WEIGHT_DECAY, MF], ids=lambda c: c.original.__name__)
@pytest.mark.parametrize("step", [_graph_step, _jitted_step], ids=["graph mode", "jit"])
def test_a_compiled_step_is_an_error_that_names_the_reason(
    device: SimulatedDevice | None, case: Case, step: Callable[..., object]
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig())
    before = values_of(optimizer)
    gradients = gradients_of(optimizer, case, 0)
    with pytest.raises(RuntimeError, match="swap_optimizers_run_in_pynative_mode_only"):
        step(optimizer, gradients)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("case", [ADAM, ADAM_WEIGHT_DECAY, MF], ids=lambda c: c.original.__name__)
def test_graph_mode_is_refused_at_construction_and_conversion(
    device: SimulatedDevice | None, case: Case
) -> None:
    optimizer = make_optimizer(case)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with pytest.raises(ValueError, match="GRAPH_MODE is not supported.*PYNATIVE_MODE"):
        swap_optimizer(optimizer)
    with pytest.raises(ValueError, match="GRAPH_MODE is not supported.*PYNATIVE_MODE"):
        make_optimizer(case, SwapOptimizerConfig())
    assert type(optimizer) is case.original


@pytest.mark.parametrize("case", [ADAM, ADAM_WEIGHT_DECAY, MF], ids=lambda c: c.original.__name__)
@pytest.mark.parametrize("change, told", [
    (lambda grads: (grads[0], None, *grads[2:]), r"gradient of layer1.w \(shape \(64,\)\) is None"),
    (lambda grads: grads[:-1], "expected a tuple of 6 gradients"),
    (lambda grads: None, "expected a tuple of 6 gradients"),
    (lambda grads: (grads[1], *grads[1:]), r"layer0.w .* has the shape \(64,\)"),
], ids=["missing", "too few", "none at all", "wrong shape"])
def test_a_missing_gradient_is_an_error_and_not_a_crash(
    device: SimulatedDevice | None, case: Case, change: Callable[..., object], told: str
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig())
    before = values_of(optimizer)
    with pytest.raises(ValueError, match=told):
        optimizer(change(gradients_of(optimizer, case, 0)))
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])
    optimizer(gradients_of(optimizer, case, 0))


class Mine(nn.Adam):
    pass


class MineSwapped(SwapMSAdam):
    pass


@pytest.mark.parametrize("make, told", [
    (lambda: Mine(make_params()), "derive your class from SwapMSAdam"),
    (lambda: nn.Momentum(make_params(), 0.1, 0.9), "other optimizers are not swapped"),
    (lambda: object(), "cannot convert a builtins.object"),
], ids=["subclass", "momentum", "object"])
def test_only_the_exact_originals_are_converted(make: Callable[[], object], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        swap_optimizer(make())


def test_a_subclass_of_a_swap_class_swaps_and_cannot_be_undone(
    device: SimulatedDevice | None
) -> None:
    optimizer = MineSwapped(make_params(), swap_config=SwapOptimizerConfig())
    optimizer(gradients_of(optimizer, ADAM, 0))
    with pytest.raises(TypeError, match="derives from a swap class"):
        unswap_optimizer(optimizer)
    with pytest.raises(TypeError, match="not a swap optimizer"):
        unswap_optimizer(make_optimizer(ADAM))


ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "SwapMSAdam": lambda config: SwapMSAdam(make_params(), swap_config=config),
    "SwapAdamWeightDecay": lambda config: SwapAdamWeightDecay(make_params(), swap_config=config),
    "SwapMFAdamW": lambda config: SwapMFAdamW(make_params(), swap_config=config),
    "swap_optimizer": lambda config: swap_optimizer(nn.Adam(make_params()), config),
}
each_entrance = pytest.mark.parametrize("enter", ENTRANCES.values(), ids=ENTRANCES)


@each_entrance
def test_a_mapping_of_the_fields_is_a_configuration(enter: Callable[[Any], Any]) -> None:
    optimizer = enter({"swap_times": 3, "state_keys": ["exp_avg"]})
    assert optimizer.swap_config == SwapOptimizerConfig(swap_times=3, state_keys=("exp_avg",))
    assert enter({}).swap_config == SwapOptimizerConfig()


@each_entrance
@pytest.mark.parametrize("config, error, told", [
    ({"swap_time": 3}, TypeError, "unknown fields 'swap_time'; allowed are: swap_times"),
    ({"swap_times": 0}, ValueError, "swap_times must be >= 1, got 0"),
    (3, TypeError, "must be a SwapOptimizerConfig, a mapping of its fields or None, got 3"),
], ids=str)
def test_something_else_as_configuration_is_an_error(
    enter: Callable[[Any], Any], config: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        enter(config)


@pytest.mark.parametrize("swap_class, error", [
    (SwapMSAdam, KeyError), (SwapAdamWeightDecay, TypeError), (SwapMFAdamW, TypeError),
])
def test_an_unknown_keyword_is_an_error_in_every_class(
    swap_class: Any, error: type[Exception]
) -> None:
    with pytest.raises(TypeError, match=r"swap_config=SwapOptimizerConfig\(swap_times=4\)"):
        swap_class(make_params(), swap_times=4)
    with pytest.raises(TypeError, match="the argument swap_config, not config"):
        swap_class(make_params(), config={})
    with pytest.raises(error, match="foo"):
        swap_class(make_params(), foo=1)


def test_mindformers_adamw_keeps_its_two_hidden_keywords() -> None:
    for ours in (AdamW, SwapMFAdamW):
        optimizer = ours(make_params(), use_fused=True, amsgrad=True, maximize=True)
        assert optimizer.amsgrad is True and optimizer.maximize is True


def test_setting_the_configuration_names_the_calls_that_change_it() -> None:
    optimizer = SwapMSAdam(make_params(), swap_config={"swap_times": 3})
    with pytest.raises(AttributeError, match=r"unswap_optimizer\(optimizer\), then swap_optim"):
        optimizer.swap_config = SwapOptimizerConfig()
    assert optimizer.swap_config.swap_times == 3
    unswap_optimizer(optimizer)
    swap_optimizer(optimizer, {"swap_times": 5})
    assert optimizer.swap_config.swap_times == 5
    with pytest.raises(ValueError, match="with swap_times=5, asked for swap_times=6; call"):
        swap_optimizer(optimizer, {"swap_times": 6})


@pytest.mark.parametrize("make, told", [
    (lambda net, optimizer: Model(net, nn.MSELoss(), optimizer), "the optimizer that it is given"),
    (lambda net, optimizer: net, "it is a model: convert the optimizer that was made of"),
    (lambda net, optimizer: nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer),
     "its attribute `optimizer`"),
], ids=["Model", "network", "TrainOneStepCell"])
def test_what_runs_an_optimizer_is_told_what_to_convert(
    make: Callable[[Any, Any], Any], told: str
) -> None:
    net = nn.Dense(2, 2)
    with pytest.raises(TypeError, match=f"exactly: mindspore.nn.Adam, .*torch.optim.Adam.*{told}"):
        swap_optimizer(make(net, nn.Adam(net.trainable_params())))


def test_prefetch_is_refused_since_states_may_be_written_unnoticed(
    device: SimulatedDevice | None
) -> None:
    with pytest.raises(NotImplementedError, match="not supported on MindSpore"):
        make_optimizer(ADAM, SwapOptimizerConfig()).prefetch()


@pytest.mark.simulator_only
def test_the_simulated_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore, "get_context", lambda name: "Ascend")
    with pytest.raises(ValueError, match="runs on the CPU, and device_target is 'Ascend'"):
        with mindspore_device():
            pass


def test_the_originals_own_errors_stay() -> None:
    with pytest.raises(TypeError, match="beta1"):
        SwapMSAdam(make_params(), beta1=2)
    with pytest.raises(ValueError):
        AdamW([Parameter(Tensor([1.0]), name="p")], eps=-1.0)


def _other_target(optimizer: nn.Optimizer) -> None:
    optimizer._target = "Ascend"  # what `optimizer.target = ...` sets; the CPU has no other


@pytest.mark.parametrize("case, change, told", [
    (ADAM, _other_target, "optimizer.target='Ascend' is not supported"),
    (ADAM, lambda optimizer: setattr(optimizer, "use_lazy", True), "use_lazy=True is not"),
    (ADAM, lambda optimizer: setattr(optimizer, "use_offload", True), "use_offload=True is not"),
    (ADAM, lambda optimizer: setattr(optimizer, "use_amsgrad", True), "AMSGrad was switched"),
    (AMSGRAD, lambda optimizer: setattr(optimizer, "use_amsgrad", False), "AMSGrad was switched"),
    (ADAM_WEIGHT_DECAY, lambda optimizer: setattr(optimizer, "use_parallel", True), "use_para"),
    (MF, lambda optimizer: setattr(optimizer, "enable_cpu_offload", True), "enable_cpu_offload=T"),
], ids=["target", "lazy", "offload", "AMSGrad on", "AMSGrad off", "parallel", "cpu offload"])
def test_an_option_set_after_construction_is_refused_at_the_next_call_and_not_ignored(
    device: SimulatedDevice | None,
    case: Case,
    change: Callable[[nn.Optimizer], None],
    told: str,
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig())
    optimizer(gradients_of(optimizer, case, 0))
    before, options = values_of(optimizer), dict(optimizer.__dict__)
    change(optimizer)
    with pytest.raises(ValueError, match=told):
        optimizer(gradients_of(optimizer, case, 1))
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])
    for name in ("_target", "use_lazy", "use_offload", "use_amsgrad", "use_parallel",
                 "enable_cpu_offload"):
        if name in options:
            optimizer.__dict__[name] = options[name]
    optimizer(gradients_of(optimizer, case, 1))


SECRET = 123.25
INDICES, VALUES = Tensor([0, 2], mindspore.int32), Tensor(np.full((2, 64), SECRET, np.float32))
SPARSE: dict[str, Callable[[], object]] = {
    "RowTensorInner": lambda: RowTensorInner(INDICES, VALUES, (64, 64)),
    "COOTensor": lambda: mindspore.COOTensor(
        Tensor([[0, 1], [2, 3]], mindspore.int32), Tensor([SECRET, SECRET]), (64, 64)
    ),
    "CSRTensor": lambda: mindspore.CSRTensor(
        Tensor([0] + [1] * 64, mindspore.int32), Tensor([1], mindspore.int32), Tensor([SECRET]),
        (64, 64),
    ),
}


@pytest.mark.parametrize("case, kind, error", [
    # What the originals raise for one parameter; with several, a RowTensor aborts the process.
    (ADAM, "RowTensorInner", NotImplementedError),
    (ADAM, "COOTensor", ValueError),
    (ADAM, "CSRTensor", ValueError),
    *((case, kind, TypeError) for case in (ADAM_WEIGHT_DECAY, MF) for kind in SPARSE),
], ids=str)
def test_a_sparse_gradient_is_the_originals_error_which_names_the_parameter_and_no_value(
    device: SimulatedDevice | None, case: Case, kind: str, error: type[Exception]
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig())
    before = values_of(optimizer)
    with pytest.raises(error) as caught:
        optimizer((SPARSE[kind](), *gradients_of(optimizer, case, 0)[1:]))
    assert type(caught.value) is error
    assert f"layer0.w (shape (64, 64)) is a {kind}: " in str(caught.value)
    assert str(SECRET) not in str(caught.value)
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])
    optimizer(gradients_of(optimizer, case, 0))


@pytest.mark.parametrize("gradients", [
    lambda good: (np.full((64, 64), SECRET), *good[1:]),
    lambda good: (good, good),
    lambda good: Tensor([SECRET]),
    lambda good: {"layer0.w": Tensor([SECRET])},
], ids=["array", "nested", "a tensor", "a dict"])
def test_no_error_about_gradients_prints_their_values(
    device: SimulatedDevice | None, gradients: Callable[..., object]
) -> None:
    optimizer = make_optimizer(ADAM, SwapOptimizerConfig())
    good = tuple(Tensor(np.full(p.shape, SECRET, np.float32)) for p in optimizer.parameters)
    with pytest.raises(ValueError) as caught:
        optimizer(gradients(good))
    assert str(SECRET) not in str(caught.value) and len(str(caught.value)) < 300
