"""MindFormers' AdamW where only that class is needed, and what it lacks on the CPU.

Importing its package pulls in an optimizer that needs ``hyper_parallel``, which is not on PyPI, and
dependencies of 755 MB. So its packages are registered empty, and ``hyper_parallel`` is stood in
for, unless it is installed.
"""
from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn
from ms_device import IS_SIMULATED
from ms_training import SWAP_CLASS, Case, lr_and_decay_groups


class _SkipDTensorDispatch:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _DTensor:
    pass


HAS_HYPER_PARALLEL = importlib.util.find_spec("hyper_parallel") is not None


def _load() -> type:
    if not HAS_HYPER_PARALLEL:
        spec = importlib.util.find_spec("mindformers")
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for name in ("", "pynative", "pynative.optimizer", "tools"):
            package = ModuleType(f"mindformers.{name}".rstrip("."))
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            sys.modules[package.__name__] = package
        stand_in = ModuleType("hyper_parallel")
        setattr(stand_in, "SkipDTensorDispatch", _SkipDTensorDispatch)
        setattr(stand_in, "DTensor", _DTensor)
        sys.modules["hyper_parallel"] = stand_in
    from mindformers.pynative.optimizer.adamw import AdamW

    assert isinstance(AdamW, type)
    return AdamW


AdamW = _load()

from swap_adam.mindspore import SwapMFAdamW  # noqa: E402

SWAP_CLASS[AdamW] = SwapMFAdamW


def _adamw_kernel(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor, grad: Tensor,
    step: Tensor, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
    amsgrad: bool, maximize: bool,
) -> None:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), as the kernel that the CPU lacks."""
    count = int(step.asnumpy()[0]) + 1
    grad = grad.astype(mindspore.float32) * (-1.0 if maximize else 1.0)
    exp_avg.copy_(exp_avg * beta1 + grad * (1 - beta1))
    exp_avg_sq.copy_(exp_avg_sq * beta2 + grad * grad * (1 - beta2))
    if amsgrad:
        max_exp_avg_sq.copy_(mint.maximum(max_exp_avg_sq, exp_avg_sq))
        exp_avg_sq = max_exp_avg_sq
    denominator = (exp_avg_sq / (1 - beta2 ** count)).sqrt() + eps
    update = exp_avg / (1 - beta1 ** count) / denominator * lr
    param.copy_((param * (1 - lr * weight_decay) - update).astype(param.dtype))


def give_kernel(optimizer: nn.Optimizer) -> None:
    """Let the fused update run on the CPU."""
    if optimizer.enable_fused_opt and IS_SIMULATED:
        optimizer.fused_adamw_opt = _adamw_kernel


MODES: dict[str, dict[str, Any]] = {
    "non-fused": {},
    "fused": {"use_fused": True},
    "fused, amsgrad": {"use_fused": True, "amsgrad": True},
}
DTYPES = {
    "fp32": mindspore.float32, "bf16": mindspore.bfloat16, "fp16": mindspore.float16,
}


def mf_case(mode: str, dtype: str = "fp32", grouped: bool = False, **more: Any) -> Case:
    """MindFormers AdamW in one of ``MODES``, for parameters of one of ``DTYPES``."""
    return Case(
        f"{mode}, {dtype}{', groups' if grouped else ''}",
        AdamW,
        lambda: {"weight_decay": 0.1, **MODES[mode]},
        lr_and_decay_groups if grouped else list,
        DTYPES[dtype],
        give_kernel,
        **more,
    )


# Its Python loop is slow, and three steps see every state twice.
MF_CASES = tuple(
    mf_case(mode, dtype, grouped, steps=3)
    for mode, dtype, grouped in product(MODES, DTYPES, (False, True))
)


def builder_of_the_trainer() -> Any:
    """``_build_optimizer`` of MindFormers' PyNative trainer, from its own file.

    Importing the file needs the 755 MB, too; the function itself needs only what is given here.
    """
    path = Path(inspect.getfile(AdamW)).parents[1] / "trainer" / "utils.py"
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    heavy = ("hyper_parallel", "mindformers")
    tree.body = [
        node for node in tree.body
        if isinstance(node, (ast.Import, ast.FunctionDef))
        or isinstance(node, ast.ImportFrom) and not str(node.module).startswith(heavy)
    ]
    names: dict[str, Any] = {
        "AdamW": AdamW, "DTensor": _DTensor, "logger": logging.getLogger("mindformers"),
    }
    exec(compile(tree, str(path), "exec"), names)
    return names["_build_optimizer"]
