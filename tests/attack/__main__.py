"""Everything that is tried against runs, bundles and the server, with one command and the same cases every time.

    PYTHONPATH=src:tests python -m attack                 # 200 kills, 20,000 files, a minute at the limit: an hour
    PYTHONPATH=src:tests python -m attack --share 0.02    # so much of it: three minutes

Ends with a line for each kind and, where all held, with exit code 0; `--out` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from attack.learns import draw

TESTS = Path(__file__).parents[1]
KILLS, PHASES, FILES, SECONDS = 200, 4, 20_000, 60
FILES_OF_TESTS = 3_700  # that `python -m fuzz` tries without options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    share, seed = options.share, ["--seed", str(options.seed)]
    each = max(1, round(share * KILLS / 2 / PHASES))
    with tempfile.TemporaryDirectory() as scratch:
        programs = {
            "runs killed": [str(TESTS / "experiments/kills.py"), "--each", str(each), *seed],
            "changes killed": ["-m", "attack.learns", "--kills", str(max(1, round(share * KILLS / 2))), *seed],
            "hostile files": ["-m", "attack.hostile"],
            "mutated files": ["-m", "fuzz", "--more", f"{share * FILES / FILES_OF_TESTS}", *seed],
            "at the limit": served(Path(scratch), share * SECONDS),
        }
        outcomes = {name: tried(name, program) for name, program in programs.items()}
    figures = {name: {"held": held, "seconds": seconds, **found} for name, (held, seconds, found) in outcomes.items()}
    for name, found in figures.items():
        print(f"{name}: {found}")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(not all(held for held, _, _ in outcomes.values()))


def tried(name: str, program: list[str]) -> tuple[bool, int, dict[str, Any]]:
    """Whether it held, how long it took, and the numbers that it printed."""
    print(f"--- {name}", flush=True)
    began, path = time.monotonic(), os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return process.returncode == 0, round(time.monotonic() - began), _figures("".join(said))


def _figures(said: str) -> dict[str, Any]:
    cases = [int(count) for count in re.findall(r"^\w+: (\d+) cases", said, re.MULTILINE)]
    grown = [int(count.replace(",", "")) for count in re.findall(r"(?:grew by|took) ([\d,]+) MB", said)]
    found: dict[str, Any] = {}
    if cases:
        found["files"] = sum(cases)
    if grown:
        found["most_mb"] = max(grown)
    for name, pattern in {
        "kills": r"(\d+) (?:changes were killed|of \d+ runs ended)",
        "images_checked": r"(\d+) images checked",
        "wrong": r"images checked, (\d+) wrong",
        "changes_meanwhile": r"(\d+) changes meanwhile",
        "server_mb": r"first half, ([\d,]+) MB",
    }.items():
        if match := re.search(pattern, said):
            found[name] = int(match[1].replace(",", ""))
    return found


def served(root: Path, seconds: float) -> list[str]:
    """The server at its limit, with a bundle of two tasks and a third that comes and goes."""
    for task in ("reds", "greens", "blues"):
        draw(root / task, task)
    model, confitune = root / "model", [sys.executable, "-m", "confitune", "learn"]
    new = ["--model", "test_byobnet", "--weights", "none", "--size", "32"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "CONFITUNE_CACHE": str(root / "cache")}
    for task in ("reds", "greens"):
        given = ["--name", task, "--bundle", str(model), "--device", "cpu", *(new if task == "reds" else [])]
        subprocess.run([*confitune, str(root / task), *given], env=environment, stdout=subprocess.DEVNULL, check=True)
    program = str(TESTS.parent / "benchmarks/serve.py")
    options = ["--seconds", f"{max(seconds, 5):g}", "--device", "cpu", "--out", str(root / "serve.json")]
    return [program, "--bundle", str(model), "--beside", str(root / "blues"), *options]


if __name__ == "__main__":
    main()
