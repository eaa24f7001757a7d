"""Runs that die on the way, and what is seen of those that go on."""

from confitune.engine import Listener


class Killed(Exception):
    pass


class Killer(Listener):
    """Kills the run when `task` starts, or when its `epoch` has been trained and not yet been checkpointed."""

    def __init__(self, task, epoch=None):
        self.task, self.epoch = task, epoch

    def task_started(self, task, name, first_epoch):
        if task == self.task and self.epoch is None:
            raise Killed

    def epoch_ended(self, end):
        if (end.task, end.epoch) == (self.task, self.epoch):
            raise Killed


class Starts(Listener):
    def __init__(self):
        self.tasks, self.epochs = [], []

    def task_started(self, task, name, first_epoch):
        self.tasks.append((task, first_epoch))

    def epoch_ended(self, end):
        self.epochs.append((end.task, end.epoch))
