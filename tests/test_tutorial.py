"""The tutorial does what it says, in the terminal and as a notebook."""

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from confitune.cli import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("notebook", ROOT / "tools/notebook.py")
notebook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebook)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """After all commands of the tutorial."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def said(folder):
    """What each block of code printed, by the block."""
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        here.setenv("CONFITUNE_CACHE", str(folder / "cache"))
        here.setenv("COLUMNS", "120")
        blocks = [block for block in notebook.BLOCK.findall(PAGE) if not block[1].startswith("pip install")]
        return {code: _printed(language, code, folder) for language, code in blocks}


def _printed(language, code, folder):
    lines = code.splitlines()
    if language == "sh" and all(line.startswith("confitune ") and not line.endswith("&") for line in lines):
        return "".join(map(_in_process, lines))  # where torch is imported already
    if language == "python":
        return _output([sys.executable, "-c", code])
    program = folder / "bin" / "confitune"  # as pip would install it, for the source under test
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}/src" exec "{sys.executable}" -m confitune "$@"\n')
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code = code.replace("8000", str(free.getsockname()[1]))
    return _output(["bash", "-e", "-c", f'PATH="{program.parent}:$PATH"\n{code}'])


def _in_process(command):
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
    return done.stdout


def _output(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def output(said, *words):
    """Of the one block in which all these words stand."""
    (found,) = (text for code, text in said.items() if all(word in code for word in words))
    return found


def test_photos_are_told_apart_and_coins_are_unknown_until_they_are_learned(said):
    answers = dict(line.split(": ", 1) for line in output(said, "predict model new/\n").splitlines())
    named = {Path(file).stem.split("-")[0]: answer for file, answer in answers.items()}
    assert named.pop("coins").startswith("unknown")
    assert len(named) == 6
    for name, answer in named.items():
        task = "textures" if name in ("brick", "grass", "gravel") else "things"
        assert re.match(rf"{task} \(\d+%\): {name} \d", answer), f"{name}: {answer}"
    given = output(said, "--task textures").splitlines()
    assert [line.split(": ")[1].split()[0] for line in given] == ["grass", "brick"]
    assert re.search(r"coins-33.jpg: things \(\d+%\): coins", output(said, "--into things"))


def test_the_first_task_loses_nothing(said):
    assert re.search(r"textures +│ +18 │ +(\d+\.\d) │ +\1 │ \+0\.0", output(said, "--name things"))
    assert all(name in output(said, "confitune tasks model") for name in ("textures", "things"))


def test_the_server_answers_and_the_export_is_there(said, folder):
    (answer,) = json.loads(output(said, "serve model").split("\n", 1)[-1].strip() or "{}")["predictions"]
    assert (answer["task"], answer["classes"][0]["name"]) == ("things", "coffee")
    assert (folder / "model.onnx").stat().st_size > 1e6


def test_output_that_the_page_shows_is_of_the_form_that_is_printed(said):
    """Words and layout, not every digit, nor the order of runners-up, who are nearly equal."""

    def form(line):
        return sorted(re.sub(r"\(nearest: .*|[\d.,]", "", line).split())

    printed = [form(line) for line in "\n".join(said.values()).splitlines()]
    shown = [
        block for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if "photos/" not in block
    ]
    assert len(shown) == 4
    for line in "".join(shown).splitlines():
        assert line == "..." or form(line) in printed, line


def test_the_notebook_is_the_page():
    written = (ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8")
    assert written == notebook.notebook(PAGE) + "\n", "stale: run python tools/notebook.py"
    cells = json.loads(written)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    blocks = notebook.BLOCK.findall(PAGE)
    assert len(code) == len(blocks)
    for source, (language, block) in zip(code, blocks, strict=True):
        assert source == ("%%bash\n" if language == "sh" else "") + block.strip("\n")
    assert all(cell["source"] for cell in cells)
