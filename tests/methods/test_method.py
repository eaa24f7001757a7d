"""Methods as compositions by name."""

import pytest

from confitune.errors import ConfituneError
from confitune.methods import METHODS, Method, Penalty, compose, create_method, hierarchical, plain


class L2(Penalty):
    name = "l2"


class Entropy(Penalty):
    name = "entropy"


PENALTIES = {"l2": L2, "entropy": Entropy}


def composed(name):
    return compose(name, METHODS, PENALTIES, "finetune")


@pytest.mark.parametrize("name", ["l2+confit", "confit+l2"])
def test_a_penalty_on_confit_keeps_its_schedule_and_norm(name):
    method = composed(name)
    assert method.name == name
    assert (method.schedule, method.norm) == (hierarchical, "xconv")
    assert [type(penalty) for penalty in method.penalties] == [L2]


def test_a_penalty_alone_is_on_fine_tuning():
    method = composed("l2")
    assert (method.schedule, method.norm, method.name) == (plain, "shared", "l2")
    assert [type(penalty) for penalty in method.penalties] == [L2]


def test_penalties_keep_the_order_of_the_name():
    assert [type(penalty) for penalty in composed("entropy+task-bn+l2").penalties] == [Entropy, L2]


def test_every_method_gets_penalties_of_its_own():
    first, second = composed("l2").penalties[0], composed("l2").penalties[0]
    assert first is not second


def test_bases_are_left_as_they_are():
    before = METHODS["confit"]
    composed("l2+confit")
    assert METHODS["confit"] is before
    assert METHODS["confit"].penalties == ()


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
        assert create_method(name) == method
        assert method.name == name
        assert method.summary


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
