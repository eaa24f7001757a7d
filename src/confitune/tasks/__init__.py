"""What is learned: tasks, sequences of tasks, datasets, splits, and the decode-once image store."""

from confitune.tasks.decode import Progress as Progress
from confitune.tasks.load import load_folder_task as load_folder_task, load_tasks as load_tasks
from confitune.tasks.names import DATASETS as DATASETS, dataset_info as dataset_info, dataset_parts as dataset_parts
from confitune.tasks.sequence import TaskSequence as TaskSequence
from confitune.tasks.task import Images as Images, Preprocess as Preprocess, Task as Task
