"""One backbone for many tasks: what a task owns is a set of parts, all else is shared.

The tensors of the current task are live in the network; those of all others lie packed in a `TaskBank`. A finished
task's row never changes: what has to follow the shared weights is worked out by its parts before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.backbones import headless
from confitune.nn.observer import Observer
from confitune.nn.pairing import trace_flow
from confitune.nn.parts.head import Head
from confitune.nn.parts.norms import batch_norms, norm_layers
from confitune.nn.parts.part import Part
from confitune.nn.task_bank import State, TaskBank, TaskEntry, TaskStorage

AnyPart = TypeVar("AnyPart", bound=Part)


class ContinualNet(nn.Module):
    """A shared backbone, and what each task owns of it.

    Args:
        backbone: maps images to feature vectors [N, F]. The last layer of a timm or torchvision classifier is removed.
        parts: what a task owns; one of them is a `Head`. A part belongs to one network.
        momentum: of all running statistics. The default is the paper's; timm's tf_ networks come with 0.01, which is
            too slow for tasks of a few hundred steps.
        example_input: a batch of two inputs, needed only where the backbone's input shape cannot be guessed.

    >>> from confitune.nn import XconvNorms
    >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> net = ContinualNet(backbone, [XconvNorms(), Head()])
    >>> net.add_task("pets", ["cat", "dog"])
    >>> net.train()(torch.zeros(4, 3, 16, 16)).shape
    torch.Size([4, 2])
    >>> net.finish_task()
    >>> dict(net.storage()["pets"].parts)  # weight, bias, variance of 8 channels and window means of 3; the head
    {'norms': 51, 'head': 18}
    """

    def __init__(
        self, backbone: nn.Module, parts: Sequence[Part], *, momentum: float = 0.1, example_input: Tensor | None = None
    ) -> None:
        super().__init__()
        names = [part.name for part in parts]
        if names.count(Head.name) != 1 or len(set(names)) != len(names):
            raise ConfituneError(f"a network needs one Head and each part once, got {', '.join(names) or 'none'}")
        backbone = headless(backbone)
        flow = trace_flow(backbone, example_input)
        if flow.features is None or len(flow.features) != 1:
            found = "no single tensor" if flow.features is None else f"[N, {', '.join(map(str, flow.features))}]"
            raise ConfituneError(f"the backbone returns {found}, not vectors [N, F]: add pooling and nn.Flatten()")
        for norm in batch_norms(backbone):
            norm.momentum = momentum
        for part in parts:
            part.attach(backbone, flow)
        self.backbone = backbone
        self.momentum = momentum
        self._parts = list(parts)
        self._in_backbone = [part for part in parts if part.name != Head.name]  # a layer may be called 'head', too
        self.parts = nn.ModuleDict({part.name: part for part in parts})
        self.kinds = [part.kind for part in parts]  # with their options; a saved state must agree
        self.observer = Observer(backbone, [part for part in parts if part.input_means])
        self._bank = TaskBank(parts, self.head, self.observer)
        self.tasks: Mapping[str, TaskEntry] = self._bank.tasks  # in the order in which they were added
        self.train(self.training)

    # ---- tasks -----------------------------------------------------------------------------------------------------

    @property
    def current_task(self) -> str:
        """The task that is live."""
        if self._bank.current is None:
            raise ConfituneError("no task is live: add_task(name, classes), or set_task(name) where there are some")
        return self._bank.current

    @property
    def numbers_per_task(self) -> int:
        """How many numbers a finished task that owns all parts keeps, without its head."""
        return sum(tensor.numel() for part in self._in_backbone for tensor in part.live(True).values())

    @property
    def head(self) -> Head:
        """The part that classifies."""
        return self.part(Head)

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """The part of this class."""
        return cast(AnyPart, self.parts[kind.name])

    def add_task(self, name: str, classes: int | Sequence[str], generator: torch.Generator | None = None) -> None:
        """Add a task and make it current. Most parts start from those of the last task; each part says so itself.

        Args:
            classes: names of the classes, or how many.
            generator: for random starts (a CPU generator; default: torch's global one).
        """
        if name in self.tasks:
            raise ConfituneError(f"there is a task {name!r} already; choose another name, or reopen it to train it on")
        names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
        if not names or len(set(names)) != len(names):
            raise ConfituneError(f"task {name!r} needs one or more classes with names of their own, got {list(names)}")
        if self.tasks:
            more = [task for task, entry in self.tasks.items() if not entry.only_head]
            self.prepare((more or list(self.tasks))[-1])
            self._bank.store()
        self.observer.image_size = None
        self.head.select(len(names))
        for part in self._parts:
            part.restore({})
            part.start(generator)
        self._bank.tasks[name] = TaskEntry(names, torch.empty(0))
        self._bank.current, self._bank.prepared = name, None
        self._bank.store()

    def set_task(self, name: str) -> None:
        """Make a task live; an unfinished task that was live is stored first."""
        entry = self._bank.entry(name)
        if name != self._bank.current:
            self._bank.store()
            self._bank.current = name
            self._bank.load()
            self.observer.image_size = entry.image_size

    @torch.no_grad()
    def prepare(self, task: str | None = None) -> None:
        """Make `task` (default: the current one) ready for evaluation under today's weights.

        Does nothing if no weight has moved since the last time.
        """
        self.set_task(task if task is not None else self.current_task)
        entry = self.tasks[self.current_task]
        version = sum(parameter._version for parameter in self.shared_parameters().values())
        if entry.finished and self._bank.prepared != version:
            for part in self._parts:
                if part.name in entry.owns:
                    part.prepare()
            self._bank.prepared = version

    def finish_task(self, owns: Sequence[str] | None = None) -> None:
        """End the training of the current task and store its state for good; it is then ready for evaluation.

        Args:
            owns: the names of the parts that the task keeps (default: all); of others it uses the pre-trained state.
        """
        name = self.current_task
        if self.tasks[name].finished:
            raise ConfituneError(f"task {name!r} is finished already")
        self.observer.require_batches(name)
        self._bank.store(finished=True, owns=owns)
        if owns is not None:
            self._bank.load()
        self.prepare(name)

    def reopen(self, name: str) -> None:
        """Make a finished task trainable again, from its state under today's weights."""
        if not self._bank.entry(name).finished:
            raise ConfituneError(f"task {name!r} is not finished: set_task({name!r}) to train it on")
        self.prepare(name)
        self.observer.image_size = None
        for part in self._parts:
            part.restore({})
        self.tasks[name].finished = False
        self._bank.store()
        self._bank.prepared = None

    def drop_task(self, name: str) -> None:
        """Forget a task; the others stay as they are."""
        self._bank.entry(name)
        if name == self._bank.current:
            self._bank.current = None
        del self._bank.tasks[name]
        self.head.keep_only(len(entry.classes) for entry in self.tasks.values())

    def storage(self) -> dict[str, TaskStorage]:
        """How many numbers each task keeps, counted from what is stored."""
        return {name: self._bank.storage(entry) for name, entry in self.tasks.items()}

    # ---- images ----------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: str | Tensor | None = None) -> Tensor:
        """Logits of a task's head.

        Args:
            task: a name (default: the current task), or in evaluation one task index per image (a mixed batch, without
                gradients; rows are padded with -inf to the largest number of classes).
        """
        if isinstance(task, Tensor):
            return self._forward_mixed(x, task)
        if task is not None:
            self.set_task(task)
        return cast(Tensor, self.head(self.features(x)))

    def features(self, x: Tensor, backbone: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Features [N, F] of images of the current task, from the backbone or from compiled code in its place."""
        name = self.current_task
        entry = self.tasks[name]
        size = (x.shape[-2], x.shape[-1]) if x.dim() == 4 else None
        if not entry.finished:
            self.observer.image_size = size
        elif self.training:
            raise ConfituneError(f"task {name!r} is finished; reopen({name!r}) to train it on")
        elif entry.image_size not in (None, size) and any(part.input_means for part in self._parts):
            trained, given = ("x".join(map(str, plane or ("?",))) for plane in (entry.image_size, size))
            why = "its recovered means hold for the size it was trained on: resize the images"
            raise ConfituneError(f"task {name!r} was trained on {trained} images, these are {given}; {why}")
        else:
            self.prepare()
        return self.observer.through(backbone or self.backbone, x)

    @torch.no_grad()
    def _forward_mixed(self, x: Tensor, index: Tensor) -> Tensor:
        """Task by task: on a CPU that takes no longer than one task's batch, and any part can do it."""
        if self.training:
            raise ConfituneError("a mixed batch is for evaluation: batch moments belong to one task; call eval() first")
        if index.shape != (len(x),) or index.is_floating_point():
            raise ConfituneError(f"a mixed batch needs one task index per image, got {tuple(index.shape)} for {len(x)}")
        tasks = list(self.tasks)
        places = index.unique().tolist()
        if not places or not 0 <= places[0] <= places[-1] < len(tasks):
            raise ConfituneError(f"task indices run from 0 to {len(tasks) - 1}, got {places}")
        current = self._bank.current
        most = max(len(self.tasks[tasks[place]].classes) for place in places)
        mixed = x.new_full((len(x), most), float("-inf"))
        for place in places:
            mine = index == place
            logits = self(x[mine], tasks[place])
            mixed[mine, : logits.shape[1]] = logits.to(mixed)
        if current is not None:
            self.set_task(current)
        return mixed

    # ---- training --------------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """All parameters of the current task and of the backbone, by what stages of training call them.

        'head'; 'norms', scales and shifts of all normalisation layers, whoever owns them; 'weights', all else of the
        backbone; and what other parts offer, by their names.
        """
        layers = norm_layers(self.backbone).values()
        norms = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}
        weights = [p for p in self.backbone.parameters() if id(p) not in norms]
        offered = {part.name: part.offered() for part in self._parts if part.name not in ("head", "norms")}
        return {"head": self.head.offered(), "norms": list(norms.values()), "weights": weights, **offered}

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that all tasks use, by their names in the backbone."""
        own = {id(parameter) for part in self._parts for parameter in part.offered()}
        return {name: p for name, p in self.backbone.named_parameters() if id(p) not in own}

    def weights_moved(self) -> None:
        """Tell the network that weights changed where tensor versions do not show it, as in a replayed graph."""
        self._bank.prepared = None

    def measure(self, batches: Iterable[Tensor], forward: Callable[[Tensor], object] | None = None) -> Tensor:
        """Measure the current task's statistics in a pass over `batches` with the current weights: `Observer.average`.

        In training mode, because the task was trained with batch moments. `forward` passes a batch, of whatever kind,
        through this network; default: the network itself.
        """
        with self.evaluating():  # which restores the mode
            self.train()
            return self.observer.average(batches, forward or self)

    def start_pretrained(self, only: Sequence[str] | None = None) -> None:
        """Set the parts of the live task (or only some) to the pre-trained state, where that is kept."""
        for part in self._parts:
            if only is None or part.name in only:
                part.start_pretrained()

    @contextmanager
    def as_pretrained(self, only: Sequence[str] | None = None, *, batch_moments: bool = False) -> Iterator[None]:
        """Within, as in `evaluating`, and parts (or only some) are pre-trained, whoever's they are."""
        self._bank.store()
        try:
            self.start_pretrained(only)
            with self.evaluating(batch_moments=batch_moments):
                yield
        finally:
            self._bank.load()

    @contextmanager
    def evaluating(self, *, batch_moments: bool = False) -> Iterator[None]:
        """Within, the network is in evaluation mode and computes no gradients.

        With `batch_moments` its batch norms use the moments of the batch all the same, and keep none.
        """
        before = self.training
        self.eval()
        try:
            with torch.no_grad(), self.observer.untracked() if batch_moments else nullcontext():
                for norm in batch_norms(self.backbone) if batch_moments else ():
                    norm.train()
                yield
        finally:
            self.train(before)

    # ---- saving and loading ----------------------------------------------------------------------------------------

    def task_state_dict(self, name: str) -> dict[str, Tensor]:
        """Everything that is the task's own, by layer; the task's name is not part of the keys."""
        return self._bank.to_state(name)

    def load_task_state_dict(self, name: str, state: State, classes: Sequence[str] | None = None) -> None:
        """Put a task's state back, as a new task or over an existing one of that name, and make it current."""
        entry = self._bank.from_state(name, state, classes, next(self.backbone.parameters()))
        if name == self._bank.current:
            self._bank.current = None  # what was live is replaced, not stored
        self._bank.tasks[name] = entry
        self.set_task(name)

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What all tasks share: the backbone without what tasks own, and what is kept of pre-training."""
        own = {key for part in self._in_backbone for key in part.live(False)}
        own |= {f"{key.rpartition('.')[0]}.num_batches_tracked" for key in own}
        layers = self.backbone.state_dict()
        shared = {key: tensor for key, tensor in layers.items() if key not in own}
        kept = [part.pretrained() for part in self._in_backbone]
        return shared | {key: tensor for of in kept for key, tensor in of.items() if key in layers}

    @torch.no_grad()
    def load_shared_state_dict(self, state: State) -> None:
        """Put back what `shared_state_dict` gave."""
        own = self.shared_state_dict()
        misfits = {key for key, tensor in own.items() if key not in state or state[key].shape != tensor.shape}
        if wrong := sorted(misfits | state.keys() - own.keys()):
            some = f"{len(wrong)} tensors are missing, unknown or of another shape ({', '.join(wrong[:3])})"
            raise ConfituneError(f"the shared weights are those of another network: {some}")
        for key, tensor in own.items():
            tensor.copy_(state[key])
        if self._bank.current is not None and self.tasks[self._bank.current].finished:
            self._bank.load()

    def get_extra_state(self) -> dict[str, Any]:
        """Tasks and their rows, so that `state_dict` holds all there is."""
        tasks = {name: dict(vars(entry)) for name, entry in self.tasks.items()}
        size = self.observer.image_size
        return {"kinds": self.kinds, "current": self._bank.current, "image_size": size, "tasks": tasks}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["kinds"] != self.kinds:
            raise ConfituneError(f"the state is of a network with {state['kinds']}, this one has {self.kinds}")
        device = next(self.backbone.parameters()).device
        self._bank.tasks.clear()
        for name, values in state["tasks"].items():
            self._bank.tasks[name] = TaskEntry(**{**values, "row": values["row"].to(device, copy=True)})
        self._bank.current, self._bank.prepared = state["current"], None
        self.observer.image_size = state["image_size"]
        self.head.keep_only(len(entry.classes) for entry in self.tasks.values())  # it may be from before a task
        if self._bank.current is not None:
            self.head.select(len(self.tasks[self._bank.current].classes))

    def _apply(self, fn: Any, recurse: bool = True) -> ContinualNet:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for entry in self._bank.tasks.values():
            entry.row = fn(entry.row)
        self._bank.prepared = None
        return self
