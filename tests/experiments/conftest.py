"""Finished runs of a tiny timm network on two tasks of the digits, made once."""

import os
import shutil
from uuid import uuid4

import pytest

from confitune.engine import SequenceRun
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import run_recipe

# Ray reads these when it is first used: its clusters here have a token of their own, whatever this machine keeps.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid4().hex, RAY_USAGE_STATS_ENABLED="0")


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
    run_recipe(make_recipe({**values, "seeds": 2}), out, checkpoint_seconds=0)
    return out


@pytest.fixture
def finished(finished_once, tmp_path):
    """A folder of its own with finetune and confit finished for seeds 0 and 1."""
    return shutil.copytree(finished_once, tmp_path / "finished")


@pytest.fixture
def started(monkeypatch):
    """(method, seed) of every run that is started."""
    runs = []
    run = SequenceRun.run

    def spy(self):
        runs.append((self.method.name, self.settings.seed))
        return run(self)

    monkeypatch.setattr(SequenceRun, "run", spy)
    return runs
