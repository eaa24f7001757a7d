"""What is learned: tasks, sequences of tasks, datasets, splits, and the decode-once image store."""

from confitune.errors import (
    DataError as DataError,
    DataMissingError as DataMissingError,
    UnreadableImageError as UnreadableImageError,
)
from confitune.tasks.datasets.dataset import DatasetInfo as DatasetInfo
from confitune.tasks.decode import (
    CROP as CROP,
    Pipeline as Pipeline,
    Progress as Progress,
    is_image_name as is_image_name,
    open_rgb as open_rgb,
)
from confitune.tasks.load import load_folder_task as load_folder_task, load_tasks as load_tasks
from confitune.tasks.names import DATASETS as DATASETS, dataset_info as dataset_info, dataset_parts as dataset_parts
from confitune.tasks.sequence import TaskSequence as TaskSequence
from confitune.tasks.task import (
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    Images as Images,
    Preprocess as Preprocess,
    Task as Task,
)
