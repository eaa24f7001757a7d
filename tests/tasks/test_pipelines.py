from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from confitune.tasks import IMAGENET_MEAN, IMAGENET_STD, DataError
from confitune.tasks.pipelines import Pipeline, byte_wrap_table

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


def test_a_thin_box_is_refused_and_a_hundred_to_one_is_not() -> None:
    with pytest.raises(DataError, match="too thin: 1 x 150 pixels"):
        Pipeline("published", use_box=True)(Image.new("RGB", (150, 150)), (3, 0, 4, 150))
    with pytest.raises(DataError, match="too thin: 0 x 150 pixels"):
        Pipeline("published", use_box=True)(Image.new("RGB", (150, 150)), (150, 0, 300, 150))
    assert Pipeline()(Image.new("RGB", (100, 1))).shape == (3, 224, 224)
