"""What a run on a cluster tells the driver while it goes on: by way of a mailbox, a few times a second."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from confitune.engine import EpochEnd, Listener

PLACED, DECODING = "placed", "decoding"  # beside the events of a `Listener`
_PAUSE = 0.4  # seconds between two letters of a run


class Message(NamedTuple):
    """One event of a run.

    Attributes:
        run: the run's folder.
        attempt: which of its tries: one whose node was taken for dead may still have something to say.
        event: `PLACED` with a node's name, `DECODING` with what, done and total, or the name of a `Listener`'s method.
    """

    run: str
    attempt: str
    event: str
    values: tuple[Any, ...]


def open_mailbox(ray: Any) -> Any:
    """A Ray actor that keeps letters, which are pickled messages, until the driver takes them.

    Its class is made here and letters are bytes, so that its process needs no more than Ray: importing torch would take
    it seconds. It is on the head node: a cluster without that is none.
    """

    class Mailbox:
        def __init__(self) -> None:
            self._letters: list[bytes] = []

        def put(self, letter: bytes) -> None:
            self._letters.append(letter)

        def take(self) -> list[bytes]:
            taken, self._letters = self._letters, []
            return taken

    where = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1}
    return ray.remote(**where)(Mailbox).remote()


def letter_of(messages: Sequence[Message]) -> bytes:
    """For the mailbox."""
    return pickle.dumps(list(messages))


def read_letters(letters: Iterable[bytes]) -> list[Message]:
    """All messages of letters from the mailbox."""
    return [message for letter in letters for message in pickle.loads(letter)]


class Reporter(Listener):
    """Sends on what a run tells.

    Args:
        send: takes messages; whether to wait until they are delivered.
        run: the run's folder.
        attempt: a name for this try.
    """

    def __init__(self, send: Callable[[list[Message], bool], None], run: str, attempt: str) -> None:
        self._send, self._run, self._attempt = send, run, attempt
        self._waiting: list[Message] = []
        self._sent = 0.0

    def placed(self, node: str) -> None:
        """A worker has taken the run on."""
        self._tell(PLACED, node, now=True)

    def decoding(self, what: str, done: int, total: int) -> None:
        """Images are prepared."""
        self._tell(DECODING, what, done, total)

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._tell("run_started", name, list(tasks), epochs, first_task, now=True)

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        self._tell("task_started", task, name, first_epoch)

    def stage_started(self, stage: str) -> None:
        self._tell("stage_started", stage)

    def step_done(self, step: int, steps: int) -> None:
        self._tell("step_done", step, steps)

    def epoch_ended(self, end: EpochEnd) -> None:
        self._tell("epoch_ended", end)

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        self._tell("task_ended", task, list(accuracies), now=True)

    def note(self, message: str) -> None:
        self._tell("note", message, now=True)

    def close(self) -> None:
        """Deliver what is left."""
        self._send(self._waiting, True)
        self._waiting = []

    def _tell(self, event: str, *values: Any, now: bool = False) -> None:
        if self._waiting and self._waiting[-1].event == event in (DECODING, "step_done"):
            self._waiting.pop()  # the newest says it all
        self._waiting.append(Message(self._run, self._attempt, event, values))
        if now or time.monotonic() - self._sent > _PAUSE:
            self._send(self._waiting, False)
            self._waiting, self._sent = [], time.monotonic()
