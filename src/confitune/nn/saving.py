"""What all tasks of a network share, in and out: the backbone without what tasks own, and what pre-training left.

A task's own state is the bank's: see `TaskBank.to_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.parts.head import Head
from confitune.nn.parts.part import Part


def shared_state(backbone: nn.Module, parts: Iterable[Part]) -> dict[str, Tensor]:
    """The shared tensors themselves, by their names in the backbone."""
    in_backbone = [part for part in parts if not isinstance(part, Head)]  # whose names may be those of layers
    own = {key for part in in_backbone for key in part.live(False)}
    own |= {f"{key.rpartition('.')[0]}.num_batches_tracked" for key in own}
    layers = backbone.state_dict()
    state = {key: tensor.detach() for key, tensor in layers.items() if key not in own}
    return state | {key: kept for part in in_backbone for key, kept in part.pretrained().items() if key in layers}


@torch.no_grad()
def load_shared_state(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a saved state into the tensors that `shared_state` gave, if it has just those."""
    wrong = [key for key in wanted if key not in state or state[key].shape != wanted[key].shape]
    extra = sorted(set(state) - set(wanted))
    if wrong or extra:
        raise ConfituneError(
            f"the shared weights are those of another network: {len(wrong)} tensors are missing or of another shape, "
            f"{len(extra)} are unknown ({', '.join([*wrong, *extra][:3])})"
        )
    for key, tensor in wanted.items():
        tensor.copy_(state[key])
