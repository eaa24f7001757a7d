"""The classification loss and the count of right answers, within each image's own task."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Groups = tuple[tuple[int, int], ...]


def classification_loss(logits: Tensor, labels: Tensor, groups: Groups = ()) -> Tensor:
    """Mean cross-entropy in float32; with groups (joint training), over the classes of the image's own task only."""
    return cross_entropy(within_own_task(logits.float(), labels, groups), labels)


def count_right(logits: Tensor, labels: Tensor, groups: Groups = ()) -> Tensor:
    """Whether each image's largest logit, among the classes of its own task, is its label's."""
    return within_own_task(logits, labels, groups).argmax(1) == labels


def within_own_task(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Logits of other tasks' classes set to -inf: one wide head with this mask is exactly a head per task."""
    if not groups:
        return logits
    group_of_class = _group_of_class(groups, logits.device)
    foreign = group_of_class[None, :] != group_of_class[labels][:, None]
    return logits.masked_fill(foreign, float("-inf"))


@lru_cache(maxsize=16)  # a copy to the device in every step would make it wait, and cannot be captured
def _group_of_class(groups: Groups, device: torch.device) -> Tensor:
    return torch.cat([torch.full((stop - first,), g) for g, (first, stop) in enumerate(groups)]).to(device)
