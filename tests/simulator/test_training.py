"""A model trains as on the CPU, to the last bit, with everything that torch brings."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swap_adam.simulator as simulator


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 40)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        for layer in self.layers:
            if self.checkpointed:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


def train(
    device: str, mode: dict[str, bool], steps: int = 3, checkpointed: bool = False
) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Transformer(checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **mode)
    tokens = torch.randint(0, 40, (4, 10)).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_transformer_trains_bitwise_as_on_the_cpu(
    device: str, mode: dict[str, bool], checkpointed: bool
) -> None:
    here = train("cpu", mode, checkpointed=checkpointed)
    there = train(device, mode, checkpointed=checkpointed)
    assert here[0] == there[0] and here[0][-1] < here[0][0]
    assert all(torch.equal(a, b) for a, b in zip(here[1], there[1]))
    assert simulator.violations() == []


def test_adamw_takes_foreach_by_itself_as_on_cuda(device: str) -> None:
    parameter = torch.ones(10, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    with simulator.record_operations() as operations:
        optimizer.step()
    names = [operation.name for operation in operations]
    assert "aten::_foreach_addcdiv_.ScalarList" in names
    assert "aten::addcdiv_" not in names
    assert optimizer.state[parameter]["step"].device.type == "cpu"


def test_gradscaler_skips_the_step_that_overflows(device: str) -> None:
    for fused in (False, True):
        parameter = torch.ones(10, device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=100)
        for factor, changes in ((1.0, True), (float("inf"), False), (1.0, True)):
            before = parameter.detach().clone()
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, parameter) is not changes
        assert scaler.get_scale() == 2.0
        assert optimizer.state[parameter]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_what_it_should(device: str, dtype: torch.dtype) -> None:
    model, data = nn.Linear(8, 8).to(device), torch.ones(2, 8, device=device)
    with torch.autocast(device, dtype=dtype):
        hidden = model(data)
        loss = nn.functional.mse_loss(hidden, data)
    assert hidden.dtype == dtype and loss.dtype == torch.float32
    loss.backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert torch.is_autocast_enabled(device) is False


def test_module_keeps_its_parameters_when_it_moves(device: str) -> None:
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    model.to(device)
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert model.weight.device == torch.device("simulated:0")
    model.to("simulated:1").cpu()
    assert all(a is b for a, b in zip(parameters, model.parameters()))


def test_save_load_deepcopy_and_pickle(device: str) -> None:
    model = nn.Linear(4, 4).to(device)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for place, expected in ((None, "simulated:0"), ("cpu", "cpu"), ("simulated:1",) * 2):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=place, weights_only=True)
        assert loaded["weight"].device == torch.device(expected)
        assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.weight.device == model.weight.device
        assert torch.equal(twin.weight, model.weight)
        assert twin.weight.data_ptr() != model.weight.data_ptr()


def test_random_numbers_follow_the_seed_and_the_state(device: str) -> None:
    torch.manual_seed(3)
    first = torch.randn(10, device=device), torch.randn(10, device="simulated:1")
    torch.manual_seed(3)
    assert torch.equal(first[0].cpu(), torch.randn(10))
    assert torch.equal(first[0], torch.randn(10, device=device))
    state = torch.simulated.get_rng_state()
    second = nn.functional.dropout(torch.ones(100, device=device), 0.5)
    torch.simulated.set_rng_state(state)
    assert torch.equal(second, nn.functional.dropout(torch.ones(100, device=device), 0.5))
    host = torch.get_rng_state()
    torch.rand(5, device=device)
    nn.functional.dropout(torch.ones(100, device=device), 0.5)
    assert torch.equal(host, torch.get_rng_state())
    generator = torch.Generator(device).manual_seed(3)
    assert torch.equal(torch.randn(10, device=device, generator=generator), first[0])
    with torch.random.fork_rng(devices=[0], device_type=device):
        torch.rand(5, device=device)


def test_convolution_and_batch_norm_in_channels_last(device: str) -> None:
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        model = model.to(place, memory_format=torch.channels_last)
        data = torch.randn(2, 3, 8, 8).to(place, memory_format=torch.channels_last)
        output = model(data)
        output.square().mean().backward()
        assert output.is_contiguous(memory_format=torch.channels_last)
        results.append([output.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
