"""Opens image files of every mode and depth as a viewer shows them, and remembers their bytes."""

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base

from valora_data.errors import DataError

UNREADABLE = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError,
    MemoryError, ImportError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises for damaged files; and, once Ultralytics is imported, for missing plugins."""
PROGRAMS = frozenset({"EPS", "WMF"})
"""Formats of drawings, which Pillow hands to Ghostscript or the system: they can hold programs."""


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """The file that an image was decoded from."""

    content: bytes  # the file's bytes
    size: tuple[int, int]  # width and height in pixels as they are stored, not yet turned
    orientation: int = 1  # EXIF's orientation, 1 to 8; 1 for none

    def shown(self, edges: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
        """A box (x0, y0, x1, y1) on the stored pixels, as it lies on the image that is shown."""
        width, height = self.size
        x0, y0, x1, y1 = edges
        if self.orientation in (2, 3, 7, 8):  # mirrored from left to right
            x0, x1 = width - x1, width - x0
        if self.orientation in (3, 4, 6, 7):  # mirrored from top to bottom
            y0, y1 = height - y1, height - y0
        return (y0, x0, y1, x1) if self.orientation >= 5 else (x0, y0, x1, y1)  # transposed


def decode_image(content: bytes) -> Image.Image:
    """Decode an image file to RGB, turned as EXIF says; `encoded_file` gives the file back.

    Transparency lies on white, 16-bit grey is scaled, floats read on 0 to 1 or 0 to 255, the first
    page taken. A `DataError` says why it cannot be shown.
    """
    if not content:
        raise DataError("the file is empty")
    try:
        with Image.open(BytesIO(content)) as file:
            if file.format in PROGRAMS:
                raise DataError(f"it is {file.format}, a drawing; save it as PNG or JPEG")
            size = file.size
            file.load()
            orientation = int(file.getexif().get(Base.Orientation, 1) or 1)
            image = to_rgb(ImageOps.exif_transpose(file), file.format)
    except UNREADABLE as error:
        raise DataError(_reason(error, content)) from error
    orientation = orientation if 1 <= orientation <= 8 else 1
    # Not in `image.info`, which Pillow copies to images that are made from this one.
    vars(image)["encoded_file"] = EncodedFile(content, size, orientation)
    return image


def encoded_file(image: Image.Image) -> EncodedFile | None:
    """The file that `decode_image` made an image of; None for images made from another one."""
    return cast("EncodedFile | None", vars(image).get("encoded_file"))


def to_rgb(image: Image.Image, file_format: str | None = None) -> Image.Image:
    """Convert to RGB, 8 bits a channel (see `decode_image`); `file_format` is Pillow's name."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and file_format in ("PNG", "PPM")):
        return _from_levels(np.asarray(image).astype(np.float64) / 257)
    if mode == "I":
        raise DataError("it holds 32-bit integers: save it with 8 or 16 bits")
    if mode == "F":
        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 255):  # or not a number
            text = f"it holds values from {low:g} to {high:g}, of which the white is not known"
            raise DataError(f"{text}; scale them to 0 to 1, or save it with 8 or 16 bits")
        return _from_levels(values * 255.0 if high <= 1 else values)
    if image.has_transparency_data:
        shown = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


def _from_levels(levels: np.ndarray) -> Image.Image:
    """An image of grey levels of 0 to 255."""
    return Image.fromarray(np.clip(np.rint(levels), 0, 255).astype(np.uint8)).convert("RGB")


def _reason(error: BaseException, content: bytes) -> str:
    if not isinstance(error, UnidentifiedImageError | ImportError):
        return " ".join(str(error).split()) or type(error).__name__
    if content[:4] in (b"II*\0", b"MM\0*"):
        return "it is a TIFF of a kind that is not read; save it with 8 or 16 bits"
    return "it is no image of a known format"
