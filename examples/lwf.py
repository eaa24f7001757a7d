"""Learning without Forgetting (Li & Hoiem: Learning without Forgetting, ECCV 2016), in a file of one's own.

    confitune run --method examples/lwf.py:LwF

Before a task is learned the network is kept as it is. On the new task's images it answers for every earlier task, and
training holds the network of now to these answers: lambda_o * L_old(Y_o, Y^_o) + L_new (Fig. 3), where L_old is the
distillation loss of softened answers (Eq. 2 and 3). Earlier heads stay as they are; the paper trains them along.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, log_softmax, softmax

from confitune.methods import Method, Options, Step, TaskContext
from confitune.nn import ContinualNet


class LwfOptions(Options):
    """Choices of LwF."""

    strength: float = Field(1.0, ge=0, description="lambda_o, of each earlier task's answers")
    temperature: float = Field(2.0, gt=0, description="T, by which answers are softened")


class LwF(Method):
    """From the second task on."""

    name = "lwf"
    summary = "hold the answers of earlier heads on the new task's images"
    cost = "a copy of the network answers for every earlier task in a step"
    reference = "Li & Hoiem, ECCV 2016"
    Options = LwfOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: ContinualNet | None = None  # the network as it was, while a task is learned
        self.heads: list[tuple[Tensor, Tensor]] = []  # weight and bias of each earlier task
        self._saved: dict[str, Any] | None = None

    def attach(self, net: ContinualNet, index: int) -> None:
        super().attach(net, index)
        if index:
            self.before = copy.deepcopy(net).eval()
            if self._saved is not None:  # a task that goes on: the network has moved since it began
                self.before.load_state_dict(self._saved)
                self._saved = None
            earlier = [self.before.task_state_dict(name) for name in list(net.tasks)[:index]]
            self.heads = [(state["head.weight"], state["head.bias"]) for state in earlier]

    def loss(self, step: Step) -> Tensor | None:
        if self.before is None:
            return None
        half = step.logits.dtype == torch.bfloat16
        with torch.no_grad(), torch.autocast(step.inputs.device.type, torch.bfloat16, half, cache_enabled=False):
            features = self.before.features(step.inputs)
        dtype, temperature = self.heads[0][0].dtype, self.options.temperature
        now, then = step.features.to(dtype), features.to(dtype)
        terms = [distillation(linear(now, *head), linear(then, *head), temperature) for head in self.heads]
        return float(self.options.strength) * torch.stack(terms).sum()

    def end_task(self, context: TaskContext) -> None:
        self.before = None

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._saved if self.before is None else self.before.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self._saved = None, state["before"]


def distillation(now: Tensor, before: Tensor, temperature: float) -> Tensor:
    """Eq. 2 and 3: - sum of y' log y^', the mean over images; y' are probabilities to the power 1 / T, normalised."""
    return -(softmax(before / temperature, 1) * log_softmax(now / temperature, 1)).sum(1).mean()
