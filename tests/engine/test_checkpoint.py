"""A checkpoint under a true checksum can still ask for more than it holds."""

import io
import zipfile

import pytest
import torch

from confitune.engine.checkpoint import data_of, require_same_config, values_of
from confitune.errors import ConfituneError


def repacked(archive, compression=zipfile.ZIP_STORED, pickled=None):
    """The archive again, with another pickle in it where one is given."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as packed, zipfile.ZipFile(out, "w", compression) as again:
        for name in packed.namelist():
            changed = pickled is not None and name.endswith("data.pkl")
            again.writestr(name, pickled if changed else packed.read(name))
    return out.getvalue()


def test_values_come_back():
    values = {"a": torch.arange(3), "b": {"c": [1, 2.5, None, "d", (True,)]}, "e": torch.zeros(2, 2)[:, 0]}
    found = values_of(data_of(values))
    assert found["b"] == values["b"]
    assert torch.equal(found["a"], values["a"])
    assert torch.equal(found["e"], values["e"])
    assert values_of(repacked(data_of(values)))["b"] == values["b"]


def test_nothing_compressed_is_unpacked(monkeypatch):
    bomb = repacked(data_of({"a": torch.zeros(100_000)}), zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="its parts are larger than the file"):
        values_of(bomb)


@pytest.mark.parametrize(
    ("pickled", "why"),
    [
        (b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R.", "it asks for 'builtins bytearray'"),
        (b"\x80\x02cposix\nsystem\nX\x02\0\0\0ls\x85R.", "it asks for 'posix system'"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "in another way"),
    ],
)
def test_only_tensors_and_plain_values_are_built(pickled, why, monkeypatch):
    data = repacked(data_of({"a": torch.zeros(3)}), pickled=pickled)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=why):
        values_of(data)


def test_few_values_cannot_stand_for_many():
    laughs = ["ha"] * 10
    for _ in range(12):
        laughs = [laughs] * 10
    with pytest.raises(ValueError, match="more values than a checkpoint has"):
        values_of(data_of({"config": laughs}))
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="more values than a checkpoint has"):
        values_of(data_of({"config": deep}))


def test_a_tensor_is_no_larger_than_what_is_stored_of_it():
    with pytest.raises(ValueError, match="larger than what is stored of it"):
        values_of(data_of({"net": {"w": torch.zeros(1).expand(2**40)}}))


def test_only_named_values_are_a_checkpoint():
    with pytest.raises(ValueError, match="it holds list"):
        values_of(data_of([1]))


def test_whatever_a_configuration_holds_can_be_compared_and_shown(tmp_path):
    laughs = ["ha"] * 10
    for _ in range(12):
        laughs = [laughs] * 10
    for value in (torch.zeros(3), laughs, "x" * 10**6):
        with pytest.raises(ConfituneError, match="lr was ") as caught:
            require_same_config({"lr": value}, {"lr": 0.1}, tmp_path)
        assert len(str(caught.value)) < 200_000
