"""What is damaged is found and named, what can be mended is, and what is whole stays."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from confitune.cli import app
from confitune.deploy import Bundle, LearnSettings, examine, learn
from confitune.errors import ConfituneError
from deploy.shared import flipped


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of photos, and a bundle that has learned it; decoded images lie in `store`."""
    root, chance = tmp_path_factory.mktemp("doctor"), np.random.default_rng(0)
    for label, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (root / "photos" / label).mkdir(parents=True)
        for n in range(6):
            noise = chance.integers(0, 50, (40, 40, 3))
            Image.fromarray((noise + colour).astype(np.uint8)).save(root / "photos" / label / f"{n}.png")
    settings = LearnSettings(
        model="test_byobnet", weights="none", size=32, epochs=1, batch_size=4, device="cpu", keep=4
    )
    learn(root / "photos", "colours", root / "model", settings, cache_dir=root / "store")
    return root


def test_a_whole_bundle(photos):
    found = examine(photos / "model")
    assert found.findings == []
    assert found.contents[1].startswith("task 'colours': 2 classes, ")


def test_what_broke_off_in_a_bundle_is_swept_away(photos):
    left = photos / "model" / "tasks" / f"{'0' * 64}.safetensors"
    left.write_bytes(b"not committed")
    (finding,) = examine(photos / "model", repair=True).findings
    assert str(left) in finding.problem
    assert not left.exists()
    assert list(Bundle.open(photos / "model").tasks) == ["colours"]


@pytest.mark.parametrize("part", ["backbones", "tasks", "held-out", "bundle.before.json"])
def test_damage_in_a_bundle_is_named_and_nothing_is_removed(photos, part):
    path = photos / "model" / part
    path = next(path.iterdir()) if path.is_dir() else path
    before = path.read_bytes()
    path.write_bytes(flipped(before, len(before) // 2))
    try:
        (finding,) = examine(photos / "model", repair=True).findings
        assert path.name in finding.problem
        assert finding.remedy is None
        assert path.exists()
    finally:
        path.write_bytes(before)
    assert examine(photos / "model").findings == []


def test_other_folders_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfituneError, match="is not a bundle"):
            examine(folder)


def test_the_command_says_what_it_found_and_ends_accordingly(photos):
    runner, model = CliRunner(), photos / "model"
    fine = runner.invoke(app, ["doctor", str(model)])
    assert (fine.exit_code, "no damage found" in fine.output) == (0, True)
    left = model / "held-out" / f"{'1' * 64}.safetensors"
    left.write_bytes(b"not committed")
    found = runner.invoke(app, ["doctor", str(model)])
    assert (found.exit_code, "--repair: deleted" in found.output) == (1, True)
    mended = runner.invoke(app, ["doctor", str(model), "--repair"])
    assert (mended.exit_code, left.exists()) == (0, False)
