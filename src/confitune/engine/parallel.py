"""Several runs side by side on one device: a small network's kernels leave much of a GPU idle.

Each run has a thread and a CUDA stream of its own, and they take turns: a run launches a step and passes the turn on,
while the device works on the steps of all. Only one thread runs Python at a time, and each finds torch's random state
as it left it, so every run does exactly what it does alone.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from confitune.engine.events import Listener

Result = TypeVar("Result")


class Turns:
    """Who may run, of `runs` many; round and round, leaving out those that are done.

    Args:
        apart: each starts so many turns after the one before it. Between tasks a run keeps Python busy and the device
            idle; if all did that at the same time, nobody would fill the gap.
    """

    def __init__(self, runs: int, apart: int = 0) -> None:
        self._changed = threading.Condition()
        self._running: list[int] = []  # in the order of their turns; the first has it
        self._to_start = list(range(runs))
        self._apart, self._turns_left = apart, 0  # until the next one starts
        self._start_due()
        self._stopped = False

    def listener(self, run: int) -> Listener:
        """For the run to listen to itself with: it passes the turn on after every step and test, and while it waits."""
        return _PassOn(self, run)

    @property
    def has_others(self) -> bool:
        """Whether more than one is running."""
        return len(self._running) > 1

    def pass_on(self, run: int) -> None:
        """Let the others do a step each."""
        with self._changed:
            if run == self._last_started:
                self._turns_left -= 1
                self._start_due()
            if len(self._running) == 1 and not self._stopped:
                return
            random_state = _random_state()
            self._running.remove(run)
            self._running.append(run)
            self._changed.notify_all()
        self._wait_for(run)
        _set_random_state(random_state)

    def _start_due(self) -> None:
        while self._to_start and (self._turns_left <= 0 or not self._running):
            self._last_started = self._to_start.pop(0)
            self._running.append(self._last_started)
            self._turns_left = self._apart

    def _wait_for(self, run: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running[:1] == [run] or self._stopped)
        if self._stopped:
            raise _StoppedError

    def _leave(self, run: int) -> None:
        with self._changed:
            if run in self._running:
                self._running.remove(run)
            if run == self._last_started:
                self._turns_left = 0  # it will not count down any more
            self._start_due()
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """What the functions return, run side by side; the first error stops them all."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []
        start = _random_state()

        def work(run: int) -> None:
            try:
                self._wait_for(run)
                _set_random_state(start)
                results[run] = functions[run]()
            except _StoppedError:
                pass
            except BaseException as error:
                errors.append(error)
                self._stop()
            finally:
                self._leave(run)

        threads = [threading.Thread(target=work, args=(run,), daemon=True) for run in range(len(functions))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # an interrupt must get through
        finally:
            self._stop()
            for thread in threads:
                thread.join()
            _set_random_state(start)
        if errors:
            raise errors[0]
        return [results[run] for run in range(len(functions))]


class _StoppedError(Exception):
    """Another run failed, or the user wants to stop."""


class _PassOn(Listener):
    def __init__(self, turns: Turns, run: int) -> None:
        self._turns, self._run = turns, run

    def step_done(self, step: int, steps: int) -> None:
        self._turns.pass_on(self._run)

    def task_tested(self, done: int, tasks: int) -> None:
        self._turns.pass_on(self._run)

    def waiting(self, ready: Callable[[], bool]) -> None:
        while not ready() and self._turns.has_others:
            self._turns.pass_on(self._run)


def _random_state() -> list[Tensor]:
    of_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *of_gpu]


def _set_random_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    for cuda in state[1:]:
        torch.cuda.set_rng_state(cuda)
