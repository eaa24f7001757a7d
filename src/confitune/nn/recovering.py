"""Earlier tasks made ready again under today's weights, and all that is shared between tasks in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.following import MomentDrift
from confitune.nn.lanes import moments_of
from confitune.nn.measuring import MeasuredSlots
from confitune.nn.pretrained import PretrainedState
from confitune.nn.variance import VarianceDrift
from confitune.nn.xconv import XconvNorm

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
        if entry.pretrained:
            self._recover(self._require_pretrained().means_today())
        else:
            self._recover([norm.recovered_mean() for norm in self._recovering()])
        self._recovered_at = key

    def _recover(self, means: Sequence[Tensor]) -> None:
        if means:
            torch._foreach_copy_([moments_of(norm)[0] for norm in self._recovering()], list(means))

    def _recovering(self) -> list[XconvNorm]:
        return [norm for norm in self._memory.norms.values() if isinstance(norm, XconvNorm)]

    def _weights_key(self) -> int:
        convs = [norm.conv for norm in self._recovering()]
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
        """What all tasks share: the backbone without its batch norms' state, what variances have become, and the state
        of pre-training where it is kept.
        """
        ratios = {} if self.drift is None else self.drift.ratios()
        shifts = self.drift.shifts() if isinstance(self.drift, MomentDrift) else {}
        kept = {} if self.pretrained is None else self.pretrained.state()
        return {
            **super().shared_state_dict(),
            **{f"{name}.variance_ratio": ratio for name, ratio in ratios.items()},
            **{f"{name}.input_shift": shift for name, shift in shifts.items()},
            **{f"{_PRETRAINED}{name}": part for name, part in kept.items()},
        }

    @torch.no_grad()
    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `shared_state_dict` gave."""
        super().load_shared_state_dict(state)
        if self.drift is not None:
            for name, ratio in self.drift.ratios().items():
                ratio.copy_(state[f"{name}.variance_ratio"])
        if isinstance(self.drift, MomentDrift):
            for name, shift in self.drift.shifts().items():
                shift.copy_(state[f"{name}.input_shift"])
        if self.pretrained is not None:
            kept = {key.removeprefix(_PRETRAINED): part for key, part in state.items() if key.startswith(_PRETRAINED)}
            self.pretrained.load_state(kept)
        if self._current is not None and self.tasks[self._current].finished:
            self._memory.load(self.tasks[self._current], self.head)  # variances and the state of pre-training are new
