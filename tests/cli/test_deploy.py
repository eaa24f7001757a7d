"""learn, tasks, predict and export, from arguments to exit code, output and files."""

import csv
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from confitune import cli
from confitune.deploy import Bundle, Predictor, changing, check_tasks
from confitune.deploy.export.export import FORMATS
from confitune.errors import ConfituneError
from confitune.methods import METHODS
from deploy.shared import contents, guess, settling
from program import SOURCE, plain, refused, rows

# ---- learn -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(decoded):
    return ["--epochs", 4, "--batch-size", 4, "--lr", 0.02, "--device", "cpu", "--cache-dir", decoded]


@pytest.fixture
def learning(quick, new_bundle):
    return [
        *quick,
        "--model",
        new_bundle["model"],
        "--weights",
        new_bundle["weights"],
        "--size",
        32,
        "--method",
        "best",
    ]


def test_without_a_terminal_every_stage_is_a_line(confitune, photos, learning, tmp_path):
    shutil.copytree(photos("checks"), tmp_path / "checks")
    said = confitune("learn", tmp_path / "checks", "--name", "a", "--bundle", tmp_path / "m", *learning)
    assert said.code == 0
    stages = [
        r"decoding folder-checks \(20\)",
        "a: looking at the photos with the pre-trained network",
        "a: testing what was learned",
        "a: keeping features of the photos",
    ]
    assert re.search(r"\n(.*\n)*".join(stages), said.out)
    owns = ["--set", "best.owns=changes"]
    said = confitune("learn", photos("checks"), "--name", "a", "--bundle", tmp_path / "n", *learning, *owns)
    assert "a: training head+norms, up to 4 epochs in all\n" in said.out


def test_broken_photos_are_left_out_where_that_is_asked_for(confitune, photos, learning, tmp_path):
    folder = Path(shutil.copytree(photos("reds"), tmp_path / "reds"))
    (folder / "reds 0" / "broken.png").write_bytes(b"no image")
    (folder / "reds 1" / "cut.png").write_bytes((folder / "reds 1" / "0.png").read_bytes()[:60])
    arguments = ["learn", folder, "--name", "reds", "--bundle", tmp_path / "m", *learning]
    message = refused(confitune(*arguments))
    assert "broken.png" in message
    assert "2 of 22 images; replace or remove them" in message
    assert not (tmp_path / "m").exists()  # a first task that failed leaves nothing
    said = confitune(*arguments, "--skip-broken")
    assert said.code == 0
    assert "note: 2 images that cannot be read are left out: reds 0/broken.png, reds 1/cut.png" in said.out
    assert Bundle.open(tmp_path / "m").record("reds").images == 16


def test_a_photo_in_two_classes_is_pointed_out(confitune, photos, learning, tmp_path):
    folder = Path(shutil.copytree(photos("reds"), tmp_path / "reds"))
    shutil.copy(folder / "reds 0" / "3.png", folder / "reds 1" / "same.png")
    shutil.copy(folder / "reds 0" / "3.png", folder / "reds 0" / "again.png")
    said = confitune("learn", folder, "--name", "reds", "--bundle", tmp_path / "m", *learning)
    assert said.code == 0
    assert "1 photos are in two classes or more" in said.out
    assert "reds 0/3.png and reds 0/again.png and reds 1/same.png" in said.out


def test_learn_makes_a_bundle_and_then_adds_to_it(confitune, photos, quick, new_bundle, tmp_path):
    path = tmp_path / "model"
    start = [part for name, value in new_bundle.items() for part in (f"--{name}", value)]
    said = confitune(
        "learn", photos("reds"), "--name", "reds", "--bundle", path, *quick, *start, "--set", "means=phase", "--keep", 9
    )
    assert said.code == 0
    bundle = Bundle.open(path)
    assert (bundle.network.model, bundle.network.means, bundle.network.size) == ("test_byobnet", "phase", 32)
    assert bundle.network.weights == "start.pth"
    accuracy = bundle.record("reds").accuracy
    assert f"reds: 2 classes, {accuracy:.1f}% right" in said.out
    assert rows(said.out) == [["reds", "4", "", f"{accuracy:.1f}", "new"]]
    numbers = bundle.load_network(["reds"]).numbers_per_task
    megabytes = bundle.record("reds").file.bytes / 1e6
    assert f"{path} grew by {megabytes:.2f} MB ({numbers:,} numbers and the head)" in said.out
    assert f"held-out photos {bundle.record('reds').held_out.bytes / 1e6:.2f} MB; " in said.out

    before = bundle.record("reds").checked
    said = confitune("learn", photos("greens"), "--name", "[/b]", "--bundle", path, *quick)
    assert said.code == 0
    bundle = Bundle.open(path)
    assert list(bundle.tasks) == ["reds", "[/b]"]
    now = bundle.record("reds").checked
    assert rows(said.out) == [
        ["reds", "4", f"{before:.1f}", f"{now:.1f}", f"{now - before:+.1f}"],
        ["[/b]", "4", "", f"{bundle.record('[/b]').accuracy:.1f}", "new"],  # not taken for markup
    ]
    assert "[/b]: 2 classes" in said.out
    assert "held-out photos" not in said.out.splitlines()[-1]


def test_learn_uses_best_and_says_where_only_a_head_was_fitted(
    confitune, photos, quick, new_bundle, tmp_path, monkeypatch
):
    path, said_it = tmp_path / "model", "only a head was fitted"
    start = [part for name, value in new_bundle.items() if name != "method" for part in (f"--{name}", value)]
    for task, settles in (("reds", True), ("stripes", False)):
        monkeypatch.setattr(METHODS["best"], "settle", settling(settles))
        said = confitune("learn", photos(task), "--name", task, "--bundle", path, *quick, *start)
        assert said.code == 0
        assert (said_it in said.out) == settles
        assert ("(0 numbers and the head)" in said.out) == settles
        start = []
    assert Bundle.open(path).network.method == "best"
    said = confitune("learn", photos("greens"), "--name", "greens", "--bundle", path, *quick, "--method", "confit")
    assert "has method 'best', which cannot be changed to 'confit'" in refused(said)
    said = confitune("tasks", path, "--check", "--device", "cpu")
    assert [row[0] for row in rows(said.out)] == ["reds", "stripes"]


def test_learn_says_how_many_earlier_tasks_were_tested(confitune, photos, quick, taught):
    path = taught(3)
    said = confitune("learn", photos("blues"), "--name", "blues", "--bundle", path, *quick, "--check", 1)
    assert said.code == 0
    assert len(rows(said.out)) == 2
    assert "1 of 3 earlier tasks were tested (--check), chosen at random" in " ".join(said.out.split())
    said = confitune("learn", photos("checks"), "--name", "checks", "--bundle", path, *quick)
    assert len(rows(said.out)) == 4
    assert "chosen at random" not in said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a\nb"], "a task's name must be 1 to 100 readable characters"),
        (["--name", "reds"], "has a task 'reds' already"),
        (["--name", "x", "--model", "resnet18"], "has model 'test_byobnet', which cannot be changed to 'resnet18'"),
        (["--name", "x", "--weights", "w.pth"], "has its weights already; leave --weights out"),
        (["--name", "x", "--set", "means=both"], "--means both: Input should be 'window' or 'phase'"),
        (["--name", "x", "--set", "confit.means=phase"], "learns with confit (means='window' statistics='running')"),
        (["--name", "x", "--set", "best.rank=2"], "options of best have no effect in a bundle that learns with confit"),
        (["--name", "x", "--set", "confit.rank=2"], "options of confit: rank: Extra inputs are not permitted"),
        (["--name", "x", "--augmentation", "cutout"], "--augmentation cutout: Input should be 'none' or 'flip'"),
        (["--name", "x", "--method", "best"], "has method 'confit', which cannot be changed to 'best'"),
        (["--name", "x", "--lr", "0"], "--lr 0.0: Input should be greater than 0"),
        (["--name", "x", "--lr", "1e20"], "the loss of task 'x' became"),
        (["--name", "x", "--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_what_cannot_be_learned_is_said_in_one_message(confitune, photos, quick, taught, options, message):
    path = taught(1)
    before = contents(path)
    assert message in refused(confitune("learn", photos("greens"), *["--bundle", path, *quick, *options]))
    assert contents(path) == before


def test_learn_without_photos(confitune, quick, taught_once, tmp_path):
    said = confitune("learn", tmp_path / "none", "--name", "x", "--bundle", taught_once[1], *quick)
    assert f"the folder {tmp_path / 'none'} is not there" in refused(said)


def test_ctrl_c_leaves_the_bundle_as_it_was(confitune, photos, quick, taught, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    path = taught(1)
    before = contents(path)
    monkeypatch.setattr("confitune.engine.TaskFit.fit", interrupted)
    said = confitune("learn", photos("greens"), "--name", "greens", "--bundle", path, *quick)
    assert said.code == 130
    assert "stopped; the bundle is as it was" in said.err
    assert contents(path) == before


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_lists_what_there_is(confitune, taught_once):
    bundle = Bundle.open(taught_once[3])
    said = confitune("tasks", taught_once[3])
    assert said.code == 0
    assert rows(said.out) == [
        [
            name,
            "3" if name == "stripes" else "2",
            "24" if name == "stripes" else "16",
            bundle.record(name).learned[:10],
            f"{bundle.record(name).checked:.1f}",
            f"{bundle.record(name).file.bytes / 1e3:,.0f}",
        ]
        for name in ("reds", "stripes", "greens")
    ]


def test_tasks_as_json(confitune, taught_once):
    bundle = Bundle.open(taught_once[3])
    found = json.loads(confitune("tasks", taught_once[3], "--json").out)
    assert [entry["task"] for entry in found] == ["reds", "stripes", "greens"]
    assert found[1] == {
        "task": "stripes",
        "classes": ["stripes 0", "stripes 1", "stripes 2"],
        "images": 24,
        "learned": bundle.record("stripes").learned,
        "accuracy": bundle.record("stripes").checked,
        "bytes": bundle.record("stripes").file.bytes,
    }


def test_tasks_renames(confitune, taught):
    path = taught(2)
    said = confitune("tasks", path, "--rename", "reds", "all [red] things")
    assert said.code == 0
    assert [row[0] for row in rows(said.out)] == ["all [red] things", "stripes"]
    assert list(Bundle.open(path).tasks) == ["all [red] things", "stripes"]
    assert "has no task 'reds'; it has 'all [red] things', 'stripes'" in refused(
        confitune("tasks", path, "--rename", "reds", "x")
    )


def test_tasks_removes(confitune, taught):
    path = taught(2)
    said = confitune("tasks", path, "--remove", "reds", "--json")
    assert [entry["task"] for entry in json.loads(said.out)] == ["stripes"]
    assert list(Bundle.open(path).tasks) == ["stripes"]
    assert "has no task 'reds'" in refused(confitune("tasks", path, "--remove", "reds"))


def test_tasks_checks(confitune, taught_once):
    checks = check_tasks(Bundle.open(taught_once[3]), "cpu")
    said = confitune("tasks", taught_once[3], "--check", "--device", "cpu")
    assert said.code == 0
    assert [row[4] for row in rows(said.out)] == [f"{accuracy:.1f}" for accuracy in checks.accuracy.values()]
    assert f"Without --task, {checks.guessed:.1f}% of these photos are assigned to the right task" in said.out
    assert f"(chance level 33.3%), {checks.unknown:.1f}% to none" in said.out
    found = json.loads(confitune("tasks", taught_once[3], "--check", "--device", "cpu", "--json").out)
    assert {entry["task"]: entry["accuracy"] for entry in found} == checks.accuracy


@pytest.mark.parametrize("command", [["tasks"], ["predict", "x.png"], ["export", "--task", "x"]], ids=lambda c: c[0])
def test_no_bundle(confitune, tmp_path, command):
    Path("x.png").touch()
    message = refused(confitune(command[0], tmp_path / "none", *command[1:]))
    assert message == f"{tmp_path / 'none'} is not a bundle: create one with `confitune learn`"


# ---- predict ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def new(tmp_path, pictures):
    """A folder with three pictures of greens, the first of them in a folder of its own."""
    folder = tmp_path / "new [1]"
    (folder / "deep").mkdir(parents=True)
    for name, picture in zip(("deep/a.png", "b.png", "c.jpg"), pictures("greens"), strict=False):
        picture.save(folder / name)
    return folder


def answers(said):
    return [json.loads(line) for line in said.out.splitlines()]


def test_predict_one_file(confitune, taught_once, new):
    said = confitune("predict", taught_once[3], new / "b.png", "--task", "greens", "--device", "cpu")
    assert said.code == 0
    predictor = Predictor.from_bundle(taught_once[3], device="cpu")
    (expected,) = predictor.predict(predictor.decode(new / "b.png")[None], ["greens"])
    words = ", ".join(f"{name} {100 * share:.1f}%" for name, share in expected.classes)
    assert said.out == f"{new / 'b.png'}: {words}\n"


def test_predict_a_folder_as_json(confitune, taught_once, new):
    said = confitune("predict", taught_once[3], new, "--task", "stripes", "--top", 2, "--json", "--device", "cpu")
    assert said.code == 0
    found = answers(said)
    assert [entry["image"] for entry in found] == [str(new / name) for name in ("b.png", "c.jpg", "deep/a.png")]
    for entry in found:
        assert set(entry) == {"image", "task", "task_confidence", "classes"}
        assert (entry["task"], entry["task_confidence"]) == ("stripes", None)
        assert len(entry["classes"]) == 2
        assert entry["classes"][0]["probability"] >= entry["classes"][1]["probability"]


def test_predict_a_pattern_and_guess_the_task(confitune, taught_once, new):
    folder = shutil.copytree(new, new.parent / "plain")
    said = confitune("predict", taught_once[3], f"{folder}/**/*.png", "--json", "--device", "cpu")
    assert said.code == 0
    found = answers(said)
    assert [entry["image"] for entry in found] == [str(folder / "b.png"), str(folder / "deep/a.png")]
    predictor = Predictor.from_bundle(taught_once[3], device="cpu")
    for entry in found:
        ((task, confidence),) = guess(predictor, predictor.decode(Path(entry["image"]))[None])
        assert entry["task"] == task
        assert entry["task_confidence"] == pytest.approx(confidence, abs=1e-4)
        assert bool(entry["classes"]) == (task is not None)


def test_predict_says_in_words_what_it_guessed(confitune, taught_once, new, tmp_path):
    predictor = Predictor.from_bundle(taught_once[3], device="cpu")
    noise = torch.randint(0, 256, (300, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(tmp_path / "noise.png")
    said = confitune("predict", taught_once[3], *sorted(new.rglob("*.png")), tmp_path / "noise.png", "--device", "cpu")
    assert said.code == 0
    lines = said.out.splitlines()
    for line, file in zip(lines, [*sorted(new.rglob("*.png")), tmp_path / "noise.png"], strict=True):
        ((task, confidence),) = guess(predictor, predictor.decode(file)[None])
        known = f"{task} ({100 * confidence:.0f}%): {task} "
        assert line.startswith(f"{file}: " + (known if task else "unknown: it looks like nothing that was learned"))
    assert ": unknown: it looks like nothing that was learned (nearest: " in lines[-1]


def test_predict_names_what_it_cannot_read_and_answers_the_rest(confitune, taught_once, new):
    (new / "broken.png").write_bytes(b"broken")
    Image.new("1", (9000, 9000)).save(new / "large.png")
    said = confitune("predict", taught_once[3], new, "--task", "greens", "--json", "--device", "cpu")
    assert said.code == 1
    assert [Path(entry["image"]).name for entry in answers(said)] == ["b.png", "c.jpg", "a.png"]
    assert f"cannot read the image {new / 'broken.png'}: " in said.err
    assert "large.png: it has 9000 x 9000 pixels, more than 50 million" in said.err
    assert said.err.endswith("2 of 5 images could not be read\n")
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.png"], "there is no image none.png"),
        (["{new}/b.png", "--task", "birds"], "has no task 'birds'; it has 'reds', 'stripes', 'greens'"),
    ],
)
def test_what_cannot_be_predicted_is_said(confitune, taught_once, new, options, message):
    given = [option.format(new=new) for option in options]
    assert message in refused(confitune("predict", taught_once[3], *given, "--device", "cpu"))


def test_answers_as_a_table_for_other_programs(confitune, taught_once, new):
    said = confitune("predict", taught_once[3], new, "--task", "stripes", "--top", 2, "--csv", "--device", "cpu")
    head, *lines = csv.reader(said.out.splitlines())
    assert head == ["image", "task", "class", "probability"]
    expected = confitune("predict", taught_once[3], new, "--task", "stripes", "--top", 2, "--json", "--device", "cpu")
    answers = [json.loads(line) for line in expected.out.splitlines()]
    assert lines == [
        [answer["image"], "stripes", found["name"], f"{found['probability']:.6f}"]
        for answer in answers
        for found in answer["classes"]
    ]
    assert len(lines) == 2 * len(answers) > 0


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_to_onnx_and_run_it(confitune, taught, new):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = taught(3)
    assert confitune("tasks", path, "--rename", "greens", "../green [1]").code == 0
    said = confitune("export", path, "--task", "../green [1]")
    assert said.code == 0
    found = re.fullmatch(r"_green_1_\.onnx: equal to the bundle up to (\S+) on ten images\n", said.out)
    assert float(found.group(1)) < 1e-3
    assert [file.name for file in Path.cwd().iterdir()] == ["_green_1_.onnx"]
    session = onnxruntime.InferenceSession("_green_1_.onnx", providers=["CPUExecutionProvider"])
    predictor = Predictor.from_bundle(path, device="cpu")
    pixels = predictor.decode(new / "b.png")[None]
    (given,) = session.get_inputs()
    (logits,) = session.run(None, {given.name: predictor.preprocess(pixels).contiguous().numpy()})
    expected = torch.stack(predictor.logits(pixels, ["../green [1]"]))
    assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-3)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["tasks"]) == [{"name": "../green [1]", "classes": ["greens 0", "greens 1"]}]
    assert json.loads(facts["steps"]) == [["resize", 256], ["crop", 224], ["resize", 32]]


def test_what_cannot_be_exported_is_said(confitune, taught_once):
    message = refused(confitune("export", taught_once[3], "--task", "birds"))
    assert "has no task 'birds'; it has 'reds', 'stripes', 'greens'" in message
    assert "give --task for one task, or --all" in refused(confitune("export", taught_once[3]))
    message = refused(confitune("export", taught_once[3], "--task", "reds", "--to", "tape"))
    assert "there is no format 'tape'; there are: onnx" in message
    message = refused(confitune("export", taught_once[3], "--task", "reds", "--out", "reds.ts", "--to", "onnx"))
    assert "reds.ts: its ending says the format: leave --to out, or let the file end in .onnx" in message
    message = refused(confitune("export", taught_once[3], "--task", "reds", "--out", "reds.ts"))
    assert "reds.ts: files end in .onnx" in message
    assert list(Path.cwd().iterdir()) == []


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("learn", "confitune learn photos/birds --name birds --bundle model"),
        ("tasks", "confitune tasks model --check"),
        ("predict", "confitune predict model new/*.jpg --task birds"),
        ("serve", "confitune serve model"),
        ("export", "confitune export model --task birds --out birds.onnx"),
    ],
)
def test_help_shows_an_example(confitune, command, example):
    said = confitune(command, "--help")
    assert said.code == 0
    assert "Examples" in said.out
    assert example in said.out


def test_help_lists_the_formats_that_there_are(confitune):
    assert f"[{'|'.join(FORMATS)}]" in confitune("export", "--help").out


def test_help_imports_no_torch():
    program = (
        "import sys\nfrom confitune.cli import main\n"
        "for command in ('learn', 'tasks', 'predict', 'serve', 'export'):\n"
        "    sys.argv = ['confitune', command, '--help']\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "print('HEAVY', sorted({'torch', 'timm', 'fastapi', 'onnx', 'numpy'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "HEAVY []" in plain(done.stdout)


def test_methods_and_predict_import_only_what_they_use(taught, pictures, tmp_path):
    pictures("reds")[0].save(tmp_path / "red.png")
    program = (
        "import sys\nfrom confitune.cli import main\n"
        f"for command in (['methods'], ['predict', {str(taught(1))!r}, 'red.png', '--device', 'cpu']):\n"
        "    sys.argv = ['confitune', *command]\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "print('HEAVY', sorted({'sklearn', 'matplotlib', 'scipy', 'fastapi', 'onnx', 'ray'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "finetune-xconv" in done.stdout
    assert "red.png: " in done.stdout
    assert "HEAVY []" in done.stdout
    assert not done.stderr


def test_an_exported_file_says_all_that_its_answers_need(confitune, taught, pictures, tmp_path, monkeypatch, capsys):
    """The page's example reaches the predictor's answers with the file, onnxruntime, Pillow and numpy alone."""
    pytest.importorskip("onnxruntime")
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert set(re.findall(r"^(?:import|from) ([\w, ]+?)(?: import .*)?$", code, re.MULTILINE)) == {
        "json, numpy, onnxruntime",
        "PIL",
    }
    path = taught(3)
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.rename_task("stripes", "birds")
    assert confitune("export", path, "--all", "--out", tmp_path / "model.onnx").code == 0
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    predictor = Predictor.from_bundle(path, device="cpu")
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for size, more in (((301, 200), {}), ((97, 230), {"exif": turned}), ((256, 291), {})):
        pictures("stripes", 1)[0].resize(size).save("new/a.jpg", **more)
        found = {}
        exec(compile(code, "serve.md", "exec"), found)
        (expected,) = predictor.logits(predictor.decode(Path("new/a.jpg"))[None], ["birds"])
        assert found["facts"]["version"] == bundle.manifest.version
        assert np.abs(found["logits"][: len(expected)] - expected.numpy()).max() < 1e-4
        assert capsys.readouterr().out.strip() == bundle.record("birds").classes[int(expected.argmax())]


def test_undo(confitune, taught):
    path = taught(2)
    assert json.loads(confitune("tasks", path, "--undo", "--json").out)[0]["task"] == "reds"
    assert list(Bundle.open(path).tasks) == ["reds"]
    assert "can be undone" in refused(confitune("tasks", path, "--undo"))
    assert "--undo goes back on its own" in refused(confitune("tasks", path, "--undo", "--remove", "reds"))


def test_a_server_goes_by_its_host_and_the_names_that_are_allowed(confitune, taught_once, monkeypatch):
    pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")
    asked = []

    def create_app(predictor, limits, hosts):
        asked.extend(hosts)
        raise ConfituneError("that is enough")

    monkeypatch.setattr("confitune.deploy.server.app.create_app", create_app)
    names = ["--host", "my.machine", "--allow-host", "a.example", "--allow-host", "b.example"]
    assert "that is enough" in refused(confitune("serve", taught_once[1], *names, "--device", "cpu"))
    assert asked == ["my.machine", "a.example", "b.example"]


@pytest.mark.skipif(sys.platform == "win32", reason="names are bytes on POSIX")
def test_names_of_files_cannot_move_the_cursor(confitune, taught_once, tmp_path):
    for name in ("a\x1b[2J.png", os.fsdecode(b"\xff\xfe.png")):
        (tmp_path / name).write_bytes(b"no image")
        said = confitune("predict", taught_once[1], tmp_path / name, "--device", "cpu")
        assert said.code == 1
        assert "\x1b" not in said.err
        assert "cannot read the image" in said.err
    said = confitune("predict", taught_once[1], tmp_path / "none\x1b[2J.png", "--device", "cpu")
    assert "there is no image" in refused(said)
    assert "\x1b" not in said.err


def test_a_terminal_without_unicode(taught_once, tmp_path):
    environment = {
        "PYTHONPATH": str(SOURCE),
        "PYTHONIOENCODING": "ascii",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    path = tmp_path / "größe"
    shutil.copytree(taught_once[1], path)
    with changing(Bundle.open(path)) as change:
        change.rename_task("reds", "鳥")
    program = [sys.executable, "-m", "confitune", "tasks", str(path), "--remove", "名"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    program = [sys.executable, "-m", "confitune", "tasks", str(path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "\\u9ce5" in done.stdout) == (0, True)


def test_a_command_says_it_on_the_terminal(taught, monkeypatch, capsys):
    path = taught(2)
    (path / "bundle.json").write_bytes(b"{")
    monkeypatch.setattr(logging.root, "handlers", [])  # those of the tests
    monkeypatch.setattr(sys, "argv", ["confitune", "tasks", str(path)])
    with suppress(SystemExit):
        cli.main()
    said = capsys.readouterr()
    assert "bundle.json is damaged" in said.err
    assert "is used as it was before its last change" in said.err
    assert "reds" in said.out
    assert "stripes" not in said.out
