"""A permutation of any number of samples that is computed where it is read, and never stored."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

CACHE_CHUNK = 1 << 12  # positions that are computed together, which fit into the CPU's L1 cache
ROUNDS = 6  # Feistel rounds; fewer mix small domains badly


def permute(positions: npt.NDArray[np.int64], length: int, *key: int) -> npt.NDArray[np.int64]:
    """Return some elements of a pseudorandom permutation of 0, 1, …, ``length`` - 1 without storing it.

    A generalised Feistel network over a grid of rows and columns: each round shifts the row by a hash of the column,
    or the column by a hash of the row, which is invertible. The grid has a few cells too many; values that land there
    are permuted again (cycle walking).

    Args:
        positions: Positions in the permutation, each in [0, ``length``).
        length: Length of the permutation.
        key: Determines the permutation.

    Source: Luby & Rackoff, How to Construct Pseudorandom Permutations from Pseudorandom Functions, 1988; Black &
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (generalised Feistel, cycle walking).
    """
    columns = math.isqrt(max(0, length - 1)) + 1
    sizes = np.array([-(-length // columns), columns], np.uint64)
    salts = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    permuted: npt.NDArray[np.uint64] = np.array(positions, np.uint64)
    outside = np.arange(len(permuted))
    while len(outside):
        for chunk in np.array_split(outside, -(-len(outside) // CACHE_CHUNK)):
            permuted[chunk] = _feistel(permuted[chunk], sizes, salts)
        outside = outside[permuted[outside] >= length]
    return permuted.view(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], salts: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Permute cells of a grid of ``sizes`` (rows, columns)."""
    rows = values // sizes[1]
    halves = [rows, values - rows * sizes[1]]
    with np.errstate(over="ignore"):
        for number, salt in enumerate(salts):
            half, size = number % 2, sizes[number % 2]
            hashed = _murmur((halves[1 - half] + salt).astype(np.uint32)).astype(np.uint64)
            moved = halves[half] + (hashed * size >> np.uint64(32))
            halves[half] = np.minimum(moved, moved - size)  # modulo size: a negative value wraps to a large one
    cells: npt.NDArray[np.uint64] = halves[0] * sizes[1] + halves[1]
    return cells


def _murmur(z: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's finaliser."""
    z = (z ^ (z >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    z = (z ^ (z >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return z ^ (z >> np.uint32(16))
