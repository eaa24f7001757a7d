"""models, methods, options and doctor: what they list is what there is."""

import os
import re

from confitune.settings import DataSettings, NetworkSettings, TrainSettings
from deploy.shared import damage_task
from program import cells, refused


def test_models_shows_what_a_task_takes(confitune):
    said = confitune("models", "resnet18")
    assert said.code == 0
    assert cells(said.out, "resnet18") == ["resnet18", "11.2M", "20", "20", "24,278", "50,653"]
    assert cells(said.out, "torchvision:resnet18")[4:] == ["24,278", "50,653"]


def test_models_shows_a_few_of_many(confitune, monkeypatch):
    monkeypatch.setattr(
        "confitune.experiments.catalog.matching_models", lambda pattern: ["resnet18"] * 11 + ["vgg11_bn"] * 5
    )
    said = confitune("models", "net")
    assert sum(line.startswith("│ ") for line in said.out.splitlines()) == 12
    assert "12 of 16 that match; give more of a name for others, e.g. 'vgg11_bn'" in said.out


def test_models_fits_eighty_columns(confitune, monkeypatch):
    monkeypatch.setattr("confitune.experiments.catalog.matching_models", lambda pattern: ["resnet18"])
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    said = confitune("models", "resnet18")
    assert cells(said.out, "resnet18") == ["resnet18", "11.2M", "20", "20", "24,278", "50,653"]


def test_models_says_which_has_no_batch_norm(confitune):
    said = confitune("models", "vit_tiny_patch16_224")
    assert said.code == 0
    assert cells(said.out, "vit_tiny_patch16_224")[1] == "has no batch norm"


def test_models_with_a_pattern_that_fits_none(confitune):
    assert "no model matches 'xyzzy'" in refused(confitune("models", "xyzzy"))


def test_methods_lists_all_of_them(confitune):
    said = confitune("methods")
    assert said.code == 0
    assert cells(said.out, "confit")[3:5] == ["50,653", "0"]
    assert cells(said.out, "ewc")[3:5] == ["5,130", "22,353,024"]
    assert "a task has 10 classes, and its head is included" in " ".join(said.out.split())


def test_methods_with_a_name_shows_its_options(confitune):
    said = confitune("methods", "mas-cpr")
    assert said.code == 0
    numbers = ["0.05", "0.2", "0.02", "0.01", "0.1"]
    assert cells(said.out, "cpr.beta") == ["cpr.beta", *numbers, "weight of the entropy term"]
    assert "confitune tune mas-cpr" in said.out
    assert "no method 'mass': did you mean 'mas'?" in refused(confitune("methods", "mass"))


def test_options_lists_every_setting(confitune):
    said = confitune("options").out
    fields = {**DataSettings.model_fields, **NetworkSettings.model_fields, **TrainSettings.model_fields}
    assert all(cells(said, name)[2] for name in fields)
    assert (cells(said, "weight_decay")[1], cells(said, "epochs")[1]) == ("0.0", "")
    assert cells(said, "lr_milestones")[:2] == ["lr_milestones", "0.333, 0.667, 0.833"]
    assert cells(said, "deterministic")[1] == "false"
    assert cells(said, "cpr.beta") == ["cpr.beta", "0.05", "weight of the entropy term"]


def test_doctor_names_damage_and_mends_what_can_be_mended(confitune, taught):
    path = taught(2)
    said = confitune("doctor", path)
    assert (said.code, said.out.splitlines()[0]) == (0, f"{path}:")
    assert said.out.endswith("no damage found\n")
    assert all(f"task '{name}': " in said.out for name in ("reds", "stripes"))
    left = path / "tasks" / f"{'1' * 64}.safetensors"
    left.write_bytes(b"not committed")
    damaged = damage_task(path, "reds")
    said = confitune("doctor", path)
    assert said.code == 1
    assert re.search(rf"{left.name}.*: --repair: deleted\n", said.out)
    assert re.search(rf"{damaged.name} is damaged.*: cannot be mended here\n", said.out)
    assert left.exists()
    said = confitune("doctor", path, "--repair")
    assert (said.code, left.exists(), damaged.exists()) == (1, False, True)  # one is left
    assert re.search(rf"{left.name}.*: deleted\n", said.out)
    assert "is not a bundle" in refused(confitune("doctor", path / "tasks"))
