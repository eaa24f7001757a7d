"""The tasks of a bundle that are ready to answer: which are in memory, and how images go through their networks.

On a CPU a task that is asked a second time gets a runner, see `folding.py`: making one takes longer than an answer. On
a GPU images of all tasks go through the network together, see `mixed.py`.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from confitune.deploy.bundle import Bundle, BundleError
from confitune.deploy.folding import Runners, folded, folded_pretrained
from confitune.deploy.mixed import CannotMixError, MixedNet
from confitune.nn import ContinualNet

_log = logging.getLogger(__name__)


class ReadyTasks:
    """Those of one bundle, of which `ready` are kept in memory; only one thread at a time may use them.

    Attributes:
        net: the network, with the tasks in memory.
        mixed: the same for images of several tasks together; None where that cannot be done.
        unreadable: tasks whose files are damaged or gone.
    """

    def __init__(self, bundle: Bundle, device: torch.device, ready: int) -> None:
        self.device, self.ready = device, ready
        self._heads: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()  # of tasks in memory, used last at the end
        self._load(bundle)
        self.bundle, self.unreadable = bundle, set[str]()

    def follow(self, bundle: Bundle) -> None:
        """Go over to what the bundle is now; what has not changed stays in memory."""
        has_room = self.mixed is None or self.mixed.classes >= _most_classes(bundle)
        if has_room and bundle.has_backbone_of(self.bundle):
            for task in list(self._heads):
                if task not in bundle.tasks or bundle.tasks[task].file != self.bundle.tasks[task].file:
                    self._drop(task)
        else:
            self._load(bundle)
        self.bundle, self.unreadable = bundle, set()

    def _load(self, bundle: Bundle) -> None:
        self.net = bundle.load_network().to(self.device).to(memory_format=torch.channels_last).eval()
        self._pretrained: nn.Module | None = None  # once a task is to be guessed
        self._keeps_pretrained = bundle.keeps_pretrained
        self._runners = Runners(bundle.network.size) if self.device.type == "cpu" else None
        self._heads.clear()
        self.mixed: MixedNet | None = self._mixes(bundle) if self.device.type == "cuda" else None

    def _mixes(self, bundle: Bundle) -> MixedNet | None:
        """The network for images of several tasks at once, with room for some more classes than there are."""
        image, classes = (3, bundle.network.size, bundle.network.size), 16 * math.ceil(_most_classes(bundle) / 16)
        try:
            # Two rows more: for no task, and for a task that is read before another one goes.
            return MixedNet(self.net, image, self.ready + 2, classes)
        except CannotMixError as error:
            _log.warning("%s. Images of several tasks are answered task by task, which takes longer", error)
            return None

    def network_for(self, task: str) -> ContinualNet:
        """The network, with this task in it and current."""
        self._make_ready(task)
        self.net.set_task(task)
        return self.net

    def logits(self, x: Tensor, tasks: Sequence[str], pretrained: Tensor | None = None) -> Tensor:
        """Of images under their tasks, on the CPU, padded with -inf. The tasks are one, unless images can be mixed.

        A task that owns only a head reads their pre-trained features.
        """
        counts, task = torch.tensor([len(self.bundle.record(task).classes) for task in tasks]), tasks[0]
        self._make_ready(task)
        only_head = self._keeps_pretrained and self.net.tasks[task].only_head
        if only_head and pretrained is not None:
            rows = linear(pretrained, *self._heads[task])
        elif self.mixed is not None:
            rows = self._mixed_logits(self.mixed, x, tasks)
        else:
            rows = linear(self.features(x, None if only_head else task), *self._heads[task])
        rows = rows.float().cpu()
        wrong = (~rows.isfinite() & (torch.arange(rows.shape[1]) < counts[:, None])).any(1)
        if wrong.any():
            task = tasks[int(wrong.nonzero()[0])]
            raise BundleError(f"task {task!r} gives NaN or infinite outputs: its training diverged")
        return rows

    def _mixed_logits(self, mixed: MixedNet, x: Tensor, tasks: Sequence[str]) -> Tensor:
        """The same on the device, in pieces of no more tasks than are kept ready."""
        names = list(dict.fromkeys(tasks))
        rows = x.new_empty(len(x), mixed.classes)
        for first in range(0, len(names), self.ready):
            some = names[first : first + self.ready]
            for task in some:
                self._make_ready(task)
            mine = [n for n, task in enumerate(tasks) if task in some]
            rows[mine] = mixed(x[mine], [tasks[n] for n in mine])[1]
        return rows

    def features(self, x: Tensor, task: str | None = None) -> Tensor:
        """Of images under the network of a task in memory, or (None) under the pre-trained one."""
        if self.mixed is not None and task is None and self._keeps_pretrained:
            if None not in self.mixed:
                with self.net.as_pretrained():
                    self.mixed.load(None, self.net)
            return self.mixed(x, [None] * len(x))[0]
        if self._runners is not None:
            name = "pretrained" if task is None else self.bundle.tasks[task].file.sha256
            if run := self._runners.find(name, partial(self._plain, task)):
                self._pretrained = self._pretrained if task else None  # its weights are the runner's now
                return run(x)
        if task is not None:
            self.net.set_task(task)
            return self.net.features(x)
        if not self._keeps_pretrained:
            return cast(Tensor, self._plain(None)(x))
        with self.net.as_pretrained():
            return cast(Tensor, self.net.backbone(x))

    def _plain(self, task: str | None) -> nn.Module:
        """The network of a task, or the pre-trained one, as a module of its own: images to features."""
        if task is not None:
            return folded(self.net, task)[0]
        if self._keeps_pretrained:
            return folded_pretrained(self.net)
        if self._pretrained is None:
            self._pretrained = self.bundle.load_pretrained().to(self.device).to(memory_format=torch.channels_last)
        return self._pretrained

    def _make_ready(self, task: str) -> None:
        """Have a task in memory; the one that was used longest ago makes room."""
        if task not in self._heads:
            try:
                self.bundle.load_task(self.net, task)
            except BundleError:
                self.unreadable.add(task)
                raise
            self.unreadable.discard(task)
            head = self.net.head.linear
            self._heads[task] = head.weight.detach().clone(), head.bias.detach().clone()
            if self.mixed is not None:
                self.net.prepare(task)
                self.mixed.load(task, self.net)
        self._heads.move_to_end(task)
        if len(self._heads) > self.ready:
            self._drop(next(iter(self._heads)))

    def _drop(self, task: str) -> None:
        del self._heads[task]
        self.net.drop_task(task)
        if self.mixed is not None:
            self.mixed.drop(task)


def _most_classes(bundle: Bundle) -> int:
    return max((len(record.classes) for record in bundle.tasks.values()), default=1)
