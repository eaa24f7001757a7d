"""Options are made from settings: their help, their choices, and what is said of a wrong one."""

import re

import pytest

from confitune import cli
from confitune.experiments.runs.recipe import read_recipe
from found import run_of

COMMANDS = ("run", "tune", "reproduce")


def test_help_of_settings_is_what_the_settings_say(confitune):
    shown = {command: " ".join(confitune(command, "--help").out.replace("│", " ").split()) for command in COMMANDS}
    assert 20 <= len(set(re.findall(r"(?<= )--[a-z][a-z-]+", shown["run"])) - {"--help", "--no-resume"}) <= 25
    for said in shown.values():
        assert "learning rate (paper: 0.01) [default: (0.01)]" in said
        assert "--step [auto|eager|graph|compile]" in said
    assert "--means [window|phase]" in shown["run"]
    assert "[default: (window)]" in shown["run"]
    assert "[default: (phase)]" in shown["reproduce"]
    assert "--weight-decay" not in shown["run"]


@pytest.mark.parametrize("command", ["run", "tune"])
def test_help_shows_how_datasets_are_joined(confitune, command):
    said = " ".join(confitune(command, "--help").out.replace("│", " ").split())
    assert "photos:1-2+digits:1+photos:3-5" in said
    assert "or your own FILE.py:FUNCTION" in said
    assert "use only the first N tasks" in said


def test_help_shows_how_a_run_can_be_made_faster(confitune):
    said = confitune("run", "--help").out
    for option in ("--step", "--precision", "--parallel-seeds"):
        assert option in said


@pytest.mark.parametrize("command", [[], *([command.name] for command in cli.app.registered_commands)])
def test_help_shows_no_types_of_python_and_no_files_that_are_not_installed(confitune, command):
    said = confitune(*command, "--help").out
    assert "--help" in said
    assert not re.search(r"<(bool|list)", said)
    assert not re.search(r"\b(results|recipes|docs|examples|benchmarks)/", said)
    for recipe in set(re.findall(r"[\w-]+\.yaml", said)) - {"winner.yaml"}:  # which `tune` writes
        assert read_recipe(recipe)


def test_wrong_usage(confitune):
    said = confitune("run", "--lr", "fast")
    assert said.code == 2
    assert "--lr" in said.err
    said = confitune("run", "--epoch", "3")
    assert said.code == 2
    assert "--epochs" in said.err


@pytest.mark.parametrize("command", [["run"], ["tune", "ewc"], ["reproduce", "table2"]])
def test_a_setting_without_an_option_is_answered_with_set(confitune, command):
    said = confitune(*command, "--weight-decay", "3")
    assert said.code == 2
    assert "No such option: --weight-decay; write --set weight_decay=VALUE" in said.err


def test_every_setting_can_be_set(confitune, tiny, tmp_path):
    changes = ["weight_decay=1e-4", "lr_milestones=[0.5]", "deterministic=true", "order_seed=3", "lr=0.02", "seed=4"]
    options = [word for change in changes for word in ("--set", change)]
    said = confitune("run", *tiny, "--lr", "0.5", *options, "--method", "finetune", "--out", tmp_path / "out")
    assert said.code == 0, said.err
    result = run_of(tmp_path / "out", "finetune", 4)
    told = {name: result.config[name] for name in ("weight_decay", "lr_milestones", "order_seed", "lr")}
    assert told == {"weight_decay": 1e-4, "lr_milestones": [0.5], "order_seed": 3, "lr": 0.02}
    assert result.execution == "fp32, eager, deterministic"
