"""Options are made from settings: their help, their choices, and what is said of a wrong one."""

import re
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from confitune import cli
from confitune.cli.options import FIELDS, CommandGroup, default_of, settings_option, with_settings
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


# ---- how they are made -----------------------------------------------------------------------------------------------


def test_defaults_in_words():
    expected = {"lr": "0.01", "deterministic": "false", "lr_milestones": "0.333, 0.667, 0.833", "tasks": ""}
    assert {name: default_of(name) for name in expected} == expected
    assert (default_of("epochs"), default_of("batch_size")) == ("", "")  # the dataset's own win over the field's


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_an_option_says_what_its_setting_says(name):
    kind, option = get_args(settings_option(name, "the paper's"))
    assert type(None) in get_args(kind)  # not given
    assert (option.help, option.show_default) == (FIELDS[name].description, "the paper's")
    assert option.rich_help_panel in ("Data", "Network", "Training")
    _, option = get_args(settings_option(name))
    assert option.show_default == (default_of(name) or False)


def test_choices_are_shown_and_a_switch_has_no_opposite():
    assert get_args(settings_option("means"))[1].metavar == "[window|phase]"
    assert get_args(settings_option("means"))[0] == str | None
    assert get_args(settings_option("lr"))[1].metavar is None
    app, asked = typer.Typer(cls=CommandGroup), []
    app.command()(with_settings("deterministic")(lambda **settings: asked.append(settings)))
    ends = [CliRunner().invoke(app, words).exit_code for words in ([], ["--deterministic"], ["--no-deterministic"])]
    assert (ends, asked) == ([0, 0, 2], [{}, {"deterministic": True}])


def test_a_command_gets_what_was_given_and_a_place_with_its_options():
    app, asked = typer.Typer(cls=CommandGroup), []

    def place(console, on: str = "local", share: float = 1.0):
        return console, on, share

    @app.command(name="go")
    @with_settings("lr", "means", "batch_size", place=place)
    def go(place, what: str, often: int = 1, **settings):
        asked.append((what, often, settings, place("console")))

    @app.command(name="stay")
    @with_settings("lr")
    def stay(**settings):
        asked.append(settings)

    calls = ["go there", "go there --often 3 --lr 0.5 --means phase --on head --share 0.2", "stay", "stay --lr 1"]
    for call in calls:
        assert CliRunner().invoke(app, call.split()).exit_code == 0
    assert asked == [
        ("there", 1, {}, ("console", "local", 1.0)),
        ("there", 3, {"lr": 0.5, "means": "phase"}, ("console", "head", 0.2)),
        {},
        {"lr": 1.0},
    ]
