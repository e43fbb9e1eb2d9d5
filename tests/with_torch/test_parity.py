"""Ten steps give the native optimizer's parameters, states and step counters, bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import cover, pairs
from device_under_test import IS_FULL
from torch.optim import Adam, AdamW
from training import SWAP_CLASS, assert_same_training, assert_trains_alike, make_params

from swap_adam import SwapOptimizerConfig

LOOP, DEFAULT, FUSED = {"foreach": False}, {}, {"fused": True}
MODES = {
    "adam-loop": (Adam, LOOP),
    "adam-default": (Adam, DEFAULT),
    "adamw-loop": (AdamW, LOOP),
    "adamw-default": (AdamW, DEFAULT),
    "adamw-fused": (AdamW, FUSED),
}
BASE = list(product(MODES, ("packed", "per_tensor"), (1, 2, 7, 16, 1000)))
REST = (
    ("", "amsgrad"),
    ("", "maximize"),
    ("", "decay"),
    ("", "two_groups"),
    (torch.float32, torch.bfloat16),
    ("split", "whole"),
)
CASES = [(*base, *rest) for base in BASE for rest in product(*REST)]
if not IS_FULL:
    CASES = cover(BASE, REST)


def make_groups() -> list[dict[str, Any]]:
    first, second = make_params(), make_params(seed=1)
    return [
        {"params": first[:3] + second[3:]},
        {"params": second[:3] + first[3:], "lr": 0.03, "betas": (0.8, 0.99), "weight_decay": 0.2},
    ]


def name_of(case: tuple[object, ...]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case if value != "")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ten_steps_are_the_native_ones(case: tuple[Any, ...]) -> None:
    mode, pipeline, swap_times, amsgrad, maximize, decay, groups, dtype, split = case
    original, flags = MODES[mode]
    options = {
        **flags, "lr": 0.01, "amsgrad": bool(amsgrad), "maximize": bool(maximize),
        "weight_decay": 0.1 if decay else 0.0,
    }
    config = {
        "packed_swap": pipeline == "packed", "swap_times": swap_times,
        "split_tensors": split == "split",
    }

    def make() -> Any:
        made = make_groups() if groups else [{"params": make_params()}]
        for group in made:
            group["params"] = [p.detach().to(dtype).requires_grad_() for p in group["params"]]
        return made

    assert_trains_alike(original, options, config, make)


def test_the_cases_hold_every_pair_of_options_and_every_pipeline_in_every_mode() -> None:
    have = {pair for case in CASES for pair in pairs(case)}
    want = {pair for base in BASE for rest in product(*REST) for pair in pairs((*base, *rest))}
    assert have == want
    assert {case[:3] for case in CASES} == set(BASE)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_a_model_trains_to_the_native_losses(
    original: type[torch.optim.Optimizer], packed: bool, device: str
) -> None:
    losses: list[list[torch.Tensor]] = []

    def run(swapped: bool) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 90), torch.nn.LayerNorm(90), torch.nn.GELU(),
            torch.nn.Linear(90, 30),
        ).to(device)
        config = SwapOptimizerConfig(swap_times=3, packed_swap=packed)
        made = (
            SWAP_CLASS[original](model.parameters(), lr=0.01, swap_config=config) if swapped
            else original(model.parameters(), lr=0.01)
        )
        mine = []
        for step in range(10):
            x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(x).pow(2).mean()
            made.zero_grad()
            loss.backward()
            made.step()
            mine.append(loss.detach().cpu())
        losses.append(mine)
        return made

    assert_same_training(run(swapped=False), run(swapped=True))
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][-1]
