"""What is learned: tasks, sequences of tasks, datasets, splits, and the decode-once image store."""

from confitune.tasks.catalog import DATASETS, DatasetInfo
from confitune.tasks.errors import DataError, DataMissingError, StoreError, UnreadableImageError
from confitune.tasks.joined import dataset_info, dataset_parts
from confitune.tasks.load import load_folder_task, load_tasks
from confitune.tasks.lock import exclusive, is_free
from confitune.tasks.pipelines import CROP, Pipeline
from confitune.tasks.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from confitune.tasks.progress import Progress
from confitune.tasks.rgb import is_image_name, open_rgb
from confitune.tasks.sequence import TaskSequence
from confitune.tasks.store import damaged_stores, store_leftovers, stores_in
from confitune.tasks.task import Images, Task

__all__ = [
    "CROP",
    "DATASETS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "DataError",
    "DataMissingError",
    "DatasetInfo",
    "Images",
    "Pipeline",
    "Preprocess",
    "Progress",
    "StoreError",
    "Task",
    "TaskSequence",
    "UnreadableImageError",
    "damaged_stores",
    "dataset_info",
    "dataset_parts",
    "exclusive",
    "is_free",
    "is_image_name",
    "load_folder_task",
    "load_tasks",
    "open_rgb",
    "store_leftovers",
    "stores_in",
]
