"""SwapHyperAdamW, the class that it stands on, and the one of HyperParallel that it stands for."""
from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from drop_in_parity import (
    DEVICE,
    assert_same,
    assert_same_tree,
    parameters_of,
    small_model,
    swapped_nbytes,
    training,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch.hyper_adamw import SWAP_CLASSES, HyperAdamW, SwapHyperAdamW, adamw

ORIGINALS = list(SWAP_CLASSES)
HAS_HYPER_PARALLEL = find_spec("hyper_parallel") is not None


def adamw_in_numpy(param, grads, *, lr, betas, eps, weight_decay, amsgrad, maximize):
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, in float64."""
    param = param.astype(np.float64)
    exp_avg = np.zeros_like(param)
    exp_avg_sq = np.zeros_like(param)
    maximum = np.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        grad = -grad if maximize else grad
        exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
        exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad * grad
        maximum = np.maximum(maximum, exp_avg_sq)
        second = maximum if amsgrad else exp_avg_sq
        param = param * (1 - lr * weight_decay)
        mean = exp_avg / (1 - betas[0] ** step)
        root = np.sqrt(second / (1 - betas[1] ** step))
        param = param - lr * mean / (root + eps)
    return param, exp_avg, exp_avg_sq, maximum


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("optimizer_class", [*ORIGINALS, SwapHyperAdamW])
def test_it_computes_its_formula(optimizer_class, amsgrad, maximize) -> None:
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1,
               "amsgrad": amsgrad, "maximize": maximize}
    random = np.random.default_rng(0)
    start = random.standard_normal((40, 50))
    # Growing and shrinking, so that the maximum of amsgrad matters.
    grads = [random.standard_normal((40, 50)) * scale for scale in (1, 3, 0.1, 0.01, 2)]
    param = torch.nn.Parameter(torch.tensor(start, device=DEVICE))
    optimizer = optimizer_class([param], **options)
    for grad in grads:
        param.grad = torch.tensor(grad, device=DEVICE)
        optimizer.step()
    expected = adamw_in_numpy(start, grads, **options)
    state = optimizer.state[param]
    found = [param.detach(), state["exp_avg"], state["exp_avg_sq"]]
    found += [state["max_exp_avg_sq"]] if amsgrad else []
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine.cpu().numpy(), theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("optimizer_class", [*ORIGINALS, SwapHyperAdamW])
def test_the_step_is_an_int_of_the_group(optimizer_class) -> None:
    model = small_model()
    config = SwapOptimizerConfig(swap_times=50)
    swap = {"swap_config": config} if optimizer_class is SwapHyperAdamW else {}
    first, *others = model.parameters()
    optimizer = optimizer_class([{"params": [first]}, {"params": others, "lr": 1.0}], **swap)
    assert all("step" not in group for group in optimizer.param_groups)
    for expected in (1, 2, 3):
        first.grad = torch.ones_like(first)
        optimizer.step()
        # Also for the group in which nothing has a gradient.
        assert [group["step"] for group in optimizer.param_groups] == [expected, expected]
        assert all(type(group["step"]) is int for group in optimizer.param_groups)
    assert list(optimizer.state) == [first]
    assert list(optimizer.state[first]) == ["exp_avg", "exp_avg_sq"]
    # One that comes late starts with empty moments at the group's step.
    others[2].grad = torch.ones_like(others[2])
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


# The RFC's scenarios, under their own names.
@pytest.mark.parametrize("native_class", ORIGINALS)
@pytest.mark.parametrize("packed", [None, True, False])
def test_hyper_adamw_swap_optimizer_parameter_align(native_class, packed, simulator) -> None:
    align(native_class, SwapOptimizerConfig(packed_swap=packed), simulator)


@pytest.mark.parametrize("native_class", ORIGINALS)
@pytest.mark.parametrize("packed", [None, True, False])
def test_hyper_adamw_amsgrad_swap_optimizer_parameter_align(
    native_class, packed, simulator
) -> None:
    align(native_class, SwapOptimizerConfig(packed_swap=packed), simulator, amsgrad=True)


def align(native_class, config, simulator, **options) -> None:
    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Linear(512, 64)).to(DEVICE)

    def peak(run) -> int:
        torch.simulated.synchronize()
        torch.simulated.reset_peak_memory_stats()
        held = simulator.memory_held()
        losses.append(run.train(4))
        torch.simulated.synchronize()
        states = simulator.memory_held() - held
        return simulator.max_memory_held() - held + states

    losses: list[list[float]] = []
    native = training(native_class, wide, **options)
    native_peak = peak(native)
    swapped = training(SwapHyperAdamW, wide, swap_config=config, **options)
    swapped_peak = peak(swapped)
    assert losses[0] == losses[1]
    assert_same(native, swapped)
    assert swapped.optimizer.param_groups[0]["step"] == 4
    states = 2 + options.get("amsgrad", False)
    assert swapped_nbytes(swapped.optimizer) == states * 4 * (32 * 512 + 512 * 64)
    assert swapped_peak < native_peak
    if config.packed_swap is not False:
        # One transfer per batch: states lie back to back in the slabs.
        with simulator.record_operations() as operations:
            swapped.optimizer.step()
            swapped.optimizer.state
        copies = [operation for operation in operations if operation.kind == "copy_in"]
        assert sum(copy.nbytes for copy in copies) == swapped_nbytes(swapped.optimizer)
        assert len(copies) < 2 * states * 16


def test_the_step_survives_conversion_and_checkpoints() -> None:
    native, swapped = training(HyperAdamW), training(HyperAdamW)
    native.train(3), swapped.train(3)
    swap_optimizer(swapped.optimizer)
    assert native.train(2) == swapped.train(2)
    assert_same_tree(native.optimizer.state_dict(), swapped.optimizer.state_dict())
    for target in (training(HyperAdamW), training(SwapHyperAdamW)):
        target.optimizer.load_state_dict(swapped.optimizer.state_dict())
        assert target.optimizer.param_groups[0]["step"] == 5
    unswap_optimizer(swapped.optimizer)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
    assert native.optimizer.param_groups[0]["step"] == 7


def test_a_parameter_on_the_cpu() -> None:
    def on_cpu() -> torch.nn.Module:
        return small_model().cpu()

    native, swapped = HyperAdamW(on_cpu().parameters()), SwapHyperAdamW(on_cpu().parameters())
    for optimizer in (native, swapped):
        for _ in range(2):
            for param in parameters_of(optimizer):
                param.grad = torch.ones_like(param)
            optimizer.step()
    for param, other in zip(parameters_of(native), parameters_of(swapped)):
        assert torch.equal(param, other)


@pytest.mark.parametrize("option, value", [
    ("lr", -1.0), ("eps", -1e-8), ("weight_decay", -0.1), ("betas", (1.0, 0.9)),
    ("betas", (0.9, -0.1)),
])
@pytest.mark.parametrize("optimizer_class", [HyperAdamW, SwapHyperAdamW])
def test_hyperparameters_out_of_range(optimizer_class, option, value) -> None:
    with pytest.raises(ValueError, match=option):
        optimizer_class(small_model().parameters(), **{option: value})


@pytest.mark.skipif(not HAS_HYPER_PARALLEL, reason="hyper_parallel is not installed")
def test_the_contract_is_hyper_parallels() -> None:
    from hyper_parallel.core.optimizer import adamw as module

    assert issubclass(SwapHyperAdamW, module.AdamW)
    theirs = inspect.signature(module.AdamW.__init__).parameters
    ours = inspect.signature(HyperAdamW.__init__).parameters
    assert [(name, p.default) for name, p in theirs.items()] == [
        (name, p.default) for name, p in ours.items()
    ]
    assert list(inspect.signature(module.adamw).parameters) == list(
        inspect.signature(adamw).parameters
    )


STAND_IN = """
    import sys, types
    import torch
    from swap_adam.torch import SwapAdamW

    assert "hyper_parallel" not in sys.modules and "swap_adam.torch.hyper_adamw" not in sys.modules

    import importlib.machinery
    from pathlib import Path

    source = Path(sys.argv[1]).read_text()
    packages = ["hyper_parallel", "hyper_parallel.core", "hyper_parallel.core.optimizer"]
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    module = types.ModuleType("hyper_parallel.core.optimizer.adamw")
    before, _, _ = source.partition("def _base()")
    exec(compile(before, "adamw", "exec"), module.__dict__)
    module.AdamW = module.HyperAdamW
    sys.modules[module.__name__] = sys.modules[packages[-1]].adamw = module

    from swap_adam import swap_optimizer, unswap_optimizer
    import swap_adam.torch
    theirs = module.AdamW([torch.ones(2000)])
    swap_optimizer(theirs)
    from swap_adam.torch.hyper_adamw import HyperAdamW
    assert type(theirs) is swap_adam.torch.SwapHyperAdamW and isinstance(theirs, module.AdamW)
    assert type(unswap_optimizer(theirs)) is module.AdamW
    # Ours stays one of ours.
    ours = HyperAdamW([torch.ones(2000)])
    swap_optimizer(ours)
    assert isinstance(ours, HyperAdamW)
    assert type(unswap_optimizer(ours)) is HyperAdamW
    print("fine")
"""


def test_where_hyper_parallel_is_installed_its_class_is_the_base() -> None:
    # A stand-in for the package, with the contract's class under HyperParallel's names.
    source = inspect.getsourcefile(HyperAdamW)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STAND_IN), source],
        capture_output=True, text=True, timeout=120,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_hyper_parallel_is_imported_only_when_the_class_is_asked_for() -> None:
    code = (
        "import sys, swap_adam, swap_adam.torch, torch\n"
        "swap_adam.swap_optimizer(torch.optim.AdamW([torch.ones(1)]))\n"
        "print('swap_adam.torch.hyper_adamw' in sys.modules)\n"
        "swap_adam.torch.SwapHyperAdamW\n"
        "print('swap_adam.torch.hyper_adamw' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr
