"""The program, a finished experiment, and bundles that have learned."""

import shutil

import pytest

from confitune.engine import SequenceRun
from deploy.taught import decoded, new_bundle, photos, pictures, taught, taught_once, teach
from program import confitune, exit_code

__all__ = ["confitune", "decoded", "new_bundle", "photos", "pictures", "taught", "taught_once", "teach"]


@pytest.fixture(scope="session")
def tiny(weights):
    """Arguments of the smallest experiment: two tasks of two digits, one epoch."""
    options = f"--dataset digits --tasks 2 --epochs 1 --batch-size 32 --model test_byobnet --weights {weights}"
    return [*options.split(), "--device", "cpu"]


@pytest.fixture(scope="session")
def ran_once(tiny, tmp_path_factory):
    """A folder with finetune and confit finished, and the arguments that made it."""
    out = tmp_path_factory.mktemp("ran") / "out"
    arguments = ["run", *tiny, "--method", "finetune", "--method", "confit", "--checkpoint-seconds", "0"]
    arguments += ["--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        assert exit_code(patch, arguments) == 0
    return out, arguments


@pytest.fixture
def ran(ran_once, tmp_path):
    """A copy of it, and the arguments for the copy."""
    out, arguments = ran_once
    copied = shutil.copytree(out, tmp_path / "out")
    return copied, [*arguments[:-1], str(copied)]


@pytest.fixture
def no_runs(monkeypatch):
    """Fails the test if a run is started."""
    monkeypatch.setattr(SequenceRun, "run", lambda self: pytest.fail(f"{self.method.name} was started"))
