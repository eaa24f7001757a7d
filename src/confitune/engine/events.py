"""What a run tells those who listen: progress bars, logs, checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class EpochEnd:
    """One epoch of one task is over."""

    task: int
    task_name: str
    stage: str
    epoch: int  # from 0
    epochs: int
    loss: float
    accuracy: float  # on the training batches as they were seen, in percent
    lr: float
    seconds: float
    images: int


class Listener:
    """Told what happens; every method does nothing unless overridden."""

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        """A run over `tasks` begins, or goes on at `first_task`."""

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        """A task begins, or goes on at `first_epoch`."""

    def stage_started(self, stage: str) -> None:
        """Another stage of the task's schedule begins."""

    def busy_with(self, what: str) -> None:
        """Something else than training begins, in words."""

    def step_done(self, step: int, steps: int) -> None:
        """A step of an epoch is done."""

    def epoch_ended(self, end: EpochEnd) -> None:
        """An epoch is over."""

    def task_tested(self, done: int, tasks: int) -> None:
        """After a task, another one of the `tasks` so far has been tested."""

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        """A task is learned; accuracies of all tasks so far, in percent."""

    def waiting(self, ready: Callable[[], bool]) -> None:
        """The run is about to wait for the device, until `ready`: others may go on meanwhile."""

    def note(self, message: str) -> None:
        """Something a person should know."""


class Listeners(Listener):
    """Passes everything on to several, in their order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        for hook in [name for name, value in vars(Listener).items() if callable(value)]:
            setattr(self, hook, partial(_tell_all, [getattr(listener, hook) for listener in listeners]))


def _tell_all(hooks: Sequence[Callable[..., object]], *args: object) -> None:
    for hook in hooks:
        hook(*args)
