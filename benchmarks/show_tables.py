"""The benchmarks' numbers as Markdown tables: functions of what the programs beside it wrote."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Numbers = dict[str, Any]  # what a benchmark wrote
Entry = dict[str, Any]

PUBLISHED = "published way (fp32, eager)"
STAGES = {"head": "head", "head+norm": "head and norms", "all": "everything"}
NORMS = ("plain BN", "silent", "tracking")
STATISTICS = ("running", "pass")
MIB = 2**20


def where(numbers: Numbers) -> str:
    return f"{numbers['device']}, torch {numbers['versions']['torch']}"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def seconds(value: float) -> str:
    """Three digits, no more than were measured."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×"


def percent(share: float) -> str:
    """Signed, one decimal; what rounds to nothing has no sign."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}%".replace("-", "−") if rounded else "0.0%"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


# Steps


def about_steps(numbers: Numbers) -> str:
    return f"{numbers['model']}, {numbers['pixels']} pixels, {numbers['means']} means"


def find(
    numbers: Numbers, batch: int, mode: str, norm: str, stage: str = "all", deterministic: bool = False
) -> Entry | None:
    """The measured step of this sort."""
    return next(
        (
            step
            for step in numbers["steps"]
            if (step["batch_size"], step["mode"], step["norm"], step["stage"]) == (batch, mode, norm, stage)
            and ("deterministic" in step["execution"]) == deterministic
        ),
        None,
    )


def batches_and_modes(numbers: Numbers) -> list[tuple[int, str]]:
    """Each batch size with each mode, in the order they were measured."""
    return list(dict.fromkeys((step["batch_size"], step["mode"]) for step in numbers["steps"]))


def execution(numbers: Numbers, mode: str) -> str:
    """Precision and mode, such as 'bf16, graph'."""
    found = (step["execution"] for step in numbers["steps"] if step["mode"] == mode)
    return next((words for words in found if "deterministic" not in words), mode)


def longer(numbers: Numbers, batch: int, mode: str, norm: str) -> float | None:
    """By what share a step takes longer than with plain batch norm."""
    plain, other = find(numbers, batch, mode, "plain BN"), find(numbers, batch, mode, norm)
    return plain["images_per_second"] / other["images_per_second"] - 1 if plain and other else None


def stages_table(numbers: Numbers) -> str:
    rows = []
    for batch, published in numbers["published"].items():
        rows.append([batch, PUBLISHED, "-", "-", count(published)])
        for _, mode in (pair for pair in batches_and_modes(numbers) if str(pair[0]) == batch):
            steps = [find(numbers, int(batch), mode, "silent", stage) for stage in STAGES]
            cells = [
                f"{count(step['images_per_second'])} ({times(step['images_per_second'] / published)})" if step else "-"
                for step in steps
            ]
            rows.append([batch, execution(numbers, mode), *cells])
    return table(["batch", "how", *(f"trains {name}" for name in STAGES.values())], rows)


def deterministic_table(numbers: Numbers) -> str:
    rows = []
    for batch, mode in batches_and_modes(numbers):
        free, fixed = (find(numbers, batch, mode, "silent", "all", fixed) for fixed in (False, True))
        if free and fixed:
            speeds = free["images_per_second"], fixed["images_per_second"]
            rows.append([str(batch), fixed["execution"], *map(count, speeds), percent(speeds[0] / speeds[1] - 1)])
    if not rows:
        return "Not measured in this run.\n"
    return table(["batch", "how", "images/s without", "images/s with", "a step takes longer by"], rows)


def tracking_table(numbers: Numbers) -> str:
    rows = []
    for batch, mode in batches_and_modes(numbers):
        steps = [find(numbers, batch, mode, norm) for norm in NORMS]
        cells = [count(step["images_per_second"] if step else None) for step in steps]
        for i, norm in enumerate(NORMS):
            cost = longer(numbers, batch, mode, norm)
            cells[i] += f" ({percent(cost)})" if norm != "plain BN" and cost is not None else ""
        rows.append([str(batch), execution(numbers, mode), *cells])
    whole = []
    for key, entries in whole_tasks(numbers).items():
        plain, *others = (entries.get(name) for name in ("plain BN", *STATISTICS))
        cells = [seconds(statistics.median(plain["seconds"]))] if plain else ["-"]
        for entry in others:
            cells.append(
                f"{seconds(statistics.median(entry['seconds']))} ({percent(entry['cost_against_plain_bn'])})"
                if entry
                else "-"
            )
        some = next(iter(entries.values()))
        size = f"{some['images']:,} images, {some['epochs']} epochs"
        whole.append([str(key[0]), execution(numbers, key[1]), size, *cells])
    return (
        table(["batch", "how", *(f"images/s, {norm}" for norm in NORMS)], rows)
        + "\n"
        + table(["batch", "how", "whole task", "seconds, plain BN", *(f"seconds, {n}" for n in STATISTICS)], whole)
    )


def whole_tasks(numbers: Numbers) -> dict[tuple[int, str], dict[str, Entry]]:
    """Batch size and mode -> kind of statistics -> what a whole task took."""
    tasks: dict[tuple[int, str], dict[str, Entry]] = {}
    for entry in numbers["tasks"]:
        tasks.setdefault((entry["batch_size"], entry["mode"]), {})[entry["statistics"]] = entry
    return tasks


# Growth with tasks


def about_growth(numbers: Numbers) -> str:
    return (
        f"{numbers['model']}, {numbers['images_a_task']:,} images a task, {numbers['epochs']} epochs, "
        f"batch {numbers['batch_size']}, {numbers['execution']}"
    )


def growth_table(numbers: Numbers) -> str:
    points = numbers["points"]
    groups = {
        "1": points[:1],
        f"2 to {min(11, len(points))}": points[1:11],
        f"the last ten of {len(points)}": points[-10:],
    }

    def middle(group: list[Entry], key: str) -> float:
        return statistics.median(point[key] for point in group)

    rows = [
        [
            name,
            seconds(middle(group, "seconds")),
            count(middle(group, "memory_bytes") / MIB),
            f"{group[-1]['stored_bytes'] / MIB:,.1f}",
        ]
        for name, group in groups.items()
        if group
    ]
    rows.append(
        ["the last ten against 2 to 11", times(numbers["ratio_of_time"]), times(numbers["ratio_of_memory"]), "-"]
    )
    return (
        table(["tasks", "seconds a task", f"{memory_words(numbers)}, MiB", "task states, MiB"], rows)
        + f"\nA task's state takes {count(numbers['bytes_a_task'])} bytes.\n"
    )


def memory_words(numbers: Numbers) -> str:
    """As `tasks.py` measures it."""
    return "most memory the process held" if numbers["device"].startswith("cpu") else "GPU memory in use"


# End to end


def about_whole(numbers: Numbers) -> str:
    return (
        f"{numbers['dataset']}, {numbers['model']}, {numbers['means']} means, {numbers['epochs']} epochs, "
        f"batch {numbers['batch_size']}"
    )


def best_seconds(numbers: Numbers) -> dict[str, float]:
    """The best of each side's repeats, as `end_to_end.py` takes it."""
    return {name: min(values) for name, values in numbers["seconds"].items() if values}


def whole_table(numbers: Numbers) -> str:
    best, speed = best_seconds(numbers), numbers.get("images_per_second", {})
    ours = numbers.get("execution", "not recorded")
    baseline = best.get("straightforward")
    rows = []
    for name, how in (("straightforward", "fp32, eager"), ("confitune", ours)):
        if name in best:
            faster = times(baseline / best[name]) if baseline else "-"
            accuracy = f"{numbers['acc'][name]:.1f}"
            words = "straightforward loop" if name == "straightforward" else name
            rows.append([words, how, seconds(best[name]), count(speed.get(name)), faster, accuracy])
    text = table(["one seed", "how", "seconds", "images/s", "speed", "ACC"], rows)
    if "parallel" in numbers:
        text += "\n" + parallel_table(numbers["parallel"], best["confitune"], speed.get("confitune"), ours)
    if not numbers["device"].startswith("cpu") and "seconds_to_place_images_on_device" in numbers:
        placing = seconds(numbers["seconds_to_place_images_on_device"])
        text += f"\nPlacing the images on the device, once before all that, took {placing} s more.\n"
    return text


def parallel_table(side: Entry, one: float, speed: float | None, how: str) -> str:
    """Several seeds at once, against as many times what one takes alone."""
    alone = [f"one after the other ({side['seeds']} × one seed)", how, seconds(side["seeds"] * one), count(speed)]
    at_once = ["side by side", how, seconds(side["seconds"]), count(side["images_per_second"])]
    accuracies = ", ".join(f"{accuracy:.1f}" for accuracy in side["acc"])
    rows = [[*alone, times(1), "-"], [*at_once, times(side["ratio_to_one_seed"]), accuracies]]
    same = "the accuracy" if side["first_equals_alone"] else "not the accuracy"
    return (
        table([f"{side['seeds']} seeds", "how", "seconds", "images/s", "speed", "ACC of each"], rows)
        + f"\nSide by side, seed 0 has {same} that it has alone.\n"
    )


# Methods


def methods_table(numbers: Numbers) -> str:
    rows = [
        [
            entry["method"],
            count(entry["images_per_second"]),
            times(entry["step_cost"]),
            seconds(entry["task_seconds"]),
            times(entry["task_cost"]),
        ]
        for entry in numbers["methods"]
    ]
    return table(["method", "images/s", "a step costs", "seconds a task", "a task costs"], rows)


# Deployment


def about_learn(numbers: Numbers) -> str:
    return f"tf_efficientnet_lite0, {numbers['size']} pixels, {numbers['epochs']} epochs"


def learn_table(numbers: Numbers) -> str:
    head = ["how", "when learned", "at the end", "lost at most", "MB a task", "task guessed (chance)", "unknown"]
    chance = 100 / numbers["tasks"]
    rows = [
        [
            row["how"],
            ", ".join(f"{value:.1f}" for value in row["learned"]),
            ", ".join(f"{value:.1f}" for value in row["end"]),
            f"{max(row['lost']):.1f}",
            f"{row['bytes_a_task'] / 1e6:.2f}" if "bytes_a_task" in row else "-",
            f"{row['guessed']:.1f}% ({chance:.1f}%)" if "guessed" in row else "-",
            f"{row['unknown']:.1f}%" if "unknown" in row else "-",
        ]
        for row in numbers["rows"]
    ]
    return table(head, rows)


def about_photos(numbers: Numbers) -> str:
    runs = max(len(scores) for scores in numbers["scores"]["best"].values())
    return f"{numbers['model']}, best in {runs} runs, {numbers['seconds_a_task']:.0f} s a task"


def photos_table(numbers: Numbers) -> str:
    means = numbers["means"]
    tasks = [*means["best"]]
    rows = [[task, *(f"{of_method[task]:.1f}" for of_method in means.values())] for task in tasks]
    rows.append(["mean", *(f"{statistics.mean(of_method.values()):.1f}" for of_method in means.values())])
    names = {"regression": "logistic regression", "fine-tuned": "a network a task"}
    return table(["task", *(names.get(name, name.replace("best, ", "best.owns=")) for name in means)], rows)


def about_order(numbers: Numbers) -> str:
    seeds = max(len(scores) for scores in numbers["scores"]["first"].values())
    return f"{numbers['model']}, {seeds} {'seed' if seeds == 1 else 'seeds'}"


def order_table(numbers: Numbers) -> str:
    means = numbers["means"]
    rows = [[task, *(f"{of_task[task]:.1f}" for of_task in means.values())] for task in means["first"]]
    return table(["task", *("learned first" if how == "first" else how for how in means)], rows)


def about_growing(numbers: Numbers) -> str:
    return f"{numbers['model']}, {numbers['without_task']['photos']} new photos"


def growing_table(numbers: Numbers) -> str:
    without, growth = numbers["without_task"], numbers["growth"]
    rows = {
        "the task is not given: class right": without["class"],
        "one logistic regression over the classes of all tasks": without["class, one regression"],
        "the task is not given: task right": without["task"],
        "said to be unknown": without["unknown"],
        "a task of ten classes, five of them added later": growth["grown"],
        "a task of ten classes, learned at once": growth["at once"],
    }
    return table(["of new photos", ""], [[name, f"{share:.1f}%"] for name, share in rows.items()])


def about_space(numbers: Numbers) -> str:
    return f"{numbers['model']}, {numbers['dataset']}, {numbers['tasks']} tasks"


def space_table(numbers: Numbers) -> str:
    accuracy, many = numbers["accuracy"], numbers["many"]
    unknown = {name: shares for name, shares in numbers["unknown"].items() if name != "known"}
    rows = [
        ["class right, learned task by task", f"{accuracy['task by task']:.1f}%"],
        ["class right, the same from all images at once", f"{accuracy['all at once']:.1f}%"],
        [
            "class right, logistic regression on all images at once",
            f"{accuracy['logistic regression, all at once']:.1f}%",
        ],
        ["task right", f"{accuracy['task']:.1f}%"],
        ["mean probability of the class that is named", f"{accuracy['mean probability']:.1f}%"],
        [
            "half of the tasks learned: test images of these said to be unknown",
            f"{numbers['unknown']['known']['as set']:.1f}%",
        ],
        *([f"of {name}", f"{shares['as set']:.1f}%"] for name, shares in unknown.items()),
        [f"{many['tasks']:,} made-up tasks: one image, against its task given", times(many["ratio"])],
        ["memory of all their classes", f"{many['MB']:.0f} MB"],
    ]
    return table(["first pass alone", ""], rows)


def about_mixed(numbers: Numbers) -> str:
    model, method = numbers["model"], numbers["method"]
    return f"{model}, tasks of {method}, {numbers['batch_size']} images of {numbers['pixels']} pixels"


def mixed_table(numbers: Numbers) -> str:
    head, tasks = ["tasks in the batch", "milliseconds", "against one task"], str(numbers["tasks"])
    if "seconds" in numbers:  # of a GPU
        ways = {"one task": "1, captured", "mixed": f"{tasks}, captured", "task by task": f"{tasks}, task by task"}
        ratios = {"one task / one task": 1.0, **numbers["ratios"]}
        rows = [
            [words, f"{1000 * statistics.median(numbers['seconds'][way]):.2f}", times(ratios[f"{way} / one task"])]
            for way, words in ways.items()
        ]
        read = statistics.median(numbers["milliseconds_to_read_a_task"])
        return table(head, [*rows, ["1 image of a task that is read from disk", f"{read:.1f}", ""]])
    single, mixed = (statistics.median(numbers[key]) for key in ("single_seconds", "mixed_seconds"))
    rows = [
        ["1", f"{1000 * single:.1f}", "1.00×"],
        [str(numbers["tasks"]), f"{1000 * mixed:.1f}", times(numbers["ratio"])],
    ]
    return table(head, rows)


def about_predict(numbers: Numbers) -> str:
    return f"{numbers['model']}, {numbers['tasks']} tasks, images of {numbers['pixels']} pixels, preprocessing apart"


def predict_table(numbers: Numbers) -> str:
    batches = numbers["times"]
    ways = [[way, *(f"{of['ms'][way]:.1f}" for of in batches)] for way in batches[0]["ms"]]
    ratios = [[way, *(times(of["ratios"][way]) for of in batches)] for way in batches[0]["ratios"]]
    first, *others = numbers["start_seconds"].items()
    starts = [[f"{what}, against {first[0]}", times(seconds / first[1])] for what, seconds in others]
    head = ["", *(f"batch {of['batch']}" for of in batches)]
    return (
        f"{table(['ms an image', *head[1:]], ways)}\n{table(head, ratios)}\n{table(['start of a command', ''], starts)}"
    )


def about_export(numbers: Numbers) -> str:
    return (
        f"{numbers['model']}, {numbers['tasks']} tasks, {numbers['batch_size']} images of {numbers['pixels']} pixels, "
        "one thread of onnxruntime"
    )


def export_table(numbers: Numbers) -> str:
    rows = [
        ["milliseconds, a file of the task alone", f"{1000 * numbers['alone_seconds']:.2f}"],
        ["milliseconds, the file of all tasks", f"{1000 * numbers['all_seconds']:.2f}"],
        ["ratio of the times, median over tasks", times(numbers["ratio"])],
        ["largest difference of logits", f"{numbers['largest_difference']:.0e}"],
        ["MB, a file of each task", f"{numbers['alone_bytes'] / 1e6:.1f}"],
        ["MB, the file of all tasks", f"{numbers['all_bytes'] / 1e6:.1f}"],
        ["seconds to load the file of all tasks", f"{numbers['load_seconds']:.1f}"],
    ]
    return table(["", ""], rows)


def about_load(numbers: Numbers) -> str:
    return (
        f"{numbers['clients']} clients, up to {numbers['images_a_request']} images a request, of {numbers['tasks']} "
        f"tasks and of none, {numbers['seconds']:.0f} s, a queue of {numbers['queue']} images"
    )


def load_table(numbers: Numbers) -> str:
    bad = {status: n for status, n in numbers["statuses"].items() if status.startswith("bad ")}
    rows = [
        ["images answered a second", f"{numbers['images_per_second']:,.1f}"],
        ["the same, one request at a time", f"{numbers['one_at_a_time_images_per_second']:,.1f}"],
        ["images answered, and checked", f"{numbers['images']:,}"],
        ["wrong answers", f"{numbers['wrong']:,}"],
        ["changes of the bundle meanwhile", f"{numbers['changes_meanwhile']}"],
        ["versions of it that answered", f"{numbers['versions_that_answered']}"],
        ["requests refused, 429", f"{numbers['rejected']:,}"],
        ["half of all answers within, ms", count(numbers["p50_ms"])],
        ["99 of 100 within, ms", count(numbers["p99_ms"])],
        ["malformed and hostile requests", ", ".join(f"{n} × {s.removeprefix('bad ')}" for s, n in bad.items())],
        ["memory at the start, MB", count(numbers["memory_start_mb"])],
        ["memory at most, MB", count(numbers["memory_most_mb"])],
    ]
    return table(["", ""], rows)


def about_many(numbers: Numbers) -> str:
    return (
        f"{numbers['model']}, {numbers['means']} means, one image of {numbers['pixels']} pixels, medians of calls made "
        "in turns"
    )


def many_table(numbers: Numbers) -> str:
    head = ["milliseconds", f"{numbers['few']:,} tasks", f"{numbers['tasks']:,} tasks", "against few"]
    rows = [
        [name, f"{1e3 * row['few']:,.1f}", f"{1e3 * row['many']:,.1f}", times(row["ratio"])]
        for name, row in numbers["times"].items()
    ]
    ready, end = numbers["memory_ready_mb"], numbers["memory_end_mb"]
    listing = "manifest" if "manifest_mb" in numbers else "index"  # before format 3
    sizes = [
        ["memory of a predictor without tasks in it", count(numbers["memory_start_mb"])],
        [f"with {numbers['ready']} ready", count(ready)],
        [f"after {numbers['predicted']:,} different ones, {numbers['ready']} ready", count(end)],
        ["disk, a task", f"{numbers['task_mb']:.2f}"],
        ["disk, the backbone", f"{numbers['backbone_mb']:.1f}"],
        [f"disk, the {listing}", f"{numbers[f'{listing}_mb']:.1f}"],
        ["disk, all", count(numbers["disk_mb"])],
    ]
    return table(head, rows) + "\n" + table(["megabytes", f"{numbers['tasks']:,} tasks"], sizes)
