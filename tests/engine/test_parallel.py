"""Runs side by side take turns strictly, and each gives what it gives alone."""

import threading
import time

import pytest
import torch

from confitune.engine import Turns, parallel as parallel_module


def steps(turns, run, count, diary, end=None):
    """A run that writes down its steps, passing the turn on after each."""

    def work():
        listener = turns.listener(run)
        for step in range(count):
            diary.append((run, step))
            listener.step_done(step + 1, count)
        if end is not None:
            raise end
        return f"run {run}"

    return work


def test_turns_go_round_strictly_and_results_come_in_order():
    turns, diary = Turns(3), []
    results = turns.run([steps(turns, run, 4, diary) for run in range(3)])
    assert diary == [(run, step) for step in range(4) for run in range(3)]
    assert results == ["run 0", "run 1", "run 2"]


def test_only_one_runs_at_a_time():
    turns, running, most = Turns(4), [], []

    def work(run):
        for _ in range(5):
            running.append(run)
            most.append(len(running))
            time.sleep(0.002)
            running.remove(run)
            turns.pass_on(run)

    turns.run([lambda run=run: work(run) for run in range(4)])
    assert most == [1] * 20


def test_a_run_that_ends_early_does_not_block_the_others():
    turns, diary = Turns(3), []
    assert turns.run([steps(turns, run, count, diary) for run, count in enumerate((3, 1, 2))]) == [
        "run 0",
        "run 1",
        "run 2",
    ]
    assert diary == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]


def test_runs_without_a_step_are_done_one_after_the_other():
    turns, diary = Turns(3), []
    results = turns.run([lambda run=run: diary.append(run) or run * 10 for run in range(3)])
    assert (diary, results) == ([0, 1, 2], [0, 10, 20])


def test_runs_start_so_many_turns_apart():
    turns, diary = Turns(3, apart=2), []
    assert turns.run([steps(turns, run, 4, diary) for run in range(3)]) == ["run 0", "run 1", "run 2"]
    alone, two = [(0, 0), (0, 1)], [(1, 0), (0, 2), (1, 1), (0, 3)]
    assert diary == [*alone, *two, (2, 0), (1, 2), (2, 1), (1, 3), (2, 2), (2, 3)]


def test_a_run_starts_at_once_when_nobody_is_left_to_wait_for():
    turns, diary = Turns(3, apart=100), []
    assert turns.run([steps(turns, run, 2, diary) for run in range(3)]) == ["run 0", "run 1", "run 2"]
    assert diary == [(run, step) for run in range(3) for step in range(2)]


def test_an_error_stops_those_that_have_not_started():
    turns, diary = Turns(3, apart=100), []
    with pytest.raises(ValueError, match="early"):
        turns.run([steps(turns, run, 2, diary, ValueError("early")) for run in range(3)])
    assert diary == [(0, 0), (0, 1)]


def test_the_turn_is_passed_on_after_a_test_too():
    turns, diary = Turns(2), []

    def work(run):
        for done in range(2):
            diary.append((run, done))
            turns.listener(run).task_tested(done + 1, 2)

    turns.run([lambda run=run: work(run) for run in range(2)])
    assert diary == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_run_alone():
    turns, diary = Turns(1), []
    assert turns.run([steps(turns, 0, 3, diary)]) == ["run 0"]
    assert diary == [(0, 0), (0, 1), (0, 2)]


class Broken(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.mark.parametrize("error", [ValueError("run 1 is broken"), KeyboardInterrupt(), Broken()])
def test_the_first_error_stops_the_others_and_is_raised(error):
    turns, diary, threads = Turns(3), [], threading.active_count()
    ends = {1: (2, error)}
    runs = [steps(turns, run, *(ends.get(run, (1000,))[:1]), diary, ends.get(run, (0, None))[1]) for run in range(3)]
    with pytest.raises(type(error)) as caught:
        turns.run(runs)
    assert caught.value is error
    # Two steps of each, the third of run 0, then run 1 breaks: nobody does another.
    assert diary == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    assert threading.active_count() == threads


def test_an_error_before_others_have_begun():
    turns, diary = Turns(3), []
    with pytest.raises(ValueError, match="at once"):
        turns.run([steps(turns, run, 0 if run == 0 else 5, diary, ValueError("at once")) for run in range(3)])
    assert diary == []


def test_an_error_of_the_last_one_left():
    turns, diary = Turns(2), []
    with pytest.raises(ValueError, match="late"):
        turns.run([steps(turns, 0, 1, diary), steps(turns, 1, 3, diary, ValueError("late"))])
    assert diary == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("runs", [1, 2])
def test_an_interrupt_stops_all_runs_after_their_step(monkeypatch, runs):
    """Ctrl-C reaches the thread that waits for the others."""
    begun = threading.Event()

    class Interrupted(threading.Thread):
        def join(self, timeout=None):
            if timeout is not None:
                begun.wait(60)
                raise KeyboardInterrupt
            super().join()

    monkeypatch.setattr(parallel_module.threading, "Thread", Interrupted)
    turns, ended = Turns(runs), []

    def forever(run):
        try:
            while True:
                begun.set()
                turns.pass_on(run)
                time.sleep(0.001)
        finally:
            ended.append(run)

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        turns.run([lambda run=run: forever(run) for run in range(runs)])
    # Those that had begun were ended, and none is left running.
    assert ended
    assert not any(isinstance(thread, Interrupted) for thread in threading.enumerate())
    assert torch.equal(torch.get_rng_state(), before)


def test_each_finds_the_random_numbers_it_would_draw_alone():
    turns = Turns(3)

    def draw(run, pass_on):
        torch.manual_seed(run)
        drawn = []
        for _ in range(4 + run):
            drawn += torch.rand(2).tolist()
            pass_on(run)
        return drawn

    torch.manual_seed(77)
    before = torch.get_rng_state()
    together = turns.run([lambda run=run: draw(run, turns.pass_on) for run in range(3)])
    assert torch.equal(torch.get_rng_state(), before)
    assert together == [draw(run, lambda _: None) for run in range(3)]


def test_every_run_starts_from_the_callers_random_state():
    turns = Turns(3)
    torch.manual_seed(5)
    assert turns.run([lambda: torch.rand(3).tolist()] * 3) == [torch.rand(3).tolist()] * 3


@pytest.mark.parametrize(("method", "apart"), [("confit", 0), ("confit", 5), ("finetune", 0)])
def test_seeds_side_by_side_give_what_they_give_alone(make_run, method, apart):
    """With dropout and augmentation, so that chance is drawn in every step; the second run is shorter than the rest."""
    options = {"dropout": 0.3, "augmentation": "flip", "epochs": 2}

    def run_of(seed, **more):
        return make_run(method, seed=seed, **options, **({"batch_size": 16} if seed == 1 else {}), **more)

    turns = Turns(3, apart)
    runs = [run_of(seed, listeners=(turns.listener(seed),)) for seed in range(3)]
    together = turns.run([run.run for run in runs])
    alone = [run_of(seed) for seed in range(3)]
    for seed, run in enumerate(alone):
        result = run.run()
        assert together[seed].seed == seed
        assert together[seed].accuracy_matrix == result.accuracy_matrix
        assert together[seed].final_sha256 == result.final_sha256
        for name, entry in run.net.tasks.items():
            assert torch.equal(runs[seed].net.tasks[name].row, entry.row)
    assert len({result.final_sha256 for result in together}) == 3


def test_a_run_alone_in_turns_is_the_run(make_run):
    turns = Turns(1)
    (found,) = turns.run([make_run(dropout=0.3, epochs=2, listeners=(turns.listener(0),)).run])
    assert found.final_sha256 == make_run(dropout=0.3, epochs=2).run().final_sha256
