"""Where nothing can be written, every command says so in one line, and what was there stays as it was.

Whoever may do everything (root) can write to files that are marked read-only, so a read-only disk is imitated at the
lowest level that Python has: its audit events.
"""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from program import exit_code, plain

_read_only: list[str] = []  # folders


def _refuse_to_write(event, arguments):
    if not _read_only:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes | os.PathLike) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        paths = [path]
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"):
        paths = arguments[:1]
    elif event == "os.rename":
        paths = arguments[:2]
    else:
        return
    for path in paths:
        place = os.path.abspath(os.fsdecode(path))
        if any(place == folder or place.startswith(folder + os.sep) for folder in _read_only):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), place)


@pytest.fixture(scope="module", autouse=True)
def _watched():
    sys.addaudithook(_refuse_to_write)  # cannot be taken away; without folders it does nothing


@pytest.fixture
def read_only():
    yield lambda folder: _read_only.append(str(folder))
    _read_only.clear()


@pytest.fixture
def photos(tmp_path):
    chance = np.random.default_rng(0)
    for label in range(2):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for n in range(5):
            values = (chance.integers(0, 60, (20, 20, 3)) + 150 * label).astype(np.uint8)
            Image.fromarray(values).save(tmp_path / "photos" / str(label) / f"{n}.png")
    return tmp_path / "photos"


@pytest.fixture
def command(weights, photos, tmp_path, monkeypatch, capfd):
    """Runs a command; gives its exit code and what it said."""
    tiny = f"--model test_byobnet --weights {weights} --device cpu"
    made = {
        "run": f"run --dataset digits --tasks 2 --epochs 1 --method finetune {tiny} --out OUT",
        "resume": f"run --dataset digits --tasks 2 --epochs 1 --method finetune {tiny} --out OUT --resume",
        "tune": f"tune ewc --dataset digits --tasks 2 --epochs 1 --grid 1 --grid 2 {tiny} --out OUT",
        "reproduce": f"reproduce table2 --datasets digits --quick --methods finetune {tiny} --out OUT",
        "report": "report RUNS --out OUT/page.html",
        "learn": f"learn {photos} --name x --epochs 1 --batch-size 4 --size 32 {tiny} --bundle OUT",
        "more": f"learn {photos} --name y --epochs 1 --batch-size 4 --device cpu --bundle OUT",
        "predict": f"predict MODEL {photos / '0/0.png'} --device cpu",
    }
    monkeypatch.setenv("CONFITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")

    def command(name, out, **places):
        words = made[name].split()
        words = [str(places.get(word, word)) for word in words]
        words = [word.replace("OUT", str(out), 1) if word.startswith("OUT") else word for word in words]
        code, said = exit_code(monkeypatch, words), capfd.readouterr()
        return code, plain(said.out + said.err)

    return command


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def require_refused(code, said, why, remedy="choose"):
    assert code == 2, said
    assert "Traceback" not in said
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert why in error
    assert remedy in error


@pytest.mark.parametrize("name", ["run", "tune", "reproduce", "learn"])
def test_nothing_can_be_begun_on_a_read_only_disk(command, read_only, tmp_path, name):
    (tmp_path / "disk").mkdir()
    read_only(tmp_path / "disk")
    require_refused(*command(name, tmp_path / "disk/out"), "Read-only file system")
    assert not contents(tmp_path / "disk")


@pytest.mark.parametrize("name", ["run", "tune", "reproduce", "learn"])
def test_nothing_can_be_begun_below_a_file(command, tmp_path, name):
    (tmp_path / "disk").write_text("a file")
    require_refused(*command(name, tmp_path / "disk/out"), "Not a directory")
    assert (tmp_path / "disk").read_text() == "a file"


def test_a_run_says_so_before_it_decodes_or_trains(command, read_only, tmp_path, monkeypatch):
    monkeypatch.setattr("confitune.experiments.runs.recipe.load_tasks", lambda *_, **__: pytest.fail("work was begun"))
    (tmp_path / "disk").mkdir()
    read_only(tmp_path / "disk")
    require_refused(*command("run", tmp_path / "disk"), "cannot write in")


def test_results_on_a_disk_that_became_read_only_stay_and_can_be_reported_elsewhere(command, read_only, tmp_path):
    out = tmp_path / "runs"
    assert command("run", out)[0] == 0
    before = contents(out)
    read_only(out)
    code, said = command("run", out)  # without --resume what is there is not touched anyway
    assert code == 2, said
    code, said = command("resume", out)  # nothing is left to do
    assert code == 0, said
    require_refused(*command("report", out, RUNS=out), "Read-only file system")
    assert command("report", tmp_path / "elsewhere", RUNS=out)[0] == 0
    assert (tmp_path / "elsewhere/page.html").exists()
    assert contents(out) == before


def test_a_bundle_on_a_disk_that_became_read_only_still_answers(command, read_only, tmp_path):
    model = tmp_path / "model"
    assert command("learn", model)[0] == 0
    before = contents(model)
    read_only(model)
    require_refused(*command("more", model), "Read-only file system", "choose a folder that you may read and write")
    code, said = command("predict", model, MODEL=model)
    assert (code, "0.png: " in said) == (0, True)
    assert contents(model) == before


def test_decoded_images_need_a_place(command, read_only, tmp_path):
    read_only(tmp_path / "cache")
    remedy = "set cache_dir (or CONFITUNE_CACHE) to another folder"
    require_refused(*command("learn", tmp_path / "model"), "Read-only file system", remedy)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("name", ["run", "learn"])
def test_a_folder_without_permission(command, tmp_path, name):
    (tmp_path / "mine").mkdir(mode=0o500)
    require_refused(*command(name, tmp_path / "mine/out"), "Permission denied")
