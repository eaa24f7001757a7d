"""Methods by name, combined, and from files of a user's own."""

import re

import pytest

from confitune.engine import TrainSettings, fit
from confitune.errors import ConfituneError
from confitune.methods import METHODS, create_method, hierarchical, method_classes

ADDED = ("ewc", "si", "rwalk", "mas", "cpr", "afec")  # what says neither what tasks own nor when it is trained


def kinds(method):
    return [part.kind for part in method.parts()]


def stages(method):
    return [method.stages(10, index) for index in (0, 1)]


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_every_method_is_described():
    ours = {name: kind for name, kind in METHODS.items() if kind.__module__.startswith("confitune.methods.")}
    assert set(ours) == {
        *("finetune", "linear-probe", "single-task", "joint", "bn-only", "task-bn", "first-session", "lora", "lda"),
        *("confit", "hierarchical", "finetune-xconv", "best", "ccll"),
        *ADDED,
    }
    for name, kind in ours.items():
        method = create_method(name)
        assert (type(method), method.name, method.added, method.hooks) == (kind, name, (), (method,))
        assert method.summary
        assert method.cost
        assert all(field.description for field in method.Options.model_fields.values())
        assert {*method.settings, *method.photos} <= set(TrainSettings.model_fields)
        assert method.is_base() == (name not in ADDED)
        assert method.reference or name not in ADDED


XCONV = "XconvNorms(window, running)"
OWN = "Norms(affine, own moments, from previous)"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("finetune", ["Head"]),
        ("confit", [XCONV, "Head"]),
        ("hierarchical", ["Head"]),
        ("finetune-xconv", [XCONV, "Head"]),
        ("task-bn", [OWN, "Head"]),
        ("bn-only", [OWN, "Head"]),
        (
            "best",
            ["Norms(affine, pretrained moments, from previous)", "Moments", "Deltas(any rank, from previous)", "Head"],
        ),
        ("lora", ["Norms(pretrained moments, from previous)", "Deltas(4, whole, from random)", "Head"]),
        ("linear-probe", ["Norms(pretrained moments, from previous)", "Head"]),
        ("ccll", ["Norms(affine, own moments, from pretrained)", "Calibrations(random, groups of 1)", "Head"]),
        ("ewc", ["Head"]),
    ],
)
def test_what_a_task_owns(make_net, name, parts):
    assert kinds(create_method(name)) == parts
    assert make_net(name).kinds == parts


def test_the_default_strengths():
    chosen = {name: create_method(name).options for name in ADDED}
    strengths = {name: options.strength for name, options in chosen.items() if hasattr(options, "strength")}
    assert strengths == {"ewc": 300.0, "si": 10.0, "rwalk": 10.0, "mas": 30.0, "afec": 10.0}


@pytest.mark.parametrize(
    ("name", "unknown", "near"),
    [
        ("confitt", "confitt", "confit"),
        ("ewc+fine-tune", "fine-tune", "finetune"),
        ("ConFiT", "ConFiT", "confit"),
        ("linear_probe", "linear_probe", "linear-probe"),
        ("mas+afce", "afce", "afec"),
        ("mas-cpr+rwallk", "rwallk", "rwalk"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, unknown, near):
    with pytest.raises(ConfituneError, match="no method") as caught:
        create_method(name)
    assert f"no method {unknown!r}: did you mean {near!r}?" in str(caught.value)
    assert all(known in str(caught.value) for known in METHODS)


@pytest.mark.parametrize("name", ["", "confit+", "+ewc", "xyzzy", ":Mine"])
def test_an_unknown_name_like_no_other_lists_what_there_is(name):
    with pytest.raises(ConfituneError, match="There are finetune, "):
        create_method(name)


# ---- combined --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ewc+confit", "confit+ewc"])
def test_on_confit_another_method_leaves_parts_and_stages(name):
    method = create_method(name)
    assert method.name == name
    assert (kinds(method), stages(method)) == ([XCONV, "Head"], [hierarchical(10)] * 2)
    assert [hook.name for hook in method.hooks] == [name, "ewc"]
    assert method_classes(name) == [METHODS[part] for part in name.split("+")]


@pytest.mark.parametrize("base", ["finetune", "confit", "hierarchical", "finetune-xconv", "task-bn"])
def test_they_go_with_every_method_that_moves_shared_weights(base):
    method, alone = create_method(f"{base}+ewc"), create_method(base)
    assert type(method) is type(alone)
    assert (kinds(method), stages(method)) == (kinds(alone), stages(alone))


def test_hooks_keep_the_order_of_the_name():
    assert [hook.name for hook in create_method("si+task-bn+ewc").added] == ["si", "ewc"]
    assert [hook.name for hook in create_method("ewc+cpr").added] == ["cpr"]


def test_every_run_has_methods_of_its_own():
    first, second = create_method("ewc+confit"), create_method("ewc+confit")
    assert not set(map(id, first.hooks)) & set(map(id, second.hooks))
    assert METHODS["confit"].name == "confit"


@pytest.mark.parametrize(("paper", "parts"), [("mas-cpr", "mas+cpr"), ("mas-afec", "mas+afec")])
def test_the_papers_names_stand_for_combinations(paper, parts):
    options = {"mas": {"strength": 7}, "cpr": {"beta": 0.2}, "afec": {"strength": 3}}
    found, expected = create_method(paper, options), create_method(parts, options)
    assert found.name == paper
    assert [(type(h), h.options) for h in found.hooks] == [(type(h), h.options) for h in expected.hooks]
    assert found.options.strength == 7
    on_confit = create_method(f"confit+{paper}")
    assert [hook.name for hook in on_confit.added] == parts.split("+")
    assert kinds(on_confit) == [XCONV, "Head"]


def test_two_that_say_what_is_trained_are_refused():
    message = r"'confit\+finetune' names 2 that say what is trained and when \(confit, finetune\); give one"
    with pytest.raises(ConfituneError, match=message):
        create_method("confit+finetune")


@pytest.mark.parametrize("name", ["ewc+ewc", "mas-cpr+mas", "cpr+mas-cpr", "confit+confit", "mas-afec+mas-cpr"])
def test_a_method_twice_is_refused(name):
    with pytest.raises(ConfituneError, match="names a method twice") as caught:
        create_method(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("added", [*ADDED, "mas-cpr", "mas-afec"])
@pytest.mark.parametrize(
    ("base", "why"),
    [
        ("linear-probe", "never move the backbone"),
        ("bn-only", "never move the backbone"),
        ("best", "never move the backbone"),
        ("ccll", "never move the backbone"),
        ("first-session", "never move the backbone"),
        ("joint", "no sense where there are none"),
        ("single-task", "no sense where there are none"),
    ],
)
def test_combinations_are_refused_where_there_is_nothing_to_protect(base, why, added):
    with pytest.raises(ConfituneError, match=rf"{base}\+{added}: .*{why}"):
        create_method(f"{base}+{added}")


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_reach_their_method_and_no_other():
    options = {"ewc": {"strength": 5, "mode": "train"}, "cpr": {"beta": 0.5}, "si": {"damping": 0.3}}
    ewc, cpr = create_method("ewc+cpr", options).hooks
    assert ewc.options.model_dump() == {"strength": 5.0, "mode": "train"}
    assert cpr.options.model_dump() == {"beta": 0.5}
    assert create_method("mas", options).options == METHODS["mas"]().options


@pytest.mark.parametrize("name", ["confit", "finetune-xconv"])
def test_options_reach_the_parts(name):
    method = create_method(name, {name: {"means": "phase", "statistics": "pass"}})
    assert kinds(method) == ["XconvNorms(phase, pass)", "Head"]
    assert kinds(create_method(f"{name}+ewc", {name: {"means": "phase"}})) == ["XconvNorms(phase, running)", "Head"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ewc", {"strenght": 3}, ["options of ewc", "strenght", "strength, mode"]),
        ("ewc", {"mode": "test"}, ["options of ewc", "mode", "'eval' or 'train'"]),
        ("ewc", {"strength": -1}, ["options of ewc", "strength", "greater than or equal to 0"]),
        ("si", {"damping": 0}, ["options of si", "damping", "greater than 0"]),
        ("si", {"strength": "much"}, ["options of si", "strength", "number"]),
        ("rwalk", {"damping": 0.1}, ["options of rwalk", "damping", "there are: strength, positive, gradient"]),
        ("mas", {"output": "norm", "mode": "all"}, ["output", "there are: strength, mode", "mode"]),
        ("cpr", {"strength": 1}, ["options of cpr", "strength", "there are: beta"]),
        ("afec", {"form": "first"}, ["options of afec", "form", "there are: strength, mode"]),
        ("confit", {"means": "all"}, ["options of confit", "'window' or 'phase'"]),
        ("ccll", {"start": "zero"}, ["options of ccll", "start"]),
        ("best", {"image": 3}, ["options of best", "image", "there are: rank, owns"]),
        ("best", {"rank": -1}, ["options of best", "rank", "greater than or equal to 0"]),
        ("finetune", {"lr": 1}, ["options of finetune", "lr", "there are: none"]),
    ],
)
def test_wrong_options_are_named_with_those_there_are(name, options, words):
    with pytest.raises(ConfituneError) as caught:
        create_method(name, {name: options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- of a user's own -------------------------------------------------------------------------------------------------

MINE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from confitune.methods import Method, Options


@dataclass
class Counts:
    steps: int = 0


class MineOptions(Options):
    weight: float = 0.5
    sign: Literal["plus", "minus"] = "plus"


class Mine(Method):
    name = "%s"
    summary = "counts steps"
    Options = MineOptions

    def __init__(self, **options):
        super().__init__(**options)
        self.counts = Counts()

    def after_step(self, net):
        self.counts.steps += 1


class Nameless(Method):
    pass


number = 5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a user's file; what its import leaves behind is gone after the test."""
    for name in set(METHODS):
        monkeypatch.setitem(METHODS, name, METHODS[name])
    before = set(METHODS)

    def own(name="mine", text=MINE, folder="."):
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text % name if "%s" in text else text)
        return path

    yield own
    for name in set(METHODS) - before:
        del METHODS[name]


def test_a_method_from_a_file_trains(own, make_net, tasks, make_settings):
    method = create_method(f"{own()}:Mine", {"mine": {"weight": 0.25}})
    assert (type(method).name, method.options.weight, method.options.sign) == ("mine", 0.25, "plus")
    fit(make_net(method), tasks[0], method, make_settings(epochs=2))
    assert method.counts.steps == 2 * 3
    assert create_method("mine").options.weight == 0.5  # known by its name from now on


def test_a_method_from_a_file_in_the_folder_where_one_is(own, monkeypatch):
    for folder, sign in (("a", "plus"), ("b", "minus")):
        path = own(f"in_{folder}", MINE.replace('= "plus"', f'= "{sign}"'), folder)
        path = path.rename(path.with_name("mine.py"))
        monkeypatch.chdir(path.parent)
        assert create_method("mine.py:Mine").options.sign == sign


@pytest.mark.parametrize("form", ["{mine}+confit", "confit+{mine}"])
def test_a_method_from_a_file_combined(own, form):
    name = form.format(mine=f"{own()}:Mine")
    method = create_method(name, {"mine": {"sign": "minus"}, "confit": {"means": "phase"}})
    assert method.name == name
    assert kinds(method) == ["XconvNorms(phase, running)", "Head"]
    assert [(hook.name, hook.options.sign) for hook in method.added] == [("mine", "minus")]


def test_two_methods_from_files(own):
    method = create_method(f"{own('mine')}:Mine+{own('yours')}:Mine", {"yours": {"weight": 2}})
    assert [(type(hook).name, hook.options.weight) for hook in method.hooks] == [("mine", 0.5), ("yours", 2.0)]


def test_options_of_a_users_own_method_are_checked(own):
    with pytest.raises(ConfituneError, match=r"options of mine: sign: .*\(there are: weight, sign\)"):
        create_method(f"{own()}:Mine", {"mine": {"sign": "both"}})


def test_what_cannot_be_taken_from_a_file_is_named(own, tmp_path):
    with pytest.raises(ConfituneError, match=r"no method can be taken from .*none\.py: FileNotFoundError"):
        create_method(f"{tmp_path}/none.py:Mine")
    path = own()
    for attribute in ("Yours", "Nameless", "number", "MineOptions", ""):
        message = rf"mine\.py has no method {attribute!r}: a class derived from Method, with a name"
        with pytest.raises(ConfituneError, match=message):
            create_method(f"{path}:{attribute}")
    with pytest.raises(ConfituneError, match=r"no method 'confitune\.metrics:Mine'"):  # modules are not imported
        create_method("confitune.metrics:Mine")


def test_a_file_without_a_class_is_not_run_and_answered_with_how_to_write_it(own):
    path = own(text="1 / 0")
    for name in (path, f"ewc+{path}"):
        with pytest.raises(ConfituneError, match=re.escape(f"no method '{path}': write {path}:CLASS, a class in it")):
            create_method(str(name))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def :", "SyntaxError: "),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_file_that_raises_is_named_with_the_reason_and_read_again(own, text, why):
    path = own("broken", text)
    with pytest.raises(ConfituneError, match=re.escape(f"no method can be taken from {path}: {why}")):
        create_method(f"{path}:Mine")
    own("broken")
    assert type(create_method(f"{path}:Mine")).name == "broken"


def test_a_name_that_is_taken_is_refused(own):
    path = own("ewc")
    with pytest.raises(ConfituneError, match=r"there is a method 'ewc' already, in confitune\.methods\.ewc"):
        create_method(f"{path}:Mine")
    assert METHODS["ewc"].__module__ == "confitune.methods.ewc"
