"""Images of every mode and depth: decoded as other libraries decode them, or refused."""

import io
from itertools import product

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from valora_data.errors import DataError
from valora_data.images import decode_image, encoded_file

HEIGHT, WIDTH = 20, 30
RAMP = np.linspace(0, 1, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
COLOURS = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURE = Image.fromarray(COLOURS)


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(values, **options):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, **options)
    return buffer.getvalue()


def pixels(content):
    image = decode_image(content)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def grey(levels):
    return np.repeat(np.rint(levels)[..., None], 3, axis=2).astype(int)


def test_16_bits_and_floating_point():
    colours = (np.stack([RAMP, RAMP**2, 1 - RAMP], -1) * 65535).astype(np.uint16)
    for suffix, values in product((".png", ".tiff"), (colours, colours[..., 0])):
        _, buffer = cv2.imencode(suffix, values)
        reference = cv2.cvtColor(cv2.imdecode(buffer, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        found = pixels(buffer.tobytes())
        assert np.abs(found - reference.astype(int)).max() <= 1  # rounded, or cut to the high byte
        assert (found.min(), found.max()) == (0, 255)
    values = colours[..., 0]
    pgm = f"P5 {WIDTH} {HEIGHT} 65535\n".encode() + values.astype(">u2").tobytes()
    for content in (
        tiff(values, byteorder=">"), tiff(values, compression="zlib"), pgm,
        tiff(RAMP.astype(np.float32)), tiff((RAMP * 255).astype(np.float32)),
    ):  # fmt: skip
        assert np.abs(pixels(content) - grey(RAMP * 255)).max() <= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((4, 4), np.nan, np.float32), "from nan to nan"),
        (np.full((4, 4), np.inf, np.float32), "from inf to inf"),
        (np.full((4, 4), -3, np.float32), "from -3 to -3, of which the white is not known"),
        (np.full((4, 4), 4000, np.float32), "scale them to 0 to 1"),
        (np.full((4, 4), 7, np.int32), "32-bit integers"),
        (np.full((4, 4), 0.5, np.float64), "a TIFF of a kind that is not read"),
        (np.full((4, 4, 3), 0.5, np.float32), "a TIFF of a kind that is not read"),
    ],
)
def test_values_without_a_known_white_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        decode_image(tiff(values))


def test_transparency_lies_on_white():
    alpha = (RAMP * 255).astype(np.uint8)
    for colours in (COLOURS, COLOURS[..., :1]):
        shown = colours * (alpha[..., None] / 255) + 255 * (1 - alpha[..., None] / 255)
        content = saved(Image.fromarray(np.dstack([colours, alpha])), "PNG")
        assert np.abs(pixels(content) - shown).max() <= 1


def test_palettes_bits_and_pages():
    indices = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 4).astype(np.uint8)
    image = Image.fromarray(indices, "P")
    palette = np.array([[255, 0, 0], [0, 255, 0], [9, 99, 199], [1, 2, 3]], np.uint8)
    image.putpalette(palette.tobytes())
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.array_equal(pixels(saved(image, kind)), palette[indices]), kind
    see_through = palette.copy()
    see_through[2] = 255
    key = saved(Image.fromarray(palette[indices]), "PNG", transparency=(9, 99, 199))
    for content in (key, *(saved(image, kind, transparency=2) for kind in ("PNG", "GIF"))):
        assert np.array_equal(pixels(content), see_through[indices])
    bits = RAMP > 0.4
    for kind in ("PNG", "TIFF", "BMP"):
        assert np.array_equal(pixels(saved(Image.fromarray(bits), kind)), grey(bits * 255)), kind
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (10, 200)]
    content = saved(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert pixels(content)[0, 0, 0] == 10  # of several pages the first


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_of_pixels_and_boxes(orientation):
    stored = Image.fromarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    stored.paste((255, 255, 255), (2, 3, 9, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(saved(stored, "PNG", exif=exif))
    reference = stored.copy()
    reference.getexif()[0x0112] = orientation
    assert image.tobytes() == ImageOps.exif_transpose(reference).tobytes()
    file = encoded_file(image)
    assert file is not None
    assert (file.size, file.orientation) == ((WIDTH, HEIGHT), orientation)
    shown = file.shown((2, 3, 9, 8))
    ys, xs = np.nonzero(np.asarray(image)[..., 0])
    assert shown == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
    for made in (image.copy(), ImageOps.mirror(image), image.resize((4, 4)), image.crop()):
        assert encoded_file(made) is None  # it is another picture than the file's


def test_damaged_files_are_refused():
    for content in (
        b"", b"no image", b"GIF89a", b"\xff\xd8\xff\xe0" + bytes(400), b"<svg/>",
        saved(PICTURE, "PNG")[:-400], saved(PICTURE, "JPEG")[:-300], saved(PICTURE, "TIFF")[:200],
        saved(PICTURE, "WEBP")[:100],
    ):  # fmt: skip
        with pytest.raises(DataError):
            decode_image(content)


def test_bombs_and_drawings_are_refused(monkeypatch):
    """And no other program is asked to draw them."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)
    with pytest.raises(DataError, match=r"EPS, .*PNG or JPEG"):
        decode_image(saved(Image.new("RGB", (20, 10)), "EPS"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT // 3)
    with pytest.raises(DataError, match="decompression bomb"):
        decode_image(saved(PICTURE, "PNG"))
