"""Image files of every kind become RGB, and RGB becomes the bytes that are stored."""

import io
import struct
import time
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from confitune.errors import DataError, UnreadableImageError
from confitune.tasks.decode import Pipeline, byte_wrap_table, open_rgb, pixels_of, to_rgb
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD

CLEAN = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])


def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8))


def chw(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


def test_clean_is_resize_and_centre_crop() -> None:
    stored = Pipeline()(photograph())
    assert stored.shape == (3, 224, 224)
    assert stored.dtype == np.uint8
    assert np.array_equal(stored, chw(CLEAN(photograph())))


def test_published_pixel_by_hand() -> None:
    """(100, 128, 200), every step written out; the first value is negative, so truncation is not the floor.

    red:   (100/255 - 0.485) / 0.229 * 255 = -103.38 -> -103 -> 153
    green: (128/255 - 0.456) / 0.224 * 255 =   52.32 ->   52 ->  52
    blue:  (200/255 - 0.406) / 0.225 * 255 =  428.76 ->  428 -> 172
    """
    stored = Pipeline("published", wrap=(IMAGENET_MEAN, IMAGENET_STD))(Image.new("RGB", (300, 260), (100, 128, 200)))
    assert stored.reshape(3, -1).min(axis=1).tolist() == [153, 52, 172]
    assert stored.reshape(3, -1).max(axis=1).tolist() == [153, 52, 172]


def test_published_is_the_clean_pipeline_twice_with_bytes_wrapped_between() -> None:
    normalise = transforms.Compose([CLEAN, transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    wrapped = normalise(photograph()).mul(255).to(torch.int32).remainder(256).to(torch.uint8)
    expected = chw(CLEAN(Image.fromarray(wrapped.permute(1, 2, 0).numpy())))
    assert np.array_equal(Pipeline("published", wrap=(IMAGENET_MEAN, IMAGENET_STD))(photograph()), expected)


def test_bytes_wrap_around() -> None:
    """Red runs from -540 to 573 and so passes -512, -256, 0, 256 and 512: five times it falls back to black."""
    table = byte_wrap_table(IMAGENET_MEAN, IMAGENET_STD)
    assert len(table) == 768
    assert sum(later < earlier for earlier, later in pairwise(table[:256])) == 5


def test_boxes_are_cut_out_first_and_clipped_to_the_image() -> None:
    picture = Image.new("RGB", (100, 80), "red")
    picture.paste((0, 0, 255), (60, 40, 100, 80))
    box = (60, 40, 120, 90)  # reaches beyond the image, which must not add black
    stored = Pipeline("published", use_box=True)(picture, box)
    assert (stored.reshape(3, -1).min(axis=1).tolist(), stored.max()) == ([0, 0, 255], 255)
    assert Pipeline()(picture, box)[0].max() == 255


@pytest.mark.parametrize("size", [(101, 1), (1, 101), (2, 201)])
def test_a_thin_image_is_refused_before_its_short_side_becomes_256(size: tuple[int, int], monkeypatch) -> None:
    monkeypatch.setattr("torchvision.transforms.functional.resize", lambda *_: pytest.fail("it was resized"))
    with pytest.raises(DataError, match=f"too thin: {size[0]} x {size[1]} pixels, more than 100 to 1; crop it"):
        Pipeline()(Image.new("RGB", size))


def test_a_thin_image_is_refused_before_it_is_decoded(monkeypatch) -> None:
    out = io.BytesIO()
    Image.new("1", (1, 50_000)).save(out, "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(UnreadableImageError, match="too thin"):
        open_rgb(io.BytesIO(out.getvalue()))


def test_a_thin_box_is_refused_and_a_hundred_to_one_is_not() -> None:
    with pytest.raises(DataError, match="too thin: 1 x 150 pixels"):
        Pipeline("published", use_box=True)(Image.new("RGB", (150, 150)), (3, 0, 4, 150))
    with pytest.raises(DataError, match="too thin: 0 x 150 pixels"):
        Pipeline("published", use_box=True)(Image.new("RGB", (150, 150)), (150, 0, 300, 150))
    assert Pipeline()(Image.new("RGB", (100, 1))).shape == (3, 224, 224)


def pixel(path: Path, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    image = open_rgb(path)
    assert image.mode == "RGB"
    return image.getpixel(at)


def test_grey_and_black_and_white(tmp_path: Path) -> None:
    Image.new("L", (2, 2), 77).save(tmp_path / "grey.png")
    Image.new("1", (2, 2), 1).save(tmp_path / "line.png")
    assert pixel(tmp_path / "grey.png") == (77, 77, 77)
    assert pixel(tmp_path / "line.png") == (255, 255, 255)


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, ending: str) -> None:
    levels = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / f"deep.{ending}")
    assert [pixel(tmp_path / f"deep.{ending}", (x, 0))[0] for x in range(4)] == [0, 1, 128, 255]


def test_sixteen_bits_in_colour(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + struct.pack(">3H", 65535, 32896, 0)  # Pillow cannot write such files, only read them
    png = chunk(b"IHDR", struct.pack(">2I5B", 1, 1, 16, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(row))
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + png + chunk(b"IEND", b""))
    assert pixel(tmp_path / "deep.png") == (255, 128, 0)


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (255, 0, 0, 51)).save(tmp_path / "thin.png")  # one fifth red
    assert pixel(tmp_path / "thin.png") == (255, 204, 204)
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.png", transparency=1)
    assert pixel(tmp_path / "palette.png") == (10, 20, 30)
    assert pixel(tmp_path / "palette.png", (1, 0)) == (255, 255, 255)


def test_print_colours(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100)
    red, green, blue = pixel(tmp_path / "print.jpg", (8, 8))
    assert red > 250
    assert max(green, blue) < 5


def test_turned_photographs_are_set_upright(tmp_path: Path) -> None:
    picture = Image.new("RGB", (32, 16), "red")
    picture.paste((0, 0, 255), (0, 0, 16, 16))  # blue on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees: left becomes top
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    upright = open_rgb(tmp_path / "turned.jpg")
    assert upright.size == (16, 32)
    assert upright.getpixel((8, 4))[2] > 200
    assert upright.getpixel((8, 28))[0] > 200


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-40])
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.jpg").touch()
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "float.tif")
    for name in ("cut.png", "text.jpg", "empty.jpg", "absent.jpg"):
        with pytest.raises(UnreadableImageError, match=name):
            open_rgb(tmp_path / name)
    with pytest.raises(UnreadableImageError, match=r"float\.tif.*which of them is white"):
        open_rgb(tmp_path / "float.tif")


def progressive(scans_more: int) -> bytes:
    """A JPEG whose last scan is repeated so many times."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (10, 200, 90)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans_more + b"\xff\xd9"


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded(monkeypatch) -> None:
    assert open_rgb(io.BytesIO(progressive(40))).size == (64, 48)
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(UnreadableImageError, match=r"cat\.jpg: it is coded in 51 scans, more than 50; save it again"):
        open_rgb(io.BytesIO(progressive(41)), name="cat.jpg")


def test_only_the_first_of_endless_frames_is_looked_at() -> None:
    screen = b"GIF89a" + struct.pack("<HHBBB", 30, 20, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\4\5\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0"
    data, began = screen + frame * 400_000 + b"\x3b", time.process_time()
    assert pixels_of(data) == 600
    assert open_rgb(io.BytesIO(data)).size == (30, 20)
    assert time.process_time() - began < 0.2


def test_what_follows_a_jpeg_or_is_its_thumbnail_counts_for_nothing() -> None:
    exif = Image.Exif()
    exif[0x010E] = b"\xff\xda" * 100  # as a thumbnail in it would
    out = io.BytesIO()
    Image.new("RGB", (64, 48)).save(out, "JPEG", exif=exif)
    assert open_rgb(io.BytesIO(out.getvalue() + b"a film \xff\xda" * 100)).size == (64, 48)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "I"])
def test_strips_make_the_whole(mode: str) -> None:
    """An image is converted strip by strip; each pixel comes out as it does alone."""
    levels = np.arange(5 * 150).reshape(150, 5)
    if mode.startswith("I"):
        image = Image.fromarray((levels * 80).astype(np.uint16 if mode == "I;16" else np.int32))
    elif mode == "P":
        image = Image.fromarray((levels % 256).astype(np.uint8)).convert("P")
        image.info["transparency"] = bytes(range(256))
    else:
        bands = [((levels * factor) % 256).astype(np.uint8) for factor in (3, 7, 11, 13)]
        image = Image.fromarray(np.stack(bands[: len(mode)], -1), mode)
    assert image.mode == mode
    whole = to_rgb(image)
    for y in (0, 63, 64, 65, 128, 149):
        assert to_rgb(image.crop((2, y, 3, y + 1))).getpixel((0, 0)) == whole.getpixel((2, y))
    assert len({whole.getpixel((2, y)) for y in range(150)}) > 50
