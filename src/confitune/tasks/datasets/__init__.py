"""One file for each dataset: where its files lie, what their labels are, which of them train and which test."""

from confitune.tasks.datasets.image_set import ImageSet
from confitune.tasks.datasets.reader import read_dataset

__all__ = ["ImageSet", "read_dataset"]
