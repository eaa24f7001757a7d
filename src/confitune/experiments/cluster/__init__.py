"""Runs on a Ray cluster: every run a Ray task, which goes on from its checkpoint when its node dies."""

from confitune.experiments.cluster.place import Share, ray_place, share_of

__all__ = ["Share", "ray_place", "share_of"]
