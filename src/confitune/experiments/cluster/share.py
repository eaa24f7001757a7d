"""How much of a node a run gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confitune.errors import ConfituneError

# A small network's steps gain little from more threads, and a number that does not depend on the node keeps the
# last bits of a result the same on all of them.
THREADS = 4


@dataclass(frozen=True)
class Share:
    """CPUs and GPUs that a run takes from its node while it goes on; its torch gets as many threads as it has CPUs."""

    cpus: int
    gpus: float = 0

    def fits(self, node: Mapping[str, float]) -> bool:
        """Whether an empty node with these resources can take a run."""
        return node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return f"{self.gpus:g} GPU and {cpus}" if self.gpus else cpus


def share_of(
    nodes: Sequence[Mapping[str, float]], device: str, gpus: float | None = None, cpus: int | None = None
) -> Share:
    """A run's share, as asked for or by default.

    By default a run that may use a GPU has one to itself where the cluster has any, and the CPUs that come with it
    when its node's are divided evenly; a run on CPUs has 4 of them, or the smallest node's where that is fewer.

    Args:
        nodes: what each node of the cluster has, as Ray names it.
        device: of the recipe: 'auto', 'cpu' or 'cuda'.

    >>> share_of([{"CPU": 32, "GPU": 4}], "auto")
    Share(cpus=8, gpus=1)
    >>> share_of([{"CPU": 32, "GPU": 4}], "auto", gpus=0.25)
    Share(cpus=2, gpus=0.25)
    >>> share_of([{"CPU": 32}, {"CPU": 2}], "auto")
    Share(cpus=2, gpus=0)
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfituneError(f"--device {device} names one GPU, and Ray chooses which a run gets: use --device cuda")
    if gpus is not None and not 0 <= gpus <= 1:
        raise ConfituneError(f"--gpus-per-run {gpus:g}: a run uses one GPU or a part of it, from 0 to 1")
    if gpus and device == "cpu":
        raise ConfituneError(f"--gpus-per-run {gpus:g} and --device cpu contradict each other: leave one of them out")
    if gpus == 0 and device == "cuda":
        raise ConfituneError("--gpus-per-run 0 and --device cuda contradict each other: leave one of them out")
    if gpus is None:
        gpus = 1 if device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes)) else 0
    if cpus is None:
        if gpus:
            even = [node["CPU"] * gpus / node["GPU"] for node in nodes if node.get("GPU") and node.get("CPU")]
            cpus = max(1, int(min(even, default=1)))
        else:
            cpus = int(min([THREADS, *(node["CPU"] for node in nodes if node.get("CPU"))]))
    return Share(cpus, gpus)
