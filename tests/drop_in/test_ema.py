"""Averaged weights (torch.optim.swa_utils) beside a swap optimizer."""
from __future__ import annotations

import pytest
import torch
from drop_in_parity import assert_same, batch, small_model, swapped_nbytes, training
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from swap_adam.torch import SwapAdam, SwapAdamW


def with_batch_norm() -> torch.nn.Module:
    model = small_model()
    model.insert(1, torch.nn.BatchNorm1d(96).to(model[0].weight.device))
    return model


@pytest.mark.parametrize("native_class, swap_class", [
    (torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
])
@pytest.mark.parametrize("ema", [True, False])
def test_averages_see_the_updated_weights(native_class, swap_class, ema: bool) -> None:
    averages = []
    runs = [training(native_class, with_batch_norm), training(swap_class, with_batch_norm)]
    for run in runs:
        function = get_ema_multi_avg_fn(0.9) if ema else None
        average = AveragedModel(run.model, multi_avg_fn=function, use_buffers=False)
        scheduler = SWALR(run.optimizer, swa_lr=1e-3, anneal_epochs=2)
        for _ in range(5):
            run.train(1)
            average.update_parameters(run.model)
            scheduler.step()
        update_bn([batch(index) for index in range(3)], average)
        averages.append(average)
    assert_same(*runs)
    assert swapped_nbytes(runs[1].optimizer) > 0
    native, swapped = (average.state_dict() for average in averages)
    assert native.keys() == swapped.keys()
    for name in native:
        assert torch.equal(native[name], swapped[name]), name
    assert not torch.equal(native["module.0.weight"], runs[0].model[0].weight)
    restored = AveragedModel(with_batch_norm(), use_buffers=False)
    restored.load_state_dict(swapped)
