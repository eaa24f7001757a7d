"""Try thousands of damaged, spliced and malicious files, each kind in a process of its own with little memory.

    PYTHONPATH=src:tests python -m fuzz                              # twice the cases that the tests try: two minutes
    PYTHONPATH=src:tests python -m fuzz --seed 7 --more 10 images    # others, and more of them

What goes wrong is shown with the smallest input that does it, and belongs among the `found` of its module.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

from fuzz.watch import Watch, limit_memory

AREAS = ("images", "recipes", "records", "checkpoints", "bundles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", choices=[*AREAS, []], help="default: all of them")
    parser.add_argument("--seed", type=int, help="default: the same cases every time")
    parser.add_argument("--more", type=float, default=1, help="so many times as many cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    modules = {area: importlib.import_module(f"fuzz.{area}") for area in options.areas or AREAS}
    failed = [area for area, module in modules.items() if not _in_child(area, module, options.seed, options.more)]
    sys.exit(bool(failed))


def _in_child(area: str, module: object, seed: int | None, more: float) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with tempfile.TemporaryDirectory() as scratch:
                _fuzz(area, module, Path(scratch), seed, more)
            code = 0
        except BaseException:  # nothing of the parent may run here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _fuzz(area: str, module: object, scratch: Path, seed: int | None, more: float) -> None:
    warnings.simplefilter("ignore")  # what Pillow thinks of large images is not what is asked
    limit_memory()
    watch = Watch(scratch, seed, more)
    os.environ |= {
        "HOME": str(watch.at_hand),
        "CONFITUNE_CACHE": str(watch.at_hand),
        "CONFITUNE_DATA": str(watch.at_hand),
    }
    os.chdir(watch.at_hand)
    module.fuzz(watch)  # type: ignore[attr-defined]
    print(
        f"{area}: {watch.cases} cases, {watch.refused} refused, the slowest {watch.slowest:.1f} s, "
        f"memory grew by {max(watch.grown, 0) / 2**20:.0f} MB, {time.process_time():.0f} s in all"
    )


if __name__ == "__main__":
    main()
