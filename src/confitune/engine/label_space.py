"""The classes of all tasks in one: what a network answers where the task of a test image is not given.

Features of the network as pre-trained come first: sums over training images make every class a normal distribution
(`confitune.methods.gaussian`). Then the tasks that are likely by these are asked, each by its own head and whatever
else it owns, and share out what their classes have. Sums and features of test images are taken once for each task; a
run that goes on from a checkpoint takes them again.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from confitune.engine.evaluation import outputs
from confitune.engine.events import Listener
from confitune.engine.seeds import derived_generator
from confitune.errors import ConfituneError
from confitune.methods import Method
from confitune.methods.gaussian import Answers, FeatureSums, Gaussians
from confitune.nn import ContinualNet, two_scales
from confitune.settings import Scenario, TrainSettings
from confitune.tasks import Images, Task, TaskSequence
from confitune.tasks.splits import hold_out

_HELD = 0.1  # of a task's training images choose the ridge and the temperature


def require_scenario(scenario: Scenario, method: Method, sequence: TaskSequence) -> None:
    """Refuse methods and tasks that the scenario is not for."""
    if scenario == "task":
        return
    if method.separate:
        raise ConfituneError(
            f"{method.name} has a network for each task and keeps none of the earlier ones to ask: leave it out where "
            f"the task is not given (scenario={scenario})"
        )
    odd = next((task for task in sequence if set(task.classes) != set(sequence[0].classes)), None)
    if scenario == "domain" and odd is not None:
        raise ConfituneError(
            f"scenario=domain needs the same classes in every task; {odd.name!r} has {_listed(odd)}, "
            f"{sequence[0].name!r} has {_listed(sequence[0])}: give them the same names, or use scenario=class"
        )


def _listed(task: Task) -> str:
    return ", ".join(task.classes[:5]) + (", ..." if len(task.classes) > 5 else "")


class LabelSpace:
    """What tells the classes of all tasks apart, task by task.

    `pretrained` maps images to features [N, F], or is a network that has learned no task yet; it is copied.
    """

    def __init__(self, pretrained: nn.Module, settings: TrainSettings) -> None:
        self.settings = settings
        twin = copy.deepcopy(pretrained).eval().to(settings.torch_device())
        backbone = twin.backbone if isinstance(twin, ContinualNet) else twin
        self._backbone = two_scales(backbone).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._sums, self._fewer = FeatureSums(), FeatureSums()  # with what is held out, and without
        self._held: list[Tensor] = []
        self._held_labels: list[Tensor] = []
        self._test: list[Tensor] = []

    def accuracies(
        self, net: ContinualNet, tasks: Sequence[Task], given: bool, method: Method, listener: Listener
    ) -> list[float]:
        """Accuracy in percent on each task's test images, among the classes of all tasks; those of one name are one.

        Args:
            tasks: those of the last call, and more.
            given: only the classes of an image's own task compete.
            method: says whether tasks' own heads are asked, too.
        """
        for task in tasks[len(self._test) :]:
            self._add(task)
        gaussians, test = self.gaussians(), torch.cat(self._test)
        sizes = [len(task.test) for task in tasks]
        own = torch.eye(len(tasks), dtype=torch.bool).repeat_interleave(torch.tensor(sizes), 0)
        probabilities = gaussians.probabilities(test, own if given else None)
        heads_know_features = method.two_scales and self._unmoved(net)

        def ask(leading: Tensor) -> Answers:
            """What tasks' own networks say of the test images, of whatever task, that they lead in."""
            for place in leading.any(1).nonzero().flatten().tolist():
                net.prepare(tasks[place].name)
                entry, logits = net.tasks[tasks[place].name], []
                if heads_know_features and entry.only_head:
                    logits.append(net.head(test[leading[place]].to(net.head.linear.weight)))
                else:
                    for source, mine in zip(tasks, leading[place].split(sizes), strict=True):
                        images = source.test.only(mine.nonzero().flatten())
                        logits += [found for found, _ in outputs(net, source, images, self.settings, entry.image_size)]
                listener.task_tested(place + 1, len(tasks))
                yield place, torch.cat(logits).float().softmax(1).cpu()

        if not method.sums_only:
            with net.evaluating():
                probabilities = gaussians.shared_out(probabilities, ask)
        names = {name: place for place, name in enumerate(dict.fromkeys(n for task in tasks for n in task.classes))}
        places = [torch.tensor([names[name] for name in task.classes]) for task in tasks]
        by_name = probabilities.new_zeros(len(probabilities), len(names))
        answers = by_name.index_add_(1, torch.cat(places), probabilities).argmax(1).split(sizes)
        labels = [place[task.test.labels.cpu()] for place, task in zip(places, tasks, strict=True)]
        return [100.0 * (a == b).double().mean().item() for a, b in zip(answers, labels, strict=True)]

    def gaussians(self) -> Gaussians:
        """Of all training images; what is to be chosen is chosen on the held-out ones, without them."""
        chosen = self._fewer.calibrated(torch.cat(self._held), torch.cat(self._held_labels))
        return replace(self._sums.gaussians(chosen.ridge), temperature=chosen.temperature)

    def _add(self, task: Task) -> None:
        features, labels = self._features(task, task.train), task.train.labels.cpu()
        stay, held = hold_out(labels, _HELD, derived_generator(self.settings.seed, "not in sums"))
        self._held.append(features[held])
        self._held_labels.append(labels[held] + sum(map(len, self._sums.counts.values())))
        self._sums = self._sums.plus(task.name, features, labels, len(task.classes))
        self._fewer = self._fewer.plus(task.name, features[stay], labels[stay], len(task.classes))
        self._test.append(self._features(task, task.test))

    def _features(self, task: Task, images: Images) -> Tensor:
        return torch.cat([found.float() for found, _ in outputs(self._backbone, task, images, self.settings)]).cpu()

    def _unmoved(self, net: ContinualNet) -> bool:
        """Whether the network, apart from what tasks own, is still the pre-trained one."""
        before = dict(self._backbone.named_parameters())
        return all(torch.equal(weight, before[name]) for name, weight in net.shared_parameters().items())
