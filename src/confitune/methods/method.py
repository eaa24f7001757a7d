"""What a method is: one class, in one file, that says what a task owns, when what is trained, and what is added to it.

`Method` itself is plain fine-tuning: one head a task, everything trained from the first epoch on. A method overrides
what it does differently. It is known by its name as soon as its file is imported; a file of your own works the same:
`confitune run --method my_method.py:MyMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.methods.pull import Pull, Tensors
from confitune.methods.stages import Stage, everything
from confitune.nn import ContinualNet, Head, Part, headless, two_scales

METHODS: dict[str, type[Method]] = {}  # every method that was imported, by name


class Options(BaseModel):
    """Base of a method's options: every choice that its paper or a code base made, with a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Step:
    """One training batch on its way through the network, before the backward pass."""

    inputs: Tensor
    features: Tensor
    logits: Tensor
    labels: Tensor
    net: ContinualNet


class TaskContext(Protocol):
    """What a method may use of the task that is being learned."""

    net: ContinualNet
    index: int  # of the task, from 0
    seed: int  # for what a method draws in this task
    images: int  # in the training set
    labels: Tensor  # of the training images, on the network's device
    batch_size: int  # images per training step
    epochs: int  # that the task is trained for
    epoch: int  # epochs done

    def batches(self, size: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs and labels of the training images in a random order, which is the same each time."""

    def train(self, other: ContinualNet) -> None:
        """Train another network on this task, without what the method adds."""

    def features(self) -> Tensor:
        """[N, F], of all training images, by the network as it is."""

    def gradients(self, parameters: Sequence[Tensor], batches: int) -> list[Tensor]:
        """Of the loss, summed over so many training batches, by parameters of the network that do not move."""

    def captured(self, net: ContinualNet, kind: Hashable, function: Callable[..., None], *tensors: Tensor) -> None:
        """Run function(*tensors), on a GPU as a captured graph; functions of one kind do the same."""

    def note(self, message: str) -> None:
        """Tell a person."""


class Method:
    """Fine-tuning, and the base of all methods.

    The order in one step: forward, `loss`, backward, `read_gradients`, `add_gradients`, the optimizer's step,
    `after_step`. On a GPU these run inside a captured graph, so they work on tensors only: they wait for nothing (no
    `.item()`, no `if` on a value), and what they keep from step to step is changed in place.
    """

    name: str = ""  # as given to `--method`
    summary: ClassVar[str] = ""  # what it does, in one line
    cost: ClassVar[str] = "nothing"  # what runs in addition to plain fine-tuning
    reference: ClassVar[str] = ""  # its paper
    separate: ClassVar[bool] = False  # every task gets a fresh copy of the pre-trained network
    joint: ClassVar[bool] = False  # all tasks are learned at once
    two_scales: ClassVar[bool] = False  # heads read the last two stages of the backbone, see `nn/scales.py`
    sums_only: ClassVar[bool] = False  # tested by sums of pre-trained features (`gaussian`), not by its network
    Options: ClassVar[type[BaseModel]] = Options
    # Fields of `TrainSettings` that its paper trains with, and those that differ for people's own photos.
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    photos: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    lr_factors: ClassVar[Mapping[str, float]] = MappingProxyType({})  # of groups of parameters; default: 1
    # Names of `Tensors` attributes, zeros at first, that it keeps between tasks, within a task, or for a moment.
    kept: ClassVar[tuple[str, ...]] = ()
    running: ClassVar[tuple[str, ...]] = ()
    scratch: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[bool] = False  # it keeps no other tensors: one captured step serves many tasks

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = vars(cls).get("name")  # one that is inherited is another method's
        if not name:
            return
        known = METHODS.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfituneError(f"there is a method {name!r} already, in {known.__module__}; choose another name")
        METHODS[name] = cls

    def __init__(self, **options: Any) -> None:
        try:
            self.options: Any = self.Options(**options)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            known = ", ".join(self.Options.model_fields) or "none"
            raise ConfituneError(f"options of {self.name}: {problems} (there are: {known})") from error
        self.choices: dict[str, dict[str, Any]] = {}  # that it made for tasks, by name, and why: for people to read
        self.pull_most: float | None = None  # see `Pull.add_gradient`; set where steps would swing up without
        self.added: tuple[Method, ...] = ()  # methods that it is combined with, see `create_method`
        for name in (*self.kept, *self.running, *self.scratch):
            setattr(self, name, {})

    # ---- what is learned, and when ---------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """What a task owns."""
        return [Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        """What is trained when, of the task with this index (from 0)."""
        return everything(epochs)

    @classmethod
    def is_base(cls) -> bool:
        """Whether it says itself what tasks own and when it is trained; others can be combined with such a one."""
        own = cls.parts is not Method.parts or cls.stages is not Method.stages
        return own or cls.separate or cls.joint or cls is METHODS.get("finetune")

    @property
    def hooks(self) -> tuple[Method, ...]:
        """All that take part in a step: the method itself, and those that it is combined with."""
        return (self, *self.added)

    def training(self, photos: bool, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `TrainSettings`: what is given, else what it trains with, on people's own photos or not."""
        own: dict[str, Any] = {}
        for hook in reversed(self.hooks):  # what a strength was chosen with goes with it, whatever it is combined with
            own |= {**hook.settings, **(hook.photos if photos else {})}
        if "epochs" in given:  # who says how many wants no more
            own.pop("min_steps", None)
        return {**own, **given}

    def network(self, backbone: nn.Module, **arguments: Any) -> ContinualNet:
        """The network that this method trains, made of a backbone; arguments are those of `ContinualNet`."""
        backbone = two_scales(headless(backbone)) if self.two_scales else backbone
        return ContinualNet(backbone, self.parts(), **arguments)

    # ---- what is added, step by step -------------------------------------------------------------------------------

    def attach(self, net: ContinualNet, index: int) -> None:
        """The network is where the task with this index will be trained; called before anything else of the task.

        And again when a task goes on after a resume, with weights that have moved since it began: what is to be taken
        of them once belongs into `begin_task`, and into what is `kept`.
        """
        self.index = index
        for field in (*self.kept, *self.running, *self.scratch):
            tensors: Tensors = getattr(self, field)
            for name, p in net.shared_parameters().items():  # zeros are of the parameter's memory format
                tensors[name] = tensors[name].to(p.device) if name in tensors else torch.zeros_like(p)

    def settle(self, context: TaskContext) -> bool:
        """Finish a new task without training it, and say so; asked before its first epoch."""
        return False

    def begin_task(self, context: TaskContext) -> None:
        """Before the first step of a task."""

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        """Before the first step of an epoch (from 0)."""

    def loss(self, step: Step) -> Tensor | None:
        """A term that is added to the cross-entropy."""
        return None

    def read_gradients(self, net: ContinualNet) -> None:
        """Gradients of the loss are there, nothing has been added to them yet."""

    def pull(self) -> Pull | None:
        """Towards which weights those that all tasks use are pulled in this task, and how strongly."""
        return None

    def add_gradients(self, net: ContinualNet) -> None:
        """Add to the gradients, in closed form: here that of the pull."""
        if (pull := self.pull()) is not None:
            pull.add_gradient(net, self.pull_most)

    def after_step(self, net: ContinualNet) -> None:
        """Parameters have moved."""

    def end_task(self, context: TaskContext) -> None:
        """After the last step of a task; one that is to own some parts only is finished here, by `finish_task`."""

    def captured_kind(self, index: int) -> Hashable:
        """What a captured step depends on besides the values of tensors; a new kind is captured anew.

        Where the method takes part in steps, every task (`index`, from 0) is captured for itself, unless its tensors
        stay in place: then there is one kind, and another one before there is anything to be pulled to.
        """
        if self.in_place:
            return index > 0 and type(self).pull is not Method.pull
        hooks = ("loss", "read_gradients", "pull", "add_gradients", "after_step")
        return index if any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks) else None

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that is kept between steps and tasks (tensors, numbers, text, lists and dicts of them)."""
        state = {name: dict(getattr(self, name)) for name in (*self.kept, *self.running)}
        return {**state, **({"choices": dict(self.choices)} if self.choices else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        for name in (*self.kept, *self.running):
            setattr(self, name, dict(state[name]))
        self.choices = dict(state.get("choices", {}))

    def storage(self) -> int:
        """How many numbers are kept between tasks."""
        return sum(tensor.numel() for name in self.kept for tensor in getattr(self, name).values())
