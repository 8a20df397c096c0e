"""Limits of JSON bodies, counted piece by piece, and parsing."""

import asyncio
import json
import random
import time

import pytest
from pydantic import BaseModel

from valora_serve.errors import FieldError, RequestError
from valora_serve.server.api.schema import ResponsesRequest
from valora_serve.server.bodies import INLINE_BYTES, BodyParser, JsonLimits, JsonScan, parsed

SMALL = JsonLimits(keys=5, values=12, depth=4, digits=6, escapes=8, foreign=10)


def scanned(body, limits=None, size=None):
    scan = JsonScan(limits or JsonLimits())
    size = size or len(body) or 1
    for start in range(0, len(body), size):
        scan.feed(body[start : start + size])
    return scan


def measured(value, depth=1):
    """Keys, items and depth of parsed JSON, by walking it."""
    if isinstance(value, dict):
        inner = [measured(item, depth + 1) for item in value.values()]
        keys = len(value)
    elif isinstance(value, list):
        inner = [measured(item, depth + 1) for item in value]
        keys = 0
    else:
        return 0, 1, depth - 1
    items = sum(item for _, item, _ in inner) + 1 if inner else 2
    return keys + sum(key for key, _, _ in inner), items, max([depth, *(d for _, _, d in inner)])


def made(rng, depth=0):
    texts = ['"', "\\", '\\"', "\\\\", "a,b:c", "[{", "}]", "é", "\U0001f600", "\0", "x" * 9]
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind < 2:
        return "".join(rng.choices(texts, k=rng.randrange(5)))
    if kind == 2:
        return rng.choice([1, -2.5e-7, 10**9, True, None])
    if kind == 3:
        return rng.choice(["", [], {}])
    if kind == 4:
        return {str(rng.random()) + rng.choice(texts): made(rng, depth + 1) for _ in range(3)}
    return [made(rng, depth + 1) for _ in range(rng.randrange(4))]


def test_counts_are_those_of_a_walk_wherever_the_body_is_cut():
    rng = random.Random(5)
    for _ in range(300):
        value = made(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        keys, items, depth = measured(value)
        for size in (None, 1, 2, 7):
            scan = scanned(body.encode(), size=size)
            assert scan.keys == keys
            assert scan._depth == 0
            # Openings and commas: an item more than those of the walk is an empty container.
            assert scan._values <= items
        if depth:
            scanned(body.encode(), JsonLimits(depth=depth), size=3)
            with pytest.raises(RequestError, match="within each other"):
                scanned(body.encode(), JsonLimits(depth=depth - 1), size=3)


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1}', b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', "5 keys"),
        (b"[" + b"1," * 11 + b"1]", b"[" + b"1," * 12 + b"1]", "12 items"),
        (b"[[],[],[],[],[],[]]", b"[[],[],[],[],[],[],[]]", "12 items"),
        (b"[[[[]]]]", b"[[[[[]]]]]", "more than 4 lists"),
        (b'{"a":{"a":{"a":{}}}}', b'{"a":{"a":{"a":{"a":{}}}}}', "more than 4 lists"),
        (b"[123456]", b"[1234567]", "6 digits"),
        (b"[-1.5e3]", b"[-1.25e3]", "6 digits"),
        (b'["12345678"]', b'["",12345678]', "6 digits"),
        (b'"' + rb"\n" * 8 + b'"', b'"' + rb"\n" * 9 + b'"', "8 escapes"),
        (b'"' + rb"\\" * 4 + b'"', b'"' + rb"\\" * 4 + rb"\"" + b'"', "8 escapes"),
        ('"ééééé"'.encode(), '"ééééé€"'.encode(), "10 bytes outside ASCII"),
        (b"[]", b"[]]", "closes a bracket too many"),
        (b'"]]]]}}}}[[[[[[[[[{{{{{{{{{::::::,,,,,,,,,,,,,,1234567"', b'"]"]', "bracket too many"),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_limits_hold_exactly(good, bad, said, size):
    scanned(good, SMALL, size)
    with pytest.raises(RequestError, match=said):
        scanned(bad, SMALL, size)


def test_a_quote_after_any_number_of_backslashes_is_read_as_json_reads_it():
    for count in range(6):
        body = b'["' + b"\\" * count + b'",[[]]'
        closed = count % 2 == 0
        for size in (1, 2, 5, None):
            assert scanned(body, size=size)._inside == (0 if closed else 1), (count, size)


@pytest.mark.parametrize(
    "piece",
    [b'"":0,', b"[],", b'"",', b"0,", b"9", rb"\"", rb"\u0000", b"]", b" ", b":", b'"', b"\\",
     "é".encode(), b'{"a":'],
    ids=repr,
)  # fmt: skip
def test_a_hostile_body_costs_little_before_it_is_refused(piece):
    """Sixty megabytes of anything: refused early, or counted at more than 100 MB/s."""
    chunk = (piece * (2**18 // len(piece)))[: 2**18]
    scan, slowest, began = JsonScan(JsonLimits()), 0.0, time.thread_time()
    try:
        for _ in range(240):
            before = time.thread_time()
            scan.feed(chunk)
            slowest = max(slowest, time.thread_time() - before)
    except RequestError:
        pass
    assert time.thread_time() - began < 5
    assert slowest < 0.5


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "[1e400]", '{"a": [2, {"b": -1e309}]}', '[[], ["x", 1e999]]']
)
def test_numbers_that_no_answer_can_hold_are_refused(number):
    body = f'{{"input": "x", "text": {{"format": {{"type": "text", "schema": {number}}}}}}}'
    with pytest.raises(FieldError):
        parsed(body.encode(), ResponsesRequest)
    with pytest.raises(FieldError, match="number beyond"):
        parsed(body.encode(), None)


class Point(BaseModel):
    x: int
    name: str = ""


@pytest.mark.parametrize("padding", [0, INLINE_BYTES * 3])
def test_small_and_large_bodies_are_parsed_alike(padding):
    async def ask():
        parser = BodyParser()
        try:
            body = json.dumps({"x": 3, "name": "é" * padding}).encode()
            point = await parser.parse(body, Point)
            assert (point.x, len(point.name)) == (3, padding)
            assert (await parser.parse(body, None))["x"] == 3
            assert (await parser.parse(b"\xef\xbb\xbf" + body, Point)) == point
            for wrong in (b'{"x": NaN}', b'{"x": 1', b"\xff" + body, '{"x": 1}'.encode("utf-16")):
                with pytest.raises(FieldError, match="not valid JSON"):
                    await parser.parse(wrong + b" " * padding, Point)
            with pytest.raises(FieldError, match="x must be a whole number: it is a text"):
                await parser.parse(b'{"x": "one"}' + b" " * padding, Point)
        finally:
            parser.close()

    asyncio.run(ask())
