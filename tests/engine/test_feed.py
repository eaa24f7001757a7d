"""Where pixels lie and in which order they come; what needs a GPU is in test_cuda.py."""

import pytest
import torch

from confitune.engine import place
from confitune.engine.feed import _gathered, _moved, _rows_in_use, batches, place_task
from confitune.tasks import Images

CPU = torch.device("cpu")


@pytest.fixture
def images():
    """Rows 8, 0, 6, 3, 1, 7, 4 of ten images; every pixel of image r is r, its label r + 100."""
    rows = torch.tensor([8, 0, 6, 3, 1, 7, 4])
    pixels = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2).contiguous()
    return Images(pixels, rows, rows + 100)


def told(found):
    """Which rows each batch holds, read from its pixels; labels must say the same."""
    told = []
    for pixels, labels in found:
        assert pixels.dtype == torch.uint8
        assert pixels.shape[1:] == (3, 2, 2)
        rows = pixels[:, 0, 0, 0].tolist()
        assert (pixels == pixels[:, :1, :1, :1]).all()
        assert labels.tolist() == [row + 100 for row in rows]
        told.append(rows)
    return told


@pytest.mark.parametrize("where", ["auto", "device", "host"])
def test_what_the_cpu_trains_on_stays_where_it_is(sequence, where):
    assert place(sequence, CPU, where) is sequence
    assert place_task(sequence[1], CPU, where) is sequence[1]


def test_what_is_to_be_streamed_stays_where_it_is(sequence):
    assert place(sequence, torch.device("cuda"), "host") is sequence
    assert place_task(sequence[0], torch.device("cuda"), "host") is sequence[0]


def test_batches_come_as_stored_the_rest_included(images):
    assert told(batches(images, 3, CPU)) == [[8, 0, 6], [3, 1, 7], [4]]
    assert told(batches(images, 7, CPU)) == [[8, 0, 6, 3, 1, 7, 4]]
    assert told(batches(images, 100, CPU)) == [[8, 0, 6, 3, 1, 7, 4]]


def test_batches_come_in_the_given_order(images):
    assert told(batches(images, 2, CPU, torch.tensor([6, 0, 0, 5, 1]))) == [[4, 8], [8, 7], [0]]
    assert told(batches(images, 2, CPU, torch.tensor([2, 3]))) == [[6, 3]]


def test_what_goes_to_a_device_is_each_image_once(images):
    """Two splits that overlap, and one of another block: of this one rows 0, 1, 3, 4, 6, 7, 8 and 2, 3 are used."""
    others = Images(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([3]), torch.tensor([0]))
    overlapping = Images(images.pixels, torch.tensor([3, 2, 3]), torch.tensor([103, 102, 103]))
    used = _rows_in_use([images, others, overlapping], images.pixels)
    assert used.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    gathered = _gathered(images.pixels, used, CPU)
    assert len(gathered) == 8
    for split in (images, overlapping):
        moved = _moved(split, used, gathered)
        assert moved.pixels is gathered
        assert told(batches(moved, 3, CPU)) == told(batches(split, 3, CPU))


def test_many_images_go_in_chunks(monkeypatch):
    monkeypatch.setattr("confitune.engine.feed._CHUNK", 4)
    block = torch.arange(11 * 12).view(11, 3, 2, 2).to(torch.uint8)
    rows = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9, 10])
    assert torch.equal(_gathered(block, rows, CPU), block[rows])
