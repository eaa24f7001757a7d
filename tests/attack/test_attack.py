"""What `python -m attack` tries that no other test does: memory of files that are made to take it, and a few kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and its way to count memory")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["attack.hostile", "--quick"], "MB at most"),
        (["attack.learns", "--kills", "2"], "2 changes were killed"),
    ],
    ids=["memory", "kills"],
)
def test_attacks_are_stood(program, said):
    command = [sys.executable, "-m", *program]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert said in done.stdout
