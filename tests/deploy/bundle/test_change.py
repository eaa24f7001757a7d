"""What a change of a bundle keeps, what it refuses, and what a change that broke off leaves."""

import hashlib
import shutil
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st

from confitune.deploy import Bundle, BundleError, changing, examine, go_back
from confitune.deploy.bundle import TaskRecord
from confitune.deploy.bundle.store import Store
from deploy.bundle.shared import NETWORK, backbone_name, by_hand, logits, read_everything, sums_name
from deploy.shared import add, backbone_of, contents_and_times as contents, damage_task

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
        change.add_task("the same", bundle.record("reds"))
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
    bundle = Bundle.open(path)
    record = bundle.record("reds")
    with changing(bundle) as change:
        change.remove_task("reds")
        change.add_task("reds", record)  # the files are there: they are kept for the state before
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


# ---- names -----------------------------------------------------------------------------------------------------------

ODD = ["a/b", "../../up", "..", "/etc/passwd", "C:\\x", 'it\'s "so"', "[/red]", "鳥 và chim", "x" * 100, "a\u3000b"]

UNREADABLE = ["", " ", " a", "a ", "a\n", "a\nb", "a\tb", "\0", "\x1b[31m", "x" * 101, "a\u2028b", "a\u200bb", "\ud800"]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_reach_no_file_outside(taught, tmp_path, name):
    path = taught(1)
    bundle, before = Bundle.open(path), {*tmp_path.rglob("*")}
    above = {*tmp_path.parent.iterdir()}
    with changing(bundle) as change:
        change.add_task(name, bundle.record("reds"))
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
            lambda: change.add_task(name, bundle.record("reds")),
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


def test_a_file_is_no_folder(teach, tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(BundleError, match=r"model cannot be made.*choose another folder"):
        teach("reds", tmp_path / "model")


# ---- changes that broke off ------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_process_go_with_the_next_change(taught):
    path = taught(1)
    before = set(contents(path))
    name = "ab" * 32
    for left in (f"tasks/{name}.safetensors", f"backbones/{name}.{'0' * 32}.partial", f"bundle.{'1' * 32}.partial"):
        (path / left).write_bytes(b"half")
    assert list(read_everything(path).tasks) == ["reds"]
    with changing(Bundle.open(path)):
        assert set(contents(path)) == before


# ---- damage to single tasks ------------------------------------------------------------------------------------------


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
def test_a_damaged_task_is_restored_by_its_file_from_a_backup(taught, of, read):
    good, path = taught(2, "good"), taught(2)
    expected, bundle = Bundle.open(good).task_state("stripes"), Bundle.open(path)
    if read:
        bundle.task_state("stripes")  # while it was whole
    damage_task(path, "stripes", -100, of)
    name = getattr(bundle.record("stripes"), of).name
    shutil.copy(good / name, path / name)
    restored = Bundle.open(path).task_state("stripes")
    assert all(torch.equal(restored[key], tensor) for key, tensor in expected.items())
    assert examine(path).findings == []


# ---- the state before the last change --------------------------------------------------------------------------------


def test_one_wrong_bit_in_the_manifest_before_is_damage_and_no_other_version(taught):
    path = taught(2)
    text = (path / "bundle.before.json").read_text()
    (path / "bundle.before.json").write_text(text.replace('"format": 4', '"format": 5'))
    bundle = Bundle.open(path)
    assert bundle.damage is None
    with pytest.raises(BundleError, match=r"bundle\.before\.json is damaged: its checksum does not match"):
        go_back(bundle)
    with changing(bundle) as change:
        change.rename_task("reds", "rot")
    assert examine(path).findings == []
    go_back(bundle)  # the change has mended it
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]


def test_a_bundle_of_one_task_that_lost_its_manifest_is_not_overwritten(taught, teach):
    path = taught(1)
    (path / "bundle.json").unlink()
    before = contents(path)
    with pytest.raises(BundleError, match="Nothing is changed while it is damaged"):
        teach("stripes", path)
    assert contents(path) == before


def test_a_change_replaces_a_damaged_manifest_before(taught):
    path = taught(2)
    old = backbone_of(path, "bundle.before.json")
    (path / "bundle.before.json").write_bytes(b"{")
    bundle, manifest = Bundle.open(path), (path / "bundle.json").read_bytes()
    assert old in bundle.leftovers()  # nothing says any more that it is needed
    with changing(bundle) as change:
        change.rename_task("reds", "rot")
    assert (path / "bundle.before.json").read_bytes() == manifest
    assert not old.exists()
    assert examine(path).findings == []


def test_a_manifest_before_that_cannot_be_written_is_no_change(taught, monkeypatch):
    path = taught(2)
    before, real = contents(path), Store.write_manifest

    def full(self, name, manifest):
        if name == "bundle.before.json":
            raise OSError(28, "No space left on device")
        real(self, name, manifest)

    monkeypatch.setattr(Store, "write_manifest", full)
    bundle = Bundle.open(path)
    with pytest.raises(OSError, match="No space left"), changing(bundle) as change:
        change.rename_task("reds", "rot")
    assert list(bundle.tasks) == ["reds", "stripes"]
    assert contents(path) == before


def test_a_change_that_ends_between_the_two_manifests_has_not_happened(taught, monkeypatch):
    path = taught(2)
    real = Store.write_manifest

    def killed(self, name, manifest):
        if name == "bundle.json":
            raise KeyboardInterrupt
        real(self, name, manifest)

    monkeypatch.setattr(Store, "write_manifest", killed)
    bundle = Bundle.open(path)
    with pytest.raises(KeyboardInterrupt), changing(bundle) as change:
        change.rename_task("reds", "rot")
    monkeypatch.undo()
    assert (path / "bundle.json").read_bytes() == (path / "bundle.before.json").read_bytes()
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]
    with pytest.raises(BundleError, match="can be undone"):
        go_back(Bundle.open(path))
    assert all(finding.remedy == "deleted" for finding in examine(path, repair=True).findings)
    assert examine(path).findings == []


# ---- what changes say ------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdefg")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "rename", "remove", "check"]), NAMES, NAMES), max_size=12))
def test_a_bundle_is_a_plain_list_of_tasks(tmp_path_factory, real, backbone, steps):
    path, plain = tmp_path_factory.mktemp("steps") / "model", {"first": 50.0}
    bundle = Bundle(path, NETWORK)
    with patch("os.fsync"), changing(bundle) as change:
        add(change, "first", real, 1, shared=backbone)
        for number, (kind, name, other) in enumerate(steps):
            if kind in ("add", "check") and name not in plain:
                checked = {"first": float(number)} if kind == "check" and "first" in plain else {}
                stored = change.store_task({"head.bias": torch.full((2,), float(number))}, "ab")
                change.add_task(name, TaskRecord(classes=("a", "b"), file=stored), checked=checked)
                plain = {**plain, name: None, **checked}
            elif kind == "rename" and name in plain and other not in plain:
                change.rename_task(name, other)
                plain = {other if task == name else task: value for task, value in plain.items()}
            elif kind == "remove" and name in plain and len(plain) > 1:
                change.remove_task(name)
                del plain[name]
        found = Bundle.open(path)
        for state in (bundle, found):
            assert [(name, record.checked) for name, record in state.tasks.items()] == [*plain.items()]
        assert bundle.leftovers() == []
    assert found.manifest.version == bundle.manifest.version
