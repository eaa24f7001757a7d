"""A damaged bundle goes back to what it was before its last change, says so, and changes nothing until it is mended."""

import importlib
import json
import logging
import shutil
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confitune import cli
from confitune.deploy import Bundle, BundleError, TaskRecord, examine
from confitune.deploy.format import Added, Checked, Removed, Renamed, StoredFile, TensorFiles, file_name, files_of
from confitune.deploy.journal import State
from deploy.shared import NETWORK, add, answers, backbone_of, contents, edited, flipped

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name
journal = importlib.import_module("confitune.deploy.journal")


@pytest.fixture
def warned(caplog):
    """Gives what was warned of since it was last asked."""
    caplog.set_level(logging.WARNING)

    def warned():
        said = [record.getMessage() for record in caplog.records if record.name.startswith("confitune")]
        caplog.clear()
        return said

    return warned


def as_before(path, file, taught_once, warned):
    """Whether the bundle of two tasks is the one of one task again, with a warning that names the file."""
    bundle = Bundle.open(path)
    (said,) = warned()
    assert str(file) in said
    assert f"{path} is used as it was before its last change, on {bundle.written}" in said
    assert str(file) in bundle.damage
    assert list(bundle.tasks) == ["reds"]
    assert bundle.lineage == Bundle.open(taught_once[1]).lineage
    return True


# ---- what is damaged -------------------------------------------------------------------------------------------------


def test_a_whole_bundle_warns_of_nothing(taught, warned):
    bundle = Bundle.open(taught(2))
    assert (list(bundle.tasks), bundle.damage) == (["reds", "stripes"], None)
    assert warned() == []


def test_a_flipped_byte_of_the_head_goes_back(taught, taught_once, warned):
    path = taught(2)
    head = path / "bundle.json"
    data = head.read_bytes()
    for position in range(0, len(data), 5):
        head.write_bytes(flipped(data, position))
        assert as_before(path, head, taught_once, warned)
    for other in (data[:-2], data + b"x", b"", b"null"):
        head.write_bytes(other)
        assert as_before(path, head, taught_once, warned)


@pytest.mark.parametrize("how", ["head gone", "backbone gone", "backbone cut", "backbone flipped", "index cut"])
def test_the_state_before_answers_as_it_did(taught, taught_once, warned, how):
    path = taught(2)
    name, _, done = how.partition(" ")
    file = {"head": path / "bundle.json", "backbone": backbone_of(path), "index": path / "index.jsonl"}[name]
    data = file.read_bytes()
    if done == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-3] if done == "cut" else flipped(data, len(data) // 2))
    assert Bundle.exists(path)
    assert as_before(path, file, taught_once, warned)
    found, expected = answers(path), answers(taught_once[1])
    assert found.keys() == expected.keys() == {"reds"}
    assert torch.equal(found["reds"], expected["reds"])


def test_a_flipped_byte_of_the_index_goes_back_or_is_an_error(taught, taught_once, warned):
    path = taught(2)
    index, kept = path / "index.jsonl", json.loads((path / "bundle.before.json").read_bytes())["index_bytes"]
    data = index.read_bytes()
    assert 200 < kept < len(data) - 200
    for position in range(1, len(data), 7):
        index.write_bytes(flipped(data, position))
        if position >= kept:
            assert as_before(path, index, taught_once, warned)
        else:  # what both states need
            with pytest.raises(BundleError, match=r"index\.jsonl is damaged"):
                Bundle.open(path)


def test_where_both_states_are_damaged_the_newest_is_named(taught):
    path = taught(2)
    for name in ("bundle.json", "bundle.before.json"):
        (path / name).write_bytes(b"{")
    with pytest.raises(BundleError, match=r"bundle\.json is damaged.*restore it from a copy"):
        Bundle.open(path)
    path = taught(2, "other")
    bundle = Bundle.open(path)
    with bundle.changing():
        bundle.rename_task("reds", "rot")  # both states have one backbone
    backbone_of(path).unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.open(path)


@pytest.mark.parametrize("number", [1, 3])
def test_another_format_is_no_damage(taught, number):
    path = taught(2)
    edited(path / "bundle.json", format=number)
    with pytest.raises(BundleError, match=rf"was written by another version of confitune \(format {number}, not 2\)"):
        Bundle.open(path)


def test_a_bundle_that_is_changed_twice_while_it_is_opened_is_not_called_damaged(
    taught, taught_once, monkeypatch, warned
):
    path, check = taught(1), TensorFiles.check

    def late(self, *file):
        monkeypatch.setattr(TensorFiles, "check", check)
        shutil.rmtree(path)
        shutil.copytree(taught_once[3], path)
        check(self, *file)

    monkeypatch.setattr(TensorFiles, "check", late)
    bundle = Bundle.open(path)
    assert list(bundle.tasks) == ["reds", "stripes", "greens"]
    assert (bundle.damage, warned()) == (None, [])


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


# ---- nothing is changed ----------------------------------------------------------------------------------------------


def test_a_damaged_bundle_is_not_changed(taught, teach, monkeypatch):
    path = taught(2)
    (path / "bundle.json").write_bytes(b"{")
    before = contents(path)
    refused = r"bundle\.json is damaged.*Nothing is changed while it is damaged.*`confitune doctor .*model --repair`"
    monkeypatch.setattr(learning, "load_folder_task", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(BundleError, match=refused):
        teach("greens", path)
    bundle = Bundle.open(path)
    with pytest.raises(BundleError, match=refused), bundle.changing():
        pytest.fail("was changed")
    assert contents(path) == before


def test_damage_that_comes_after_opening_is_seen_by_a_change(taught):
    path = taught(2)
    bundle = Bundle.open(path)
    (path / "bundle.json").write_bytes(b"{")
    with pytest.raises(BundleError, match="Nothing is changed"), bundle.changing():
        pytest.fail("was changed")


def test_a_file_that_is_restored_ends_it(taught):
    path = taught(2)
    data = (path / "bundle.json").read_bytes()
    (path / "bundle.json").write_bytes(b"{")
    bundle = Bundle.open(path)
    (path / "bundle.json").write_bytes(data)
    with bundle.changing():
        assert bundle.damage is None
        bundle.rename_task("stripes", "s")
    assert list(Bundle.open(path).tasks) == ["reds", "s"]


# ---- mending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["head", "backbone"])
def test_repair_goes_back_for_good(taught, taught_once, teach, part):
    path = taught(2)
    file = path / "bundle.json" if part == "head" else backbone_of(path)
    file.write_bytes(file.read_bytes()[:-3])
    before = contents(path)
    (finding,) = examine(path).findings
    assert file.name in finding.problem
    assert finding.remedy.startswith("gone back to what it was before its last change, on 20")
    assert contents(path) == before
    assert len(examine(path, repair=True).findings) == 1
    assert examine(path).findings == []
    one = contents(taught_once[1])
    assert {name for name in contents(path) if name.endswith(".safetensors")} == {
        name for name in one if name.endswith(".safetensors")
    }
    assert contents(path)["bundle.json"] == one["bundle.json"]
    assert list(Bundle.open(path).tasks) == ["reds"]
    teach("stripes", path)  # and it is learned on from there
    assert Bundle.open(path).lineage == Bundle.open(taught_once[2]).lineage
    assert (path / "index.jsonl").read_bytes().startswith(one["index.jsonl"])
    assert examine(path).findings == []


# ---- damage to what is kept for it -----------------------------------------------------------------------------------


def test_a_change_replaces_a_damaged_head_before(taught):
    path = taught(2)
    old = backbone_of(path, "bundle.before.json")
    (path / "bundle.before.json").write_bytes(b"{")
    bundle, head = Bundle.open(path), (path / "bundle.json").read_bytes()
    with bundle.changing():
        bundle.rename_task("reds", "rot")
    assert (path / "bundle.before.json").read_bytes() == head
    assert old in bundle.leftovers()  # nothing says any more that it was needed
    assert {file.parent.name for file in bundle.leftovers()} == {"backbones", "features"}
    examine(path, repair=True)
    assert examine(path).findings == []


def test_a_head_before_that_cannot_be_written_is_no_failed_change(taught, monkeypatch, warned):
    path = taught(2)
    before = contents(path)
    real = journal.write_whole

    def full(target, write):
        if target.name == "bundle.before.json":
            raise OSError(28, "No space left on device")
        real(target, write)

    monkeypatch.setattr(journal, "write_whole", full)
    bundle = Bundle.open(path)
    with bundle.changing():
        bundle.rename_task("reds", "rot")
    assert "bundle.before.json cannot be written: [Errno 28] No space left on device" in warned()[0]
    assert list(Bundle.open(path).tasks) == ["rot", "stripes"]
    assert set(contents(path)) == set(before)  # what the older state needs is still there
    monkeypatch.undo()
    (path / "bundle.json").rename(path / "aside")
    assert list(Bundle.open(path).tasks) == ["reds"]
    (path / "aside").rename(path / "bundle.json")
    with bundle.changing():
        bundle.rename_task("rot", "reds")
    assert bundle.leftovers() == []
    assert len(list((path / "backbones").iterdir())) == 2  # one is the network before its first task


# ---- the index -------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdefg")
FILES = st.sampled_from("0123")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "rename", "remove", "check"]), NAMES, NAMES, FILES), max_size=30))
def test_the_state_is_that_of_a_plain_list(steps):
    state, plain, accuracy = State(), [], {}
    for kind, name, other, file in steps:
        known = [task for task, _ in plain]
        stored = StoredFile(sha256=file * 64, bytes=1)
        if kind == "add" and name not in known:
            record = TaskRecord(classes=("a", "b"), file=stored, held_out=stored if file < "2" else None)
            assert state.happened(Added(task=name, record=record)) == []
            plain.append((name, record))
        elif kind == "rename" and name in known and other not in known:
            state.happened(Renamed(task=name, to=other))
            plain = [(other if task == name else task, record) for task, record in plain]
            accuracy = {other if task == name else task: value for task, value in accuracy.items()}
        elif kind == "remove" and name in known:
            gone = dict(plain)[name]
            assert state.happened(Removed(task=name)) == [file_name(*file) for file in files_of(gone)]
            plain = [(task, record) for task, record in plain if task != name]
            accuracy.pop(name, None)
        elif kind == "check" and name in known:
            state.happened(Checked(after=name, accuracy={name: len(plain)}))
            accuracy[name] = len(plain)
    assert list(state.tasks.items()) == plain
    assert len(state.tasks) == len(plain)
    assert state.accuracy == accuracy
    assert not plain or next(reversed(state.tasks)) == plain[-1][0]
    needed = {name for _, record in plain for name in (file_name(*file) for file in files_of(record))}
    assert state.needed() == needed


def test_an_index_that_speaks_of_no_task_is_damaged(tmp_path, real, backbone):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "a", real, 1, shared=backbone)
        add(bundle, "b", real, 2)
        bundle._state.happened(Renamed(task="b", to="c"))  # so that an event is written that cannot have been
        bundle._commit([Removed(task="c")])
    (tmp_path / "model" / "bundle.before.json").unlink()
    with pytest.raises(BundleError, match=r"line 5, is damaged: there is no task 'c'"):
        Bundle.open(tmp_path / "model")
