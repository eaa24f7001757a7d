"""What a manifest may say: damage to it is noticed, and what none says is refused."""

import hashlib
import json

import pytest

from confitune.deploy import Bundle, BundleError
from confitune.deploy.bundle import TaskRecord
from confitune.deploy.bundle.format import Manifest, StoredFile, check_name
from deploy.bundle.shared import no_way_back
from deploy.shared import NETWORK, edited, flipped


def stored(folder, digit):
    return StoredFile(folder=folder, sha256=digit * 64, bytes=int(digit))


def manifest(**values):
    """Of one task that has everything a task can have."""
    files = {"file": stored("tasks", "1"), "held_out": stored("held-out", "2"), "features": stored("features", "3")}
    return Manifest(
        **{
            "network": NETWORK,
            "backbone": stored("backbones", "4"),
            "pretrained": stored("backbones", "5"),
            "sums": stored("features", "6"),
            "lineage": "7" * 64,
            "tasks": {"birds of Sāmoa": TaskRecord(classes=("iʻa", "manu"), accuracy=1 / 3, **files)},
            "versions": {"torch": "2.9"},
            "written": "2026-05-01T12:00:00+00:00",
            **values,
        }
    )


def test_a_manifest_comes_back_from_its_bytes():
    before = manifest()
    after = Manifest.from_bytes(before.to_bytes(), "here")
    assert after == before
    assert (after.version, len(after.version)) == (before.version, 12)
    said = json.loads(before.to_bytes())
    text = json.dumps({key: said[key] for key in said if key != "checksum"}, sort_keys=True, ensure_ascii=False)
    assert said["checksum"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_manifest_names_every_file_that_it_needs():
    folders = ("tasks", "held-out", "features", "backbones", "backbones", "features")
    assert manifest().files() == {f"{name}/{str(n) * 64}.safetensors" for n, name in enumerate(folders, 1)}
    bare = manifest(pretrained=None, sums=None, tasks={"a": TaskRecord(classes=("x", "y"), file=stored("tasks", "1"))})
    assert bare.files() == {f"tasks/{'1' * 64}.safetensors", f"backbones/{'4' * 64}.safetensors"}


def test_every_change_is_another_version():
    others = [
        manifest(written="2026-05-02T12:00:00+00:00"),
        manifest(lineage="8" * 64),
        manifest(sums=None),
        manifest(network=NETWORK.model_copy(update={"size": 64})),
        manifest(tasks={"birds": manifest().tasks["birds of Sāmoa"]}),
    ]
    assert len({one.version for one in (manifest(), *others)}) == 1 + len(others)


def test_a_network_says_what_its_tasks_are_learned_with():
    assert NETWORK.learner().name == "confit"
    assert NETWORK.model_copy(update={"means": "phase"}).learner().options.means == "phase"
    best = NETWORK.model_copy(update={"method": "best", "options": {"rank": 2}})
    assert (best.learner().name, best.learner().options.rank) == ("best", 2)
    with pytest.raises(BundleError, match="learned with 'later', which this confitune does not have"):
        NETWORK.model_copy(update={"method": "later"}).learner()


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
        {"format": "4"},
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


@pytest.mark.parametrize("number", [1, 2, 3])
def test_another_format_is_no_damage(taught, number):
    path = taught(2)
    edited(path / "bundle.json", format=number)
    with pytest.raises(BundleError, match=rf"was written by another version of confitune \(format {number}, not 4\)"):
        Bundle.open(path)


# ---- names -----------------------------------------------------------------------------------------------------------

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
