"""Headers and whole messages; `python tests/codec/test_message.py` writes the golden messages that do not exist yet."""

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nestling.codec import message as message_module
from nestling.codec.codecs import CODECS, body_size, encode_body, named_codec
from nestling.codec.message import HEADER_SIZE, Limits, context_id, decode, encode, message_key, peek, state_digest
from nestling.codec.rotate import LEVELS
from nestling.core.errors import ConfigError, ContextError, WireError
from nestling.core.vectors import Layout

EVERY = [*CODECS, "topk@0.3", "randomk@0.3", "powersgd@1"]
VECTORS = Path(__file__).parent / "vectors"
LAYOUT = Layout.of([("a", (2, 3)), ("empty", (0,)), ("b", (5,))])
TWENTY = Layout.of((f"conv{index}", (64,)) for index in range(20))
CONTEXT = context_id({"base": "0123abcd", "run": "golden", "seed": "00000000000004d2"})
SENT = {
    "direction": "uplink",
    "codec": "int8-tensor",
    "is_difference": True,
    "round": 5,
    "context": CONTEXT,
    "client": 2**63 + 1,
    "attempt": 2,
    "num_examples": 500,
}
AGREED = {
    "direction": "uplink",
    "layout": LAYOUT,
    "context": CONTEXT,
    "round": 5,
    "client": 2**63 + 1,
    "codecs": EVERY,
    "limits": Limits(),
}
VECTOR = np.array([0.5, -1.25, 3.0, -0.0, 0.0078125, -2.75, 100.0, -33.3, 6e-8, 0.1, 42.0], np.float32)


def made(**changes):
    return encode(LAYOUT, VECTOR, **(SENT | changes))


def refused(message, **changes):
    with pytest.raises(WireError) as caught:
        decode(message, **(AGREED | changes))
    return caught.value.code


def signed(head, body=b""):
    """A message with any first 48 bytes and a digest that is right."""
    head = bytes(head[:48])
    return head + hashlib.sha256(head + body).digest()[:16] + bytes(body)


def altered(message, offset, form, value):
    """One field changed, and the digest made right again."""
    head = bytearray(message[:48])
    struct.pack_into(form, head, offset, value)
    return signed(head, message[64:])


def read_hex(name):
    return bytes.fromhex((VECTORS / name).read_text())


@pytest.mark.parametrize("codec", EVERY)
def test_cat_001_roundtrip(codec):
    header, vector = decode(made(codec=codec), **AGREED)
    assert vector.dtype == np.float32
    key = message_key(CONTEXT, 5, 2**63 + 1)
    assert made(codec=codec)[HEADER_SIZE:] == encode_body(codec, LAYOUT, VECTOR, key=key)
    if codec.startswith(("float", "int8", "int4")):
        np.testing.assert_allclose(vector, VECTOR, atol={"float32": 0, "float16": 0.02}.get(codec, 7.2))
    fields = {name: getattr(header, name) for name in SENT}
    assert fields == SENT | {"codec": codec}
    assert header.total_len == len(made(codec=codec)) == HEADER_SIZE + body_size(codec, LAYOUT)


def test_a_downlink_has_no_examples():
    message = made(direction="downlink", num_examples=0, is_difference=False)
    header, _ = decode(message, **(AGREED | {"direction": "downlink"}))
    assert (header.direction, header.is_difference, header.num_examples) == ("downlink", False, 0)
    with pytest.raises(WireError, match="num_examples"):
        made(direction="downlink", num_examples=1)
    assert refused(altered(message, 44, "<I", 1), direction="downlink") == "num_examples"


def test_int4_latents_of_resnet18_make_712_bytes():
    assert len(encode(TWENTY, np.zeros(1280, np.float32), **(SENT | {"codec": "int4-message"}))) == 64 + 648


@pytest.mark.parametrize("codec", EVERY)
def test_cat_003_every_single_bit_flip_is_rejected(codec):
    message = made(codec=codec)
    for bit in range(8 * len(message)):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(flipped, codecs=EVERY if bit // 8 == 5 else [codec])
        with pytest.raises(WireError):
            peek(flipped)


@pytest.mark.parametrize("codec", EVERY)
def test_cat_004_every_truncation_and_extension_is_rejected(codec):
    message = made(codec=codec)
    for size in range(len(message)):
        assert refused(message[:size], codecs=[codec]) == ("short" if size < 64 else "length")
    for extra in range(1, 65):
        assert refused(message + bytes(extra)) == "length"
        assert refused(altered(message, 8, "<I", len(message) + extra) + bytes(extra)) == "length"


def test_cat_005_a_claim_of_four_gigabytes():
    claim = altered(made()[:64], 8, "<I", 2**32 - 1)
    assert len(claim) == 64
    assert refused(claim) == "length"
    with pytest.raises(WireError, match="says 4294967295"):
        peek(claim)


def test_cat_005_a_long_message_is_refused_before_anything_in_it_is_read():
    assert refused(b"?" * 10_000) == "length"


def test_cat_006_another_layout():
    longer = Layout.of([("a", (2, 3)), ("b", (6,))])
    assert refused(made(codec="float32"), layout=longer) == "length"
    swapped = Layout.of([("b", (5,)), ("empty", (0,)), ("a", (2, 3))])
    other = context_id({"layout": [[name, list(shape)] for name, shape in swapped]})
    assert refused(made(codec="float32"), layout=swapped, context=other) == "context"


def test_cat_007_magic_version_flags_codec():
    assert refused(altered(made(), 0, "4s", b"FLU1")) == "magic"
    assert refused(made(), direction="downlink") == "magic"
    assert refused(altered(made(), 6, "<H", 2)) == "flags"
    assert refused(altered(made(), 6, "<H", 0x8001)) == "flags"
    assert refused(altered(made(), 5, "B", 14)) == "codec"
    assert refused(altered(made(), 5, "B", 255)) == "codec"
    assert refused(made(), codecs=["float32", "int8-message"]) == "codec"


def test_cat_007_version_2_names_both_versions():
    with pytest.raises(WireError, match="version 2, this program reads version 1"):
        decode(altered(made(), 4, "B", 2), **AGREED)
    assert refused(altered(made(), 4, "B", 0)) == "version"


def test_cat_012_num_examples():
    limits = Limits(max_examples=1000)
    for count in (0, 1001, 2**32 - 1):
        assert refused(altered(made(), 44, "<I", count), limits=limits) == "num_examples"
    for count in (1, 1000):
        assert decode(made(num_examples=count), **(AGREED | {"limits": limits}))[0].num_examples == count
    with pytest.raises(WireError, match="num_examples"):
        made(num_examples=0)


@pytest.mark.parametrize("codec", EVERY)
def test_cat_014_golden_messages(codec):
    """Bytes of version 1 decode for ever, to these bits; and the encoder still writes them."""
    message = read_hex(f"v1-uplink-{codec}.hex")
    header, vector = decode(message, **AGREED)
    assert vector.astype("<f4").tobytes() == read_hex(f"v1-uplink-{codec}.values.hex")
    assert {name: getattr(header, name) for name in SENT} == SENT | {"codec": codec}
    if not codec.startswith("powersgd"):  # whose encoder adds up as its BLAS does; only its decoder is pinned
        assert made(codec=codec) == message


def test_cat_014_golden_downlink():
    message = read_hex("v1-downlink-float32.hex")
    header, vector = decode(message, **(AGREED | {"direction": "downlink", "client": 0, "round": 2**32 - 1}))
    assert vector.astype("<f4").tobytes() == read_hex("v1-uplink-float32.values.hex")
    assert (header.is_difference, header.attempt) == (False, 0)


def test_cat_014_the_example_of_the_specification():
    """SPEC.md prints one message; these are its bytes, its fields and its numbers."""
    spec = (Path(message_module.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
    dump = re.search(r"```hex\n(.*?)```", spec, re.DOTALL)
    lines = [line.split("  ")[0] for line in dump.group(1).splitlines()]
    message = bytes.fromhex("".join(lines))
    context = context_id({"run": "example", "seed": "00000000000004d2"})
    header, vector = decode(
        message,
        direction="uplink",
        layout=Layout.of([("latent", (5,))]),
        context=context,
        round=3,
        client=7,
        codecs=["int4-message"],
        limits=Limits(),
    )
    assert (header.num_examples, header.attempt, header.is_difference, len(message)) == (500, 0, True, 75)
    printed = re.search(r"decodes to `(.*?)`", spec).group(1)
    assert [float(number) for number in printed.split(", ")] == vector.tolist()
    assert context.hex() in spec


def test_the_specification_names_every_code():
    spec = (Path(message_module.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
    files = Path(message_module.__file__).parent.glob("*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    codes = set(re.findall(r'WireError\(\s*"([a-z_]+)"', source)) | {"stale_round", "future_round"}
    assert len(codes) == 23
    assert [code for code in codes if f"`{code}`" not in spec] == []


def test_the_specification_names_every_codec():
    spec = (Path(message_module.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
    for name in EVERY:
        assert f"| {named_codec(name).id} | `{name.partition('@')[0]}" in spec


def test_the_specification_has_the_levels():
    spec = (Path(message_module.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
    for bits, magnitudes in LEVELS.items():
        assert f"| {bits} | {', '.join(map(str, magnitudes))} |" in spec


def test_stale_and_future_rounds():
    for current, code in ((6, "stale_round"), (2**32 - 1, "stale_round"), (4, "future_round"), (0, "future_round")):
        assert refused(made(), round=current) == code


def test_context_and_client():
    assert refused(made(), context=bytes(16)) == "context"
    assert refused(made(), client=7) == "client"


def test_the_body_is_checked():
    message = made(codec="float32")
    body = np.frombuffer(message[64:], "<f4").copy()
    body[3] = np.nan
    assert refused(signed(message, body.tobytes())) == "non_finite"
    assert refused(message, limits=Limits(max_abs=99.0)) == "abs"
    assert refused(message, limits=Limits(max_norm=99.0)) == "norm"


def test_order_of_the_checks():
    """Faults are piled up from the last check to the first; each new one must win."""
    message = made(codec="int8-tensor")
    body = bytearray(message[64:])
    body[4] = 0x80
    message = signed(message, bytes(body))
    assert refused(message) == "code_range"
    body[0:4] = bytes(4)
    message = signed(message, bytes(body))
    assert refused(message) == "scale"
    message = altered(message, 44, "<I", 0)
    assert refused(message) == "num_examples"
    message = altered(message, 32, "<Q", 1)
    assert refused(message) == "client"
    message = altered(message, 12, "<I", 6)
    assert refused(message) == "future_round"
    message = altered(message, 16, "16s", bytes(16))
    assert refused(message) == "context"
    message = bytearray(message)
    message[48] ^= 1
    assert refused(message) == "digest"
    struct.pack_into("<I", message, 8, 64)
    assert refused(message) == "length"
    message[5] = 99
    assert refused(message) == "codec"
    message[7] = 1
    assert refused(message) == "flags"
    message[4] = 2
    assert refused(message) == "version"
    message[0] = 0
    assert refused(message) == "magic"
    assert refused(message + bytes(1000)) == "length"
    assert refused(message[:63]) == "short"


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("I")])
def test_bytes_bytearray_memoryview(form):
    message = encode(TWENTY, np.ones(1280, np.float32), **(SENT | {"codec": "float16"}))
    _, vector = decode(form(message), **(AGREED | {"layout": TWENTY}))
    assert (vector == 1.0).all()
    assert peek(form(message)).codec == "float16"


def test_a_strided_memoryview_is_read_in_its_own_order():
    doubled = bytes(byte for byte in made() for _ in range(2))
    assert decode(memoryview(doubled)[::2], **AGREED)[0].client == SENT["client"]


@pytest.mark.parametrize("thing", [None, "NSU1", 7, [1, 2], np.zeros(64, np.uint8)])
def test_anything_else_has_code_type(thing):
    assert refused(thing) == "type"
    with pytest.raises(WireError, match="type"):
        peek(thing)


def test_the_result_does_not_share_memory_with_the_message():
    buffer = bytearray(made(codec="float32"))
    _, vector = decode(buffer, **AGREED)
    buffer[:] = bytes(len(buffer))
    assert vector.tobytes() == VECTOR.tobytes()
    vector += 1.0


def test_peek_needs_no_layout_or_context():
    message = made(codec="int4-tensor")
    header = peek(message)
    assert header == decode(message, **AGREED)[0]
    assert replace(header, digest=b"") != header
    assert peek(made(direction="downlink", num_examples=0)).direction == "downlink"


@pytest.mark.parametrize("codec", EVERY)
def test_peek_names_the_family_without_its_parameter(codec):
    assert peek(made(codec=codec)).codec == codec.partition("@")[0]


def test_another_parameter_is_another_length():
    assert refused(made(codec="topk@0.3"), codecs=["topk@0.8"]) == "length"


def test_the_key_is_of_context_round_and_client():
    assert message_key(CONTEXT, 5, 2**63 + 1) == CONTEXT + b"\5\0\0\0" + b"\1\0\0\0\0\0\0\x80"
    bodies = {made(codec="randomk@0.3", **change)[HEADER_SIZE:] for change in KEY_CHANGES}
    assert len(bodies) > 1
    for change in KEY_CHANGES:  # each is drawn again from its own header
        names = {"num_examples", "is_difference", "attempt"}
        agreed = {name: value for name, value in change.items() if name not in names}
        _, vector = decode(made(codec="randomk@0.3", **change), **(AGREED | agreed))
        assert np.isin(np.abs(vector[vector != 0]), np.abs(VECTOR)).all()
    for change in ({"attempt": 3}, {"num_examples": 9}, {"is_difference": False}):
        for codec in EVERY:
            assert made(codec=codec, **change)[HEADER_SIZE:] == made(codec=codec)[HEADER_SIZE:]


KEY_CHANGES = [{}, {"round": 6}, {"client": 7}, {"context": bytes(16)}, {"round": 7}, {"round": 8}, {"round": 9}]


def test_rounding_and_memory_reach_the_encoder():
    assert made(codec="int2-message", stochastic=True) != made(codec="int2-message")
    assert made(codec="int2-message", stochastic=True) == made(codec="int2-message", stochastic=True)
    memory: dict = {}
    made(codec="powersgd@1", memory=memory)
    assert memory
    with pytest.raises(ConfigError, match="stochastic"):
        made(codec="float32", stochastic=True)


def test_peek_reports_damage():
    def code(message):
        with pytest.raises(WireError) as caught:
            peek(message)
        return caught.value.code

    message = made()
    assert code(message[:63]) == "short"
    assert code(message[:-1]) == "length"
    assert code(message[:-1] + b"?") == "digest"
    assert code(altered(message, 0, "4s", b"NSX1")) == "magic"
    assert code(altered(message, 4, "B", 3)) == "version"
    assert code(altered(message, 6, "<H", 4)) == "flags"
    assert code(altered(message, 5, "B", 77)) == "codec"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"round": -1}, "field"),
        ({"round": 2**32}, "field"),
        ({"client": 2**64}, "field"),
        ({"attempt": 2**32}, "field"),
        ({"num_examples": 2**32}, "num_examples"),
        ({"num_examples": -1}, "num_examples"),
        ({"context": bytes(15)}, "context"),
    ],
)
def test_encode_refuses_what_does_not_fit(changes, code):
    with pytest.raises(WireError) as caught:
        made(**changes)
    assert caught.value.code == code


def test_encode_refuses_more_than_four_gigabytes_before_it_makes_them():
    with pytest.raises(WireError, match="length"):
        encode(Layout.of([("a", (2**30,))]), VECTOR, **(SENT | {"codec": "float32"}))


def test_unknown_codecs_are_our_own_mistake():
    with pytest.raises(ConfigError, match="int5"):
        made(codec="int5")
    with pytest.raises(ConfigError, match="int5"):
        decode(made(), **(AGREED | {"codecs": ["int5"]}))
    assert refused(made(), codecs=[]) == "length"


def test_two_codecs_of_one_family_are_refused_since_a_message_names_the_family_alone() -> None:
    with pytest.raises(ConfigError, match="one number"):
        decode(made(codec="topk@0.3"), **(AGREED | {"codecs": ["topk@0.3", "topk@0.8"]}))


def test_errors_are_one_line_with_a_remedy():
    for bad in (b"", b"?" * 64, made()[:-1] + b"?", altered(made(), 12, "<I", 1)):
        with pytest.raises(WireError) as caught:
            decode(bad, **AGREED)
        text = str(caught.value)
        assert text.startswith(f"message [{caught.value.code}]: ")
        assert "\n" not in text
        assert text.count(". ") >= 1


def test_context_id_is_the_documented_hash():
    expected = hashlib.sha256(b'nestling-context/v1\0{"a":[1,"\\u00e9"],"b":null}').digest()[:16]
    assert context_id({"b": None, "a": [1, "é"]}) == expected
    assert context_id({"b": None, "a": [1, "e"]}) != expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1: 2, "a": 3}, b"bytes"])
def test_context_id_refuses_what_has_no_canonical_form(value):
    with pytest.raises(ContextError, match="canonical JSON"):
        context_id({"value": value})


def test_state_digest_is_of_the_little_endian_bytes():
    assert state_digest(VECTOR) == hashlib.sha256(struct.pack("<11f", *VECTOR.tolist())).hexdigest()
    assert state_digest(VECTOR[::2]) == state_digest(VECTOR[::2].copy())


if __name__ == "__main__":
    for codec in EVERY:
        target = VECTORS / f"v1-uplink-{codec}.hex"
        if not target.exists():  # those of a version never change
            message = made(codec=codec)
            target.write_text(message.hex("\n", -32) + "\n")
            values = decode(message, **AGREED)[1].astype("<f4").tobytes()
            target.with_suffix(".values.hex").write_text(values.hex("\n", -32) + "\n")
            print(target.name)
