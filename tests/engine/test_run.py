"""A run that was killed and resumed equals one that was not, and its logs hold every epoch once."""

import csv
import dataclasses
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confitune.engine import CsvLog, Listener, TrainSettings
from confitune.engine.checkpoint import Checkpoint
from confitune.errors import ConfituneError
from confitune.files import write_sealed
from killed import Killed, Killer, Starts

CASES = {
    "confit phase running": {"method": "confit", "means": "phase", "statistics": "running"},
    "confit phase pass": {"method": "confit", "means": "phase", "statistics": "pass"},
    "confit window running": {"method": "confit", "means": "window", "statistics": "running"},
    "confit window pass": {"method": "confit", "means": "window", "statistics": "pass"},
    "confit momentum": {"method": "confit", "momentum": 0.9, "lr": 0.01},
    "confit adam": {"method": "confit", "optimizer": "adam", "lr": 0.003},
    "confit random everything": {"method": "confit", "dropout": 0.3, "augmentation": "flip"},
    "finetune": {"method": "finetune"},
    "finetune momentum step": {"method": "finetune", "momentum": 0.9, "lr": 0.01, "lr_schedule": "step"},
    "finetune adam cosine": {"method": "finetune", "optimizer": "adam", "lr": 0.003, "lr_schedule": "cosine"},
    "single-task": {"method": "single-task"},
    "single-task momentum": {"method": "single-task", "momentum": 0.9, "lr": 0.01},
    "bn-only": {"method": "bn-only"},
    "best": {"method": "best"},
    "ccll": {"method": "ccll", "lr_schedule": "step"},
    "linear-probe": {"method": "linear-probe"},
    "joint": {"method": "joint"},
}


@pytest.fixture
def runs(make_run, tmp_path):
    """Runs of 5 epochs in a folder of tmp_path, with a checkpoint after every epoch."""

    def make(folder, *listeners, **options):
        folder = tmp_path / folder
        folder.mkdir(exist_ok=True)
        # The killer comes last: what it kills has been logged, as when a process dies after an epoch.
        listeners = (CsvLog(folder), *listeners)
        options = {"epochs": 5, "config": {"what": "test"}, **options}
        return make_run(listeners=listeners, folder=folder, **options)

    return make


def rows(path):
    """Lines of a log without what differs from run to run."""
    return [{key: text for key, text in row.items() if key != "seconds"} for row in csv.DictReader(path.open())]


def assert_same(found, run, reference, whole_run, folder, other):
    assert found.accuracy_matrix == reference.accuracy_matrix
    assert found.as_learned == reference.as_learned
    assert found.final_sha256 == reference.final_sha256
    assert run.state.images == whole_run.state.images
    for log in ("epochs.csv", "accuracy.csv"):
        assert rows(folder / log) == rows(other / log)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_resumed_equals_undisturbed(runs, tmp_path, options):
    whole_run = runs("whole", **options)
    reference = whole_run.run()
    joint = options["method"] == "joint"  # a single task: there is nothing between tasks
    within = (0, 3) if joint else (1, 3)
    for task, epoch in [within] if joint else [(1, None), within]:
        folder = f"killed in {task} at {epoch}"
        with pytest.raises(Killed):
            runs(folder, Killer(task, epoch), **options).run()
        starts = Starts()
        run = runs(folder, starts, **options)
        assert run.resume()
        found = run.run()
        assert starts.tasks[0] == (task, epoch or 0)
        assert_same(found, run, reference, whole_run, tmp_path / folder, tmp_path / "whole")


def test_the_log_of_an_undisturbed_run_has_every_epoch_once(runs, tmp_path):
    runs("whole").run()
    logged = [(int(row["task"]), int(row["epoch"])) for row in rows(tmp_path / "whole" / "epochs.csv")]
    assert logged == list(itertools.product(range(3), range(5)))
    stages = [row["stage"] for row in rows(tmp_path / "whole" / "epochs.csv")]
    assert stages == ["head", "head+norms", "all", "all", "all"] * 3
    pairs = [(int(row["after_task"]), int(row["task"])) for row in rows(tmp_path / "whole" / "accuracy.csv")]
    assert pairs == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_killed_anywhere_within_a_task(runs, tmp_path):
    whole_run = runs("whole")
    reference = whole_run.run()
    for task, epoch in [(0, 0), (0, 4), (1, 2), (2, 4)]:
        folder = f"killed in {task} at {epoch}"
        with pytest.raises(Killed):
            runs(folder, Killer(task, epoch)).run()
        starts = Starts()
        run = runs(folder, starts)
        assert run.resume() == ((task, epoch) != (0, 0))
        found = run.run()
        assert starts.epochs == [pair for pair in itertools.product(range(3), range(5)) if pair >= (task, epoch)]
        assert_same(found, run, reference, whole_run, tmp_path / folder, tmp_path / "whole")


def test_killed_three_times(runs, tmp_path):
    whole_run = runs("whole")
    reference = whole_run.run()
    for killer in (Killer(0, 2), Killer(1), Killer(1, 4)):
        run = runs("killed", killer)
        run.resume()
        with pytest.raises(Killed):
            run.run()
    run = runs("killed")
    run.resume()
    assert_same(run.run(), run, reference, whole_run, tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_the_checkpoint_of_a_finished_task(runs, tmp_path, monkeypatch, moment):
    whole_run = runs("whole")
    reference = whole_run.run()
    save = Checkpoint.save

    def save_and_die(checkpoint, folder):
        if moment == "after" or checkpoint.task < 2:
            save(checkpoint, folder)
        if checkpoint.task == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save_and_die)
        with pytest.raises(Killed):
            runs("killed").run()
    starts = Starts()
    run = runs("killed", starts)
    assert run.resume()
    found = run.run()
    assert starts.tasks[0] == ((1, 4) if moment == "before" else (2, 0))
    assert_same(found, run, reference, whole_run, tmp_path / "killed", tmp_path / "whole")


def test_a_finished_run_resumes_to_its_result_without_training(runs):
    reference = runs("whole").run()
    starts = Starts()
    run = runs("whole", starts)
    assert run.resume()
    found = run.run()
    assert starts.epochs == []
    assert (found.accuracy_matrix, found.final_sha256) == (reference.accuracy_matrix, reference.final_sha256)


def test_seconds_go_on_where_they_were(runs, tmp_path):
    with pytest.raises(Killed):
        runs("killed", Killer(2, 3)).run()
    saved = Checkpoint.load(tmp_path / "killed", {"what": "test"})
    dataclasses.replace(saved, seconds=1000.0, train_seconds=500.0).save(tmp_path / "killed")
    run = runs("killed")
    run.resume()
    result = run.run()
    assert 1000 < result.seconds < 1060
    images = 5 * (48 + 40 + 40)  # 5 epochs of the full batches of 48, 40 and 42 images
    assert run.state.images == images
    assert result.images_per_second == pytest.approx(images / run.state.train_seconds, abs=0.06)
    assert run.state.train_seconds > 500


def test_nothing_to_resume_from(runs, make_run):
    assert not runs("empty").resume()
    assert not make_run().resume()


def test_another_configuration_is_refused_and_named(runs, tmp_path):
    with pytest.raises(Killed):
        runs("killed", Killer(1), config={"lr": 0.05, "epochs": 5, "seed": 0}).run()
    run = runs("killed", config={"lr": 0.1, "epochs": 5, "model": "other", "seed": 0})
    with pytest.raises(ConfituneError) as caught:
        run.resume()
    message = str(caught.value)
    assert str(tmp_path / "killed" / "checkpoint.pt") in message
    assert "lr was 0.05, now 0.1" in message
    assert "model was not set, now 'other'" in message
    assert "epochs" not in message
    assert "seed" not in message


def damaged(whole, how):
    place = {"first byte": 0, "seal": 50, "in the middle": len(whole) // 2, "last byte": len(whole) - 1}.get(how)
    if place is not None:
        return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    return {"cut": whole[: len(whole) // 2], "text": b"not a checkpoint", "empty": b""}[how]


DAMAGES = ["first byte", "seal", "in the middle", "last byte", "cut", "text", "empty"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(runs, make_run, tmp_path, how):
    folder, notes = tmp_path / "killed", []

    class Hears(Listener):
        def note(self, text):
            notes.append(text)

    with pytest.raises(Killed):
        runs("killed", Killer(1, 3)).run()
    path = folder / "checkpoint.pt"
    path.write_bytes(damaged(path.read_bytes(), how))
    again = runs("killed", Hears())
    assert again.resume()
    assert [note.startswith(f"{path} is damaged") and "checkpoint.before.pt" in note for note in notes] == [True]
    assert again.run().final_sha256 == make_run(epochs=5).run().final_sha256


@pytest.mark.parametrize("how", DAMAGES)
def test_two_damaged_checkpoints_are_named(runs, tmp_path, how):
    with pytest.raises(Killed):
        runs("killed", Killer(1, 3)).run()
    paths = [tmp_path / "killed" / name for name in ("checkpoint.pt", "checkpoint.before.pt")]
    for path in paths:
        path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(ConfituneError, match="to start this run anew") as caught:
        runs("killed").resume()
    assert all(str(path) in str(caught.value) for path in paths)


def sealed(path, content):
    data = io.BytesIO()
    torch.save(content, data)
    write_sealed(path, data.getvalue())


def test_a_whole_file_that_is_no_checkpoint_is_named(runs, tmp_path):
    path = tmp_path / "killed" / "checkpoint.pt"
    path.parent.mkdir()
    sealed(path, {"weights": torch.zeros(3)})
    with pytest.raises(ConfituneError, match="no checkpoint of this version") as caught:
        runs("killed").resume()
    assert str(path) in str(caught.value)


def test_a_checkpoint_cannot_run_code(runs, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    (tmp_path / "killed").mkdir()
    sealed(tmp_path / "killed" / "checkpoint.pt", {"config": Trap()})
    with pytest.raises(ConfituneError, match="no checkpoint of this version"):
        runs("killed").resume()
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_of_another_kind_of_network_is_refused(runs):
    with pytest.raises(Killed):
        runs("killed", Killer(1), method="confit", means="phase").run()
    with pytest.raises(ConfituneError, match=r"phase.*window"):
        runs("killed", method="confit", means="window").resume()


def test_diverging_names_task_and_epoch_and_leaves_the_checkpoint(runs, make_run, tmp_path):
    with pytest.raises(Killed):
        runs("killed", Killer(1)).run()
    path = tmp_path / "killed" / "checkpoint.pt"
    before = path.read_bytes()
    # 5 steps an epoch, each multiplies the weights by -1e6: finite at the end of the first epoch, not of the second.
    run = runs("killed", lr=1e3, weight_decay=1e3)
    run.resume()
    message = r"in epoch 2 from step 2 of 5 on \(stage 'head\+norms'\); try a learning rate below 1000"
    with pytest.raises(ConfituneError, match=message):
        run.run()
    checkpoint = Checkpoint.load(tmp_path / "killed", {"what": "test"})
    assert (checkpoint.task, checkpoint.fit["epoch"]) == (1, 1)  # after the first epoch
    assert all(tensor.isfinite().all() for key, tensor in checkpoint.net.items() if not key.endswith("_extra_state"))
    path.write_bytes(before)
    reference = make_run(epochs=5).run()
    again = runs("killed")
    assert again.resume()
    assert again.run().final_sha256 == reference.final_sha256


def test_diverging_in_the_first_task(make_run):
    with pytest.raises(
        ConfituneError, match=r"task 'dark' became (nan|inf).* in epoch 1 from step \d of 6 on \(stage 'all'\)"
    ):
        make_run("finetune", lr=1e12).run()


def test_diverging_in_the_very_last_step(make_run, sequence):
    """The loss before the step is finite and no later one is computed; the network is ruined all the same."""
    run = make_run("finetune", lr=1e38, weight_decay=1e10, epochs=1, batch_size=48, tasks=sequence[:1])
    with pytest.raises(ConfituneError, match=r"task 'dark' became 1\.\d+, its weights infinite in epoch 1"):
        run.run()


def test_without_a_folder_nothing_is_written(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run().run()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_replaced_whole(runs, tmp_path):
    seen = []

    class Looks(Listener):
        def task_started(self, task, name, first_epoch):
            seen.append(sorted(path.name for path in (tmp_path / "whole").iterdir()))

    runs("whole", Looks()).run()
    files = ["accuracy.csv", "checkpoint.before.pt", "checkpoint.pt", "epochs.csv"]
    assert seen == [["accuracy.csv", "epochs.csv"], files, files]
    checkpoint = Checkpoint.load(tmp_path / "whole", {"what": "test"})
    assert (checkpoint.task, checkpoint.fit) == (3, None)


def test_settings_are_not_compared_by_the_run_itself(runs):
    """`config` alone says what a run is: the experiment puts into it what matters there."""
    with pytest.raises(Killed):
        runs("killed", Killer(1)).run()
    run = runs("killed", eval_batch_size=7)
    assert run.resume()
    assert run.settings == TrainSettings(epochs=5, batch_size=8, lr=0.05, device="cpu", eval_batch_size=7)


@pytest.fixture
def saved(monkeypatch):
    """(task, epoch) of every checkpoint that is written; epoch None after a whole task."""
    pairs, save = [], Checkpoint.save

    def spy(checkpoint, folder):
        pairs.append((checkpoint.task, checkpoint.fit and checkpoint.fit["epoch"]))
        save(checkpoint, folder)

    monkeypatch.setattr(Checkpoint, "save", spy)
    return pairs


def test_without_seconds_between_them_checkpoints_are_written_after_every_epoch(runs, saved):
    runs("whole", checkpoint_seconds=0, epochs=3).run()
    assert saved == [pair for task in range(3) for pair in ((task, 1), (task, 2), (task + 1, None))]


def test_a_short_run_writes_no_checkpoint_and_ends_the_same(runs, saved, tmp_path):
    reference = runs("whole", checkpoint_seconds=0).run()
    saved.clear()
    found = runs("short", checkpoint_seconds=1e9).run()
    assert saved == []
    assert sorted(path.name for path in (tmp_path / "short").iterdir()) == ["accuracy.csv", "epochs.csv"]
    assert (found.accuracy_matrix, found.final_sha256) == (reference.accuracy_matrix, reference.final_sha256)
    assert rows(tmp_path / "short" / "epochs.csv") == rows(tmp_path / "whole" / "epochs.csv")


def test_checkpoints_are_written_when_the_last_one_is_old_enough(runs, saved, monkeypatch):
    """By a clock that ticks a second an epoch: every fourth of fifteen, between tasks or within."""
    clock = {"now": 100.0}
    monkeypatch.setattr("confitune.engine.run.time.perf_counter", lambda: clock["now"])

    class Tick(Listener):
        def epoch_ended(self, end):
            clock["now"] += 1

    runs("whole", Tick(), checkpoint_seconds=4).run()
    assert saved == [(0, 4), (1, 3), (2, 2)]
    saved.clear()
    # Resumed, the next is due four seconds from now, not from the start of the first run.
    run = runs("whole", Tick(), checkpoint_seconds=2)
    assert run.resume()
    run.run()
    assert saved == [(2, 4)]


def test_a_run_does_not_go_on_with_other_images(runs, sequence):
    with pytest.raises(Killed):
        runs("killed", Killer(1)).run()
    first = sequence[0].train
    pixels = first.pixels.clone()
    pixels[first.rows[0]] = 255 - pixels[first.rows[0]]
    other = replace(sequence[0], train=replace(first, pixels=pixels))
    with pytest.raises(ConfituneError, match=r"are not those that the run in .* was begun with"):
        runs("killed", tasks=replace(sequence, tasks=(other, *sequence.tasks[1:]))).resume()
    assert runs("killed", tasks=replace(sequence)).resume()


def test_another_number_of_threads_is_noted(runs, monkeypatch):
    with pytest.raises(Killed):
        runs("killed", Killer(1)).run()
    notes = []
    watching = Listener()
    watching.note = notes.append
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert runs("killed", watching).resume()
    assert any("now 77: last digits may differ" in note for note in notes)
