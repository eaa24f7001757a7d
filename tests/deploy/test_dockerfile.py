"""The Dockerfile, which no test builds: its steps are what is tested elsewhere, in an order that works."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from confitune.cli.deploy import serve_command

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps():
    """Instructions and their arguments, in order."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [tuple(line.split(maxsplit=1)) for line in lines]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    assert {name for name, _ in found} == known
    return found


def arguments(steps, name):
    return [rest for step, rest in steps if step == name]


def test_it_serves_the_mounted_bundle_with_options_that_there_are(steps):
    assert steps[0][0] == "FROM"
    (entry,) = map(json.loads, arguments(steps, "ENTRYPOINT"))
    assert entry[:3] == ["confitune", "serve", "/model"]
    given = dict(zip(entry[3::2], entry[4::2], strict=True))
    parameters = inspect.signature(serve_command).parameters
    assert {name.removeprefix("--").replace("-", "_") for name in given} <= set(parameters)
    assert given == {"--host": "0.0.0.0", "--device": "cpu"}
    assert arguments(steps, "EXPOSE") == [str(parameters["port"].default)]


def test_it_runs_as_a_user_without_rights(steps):
    (user,) = arguments(steps, "USER")
    assert user not in ("root", "0")
    places = [place for place, (name, rest) in enumerate(steps) if name == "RUN" and "useradd" in rest]
    assert re.search(rf"useradd .*{user}$", steps[places[0]][1])
    switched = steps.index(("USER", user))
    assert places[0] < switched
    assert not {name for name, _ in steps[switched:]} & {"RUN", "COPY"}  # nothing is installed with its rights


def test_it_copies_what_there_is_and_installs_extras_that_there_are(steps):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [name for rest in arguments(steps, "COPY") for name in shlex.split(rest)[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "src", project["readme"], *project["license-files"]} <= set(copied)
    assert {f"!{name}" for name in copied} <= set((ROOT / ".dockerignore").read_text().splitlines())
    (extras,) = re.findall(r"'\.\[(.*?)\]'", "\n".join(arguments(steps, "RUN")))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim", steps[0][1])
    assert tuple(map(int, version.groups())) >= (3, 10)


def test_it_installs_what_is_locked(steps):
    installs = [part for rest in arguments(steps, "RUN") for part in rest.split("&&") if "pip install" in part]
    assert installs
    assert all("-c constraints.txt" in part for part in installs)


def test_its_check_of_health_is_python_that_asks_a_path_there_is(steps):
    (check,) = arguments(steps, "HEALTHCHECK")
    program = json.loads(check.removeprefix("CMD "))
    assert program[:2] == ["python", "-c"]
    assert "/healthz" in program[2]
    done = subprocess.run([sys.executable, *program[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "urlopen error" in done.stderr or "HTTP Error" in done.stderr  # nobody is there
