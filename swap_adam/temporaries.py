"""What one Adam update allocates on the device while it runs (pure arithmetic).

It is what torch's own implementations have at a time, in their order. Each tensor counts as the
allocator counts it: rounded up to :data:`~swap_adam.alignment.DEVICE_ALIGNMENT_NBYTES`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, SMALL_BLOCK_NBYTES, align


@dataclass(frozen=True)
class Temporaries:
    """Of the update of one tensor, in bytes, 0 for what is not made.

    ``root`` is the square root of the second moment (or of its maximum), of the moment's dtype;
    ``negated`` the gradient that ``maximize`` makes, of its own dtype; ``decayed`` the gradient
    plus the parameter's coupled decay, of the dtype that the two promote to.
    """

    root: int
    negated: int = 0
    decayed: int = 0

    @property
    def foreach_nbytes(self) -> int:
        """What foreach has of the tensor at a time; it decays the negated gradient in place."""
        return max(self.root, self.negated or self.decayed)


def temporaries(
    numel: int, root_itemsize: int, negated_itemsize: int = 0, decayed_itemsize: int = 0
) -> Temporaries:
    """Those of ``numel`` elements, an itemsize of 0 standing for what is not made."""
    return Temporaries(*(
        align(numel * itemsize, DEVICE_ALIGNMENT_NBYTES)
        for itemsize in (root_itemsize, negated_itemsize, decayed_itemsize)
    ))


def for_loop_moments(tensors: Sequence[Temporaries]) -> list[list[int]]:
    """The blocks of one for-loop call at each moment that may be its peak.

    A tensor's gradient, the root and its quotient are there at a time; the last tensor's quotient
    stays until this one's is made, and its gradient until this one's is.
    """
    moments: list[list[int]] = []
    root_before = grad_before = 0
    for tensor in tensors:
        grad = 0
        if tensor.negated:
            moments.append([root_before, grad_before, tensor.negated])
            grad = tensor.negated
        if tensor.decayed:
            moments.append([root_before, grad, tensor.decayed])
            grad = tensor.decayed
        moments.append([root_before, grad, tensor.root, tensor.root])
        root_before, grad_before = tensor.root, grad
    return moments


def foreach_moments(dtypes: Sequence[Sequence[Temporaries]]) -> list[list[int]]:
    """The blocks of one foreach call, whose tensors it takes by the parameters' dtype, at each
    moment that may be its peak.

    The gradients of all tensors of a dtype are gone before their roots are made, and the roots
    stay until those of the next dtype are. In which order it takes the dtypes is not said.
    """
    roots = [[tensor.root for tensor in tensors] for tensors in dtypes]
    moments: list[list[int]] = []
    for index, tensors in enumerate(dtypes):
        before = max(roots[:index] + roots[index + 1:], key=sum, default=[])
        grads = [tensor.negated or tensor.decayed for tensor in tensors]
        moments.extend([[*roots[index], *before], [*grads, *before]])
    return moments


def largest_needs(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Those of ``choices`` with the most in small blocks, in large ones, and in all.

    Allocators have a pool for small blocks and one for large ones that do not serve each other.
    Once each of these has been there, any of the choices will be.
    """

    def small_nbytes(sizes: Iterable[int]) -> int:
        return sum(size for size in sizes if size <= SMALL_BLOCK_NBYTES)

    def large_nbytes(sizes: Iterable[int]) -> int:
        return sum(size for size in sizes if size > SMALL_BLOCK_NBYTES)

    def all_nbytes(sizes: Iterable[int]) -> int:
        return sum(sizes)

    return [
        tuple(max(choices, key=nbytes, default=()))
        for nbytes in (small_nbytes, large_nbytes, all_nbytes)
    ]


def split_at(sizes_nbytes: Sequence[int], limit_nbytes: int) -> list[int]:
    """How many of the next ones go together, in order, without exceeding the limit.

    One that does so alone is alone.
    """
    counts: list[int] = []
    room = 0
    for nbytes in sizes_nbytes:
        if not counts or nbytes > room:
            counts.append(0)
            room = limit_nbytes
        counts[-1] += 1
        room -= nbytes
    return counts
