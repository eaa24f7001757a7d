import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision import transforms

from confitune.errors import DataError
from confitune.tasks import Images, Preprocess, Task
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD

PLAIN = Preprocess((0.0,) * 3, (1.0,) * 3)
PIXELS = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 2, 2)


def images(rows: list[int], labels: list[int]) -> Images:
    return Images(PIXELS, torch.tensor(rows), torch.tensor(labels))


def test_batch_takes_positions_of_the_split_not_rows_of_the_pixels() -> None:
    pixels, labels = images([5, 1, 3], [0, 1, 1]).batch(torch.tensor([2, 0]))
    assert pixels[:, 0, 0, 0].tolist() == [3, 5]
    assert labels.tolist() == [1, 0]


def test_images_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(DataError, match="only 6 images"):
        images([6], [0])
    with pytest.raises(DataError, match="one length"):
        images([1, 2], [0])
    with pytest.raises(DataError, match="int64"):
        Images(PIXELS, torch.tensor([0], dtype=torch.int32), torch.tensor([0]))
    with pytest.raises(DataError, match=r"\[M, 3, H, W\]"):
        Images(PIXELS[:, :1], torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(DataError, match="already normalised"):
        Images(PIXELS.to(torch.int64), torch.tensor([0]), torch.tensor([0]))


def test_tasks_that_cannot_be_learned_are_refused() -> None:
    good = images([0, 1], [0, 1])
    with pytest.raises(DataError, match="needs two or more"):
        Task("a", ("x",), good, good, PLAIN)
    with pytest.raises(DataError, match="same name"):
        Task("a", ("x", "x"), good, good, PLAIN)
    with pytest.raises(DataError, match="training labels reach from 0 to 2"):
        Task("a", ("x", "y"), images([0, 1], [0, 2]), good, PLAIN)
    with pytest.raises(DataError, match="no test images"):
        Task("a", ("x", "y"), good, Images(PIXELS, good.rows[:0], good.rows[:0]), PLAIN)


@pytest.mark.parametrize(("size", "worst"), [((32, 32), 1e-4), ((8, 8), 1e-4), ((48, 32), 1e-4), ((300, 300), 1.01)])
def test_resizing_tensors_agrees_with_pillow(size: tuple[int, int], worst: float) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    pillow = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])(Image.fromarray(picture))
    grey_levels = Preprocess((0.0,) * 3, (1 / 255,) * 3, resize=256, crop=224)
    ours = grey_levels(torch.from_numpy(picture).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    difference = np.abs(ours - np.asarray(pillow, dtype=np.float32))
    assert difference.mean() < 0.01
    assert difference.max() < worst


def test_normalises_as_torchvision_does() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    ours = Preprocess(IMAGENET_MEAN, IMAGENET_STD)(torch.from_numpy(picture).permute(2, 0, 1)[None])
    torch.testing.assert_close(ours[0], theirs(Image.fromarray(picture)))


def test_leaves_its_input_alone_and_passes_floats_through() -> None:
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    before = pixels.clone()
    preprocess = Preprocess(IMAGENET_MEAN, IMAGENET_STD, resize=8, crop=4)
    preprocess(pixels)
    assert torch.equal(pixels, before)
    done = torch.randn(2, 3, 5, 5)
    assert preprocess(done) is done


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(2, 48))
def test_size_of_the_result_is_torchvisions(height: int, width: int, side: int) -> None:
    pixels = torch.zeros(1, 3, height, width, dtype=torch.uint8)
    expected = transforms.Resize(side, antialias=True)(pixels).shape
    assert Preprocess((0.0,) * 3, (1.0,) * 3, resize=side)(pixels).shape == expected
