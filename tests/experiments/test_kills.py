"""Runs that are killed end as they would have."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_runs_end_as_undisturbed_ones():
    """A few of the kills that `python tests/experiments/kills.py` does."""
    program = [sys.executable, str(HERE / "kills.py"), "--each", "1"]
    environment = {"PYTHONPATH": str(HERE.parents[1] / "src"), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 runs ended as the undisturbed one" in done.stdout
