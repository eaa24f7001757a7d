"""nn stands alone: it knows no engine, no processes, no graphs."""

import re
from pathlib import Path

import pytest

import confitune.nn

SOURCES = sorted(Path(confitune.nn.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_nothing_of_nn_imports_what_stands_above_it(path):
    text = path.read_text()
    ours = set(re.findall(r"^\s*(?:from|import) confitune\.(\w+)", text, re.MULTILINE))
    assert ours <= {"nn", "errors"}
    assert not re.search(r"torch\.distributed|torch\.cuda|CUDAGraph", text)
