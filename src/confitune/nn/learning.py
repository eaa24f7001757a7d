"""Learning a task, from its first batch to what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Literal

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.convert import Statistics
from confitune.nn.following import MomentDrift
from confitune.nn.measuring import plane_of
from confitune.nn.memory import TaskEntry
from confitune.nn.recovering import RecoveringSlots
from confitune.nn.slots import initialise_head
from confitune.nn.variance import VarianceDrift

Norm = Literal["xconv", "task", "shared", "frozen", "calibrated"]

_COMPARED = 2  # batches that variances before and after a task are taken from
_SHOWN = 128  # images that moments before and after a task are taken from


class LearningSlots(RecoveringSlots):
    """Slots that tasks are added to, trained in, and finished."""

    norm: Norm
    statistics: Statistics
    rank: int | None

    def add_task(self, name: str, classes: int | Sequence[str], generator: torch.Generator | None = None) -> None:
        """Add a task and make it current: the last task's batch-norm state, a fresh head, no input statistics.

        Args:
            name: of the task.
            classes: names of the classes, or how many.
            generator: for the head's initialisation (a CPU generator; default: torch's global one).
        """
        if name in self.tasks:
            raise ConfituneError(f"there is a task {name!r} already; choose another name, or reopen it to train it on")
        names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
        if not names or len(set(names)) != len(names):
            raise ConfituneError(f"task {name!r} needs one or more classes with names of their own, got {list(names)}")
        if self.tasks:
            self.prepare(self.last_task)
            self._store_current()
        self._watch_drift(len(self.tasks))
        self._reset_statistics()
        self._start_calibrations(generator)
        head = self._head(len(names))
        initialise_head(head, generator)
        entry = TaskEntry(names, head.weight.new_empty(0))
        self._memory.store(entry, head, finished=False)
        self._memory.tasks[name] = entry
        self._current = name
        self._recovered_at = None

    def _watch_drift(self, others: int) -> None:
        """A task is going to move the weights: so many others have to follow, and perhaps the state of pre-training."""
        if self.drift is not None and (others or self.pretrained is not None):
            self.drift.begin()

    def _norm_state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor.clone()
            for name, norm in self._memory.norms.items()
            for key, tensor in norm.state_dict().items()
        }

    @torch.no_grad()
    def _start_calibrations(self, generator: torch.Generator | None) -> None:
        if self.norm != "calibrated":
            return
        for name, norm in self._memory.norms.items():
            norm.load_state_dict({key: self._pristine[f"{name}.{key}"] for key in norm.state_dict()})
            if norm.calibrated_by is not None:
                norm.calibrated_by.reset(generator)

    def finish_task(
        self,
        batches: Iterable[Tensor] | None = None,
        forward: Callable[..., object] | None = None,
        at_once: int = 1,
        launched: Callable[[], None] = lambda: None,
    ) -> None:
        """End the current task's training: measure what is to be measured, and store its state for good.

        The task is then ready for evaluation.

        Args:
            batches: the task's training inputs in batches of the training size; needed for statistics='pass'.
            forward: how batches go through the network, see `measure`.
            at_once: how many of them.
            launched: called before the device is waited for, when it has got all the work that needs no waiting.

        Raises:
            InfiniteError: what was measured is not finite; the task is then as unfinished as it was.
        """
        name = self.current_task
        entry = self.tasks[name]
        if entry.finished:
            raise ConfituneError(f"task {name!r} is finished already")
        finite, compared = None, False
        if self.drift is not None and self.drift.waits:
            if batches is None:
                raise ConfituneError(f"{self.drift.option} needs the task's training batches: finish_task(batches)")
            batches = iter(batches)
            first = self._see_drift(self.drift, batches, forward)
            batches, compared = chain(first, batches), bool(first) and self.drift.waits
        if self.norm == "xconv" and self.statistics == "pass":
            if batches is None:
                raise ConfituneError("statistics='pass' needs the task's training batches: finish_task(batches)")
            finite = self._measure(batches, forward, at_once)
        if any(not statistics.batches for statistics in self._memory.statistics.values()):
            raise ConfituneError(f"task {name!r} has seen no training batch: train it before finishing it")
        waits = compared or self.rank is not None  # what comes then cannot be undone, or needs the numbers
        if waits:
            launched()
            self._require_finite(finite)
        if self.drift is not None and compared:
            self.drift.take_over()
            self._mixed.forget()  # variances of all tasks are new, though no weight has moved
        self._memory.store(entry, self.head, finished=True)
        if self.rank is not None:
            self._memory.load(entry, self.head)  # it is used as it is kept
        self._keep_finished(entry)
        self.prepare(name)
        if waits:
            return
        try:
            launched()
            self._require_finite(finite)
        except Exception:
            self._memory.store(entry, self.head, finished=False)
            raise

    def _keep_finished(self, entry: TaskEntry) -> None:
        entry.image_size = self._image_size
        self._mixed.forget(self.current_task)  # a row from before may hold for these weights, but not for this state
        self._recovered_at = None

    def _see_drift(
        self, drift: VarianceDrift, batches: Iterator[Tensor], forward: Callable[..., object] | None
    ) -> list[Tensor]:
        """Look at what the task did to moments, on its first batches, and give those back; a ratio is not used yet."""
        if isinstance(drift, MomentDrift):
            first = self._first_images(batches)
            self._follow(drift, torch.cat(first), forward)
        elif first := list(islice(batches, _COMPARED)):
            self._compare(drift, first, forward)
        return first

    @torch.no_grad()
    def _compare(self, drift: VarianceDrift, batches: Sequence[Tensor], forward: Callable[..., object] | None) -> None:
        was_training = self.training
        self.train()
        try:
            with self.untracked(), drift.comparing(len(batches)):
                for batch in batches:
                    (forward or self)(batch)
        finally:
            self.train(was_training)

    @staticmethod
    def _first_images(batches: Iterator[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        while sum(map(len, found)) < _SHOWN and (batch := next(batches, None)) is not None:
            found.append(batch)
        return found

    def _follow(self, drift: MomentDrift, images: Tensor, forward: Callable[..., object] | None) -> None:
        """Bring moments of earlier tasks up to date on images of the current one."""
        earlier = [entry for name, entry in self.tasks.items() if name != self.current_task]
        last = earlier[-1] if earlier else None
        if last is None and not self._require_pretrained().images:
            drift.waits = False  # nobody has used that state yet
            return

        def load() -> None:
            if last is None:
                self._require_pretrained().load()
            else:
                self._memory.load(last, self._head(len(last.classes)))
            self._recover(last is None or last.pretrained)

        with self.trying(), torch.no_grad():
            self.eval()
            drift.follow(load, lambda: (forward or self.features_of)(images))
        self._mixed.forget()

    def reopen(self, name: str) -> None:
        """Make a finished task trainable again, from its state under today's weights."""
        if not self._memory.entry(name).finished:
            raise ConfituneError(f"task {name!r} is not finished: set_task({name!r}) to train it on")
        self.prepare(name)
        self._watch_drift(len(self.tasks) - 1)
        self._reset_statistics()
        self._memory.store(self.tasks[name], self.head, finished=False)

    # ---- without moving anything -----------------------------------------------------------------------------------

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Within, the current, unfinished task's batch norms and statistics may be changed: it all comes back."""
        entry, was_training = self.tasks[self.current_task], self.training
        counters = [n.num_batches_tracked for n in self._measured_norms() if n.num_batches_tracked is not None]
        counted = [counter.clone() for counter in counters]
        self._store_current()
        try:
            yield
        finally:
            self._memory.load(entry, self.head)
            for counter, batches in zip(counters, counted, strict=True):
                counter.copy_(batches)
            self._recovered_at = None
            self.train(was_training)

    @contextmanager
    def at_pretrained(self, measured: int = 0) -> Iterator[None]:
        """Within, in evaluation mode and in the state of pre-training, as far as it holds for today's weights.

        Args:
            measured: as many images will go through `features_of`, and what convolutions read of them is kept, so that
                the state can follow when they move. No task must move them before that was done once.
        """
        state = self._require_pretrained()
        with self.trying(), torch.no_grad():
            state.load()
            means = self._recover(pretrained=True)
            self.eval()
            if measured:
                with state.measuring(measured, means):
                    yield
            else:
                yield

    @contextmanager
    def at_batch_moments(self) -> Iterator[None]:
        """Within, in evaluation mode but for batch norms: they use the moments of the batch at hand, as in training.

        They keep nothing of them.
        """
        was_training, norms = self.training, self._batch_norms()
        keeping = [norm.track_running_stats for norm in norms]
        self.eval()
        for norm in norms:
            norm.train()
            norm.track_running_stats = False
        try:
            with torch.no_grad():
                yield
        finally:
            for norm, keeps in zip(norms, keeping, strict=True):
                norm.track_running_stats = keeps
            self.train(was_training)

    @torch.no_grad()
    def features_of(self, x: Tensor) -> Tensor:
        """What the backbone makes of images, in the state that it is in."""
        self._image_size = plane_of(x)
        return self._run_backbone(x)

    @torch.no_grad()
    def finish_pretrained(self, weight: Tensor, bias: Tensor) -> None:
        """End the current task with a head alone: it is used in the state of pre-training, as is every such task.

        Nothing may have been trained since `add_task`.

        Args:
            weight: of the head, [classes, features].
            bias: [classes].
        """
        state, name = self._require_pretrained(), self.current_task
        if not state.images:
            raise ConfituneError("the pre-trained state has not been measured yet: with net.at_pretrained(images): ...")
        if self.tasks[name].finished:
            raise ConfituneError(f"task {name!r} is finished already")
        self.head.weight.copy_(weight)
        self.head.bias.copy_(bias)
        entry = self.tasks[name]
        self._memory.store_head(entry, self.head)
        self._memory.load(entry, self.head)
        if self.drift is not None:
            self.drift.waits = False  # nothing has moved
        self._keep_finished(entry)
