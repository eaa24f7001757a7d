"""Finished runs of a tiny timm network on two tasks of the digits, made once."""

import shutil

import pytest
import timm
import torch

from confitune.experiments import make_recipe, run_recipe


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Threads that wait for one another cost more than these small tensors, all the more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A weights file for timm's test_byobnet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = timm.create_model("test_byobnet").state_dict()
    path = tmp_path_factory.mktemp("weights") / "start.pth"
    torch.save(state, path)
    return path


@pytest.fixture(scope="session")
def values(weights):
    """Options of the smallest experiment: two tasks of two digits, one epoch."""
    return {
        "dataset": "digits",
        "tasks": 2,
        "epochs": 1,
        "batch_size": 32,
        "model": "test_byobnet",
        "weights": str(weights),
        "device": "cpu",
        "methods": ["finetune", "confit"],
    }


@pytest.fixture(scope="session")
def finished_once(values, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    run_recipe(make_recipe({**values, "seeds": 2}), out)
    return out


@pytest.fixture
def finished(finished_once, tmp_path):
    """A folder of its own with finetune and confit finished for seeds 0 and 1."""
    return shutil.copytree(finished_once, tmp_path / "finished")
