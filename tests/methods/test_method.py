"""What a method is before it overrides anything."""

import pytest

from confitune.methods import METHODS, Method, create_method


def test_a_class_that_inherits_a_name_takes_nobodys_place():
    class Mine(METHODS["ewc"]):
        pass

    assert METHODS["ewc"] is not Mine
    assert type(create_method("ewc")) is METHODS["ewc"]


def test_a_method_that_overrides_nothing_adds_nothing():
    method = Method()
    assert method.loss(None) is None
    assert method.state_dict() == {}
    assert method.storage() == 0


def test_what_takes_part_in_steps_is_captured_for_each_task_unless_it_says_otherwise():
    def nothing(self, *args):
        return None

    for hook in ("loss", "read_gradients", "add_gradients", "after_step"):
        own = type("Own", (Method,), {hook: nothing})
        assert [own().captured_kind(index) for index in range(3)] == [0, 1, 2]
    for hook in ("begin_task", "begin_epoch", "end_task"):
        own = type("Own", (Method,), {hook: nothing})
        assert {own().captured_kind(index) for index in range(3)} == {None}


@pytest.mark.parametrize("name", METHODS)
def test_steps_of_all_later_tasks_are_captured_as_one(name):
    kinds = [create_method(name).captured_kind(index) for index in range(4)]
    assert len(set(kinds[1:])) == 1
    pulls = name in ("ewc", "si", "rwalk", "mas", "afec")
    assert (kinds[0] != kinds[1]) == pulls  # in a first task there is nothing to be pulled to
