"""Hugging Face Trainer and accelerate: a small Llama trains and resumes, natively and swapped."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    assert_same_states,
    assert_states_moved,
    moved_nbytes,
    swapped_nbytes,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

CONFIG = SwapOptimizerConfig(swap_times=5)


@pytest.fixture(autouse=True)
def device_for_accelerate(monkeypatch) -> Iterator[None]:
    """accelerate, and through it transformers, takes the device's name from the environment."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(index: int) -> torch.Tensor:
    return torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))


DATA = [{"input_ids": tokens(index), "labels": tokens(index)} for index in range(16)]


def make_trainer(folder: Path, how: str, **options) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1,
        save_steps=2, report_to=[], learning_rate=1e-2, disable_tqdm=True,
        **{"optim": "adamw_torch", **options},
    )
    model = make_llama()
    if how == "class":
        return transformers.Trainer(
            model=model, args=arguments, train_dataset=DATA,
            optimizer_cls_and_kwargs=(SwapAdamW, {"lr": 1e-2, "swap_config": CONFIG}),
        )
    if how == "instance":
        optimizer = SwapAdamW(model.to(DEVICE).parameters(), lr=1e-2, swap_config=CONFIG)
        return transformers.Trainer(
            model=model, args=arguments, train_dataset=DATA, optimizers=(optimizer, None)
        )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=DATA)
    if how == "converted":
        swap_optimizer(trainer.create_optimizer(), CONFIG)
    return trainer


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def losses_of(trainer: transformers.Trainer) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"])
            for entry in trainer.state.log_history if "loss" in entry]


def assert_same_trainers(native: transformers.Trainer, swapped: transformers.Trainer) -> None:
    assert losses_of(native) == losses_of(swapped) and losses_of(native)
    pairs = zip(native.model.parameters(), swapped.model.parameters(), strict=True)
    assert all(torch.equal(param, other) for param, other in pairs)
    assert_same_states(inner(native.optimizer), inner(swapped.optimizer))


@pytest.mark.parametrize("how, options", [
    ("class", {}), ("instance", {"weight_decay": 0.01}), ("converted", {}),
    ("converted", {"optim": "adamw_torch_fused"}),
    ("converted", {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
    ("converted", {"gradient_checkpointing": True}),
])
def test_trainer_trains_and_resumes(how, options, tmp_path: Path) -> None:
    if how != "converted":
        # The Trainer's own groups exempt some parameters from decay; these are one group.
        options = {**options, "weight_decay": 0.0}
    native_options = dict(options)
    native = make_trainer(tmp_path / "native", "native", **native_options)
    if how == "instance":
        optimizer = torch.optim.AdamW(native.model.to(DEVICE).parameters(), lr=1e-2)
        native = transformers.Trainer(
            model=native.model, args=native.args, train_dataset=DATA, optimizers=(optimizer, None)
        )
    elif how == "class":
        native = transformers.Trainer(
            model=native.model, args=native.args, train_dataset=DATA,
            optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-2}),
        )
    native.train()
    swapped = make_trainer(tmp_path / "swap", how, **options)
    before = moved_nbytes()
    swapped.train()
    assert type(inner(swapped.optimizer)) is SwapAdamW
    assert swapped_nbytes(inner(swapped.optimizer)) > 0
    assert_states_moved(before, 4 * swapped_nbytes(inner(swapped.optimizer)))
    assert_same_trainers(native, swapped)

    # From its own checkpoint, and from the native one.
    for folder in ("swap", "native"):
        resumed = make_trainer(tmp_path / "resumed", how, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        assert swapped_nbytes(inner(resumed.optimizer)) > 0
        assert_same_trainers(native, resumed)
    # And natively from the swapped one.
    if how == "converted":
        back = make_trainer(tmp_path / "back", "native", **options)
        back.train(resume_from_checkpoint=str(tmp_path / "swap" / "checkpoint-2"))
        assert_same_trainers(native, back)


def batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(DATA, batch_size=4)


class Accelerated:
    """The training loop of accelerate's documentation."""

    def __init__(self, optimizer_class, mixed_precision: str = "no", **options) -> None:
        self.accelerator = accelerate.Accelerator(
            mixed_precision=mixed_precision, gradient_accumulation_steps=2
        )
        model = make_llama()
        optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, batches(), scheduler
        )

    def train(self) -> list[float]:
        losses = []
        for values in self.data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**values).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def assert_same_accelerated(native: Accelerated, swapped: Accelerated) -> None:
    pairs = zip(native.model.parameters(), swapped.model.parameters(), strict=True)
    assert all(torch.equal(param, other) for param, other in pairs)
    assert_same_states(native.optimizer.optimizer, swapped.optimizer.optimizer)


@pytest.mark.parametrize("native_class, swap_class, options", [
    (torch.optim.Adam, SwapAdam, {}), (torch.optim.AdamW, SwapAdamW, {"fused": True}),
])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_trains_and_resumes(
    native_class, swap_class, options, mixed_precision, tmp_path: Path
) -> None:
    native = Accelerated(native_class, mixed_precision, **options)
    swapped = Accelerated(swap_class, mixed_precision, swap_config=CONFIG, **options)
    assert isinstance(swapped.optimizer, accelerate.optimizer.AcceleratedOptimizer)
    assert native.train() == swapped.train()
    assert_same_accelerated(native, swapped)
    swapped.accelerator.save_state(str(tmp_path))
    resumed = Accelerated(swap_class, mixed_precision, swap_config=CONFIG, **options)
    resumed.accelerator.load_state(str(tmp_path))
    losses = native.train()
    before = moved_nbytes()
    assert swapped.train() == losses
    # Two steps, of two batches each.
    assert_states_moved(before, 2 * swapped_nbytes(swapped.optimizer.optimizer))
    assert resumed.train() == losses
    assert_same_accelerated(native, swapped)
    assert_same_accelerated(native, resumed)
    assert swapped_nbytes(resumed.optimizer.optimizer) > 0


def test_accelerate_a_prepared_optimizer_is_converted_inside_its_wrapper() -> None:
    native, swapped = Accelerated(torch.optim.AdamW), Accelerated(torch.optim.AdamW)
    assert native.train() == swapped.train()
    with pytest.raises(TypeError, match="it wraps an optimizer: convert that one"):
        swap_optimizer(swapped.optimizer)
    swap_optimizer(swapped.optimizer.optimizer, CONFIG)
    before = moved_nbytes()
    assert native.train() == swapped.train()
    assert_states_moved(before, 2 * swapped_nbytes(swapped.optimizer.optimizer))
    assert_same_accelerated(native, swapped)
    assert swapped_nbytes(swapped.optimizer.optimizer) > 0


def test_accelerate_a_loss_scaler_keeps_the_step_of_before() -> None:
    # With a GradScaler accelerate keeps `optimizer.step` as it was when it wrapped it.
    def scaled(run: Accelerated) -> Accelerated:
        run.optimizer = accelerate.optimizer.AcceleratedOptimizer(
            run.optimizer.optimizer, scaler=torch.amp.GradScaler(DEVICE, init_scale=8.0)
        )
        return run

    def train(run: Accelerated) -> list[float]:
        losses = []
        for values in run.data:
            loss = run.model(**values).loss
            run.optimizer.scaler.scale(loss).backward()
            run.optimizer.step()
            losses.append(loss.item())
            run.optimizer.zero_grad()
        return losses

    native = scaled(Accelerated(torch.optim.AdamW))
    swapped = scaled(Accelerated(torch.optim.AdamW))
    swap_optimizer(swapped.optimizer.optimizer, CONFIG)
    before = moved_nbytes()
    assert train(native) == train(swapped)
    assert_states_moved(before, 4 * swapped_nbytes(swapped.optimizer.optimizer))
    assert_same_accelerated(native, swapped)
    assert swapped_nbytes(swapped.optimizer.optimizer) > 0


def test_the_environment_names_the_device() -> None:
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == DEVICE
    assert accelerate.Accelerator().device.type == DEVICE
