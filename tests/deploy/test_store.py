"""Files of tensors: what is written is read, and what is no such file is refused."""

import hashlib
import json

import pytest
import torch

from confitune.deploy import BundleError
from confitune.deploy.bundle import StoredFile
from confitune.deploy.bundle.store import Store


def test_tensors_come_back_as_they_were_stored(tmp_path, real):
    kinds = {
        **real,
        "half": torch.randn(3, 2).half(),
        "brain": torch.randn(3).bfloat16(),
        "double": torch.randn(2, 1, 2).double(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "int": torch.tensor([-3, 4], dtype=torch.int32),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(True),
    }
    stored = Store(tmp_path).store("tasks", kinds, some="words")
    before = (tmp_path / stored.name).read_bytes()
    found = Store(tmp_path).read(stored)
    assert found.keys() == kinds.keys()
    for key, tensor in kinds.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key], tensor)
    found["half"].zero_()
    assert (tmp_path / stored.name).read_bytes() == before


@pytest.mark.parametrize("kind", [torch.uint16, torch.int16, torch.complex64])
def test_tensors_of_a_kind_that_no_bundle_has_are_refused(tmp_path, kind):
    stored = Store(tmp_path).store("tasks", {"a": torch.zeros(3, dtype=kind)})
    with pytest.raises(BundleError, match="unexpected dtype"):
        Store(tmp_path).read(stored)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},  # past the end
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 7]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 8]},
        {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    stored = StoredFile(folder="tasks", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    (tmp_path / "tasks").mkdir()
    (tmp_path / stored.name).write_bytes(data)
    with pytest.raises(BundleError, match="holds no tensors"):
        Store(tmp_path).read(stored)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    files = Store(tmp_path)
    for bad in (float("nan"), float("inf")):
        stored = files.store("tasks", {"head.weight": torch.tensor([0.0, bad])})
        with pytest.raises(BundleError, match="NaN or infinite"):
            files.read(stored)
