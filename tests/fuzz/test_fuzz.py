"""Files that are damaged, or made to do harm, do none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MORE = 0.5  # times the cases of the program itself, which take two minutes
LEAST = {"images": 300, "recipes": 350, "records": 340, "checkpoints": 275, "bundles": 500}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and limits on memory")
def test_no_mutated_file_does_harm():
    """Each ends in success or in a documented error, in five seconds and a gigabyte, and changes nothing elsewhere."""
    path = f"{TESTS.parent / 'src'}:{TESTS}"
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": "/nowhere", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "fuzz", "--more", str(MORE)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-20_000:]
    tried = {area: int(count) for area, count in re.findall(r"^(\w+): (\d+) cases", done.stdout, re.MULTILINE)}
    assert tried.keys() == LEAST.keys()
    assert all(tried[area] >= least for area, least in LEAST.items()), tried
