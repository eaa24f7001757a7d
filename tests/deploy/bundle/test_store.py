"""Files of tensors: what is written is read, what is no such file is refused, and damage is never passed over."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open

from confitune.deploy import Bundle, BundleError, changing, go_back
from confitune.deploy.bundle.format import StoredFile
from confitune.deploy.bundle.store import _DEVICE_FAILED, Store
from deploy.bundle.shared import no_way_back, read_everything
from deploy.shared import contents_and_times as contents, flipped
from locks import held_by_another, without_locks


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
    with Store(tmp_path).read(stored) as found:
        pass
    assert found.keys() == kinds.keys()
    for key, tensor in kinds.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key], tensor)
    found["half"].zero_()
    assert (tmp_path / stored.name).read_bytes() == before


@pytest.mark.parametrize("kind", [torch.uint16, torch.int16, torch.complex64])
def test_tensors_of_a_kind_that_no_bundle_has_are_refused(tmp_path, kind):
    stored = Store(tmp_path).store("tasks", {"a": torch.zeros(3, dtype=kind)})
    with pytest.raises(BundleError, match="unexpected dtype"), Store(tmp_path).read(stored):
        pytest.fail("was read")


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
    with pytest.raises(BundleError, match="is not what a bundle keeps"), Store(tmp_path).read(stored):
        pytest.fail("was read")


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    files = Store(tmp_path)
    for bad in (float("nan"), float("inf")):
        stored = files.store("tasks", {"head.weight": torch.tensor([0.0, bad])})
        with pytest.raises(BundleError, match="NaN or infinite"), files.read(stored):
            pytest.fail("was read")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, _DEVICE_FAILED])
def test_a_device_that_fails_is_no_fault_of_the_file(tmp_path, error):
    files = Store(tmp_path)
    stored = files.store("tasks", {"a": torch.ones(2)})
    with pytest.raises(error, match="of the device"), files.read(stored):
        raise error("of the device")


# ---- in a bundle -----------------------------------------------------------------------------------------------------


def test_the_same_tensors_are_the_same_file(taught):
    path = taught(1)
    bundle = Bundle.open(path)
    before = contents(path)
    with changing(bundle) as change:
        for _ in range(5):  # safetensors' own order of several metadata entries would differ before long
            assert change.store_task(bundle.task_state("reds"), ["reds 0", "reds 1"]) == bundle.record("reds").file
            assert change.store_held_out(bundle.held_out("reds").test) == bundle.record("reds").held_out
        assert bundle.leftovers() == []
    assert contents(path) == before


def test_files_are_text_or_safetensors_that_say_what_they_are(taught):
    path = taught(2)
    endings = {"bundle.json": 1, "bundle.before.json": 1, ".safetensors": 11}
    files = [file for file in path.rglob("*") if file.is_file() and file.name != ".lock"]
    assert sum(endings.values()) == len(files)
    for file in files:
        data = file.read_bytes()
        assert not data.startswith((b"PK", b"\x80"))  # a zip, a pickle
        assert b"PK\x03\x04" not in data or file.parent.name == "held-out"  # which may have it among its pixels
        if file.suffix == ".safetensors":
            assert hashlib.sha256(data).hexdigest() == file.stem
        else:
            assert json.loads(data)["format"] == 4
    with safe_open(path / "tasks" / f"{Bundle.open(path).record('reds').file.sha256}.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["confitune"])
    assert (about["holds"], about["classes"]) == ("tasks", ["reds 0", "reds 1"])
    assert (about["model"], about["means"], about["size"]) == ("test_byobnet", "window", 32)


@pytest.mark.parametrize(("folder", "files"), [("backbones", 2), ("tasks", 2), ("held-out", 2), ("features", 3)])
def test_flipped_bytes_of_tensors_are_noticed(taught, folder, files):
    path = no_way_back(taught(2))
    flips = 0
    for file in (path / folder).iterdir():
        data = file.read_bytes()
        for share in range(9):  # the first byte, the last, and between
            position = min(share * len(data) // 8, len(data) - 1)
            file.write_bytes(flipped(data, position))
            with pytest.raises(BundleError, match=rf"{file.name} is damaged: its checksum does not match its name"):
                read_everything(path)
            flips += 1
        file.write_bytes(data)
    assert flips == 9 * files
    assert list(read_everything(path).tasks) == ["reds", "stripes"]


def test_truncated_longer_and_missing_files_are_noticed(taught):
    path = no_way_back(taught(2))
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    assert len(files) == 10
    for file in files:
        data = file.read_bytes()
        for cut in (data[: len(data) // 2], data[:-2], b""):
            file.write_bytes(cut)
            with pytest.raises(BundleError, match=file.name):
                read_everything(path)
        file.write_bytes(data + b"x")
        with pytest.raises(BundleError, match=file.name):
            read_everything(path)
        file.unlink()
        with pytest.raises(BundleError, match=rf"{file.name} cannot be read|is not a bundle"):
            read_everything(path)
        file.write_bytes(data)
    assert list(read_everything(path).tasks) == ["reds", "stripes"]


def test_a_file_with_another_content_under_its_true_hash_is_no_tensor(taught):
    path = taught(1)
    bundle = Bundle.open(path)
    data = b"\x80\x04\x95 a pickle"
    stored = StoredFile(folder="tasks", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    with changing(bundle) as change:
        (path / "tasks" / f"{stored.sha256}.safetensors").write_bytes(data)
        change.add_task("bad", bundle.record("reds").model_copy(update={"file": stored}))
    with pytest.raises(BundleError, match="is not what a bundle keeps"):
        Bundle.open(path).task_state("bad")


# ---- locks -----------------------------------------------------------------------------------------------------------


def test_one_process_at_a_time(taught):
    path = taught(1)
    before = contents(path)
    with held_by_another(path / ".lock") as other:
        bundle = Bundle.open(path)
        busy = r"another process is changing .*model; try again when it is done"
        with pytest.raises(BundleError, match=busy), changing(bundle):
            pytest.fail("was changed")
        assert contents(path) == before
        assert list(Bundle.open(path).tasks) == ["reds"]  # reading needs no lock
        other.kill()
    with changing(Bundle.open(path)):
        pass


@without_locks
def test_nothing_is_changed_without_a_lock(taught, monkeypatch, locks):
    path = taught(2)
    before = contents(path)
    monkeypatch.setattr("confitune.files.fcntl", locks)
    with pytest.raises(BundleError, match="cannot be locked"), changing(Bundle.open(path)):
        pytest.fail("it was changed")
    with pytest.raises(BundleError, match="cannot be locked"):
        go_back(Bundle.open(path))
    assert contents(path) == before
