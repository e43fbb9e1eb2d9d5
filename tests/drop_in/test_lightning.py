"""Lightning: automatic and manual optimization, resuming, and what must be set for it."""
from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    assert_same_states,
    assert_states_moved,
    moved_nbytes,
    swapped_nbytes,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW

L = pytest.importorskip("lightning")

from lightning.pytorch.accelerators import Accelerator  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

CONFIG = SwapOptimizerConfig(swap_times=5, allow_closure=True)


class DeviceAccelerator(Accelerator):
    """The test device, which Lightning does not know by itself."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(DEVICE, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return DEVICE


class Module(L.LightningModule):
    def __init__(self, make_optimizer, manual: bool = False, schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64)
        )
        self.make_optimizer, self.schedule = make_optimizer, schedule
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def loss_of(self, values: torch.Tensor) -> torch.Tensor:
        loss = self.net(values).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
        if self.automatic_optimization:
            return self.loss_of(batch[0])
        optimizer = self.optimizers()
        loss = self.loss_of(batch[0])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(module: Module, folder: Path, epochs: int, checkpoint: Path | None = None, **options):
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values), batch_size=4)
    trainer = L.Trainer(
        strategy=SingleDeviceStrategy(torch.device(DEVICE, 0), accelerator=DeviceAccelerator()),
        max_epochs=epochs, default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )
    trainer.fit(module, data, ckpt_path=checkpoint)
    return trainer


def assert_same_modules(native: Module, swapped: Module) -> None:
    pairs = zip(native.parameters(), swapped.parameters(), strict=True)
    assert all(torch.equal(param, other) for param, other in pairs)


def native_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def swap_adamw(params: Any) -> torch.optim.Optimizer:
    return SwapAdamW(params, lr=1e-2, swap_config=CONFIG)


def converted_adamw(params: Any) -> torch.optim.Optimizer:
    return swap_optimizer(native_adamw(params), CONFIG)


def native_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def swap_adam(params: Any) -> torch.optim.Optimizer:
    return SwapAdam(params, lr=1e-2, swap_config=CONFIG)


PAIRS = [
    pytest.param(native_adamw, swap_adamw, {}, id="automatic"),
    pytest.param(native_adamw, converted_adamw, {"schedule": True}, id="automatic, schedule"),
    pytest.param(native_adam, swap_adam, {"manual": True}, id="manual"),
]
FIT_OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make_native, make_swap, options", PAIRS)
def test_trains_and_resumes(make_native, make_swap, options, tmp_path: Path) -> None:
    fit_options = {} if options.get("manual") else FIT_OPTIONS
    runs = []
    for make in (make_native, make_swap):
        before = moved_nbytes()
        module = Module(make, **options)
        trainer = fit(module, tmp_path, 2, **fit_options)
        trainer.save_checkpoint(tmp_path / f"{make.__name__}.ckpt")
        runs.append((module, trainer))
    (native, native_trainer), (swapped, swap_trainer) = runs
    assert native.losses == swapped.losses and len(native.losses) == 8
    assert_same_modules(native, swapped)
    assert_same_states(native_trainer.optimizers[0], swap_trainer.optimizers[0])
    assert swapped_nbytes_of_run(swap_trainer) > 0
    # Two epochs of four batches, accumulated by two where Lightning does it.
    steps = 8 if options.get("manual") else 4
    assert_states_moved(before, steps * swapped_nbytes_of_run(swap_trainer))

    resumed = []
    for make, checkpoint in ((make_native, make_native), (make_swap, make_swap),
                             (make_swap, make_native), (make_native, make_swap)):
        module = Module(make, **options)
        path = tmp_path / f"{checkpoint.__name__}.ckpt"
        trainer = fit(module, tmp_path, 4, path, **fit_options)
        resumed.append((module, trainer))
    first, first_trainer = resumed[0]
    assert len(first.losses) == 8
    for module, trainer in resumed[1:]:
        assert module.losses == first.losses
        assert_same_modules(first, module)
        assert_same_states(first_trainer.optimizers[0], trainer.optimizers[0])
    for _, trainer in resumed[1:3]:
        assert swapped_nbytes_of_run(trainer) > 0


def swapped_nbytes_of_run(trainer: L.Trainer) -> int:
    """When the fit is over, Lightning moves the module to the CPU: put it back to look."""
    trainer.lightning_module.to(DEVICE)
    return swapped_nbytes(trainer.optimizers[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_without_allow_closure_the_error_says_what_to_set(manual: bool, tmp_path: Path) -> None:
    # With manual optimization too: there Lightning passes a closure that does nothing.
    module = Module(lambda params: SwapAdamW(params, lr=1e-2), manual)
    before = [param.clone() for param in module.parameters()]
    with pytest.raises(ValueError) as error:
        fit(module, tmp_path, 1)
    message = str(error.value)
    assert "swap_config=SwapOptimizerConfig(allow_closure=True)" in message
    assert "Lightning needs it" in message
    assert len(module.losses) == int(manual)
    assert all(torch.equal(param.cpu(), old) for param, old in zip(module.parameters(), before))


class ConvertedLate(Module):
    """Converts in the third batch, when Lightning has long wrapped the optimizer."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.trainer.global_step == 2:
            with pytest.raises(TypeError, match="convert that one, its attribute"):
                swap_optimizer(self.optimizers(), CONFIG)
            swap_optimizer(self.optimizers().optimizer, CONFIG)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_converted_when_lightning_has_wrapped_it(manual: bool, tmp_path: Path) -> None:
    native = Module(native_adamw, manual, schedule=True)
    swapped = ConvertedLate(native_adamw, manual, schedule=True)
    trainers = [fit(module, tmp_path, 2) for module in (native, swapped)]
    assert type(trainers[1].optimizers[0]) is SwapAdamW
    assert native.losses == swapped.losses
    assert_same_modules(native, swapped)
    assert_same_states(*(trainer.optimizers[0] for trainer in trainers))


class StatesToTheHost(Module):
    """The remedy of docs/libraries.md: Lightning moves what it loads to the device, all at once."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded_states = checkpoint["optimizer_states"]
        checkpoint["optimizer_states"] = []

    def on_fit_start(self) -> None:
        loaded = self.__dict__.pop("loaded_states", [])
        for optimizer, states in zip(self.trainer.optimizers, loaded):
            optimizer.load_state_dict(states)


@pytest.mark.filterwarnings("ignore")
def test_resuming_with_states_that_do_not_fit_the_device(
    tmp_path: Path, simulator, record_property
) -> None:
    peaks = {}
    for module_class in (Module, StatesToTheHost):
        module = module_class(swap_adamw)
        trainer = fit(module, tmp_path, 1)
        trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")
        del module, trainer
        gc.collect()
        torch.simulated.synchronize()
        torch.simulated.reset_peak_memory_stats()
        before = simulator.memory_held()
        resumed = module_class(swap_adamw)
        fit(resumed, tmp_path, 1, tmp_path / "checkpoint.ckpt")
        peaks[module_class] = simulator.max_memory_held() - before
        fit(resumed, tmp_path, 2, tmp_path / "checkpoint.ckpt")
        assert len(resumed.losses) == 4
    for module_class, peak in peaks.items():
        print(f"{module_class.__name__}: device peak while resuming {peak} bytes")
        record_property(module_class.__name__, peak)
    assert peaks[StatesToTheHost] < peaks[Module]


def test_the_optimizer_that_lightning_hands_out_loads_saves_and_says_what_to_convert() -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    outcomes = []
    for cls in (torch.optim.AdamW, SwapAdamW):
        params = [torch.nn.Parameter(torch.ones(50, 60, device=DEVICE))]
        optimizer: Any = cls(params, lr=1e-2)
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        wrapper: Any = LightningOptimizer(optimizer)
        assert list(wrapper.state) == params
        wrapper.load_state_dict(wrapper.state_dict())
        optimizer.step()
        outcomes.append((params[0].cpu(), optimizer.state[params[0]]["exp_avg"].cpu()))
        if cls is SwapAdamW:
            for convert in (swap_optimizer, unswap_optimizer):
                with pytest.raises(TypeError, match="its attribute `optimizer`"):
                    convert(wrapper)
    for left, right in zip(*outcomes):
        assert torch.equal(left, right)
