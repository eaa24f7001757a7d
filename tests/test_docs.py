"""The pages of docs/ show what the benchmarks measured."""

import copy
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from confitune.cli import app
from confitune.settings import TrainSettings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "benchmarks"

sys.path.insert(0, str(ROOT / "benchmarks"))  # they are programs, not a package, and import one another by name
try:
    show, tables, figures, floor = map(importlib.import_module, ("show", "show_tables", "show_figures", "show_floor"))
finally:
    sys.path.pop(0)

PAGE = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in show.PAGES)
BLOCKS = show.MARKED.findall(PAGE)
DRAWN = show.pictures(PAGE, RESULTS)


def step(norm, stage, speed, mode="graph", batch=32, how=None):
    return {
        "batch_size": batch,
        "mode": mode,
        "execution": how or f"bf16, {mode}",
        "norm": norm,
        "stage": stage,
        "images_per_second": speed,
    }


def whole(statistics, seconds, cost):
    sizes = {"batch_size": 32, "mode": "graph", "images": 1280, "epochs": 10}
    return {**sizes, "statistics": statistics, "seconds": seconds, "cost_against_plain_bn": cost}


MEASURED_ON = {"device": "NVIDIA H200", "versions": {"torch": "9.9.9"}}
STEPS = {
    **MEASURED_ON,
    "model": "resnet18",
    "pixels": 224,
    "means": "window",
    "published": {"32": 2000.0, "128": 4000.0},
    "steps": [
        step("plain BN", "all", 11_000.0),
        step("silent", "head", 24_690.4),
        step("silent", "head+norm", 14_000.0),
        step("silent", "all", 10_000.0),
        step("tracking", "all", 8_000.0),
        step("silent", "all", 9_500.0, how="bf16, graph, deterministic"),
        step("silent", "all", 12_000.0, "compile"),
        step("silent", "all", 20_000.0, batch=128),
    ],
    "tasks": [
        whole("plain BN", [1.0, 2.0, 3.0], 0.0),
        whole("running", [2.1, 2.2, 2.5], 0.1),
        whole("pass", [1.8, 1.9, 2.4], -0.05),
    ],
}
GROWTH = {
    **MEASURED_ON,
    "model": "resnet18",
    "images_a_task": 1320,
    "epochs": 5,
    "batch_size": 32,
    "execution": "bf16, graph",
    "ratio_of_time": 1.5,
    "ratio_of_memory": 2.0,
    "bytes_a_task": 200_820.0,
    "points": [
        {
            "tasks": i + 1,
            "seconds": (i + 1) / 10 if i else 30.0,
            "memory_bytes": 2**20 * (1000 + 10 * i),
            "stored_bytes": 2**20 * (i + 1) // 2,
        }
        for i in range(30)
    ],
}
WHOLE = {
    **MEASURED_ON,
    "dataset": "flowers102",
    "model": "resnet18",
    "means": "window",
    "epochs": 10,
    "batch_size": 32,
    "execution": "bf16, graph",
    "seconds": {"straightforward": [1250.0, 1200.0], "confitune": [50.0, 40.0]},
    "images_per_second": {"straightforward": 100.0, "confitune": 3000.0},
    "acc": {"straightforward": 85.04, "confitune": 86.06},
    "seconds_to_place_images_on_device": 0.25,
    "parallel": {
        "seeds": 5,
        "seconds": 125.0,
        "images_per_second": 4800.0,
        "ratio_to_one_seed": 1.6,
        "acc": [86.06, 84.0],
        "first_equals_alone": True,
    },
}


def changed(numbers, **changes):
    return {**copy.deepcopy(numbers), **changes}


MANY = {
    **MEASURED_ON,
    "few": 10,
    "tasks": 10_000,
    "ready": 64,
    "predicted": 1000,
    "times": {
        "opening": {"few": 0.0095, "many": 0.25, "ratio": 26.32},
        "adding a task": {"few": 0.008, "many": 0.0084, "ratio": 1.05},
    },
    "memory_start_mb": 800.2,
    "memory_ready_mb": 840.4,
    "memory_end_mb": 850.6,
    "task_mb": 0.426,
    "backbone_mb": 13.48,
    "index_mb": 9.96,
    "disk_mb": 4310.2,
}


def cells(text, row):
    """The cells of the one line of a table that starts with `row`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def labels(axes):
    return [text.get_text().strip() for text in axes.texts]


# What is written down


@pytest.mark.parametrize(("pattern", "part", "block"), BLOCKS, ids=[f"{p}-{part}" for p, part, _ in BLOCKS])
def test_blocks_show_what_was_measured(pattern, part, block):
    if not list(RESULTS.glob(pattern)):
        pytest.skip(f"no results/benchmarks/{pattern} yet")
    assert block == show.block(pattern, part, RESULTS), "stale: run python benchmarks/show.py"


def test_every_measured_file_has_a_block_and_every_part_is_used():
    shown = {source for pattern, _, _ in BLOCKS for source in RESULTS.glob(pattern)}
    assert sorted(RESULTS.glob("*.json")) == sorted(shown)
    assert {part for _, part, _ in BLOCKS} == set(show.PARTS)
    assert len(BLOCKS) == PAGE.count("<!-- results/benchmarks/")


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_were_drawn_from_the_files_as_they_are(name):
    with Image.open(ROOT / "docs" / "speed" / name) as picture:
        assert picture.text["Source"] == show.digest(DRAWN[name][0]), "stale: run python benchmarks/show.py"
        assert picture.width == 1800


def test_no_picture_is_left_over():
    assert {path.name for path in (ROOT / "docs" / "speed").glob("*.png")} == set(DRAWN)


def test_commands_of_the_page_name_programs_and_options_that_there_are():
    commands = re.findall(r"^python (benchmarks/\w+\.py)(.*)$", PAGE, re.MULTILINE)
    programs = (ROOT / "benchmarks").glob("*.py")
    there = {f"benchmarks/{path.name}" for path in programs if "ArgumentParser(" in path.read_text()}
    assert {program for program, _ in commands} == there
    for program, options in commands:
        source = (ROOT / program).read_text()
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{program} has no {option}"
    headings = re.findall(r"^## `([\w-]+)`", PAGE, re.MULTILINE)
    assert headings == ["--step", "--precision", "pixels", "--parallel-seeds", "deterministic"]
    assert {heading.strip("-") for heading in headings} - {"parallel-seeds"} <= set(TrainSettings.model_fields)
    (run,) = (command for command in app.registered_commands if command.name == "run")
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(run.callback).parameters}
    assert {heading for heading in headings if heading.startswith("--")} <= options


# Words and tables


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "0.200"), (0.6134, "0.613"), (9.996, "10.0"), (14.0, "14.0"), (99.96, "100"), (1234.5, "1,234")],
)
def test_seconds_have_three_digits(value, text):
    assert tables.seconds(value) == text


@pytest.mark.parametrize(("share", "text"), [(0.0423, "+4.2%"), (-0.05, "−5.0%"), (-0.0001, "0.0%"), (1.05, "+105.0%")])
def test_percent_is_signed(share, text):
    assert tables.percent(share) == text


def test_stages_stand_beside_the_published_way_of_the_same_batch_size():
    text = tables.stages_table(STEPS)
    assert cells(text, "32 | published way (fp32, eager)")[2:] == ["-", "-", "2,000"]
    assert cells(text, "32 | bf16, graph")[2:] == ["24,690 (12.3×)", "14,000 (7.00×)", "10,000 (5.00×)"]
    assert cells(text, "32 | bf16, compile")[2:] == ["-", "-", "12,000 (6.00×)"]
    assert cells(text, "128 | bf16, graph")[2:] == ["-", "-", "20,000 (5.00×)"]
    assert text.splitlines()[:2] == [
        "| batch | how | trains head | trains head and norms | trains everything |",
        "|---|---|---|---|---|",
    ]


def test_deterministic_is_compared_with_the_same_step_without():
    text = tables.deterministic_table(STEPS)
    assert cells(text, "32 | bf16, graph, deterministic")[2:] == ["10,000", "9,500", "+5.3%"]
    assert len(text.splitlines()) == 3  # the other batch size and mode were not measured with it
    assert tables.deterministic_table(changed(STEPS, steps=[])) == "Not measured in this run.\n"


def test_tracking_costs_time_against_plain_batch_norm():
    steps, tasks = tables.tracking_table(STEPS).split("\n\n")
    assert cells(steps, "32 | bf16, graph")[2:] == ["11,000", "10,000 (+10.0%)", "8,000 (+37.5%)"]
    assert cells(steps, "32 | bf16, compile")[2:] == ["-", "12,000", "-"]
    assert cells(tasks, "32 | bf16, graph")[2:] == [
        "1,280 images, 10 epochs",
        "2.00",
        "2.20 (+10.0%)",
        "1.90 (−5.0%)",
    ]


def test_growth_compares_early_tasks_with_the_last_ten():
    text = tables.growth_table(GROWTH)
    assert cells(text, "1")[1:] == ["30.0", "1,000", "0.5"]
    assert cells(text, "2 to 11")[1:] == ["0.650", "1,055", "5.5"]
    assert cells(text, "the last ten of 30")[1:] == ["2.55", "1,245", "15.0"]
    assert cells(text, "the last ten against 2 to 11")[1:] == ["1.50×", "2.00×", "-"]
    assert "200,820 bytes" in text
    assert "GPU memory in use, MiB" in text
    assert "most memory the process held, MiB" in tables.growth_table(changed(GROWTH, device="cpu (x86_64)"))


def test_whole_sequences_take_the_best_repeat_and_name_what_ran():
    one, side, same, placing = tables.whole_table(WHOLE).split("\n\n")
    assert cells(one, "straightforward loop")[1:] == ["fp32, eager", "1,200", "100", "1.00×", "85.0"]
    assert cells(one, "confitune")[1:] == ["bf16, graph", "40.0", "3,000", "30.0×", "86.1"]
    assert cells(side, "one after the other (5 × one seed)")[1:] == ["bf16, graph", "200", "3,000", "1.00×", "-"]
    assert cells(side, "side by side")[1:] == ["bf16, graph", "125", "4,800", "1.60×", "86.1, 84.0"]
    assert same == "Side by side, seed 0 has the accuracy that it has alone."
    assert "0.250 s" in placing
    differs = changed(WHOLE, parallel={**WHOLE["parallel"], "first_equals_alone": False})
    assert "seed 0 has not the accuracy" in tables.whole_table(differs)


def test_whole_sequences_without_a_baseline_and_from_older_files():
    alone = changed(WHOLE, seconds={"straightforward": [], "confitune": [50.0]})
    del alone["parallel"], alone["execution"], alone["images_per_second"], alone["seconds_to_place_images_on_device"]
    text = tables.whole_table(alone)
    assert cells(text, "confitune")[1:] == ["not recorded", "50.0", "-", "-", "86.1"]
    assert "straightforward" not in text
    assert len(figures.whole_figure(alone).axes) == 1


def test_many_tasks_stand_beside_few():
    text = tables.many_table(MANY)
    assert cells(text, "opening")[1:] == ["9.5", "250.0", "26.3×"]
    assert cells(text, "adding a task")[1:] == ["8.0", "8.4", "1.05×"]
    assert cells(text, "milliseconds") == ["milliseconds", "10 tasks", "10,000 tasks", "against few"]
    assert cells(text, "with 64 ready")[1:] == ["840"]
    assert cells(text, "after 1,000 different ones, 64 ready")[1:] == ["851"]
    assert cells(text, "disk, a task")[1:] == ["0.43"]
    assert cells(text, "disk, all")[1:] == ["4,310"]


def test_a_cpu_places_nothing():
    assert "Placing" not in tables.whole_table(changed(WHOLE, device="cpu (x86_64, 2 threads)"))


# The floor


def test_work_of_resnet18_is_what_torch_counts():
    work = floor.WORK["resnet18", 224]
    with torch.device("meta"):
        net, x = timm.create_model("resnet18", num_classes=10), torch.empty(1, 3, 224, 224)
    written = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, output: written.append(output.numel()))

    def flops(part, backward):
        for name, parameter in net.named_parameters():
            norm = isinstance(net.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d)
            parameter.requires_grad_(part == "all" or name.startswith("fc") or (part == "head+norm" and norm))
        with FlopCounterMode(display=False) as counter:
            loss = net(x).sum()
            if backward:
                loss.backward()
        return counter.get_total_flops()

    assert work.forward == pytest.approx(flops("all", backward=False), rel=1e-3)
    assert work.activations == pytest.approx(sum(written), rel=1e-3)
    for stage in ("head", "head+norm", "all"):
        assert work.flops(stage) == pytest.approx(flops(stage, backward=True), rel=1e-3)


def test_floor_is_the_lower_of_arithmetic_and_memory(monkeypatch):
    monkeypatch.setitem(floor.DEVICES, "NVIDIA H200", floor.Device(flops=1e15, bandwidth=5e12))
    monkeypatch.setitem(floor.WORK, ("resnet18", 224), floor.Work(forward=4e9, first=1e9, activations=2.5e6))
    text = floor.floor_table(changed(STEPS, model="resnet18.tv_in1k"))
    # 4 + 3 + 4 GFLOP; 14 passes of 2.5 million numbers of 2 bytes
    best = "20,000 (bf16, graph, batch 128)"
    assert cells(text, "everything")[1:] == ["11.0", "70", "90,909", "71,429", best, "28%"]
    assert cells(text, "head and norms")[1:5] == ["7.0", "60", "142,857", "83,333"]
    assert cells(text, "head")[1:5] == ["4.0", "25", "250,000", "200,000"]
    assert "1,000 TFLOP/s in bf16 and 5.0 TB/s" in floor.about_floor(STEPS)


def test_no_floor_without_a_stated_peak():
    assert floor.floor_table(changed(STEPS, device="NVIDIA T4")).startswith("No estimate")
    assert floor.floor_table(changed(STEPS, pixels=32)).startswith("No estimate")


# Pictures


def test_stage_bars_start_at_zero_and_carry_speed_and_ratio():
    small, large = figures.stages_figure(STEPS).axes
    assert [axes.get_title(loc="left") for axes in (small, large)] == ["batch 32", "batch 128"]
    assert [bar.get_width() for bar in small.patches] == [24_690.4, 14_000, 2_000, 10_000, 12_000]
    assert labels(small) == ["24,690  12.3×", "14,000  7.00×", "2,000  1.00×", "10,000  5.00×", "12,000  6.00×"]
    assert labels(large) == ["4,000  1.00×", "20,000  5.00×"]
    assert small.get_xlim() == large.get_xlim()
    assert small.get_xlim()[0] == 0
    assert small.get_xlim()[1] > 24_690.4
    assert [tick.get_text() for tick in small.get_yticklabels()] == [
        "trains\nhead",
        "trains\nhead and norms",
        "trains\neverything",
    ]


def test_legend_names_precision_and_mode_once():
    (legend,) = figures.stages_figure(STEPS).legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "bf16, compile",
        "bf16, graph",
        "published way (fp32, eager), everything trained",
    ]


def test_tracking_bars_are_speeds_above_and_percent_below():
    above, below = figures.tracking_figure(STEPS).axes
    assert [bar.get_height() for bar in above.patches] == [11_000, 10_000, 8_000, 12_000, 20_000]
    assert labels(above) == ["11,000", "10,000\n+10.0%", "8,000\n+37.5%", "12,000", "20,000"]
    assert above.get_ylim()[0] == 0
    assert [bar.get_height() for bar in below.patches] == pytest.approx([10, -5])
    assert labels(below) == ["+10.0%", "−5.0%"]
    # Lines reach from the fastest to the slowest repeat.
    ends = [line.get_segments()[0][:, 1].tolist() for line in below.collections]
    assert ends == [pytest.approx([5, 25]), pytest.approx([-10, 20])]
    assert below.get_ylim()[0] < -10
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["batch 32\nbf16, graph"]


def test_growth_axes_start_at_zero_and_say_where_the_first_task_is():
    time, memory = figures.growth_figure(GROWTH).axes
    assert time.lines[0].get_ydata().tolist()[10:12] == [1.1, 1.2]
    assert time.get_ylim() == (0, pytest.approx(1.25 * 3.0))
    assert labels(time) == ["↑ the first task: 30.0 s"]
    assert memory.lines[0].get_ydata()[-1] == 1290
    assert memory.lines[1].get_ydata()[-1] == 15
    assert labels(memory) == ["GPU memory in use: 1,290", "states of all tasks so far: 15"]
    assert memory.get_ylim()[0] == 0
    steady = changed(GROWTH, points=GROWTH["points"][1:])
    assert labels(figures.growth_figure(steady).axes[0]) == []


def test_whole_bars_start_at_zero_and_carry_the_ratio():
    one, side = figures.whole_figure(WHOLE).axes
    assert [bar.get_width() for bar in one.patches] == [1200, 40]
    assert labels(one) == ["1,200 s", "40.0 s  (30.0× as fast)"]
    assert [tick.get_text() for tick in one.get_yticklabels()] == [
        "straightforward loop\nfp32, eager",
        "confitune\nbf16, graph",
    ]
    assert [bar.get_width() for bar in side.patches] == [200, 125]
    assert labels(side) == ["200 s", "125 s  (1.60× as fast)"]
    assert side.get_title(loc="left") == "5 seeds with confitune"
    assert one.get_xlim()[0] == side.get_xlim()[0] == 0


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [
        (figures.stages_figure, STEPS),
        (figures.tracking_figure, STEPS),
        (figures.growth_figure, GROWTH),
        (figures.whole_figure, WHOLE),
    ],
)
def test_every_picture_names_device_and_version(draw, numbers):
    assert any("NVIDIA H200, torch 9.9.9" in text.get_text() for text in draw(numbers).texts)


# The page


def test_a_page_is_rewritten_between_its_markers_only(tmp_path, monkeypatch):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    for name in ("b", "a"):
        (results / f"end_to_end-{name}.json").write_text(json.dumps(changed(WHOLE, dataset=f"set-{name}")))
    begin, missing = (
        "<!-- results/benchmarks/end_to_end-*.json whole -->\n",
        "<!-- results/benchmarks/x.json floor -->\n",
    )
    (docs / "speed.md").write_text(f"before\n{begin}old\n<!-- end -->\nbetween\n{missing}<!-- end -->\nafter\n")
    for name in set(show.PAGES) - {"speed.md"}:
        (docs / name).write_text("nothing to show\n")
    monkeypatch.setattr(sys, "argv", ["show.py", "--results", str(results), "--docs", str(docs)])
    show.main()
    assert (docs / "measurements.md").read_text() == "nothing to show\n"
    text = (docs / "speed.md").read_text()
    assert text.startswith(f"before\n{begin}![A whole sequence")
    assert text.endswith(f"<!-- end -->\nbetween\n{missing}Not measured yet.\n<!-- end -->\nafter\n")
    assert "old" not in text
    assert 0 < text.index("set-a") < text.index("set-b")
    assert "on NVIDIA H200, torch 9.9.9 ([end_to_end-a.json](../results/benchmarks/end_to_end-a.json))" in text
    assert cells(text.split("set-b")[1], "confitune")[2] == "40.0"
    for name in ("a", "b"):
        assert f"](speed/end_to_end-{name}-whole.png)" in text
        with Image.open(docs / "speed" / f"end_to_end-{name}-whole.png") as picture:
            assert picture.text["Source"] == show.digest(results / f"end_to_end-{name}.json")
    assert show.rewritten(text, results) == text


def test_an_unknown_part_is_refused(tmp_path):
    (tmp_path / "step-a.json").write_text(json.dumps(STEPS))
    with pytest.raises(SystemExit, match="stagse"):
        show.block("step-a.json", "stagse", tmp_path)
