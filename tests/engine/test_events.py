"""Whoever listens to a run hears what happens, and need not listen to all of it."""

import inspect

from confitune.engine import Listener
from confitune.engine.events import Listeners


def hooks():
    """What a listener can be told, with as many arguments as that takes."""
    found = {name: inspect.signature(value) for name, value in vars(Listener).items() if callable(value)}
    return {name: tuple(range(len(signature.parameters) - 1)) for name, signature in found.items()}


def test_several_listeners_hear_the_same_in_order():
    heard = []

    class Hears(Listener):
        def __init__(self, name):
            self.name = name

        def __getattribute__(self, hook):
            if hook == "name" or hook.startswith("__"):
                return super().__getattribute__(hook)
            return lambda *args: heard.append((self.name, hook, args))

    both = Listeners((Hears("a"), Hears("b")))
    calls = {
        "run_started": ("confit", ["t"], 5, 0),
        "task_started": (0, "t", 0),
        "stage_started": ("head",),
        "busy_with": ("judging",),
        "step_done": (1, 3),
        "epoch_ended": ("end",),
        "task_tested": (1, 2),
        "task_ended": (0, [50.0]),
        "waiting": (bool,),
        "note": ("odd",),
    }
    for hook, args in calls.items():
        getattr(both, hook)(*args)
    assert heard == [(name, hook, args) for hook, args in calls.items() for name in "ab"]
    hooks = {name for name, value in vars(Listener).items() if callable(value)}
    assert hooks == set(calls)  # none is left out


def test_what_nobody_overrides_does_nothing():
    for listener in (Listener(), Listeners(()), Listeners((Listener(), Listener()))):
        assert [getattr(listener, hook)(*arguments) for hook, arguments in hooks().items()] == [None] * len(hooks())


def test_one_that_listens_to_one_thing_hears_that():
    notes = []

    class Notes(Listener):
        def note(self, message):
            notes.append(message)

    all_of_them = Listeners((Notes(), Listeners((Listener(), Notes()))))
    for hook, arguments in hooks().items():
        getattr(all_of_them, hook)(*arguments)
    all_of_them.note("odd")
    assert notes == [0, 0, "odd", "odd"]
