"""What all commands share: help that is quick, errors in one line, and how to go on after Ctrl-C."""

import gc
import os
import subprocess
import sys
from contextlib import suppress

import pytest
import typer

from confitune import __version__
from confitune.cli.app import importing, say, shown, stoppable
from confitune.engine import SequenceRun
from found import contents
from program import SOURCE, plain, refused


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["tune", "--help"], ["reproduce", "--help"], ["models", "--help"]]
)
def test_help_is_quick_because_it_imports_no_torch(arguments):
    program = (
        "import sys\n"
        "from confitune.cli import main\n"
        f"sys.argv = ['confitune', *{arguments}]\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "print('CODE', code or 0)\n"
        "print('HEAVY', sorted({'torch', 'timm', 'torchvision', 'matplotlib', 'numpy'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    said = plain(done.stdout)
    assert "Usage" in said
    assert "CODE 0" in said
    assert "HEAVY []" in said
    expected = {"--help": ["run", "models"], "run": ["--dataset", "--resume", "--method"], "models": ["pattern"]}
    expected |= {"tune": ["--grid", "--option", "--resume", "--no-retrain"], "reproduce": ["--datasets", "--quick"]}
    assert all(word in said for word in expected[arguments[0]])


def test_without_arguments_help_is_shown(confitune):
    assert "Usage" in (said := confitune()).out + said.err
    assert "run" in said.out + said.err


def test_it_says_its_version(confitune):
    said = confitune("--version")
    assert (said.code, said.out) == (0, f"confitune {__version__}\n")


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_leave_the_processor_to_others_unless_asked_not_to(confitune, monkeypatch, given, spins):
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    monkeypatch.setattr(os, "environ", others | given)
    confitune("--version")
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_ctrl_c_says_how_to_go_on(confitune, tiny, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(SequenceRun, "run", interrupted)
    said = confitune("run", *tiny, "--out", tmp_path / "out")
    assert said.code == 130
    assert "stopped; the same command with --resume goes on where it was" in said.err


def test_brackets_in_a_message_are_text(confitune, tiny, tmp_path, no_runs):
    said = confitune("run", *tiny, "--dataset", f"folder:{tmp_path}/[red]/[/x]", "--out", tmp_path / "out")
    assert f"the folder {tmp_path}/[red]/[/x] is not there" in refused(said)


@pytest.mark.skipif(os.name != "posix", reason="needs limits on the size of files")
def test_a_disk_that_is_full_is_said_and_what_was_there_stays(ran):
    out, arguments = ran
    before = contents(out)
    more = [*map(str, arguments), "--resume", "--seeds", "2"]
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        f"from confitune.cli import main; sys.argv = ['confitune', *{more!r}]; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    after = contents(out)
    kept = [path for path in before if path.name in ("runs.jsonl", "checkpoint.pt", "checkpoint.before.pt")]
    assert len(kept) >= 3
    assert all(after[path] == before[path] for path in kept)
    assert not list(out.rglob("*.partial"))


# ---- its functions ---------------------------------------------------------------------------------------------------


def test_what_is_stoppable_ends_as_after_ctrl_c_and_other_errors_go_through(capsys):
    with pytest.raises(typer.Exit) as exit_, stoppable("call again"):
        raise KeyboardInterrupt
    assert exit_.value.exit_code == 130
    assert plain(capsys.readouterr().err) == "stopped; call again\n"
    with pytest.raises(ValueError, match="another"), stoppable("call again"):
        raise ValueError("another")
    assert capsys.readouterr().err == ""


def test_a_text_is_said_as_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "[red]a[/x] 12 'b' \x1b[2J\r\u202e" + " long" * 30 + "\nnext"
    say(text)
    said = capsys.readouterr().out
    assert said == "[red]a[/x] 12 'b' \\x1b[2J\\r\\u202e" + " long" * 30 + "\nnext\n"


def test_what_can_be_shown_is_shown():
    assert shown("größe 鳥\nnext") == "größe 鳥\nnext"
    assert shown(os.fsdecode(b"\xff.png")) == "\\udcff.png"


def test_importing_leaves_the_collector_on():
    for error in (None, ImportError):
        with suppress(ImportError), importing():
            assert not gc.isenabled()
            if error:
                raise error
        assert gc.isenabled()
    gc.unfreeze()
