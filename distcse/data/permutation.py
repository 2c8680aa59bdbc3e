"""A pseudorandom permutation that is computed position by position, without an array of all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Permutation:
    """A keyed permutation of 0 to n - 1 in O(1) memory: a Feistel network over pairs of digits.

    A position is a pair (x, y) of digits in the mixed base (a, b) with a·b ≥ n. Every round adds a hash of one digit to the
    other, which can be undone, so that the network permutes all a·b pairs. A pair that is n or more goes through the network
    again until it is below n (cycle walking); less than one in √n does.

    Args:
        size: n, from 1 to 2^62.
        key: Non-negative integers that select the permutation.

    Raises:
        ValueError: A number of the key is negative.

    Source:
        Black and Rogaway 2002, "Ciphers with arbitrary finite domains", §4 and §5. The hash is the finalizer of MurmurHash3.
        It mixes well, and is no cipher.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self._size = size
        high = math.isqrt(size - 1) + 1  # the root, rounded up
        self._high, self._low = np.uint64(high), np.uint64(-(-size // high))
        self._keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64).astype(np.uint64, copy=False)

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the (m,) numbers at (m,) positions, each from 0 to n - 1."""
        found = self._permute(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._permute(found[outside])
        return found.astype(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x, y = np.divmod(numbers, self._low)
        for key_x, key_y in self._keys.reshape(-1, 2):
            x = (x + _hash(y ^ key_x)) % self._high
            y = (y + _hash(x ^ key_y)) % self._low
        return x * self._low + y


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix all bits of 64-bit numbers into 63 bits: MurmurHash3's finalizer. Adding a digit to them does not overflow."""
    for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * factor
    return (numbers ^ (numbers >> np.uint64(33))) >> np.uint64(1)
