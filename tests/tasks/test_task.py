import pytest
import torch

from confitune.tasks import DataError, Images, Preprocess, Task

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
    with pytest.raises(DataError, match="cover its 2 classes"):
        Task("a", ("x", "y"), good, good, PLAIN, groups=((0, 1),))
