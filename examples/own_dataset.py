"""A dataset of your own in one file.

    confitune run --dataset examples/own_dataset.py:load --tasks 2 --epochs 1

Copy this file, change `load`, and give its path. It can be one part of a sequence, too:
--dataset photos:1-2+examples/own_dataset.py:load
"""

from pathlib import Path

import numpy as np
import torch

from confitune.tasks import TaskSequence

# Defaults for training, which --batch-size and --epochs override. Both may be left out.
BATCH_SIZE, EPOCHS = 16, 5

# Three tasks. Each tells two kinds of stripes apart, here by a function of the pixel's place.
TASKS = {
    "straight": {"rows": lambda x, y: y, "columns": lambda x, y: x},
    "slanted": {"falling": lambda x, y: x - y, "rising": lambda x, y: x + y},
    "curved": {"rings": lambda x, y: np.hypot(x - 32, y - 32), "rays": lambda x, y: 20 * np.arctan2(y - 32, x - 32)},
}


def load(mean: tuple[float, ...], std: tuple[float, ...], data_dir: Path) -> TaskSequence:
    """Draws 40 images of each class; yours would rather read files below `data_dir` (--data-dir) or anywhere.

    `mean` and `std` are those that the network's input is normalised with: pass them on.
    """
    rng = np.random.default_rng(0)  # the same images every time, so that a run can be resumed and repeated
    y, x = np.mgrid[:64, :64]
    datasets = []
    for classes in TASKS.values():
        # Anything with a length and items (image, label) will do: a list, or a torch.utils.data.Dataset. An image is a
        # PIL image, bytes [3, H, W], or floats that are normalised already.
        dataset = []
        for label, stripes in enumerate(classes.values()):
            for _ in range(40):
                wave = np.sin(stripes(x, y) / rng.uniform(1.5, 4) + rng.uniform(0, 6))
                image = 128 + rng.uniform(30, 120, (3, 1, 1)) * wave + rng.normal(0, 10, (3, 64, 64))
                dataset.append((torch.from_numpy(image.clip(0, 255).astype(np.uint8)), label))
        datasets.append(dataset)  # a fifth of it is held out for testing; (train, test) would be your own split
    return TaskSequence.from_datasets(
        datasets,
        name="stripes",
        mean=mean,
        std=std,
        task_names=list(TASKS),
        class_names=[list(classes) for classes in TASKS.values()],
    )
