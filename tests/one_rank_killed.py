"""`confitune` by several processes, each in a folder of its own, the second of which is killed: see test_torchrun.py.

`torchrun --nproc-per-node 2 one_rank_killed.py STEP FOLDER ARGUMENTS...`
"""

import os
import signal
import sys

from confitune.cli import main
from confitune.engine.step import TrainStep

train = TrainStep.train


def killing(rank: str, step: int):
    """A training step that counts, and kills the second process in the one it is told."""
    steps = 0

    def counted(self, *inputs):
        nonlocal steps
        steps += 1
        if rank == "1" and steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, *inputs)

    return counted


if __name__ == "__main__":
    at, folder, *arguments = sys.argv[1:]
    here = f"{folder}/{os.environ['RANK']}"
    TrainStep.train = killing(os.environ["RANK"], int(at))
    os.makedirs(here)
    os.chdir(here)
    sys.argv = ["confitune", *arguments]
    main()
