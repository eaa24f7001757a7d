"""What a checkpoint's file says comes back, and nothing more than it holds."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from confitune.engine.checkpoint import CHECKPOINT, Checkpoint, data_of, differences, values_of
from confitune.errors import ConfituneError
from confitune.files import write_sealed


def test_values_come_back():
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    twice = torch.ones(2)
    values = {
        "a": torch.arange(3),
        "b": {"c": [1, 2.5, None, "d", (True,)], 0: {"momentum": twice}},
        "e": torch.zeros(2, 2)[:, 0],
        "f": [twice, torch.tensor(2.0), torch.zeros(0)],
        "conv": conv,
    }
    found = values_of(data_of(values))
    assert found["b"]["c"] == values["b"]["c"]
    assert torch.equal(found["b"][0]["momentum"], twice)
    assert torch.equal(found["a"], values["a"])
    assert torch.equal(found["e"], values["e"])
    assert [tensor.tolist() for tensor in found["f"]] == [[1.0, 1.0], 2.0, []]
    assert torch.equal(found["conv"], conv)
    assert found["conv"].stride() == conv.stride()  # sums over it are taken in the same order


def test_a_number_that_is_none_comes_back():
    (found,) = values_of(data_of({"matrix": [float("nan")]}))["matrix"]
    assert found != found


@pytest.mark.parametrize(
    "text",
    [{"tensor": "1"}, {"import": ["os"]}, {"dict": [1]}, {"dict": [], "tuple": []}, {"channels last": "0"}, [[[{}]]]],
)
def test_what_names_nothing_is_refused(text):
    with pytest.raises((KeyError, ValueError, TypeError, RuntimeError)):
        dict(values_of(json.dumps(text).encode() + b"\n" + save({"0": torch.zeros(2)})))


def test_a_tensor_is_no_larger_than_what_is_stored_of_it():
    data = data_of({"net": torch.zeros(4)})
    with pytest.raises(Exception, match=r"(?i)tensor|offset|header"):
        values_of(data.replace(b'"shape":[4]', b'"shape":[9]'))


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def torch_bytes(values):
    torch.save(values, out := io.BytesIO())
    return out.getvalue()


@pytest.mark.parametrize("pickled", [pickle.dumps, torch_bytes])
def test_a_pickle_is_no_checkpoint_and_is_not_run(tmp_path, pickled):
    write_sealed(tmp_path / CHECKPOINT, pickled({"config": {}, "net": Runs(tmp_path / "ran")}))
    with pytest.raises(ConfituneError, match=r"checkpoint\.pt is no checkpoint of this version") as refused:
        Checkpoint.load(tmp_path, {})
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_whatever_a_configuration_holds_can_be_shown():
    for value in ([["ha"] * 1000] * 1000, "x" * 10**6):
        told = differences({"lr": value, "same": 1}, {"lr": 0.1, "same": 1})
        assert told.startswith("lr was ")
        assert told.endswith(", now 0.1")
        assert len(told) < 2000
