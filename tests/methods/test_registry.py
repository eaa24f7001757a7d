"""Methods as compositions by name."""

from dataclasses import replace

import pytest

from confitune.errors import ConfituneError
from confitune.methods import METHODS, Method, Penalty, compose, create_method, hierarchical, plain
from confitune.methods import PENALTIES as KNOWN


class L2(Method):
    name = "l2"


class Entropy(Method):
    name = "entropy"


PENALTIES = {"l2": L2, "entropy": Entropy}


def composed(name):
    return compose(name, METHODS, PENALTIES, "finetune")


@pytest.mark.parametrize("name", ["l2+confit", "confit+l2"])
def test_a_penalty_on_confit_keeps_its_schedule_and_norm(name):
    method = composed(name)
    assert method.name == name
    assert (method.schedule, method.norm) == (hierarchical, "xconv")
    assert [type(penalty) for penalty in method.hooks] == [L2]


def test_a_penalty_alone_is_on_fine_tuning():
    method = composed("l2")
    assert (method.schedule, method.norm, method.name) == (plain, "shared", "l2")
    assert [type(penalty) for penalty in method.hooks] == [L2]


def test_penalties_keep_the_order_of_the_name():
    assert [type(penalty) for penalty in composed("entropy+task-bn+l2").hooks] == [Entropy, L2]


def test_every_method_gets_penalties_of_its_own():
    first, second = composed("l2").hooks[0], composed("l2").hooks[0]
    assert first is not second


def test_bases_are_left_as_they_are():
    before = METHODS["confit"]
    composed("l2+confit")
    assert METHODS["confit"] is before
    assert METHODS["confit"].hooks == ()


@pytest.mark.parametrize(
    ("name", "unknown", "near"),
    [
        ("confitt", "confitt", "confit"),
        ("l2+fine-tune", "fine-tune", "finetune"),
        ("ll2+confit", "ll2", "l2"),
        ("ConFiT", "ConFiT", "confit"),
        ("linear_probe", "linear_probe", "linear-probe"),
    ],
)
def test_an_unknown_part_is_answered_with_the_nearest(name, unknown, near):
    with pytest.raises(ConfituneError, match="no method") as caught:
        composed(name)
    message = str(caught.value)
    assert f"no method {unknown!r}: did you mean {near!r}?" in message
    assert all(known in message for known in (*METHODS, *PENALTIES))


@pytest.mark.parametrize("name", ["", "confit+", "+l2", "xyzzy"])
def test_an_unknown_part_like_no_other_lists_what_there_is(name):
    with pytest.raises(ConfituneError, match="There are finetune, confit"):
        composed(name)


def test_two_bases_are_refused():
    with pytest.raises(ConfituneError, match=r"'confit\+finetune' names 2 base methods \(confit, finetune\); give one"):
        composed("confit+finetune")


@pytest.mark.parametrize("base", ["single-task", "joint"])
def test_penalties_without_earlier_tasks_are_refused(base):
    with pytest.raises(ConfituneError, match=f"{base}.*makes no sense"):
        composed(f"l2+{base}")


def test_every_method_by_its_name():
    assert len(METHODS) >= 9
    for name, method in METHODS.items():
        made = create_method(name)
        assert replace(made, penalties=()) == replace(method, penalties=())
        assert [part.options for part in made.hooks] == [part.options for part in method.hooks]
        assert not set(map(id, made.hooks)) & set(map(id, method.hooks))  # each run has its own
        assert method.name == name
        assert method.summary


def test_the_parts_of_a_preset_have_options_and_are_there_once():
    method = create_method("best+mas", {"conv-step": {"factor": 0.5}})
    assert [part.name for part in method.hooks] == ["probe", "conv-step", "mas"]
    assert method.hooks[1].options.factor == 0.5
    assert create_method("best").hooks[1].options.factor == pytest.approx(1 / 3)
    with pytest.raises(ConfituneError, match="best has conv-step already"):
        create_method("best+conv-step")


@pytest.mark.parametrize(
    ("name", "norm", "separate", "joint"),
    [
        ("finetune", "shared", False, False),
        ("confit", "xconv", False, False),
        ("hierarchical", "shared", False, False),
        ("finetune-xconv", "xconv", False, False),
        ("task-bn", "task", False, False),
        ("bn-only", "task", False, False),
        ("linear-probe", "frozen", False, False),
        ("single-task", "shared", True, False),
        ("joint", "shared", False, True),
    ],
)
def test_what_each_method_does_to_batch_norm(name, norm, separate, joint):
    method = METHODS[name]
    assert (method.norm, method.separate, method.joint) == (norm, separate, joint)


def test_the_ablation_is_two_schedules_by_two_norms():
    cases = {name: (METHODS[name].schedule, METHODS[name].norm) for name in ("finetune", "hierarchical")}
    cases |= {name: (METHODS[name].schedule, METHODS[name].norm) for name in ("finetune-xconv", "confit")}
    assert cases == {
        "finetune": (plain, "shared"),
        "hierarchical": (hierarchical, "shared"),
        "finetune-xconv": (plain, "xconv"),
        "confit": (hierarchical, "xconv"),
    }


def test_a_penalty_that_overrides_nothing_does_nothing():
    penalty = Penalty()
    assert penalty.output_loss(None, None) is None
    assert penalty.state_dict() == {}
    assert penalty.storage() == 0


def test_own_methods_are_checked_too():
    with pytest.raises(ConfituneError, match="mine"):
        Method("mine", plain, "shared", "", penalties=(L2(),), joint=True)


def parts_of(method):
    return [(type(penalty), penalty.options) for penalty in method.hooks]


@pytest.mark.parametrize(("paper", "parts"), [("mas-cpr", "mas+cpr"), ("mas-afec", "mas+afec")])
def test_the_papers_names_stand_for_compositions(paper, parts):
    options = {"mas": {"strength": 7}, "cpr": {"beta": 0.2}, "afec": {"strength": 3}}
    found, expected = create_method(paper, options), create_method(parts, options)
    assert found.name == paper
    assert parts_of(found) == parts_of(expected)
    assert [penalty.name for penalty in found.hooks] == parts.split("+")
    assert (found.schedule, found.norm) == (plain, "shared")
    assert found.hooks[0].options.strength == 7


def test_the_papers_names_can_be_composed_further():
    method = create_method("confit+mas-afec")
    assert [penalty.name for penalty in method.hooks] == ["mas", "afec"]
    assert (method.schedule, method.norm) == (hierarchical, "xconv")


def test_options_reach_their_part_and_no_other():
    options = {"ewc": {"strength": 5, "fisher": "exact"}, "cpr": {"beta": 0.5}, "si": {"damping": 0.3}}
    ewc, cpr = create_method("ewc+cpr", options).hooks
    assert ewc.options.model_dump() == {"strength": 5.0, "fisher": "exact", "mode": "eval"}
    assert cpr.options.model_dump() == {"beta": 0.5}
    (mas,) = create_method("mas", options).hooks
    assert mas.options == type(mas)().options


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ewc", {"strenght": 3}, ["options of ewc", "strenght", "strength, fisher, mode"]),
        ("ewc", {"fisher": "diagonal"}, ["options of ewc", "fisher", "'batch', 'exact', 'sampled' or 'empirical'"]),
        ("ewc", {"strength": -1}, ["options of ewc", "strength", "greater than or equal to 0"]),
        ("si", {"damping": 0}, ["options of si", "damping", "greater than 0"]),
        ("si", {"strength": "much"}, ["options of si", "strength", "number"]),
        ("rwalk", {"new_share": 1.1}, ["options of rwalk", "new_share", "less than or equal to 1"]),
        ("rwalk", {"new_share": 0}, ["options of rwalk", "new_share", "greater than 0"]),
        ("mas", {"output": "max", "gradients": "all"}, ["output", "'norm' or 'squared'", "gradients"]),
        ("cpr", {"strength": 1}, ["options of cpr", "strength", "there are: beta"]),
        ("afec", {"form": "last"}, ["options of afec", "'first' or 'alternating'"]),
    ],
)
def test_wrong_options_are_named_with_those_there_are(name, options, words):
    with pytest.raises(ConfituneError) as caught:
        create_method(name, {name: options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["finetune", "confit", "linear-probe", "joint"])
def test_options_of_a_base_that_has_none_are_refused(name):
    with pytest.raises(ConfituneError, match=f"{name} has no options, got lr, depth"):
        create_method(name, {name: {"lr": 1, "depth": 2}})
    assert create_method(name, {name: {}}) == METHODS[name]


@pytest.mark.parametrize("name", ["ewc+ewc", "mas-cpr+mas", "cpr+mas-cpr", "confit+confit", "mas-afec+mas-cpr"])
def test_a_part_twice_is_refused(name):
    with pytest.raises(ConfituneError, match="names a part twice") as caught:
        create_method(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("penalty", ["ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec"])
@pytest.mark.parametrize(
    ("base", "why"),
    [
        ("linear-probe", "the backbone never moves"),
        ("ccll", "the backbone never moves"),
        ("joint", "no sense where there are none"),
        ("single-task", "no sense where there are none"),
    ],
)
def test_penalties_are_refused_where_there_is_nothing_to_hold(base, why, penalty):
    with pytest.raises(ConfituneError, match=rf"{base}\+{penalty}: .*{why}"):
        create_method(f"{base}+{penalty}")


@pytest.mark.parametrize("base", ["finetune", "confit", "hierarchical", "finetune-xconv", "task-bn"])
def test_penalties_go_with_every_base_that_moves_shared_weights(base):
    method = create_method(f"{base}+ewc")
    assert (method.schedule, method.norm) == (METHODS[base].schedule, METHODS[base].norm)


@pytest.mark.parametrize(("name", "near"), [("ewcc", "ewc"), ("mas+afce", "afec"), ("mas-cpr+rwallk", "rwalk")])
def test_an_unknown_penalty_is_answered_with_the_nearest(name, near):
    with pytest.raises(ConfituneError, match=f"did you mean {near!r}"):
        create_method(name)


def test_every_penalty_by_its_name():
    assert list(KNOWN) == ["ewc", "si", "rwalk", "mas", "cpr", "afec", "averaging", "conv-step", "probe"]
    for name, penalty in KNOWN.items():
        assert penalty.name == name
        assert penalty.summary
        assert penalty.reference or name in ("conv-step", "probe")
        assert all(field.description for field in penalty.Options.model_fields.values())


def test_the_default_strengths():
    chosen = {name: penalty().options for name, penalty in KNOWN.items()}
    strengths = {name: options.strength for name, options in chosen.items() if hasattr(options, "strength")}
    assert strengths == {"ewc": 300.0, "si": 10.0, "rwalk": 10.0, "mas": 30.0, "afec": 10.0}
