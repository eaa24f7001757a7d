"""What a bundle keeps, what it refuses, and that damage to it is never passed over."""

import errno
import hashlib
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from confitune.deploy import Bundle, BundleError, TaskRecord, changing, check_tasks, examine, go_back
from confitune.deploy.bundle import StoredFile
from confitune.deploy.bundle.format import check_name
from confitune.nn import XconvNorms
from confitune.tasks import load_folder_task
from deploy.shared import NETWORK as SMALLER, backbone_of, contents_and_times as contents, damage_task, edited, flipped

NETWORK = SMALLER.model_copy(update={"size": 64})


def backbone_name(path, manifest="bundle.json"):
    """The backbone that a manifest names, as `contents` calls it."""
    return backbone_of(path, manifest).relative_to(path).as_posix()


def sums_name(path, manifest="bundle.json"):
    """The sums of features that a manifest names, likewise."""
    return f"features/{json.loads((path / manifest).read_bytes())['sums']['sha256']}.safetensors"


def no_way_back(path):
    """Without what is kept of the state before the last change."""
    backbone_of(path, "bundle.before.json").unlink()
    (path / sums_name(path, "bundle.before.json")).unlink()
    (path / "bundle.before.json").unlink()
    return path


def by_hand(path, net, network=NETWORK):
    """A bundle of all tasks of a network."""
    bundle = Bundle(path, network)
    with changing(bundle) as change:
        for task, entry in net.tasks.items():
            record = TaskRecord(
                classes=entry.classes,
                file=change.store_task(net.task_state_dict(task), entry.classes),
                accuracy=87.5,
                images=12,
                epochs=3,
                learned="2026-05-01T12:00:00+00:00",
            )
            change.add_task(task, record, net.shared_state_dict(), checked={task: 75.0})
    return bundle


def same_tensors(first, second):
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


def some_pixels(count=4, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(bundle, task):
    return bundle.load_network([task]).eval()(some_pixels(), task)


# ---- in and out ------------------------------------------------------------------------------------------------------


def test_a_bundle_made_by_hand_reopens_as_it_was(trained, images, tmp_path):
    net = trained("test_byobnet")
    states = {task: net.task_state_dict(task) for task in net.tasks}
    made = by_hand(tmp_path / "model", net)
    again = Bundle.open(tmp_path / "model")
    assert list(again.tasks) == ["pets", "birds"]
    assert again.tasks == made.tasks
    assert again.record("pets").classes == ("cat", "dog", "hare")
    assert (again.record("pets").accuracy, again.record("pets").images, again.record("pets").epochs) == (87.5, 12, 3)
    assert again.network == NETWORK
    assert [record.checked for record in again.tasks.values()] == [75.0, 75.0]
    assert (again.manifest.lineage, again.manifest.version, again.manifest.written) == (
        made.manifest.lineage,
        made.manifest.version,
        made.manifest.written,
    )
    assert again.held_out("pets") is None
    loaded = again.load_network(["pets", "birds"])
    assert loaded.current_task == "birds"
    for task, state in states.items():
        assert same_tensors(again.task_state(task), state)
        with torch.no_grad():
            assert torch.equal(net.eval()(images(), task), loaded.eval()(images(), task))


def test_a_learned_bundle_reopens_with_the_same_logits(taught):
    path = taught(2)
    bundle, again = Bundle.open(path), Bundle.open(str(path))
    assert list(again.tasks) == ["reds", "stripes"]
    assert again.record("stripes").classes == ("stripes 0", "stripes 1", "stripes 2")
    assert (again.record("reds").images, again.record("stripes").images) == (16, 24)
    stored = again.record("reds").file
    assert stored.bytes == (path / "tasks" / f"{stored.sha256}.safetensors").stat().st_size
    for task in bundle.tasks:
        assert same_tensors(bundle.task_state(task), again.task_state(task))
        assert torch.equal(logits(bundle, task), logits(again, task))
    assert not torch.equal(logits(bundle, "reds"), logits(bundle, "stripes")[:, :2])


def test_the_same_tensors_are_the_same_file(taught):
    path = taught(1)
    bundle = Bundle.open(path)
    before = contents(path)
    with changing(bundle) as change:
        for _ in range(5):  # safetensors' own order of several metadata entries would differ before long
            assert change.store_task(bundle.task_state("reds"), ["reds 0", "reds 1"]) == bundle.record("reds").file
            assert change.store_held_out(bundle.held_out("reds").test) == bundle.record("reds").held_out
        assert bundle.leftovers() == []
    assert contents(path) == before


def test_files_are_text_or_safetensors_that_say_what_they_are(taught):
    path = taught(2)
    endings = {"bundle.json": 1, "bundle.before.json": 1, ".safetensors": 11}
    files = [file for file in path.rglob("*") if file.is_file() and file.name != ".lock"]
    assert sum(endings.values()) == len(files)
    for file in files:
        data = file.read_bytes()
        assert not data.startswith((b"PK", b"\x80"))  # a zip, a pickle
        assert b"PK\x03\x04" not in data or file.parent.name == "held-out"  # which may have it among its pixels
        if file.suffix == ".safetensors":
            assert hashlib.sha256(data).hexdigest() == file.stem
        else:
            assert json.loads(data)["format"] == 3
    with safe_open(path / "tasks" / f"{Bundle.open(path).record('reds').file.sha256}.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["confitune"])
    assert (about["holds"], about["classes"]) == ("tasks", ["reds 0", "reds 1"])
    assert (about["model"], about["means"], about["size"]) == ("test_byobnet", "window", 32)


def test_kept_images_are_the_test_images_bit_for_bit(taught_once, photos, decoded):
    bundle = Bundle.open(taught_once[1])
    task = load_folder_task(photos("reds"), "reds", mean=(0,) * 3, std=(1,) * 3, cache_dir=decoded)
    pixels, labels = task.test.batch(torch.arange(4))
    kept = bundle.held_out("reds")
    assert kept.test.labels.tolist() == labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(kept.test.pixels, pixels)


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_rename_keeps_order_files_and_accuracy(taught):
    path = taught(3)
    bundle, before, expected = Bundle.open(path), contents(path), logits(Bundle.open(path), "reds")
    accuracy = bundle.record("reds").checked
    two_changes_ago = {backbone_name(path, "bundle.before.json"), sums_name(path, "bundle.before.json")}
    with changing(bundle) as change:
        change.rename_task("reds", "red things")
    for found in (bundle, Bundle.open(path)):
        assert list(found.tasks) == ["red things", "stripes", "greens"]
        assert found.record("red things").checked == accuracy
        assert torch.equal(logits(found, "red things"), expected)
    after = contents(path)
    assert set(before) - set(after) == two_changes_ago
    changed = {name for name in after if after.get(name) != before.get(name)}
    assert changed == {"bundle.json", "bundle.before.json"}
    with changing(bundle) as change, pytest.raises(BundleError, match="has a task 'stripes' already"):
        change.rename_task("red things", "stripes")
    with (
        changing(bundle) as change,
        pytest.raises(BundleError, match="no task 'reds'; it has 'red things', 'stripes', 'gre"),
    ):
        change.rename_task("reds", "x")


def test_a_removed_tasks_files_go_with_the_next_change_and_nothing_else(taught):
    path = taught(3)
    bundle, before, last = Bundle.open(path), contents(path), sums_name(path)
    two_changes_ago = {backbone_name(path, "bundle.before.json"), sums_name(path, "bundle.before.json")}
    record, expected = bundle.record("stripes"), logits(bundle, "greens")
    with changing(bundle) as change:
        change.remove_task("stripes")
    for found in (bundle, Bundle.open(path)):
        assert list(found.tasks) == ["reds", "greens"]
    assert set(before) - set(contents(path)) == two_changes_ago
    again = Bundle.open(path)  # what is kept is known to another process, too
    with changing(again) as change:
        change.rename_task("greens", "green")
    after = contents(path)
    gone = {f"tasks/{record.file.sha256}.safetensors", f"held-out/{record.held_out.sha256}.safetensors"}
    gone |= {f"features/{record.features.sha256}.safetensors", last}
    assert set(before) - set(after) == gone | two_changes_ago
    assert set(after) - set(before) == {sums_name(path)}
    assert all(after[name] == before[name] for name in after if name.endswith(".safetensors") and name in before)
    assert torch.equal(logits(Bundle.open(path), "green"), expected)


def test_files_that_two_tasks_share_go_with_the_last_of_them(taught):
    path = taught(2)
    bundle = Bundle.open(path)

    def stored(folder):
        return {file.stem for file in (path / folder).iterdir()}

    before = stored("tasks"), stored("held-out")
    with changing(bundle) as change:
        change.copy_task(bundle, "reds", "the same")
        change.remove_task("reds")
        change.rename_task("stripes", "s")
        assert (stored("tasks"), stored("held-out")) == before
        change.remove_task("the same")
        assert (stored("tasks"), stored("held-out")) == before
        change.rename_task("s", "stripes")
    kept = bundle.record("stripes")
    assert stored("tasks") == {kept.file.sha256}
    assert stored("held-out") == {kept.held_out.sha256}
    assert list(Bundle.open(path).tasks) == ["stripes"]
    with pytest.raises(BundleError, match="no task 'reds'; it has 'stripes'"):
        bundle.record("reds")


def test_a_removed_task_that_comes_back_keeps_its_files(taught):
    path = taught(2)
    source, bundle = Bundle.open(taught(2, "source")), Bundle.open(path)
    with changing(bundle) as change:
        change.remove_task("reds")
        change.copy_task(source, "reds")  # the files are there: they are kept for the state before
        change.rename_task("stripes", "s")
    assert list(read_everything(path).tasks) == ["s", "reds"]


def test_the_only_task_stays(taught):
    """A new task starts from the batch norm of the one before."""
    path = taught(1)
    bundle, before = Bundle.open(path), contents(path)
    with (
        changing(bundle) as change,
        pytest.raises(BundleError, match=r"the only task of .*: delete the folder instead"),
    ):
        change.remove_task("reds")
    assert contents(path) == before


def test_copy_to_a_bundle_with_the_same_backbone(taught):
    source, target = Bundle.open(taught(2)), Bundle.open(taught(2, "target"))
    with changing(target) as change:
        change.remove_task("reds")
        change.copy_task(source, "reds", "red again")
    found = Bundle.open(target.path)
    assert list(found.tasks) == ["stripes", "red again"]
    assert found.record("red again") == source.record("reds")
    assert torch.equal(logits(found, "red again"), logits(source, "reds"))
    assert same_tensors(found.task_state("red again"), source.task_state("reds"))
    assert torch.equal(found.held_out("red again").test.pixels, source.held_out("reds").test.pixels)
    assert found.manifest.lineage == source.manifest.lineage


def test_copy_to_another_backbone_is_refused_with_the_reason(taught):
    source, target = Bundle.open(taught(3)), Bundle.open(taught(2, "target"))
    before = contents(target.path)
    reason = r"'greens' cannot be copied: the backbones of .* are not the same.*learn the task here instead"
    with changing(target) as change, pytest.raises(BundleError, match=reason):
        change.copy_task(source, "greens")
    assert contents(target.path) == before


def test_copy_between_kinds_of_means_is_refused_though_weights_agree(trained, tmp_path):
    source = by_hand(tmp_path / "window", trained("test_byobnet"))
    other = NETWORK.model_copy(update={"means": "phase"})
    target = by_hand(tmp_path / "phase", trained("test_byobnet", [XconvNorms("phase")]), other)
    assert source.manifest.lineage == target.manifest.lineage
    before = contents(target.path)
    with changing(target) as change, pytest.raises(BundleError, match="cannot be copied"):
        change.copy_task(source, "pets", "more pets")
    assert contents(target.path) == before


def test_adding_leaves_earlier_files_alone(taught, teach):
    path = taught(2)
    before, old = contents(path), Bundle.open(path)
    old_backbone, older_backbone = backbone_name(path), backbone_name(path, "bundle.before.json")
    teach("greens", path)
    after, new = contents(path), Bundle.open(path)
    kept = [name for name in before if name.startswith(("tasks/", "held-out/"))]
    assert len(kept) == 4
    assert all(after[name] == before[name] for name in kept)
    assert len(after) == len(before) + 3  # its state, its held-out images, its features
    new_backbone = backbone_name(path)
    backbones = {name for name in after if name.startswith("backbones/")}
    assert {new_backbone, old_backbone} < backbones
    assert len(backbones) == 3  # one is the network before its first task
    assert len({new_backbone, old_backbone, older_backbone}) == 3
    assert after["bundle.before.json"][0] == before["bundle.json"][0]
    lineage = f"{old.manifest.lineage} {new_backbone[len('backbones/') : -len('.safetensors')]}"
    assert new.manifest.lineage == hashlib.sha256(lineage.encode()).hexdigest()
    assert [new.record(task).file for task in old.tasks] == [record.file for record in old.tasks.values()]


def test_what_another_opened_bundle_changed_is_seen(taught):
    path = taught(2)
    first, second = Bundle.open(path), Bundle.open(path)
    with changing(first) as change:
        change.rename_task("reds", "rot")
    assert list(second.tasks) == ["reds", "stripes"]
    with changing(second) as change:
        assert list(second.tasks) == ["rot", "stripes"]
        change.remove_task("rot")
    assert list(Bundle.open(path).tasks) == ["stripes"]


def test_a_bundle_that_was_replaced_is_not_changed(taught, trained, tmp_path):
    path = taught(2)
    opened = Bundle.open(path)
    shutil.rmtree(path)
    by_hand(path, trained("test_byobnet"))
    before = contents(path)
    with pytest.raises(BundleError, match="was replaced by another bundle meanwhile"), changing(opened):
        pytest.fail("was changed")
    unaware = Bundle(path, NETWORK.model_copy(update={"size": 32}))
    with pytest.raises(BundleError, match="was replaced by another bundle meanwhile"), changing(unaware):
        pytest.fail("was changed")
    assert contents(path) == before


def test_one_process_at_a_time(taught):
    path = taught(1)
    before = contents(path)
    program = "import fcntl, sys\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)"
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", program + "\ninput()", str(path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "held\n"
        bundle = Bundle.open(path)
        busy = r"another process is changing .*model; try again when it is done"
        with pytest.raises(BundleError, match=busy), changing(bundle):
            pytest.fail("was changed")
        assert contents(path) == before
        assert list(Bundle.open(path).tasks) == ["reds"]  # reading needs no lock
        other.kill()
    with changing(Bundle.open(path)):
        pass


# ---- names -----------------------------------------------------------------------------------------------------------

ODD = ["a/b", "../../up", "..", "/etc/passwd", "C:\\x", 'it\'s "so"', "[/red]", "鳥 và chim", "x" * 100, "a\u3000b"]
UNREADABLE = ["", " ", " a", "a ", "a\n", "a\nb", "a\tb", "\0", "\x1b[31m", "x" * 101, "a\u2028b", "a\u200bb", "\ud800"]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_reach_no_file_outside(taught, tmp_path, name):
    path = taught(1)
    bundle, before = Bundle.open(path), {*tmp_path.rglob("*")}
    above = {*tmp_path.parent.iterdir()}
    with changing(bundle) as change:
        change.copy_task(bundle, "reds", name)
        change.rename_task("reds", f"{name[:98]}!")
    found = Bundle.open(path)
    assert list(found.tasks) == [f"{name[:98]}!", name]
    assert found.record(name) == found.record(f"{name[:98]}!")
    with changing(bundle) as change:
        change.remove_task(name)
    assert {*tmp_path.rglob("*")} == before
    assert {*tmp_path.parent.iterdir()} == above


@pytest.mark.parametrize("name", UNREADABLE, ids=ascii)
def test_names_that_cannot_be_read_are_refused(taught, tmp_path, teach, name):
    bundle = Bundle.open(taught(1))
    before = contents(bundle.path)
    with changing(bundle) as change:
        for attempt in (
            lambda: change.rename_task("reds", name),
            lambda: change.copy_task(bundle, "reds", name) if name else change.add_task(name, bundle.record("reds")),
        ):
            with pytest.raises(BundleError, match="a task's name must be 1 to 100 readable characters"):
                attempt()
    if name:
        with pytest.raises(BundleError, match="readable characters"):
            teach("greens", tmp_path / "new", name=name)
    assert not (tmp_path / "new").exists()
    assert contents(bundle.path) == before


# ---- folders that are no bundle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["notes.txt", "tasks/notes.txt", "held-out/cat/1.jpg", "film.partial", ".hidden"])
def test_a_folder_of_something_else_is_refused_and_left_alone(teach, tmp_path, there):
    (tmp_path / "mine" / there).parent.mkdir(parents=True)
    (tmp_path / "mine" / there).write_text("mine")
    before = {*tmp_path.rglob("*")}
    with pytest.raises(BundleError, match=r"mine is not a bundle and has .*: choose an empty folder"):
        teach("reds", tmp_path / "mine")
    assert {*tmp_path.rglob("*")} == before
    assert (tmp_path / "mine" / there).read_text() == "mine"


def test_files_of_others_inside_a_bundle_are_left_alone(taught):
    path = taught(2)
    for name in ("notes.txt", "tasks/notes.txt", "film.partial"):
        (path / name).write_text("mine")
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.remove_task("reds")
    for name in ("notes.txt", "tasks/notes.txt", "film.partial"):
        assert (path / name).read_text() == "mine"


def test_a_bundle_that_lost_its_heads_is_not_taken_for_leftovers(taught, teach):
    path = no_way_back(taught(2))
    (path / "bundle.json").unlink()
    before = contents(path)
    with pytest.raises(BundleError, match=r"is not a bundle: create one with `confitune learn`"):
        Bundle.open(path)
    with pytest.raises(BundleError, match=r"holds tasks but no bundle\.json: restore it from a copy"):
        teach("greens", path)
    assert contents(path) == before


def test_a_file_is_no_folder(teach, tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(BundleError, match=r"model cannot be made.*choose another folder"):
        teach("reds", tmp_path / "model")


def test_an_empty_bundle_says_so(tmp_path):
    with pytest.raises(BundleError, match="has no tasks yet"):
        _ = Bundle(tmp_path / "model", NETWORK).manifest.lineage


# ---- damage ----------------------------------------------------------------------------------------------------------


def read_everything(path):
    bundle = Bundle.open(path)
    for task in bundle.tasks:
        bundle.task_state(task)
        bundle.held_out(task)
        bundle.features(task)
    bundle.label_space()
    bundle.load_pretrained()
    return bundle.load_network(list(bundle.tasks))


def test_flipped_bytes_of_the_manifest_are_noticed(taught):
    path, name = no_way_back(taught(2)), "bundle.json"
    file = path / name
    data = file.read_bytes()
    assert len(data) > 800
    for position in range(0, len(data), 3):
        file.write_bytes(flipped(data, position))
        with pytest.raises(BundleError, match=name):
            Bundle.open(path)
    file.write_bytes(data)
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]


@pytest.mark.parametrize(("folder", "files"), [("backbones", 2), ("tasks", 2), ("held-out", 2), ("features", 3)])
def test_flipped_bytes_of_tensors_are_noticed(taught, folder, files):
    path = no_way_back(taught(2))
    flips = 0
    for file in (path / folder).iterdir():
        data = file.read_bytes()
        for share in range(9):  # the first byte, the last, and between
            position = min(share * len(data) // 8, len(data) - 1)
            file.write_bytes(flipped(data, position))
            with pytest.raises(BundleError, match=rf"{file.name} is damaged: its checksum does not match its name"):
                read_everything(path)
            flips += 1
        file.write_bytes(data)
    assert flips == 9 * files
    assert list(read_everything(path).tasks) == ["reds", "stripes"]


def test_truncated_longer_and_missing_files_are_noticed(taught):
    path = no_way_back(taught(2))
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"]
    assert len(files) == 10
    for file in files:
        data = file.read_bytes()
        for cut in (data[: len(data) // 2], data[:-2], b""):
            file.write_bytes(cut)
            with pytest.raises(BundleError, match=file.name):
                read_everything(path)
        file.write_bytes(data + b"x")
        with pytest.raises(BundleError, match=file.name):
            read_everything(path)
        file.unlink()
        with pytest.raises(BundleError, match=rf"{file.name} cannot be read|is not a bundle"):
            read_everything(path)
        file.write_bytes(data)
    assert list(read_everything(path).tasks) == ["reds", "stripes"]


def test_leftovers_of_a_killed_process_go_with_the_next_change(taught):
    path = taught(1)
    before = set(contents(path))
    name = "ab" * 32
    for left in (f"tasks/{name}.safetensors", f"backbones/{name}.{'0' * 32}.partial", f"bundle.{'1' * 32}.partial"):
        (path / left).write_bytes(b"half")
    assert list(read_everything(path).tasks) == ["reds"]
    with changing(Bundle.open(path)):
        assert set(contents(path)) == before


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "7", '{"checksum": 3}', "[" * 100_000, "\xff", '{"format": "1", "checksum": ""}']
)
def test_other_json_is_no_manifest(tmp_path, text):
    (tmp_path / "bundle.json").write_text(text, encoding="latin-1")
    with pytest.raises(BundleError, match=r"bundle\.json is damaged"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"format": "3"},
        {"tasks": []},
        {"written": 3},
        {"lineage": "../../x"},
        {"backbone": {"folder": "backbones", "sha256": "../../../etc/passwd", "bytes": 3}},
        {"backbone": {"folder": "..", "sha256": "0" * 64, "bytes": 3}},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_says_what_none_says_is_refused(taught, values):
    path = taught(1)
    edited(path / "bundle.json", **values)
    (path / "bundle.before.json").unlink()
    with pytest.raises(BundleError, match=r"bundle\.json is damaged or not a bundle"):
        Bundle.open(path)


def test_a_file_with_another_content_under_its_true_hash_is_no_tensor(taught):
    path = taught(1)
    bundle = Bundle.open(path)
    data = b"\x80\x04\x95 a pickle"
    stored = StoredFile(folder="tasks", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    with changing(bundle) as change:
        (path / "tasks" / f"{stored.sha256}.safetensors").write_bytes(data)
        change.add_task("bad", bundle.record("reds").model_copy(update={"file": stored}))
    with pytest.raises(BundleError, match="holds no tensors"):
        Bundle.open(path).task_state("bad")


# ---- damage to single tasks, and no locks ----------------------------------------------------------------------------


def test_learning_goes_on_beside_damaged_tasks(taught, teach):
    path = taught(3)
    damage_task(path, "greens")  # the last one, which the new one would start from
    damage_task(path, "reds")
    report = teach("checks", path)
    assert [change.task for change in report.changes] == ["stripes"]
    assert list(Bundle.open(path).tasks) == ["reds", "stripes", "greens", "checks"]


@pytest.mark.parametrize("of", ["held_out", "features"])
def test_damage_to_what_is_kept_of_photos_costs_nothing_else(taught, teach, of):
    path = taught(3)
    damage_task(path, "reds", -100, of)
    damage_task(path, "greens", -100, of)
    teach("checks", path)
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.remove_task("reds")
    assert list(bundle.tasks) == ["stripes", "greens", "checks"]
    guessed = {"held_out": ("stripes", "greens", "checks"), "features": ("stripes", "checks")}[of]
    assert Bundle.open(path).label_space().tasks == guessed


@pytest.mark.parametrize(
    ("of", "read"), [("file", False), ("file", True), ("held_out", False), ("features", False)], ids=str
)
def test_a_damaged_task_is_restored_from_a_copy(taught, of, read):
    good, path = taught(2, "good"), taught(2)
    expected, bundle = Bundle.open(good).task_state("stripes"), Bundle.open(path)
    if read:
        bundle.task_state("stripes")  # while it was whole
    damage_task(path, "stripes", -100, of)
    with changing(bundle) as change:
        change.remove_task("stripes")
        change.copy_task(Bundle.open(good), "stripes")
    restored = Bundle.open(path).task_state("stripes")
    assert all(torch.equal(restored[key], tensor) for key, tensor in expected.items())
    assert examine(path).findings == []


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("locks", [None, SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4)], ids=["Windows", "NFS"])
def test_nothing_is_changed_without_a_lock(taught, monkeypatch, locks):
    path = taught(2)
    before = contents(path)
    monkeypatch.setattr("confitune.files.fcntl", locks)
    with pytest.raises(BundleError, match="cannot be locked"), changing(Bundle.open(path)):
        pytest.fail("it was changed")
    with pytest.raises(BundleError, match="cannot be locked"):
        go_back(Bundle.open(path))
    assert contents(path) == before


def test_one_wrong_bit_in_the_manifest_before_is_damage_and_no_other_version(taught):
    path = taught(2)
    text = (path / "bundle.before.json").read_text()
    (path / "bundle.before.json").write_text(text.replace('"format": 3', '"format": 2'))
    bundle = Bundle.open(path)
    assert bundle.damage is None
    with pytest.raises(BundleError, match=r"bundle\.before\.json is damaged: its checksum does not match"):
        go_back(bundle)
    with changing(bundle) as change:
        change.rename_task("reds", "rot")
    assert examine(path).findings == []
    go_back(bundle)  # the change has mended it
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]


def test_learning_into_a_bundle_without_tasks_says_so(taught, teach):
    path = taught(1)
    edited(path / "bundle.json", tasks={})
    with pytest.raises(BundleError, match="no task that a new one could start from"):
        teach("stripes", path)


# ---- names, and files that are not what they should be ---------------------------------------------------------------

EVIL = ("\x1b[2J", "a\nb", "a\rb", "\u202egnp.exe", "\x9b31m", "a\u2028b")


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("place", ["task", "class", "learned", "model", "weights", "written"])
def test_names_that_a_terminal_would_obey_are_refused_on_reading(taught, name, place):
    path = taught(1)
    (path / "bundle.before.json").unlink()
    said = json.loads((path / "bundle.json").read_bytes())
    record = said["tasks"]["reds"]
    if place == "task":
        said["tasks"] = {name: record}
    elif place == "class":
        record["classes"][0] = name
    else:
        {"learned": record, "written": said}.get(place, said["network"])[place] = name
    edited(path / "bundle.json", **said)
    with pytest.raises(BundleError, match="damaged") as refused:
        Bundle.open(path)
    assert name not in str(refused.value)


def test_names_of_other_scripts_are_names():
    for name in ("می\u200cخواهم", "鳥", "👩\u200d🔬", "a\u3000b"):
        assert check_name(name) == name


@pytest.mark.parametrize(
    "wrong", [{"labels": torch.tensor([0, 7])}, {"labels": torch.tensor([0])}, {"pixels": torch.zeros(2)}, {}]
)
def test_held_out_images_that_are_none_are_damaged(taught, wrong):
    bundle = Bundle.open(taught(1))
    kept = {"pixels": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "labels": torch.tensor([0, 1]), **wrong}
    kept = kept if wrong else {"pixels": kept["pixels"]}
    with changing(bundle) as change:
        record = bundle.record("reds").model_copy(update={"held_out": bundle.files.store("held-out", kept)})
        change.add_task("again", record)
    with pytest.raises(BundleError, match="held-out images of task 'again' are damaged"):
        check_tasks(bundle, "cpu")


def test_a_bundle_of_one_task_that_lost_its_manifest_is_not_overwritten(taught, teach):
    path = taught(1)
    (path / "bundle.json").unlink()
    before = contents(path)
    with pytest.raises(BundleError, match="Nothing is changed while it is damaged"):
        teach("stripes", path)
    assert contents(path) == before
