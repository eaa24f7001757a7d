"""What is damaged is found and named, what can be mended is, and what is whole stays."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from confitune.cli import app
from confitune.deploy import Bundle, LearnSettings, learn
from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments import examine, make_recipe, run_recipe
from confitune.files import exclusive


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(values, tmp_path):
    """The folder of a finished run with two checkpoints."""
    run_recipe(make_recipe({**values, "methods": ["finetune"]}), tmp_path / "runs", checkpoint_seconds=0)
    return tmp_path / "runs/digits/finetune/seed-0"


def test_whole_runs(run):
    found = examine(run.parents[2])
    assert (found.kind, found.findings) == ("runs", [])
    assert found.contents == ["digits/finetune/seed-0: finished, with a checksum"]


def test_a_changed_result_is_found_and_an_older_one_without_checksum_is_told_apart(run):
    path = run / "result.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "acc": values["acc"] / 2}))
    (finding,) = examine(run.parents[2]).findings
    assert finding.problem.startswith(f"{path} is damaged: its checksum does not fit")
    del values["checksum"]
    path.write_text(json.dumps(values))
    found = examine(run.parents[2])
    assert found.contents == ["digits/finetune/seed-0: finished, without a checksum, as results once were"]
    assert found.findings == []


def test_a_run_that_another_process_works_on_is_left_alone(run):
    left = run / "epochs.1234.partial"
    left.touch()
    with exclusive(run / ".lock", lambda: None):
        found = examine(run.parents[2], repair=True)
        assert found.contents == ["digits/finetune/seed-0: another process is working on it"]
        assert found.findings == []
        assert left.exists()
    assert len(examine(run.parents[2], repair=True).findings) == 1
    assert not left.exists()


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(run):
    newest, before = run / "checkpoint.pt", run / "checkpoint.before.pt"
    whole = before.read_bytes()
    flip(newest, 5000)
    (finding,) = examine(run).findings
    assert finding.problem == f"{newest} is damaged"
    assert before.exists()  # only looked at so far
    assert examine(run, repair=True).findings == [finding]
    assert newest.read_bytes() == whole
    assert not before.exists()
    assert examine(run).findings == []


def test_what_cannot_be_used_is_put_aside_and_made_again(run, values):
    result = RunResult.load(run / "result.json")
    (run / "result.json").write_text("{half")
    for name in ("checkpoint.pt", "checkpoint.before.pt"):
        flip(run / name)
    (run / "epochs.1234.partial").write_text("half a line")
    assert len(examine(run, repair=True).findings) == 4
    assert (run / "result.json.damaged").read_text() == "{half"
    assert not any(run.glob("*.pt"))
    assert not any(run.glob("*.partial"))
    (again,) = run_recipe(make_recipe({**values, "methods": ["finetune"]}), run.parents[2], resume=True)
    assert again.final_sha256 == result.final_sha256


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of photos, and a bundle that has learned it; decoded images lie in `store`."""
    root, chance = tmp_path_factory.mktemp("doctor"), np.random.default_rng(0)
    for label, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (root / "photos" / label).mkdir(parents=True)
        for n in range(6):
            noise = chance.integers(0, 50, (40, 40, 3))
            Image.fromarray((noise + colour).astype(np.uint8)).save(root / "photos" / label / f"{n}.png")
    settings = LearnSettings(model="test_byobnet", weights="none", size=32, epochs=1, batch_size=4, device="cpu")
    learn(root / "photos", "colours", root / "model", settings, cache_dir=root / "store")
    return root


def test_a_whole_bundle(photos):
    found = examine(photos / "model")
    assert (found.kind, found.findings) == ("bundle", [])
    assert found.contents[1].startswith("task 'colours': 2 classes, ")


def test_what_broke_off_in_a_bundle_is_swept_away(photos):
    left = photos / "model" / "tasks" / f"{'0' * 64}.safetensors"
    left.write_bytes(b"not committed")
    (finding,) = examine(photos / "model", repair=True).findings
    assert str(left) in finding.problem
    assert not left.exists()
    assert list(Bundle.open(photos / "model").tasks) == ["colours"]


@pytest.mark.parametrize("part", ["bundle.json", "index.jsonl", "backbones", "tasks", "held-out"])
def test_damage_in_a_bundle_is_named_and_nothing_is_removed(photos, part):
    path = photos / "model" / part
    path = next(path.iterdir()) if path.is_dir() else path
    before = path.read_bytes()
    flip(path, len(before) // 2)
    try:
        (finding,) = examine(photos / "model", repair=True).findings
        assert path.name in finding.problem
        assert finding.remedy is None
        assert path.exists()
    finally:
        path.write_bytes(before)
    assert examine(photos / "model").findings == []


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ConfituneError, match="holds no bundle and no runs"):
        examine(tmp_path)
    with pytest.raises(ConfituneError, match="there is no folder"):
        examine(tmp_path / "none")


def test_the_command_says_what_it_found_and_ends_accordingly(photos):
    runner, model = CliRunner(), photos / "model"
    fine = runner.invoke(app, ["doctor", str(model)])
    assert (fine.exit_code, "everything is whole" in fine.output) == (0, True)
    left = model / "held-out" / f"{'1' * 64}.safetensors"
    left.write_bytes(b"not committed")
    found = runner.invoke(app, ["doctor", str(model)])
    assert (found.exit_code, "--repair: deleted" in found.output) == (1, True)
    mended = runner.invoke(app, ["doctor", str(model), "--repair"])
    assert (mended.exit_code, left.exists()) == (0, False)
