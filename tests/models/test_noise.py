"""The keyed noise source: its words, its normals out to the far tail, its selections."""

from __future__ import annotations

import hashlib
import hmac
import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from models.noise import KeyedNoise, NoiseStream, inclusion_threshold, normals_of_words

SEED = bytes(range(32))
NOISE = KeyedNoise(SEED)

KNOWN_WORDS = ["0x684361a51d882cf", "0x602668a5aca9c079", "0x7d29ce26bfefcd23"]
KNOWN_NORMALS = [2.2344286106468343, 0.8860583755673743, 0.6920289512609226]
KNOWN_SUBSET = [246, 322, 375, 705, 823]
KNOWN_MASK = [52, 247, 303, 656, 731, 816]


class ScriptedStream(NoiseStream):
    """A stream whose words are written down, for paths that real words never take."""

    def __init__(self, words: list[int]) -> None:
        self._left = words

    def words(self, count: int) -> NDArray[np.uint64]:
        taken, self._left = self._left[:count], self._left[count:]
        assert len(taken) == count, "more words asked for than written down"
        return np.array(taken, dtype=np.uint64)


# -- words -----------------------------------------------------------------------------------------


def reference_words(seed: bytes, purpose: bytes, index: int, count: int) -> list[int]:
    """The same words from RFC 5869 written out with hmac and from AES one block at a time."""

    def mac(key: bytes, text: bytes) -> bytes:
        return hmac.digest(key, text, hashlib.sha256)

    root = mac(mac(b"epsilond noise v1", seed), b"root\x01")
    key = mac(root, bytes([len(purpose)]) + purpose + index.to_bytes(8, "big") + b"\x01")
    aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - counters, one a block
    blocks = b"".join(aes.update(i.to_bytes(16, "big")) for i in range(count // 2 + 1))
    return [int.from_bytes(blocks[8 * i : 8 * i + 8], "little") for i in range(count)]


def test_words_are_what_the_docstring_says() -> None:
    words = NOISE.stream("denoising_block.noise", 7).words(1001)
    assert words.dtype == np.uint64
    assert words.tolist() == reference_words(SEED, b"denoising_block.noise", 7, 1001)


def test_known_answers() -> None:
    """A change of any of these changes what a retry of a running job draws."""
    words = NOISE.stream("denoising_block.noise", 7).words(3)
    assert [hex(w) for w in words.tolist()] == KNOWN_WORDS
    normals = NOISE.normals("denoising_block.noise", 7, 3)
    np.testing.assert_allclose(normals, KNOWN_NORMALS, rtol=1e-13)
    assert NOISE.fixed_size("denoising_block.selection", 7, 1000, 5).tolist() == KNOWN_SUBSET
    mask = NOISE.poisson_mask("denoising_block.selection", 7, 1000, 0.005)
    assert np.flatnonzero(mask).tolist() == KNOWN_MASK


@given(st.lists(st.integers(0, 9000), max_size=6))
def test_a_stream_does_not_depend_on_how_it_is_cut(cuts: list[int]) -> None:
    stream = NOISE.stream("cuts", 0)
    pieces = [stream.words(cut) for cut in cuts]
    whole = NOISE.stream("cuts", 0).words(sum(cuts))
    assert np.array_equal(np.concatenate([np.empty(0, np.uint64), *pieces]), whole)


def test_mixed_draws_use_one_word_each_in_order() -> None:
    words = NOISE.stream("mixed", 3).words(20_011)
    stream = NOISE.stream("mixed", 3)
    assert np.array_equal(stream.normals((2, 5, 1000)).ravel(), normals_of_words(words[:10_000]))
    threshold = np.uint64(inclusion_threshold(0.25))
    assert np.array_equal(stream.mask(10_001, 0.25), words[10_000:20_001] < threshold)
    assert np.array_equal(stream.words(10), words[20_001:])


def test_no_word_comes_twice() -> None:
    """Two streams that shared a counter block, or one that wrapped, would repeat words."""
    streams = [
        NOISE.stream(purpose, index)
        for purpose in ("denoising_block.noise", "denoising_block.selection", "renoise")
        for index in (0, 1, 2, 255, 256, 2**32, 2**64 - 1)
    ] + [KeyedNoise(bytes(31) + b"\x01").stream("renoise", 0)]
    words = np.concatenate([stream.words(20_000) for stream in streams])
    # A chance repeat among 440,000 random words has probability 5e-9.
    assert np.unique(words).size == words.size


def test_labels_cannot_run_into_each_other() -> None:
    """A purpose that ends in what could be an index's first bytes names another stream."""
    a = NOISE.stream("a", 0).words(4)
    assert not np.array_equal(a, NOISE.stream("a\x00", 0).words(4))
    assert not np.array_equal(a, NOISE.stream("a\x00\x00\x00\x00\x00\x00\x00\x00", 0).words(4))


def test_words_are_balanced_in_every_bit() -> None:
    n = 200_000
    words = NOISE.stream("bits", 0).words(n)
    ones = np.array([int(((words >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(64)])
    assert np.abs(ones - n / 2).max() < 6 * math.sqrt(n) / 2
    assert abs(np.corrcoef(words[:-1].astype(float), words[1:].astype(float))[0, 1]) < 6 / n**0.5


def test_bad_arguments_are_refused() -> None:
    for seed in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            KeyedNoise(seed)
    for purpose in ("", "x" * 256):
        with pytest.raises(ValueError, match="purpose"):
            NOISE.stream(purpose, 0)
    for index in (-1, 2**64):
        with pytest.raises(ValueError, match="index"):
            NOISE.stream("x", index)
    with pytest.raises(ValueError, match="at least 0"):
        NOISE.stream("x", 0).words(-1)
    with pytest.raises(ValueError, match="at least 0"):
        NOISE.stream("x", 0).subset(5, -1)


def test_its_repr_keeps_the_seed() -> None:
    assert repr(NOISE) == "KeyedNoise(<secret>)"


# -- normals ---------------------------------------------------------------------------------------


def test_the_map_is_the_inverse_cdf_at_every_depth() -> None:
    """erfc, from another library than ndtri, gives back (k + 1/2) / 2^64 for every magnitude k."""
    ks = [0, 1, 2, 3, 10] + [int(1.7**i) for i in range(5, 82)] + [2**53 + 1, 2**62, 2**63 - 1]
    for k in ks:
        z = float(normals_of_words(np.array([2 * k], dtype=np.uint64))[0])
        p = float(Fraction(2 * k + 1, 2**65))
        assert z <= 0.0
        # d log p / dz is about z in the tail, so an ulp of z shows 80-fold there.
        assert 0.5 * math.erfc(-z / math.sqrt(2.0)) == pytest.approx(p, rel=1e-13)


def test_the_tail_reaches_beyond_nine() -> None:
    extreme = normals_of_words(np.array([0, 1, 2**64 - 2, 2**64 - 1], dtype=np.uint64))
    np.testing.assert_allclose(extreme, [-9.155293773112453, 9.155293773112453, 0.0, 0.0])


def test_the_map_is_odd_and_monotone() -> None:
    k = np.sort(NOISE.stream("monotone", 0).words(10_000) >> np.uint64(1))
    low = normals_of_words(k << np.uint64(1))
    high = normals_of_words((k << np.uint64(1)) | np.uint64(1))
    assert np.array_equal(low, -high)
    assert (np.diff(low) >= 0.0).all()
    assert np.isfinite(low).all()


def test_normals_are_standard_normal() -> None:
    n = 2_000_000
    z = NOISE.normals("ks", 0, n)
    assert stats.kstest(z[:500_000], stats.norm.cdf).pvalue > 1e-6
    assert stats.kstest(z[500_000:1_000_000], stats.norm.cdf).pvalue > 1e-6
    # E z^k with its standard error from E z^2k = (2k - 1)!!
    for k, moment, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105), (6, 15, 10395)):
        error = math.sqrt((square - moment**2) / n)
        assert abs(float((z**k).mean()) - moment) < 5 * error
    for bound in (2.0, 3.0, 4.0, 4.5):
        expected = n * math.erfc(bound / math.sqrt(2.0))
        for found in (int((np.abs(z) > bound).sum()), 2 * int((z > bound).sum())):
            assert abs(found - expected) < 5 * math.sqrt(2 * expected) + 1


@pytest.mark.parametrize("depth", [10, 20, 27, 30, 40, 50, 53])
def test_the_far_tail_has_the_right_law(depth: int) -> None:
    """Given |z| beyond the point of two-sided mass 2^-depth, the tail mass at z is uniform.

    Words with their upper ``depth`` bits cleared are exactly the words of that event, so the law
    out there is seen in full without waiting for it.
    """
    words = NOISE.stream("tail", depth).words(50_000) >> np.uint64(depth)
    z = np.abs(normals_of_words(words))
    mass = np.array([math.erfc(v / math.sqrt(2.0)) for v in z]) * 2.0**depth
    assert mass.max() <= 1.0 + 1e-12
    # At depth 53 the words left have 2^10 magnitudes: a step of 2^-11 is below what KS can see.
    assert stats.kstest(mass, stats.uniform.cdf).pvalue > 1e-6


def test_outputs_and_purposes_are_independent() -> None:
    n = 100_000
    names = [("noise", 0), ("noise", 1), ("noise", 2), ("selection", 0), ("renoise", 0)]
    draws = np.stack([NOISE.normals(purpose, index, n) for purpose, index in names])
    correlations = np.corrcoef(draws) - np.eye(len(names))
    assert np.abs(correlations).max() < 5 / math.sqrt(n)
    squares = np.corrcoef(draws**2) - np.eye(len(names))
    assert np.abs(squares).max() < 5 / math.sqrt(n)


def test_the_same_name_gives_the_same_draws() -> None:
    again = KeyedNoise(SEED)
    assert np.array_equal(NOISE.normals("x", 5, (3, 7)), again.normals("x", 5, (3, 7)))
    assert np.array_equal(NOISE.poisson_mask("x", 5, 99, 0.3), again.poisson_mask("x", 5, 99, 0.3))
    assert np.array_equal(NOISE.fixed_size("x", 5, 99, 9), again.fixed_size("x", 5, 99, 9))
    other = KeyedNoise(bytes(32))
    assert not np.array_equal(NOISE.normals("x", 5, 7), other.normals("x", 5, 7))


# -- selections ------------------------------------------------------------------------------------


@given(st.floats(min_value=5e-324, max_value=1.0))
def test_the_realised_rate_is_rounded_down(q: float) -> None:
    realised = Fraction(inclusion_threshold(q), 2**64)
    assert realised <= Fraction(q) < realised + Fraction(1, 2**64)


def test_thresholds_at_the_ends() -> None:
    assert inclusion_threshold(1.0) == 2**64
    assert inclusion_threshold(1.0 - 2.0**-53) == 2**64 - 2**11
    assert inclusion_threshold(2.0**-64) == 1
    assert inclusion_threshold(2.0**-65) == 0
    # 0.1 as a double lies above one tenth; what counts is the double that was charged.
    assert Fraction(inclusion_threshold(0.1), 2**64) == Fraction(int(0.1 * 2**64), 2**64)
    for q in (0.0, -0.1, 1.0 + 2.0**-52, math.nan, math.inf):
        with pytest.raises(ValueError, match="lies in"):
            inclusion_threshold(q)


def test_a_mask_compares_words_with_the_threshold() -> None:
    threshold = inclusion_threshold(0.3)
    stream = ScriptedStream([0, threshold - 1, threshold, threshold + 1, 2**64 - 1])
    assert stream.mask(5, 0.3).tolist() == [True, True, False, False, False]
    assert NOISE.poisson_mask("all", 0, 10_000, 1.0).all()
    assert not NOISE.poisson_mask("none", 0, 10_000, 1e-300).any()
    assert NOISE.poisson_mask("empty", 0, 0, 0.5).shape == (0,)


def test_masks_include_each_unit_independently() -> None:
    units, outputs, q = 40, 8_000, 0.2
    masks = np.stack([NOISE.poisson_mask("rates", i, units, q) for i in range(outputs)])
    error = math.sqrt(q * (1 - q) / outputs)
    assert np.abs(masks.mean(axis=0) - q).max() < 5 * error
    sizes = masks.sum(axis=1)
    observed = np.bincount(sizes, minlength=units + 1)
    expected = stats.binom.pmf(np.arange(units + 1), units, q) * outputs
    seen = expected > 5
    chi2 = float(((observed - expected)[seen] ** 2 / expected[seen]).sum())
    assert stats.chi2.sf(chi2, int(seen.sum()) - 1) > 1e-6
    correlations = np.corrcoef(masks.T.astype(float)) - np.eye(units)
    assert np.abs(correlations).max() < 6 / math.sqrt(outputs)


def test_every_subset_is_equally_likely() -> None:
    count, size, draws = 6, 3, 20_000
    stream = NOISE.stream("subsets", 0)
    found = dict.fromkeys(combinations(range(count), size), 0)
    for _ in range(draws):
        found[tuple(stream.subset(count, size).tolist())] += 1
    assert stats.chisquare(list(found.values())).pvalue > 1e-6


def test_subsets_are_sorted_distinct_and_of_the_size() -> None:
    for count, size in ((1000, 25), (1000, 999), (2, 1), (10**9, 3)):
        chosen = NOISE.fixed_size("shape", 0, count, size)
        assert chosen.shape == (size,)
        assert (np.diff(chosen) > 0).all()
        assert 0 <= chosen[0] <= chosen[-1] < count
    assert NOISE.fixed_size("few", 0, 3, 25).tolist() == [0, 1, 2]
    assert NOISE.fixed_size("none", 0, 0, 25).tolist() == []
    assert NOISE.fixed_size("zero", 0, 9, 0).tolist() == []


def test_bounded_integers_reject_the_incomplete_run() -> None:
    """2^64 = 3 * 2^62 + 2^62: without rejection, values below 2^62 would come twice as often."""
    bound = 3 * 2**62
    stream = ScriptedStream([bound, bound - 1, 2**64 - 1, 5])
    # The first word is rejected, its replacement (the third) as well, and the fourth is taken.
    assert stream.below(np.array([bound, bound], dtype=np.uint64)).tolist() == [5, bound - 1]
    # A power of two divides 2^64: nothing is rejected.
    assert ScriptedStream([2**64 - 1]).below(np.array([2**10], dtype=np.uint64)).tolist() == [1023]
    assert ScriptedStream([2**64 - 1]).below(np.array([1], dtype=np.uint64)).tolist() == [0]
    # 2^64 mod 10 = 6: the last six words are rejected, the one before them is 9.
    words = [2**64 - 6, 2**64 - 1, 2**64 - 7]
    assert ScriptedStream(words).below(np.array([10], dtype=np.uint64)).tolist() == [9]
