"""Values sent over the socket arrive unchanged, as a handle, or cause an error."""

import math
import os
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest

from lora_grpo.sandbox import codec
from lora_grpo.sandbox.codec import MALFORMED, MAX_FRAME_BYTES, Decoder, Encoder, receive, send


def through(value):
    return Decoder(lambda *rest: ("handle", *rest)).decode(Encoder(lambda value: ["handle", 0]).encode(value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**400),
        1 << 62,
        0.1,
        -0.0,
        math.inf,
        "ü\ud800\0",
        b"\xff",
        1 - 2j,
        Decimal("1.50"),
        Fraction(-1, 3),
        range(3, 9, 2),
        slice(1, None, 2),
        slice(None, "b", 1 << 70),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 1, 2, 3, 4),
        timedelta(-1, 2, 3),
        time(1, 2, 3, tzinfo=UTC),
        {"a": [1]}.keys(),
        {"a": [1]}.items(),
        (1, (2, [3])),
        [[], [1.0, "x"]],
        {"a": {1: (2,)}},
        pytest.param({1, "b"}, id="a set"),  # its encoding depends on the hash seed
        frozenset([2]),
        deque([1]),
        bytearray(b"x"),
        Counter("aab"),
        OrderedDict(b=1, a=2),
        int,
        list,
    ],
    ids=repr,
)
def test_plain_data_arrives_as_it_was(value):
    arrived = through(value)
    assert arrived == value and type(arrived) is type(value)
    assert repr(arrived) == repr(value)


def test_nan_arrives_as_nan():
    assert math.isnan(through(math.nan))


@pytest.mark.parametrize(
    "value", [object(), len, lambda: 0, iter([]), Decoder, Ellipsis], ids=lambda value: type(value).__name__
)
def test_everything_else_arrives_as_a_handle(value):
    assert through(value)[0] == "handle"


def test_a_list_in_itself_arrives_in_itself():
    value = [1]
    value.append(value)
    arrived = through(value)
    assert arrived[1] is arrived


def test_what_is_too_deep_arrives_as_a_handle_below():
    value = []
    for _ in range(1000):
        value = [value]
    innermost = through(value)
    depth = 0
    while isinstance(innermost, list):
        innermost = innermost[0]
        depth += 1
    assert depth == 100 and innermost[0] == "handle"


def test_a_tuple_of_tuples_of_itself_does_not_unfold(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ITEMS", 10_000)
    value = (1,)
    for _ in range(60):
        value = (value, value)
    assert through(value)[0] is not None  # returns immediately and does not create 2**60 items


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"a": 1},
        [],
        ["no such tag", 1],
        ["list"],
        ["list", 5],
        ["dict", [[1]]],
        ["dict", [[["list", []]], [1]]],
        ["dict", [[1, 2], [1]]],
        ["int", "zz"],
        ["int", 5],
        ["again", 0],
        ["again", -1],
        ["again", True],
        ["range", 1, 2, 0],
        ["Fraction", 1, 0],
        ["Fraction", ["handle", 0]],
        ["slice", None, ["handle", 0], None],
        ["slice", ["tuple", []], None, None],
        ["date", None],
        ["dict_items", [1]],
        ["type", "__loader__"],
        ["Decimal", "a lot"],
        ["bytes", "0"],
        ["type", "eval"],
        ["type", "no_such"],
        ["set", [["list", []]]],
        [["list"], 1],
        [1, 2],
    ],
    ids=repr,
)
def test_what_follows_no_grammar_is_malformed(data):
    with pytest.raises(MALFORMED):
        Decoder(lambda *rest: rest).decode(data)


def frame(content):
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        return receive(reader)
    finally:
        os.close(reader)


def test_frames_come_as_they_were_sent():
    reader, writer = os.pipe()
    send(writer, ["x", 1])
    send(writer, "\u2028")
    assert receive(reader) == ["x", 1] and receive(reader) == "\u2028"


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x02\0\0\0{]", b"\x01\0\0\0\xff"], ids=repr)
def test_a_frame_that_is_too_long_or_no_json_is_malformed(content):
    with pytest.raises(MALFORMED):
        frame(content)


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x05\0\0\0[1"], ids=repr)
def test_a_frame_that_breaks_off_is_the_end(content):
    with pytest.raises(EOFError):
        frame(content)


def test_a_message_has_a_largest_size():
    reader, writer = os.pipe()
    with pytest.raises(OverflowError, match=str(MAX_FRAME_BYTES)):
        send(writer, "x" * MAX_FRAME_BYTES)
    os.close(reader)
    os.close(writer)
