"""Random numbers of the device: the CPU's for the same seed, with a state as torch expects it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Draw = Callable[[str], Tensor]

# torch keeps the second of a pair of normal numbers for the next call: odd counts below 16.
DRAWS: list[Draw] = [
    lambda device: torch.randn(3, device=device),
    lambda device: torch.rand(7, device=device),
    lambda device: torch.randn(5, device=device),
    lambda device: torch.randn(100, device=device),
    lambda device: torch.randn(1, device=device),
    lambda device: torch.randint(0, 1000, (5,), device=device),
    lambda device: torch.empty(1000, device=device).bernoulli_(0.3),
    lambda device: torch.empty(2000, device=device).uniform_(),
    lambda device: torch.nn.functional.dropout(torch.ones(40, device=device), 0.5),
    lambda device: torch.randperm(9, device=device),
    lambda device: torch.randn(2, device=device, dtype=torch.float64),
    lambda device: torch.randn(3, device=device),
]


def expected_draws() -> list[Tensor]:
    torch.manual_seed(11)
    return [draw("cpu") for draw in DRAWS]


def test_numbers_are_the_cpus_and_go_on_from_any_state(device: str) -> None:
    expected = expected_draws()
    torch.manual_seed(11)
    states = []
    for draw, value in zip(DRAWS, expected):
        states.append(torch.get_device_module(device).get_rng_state())
        assert torch.equal(draw(device).cpu(), value)
    assert all(state.shape == (16,) and state.dtype == torch.uint8 for state in states)
    # In any order, as after a resume: the state says all there is to know.
    for start in (7, 4, 11, 1, 0, 5, 10, 3, 2, 9, 6, 8):
        torch.manual_seed(99)
        torch.get_device_module(device).set_rng_state(states[start])
        for draw, value in zip(DRAWS[start:], expected[start:]):
            assert torch.equal(draw(device).cpu(), value), start


def test_generators_have_a_seed_and_an_offset(device: str) -> None:
    generator = torch.Generator(device).manual_seed(2**40 + 3)
    assert generator.get_state().view(torch.int64).tolist() == [2**40 + 3, 0]
    torch.rand(10, device=device, generator=generator)
    assert generator.get_state().view(torch.int64).tolist() == [2**40 + 3, 10]
    assert generator.get_offset() == 10 and generator.initial_seed() == 2**40 + 3
    following = torch.rand(6, device=device, generator=generator)
    generator.set_offset(12)
    again = torch.rand(4, device=device, generator=generator)
    assert torch.equal(again, following[2:])
    other = torch.Generator(device)
    other.set_state(generator.get_state())
    assert torch.equal(
        torch.randn(5, device=device, generator=generator),
        torch.randn(5, device=device, generator=other))
    copied = generator.clone_state()
    assert torch.equal(
        torch.randn(5, device=device, generator=generator),
        torch.randn(5, device=device, generator=copied))


def test_state_of_another_kind_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="has 16 bytes, a seed and an offset, not 5056"):
        torch.get_device_module(device).set_rng_state(torch.get_rng_state())


def test_checkpointed_forward_draws_the_same_again(device: str) -> None:
    """Also where the forward begins with what an earlier call has left over of a pair."""
    torch.manual_seed(0)
    weight = torch.ones(3, device=device, requires_grad=True)
    noise = []

    def forward(data: Tensor) -> Tensor:
        noise.append(torch.randn(3, device=device))
        return torch.nn.functional.dropout(data * noise[-1], 0.5) * weight

    torch.randn(3, device=device)
    checkpoint(forward, torch.ones(3, device=device), use_reentrant=False).sum().backward()
    assert len(noise) == 2 and torch.equal(noise[0], noise[1])


def test_pair_that_was_begun_long_ago_is_given_up_with_a_warning(device: str) -> None:
    torch.manual_seed(0)
    torch.randn(1, device=device)
    torch.rand(100_000, device=device)
    with pytest.warns(UserWarning, match="second half of a pair"):
        torch.get_device_module(device).get_rng_state()
