"""Which states stay on the device, up to a budget there (pure arithmetic)."""
from __future__ import annotations

from collections.abc import Sequence


def choose_resident(sizes_nbytes: Sequence[int], budget_nbytes: int) -> list[int]:
    """The indices of the states to keep, in the order of the choice.

    A byte that is kept spares two bytes of traffic per step, whichever state it belongs to; so the
    largest states are taken first: the fewest of them fill the budget, and the batches that remain
    are of small tensors.
    """
    chosen: list[int] = []
    for index in sorted(range(len(sizes_nbytes)), key=lambda index: -sizes_nbytes[index]):
        if sizes_nbytes[index] <= budget_nbytes:
            budget_nbytes -= sizes_nbytes[index]
            chosen.append(index)
    return chosen
