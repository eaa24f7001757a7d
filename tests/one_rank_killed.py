"""`confitune` by several processes, each in a folder of its own, the second of which is killed: see test_torchrun.py.

`torchrun --nproc-per-node 2 one_rank_killed.py STEP FOLDER ARGUMENTS...`
"""

import os
import signal
import sys

from confitune.cli import main
from confitune.engine.step import TrainStep

step, folder, *arguments = sys.argv[1:]
rank, train, steps = os.environ["RANK"], TrainStep.train, 0


def counted(self, *inputs):
    global steps
    steps += 1
    if rank == "1" and steps == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, *inputs)


if __name__ == "__main__":
    TrainStep.train = counted
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    sys.argv = ["confitune", *arguments]
    main()
