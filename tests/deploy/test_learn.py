"""Learning a task changes the bundle all at once or not at all, and says truly what earlier tasks lost."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import confitune
from confitune.deploy import Bundle, BundleError, LearnSettings, Predictor, changing, go_back
from confitune.deploy.bundle import BundleChange
from confitune.engine import DivergedError, TaskFit
from confitune.errors import DataMissingError
from confitune.tasks import Images
from deploy.shared import answers, checked, contents_and_times as contents, damage_task, edited

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name

# Runs each command it is given in a process of its own, which a moment may kill: all share the one start of torch.
DRIVER = """
import importlib, json, os, signal, sys
import torch
import confitune.deploy
from confitune import cli

torch.set_num_threads(1)

def die_at(owner, name, call, when):
    real, calls = getattr(owner, name), []

    def counted(*arguments, **options):
        calls.append(name)
        if len(calls) == call and when == "torn":  # the last bytes did not reach the disk
            os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size - 20)
        if len(calls) == call and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order["moment"]:
            place, name, call, when = order["moment"]
            module, _, owner = place.partition(":")
            owner = getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)
            die_at(owner, name, call, when)
        sys.argv = ["confitune", *order["arguments"]]
        code = 1
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

FIT, LEARN, EARLIER = "confitune.engine:TaskFit", "confitune.deploy.learn", "confitune.deploy.checks"
# What to kill at: a function, at which of its calls, before or after it, or with its file's last bytes not written.
# And what is then left behind, by folder. `os.fsync` is called twice for each file.
TASK, HELD_OUT, BACKBONE = "tasks safetensors", "held-out safetensors", "backbones safetensors"
FEATURES = "features safetensors"
ALL = [BACKBONE, FEATURES, FEATURES, HELD_OUT]
MOMENTS = {
    "as training begins": ((FIT, "_train_epoch", 1, "before"), []),
    "in the last epoch": ((FIT, "_train_epoch", 2, "before"), []),
    "before earlier tasks are checked": ((EARLIER, "evaluate", 1, "before"), []),
    "half of the task": (("os", "fsync", 1, "torn"), ["tasks partial"]),
    "half of the held-out images": (("os", "fsync", 3, "torn"), ["held-out partial", TASK]),
    "half of the features": (("os", "fsync", 5, "torn"), ["features partial", HELD_OUT, TASK]),
    "before the new task is checked": ((LEARN, "evaluate", 2, "before"), [FEATURES, HELD_OUT, TASK]),
    "half of the backbone": (("os", "fsync", 7, "torn"), ["backbones partial", FEATURES, HELD_OUT, TASK]),
    "half of the sums": (("os", "fsync", 9, "torn"), [BACKBONE, "features partial", FEATURES, HELD_OUT, TASK]),
    "half of the manifest before": (("os", "fsync", 11, "torn"), [*ALL, "model partial", TASK]),
    "the manifest before just renamed": (("os", "replace", 6, "after"), [*ALL, "now before", TASK]),
    "half of the manifest": (("os", "fsync", 13, "torn"), [*ALL, "model partial", "now before", TASK]),
    "the manifest not renamed": (("os", "replace", 7, "before"), [*ALL, "model partial", "now before", TASK]),
}
SHORT = {"epochs": 2, "keep": 2}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs a command and gives its exit code and what it said; `moment` is when to kill it."""
    log = tmp_path_factory.mktemp("log") / "said"
    environment = {**os.environ, "PYTHONPATH": str(Path(confitune.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def command(*arguments, moment=None):
        order = {"arguments": [*map(str, arguments)], "moment": moment, "log": str(log)}
        print(json.dumps(order), file=driver.stdin, flush=True)
        return int(driver.stdout.readline()), log.read_text()

    with driver:
        yield command
        driver.stdin.close()


@pytest.fixture(scope="module")
def options(decoded):
    """Of the command: how `teach` does it with `SHORT`."""
    return ["--epochs", 2, "--keep", 2, "--batch-size", 4, "--lr", 0.02, "--device", "cpu", "--cache-dir", decoded]


def new_options(new_bundle):
    return [part for name, value in new_bundle.items() for part in (f"--{name}", value)]


def left_behind(before, path):
    """What a killed process left, each as 'folder kind'."""
    left = []
    for name, (data, _) in contents(path).items():
        if name not in before:
            left.append(f"{(path / name).parent.name} {(path / name).suffix[1:] or (path / name).name}")
        elif name == "bundle.before.json" and data != before[name][0]:
            assert data == before["bundle.json"][0]
            left.append("now before")
        else:
            assert data == before[name][0]
    return sorted(left)


def what_it_learned(path):
    """All that must not depend on when or how often it was begun."""
    bundle = Bundle.open(path)
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.suffix != ".lock")
    records = {task: record.model_copy(update={"learned": ""}) for task, record in bundle.tasks.items()}
    return files, records, bundle.manifest.lineage


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[task], second[task]) for task in first)


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(command, options, photos, taught_once, tmp_path_factory):
    """The bundle of two tasks after the command has taught it a third."""
    path = Path(shutil.copytree(taught_once[2], tmp_path_factory.mktemp("undisturbed") / "model"))
    code, said = command("learn", photos("greens"), "--name", "greens", "--bundle", path, *options)
    assert code == 0, said
    return path


@pytest.fixture(scope="module")
def answered(taught_once):
    """What the bundle of two tasks answers."""
    return answers(taught_once[2])


def test_the_command_learns_what_the_function_does(undisturbed, taught, teach):
    path = taught(2)
    teach("greens", path, **SHORT)
    assert what_it_learned(undisturbed) == what_it_learned(path)
    assert same(answers(undisturbed), answers(path))


@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_learn_has_not_happened(command, options, photos, taught, answered, undisturbed, when):
    moment, left = MOMENTS[when]
    path = taught(2)
    before = contents(path)
    arguments = ["learn", photos("greens"), "--name", "greens", "--bundle", path, *options]
    code, said = command(*arguments, moment=moment)
    assert code == -signal.SIGKILL, said
    assert left_behind(before, path) == left
    assert (path / "bundle.json").read_bytes() == before["bundle.json"][0]
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]
    assert same(answers(path), answered)

    code, said = command(*arguments)
    assert code == 0, said
    assert what_it_learned(path) == what_it_learned(undisturbed)  # files are named by their hashes
    assert set(contents(path)) == set(contents(undisturbed))


AFTERWARDS = {
    "the manifest just renamed": ("os", "replace", 7, "after"),
    "before an old backbone goes": ("pathlib:Path", "unlink", 8, "before"),
    "before old sums go": ("pathlib:Path", "unlink", 9, "before"),
}


@pytest.mark.parametrize("when", AFTERWARDS)
def test_a_learn_killed_after_the_rename_has_happened(command, options, photos, taught, undisturbed, when):
    path = taught(2)
    before = (path / "bundle.json").read_bytes()
    arguments = ["learn", photos("greens"), "--name", "greens", "--bundle", path, *options]
    code, said = command(*arguments, moment=AFTERWARDS[when])
    assert code == -signal.SIGKILL, said
    assert same(answers(path), answers(undisturbed))
    assert (path / "bundle.before.json").read_bytes() == before
    damaged = Path(shutil.copytree(path, path.with_name("damaged")))
    (damaged / "bundle.json").write_bytes(b"gone")
    assert list(answers(damaged)) == ["reds", "stripes"]  # and it can be gone back to

    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.rename_task("reds", "rot")
        change.rename_task("rot", "reds")
    assert bundle.leftovers() == []
    backbones = {file.stem for file in (path / "backbones").iterdir()}
    manifest = json.loads((path / "bundle.json").read_bytes())
    assert backbones == {manifest[name]["sha256"] for name in ("backbone", "pretrained")}
    assert same(answers(path), answers(undisturbed))
    code, said = command(*arguments)
    assert code == 2
    assert "has a task 'greens' already" in said


@pytest.mark.parametrize("when", ["as training begins", "half of the manifest", "the manifest not renamed"])
def test_a_killed_first_learn_leaves_no_bundle(command, options, photos, teach, new_bundle, tmp_path, when):
    path = tmp_path / "model"
    arguments = ["learn", photos("reds"), "--name", "reds", "--bundle", path, *options, *new_options(new_bundle)]
    code, said = command(*arguments, moment=MOMENTS[when][0])
    assert code == -signal.SIGKILL, said
    assert not Bundle.exists(path)
    with pytest.raises(BundleError, match="is not a bundle"):
        Bundle.open(path)
    code, said = command(*arguments)
    assert code == 0, said
    teach("reds", tmp_path / "undisturbed", **SHORT)
    assert what_it_learned(path) == what_it_learned(tmp_path / "undisturbed")


# ---- what fails ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_training(monkeypatch):
    """Fails the test if images are read or training begins."""
    monkeypatch.setattr(learning, "load_folder_task", lambda *_, **__: pytest.fail("images were read"))
    monkeypatch.setattr(TaskFit, "fit", lambda self: pytest.fail("training began"))


def test_a_loss_that_becomes_infinite_leaves_the_bundle_as_it_was(taught, teach, taught_once):
    path = taught(2)
    before = contents(path)
    with pytest.raises(DivergedError, match=r"the loss of task 'greens' became .*try a learning rate below"):
        teach("greens", path, lr=1e20)
    assert contents(path) == before
    teach("greens", path)
    assert what_it_learned(path) == what_it_learned(taught_once[3])


def test_an_error_while_writing_leaves_the_bundle_as_it_was(taught, teach, monkeypatch):
    path = taught(2)
    before = contents(path)

    def full(self, kept):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BundleChange, "store_held_out", full)
    with pytest.raises(OSError, match="No space left"):
        teach("greens", path)
    assert {name: found for name, found in contents(path).items() if name in before} == before
    with changing(Bundle.open(path)):
        pass
    assert contents(path) == before


def test_a_name_that_is_taken_is_refused_before_training(taught, teach, no_training):
    path = taught(1)
    before = contents(path)
    with pytest.raises(BundleError, match="has a task 'reds' already; choose another name, or remove it first"):
        teach("greens", path, name="reds")
    assert contents(path) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model": "resnet18"}, "has model 'test_byobnet', which cannot be changed to 'resnet18'"),
        ({"means": "phase"}, "has means 'window', which cannot be changed to 'phase'"),
        ({"size": 64}, "has size 32, which cannot be changed to 64"),
        ({"weights": "none"}, "has its weights already; leave --weights out"),
    ],
)
def test_what_a_bundle_is_made_of_cannot_be_changed(taught_once, teach, no_training, setting, message):
    with pytest.raises(BundleError, match=message):
        teach("greens", taught_once[1], **setting)


def test_what_a_bundle_is_made_of_may_be_said_again(taught, teach):
    report = teach("greens", taught(1), model="test_byobnet", means="window", size=32, epochs=1)
    assert report.task == "greens"


def test_a_folder_that_is_not_there(taught_once, teach, tmp_path):
    before = contents(taught_once[1])
    with pytest.raises(DataMissingError, match="absent"):
        teach("greens", taught_once[1], folder=tmp_path / "absent")
    assert contents(taught_once[1]) == before


def test_a_class_folder_whose_name_is_no_text(photos, teach, tmp_path, monkeypatch):
    folder = shutil.copytree(photos("reds"), tmp_path / "photos")
    try:
        (folder / "reds 0").rename(folder / os.fsdecode(b"caf\xe9"))
    except OSError:
        pytest.skip("this file system has only names that are text")
    monkeypatch.setattr(TaskFit, "fit", lambda self: pytest.fail("training began"))
    with pytest.raises(
        BundleError, match=r"the class folder 'caf\\udce9' in .*photos has an unreadable name; rename it"
    ):
        teach("reds", tmp_path / "model", folder=folder)


@pytest.mark.parametrize("settings", [{"means": "both"}, {"lr": 0}, {"size": 16}, {"epochs": 0}, {"batch": 3}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LearnSettings(**settings)


# ---- two that begin at once ------------------------------------------------------------------------------------------


def test_a_bundle_that_was_made_meanwhile_is_learned_further(teach, taught_once, tmp_path, monkeypatch):
    path, create = tmp_path / "model", learning.create_backbone

    def slow(*given):  # another process has its first task in the meantime
        monkeypatch.setattr(learning, "create_backbone", create)
        teach("reds", path, keep=0)
        return create(*given)

    monkeypatch.setattr(learning, "create_backbone", slow)
    teach("stripes", path)
    found, expected = answers(path), answers(taught_once[2])
    assert list(found) == ["reds", "stripes"]
    assert same(found, expected)


def test_a_random_start_is_the_seeds(teach, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed + len(name))
        teach("reds", tmp_path / name, weights="none", epochs=8, seed=seed)
    a, b, c = (Bundle.open(tmp_path / name) for name in "abc")
    assert a.network.weights_sha256 == b.network.weights_sha256 != c.network.weights_sha256
    assert a.manifest.lineage == b.manifest.lineage


# ---- the report ------------------------------------------------------------------------------------------------------


def two_parts(photos, root, task="reds"):
    """The same images as train/ and test/, six and four of each class."""
    for folder in photos(task).iterdir():
        for part, numbers in (("train", range(6)), ("test", range(6, 10))):
            (root / part / folder.name).mkdir(parents=True)
            for number in numbers:
                shutil.copy(folder / f"{number}.png", root / part / folder.name)
    return root


def measured(path, task, folder):
    """Accuracy of a task on the images of a folder, from the files to the percentage without the held-out store."""
    predictor = Predictor.from_bundle(path, device="cpu")
    files = sorted(folder.rglob("*.png"))
    answered = predictor.predict(torch.stack([predictor.decode(file) for file in files]), [task] * len(files), top=1)
    right = [answer.classes[0][0] == file.parent.name for file, answer in zip(files, answered, strict=True)]
    return 100 * np.mean(right)


def test_the_report_is_what_can_be_measured(teach, photos, tmp_path):
    path, folder = tmp_path / "model", two_parts(photos, tmp_path / "reds")
    first = teach("reds", path, folder=folder)
    assert (first.test_images, first.changes, first.record.classes) == (8, (), ("reds 0", "reds 1"))
    assert first.accuracy == pytest.approx(measured(path, "reds", folder / "test"))
    record = Bundle.open(path).record("reds")
    assert (record.images, len(Bundle.open(path).held_out("reds").test), record.epochs) == (12, 8, 4)
    assert record.accuracy == first.accuracy

    recorded = [first.accuracy]
    for task in ("stripes", "greens"):
        report = teach(task, path)
        changes = {change.task: change for change in report.changes}
        assert changes["reds"].before == pytest.approx(recorded[-1])
        assert changes["reds"].after == pytest.approx(measured(path, "reds", folder / "test"))
        assert changes["reds"].images == 8
        bundle = Bundle.open(path)
        assert bundle.record("reds").checked == changes["reds"].after
        with changing(bundle) as change:  # as if it had been another: what comes next must start from what is on record
            change.commit({**bundle.tasks, "reds": bundle.record("reds").model_copy(update={"checked": 12.5})})
        recorded.append(12.5)
    assert list(changes) == ["reds", "stripes"]
    assert bundle.record("reds").accuracy == first.accuracy  # stays what it was when it was learned


def test_the_reports_sizes_are_those_on_disk(taught, teach):
    path = taught(1)
    before = {file: file.stat().st_size for file in path.rglob("*.safetensors") if file.parent.name != "backbones"}
    report = teach("stripes", path)
    grown = {file.parent.name: file.stat().st_size for file in path.rglob("*.safetensors") if file not in before}
    assert (report.record.file.bytes, report.record.held_out.bytes) == (grown["tasks"], grown["held-out"])
    net = Bundle.open(path).load_network(["stripes"])
    assert report.numbers == net.numbers_per_task == 6035


def test_a_folder_without_parts_is_split(teach, tmp_path):
    report = teach("reds", tmp_path / "model")
    assert report.test_images == 4
    assert Bundle.open(tmp_path / "model").record("reds").images == 16


def test_nothing_is_kept_when_nothing_is_asked_for(taught, teach):
    path = taught(1)
    assert LearnSettings().keep == 0
    report = teach("stripes", path, keep=0, epochs=1)
    bundle = Bundle.open(path)
    assert bundle.held_out("stripes") is None
    record = bundle.record("stripes")
    assert (record.held_out, record.checked) == (None, None)
    assert record.accuracy == record.newest_accuracy == report.accuracy
    assert len(list((path / "held-out").iterdir())) == 1
    later = teach("greens", path, epochs=1)
    assert [change.task for change in later.changes] == ["reds"]
    assert [task for task, accuracy in checked(path).items() if accuracy is None] == ["stripes"]


def test_fewer_are_kept_classes_in_turn(taught, teach):
    path = taught(1)
    teach("stripes", path, keep=4, epochs=1)
    labels = Bundle.open(path).held_out("stripes").test.labels.tolist()
    assert len(labels) == 4
    assert set(labels) == {0, 1, 2}


def test_a_choice_of_images_is_balanced():
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (30, 3, 9, 7), dtype=torch.uint8, generator=chance)
    images = Images(pixels, torch.arange(30), torch.tensor([0] * 20 + [1] * 8 + [2] * 2))
    kept = learning.keep_some(images, 11)
    assert kept.labels.bincount().tolist() == [5, 4, 2]
    assert torch.equal(kept.labels, images.labels[kept.rows])
    assert len(learning.keep_some(images, 100)) == 30
    assert torch.equal(learning.keep_some(images, 11).rows, kept.rows)


def test_convolutions_move_and_earlier_state_does_not(taught, teach):
    path = taught(1)
    before = Bundle.open(path)
    state, shared = before.task_state("reds"), before.load_network().shared_state_dict()
    data = (path / "tasks" / f"{before.record('reds').file.sha256}.safetensors").read_bytes()
    teach("stripes", path)
    after = Bundle.open(path)
    moved = after.load_network().shared_state_dict()
    assert moved.keys() == shared.keys()
    assert all(not torch.equal(moved[key], shared[key]) for key in shared)
    assert after.record("reds").file == before.record("reds").file
    assert (path / "tasks" / f"{after.record('reds').file.sha256}.safetensors").read_bytes() == data
    again = after.task_state("reds")
    assert all(torch.equal(again[key], state[key]) for key in state)


DIVERGED = [("confit", 1e3), ("confit", 30.0), ("bn-only", 1e4)]


@pytest.mark.parametrize(("method", "lr"), DIVERGED)
def test_a_diverged_task_is_not_committed(teach, tmp_path, method, lr):
    teach("reds", tmp_path / "model", method=method)
    before = contents(tmp_path / "model")
    with pytest.raises(DivergedError, match=r"was not learned|became"):
        teach("stripes", tmp_path / "model", lr=lr)
    assert contents(tmp_path / "model") == before


def always_the_same(head):
    for parameter in head.offered():
        parameter.data.zero_()


def never_the_last(head):
    head.linear.bias.data[-1] = -torch.inf


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (always_the_same, "33% of its training photos are right; chance level is 33%"),
        (never_the_last, "its numbers are not finite"),  # though two of three classes may be right
    ],
)
def test_a_task_that_came_out_wrong_is_not_committed(teach, tmp_path, monkeypatch, spoil, why):
    path, well = tmp_path / "model", {"lr": 0.5, "epochs": 20}
    teach("reds", path, method="linear-probe", **well)
    before, real = contents(path), TaskFit.fit

    def fit(self):
        real(self)
        self.net.reopen("stripes")
        spoil(self.net.head)
        self.net.finish_task()

    monkeypatch.setattr(TaskFit, "fit", fit)
    with pytest.raises(DivergedError, match=why):
        teach("stripes", path, **well)
    assert contents(path) == before


def test_the_last_change_is_undone_once(taught, teach, taught_once):
    path = taught(1)
    before = what_it_learned(path)
    teach("stripes", path)
    go_back(Bundle.open(path))
    after = what_it_learned(path)
    assert after == before
    assert Bundle.open(path).leftovers() == []
    with pytest.raises(BundleError, match=r"nothing of .* can be undone"):
        go_back(Bundle.open(path))
    teach("stripes", path)
    assert what_it_learned(path) == what_it_learned(taught_once[2])


def test_learning_goes_on_beside_damaged_tasks(taught, teach):
    path = taught(3)
    damage_task(path, "greens")  # the last one, which the new one would start from
    damage_task(path, "reds")
    report = teach("checks", path)
    assert [change.task for change in report.changes] == ["stripes"]
    assert list(Bundle.open(path).tasks) == ["reds", "stripes", "greens", "checks"]


def test_learning_into_a_bundle_without_tasks_says_so(taught, teach):
    path = taught(1)
    edited(path / "bundle.json", tasks={})
    with pytest.raises(BundleError, match="no task that a new one could start from"):
        teach("stripes", path)
