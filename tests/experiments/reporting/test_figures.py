import itertools
import os
import threading

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from confitune.experiments.reporting import figures as plots
from confitune.experiments.reporting.figures import save_figure
from confitune.methods import METHODS

NAN = np.nan

FORGETS = np.array([[90.0, 80.0, 71.5], [NAN, 95.0, 60.25], [NAN, NAN, 100.0]])
KEEPS = np.array([[88.0, 88.0, 88.0], [NAN, 91.0, 91.0], [NAN, NAN, 93.0]])
JOINT = np.array([[NAN, NAN, 99.0], [NAN, NAN, 98.0], [NAN, NAN, 97.0]])
RUNS = {
    "finetune": np.stack([FORGETS, FORGETS - 2]),
    "confit": np.stack([KEEPS, KEEPS + 2]),
    "joint": np.stack([JOINT, JOINT]),
}


def curves(by_method):
    """The axes with these curves."""
    axes = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
    plots._curves(axes, by_method, height=3.0)
    return axes


def test_curves_are_means_with_a_student_t_band():
    seeds = np.array([[90.0, 80.0], [94.0, 86.0], [95.0, 83.0]])
    axes = curves({"confit": seeds})
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_xdata(), [1, 2])
    np.testing.assert_allclose(line.get_ydata(), [93, 83])
    band = axes.collections[0].get_paths()[0].vertices
    low, high = stats.t.interval(0.95, 2, loc=83, scale=3 / np.sqrt(3))
    at_the_end = band[band[:, 0] == 2, 1]
    assert (at_the_end.min(), at_the_end.max()) == pytest.approx((low, high))


def test_one_seed_has_a_line_and_no_band():
    axes = curves({"confit": np.array([[90.0, 80.0]])})
    assert len(axes.get_lines()) == 1
    assert len(axes.collections) == 0


def test_lines_are_named_where_they_end_without_overlap():
    axes = curves({f"m{index}": np.array([[90.0, 90.0 - 0.01 * index]]) for index in range(5)})
    assert [text.get_text() for text in axes.texts] == ["m0  90.0", "m1  90.0", "m2  90.0", "m3  90.0", "m4  90.0"]
    figure = axes.figure
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(first.overlaps(second) for first, second in itertools.pairwise(boxes))
    assert all(figure.bbox.x1 >= box.x1 for box in boxes)


def test_methods_stay_apart_by_colour_or_line_style():
    axes = curves({name: np.array([[90.0, 90.0 - index]]) for index, name in enumerate(("confit", *"abcdefghijklm"))})
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 14


def test_overview_shows_the_curves_and_what_each_task_kept():
    figure = plots.overview_figure(RUNS, title="Overview")
    left, *rows = figure.axes
    np.testing.assert_allclose(left.get_lines()[0].get_ydata(), [89, 86.5, (71.5 + 60.25 + 100) / 3 - 1])
    np.testing.assert_allclose(left.get_lines()[2].get_ydata(), [NAN, NAN, 98])

    assert [row.get_title(loc="left") for row in rows] == ["finetune", "confit", "joint"]
    assert [row.get_title(loc="right") for row in rows] == [
        "accuracy 76.2,  forgetting 26.6",
        "accuracy 91.7,  forgetting 0.0",
        "accuracy 98.0",
    ]
    learned, left_at_the_end = rows[0].get_lines()
    assert (learned.get_label(), left_at_the_end.get_label()) == ("when learned", "at the end")
    np.testing.assert_allclose(learned.get_ydata(), [89, 94, 99])
    np.testing.assert_allclose(left_at_the_end.get_ydata(), [70.5, 59.25, 99])
    assert len({row.get_ylim() for row in rows}) == 1
    assert rows[0].get_ylim() == (50, 100)


def test_overview_keeps_a_methods_colour_on_both_sides():
    left, *rows = plots.overview_figure(RUNS, title="t").axes
    assert [line.get_color() for line in left.get_lines()] == [row.get_lines()[0].get_color() for row in rows]


@pytest.mark.parametrize("tasks", [1, 5, 20])
@pytest.mark.parametrize("methods", [1, 4])
def test_written_pictures_are_png_files_of_the_stated_size(tmp_path, tasks, methods):
    matrix = np.where(np.tri(tasks, dtype=bool).T, 90.0, NAN)
    runs = {f"m{index}": np.stack([matrix - index, matrix]) for index in range(methods)}
    save_figure(plots.overview_figure(runs, title="t"), tmp_path / "overview.png")
    with Image.open(tmp_path / "overview.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10
        assert picture.size[0] == 1800
    assert os.listdir(tmp_path) == ["overview.png"]


@pytest.mark.parametrize("method", [*METHODS, "mas-cpr", "mas-afec"])
def test_a_method_has_one_look_in_all_pictures(method):
    alone = plots.looks([method])[method]
    for others in (["finetune"], ["lwf", "ewc"], [*METHODS], ["confit (a.b=1)", *"abcdefg"]):
        looks = plots.looks([*others, method])
        assert looks[method] == alone
        assert len({tuple(look.values()) for look in looks.values()}) == len({*others, method})


def test_the_methods_compared_most_often_have_whole_lines():
    looks = plots.looks(["confit", "finetune", "best"])
    assert [look["linestyle"] for look in looks.values()] == ["-"] * 3
    assert looks["confit"]["color"] == "#0072B2"


def test_the_same_data_gives_the_same_bytes_and_replaces_what_was_there(tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "new" / "b.png"
    first.write_bytes(b"an older picture")
    save_figure(plots.overview_figure(RUNS, title="t"), first)
    save_figure(plots.overview_figure(RUNS, title="t"), second)
    assert first.read_bytes() == second.read_bytes()


def test_a_failed_write_leaves_the_old_picture_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"an older picture")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        save_figure(plots.overview_figure({"m": np.array([[[90.0]]])}, title="t"), path)
    assert path.read_bytes() == b"an older picture"
    assert os.listdir(tmp_path) == ["a.png"]


def test_pictures_can_be_drawn_off_the_main_thread(tmp_path):
    thread = threading.Thread(target=lambda: save_figure(plots.overview_figure(RUNS, title="t"), tmp_path / "a.png"))
    thread.start()
    thread.join()
    assert (tmp_path / "a.png").exists()


def test_methods_may_have_learned_fewer_tasks():
    short = np.stack([KEEPS[:2, :2]] * 2)
    left, *rows = plots.overview_figure({**RUNS, "short": short}, title="t").axes
    assert [len(line.get_xdata()) for line in left.get_lines()] == [3, 3, 3, 2]
    assert len(rows[-1].get_lines()[0].get_xdata()) == 2
