"""Image files: of every format that is read, damaged, with absurd dimensions, and bombs."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from confitune.tasks.decode import Pipeline, open_rgb
from fuzz.mutations import damaged
from fuzz.watch import Watch

_SIDES = (0, 1, 2, 99, 255, 4095, 8900, 16_383, 65_535, 2**24, 2**31 - 1, 2**32 - 1)


def fuzz(watch: Watch) -> None:
    pipeline = Pipeline()

    def decode(data: bytes) -> None:
        pipeline(open_rgb(io.BytesIO(data), name="given"))

    whole = [_saved(*kind) for kind in _KINDS]
    for data in whole:
        decode(data)  # what is not damaged is read
    watch.try_many(st.sampled_from(whole).flatmap(damaged), decode, 520)
    watch.try_many(st.sampled_from(whole).flatmap(_resized), decode, 150, found=_bombs())


_KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"quality": 30}),
    ("JPEG", "CMYK", {"progressive": True}),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 0, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03"}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "I;16", {}),
    ("PNG", "1", {}),
    ("GIF", "P", {}),
    ("BMP", "RGB", {}),
    ("PPM", "RGB", {}),
    ("PPM", "L", {}),
    ("TIFF", "RGB", {}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("TIFF", "RGBA", {"compression": "tiff_deflate"}),
    ("TIFF", "RGB", {"compression": "jpeg"}),
    ("TIFF", "1", {"compression": "group4"}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
)


def _saved(kind: str, mode: str, options: dict[str, Any]) -> bytes:
    levels = np.random.default_rng(0).integers(0, 256, (18, 24, 3)).astype(np.uint8)
    colour = Image.fromarray(np.clip(levels // 8 + np.arange(24, dtype=np.uint8)[None, :, None] * 8, 0, 255))
    image = Image.fromarray(levels[..., 0].astype(np.uint16) * 200) if mode == "I;16" else colour.convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@st.composite
def _resized(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with other dimensions in its header, its checksums made right again."""
    width, height = (draw(st.sampled_from(_SIDES)) for _ in range(2))
    if data.startswith(b"\x89PNG"):
        header = struct.pack(">2I", width, height) + data[24:29]
        return data[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + data[33:]
    if data.startswith(b"\xff\xd8"):
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
        return data[:at] + struct.pack(">2H", height % 2**16, width % 2**16) + data[at + 4 :]
    if data.startswith(b"GIF"):
        at = data.index(b",") + 5
        small = struct.pack("<2H", width % 2**16, height % 2**16)
        return data[:6] + small + data[10:at] + small + data[at + 4 :]
    if data.startswith(b"BM"):
        return data[:18] + struct.pack("<2i", width % 2**31, height % 2**31) + data[26:]
    if data.startswith(b"P"):
        return data.replace(b"24 18", b"%d %d" % (width, height), 1)
    if data.startswith(b"RIFF"):
        return data[:20] + data[20:40].replace(struct.pack("<H", 24), struct.pack("<H", width % 2**14)) + data[40:]
    for tag, value in ((256, width), (257, height), (278, draw(st.sampled_from(_SIDES)))):  # TIFF; 278: rows a strip
        at = data.find(struct.pack("<2HI", tag, 4, 1))
        at = at if at >= 0 else data.find(struct.pack("<2HI", tag, 3, 1))
        if at >= 0:
            data = data[:at] + struct.pack("<2H2I", tag, 4, 1, value % 2**32) + data[at + 12 :]
    return data


def _bombs() -> list[bytes]:
    """Files of a few kilobytes that hold as much as is allowed, or more than that."""
    found = [
        _png(8900, 8900, 6),  # transparency takes the most memory
        _png(10_000, 10_000, 2),
        _png(200_000, 400, 0),
        _png(79_000_000, 1, 0),
        _png(30, 20, 2, text=2**24),
    ]
    jpeg = _saved("JPEG", "RGB", {"progressive": True})
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    found.append(jpeg[:-2] + last * 20_000 + b"\xff\xd9")
    return found


def _png(width: int, height: int, kind: int, text: int = 0) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compressobj(9)
    row = b"\0" * (1 + width * {0: 1, 2: 3, 6: 4}[kind])
    pixels = b"".join(rows.compress(row) for _ in range(height)) if width * height < 9e7 else rows.compress(row[:1000])
    said = chunk(b"zTXt", b"text\0\0" + zlib.compress(b"x" * text, 9)) if text else b""
    header = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + said + chunk(b"IDAT", pixels + rows.flush()) + chunk(b"IEND", b"")
