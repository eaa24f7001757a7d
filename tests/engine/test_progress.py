"""What a person sees: plain lines in a file or a pipe, a bar on a terminal."""

import io
import re

import pytest
from rich.console import Console

from confitune.engine import EpochEnd
from confitune.engine.progress import LiveProgress


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160)


def shown(console):
    """What was written, without the terminal's control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def end(task, epoch, loss=0.5, epochs=5):
    return EpochEnd(task, f"task{task + 1}", "all", epoch, epochs, loss, 80.0, 0.01, 0.1, 40)


def test_one_plain_line_a_task_without_a_terminal(make_run):
    plain = console(terminal=False)
    result = make_run("confit", epochs=5, listeners=(LiveProgress(plain, "tiny confit"),)).run()
    lines = plain.file.getvalue().splitlines()
    assert len(lines) == 3
    for task, line in enumerate(lines):
        column = [row[task] for row in result.accuracy_matrix[: task + 1]]
        average = sum(column) / len(column)
        pattern = rf"tiny confit: task {task + 1} of 3, loss \d\.\d{{3}}, average accuracy so far {average:.1f}%"
        assert re.fullmatch(pattern, line)
    assert "\x1b" not in plain.file.getvalue()


def test_the_line_shows_the_loss_of_the_last_epoch():
    plain = console(terminal=False)
    progress = LiveProgress(plain, "run")
    progress.run_started("confit", ["a", "b"], 5, 0)
    progress.task_started(0, "a", 0)
    progress.epoch_ended(end(0, 3, loss=0.9))
    progress.epoch_ended(end(0, 4, loss=0.125))
    progress.task_ended(0, [75.0, 50.0])
    assert plain.file.getvalue() == "run: task 1 of 2, loss 0.125, average accuracy so far 62.5%\n"


def test_a_terminal_shows_task_stage_epoch_loss_and_accuracy():
    terminal = console(terminal=True)
    progress = LiveProgress(terminal, "digits confit")
    progress.run_started("confit", ["a", "b", "c"], 5, 0)
    progress.task_started(0, "a", 0)
    progress.stage_started("head")
    progress.epoch_ended(end(0, 4, loss=0.25))
    progress.task_ended(0, [81.0])
    progress.task_started(1, "b", 0)
    progress.stage_started("head+norms")
    progress.step_done(5, 10)
    progress.epoch_ended(end(1, 1, loss=0.125))
    progress.close()  # draws what is there a last time
    last = [line for line in shown(terminal).splitlines() if "digits confit" in line][-1]
    assert "task 2/3" in last
    assert "head+norms" in last
    assert "epoch 3/5" in last
    assert "loss 0.125" in last
    assert "accuracy so far 81.0%" in last


@pytest.mark.parametrize("method", ["confit", "joint", "single-task"])
def test_a_whole_run_on_a_terminal(make_run, method):
    terminal = console(terminal=True)
    progress = LiveProgress(terminal, "tiny")
    make_run(method, epochs=5, listeners=(progress,)).run()
    text = shown(terminal)
    assert "tiny" in text
    assert re.search(r"task \d/\d  all +epoch \d/5", text)
    before = terminal.file.getvalue()
    progress.close()  # is gone already: the last task took it away
    assert terminal.file.getvalue() == before


def test_a_run_that_breaks_off_gives_the_terminal_back(make_run):
    terminal = console(terminal=True)
    progress = LiveProgress(terminal, "tiny")
    with pytest.raises(Exception, match="became"):
        make_run("finetune", lr=1e12, listeners=(progress,)).run()
    progress.close()
    text = terminal.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor that was hidden is shown again
    terminal.print("after")
    assert shown(terminal).endswith("after\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_printed_as_they_are(terminal):
    out = console(terminal)
    progress = LiveProgress(out, "run")
    progress.run_started("confit", ["a"], 5, 0)
    progress.note("task '[red] cars [/x]' has 3 training images")
    progress.close()
    assert "note: task '[red] cars [/x]' has 3 training images" in shown(out)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_label_with_brackets_is_printed_as_it_is(terminal):
    out = console(terminal)
    progress = LiveProgress(out, "folder:/data/[a]/[/b] confit")
    progress.run_started("confit", ["a", "b"], 5, 0)
    progress.task_started(0, "a", 0)
    progress.epoch_ended(end(0, 4))
    progress.task_ended(0, [50.0])
    progress.close()
    assert "folder:/data/[a]/[/b] confit" in shown(out)


def test_on_a_terminal_it_does_not_speak_of_epochs_while_it_judges():
    terminal = console(terminal=True)
    progress = LiveProgress(terminal, "birds", stages=True)
    progress.run_started("best", ["birds"], 10, 0)
    progress.task_started(0, "birds", 0)
    progress.busy_with("looking at the photos")
    before = shown(terminal)
    progress.stage_started("head")
    progress.step_done(5, 5)
    progress.close()
    after = shown(terminal)
    assert "epoch" not in before
    assert "epoch 1/10" in after
