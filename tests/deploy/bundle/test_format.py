"""What a manifest may say: damage to it is noticed, and what none says is refused."""

import json

import pytest

from confitune.deploy import Bundle, BundleError
from confitune.deploy.bundle.format import check_name
from deploy.bundle.shared import no_way_back
from deploy.shared import edited, flipped


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


@pytest.mark.parametrize("number", [1, 2, 4])
def test_another_format_is_no_damage(taught, number):
    path = taught(2)
    edited(path / "bundle.json", format=number)
    with pytest.raises(BundleError, match=rf"was written by another version of confitune \(format {number}, not 3\)"):
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
