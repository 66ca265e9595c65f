"""What holds for every codec: one list, and one line in it puts a new codec under all of these."""

import dataclasses
import hashlib
import math
import struct
import warnings
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nestling.codec.codecs import (
    CODECS,
    FAMILIES,
    Limits,
    _check_values,
    body_size,
    decode_body,
    encode_body,
    named_codec,
)
from nestling.codec.form import FLT_MAX, FLT_MIN
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.seeds import philox_block
from nestling.core.vectors import Layout

WIDE = Limits(max_abs=FLT_MAX, max_norm=float("inf"))
KEY = bytes(range(28))

# Name, largest ‖x − C(x)‖ / ‖x‖ that the codec promises for every x (None: a bound of its own, in its own tests), and
# whether what is decoded is encoded again without loss under the same key.
EVERY = [
    ("float32", 0.0, True),
    ("float16", None, True),  # 2^−11 of each normal number
    ("int8-tensor", 1.0, False),  # whatever rounds to 0 is lost, and nothing more than half a step
    ("int4-tensor", 1.0, False),
    ("int2-tensor", 1.0, True),  # the scale is the peak itself
    ("int8-message", None, False),  # half a step, which an offset makes large beside small numbers
    ("int4-message", None, False),
    ("int2-message", None, False),
    ("rotated4", 1.0, False),  # a projection in each block, but for the rounding of its scale
    ("rotated2", 1.0, False),
    ("rotated1", 1.0, False),
    ("topk@0.1", 0.9**0.5, True),
    ("topk@1", 0.0, True),
    ("randomk@0.1", 1.0, True),
    ("randomk@0.7", 1.0, True),
    ("powersgd@1", 1.0, False),
    ("powersgd@2", 1.0, False),
]
NAMES = [name for name, _, _ in EVERY]
KEYED = {name for name in NAMES if name.startswith(("rotated", "randomk", "powersgd"))}
"""Those whose bytes depend on the key; powersgd's only in the encoder."""

LAYOUTS = {
    "no tensors": [],
    "no numbers": [("a", (0,)), ("b", (3, 0))],
    "one": [("a", (1,))],
    "odd": [("a", (7,)), ("empty", (0,)), ("b", (3, 3)), ("c", (1,))],
    "matrices": [("w", (8, 5, 3)), ("b", (8,)), ("v", (1, 9)), ("u", (9, 1))],
    "latents": [(f"conv{index}", (64,)) for index in range(5)],
    "long": [("w", (65, 17)), ("b", (3,))],
}
every = pytest.mark.parametrize("codec", NAMES)
every_layout = pytest.mark.parametrize("layout", [Layout.of(entries) for entries in LAYOUTS.values()], ids=LAYOUTS)


def there_and_back(codec, layout, vector, key=KEY, limits=WIDE):
    return decode_body(codec, layout, encode_body(codec, layout, vector, key=key), limits, key=key)


def normal(layout, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(layout.size) * scale).astype(np.float32)


def test_numbers_on_the_wire_never_change():
    assert {name: codec.id for name, codec in CODECS.items()} == {
        "float32": 0,
        "float16": 1,
        "int8-tensor": 2,
        "int4-tensor": 3,
        "int8-message": 4,
        "int4-message": 5,
        "int2-tensor": 6,
        "int2-message": 7,
        "rotated4": 8,
        "rotated2": 9,
        "rotated1": 10,
    }
    assert {codec.id: name for name, codec in CODECS.items()} | {11: "topk", 12: "randomk", 13: "powersgd"} == FAMILIES


def test_every_family_is_in_the_list():
    assert {name.partition("@")[0] for name in NAMES} == set(FAMILIES.values())
    assert all(FAMILIES[named_codec(name).id] == name.partition("@")[0] for name in NAMES)
    assert all(named_codec(name).name == name for name in NAMES)


@every
@every_layout
def test_cat_001_a_body_has_its_length_and_decodes_to_a_vector_of_its_own(codec, layout):
    body = encode_body(codec, layout, normal(layout), key=KEY)
    assert len(body) == body_size(codec, layout)
    decoded = decode_body(codec, layout, memoryview(body), Limits(), key=KEY)
    assert (decoded.dtype, decoded.shape) == (np.float32, (layout.size,))
    assert decoded.flags.writeable
    assert decoded.base is None or not np.shares_memory(decoded, np.frombuffer(body, np.uint8))


@every
@every_layout
def test_a_length_is_a_function_of_the_layout_alone(codec, layout):
    vectors = [normal(layout, seed, 10.0**-seed) for seed in range(3)] + [np.zeros(layout.size, np.float32)]
    keys = [b"", KEY]
    lengths = {len(encode_body(codec, layout, vector, key=key)) for vector in vectors for key in keys}
    assert lengths == {body_size(codec, layout)}


@pytest.mark.parametrize(("codec", "bound"), [(name, bound) for name, bound, _ in EVERY if bound is not None])
@every_layout
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_the_error_is_bounded(codec, bound, layout, data):
    elements = st.floats(-1e4, 1e4, width=32)
    vector = data.draw(hnp.arrays(np.float32, layout.size, elements=elements, fill=st.sampled_from([0.0, 1.0])))
    key = data.draw(st.binary(max_size=4))
    x = vector.astype(np.float64)
    error = np.linalg.norm(there_and_back(codec, layout, vector, key) - x)
    # Beside it: the roundings of a product to float32, and numbers below the smallest normal step.
    rounding = 1e-6 if bound else 0.0
    assert error <= (bound + rounding) * np.linalg.norm(x) + 300 * FLT_MIN


@pytest.mark.parametrize("codec", [name for name in NAMES if not name.startswith(("topk", "randomk", "powersgd"))])
def test_more_bits_lose_less(codec):
    """The normalised error of normal numbers, against its known size."""
    layout = Layout.of([("a", (32, 40))])
    largest = {"float32": 0.0, "float16": 1e-7, "int8-tensor": 1e-3, "int8-message": 1e-3, "int4-tensor": 0.03}
    largest |= {"int4-message": 0.02, "int2-tensor": 0.99, "int2-message": 0.7}
    largest |= {"rotated4": 0.012, "rotated2": 0.13, "rotated1": 0.40}
    x = normal(layout)
    error = np.square(there_and_back(codec, layout, x) - x).sum() / np.square(x).sum()
    assert error <= largest[codec]


@pytest.mark.parametrize("codec", [name for name, _, again in EVERY if again])
@every_layout
def test_what_is_decoded_is_encoded_again_without_loss(codec, layout):
    once = there_and_back(codec, layout, normal(layout))
    assert there_and_back(codec, layout, once).tobytes() == once.tobytes()


@every
@every_layout
def test_cat_011_an_all_zero_update_is_exactly_zero(codec, layout):
    zeros = np.zeros(layout.size, np.float32)
    for vector in (zeros, -zeros):
        decoded = there_and_back(codec, layout, vector, limits=Limits(max_abs=1.0))
        assert not decoded.any()
    assert there_and_back(codec, layout, zeros).tobytes() == zeros.tobytes()


@every
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_cat_008_what_is_not_finite_is_refused(codec, value):
    layout = Layout.of(LAYOUTS["odd"])
    vector = normal(layout)
    vector[11] = value
    memory: dict = {}
    with pytest.raises(WireError) as caught:
        encode_body(codec, layout, vector, key=KEY, memory=memory)
    assert caught.value.code == "non_finite"
    assert memory == {}


@every
@every_layout
def test_cat_002_random_bytes_meet_only_wire_errors(codec, layout):
    random, size = np.random.default_rng(3), body_size(codec, layout)
    for trial in range(40):
        body = bytes(size) if trial == 0 else b"\xff" * size if trial == 1 else random.bytes(size)
        for limits in (Limits(), WIDE):
            try:
                decoded = decode_body(codec, layout, body, limits, key=random.bytes(28))
            except WireError:
                continue
            assert np.isfinite(decoded).all()
            assert decoded.size == 0 or np.abs(decoded).max() <= limits.max_abs


@every
def test_damage_to_a_good_body_meets_only_wire_errors(codec):
    layout, random = Layout.of(LAYOUTS["matrices"]), np.random.default_rng(4)
    good = encode_body(codec, layout, normal(layout), key=KEY)
    outcomes = []
    for _ in range(150):
        body = bytearray(good)
        for _ in range(random.integers(1, 3)):
            body[random.integers(len(body))] ^= 1 << random.integers(8)
        try:
            outcomes.append(decode_body(codec, layout, bytes(body), Limits(), key=KEY).size)
        except WireError:
            outcomes.append(-1)
    assert layout.size in outcomes


@every
def test_a_body_of_another_length_is_refused(codec):
    layout = Layout.of(LAYOUTS["odd"])
    body = encode_body(codec, layout, normal(layout), key=KEY)
    for wrong in (body[:-1], body + b"\0", b""):
        with pytest.raises(WireError) as caught:
            decode_body(codec, layout, wrong, WIDE, key=KEY)
        assert caught.value.code == "length"


@every
def test_the_key_alone_decides_what_is_drawn(codec):
    layout = Layout.of(LAYOUTS["matrices"])
    x = normal(layout)
    bodies = {encode_body(codec, layout, x, key=bytes([number])) for number in range(8) for _ in range(2)}
    assert len(bodies) == (8 if codec in KEYED else 1)
    if codec.startswith("rotated"):  # a decoder with another key gets other numbers
        body = encode_body(codec, layout, x, key=KEY)
        mine, other = (decode_body(codec, layout, body, WIDE, key=key) for key in (KEY, b"other"))
        assert np.linalg.norm(mine - x) < np.linalg.norm(x) < np.linalg.norm(other - x)


@every
def test_a_memory_is_float32_arrays_and_never_needed_to_decode(codec):
    layout, memory = Layout.of(LAYOUTS["matrices"]), {}
    for round in range(3):
        before = {name: array.copy() for name, array in memory.items()}
        body = encode_body(codec, layout, normal(layout, round), key=bytes([round]), memory=memory)
        assert all(type(name) is str and array.dtype == np.float32 for name, array in memory.items())
        # A saved memory is as good as the one in use.
        assert encode_body(codec, layout, normal(layout, round), key=bytes([round]), memory=before) == body
        decode_body(codec, layout, body, WIDE, key=bytes([round]))
    assert bool(memory) == codec.startswith("powersgd")


@every
def test_vectors_of_another_layout_are_refused(codec):
    layout = Layout.of(LAYOUTS["odd"])
    with pytest.raises(ContextError, match=f"layout holds {layout.size}"):
        encode_body(codec, layout, np.zeros(layout.size + 1, np.float32))


@every
def test_strided_vectors_encode_as_their_copies(codec):
    layout = Layout.of(LAYOUTS["odd"])
    strided = normal(Layout.of([("a", (2 * layout.size,))]))[::2]
    assert encode_body(codec, layout, strided, key=KEY) == encode_body(codec, layout, strided.copy(), key=KEY)
    frozen = strided.copy()
    frozen.flags.writeable = False
    assert encode_body(codec, layout, frozen, key=KEY) == encode_body(codec, layout, strided, key=KEY)


@every
def test_limits_on_values_hold_for_every_codec(codec):
    layout = Layout.of([("a", (6, 6))])
    body = encode_body(codec, layout, np.full(36, 3.0, np.float32), key=KEY)
    for limits, code in ((Limits(max_abs=1.0), {"abs", "scale", "zero"}), (Limits(max_norm=0.5), {"norm"})):
        with pytest.raises(WireError) as caught:
            decode_body(codec, layout, body, limits, key=KEY)
        assert caught.value.code in code


def refusal(check, vector, limits):
    """Code and text of the error, or nothing."""
    try:
        check(vector, limits)
    except WireError as error:
        return error.code, str(error)
    return None


def one_by_one(vector, limits):
    """SPEC.md's checks of the values, each by itself and in its order."""
    peak = float(np.abs(vector).max()) if vector.size else 0.0
    if not math.isfinite(peak):
        raise WireError("non_finite", "contains NaN or infinite numbers", remedy="The sender diverged; drop it.")
    if peak > limits.max_abs:
        remedy = "Drop it, or raise max_abs if honest clients send this."
        raise WireError("abs", f"contains {peak:.6g}, the limit is {limits.max_abs:.6g}", remedy=remedy)
    norm = math.sqrt(float(np.square(vector.astype(np.float64)).sum()))
    if norm > limits.max_norm:
        remedy = "Drop it, or raise max_norm if honest clients send this."
        raise WireError("norm", f"has norm {norm:.6g}, the limit is {limits.max_norm:.6g}", remedy=remedy)


@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_checking_the_norm_first_refuses_what_the_checks_one_by_one_refuse(data):
    usual = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, -1.0, 1e-45, -1e4, 3e19, 3.4e38])  # 3e19² overflows
    numbers = data.draw(st.sampled_from([usual, usual, usual | st.sampled_from([np.nan, np.inf, -np.inf])]))
    vector = np.array(data.draw(st.lists(numbers, max_size=40)), np.float32)
    norm = math.sqrt(float(np.square(vector.astype(np.float64)).sum()))
    peak = float(np.abs(vector).max(initial=0.0))
    near = [x for value in (peak, norm, 1e4) for x in (np.nextafter(value, 0.0), value, np.nextafter(value, np.inf))]
    max_abs = data.draw(st.sampled_from([float(x) for x in near if 1.0 <= x <= FLT_MAX]))
    # Sums in another order round differently: no limit lies within their roundings of the norm.
    max_norm = data.draw(st.sampled_from([x for x in (norm * (1 - 1e-12), norm * (1 + 1e-12), 1e6) if x > 0.0]))
    limits = Limits(max_abs=max_abs, max_norm=max_norm)
    with np.errstate(invalid="ignore"):
        assert refusal(_check_values, vector, limits) == refusal(one_by_one, vector, limits)


@given(number=st.floats(1.0, FLT_MAX, width=32), place=st.integers(0, 99), others=st.floats(0.0, 1.0, width=32))
@settings(deadline=None, max_examples=200)
def test_a_number_over_its_limit_is_found_however_little_it_is_over(number, place, others):
    vector = np.full(100, number * others if number < 1e30 else 0.0, np.float32)
    vector[place] = -number
    below = float(np.nextafter(number, 0.0))  # in float64, half a rounding of a float32 or less
    for limit, code in ((number, None), (below, "abs")):
        if limit >= 1.0:
            refused = refusal(_check_values, vector, Limits(max_abs=limit, max_norm=float("inf")))
            assert (refused and refused[0]) == code


def test_a_signalling_nan_is_refused_without_a_warning():
    layout, body = Layout.of([("a", (3,))]), np.array([0, 0x7F800001, 0x3F800000], "<u4").tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WireError, match="non_finite"):
            decode_body("float32", layout, body, Limits())


@pytest.mark.parametrize(
    "name",
    [
        *("", "int5", "float32@1", "rotated3", "@", "@1", "randomk", "randomk@2"),
        *("topk", "topk@", "topk@0", "topk@-0.1", "topk@1.5", "topk@nan", "topk@inf", "topk@x", "topk@0.01@2"),
        *("topk@0.010", "topk@1e-2", "topk@ 0.01", "topk@.5"),
        *("powersgd", "powersgd@", "powersgd@0", "powersgd@-1", "powersgd@1.5", "powersgd@02", "powersgd@1025"),
        *("powersgd@" + "9" * 5000, "powersgd@２", "TOPK@0.01", "topk@0.1234567"),
    ],
    ids=lambda name: name[:16] or "nothing",
)
def test_names_that_are_none_are_refused(name):
    for use in (named_codec, lambda name: body_size(name, Layout.of([]))):
        with pytest.raises(ConfigError) as caught:
            use(name)
        assert caught.value.remedy


def test_an_unknown_codec_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"int4-message.*rotated1.*topk@0\.01.*powersgd@2"):
        named_codec("int5")


def test_a_codec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        named_codec("float32").id = 3  # type: ignore[misc]


# SPEC.md in plain Python, one number at a time, for the codecs that are not number by number.


def spec_words(key, purpose):
    seed = hashlib.sha256(b"nestling-codec/v1\0" + key).digest()[:8]
    name = f"{purpose}/{key.hex()}".encode()
    digest = hashlib.sha256(b"fedseed/v1\0" + seed + struct.pack("<I", len(name)) + name).digest()
    philox = struct.unpack("<II", digest[:8])
    for block in count():
        yield from philox_block((block, 0, 0, 0), philox)


def spec_rotated(bits, n, body, key):
    blocks, start, size = [], 0, 4096
    smallest = max(4**power for power in range(5) if 4**power <= max(n, 1))
    while size >= smallest:
        while n - start >= size:
            blocks.append((start, size))
            start += size
        size //= 4
    if start < n:
        blocks.append((n - smallest, smallest))
    scales, packed = struct.unpack_from(f"<{len(blocks)}f", body), body[4 * len(blocks) :]
    magnitudes = {1: [3268], 2: [1855, 6187], 4: [526, 1589, 2690, 3860, 5146, 6628, 8475, 11193]}[bits]
    half, z = 2 ** (bits - 1), []
    for p in range(n):
        code = packed[p * bits // 8] >> p * bits % 8 & (2**bits - 1)
        level = -magnitudes[half - 1 - code] if code < half else magnitudes[code - half]
        owner = max(index for index, (first, _) in enumerate(blocks) if first <= p)
        z.append(level * (scales[owner] * 2.0**-12))
    words, bit_row = spec_words(key, "rotate"), []
    while len(bit_row) < sum(size for _, size in blocks):
        word = next(words)
        bit_row += [word >> bit & 1 for bit in range(32)]
    used = sum(size for _, size in blocks)
    for first, size in reversed(blocks):
        used -= size
        step = 1
        while step < size:
            for i in range(first, first + size):
                if (i - first) // step % 2 == 0:
                    z[i], z[i + step] = z[i] + z[i + step], z[i] - z[i + step]
            step *= 2
        for i in range(size):
            z[first + i] *= (1 if bit_row[used + i] else -1) * (1 / size**0.5)
    return [struct.unpack("<f", struct.pack("<f", number))[0] + 0.0 for number in z]


def spec_sparse(family, share, n, body, key):
    k = min(n, max(1, round(float(share) * n)))
    if family == "topk":
        low = (n // k).bit_length() - 1
        row = [body[i // 8] >> i % 8 & 1 for i in range(8 * len(body))]
        high = [i for i in range(k + (n - 1) // 2**low) if row[i]]
        first = k + (n - 1) // 2**low
        lows = [sum(row[first + low * i + bit] << bit for bit in range(low)) for i in range(k)]
        positions = [(at - i) * 2**low + lows[i] for i, at in enumerate(high)]
    else:
        wanted, chosen = k if 2 * k <= n else n - k, []
        words = spec_words(key, "randomk")
        while len(chosen) < wanted:
            product = next(words) * n
            if product % 2**32 >= 2**32 % n and product >> 32 not in chosen:
                chosen.append(product >> 32)
        positions = sorted(chosen if 2 * k <= n else set(range(n)) - set(chosen))
    vector = [0.0] * n
    for position, value in zip(positions, struct.unpack(f"<{k}f", body[len(body) - 4 * k :]), strict=True):
        vector[position] = value
    return vector


def spec_powersgd(rank, layout, body):
    vector, at = [], 0
    for size, shape in zip(layout.sizes, layout.shapes, strict=True):
        a, b = (shape[0], size // shape[0]) if len(shape) > 1 and shape[0] else (0, 0)
        if rank * (a + b) < a * b:
            P = struct.unpack_from(f"<{a * rank}f", body, at)
            Q = struct.unpack_from(f"<{b * rank}f", body, at + 4 * a * rank)
            at += 4 * rank * (a + b)
            for i in range(a):
                for j in range(b):
                    total = 0.0
                    for m in range(rank):
                        total += P[i * rank + m] * Q[j * rank + m]
                    vector.append(struct.unpack("<f", struct.pack("<f", total))[0])
        else:
            vector += struct.unpack_from(f"<{size}f", body, at)
            at += 4 * size
    assert at == len(body)
    return vector


@pytest.mark.parametrize("codec", [name for name in NAMES if "@" in name or "rotated" in name])
@pytest.mark.parametrize("entries", [LAYOUTS[name] for name in ("one", "odd", "matrices", "latents", "long")])
def test_cat_015_a_decoder_written_from_the_specification_agrees_bit_for_bit(codec, entries):
    layout = Layout.of(entries)
    body = encode_body(codec, layout, normal(layout), key=KEY)
    family, _, parameter = codec.partition("@")
    if family == "powersgd":
        expected = spec_powersgd(int(parameter), layout, body)
    elif parameter:
        expected = spec_sparse(family, parameter, layout.size, body, KEY)
    else:
        expected = spec_rotated(int(codec[-1]), layout.size, body, KEY)
    assert decode_body(codec, layout, body, WIDE, key=KEY).tobytes() == np.array(expected, np.float32).tobytes()
