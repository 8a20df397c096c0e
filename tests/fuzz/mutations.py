"""Changes to files, and JSON texts that cost a careless reader much: of all fuzzers."""

import struct

EXTREMES = (0, 1, 2, 3, 255, 256, 16383, 16384, 32767, 40000, 65535, 65536, 2**24 - 1, 2**31 - 1,
            2**31, 2**32 - 1, 2**63)  # fmt: skip


def flipped(rng, content):
    """Set some bytes, more of them near the beginning, at random."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 40)):
        end = len(found) if rng.random() < 0.5 else min(len(found), 256)
        found[rng.randrange(0, end)] = rng.randrange(256)
    return bytes(found)


def truncated(rng, content):
    """Cut the end off."""
    return content[: rng.randrange(len(content))]


def repeated(rng, content):
    """Repeat a piece up to 2,000 times."""
    first, last = sorted(rng.choices(range(len(content) + 1), k=2))
    times = rng.randrange(2, max(3, min(2000, 2**22 // max(1, last - first))))
    return content[:last] + content[first:last] * times + content[last:]


def forged(rng, content):
    """Write extreme numbers at the start, into the header, or anywhere."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        form = rng.choice((">H", "<H", ">I", "<I", "<Q"))
        size = struct.calcsize(form)
        end = min(len(found), rng.choice((8, 128, 128, len(found), len(found))))
        at = rng.randrange(0, max(1, end - size + 1))
        value = rng.choice(EXTREMES) % 2 ** (8 * size)
        found[at : at + size] = struct.pack(form, value)
    return bytes(found)


CHANGES = (flipped, truncated, repeated, forged)


def json_texts(many):
    """What makes a text, by name; `many` is how often something is repeated."""
    return {
        "unknown keys": lambda: b"{" + b",".join(b'"k%d":1' % n for n in range(many)) + b"}",
        "nested lists": lambda: b"[" * many,
        "nested and closed lists": lambda: b"[" * many + b"]" * many,
        "nested objects": lambda: b'{"a":' * many,
        "a huge integer": lambda: b'{"n":' + b"9" * (10 * many) + b"}",
        "a surrogate as a key": lambda: rb'{"\ud800":1}',
    }
