"""Colour profiles made by hand, since no package that the tests need ships one for CMYK."""

import struct

import numpy as np

D50 = (0.9642, 1.0, 0.8249)
# sRGB to XYZ under D50 (Bradford), from Bruce Lindbloom's tables.
TO_XYZ = np.array(
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)
INKS = np.array([[0, 150, 220], [200, 20, 110], [250, 220, 10], [0, 0, 0]]) / 255
"""sRGB colours of full cyan, magenta, yellow and black."""


def printed(corners):
    """Colours of inks printed over each other: [n, 4] of 0 or 1 → [n, 3] sRGB, 0 to 255."""
    return 255 * np.prod(np.where(np.asarray(corners)[..., None] > 0, INKS, 1.0), axis=-2)


def lab_of(rgb):
    """CIE Lab under D50 of sRGB colours: [n, 3] of 0 to 255 → [n, 3]."""
    levels = np.asarray(rgb) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    x, y, z = (
        np.where(v > (6 / 29) ** 3, np.cbrt(v), v / (3 * (6 / 29) ** 2) + 4 / 29)
        for v in np.moveaxis(linear @ TO_XYZ.T / D50, -1, 0)
    )
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def cmyk_profile():
    """A CMYK profile (ICC 2) with a table of the 16 mixtures of full inks (`printed`)."""
    corners = np.stack(np.meshgrid(*[[0, 1]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    lab = lab_of(printed(corners))
    table = np.clip(np.rint(lab * [2.55, 1, 1] + [0, 128, 128]), 0, 255).astype(np.uint8)
    ramp = bytes(range(256))
    identity = b"".join(struct.pack(">i", v << 16) for v in (1, 0, 0, 0, 1, 0, 0, 0, 1))
    white = b"XYZ " + bytes(4) + struct.pack(">iii", *(round(v * 65536) for v in D50))
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"inks\0" + bytes(78),
        b"cprt": b"text" + bytes(4) + b"none\0",
        b"wtpt": white,
        b"A2B0": b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + identity + 4 * ramp
        + table.tobytes() + 3 * ramp,
    }  # fmt: skip
    at = 128 + 4 + 12 * len(tags)
    listed, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        content = value + bytes(-len(value) % 4)
        listed += name + struct.pack(">II", at + len(data), len(content))
        data += content
    head = struct.pack(">I4sI4s4s4s", at + len(data), b"test", 2 << 24, b"prtr", b"CMYK", b"Lab ")
    head += bytes(12) + b"acsp" + bytes(28) + white[8:]
    return head + bytes(128 - len(head)) + listed + data
