"""k rising positions below n in a number of bytes that n and k decide: the code of Elias and Fano.

The l low bits of each position are written plainly. The high parts never fall, so high part + index rises strictly and
is written as one set bit in a row of zeros, which is as short as it can be if there are about as many zeros as ones.

    l = ⌊log₂(n / k)⌋          bit (p_i div 2^l) + i is set,  i = 0 … k − 1
    bits = k + ((n − 1) div 2^l) + k l  ≤  k (2 + log₂(n / k))

Sources: Elias, "Efficient storage and retrieval by content and address of static files" (J. ACM 21, 1974); Fano, "On
the number of bits required to implement an associative memory" (MIT, 1971). Where we differ: the row of ones and zeros
ends with the highest part that can occur, not with one more zero. A Golomb–Rice code takes as many bits on average, but
its length depends on the positions, and here a receiver knows the length beforehand.
"""

import numpy as np
from jaxtyping import Int64

from nestling.codec.form import Body, pad_error
from nestling.core.errors import WireError

Positions = Int64[np.ndarray, "k"]


def size_of(n: int, k: int) -> int:
    """Bytes of k positions below n, 0 ≤ k ≤ n.

    >>> size_of(11_173_962, 1117)
    2126
    """
    return (_high_bits(n, k) + k * _low_bits(n, k) + 7) // 8


def encode_positions(positions: Positions, n: int) -> bytes:
    """The `size_of(n, k)` bytes of int64[k] positions, which must rise strictly from 0 or more to below n.

    >>> encode_positions(np.array([2, 3, 9]), 12).hex()  # high parts 0 0 2, low parts 2 3 1: 11001 01 11 10
    'd303'
    """
    k = positions.size
    low = _low_bits(n, k)
    high = np.zeros(_high_bits(n, k), np.uint8)
    high[(positions >> low) + np.arange(k)] = 1
    plain = np.unpackbits(positions.astype("<u8").view(np.uint8).reshape(k, 8)[:, : (low + 7) // 8], 1, low, "little")
    return np.packbits(np.concatenate((high, plain.reshape(-1))), bitorder="little").tobytes()


def decode_positions(body: Body, n: int, k: int) -> Positions:
    """int64[k] positions from the `size_of(n, k)` bytes of a body.

    Raises `WireError` with code `positions` unless they are k, rise strictly and lie below n, and `nibble_pad` if an
    unused bit is set; so there is one body for each set of positions.

    >>> decode_positions(bytes.fromhex("d303"), 12, 3).tolist()
    [2, 3, 9]
    """
    low, length = _low_bits(n, k), _high_bits(n, k)
    bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
    found = np.flatnonzero(bits[:length])
    if found.size != k:
        raise _error(f"{found.size} positions are marked, not {k}")
    if bits[length + k * low :].any():
        raise pad_error()
    plain = np.packbits(bits[length : length + k * low].reshape(k, low), 1, "little")
    words = np.zeros((k, 8), np.uint8)
    words[:, : plain.shape[1]] = plain
    positions = found - np.arange(k) << low | words.view("<u8")[:, 0].astype(np.int64)
    if k and (int(positions[-1]) >= n or (np.diff(positions) <= 0).any()):
        raise _error(f"the positions do not rise, or leave 0 … {n - 1}")
    return positions


def _low_bits(n: int, k: int) -> int:
    return (n // k).bit_length() - 1 if k else 0


def _high_bits(n: int, k: int) -> int:
    return k + (n - 1 >> _low_bits(n, k)) if k else 0


def _error(cause: str) -> WireError:
    return WireError("positions", cause, remedy="The sender does not follow the format; drop it.")
