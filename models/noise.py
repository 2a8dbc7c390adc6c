"""One keyed cryptographic source for all noise and all random selection.

    seed (32 secret bytes)
      └─ HKDF-SHA256, label "epsilond noise v1"         -> root key
           └─ HKDF-Expand, (purpose, output index)      -> one AES-256 key a stream
                └─ AES-256-CTR from counter zero        -> 64-bit little-endian words
                     ├─ normals        one word each, :func:`normals_of_words`
                     ├─ Poisson masks  one word each, :func:`inclusion_threshold`
                     └─ fixed-size subsets, :meth:`NoiseStream.subset`

A stream is named by its purpose and its output index and by nothing else, so an output's draws do
not depend on the batch, the shard, the order or the machine's thread count, a retry with the same
seed repeats them, and no two outputs and no two purposes share any. Within a stream, words are used
in order and each once: drawing a shape in one call or in several gives the same values.

The guarantee is computational: the words are indistinguishable from random ones for whoever lacks
the seed. AES in counter mode was measured against ChaCha20 on long streams (1.0 against 1.6 ns a
word with AES instructions), and neither is the cost: the map to normals is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from numpy.typing import NDArray
from scipy.special import ndtri

SEED_BYTES: Final = 32
_SALT: Final = b"epsilond noise v1"
_MAX_WORD: Final = np.uint64(2**64 - 1)
# Pieces of this many words stay in the processor's second-level cache while they are mapped.
_PIECE: Final = 8192
_ZEROS: Final = memoryview(bytes(8 * _PIECE))
# CTR mode writes as many bytes as it reads, but the interface asks for room for one more block.
_SLACK: Final = 16


def normals_of_words(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard normals from independent uniform 64-bit words, one each, by the inverse CDF.

    With k the word's upper 63 bits, the magnitude is ``-ndtri((k + 1/2) / 2^64)`` and the lowest
    bit is the sign. The argument lies in (0, 1/2] and keeps 53 significant bits however small it
    is, so both tails are as fine as the centre and reach 9.15 standard deviations, where a plain
    53-bit uniform would stop near 8.2.

    Shape and order are kept.
    """
    tail = (words >> np.uint64(1)).astype(np.float64)
    tail += 0.5
    tail *= 2.0**-64
    out: NDArray[np.float64] = ndtri(tail, out=tail)
    out.view(np.uint64).__ixor__(words << np.uint64(63))
    return out


def inclusion_threshold(probability: float) -> int:
    """floor(q * 2^64) exactly: a word below it includes the unit, so the rate is at most q.

    Raises:
        ValueError: the probability is not in (0, 1].
    """
    if not (math.isfinite(probability) and 0.0 < probability <= 1.0):
        raise ValueError("a sampling probability lies in (0, 1]")
    numerator, denominator = probability.as_integer_ratio()
    return (numerator << 64) // denominator


class NoiseStream:
    """The words of one (purpose, output index), used in order, each once."""

    def __init__(self, key: bytes) -> None:
        # A key serves one stream only, so the counter may start at zero.
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` uniform 64-bit words, shape (count,)."""
        if count < 0:
            raise ValueError("a count is at least 0")
        buffer = np.empty(8 * count + _SLACK, dtype=np.uint8)
        for first in range(0, count, _PIECE):
            size = 8 * min(_PIECE, count - first)
            self._keystream.update_into(_ZEROS[:size], buffer[8 * first :].data)
        return buffer[: 8 * count].view("<u8").astype(np.uint64, copy=False)

    def normals(self, shape: int | Sequence[int]) -> NDArray[np.float64]:
        """The next standard normals, float64, filled in C order; one word each."""
        out = np.empty(shape, dtype=np.float64)
        flat = out.reshape(-1)
        for first in range(0, flat.size, _PIECE):
            piece = flat[first : first + _PIECE]
            piece[:] = normals_of_words(self.words(piece.size))
        return out

    def mask(self, count: int, probability: float) -> NDArray[np.bool_]:
        """Poisson selection: each of ``count`` units independently, at a rate of at most q.

        The realised rate is floor(q * 2^64) / 2^64, at most q and less than 2^-64 below it.
        ``q = 1`` includes every unit. One word a unit.

        Raises:
            ValueError: the probability is not in (0, 1].
        """
        threshold = inclusion_threshold(probability)
        out = np.empty(count, dtype=np.bool_)
        for first in range(0, count, _PIECE):
            piece = out[first : first + _PIECE]
            words = self.words(piece.size)
            if threshold == 2**64:
                piece[:] = True
            else:
                np.less(words, np.uint64(threshold), out=piece)
        return out

    def below(self, bounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Independent uniform integers, the i-th in [0, bounds[i]), without modulo bias.

        A word in the last, incomplete run of ``bound`` values is thrown away and drawn again.
        """
        excess = (_MAX_WORD % bounds + np.uint64(1)) % bounds  # 2^64 mod bound
        last_good = _MAX_WORD - excess
        words = self.words(bounds.size)
        while (rejected := np.flatnonzero(words > last_good)).size:
            words[rejected] = self.words(rejected.size)
        return words % bounds

    def subset(self, count: int, size: int) -> NDArray[np.int64]:
        """``size`` of ``count`` units without replacement, every subset equally likely; sorted.

        All of them when there are fewer than ``size``. Floyd's algorithm (Bentley and Floyd 1987):
        for j = count-size .. count-1 take a uniform t in [0, j], or j itself if t is taken already.
        """
        if count < 0 or size < 0:
            raise ValueError("a count is at least 0")
        if size >= count:
            return np.arange(count, dtype=np.int64)
        last = range(count - size, count)
        drawn = self.below(np.arange(last.start + 1, last.stop + 1, dtype=np.uint64))
        taken: set[int] = set()
        for j, t in zip(last, drawn.tolist(), strict=True):
            taken.add(j if t in taken else t)
        return np.sort(np.fromiter(taken, dtype=np.int64, count=size))


class KeyedNoise:
    """All the randomness of one job, from its secret seed.

    Asking twice for the same (purpose, output index) gives the same draws again: that is what makes
    a retry the same release, and why each use in a job has a purpose of its own.

    Args:
        seed: 32 secret bytes from the operating system, made for this job alone.
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed has {SEED_BYTES} bytes")
        self._root = HKDF(algorithm=hashes.SHA256(), length=32, salt=_SALT, info=b"root").derive(
            seed
        )

    def __repr__(self) -> str:
        return "KeyedNoise(<secret>)"

    def stream(self, purpose: str, output_index: int) -> NoiseStream:
        """The stream of one purpose and output, from its beginning.

        Args:
            purpose: what the draws are for, 1 to 255 bytes of UTF-8.
            output_index: the output's place in the whole job, 0 to 2^64 - 1.
        """
        name = purpose.encode()
        if not 0 < len(name) < 256:
            raise ValueError("a purpose has 1 to 255 bytes")
        if not 0 <= output_index < 2**64:
            raise ValueError("an output index lies in [0, 2^64)")
        # The length in front keeps two different pairs from ever making the same label.
        info = bytes([len(name)]) + name + output_index.to_bytes(8, "big")
        key = HKDFExpand(algorithm=hashes.SHA256(), length=32, info=info).derive(self._root)
        return NoiseStream(key)

    def normals(
        self, purpose: str, output_index: int, shape: int | Sequence[int]
    ) -> NDArray[np.float64]:
        """The first standard normals of a stream, float64, in the given shape."""
        return self.stream(purpose, output_index).normals(shape)

    def poisson_mask(
        self, purpose: str, output_index: int, count: int, probability: float
    ) -> NDArray[np.bool_]:
        """The first Poisson selection of a stream, see :meth:`NoiseStream.mask`."""
        return self.stream(purpose, output_index).mask(count, probability)

    def fixed_size(
        self, purpose: str, output_index: int, count: int, size: int
    ) -> NDArray[np.int64]:
        """The first fixed-size selection of a stream, see :meth:`NoiseStream.subset`."""
        return self.stream(purpose, output_index).subset(count, size)
