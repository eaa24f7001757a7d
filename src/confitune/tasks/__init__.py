"""What is learned: tasks, sequences of tasks, datasets, splits, and the decode-once image store."""

from confitune.errors import DataError, DataMissingError, UnreadableImageError
from confitune.tasks.datasets.dataset import DatasetInfo
from confitune.tasks.decode import CROP, Pipeline, Progress, is_image_name, open_rgb
from confitune.tasks.load import load_folder_task, load_tasks
from confitune.tasks.names import DATASETS, dataset_info, dataset_parts
from confitune.tasks.sequence import TaskSequence
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD, Images, Preprocess, Task
