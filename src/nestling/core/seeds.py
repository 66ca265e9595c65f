"""Named random streams that are the same bits on every machine, version, device and thread count.

A stream is Philox4x32-10 (a counter-based generator: word j depends on j alone) under a key hashed from a 64-bit seed,
a purpose and a name. Everything drawn is integer work, or `decimal` arithmetic, never the platform's log or exp.

    key     = first 8 bytes, as two little-endian u32, of SHA-256("fedseed/v1\\0" ‖ u64le(seed) ‖ u32le(len n) ‖ n),
              n = utf8(purpose "/" name)
    word j  = output[j mod 4] of the block with counter (j div 4 low, j div 4 high, 0, 0)

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with the known-answer vectors of their
Random123 library. NumPy's `Philox` is another generator (4x64, and its first block has counter 1).
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, DivisionByZero, InvalidOperation, localcontext
from itertools import islice
from math import isfinite

import numpy as np

from nestling.core.errors import ConfigError, SeedError

SCHEME = "philox4x32-10/v1"

Key = tuple[int, int]
Block = tuple[int, int, int, int]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF
_BLOCKS_PER_CHUNK = 1 << 13  # 64 KiB a column: the ten rounds stay in the second-level cache
_MAX_ALPHA = 1e6  # an integer part is a sum of that many exponentials

# Random123's `kat_vectors` for philox4x32 with 10 rounds: (counter, key, output).
KNOWN_ANSWERS: tuple[tuple[Block, Key, Block], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_MASK, _MASK, _MASK, _MASK), (_MASK, _MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)

# ln and exp of `decimal` are correctly rounded, so a fixed precision gives the same digits everywhere. What falls below
# the wide exponent range counts as zero.
_DECIMAL = Context(
    prec=50, rounding=ROUND_HALF_EVEN, Emin=-(10**8), Emax=10**8, traps=[InvalidOperation, DivisionByZero]
)


def check_seed(seed: object) -> int:
    """Return `seed`, an int in 0 … 2^64 − 1. Raises `SeedError` for anything else (a bool, a float, a negative).

    >>> check_seed(2**64 - 1)
    18446744073709551615
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise SeedError(f"{seed!r} is not an integer from 0 to 2^64 - 1", where="seed", remedy="Give such a number.")
    return seed


def key(seed: int, purpose: str, name: str) -> Key:
    """The two 32-bit key words of the stream (seed, purpose, name).

    Raises `SeedError` for a bad seed and `ConfigError` for a purpose that is empty or holds a "/".

    >>> [hex(word) for word in key(0, "signs-u", "layer1.weight")]
    ['0xd77c10be', '0x5350875']
    """
    if not purpose or "/" in purpose:
        raise ConfigError(f"purpose {purpose!r} is empty or holds a '/'", where="stream", remedy="Use a plain word.")
    label = f"{purpose}/{name}".encode()
    head = b"fedseed/v1\0" + struct.pack("<QI", check_seed(seed), len(label))
    low, high = struct.unpack("<II", hashlib.sha256(head + label).digest()[:8])
    return low, high


def philox_block(counter: Block, key: Key) -> Block:
    """The definition: ten Philox rounds on four 32-bit words, in Python integers.

    >>> [hex(word) for word in philox_block((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words_python(key: Key, start: int, count: int) -> list[int]:
    """Words start … start + count − 1 in Python integers: slow, and what every faster form must equal.

    Raises `ConfigError` for a range outside 0 … 2^66.

    >>> words_python((0, 0), 1, 2) == list(philox_block((0, 0, 0, 0), (0, 0))[1:3])
    True
    """
    _check_range(start, count)
    first, last = start // 4, -(-(start + count) // 4)
    blocks = [philox_block((block & _MASK, block >> 32, 0, 0), key) for block in range(first, last)]
    return [word for block in blocks for word in block][start - 4 * first :][:count]


def words(key: Key, start: int, count: int) -> np.ndarray:
    """Words start … start + count − 1 as uint32[count]; any start, also beyond 2^32.

    Raises `ConfigError` for a range outside 0 … 2^66.

    >>> words((0, 0), 0, 2).tolist() == [0x6627E8D5, 0xE169C58D]
    True
    """
    _check_range(start, count)
    first, last = start // 4, -(-(start + count) // 4)
    drawn = np.empty((last - first, 4), np.uint32)
    for low in range(first, last, _BLOCKS_PER_CHUNK):
        high = min(low + _BLOCKS_PER_CHUNK, last)
        drawn[low - first : high - first] = _blocks(key, low, high - low)
    return drawn.reshape(-1)[start - 4 * first :][:count]


def _blocks(key: Key, first: int, count: int) -> np.ndarray:
    """Blocks first … first + count − 1 as uint64[count, 4] holding 32-bit values."""
    block = np.arange(count, dtype=np.uint64) + np.uint64(first)
    mask, half = np.uint64(_MASK), np.uint64(32)
    m0, m1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    c0, c1, c2, c3 = block & mask, block >> half, np.zeros_like(block), np.zeros_like(block)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> half) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=1)


def _check_range(start: int, count: int) -> None:
    if start < 0 or count < 0 or start + count > 1 << 66:
        raise ConfigError(f"words {start} … {start} + {count} are outside 0 … 2^66", where="stream")


def self_test() -> None:
    """Check this machine against Random123's three known answers; raises `SeedError` if a bit differs.

    >>> self_test()
    """
    for counter, of_key, expected in KNOWN_ANSWERS:
        if philox_block(counter, of_key) != expected:
            raise SeedError("differs from its published known answers", where=SCHEME, remedy="Do not use this machine.")
        for start in (0, (1 << 34) - 3):  # across the carry from the low counter word to the high one
            if words(of_key, start, 9).tolist() != words_python(of_key, start, 9):
                raise SeedError("NumPy and Python integers disagree", where=SCHEME, remedy="Reinstall NumPy.")


@dataclass(frozen=True)
class Stream:
    """One named stream. It has no position: each method reads from word 0, so use one name for each thing drawn.

    >>> batches = Stream(7, "batch", "client-3/round-0")
    >>> batches.integers(5, 10).tolist()
    [8, 5, 3, 4, 8]
    """

    seed: int
    purpose: str
    name: str

    def __post_init__(self) -> None:
        key(self.seed, self.purpose, self.name)

    @property
    def key(self) -> Key:
        """The Philox key of this stream."""
        return key(self.seed, self.purpose, self.name)

    def words(self, count: int, start: int = 0) -> np.ndarray:
        """uint32[count]: words start … start + count − 1.

        >>> Stream(7, "batch", "a").words(3, start=2).shape
        (3,)
        """
        return words(self.key, start, count)

    def signs(self, count: int) -> np.ndarray:
        """float32[count] of ±1: bit b of word w is sign 32 w + b, lowest bit first, a set bit is +1.

        >>> Stream(7, "signs-v", "a").signs(4).tolist()
        [-1.0, 1.0, 1.0, 1.0]
        """
        drawn = self.words(-(-count // 32)).astype("<u4").view(np.uint8)
        bits = np.unpackbits(drawn, count=count, bitorder="little")
        return bits.astype(np.float32) * np.float32(2) - np.float32(1)

    def integers(self, count: int, high: int) -> np.ndarray:
        """int64[count], uniform in [0, high), 1 ≤ high ≤ 2^32. More of them never change the first ones.

        Lemire's multiply-shift (arXiv 1805.10941): word·high div 2^32, refusing the words that would make some values
        likelier. Raises `ConfigError` for another `high`.

        >>> Stream(7, "batch", "a").integers(4, 6).tolist()
        [3, 0, 5, 4]
        """
        if not 1 <= high <= 1 << 32:
            raise ConfigError(f"high is {high}", where="stream", remedy="Give 1 to 2^32.")
        refuse_below = np.uint64((1 << 32) % high)
        kept, found, start = [np.empty(0, np.int64)], 0, 0
        while found < count:
            fresh = count - found + 64
            product = self.words(fresh, start).astype(np.uint64) * np.uint64(high)
            accepted = product[(product & np.uint64(_MASK)) >= refuse_below] >> np.uint64(32)
            kept.append(accepted.astype(np.int64))
            found, start = found + len(accepted), start + fresh
        return np.concatenate(kept)[:count]

    def permutation(self, n: int) -> np.ndarray:
        """int64[n]: 0 … n − 1 in the order of n 63-bit keys; key i is words 2i (low) and 2i + 1 (high), halved.

        >>> Stream(7, "batch", "a").permutation(5).tolist()
        [0, 3, 4, 1, 2]
        """
        pairs = self.words(2 * n).astype(np.uint64).reshape(n, 2)
        keys = (pairs[:, 0] | pairs[:, 1] << np.uint64(32)) >> np.uint64(1)
        return np.argsort(keys, kind="stable").astype(np.int64)

    def dirichlet(self, alpha: Sequence[float]) -> np.ndarray:
        """float64[k]: one draw of Dirichlet(alpha), identical on every platform.

        Raises `ConfigError` unless there is at least one alpha and each is finite, > 0 and at most 10^6.

        >>> Stream(7, "partition", "digits").dirichlet([1.0, 1.0]).round(4).tolist()
        [0.1279, 0.8721]
        """
        return dirichlet(self._all_words(), alpha)

    def _all_words(self) -> Iterator[int]:
        start = 0
        while True:
            yield from self.words(256, start).tolist()
            start += 256


def dirichlet(source: Iterator[int], alpha: Sequence[float]) -> np.ndarray:
    """float64[k]: normalised Gamma(alpha_i) draws from 32-bit words, in 50-digit decimals and rounded once at the end.

    Logarithms of the Gamma draws are kept rather than the draws, so shapes such as 1e-300 neither vanish nor divide
    zero by zero. Raises `ConfigError` as `Stream.dirichlet`.

    >>> dirichlet(iter(words_python((1, 2), 0, 100)), [5.0])
    array([1.])
    """
    shapes = [float(shape) for shape in alpha]
    if not shapes or not all(isfinite(shape) and 0 < shape <= _MAX_ALPHA for shape in shapes):
        raise ConfigError(
            f"alpha {shapes[:3]} must be one or more numbers above 0 and at most {_MAX_ALPHA:g}",
            where="dirichlet",
            remedy="Beyond that the shares are equal for every practical purpose.",
        )
    with localcontext(_DECIMAL):
        logs = [_log_gamma_draw(source, shape) for shape in shapes]
        largest = max(logs)
        parts = [(log - largest).exp() for log in logs]
        total = sum(parts, Decimal(0))
        return np.array([float(part / total) for part in parts], np.float64)


def _uniform(source: Iterator[int]) -> Decimal:
    """(2 m + 1) / 2^65 in (0, 1), m a 64-bit integer of two words, low word first."""
    low, high = islice(source, 2)
    return Decimal(2 * (low | high << 32) + 1) / Decimal(1 << 65)


def _log_gamma_draw(source: Iterator[int], shape: float) -> Decimal:
    """ln of a Gamma(shape) draw: its fractional part by rejection, plus one exponential for each unit."""
    units = int(shape)
    fraction = Decimal(shape) - units
    log_small = _log_gamma_below_one(source, fraction) if fraction else None
    if not units:
        assert log_small is not None, "a shape above 0 has a unit or a fraction"
        return log_small
    product = Decimal(1)
    for _ in range(units):
        product *= _uniform(source)
    return (-product.ln() + (log_small.exp() if log_small is not None else 0)).ln()


def _log_gamma_below_one(source: Iterator[int], a: Decimal) -> Decimal:
    """ln of a Gamma(a) draw, 0 < a < 1: algorithm GS of Ahrens & Dieter (Computing 12, 1974), without normals."""
    b = 1 + a / Decimal(1).exp()
    while True:
        p, log_u = b * _uniform(source), _uniform(source).ln()
        if p <= 1:
            log_x = p.ln() / a
            if log_u <= -log_x.exp():
                return log_x
        else:
            log_x = (-((b - p) / a).ln()).ln()
            if log_u <= (a - 1) * log_x:
                return log_x
