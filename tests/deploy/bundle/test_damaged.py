"""A damaged bundle goes back to what it was before its last change, says so, and changes nothing until it is mended."""

import importlib
import logging
import shutil

import pytest
import torch

from confitune.deploy import Bundle, BundleError, changing, examine
from confitune.deploy.bundle.store import Store
from deploy.shared import answers, backbone_of, contents, flipped

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name


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
    assert f"{path} is used as it was before its last change, on {bundle.manifest.written}" in said
    assert str(file) in bundle.damage
    assert list(bundle.tasks) == ["reds"]
    assert bundle.manifest.lineage == Bundle.open(taught_once[1]).manifest.lineage
    return True


# ---- what is damaged -------------------------------------------------------------------------------------------------


def test_a_whole_bundle_warns_of_nothing(taught, warned):
    bundle = Bundle.open(taught(2))
    assert (list(bundle.tasks), bundle.damage) == (["reds", "stripes"], None)
    assert warned() == []


def test_a_flipped_byte_of_the_manifest_goes_back(taught, taught_once, warned):
    path = taught(2)
    manifest = path / "bundle.json"
    data = manifest.read_bytes()
    for position in range(0, len(data), 5):
        manifest.write_bytes(flipped(data, position))
        assert as_before(path, manifest, taught_once, warned)
    for other in (data[:-2], data + b"x", b"", b"null"):
        manifest.write_bytes(other)
        assert as_before(path, manifest, taught_once, warned)


def test_a_wrong_bit_in_the_number_of_the_format_goes_back(taught, taught_once, warned):
    path = taught(2)
    text = (path / "bundle.json").read_text()
    (path / "bundle.json").write_text(text.replace('"format": 4', '"format": 5'))
    assert as_before(path, path / "bundle.json", taught_once, warned)


@pytest.mark.parametrize("how", ["manifest gone", "backbone gone", "backbone cut", "backbone flipped"])
def test_the_state_before_answers_as_it_did(taught, taught_once, warned, how):
    path = taught(2)
    name, _, done = how.partition(" ")
    file = {"manifest": path / "bundle.json", "backbone": backbone_of(path)}[name]
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


def test_a_bundle_of_one_task_has_a_second_copy_of_its_manifest(taught, taught_once):
    path = taught(1)
    (path / "bundle.json").unlink()
    assert torch.equal(answers(path)["reds"], answers(taught_once[1])["reds"])
    assert len(examine(path, repair=True).findings) == 1
    assert contents(path) == contents(taught_once[1])


def test_where_both_states_are_damaged_the_newest_is_named(taught):
    path = taught(2)
    for name in ("bundle.json", "bundle.before.json"):
        (path / name).write_bytes(b"{")
    with pytest.raises(BundleError, match=r"bundle\.json is damaged.*restore it from a copy"):
        Bundle.open(path)
    path = taught(2, "other")
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.rename_task("reds", "rot")  # both states have one backbone
    backbone_of(path).unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.open(path)


def test_a_bundle_that_is_changed_twice_while_it_is_opened_is_not_called_damaged(
    taught, taught_once, monkeypatch, warned
):
    path, check = taught(1), Store.check

    def late(self, *file):
        monkeypatch.setattr(Store, "check", check)
        shutil.rmtree(path)
        shutil.copytree(taught_once[3], path)
        check(self, *file)

    monkeypatch.setattr(Store, "check", late)
    bundle = Bundle.open(path)
    assert list(bundle.tasks) == ["reds", "stripes", "greens"]
    assert (bundle.damage, warned()) == (None, [])


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
    with pytest.raises(BundleError, match=refused), changing(bundle):
        pytest.fail("was changed")
    assert contents(path) == before


def test_damage_that_comes_after_opening_is_seen_by_a_change(taught):
    path = taught(2)
    bundle = Bundle.open(path)
    (path / "bundle.json").write_bytes(b"{")
    with pytest.raises(BundleError, match="Nothing is changed"), changing(bundle):
        pytest.fail("was changed")


def test_a_file_that_is_restored_ends_it(taught):
    path = taught(2)
    data = (path / "bundle.json").read_bytes()
    (path / "bundle.json").write_bytes(b"{")
    bundle = Bundle.open(path)
    (path / "bundle.json").write_bytes(data)
    with changing(bundle) as change:
        assert bundle.damage is None
        change.rename_task("stripes", "s")
    assert list(Bundle.open(path).tasks) == ["reds", "s"]


# ---- mending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["manifest", "backbone"])
def test_repair_goes_back_for_good(taught, taught_once, teach, part):
    path = taught(2)
    file = path / "bundle.json" if part == "manifest" else backbone_of(path)
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
    assert Bundle.open(path).manifest.lineage == Bundle.open(taught_once[2]).manifest.lineage
    assert examine(path).findings == []
