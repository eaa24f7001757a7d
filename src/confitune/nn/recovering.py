"""Earlier tasks made ready again under today's weights, and all that is shared between tasks in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.lanes import moments_of
from confitune.nn.measuring import MeasuredSlots
from confitune.nn.pretrained import PretrainedState
from confitune.nn.variance import VarianceDrift

_PRETRAINED = "pretrained."


class RecoveringSlots(MeasuredSlots):
    """Slots whose finished tasks follow the weights that they share.

    Attributes:
        drift: of moments, where they are followed.
        pretrained: the state of pre-training, where it is kept.
    """

    drift: VarianceDrift | None
    pretrained: PretrainedState | None
    _pristine: dict[str, Tensor]  # what calibrated tasks start from

    def weights_moved(self) -> None:
        """Say that weights changed where tensor versions do not show it."""
        self._moves += 1

    @torch.no_grad()
    def prepare(self, task: str | None = None) -> None:
        """Make `task` (default: the current one) ready for evaluation: recover its means through today's weights.

        Does nothing where that was done and no weight has moved since.
        """
        self.set_task(task if task is not None else self.current_task)
        entry, key = self.tasks[self.current_task], (self.current_task, self._weights_key())
        if not entry.finished or self._recovered_at == key:
            return
        self._recover(entry.pretrained)
        self._recovered_at = key

    def _recover(self, pretrained: bool) -> list[Tensor]:
        """Output means under today's weights, of the state in the live slot (a task's own, or that of pre-training)."""
        norms = self._memory.recovering.values()
        means = self._require_pretrained().means_today() if pretrained else [norm.recovered_mean() for norm in norms]
        if means:
            torch._foreach_copy_([moments_of(norm)[0] for norm in norms], means)
        return means

    def _weights_key(self) -> int:
        convs = [norm.conv for norm in self._memory.recovering.values()]
        tensors = (tensor for conv in convs for tensor in (*conv.parameters(), *conv.buffers()))
        return self._moves + sum(tensor._version for tensor in tensors)

    def _require_pretrained(self) -> PretrainedState:
        if self.pretrained is None:
            raise ConfituneError("this network does not keep its pre-trained state: ContinualNet(keep_pretrained=True)")
        return self.pretrained

    def get_extra_state(self) -> dict[str, Any]:
        """What is in no tensor of the network; the batch norm that calibrated tasks start from, too."""
        drift = {} if self.drift is None else {"drift": self.drift.state()}
        pretrained = {} if self.pretrained is None else {"pretrained": self.pretrained.state()}
        return {**super().get_extra_state(), "pristine": self._pristine, **drift, **pretrained}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See `get_extra_state`."""
        super().set_extra_state(state)
        self._pristine = state["pristine"]
        if self.drift is not None:
            self.drift.load_state(state["drift"])
        if self.pretrained is not None:
            self.pretrained.load_state(state["pretrained"])

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What all tasks share: the backbone without its batch norms' state, what moments have become, and the state of
        pre-training where it is kept.
        """
        kept = {} if self.pretrained is None else self.pretrained.state()
        return {
            **super().shared_state_dict(),
            **({} if self.drift is None else self.drift.shared()),
            **{f"{_PRETRAINED}{name}": part for name, part in kept.items()},
        }

    @torch.no_grad()
    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `shared_state_dict` gave."""
        super().load_shared_state_dict(state)
        if self.drift is not None:
            for name, tensor in self.drift.shared().items():
                tensor.copy_(state[name])
        if self.pretrained is not None:
            kept = {key.removeprefix(_PRETRAINED): part for key, part in state.items() if key.startswith(_PRETRAINED)}
            self.pretrained.load_state(kept)
        if self._current is not None and self.tasks[self._current].finished:
            self._memory.load(self.tasks[self._current], self.head)  # variances and the state of pre-training are new
