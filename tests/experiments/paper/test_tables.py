"""`confitune reproduce` on the paper's four datasets: all their classes, few images, in the folders of their archives.

Images are 32 pixels wide here instead of 224, which takes a fiftieth of the time; the networks are whole.
"""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import Flowers102
from typer.testing import CliRunner

from confitune import cli
from confitune.engine.result import summary_of
from confitune.experiments.paper import reproduce as session
from confitune.experiments.paper.numbers import chosen_options, reported
from confitune.experiments.paper.plan import Scope
from confitune.experiments.paper.reproduce import reproduce
from confitune.experiments.runs.identity import filled, finished_runs
from confitune.experiments.runs.runner import Place
from confitune.tasks import dataset_info, decode, store
from confitune.tasks.datasets import paper_sets

RECIPES = Path(__file__).parents[3] / "src/confitune/recipes"
SETS = ("cifar100", "cub200", "caltech101", "flowers102")
METHODS = ("finetune", "ewc", "mas-cpr", "confit", "single-task")
EWC = {"cifar100": 1000, "cub200": 3000, "caltech101": 30000, "flowers102": 100000}  # appendix, table 2
IMAGES = {"cifar100": (10, 5), "cub200": (20, 20), "caltech101": (40, 10), "flowers102": (40, 10)}  # of a task
NAMES = {
    "cifar100": [f"thing {i}" for i in range(100)],
    "cub200": [f"Bird {i}" for i in range(200)],
    "caltech101": [f"object_{i:03d}" for i in range(101)],
    "flowers102": list(Flowers102.classes),
}


def colour(label):
    return (37 * label % 256, 101 * label % 256, 200 - label)


def write_image(path, label, size=(44, 36), box=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size)
    picture.paste(colour(label), box or (0, 0, *size))
    picture.save(path, format="JPEG")


def write_cifar(data_dir):
    """Two training images and a test image of each class."""
    folder = data_dir / "cifar-100-python"
    folder.mkdir()
    parts = {"meta": {"fine_label_names": NAMES["cifar100"]}}
    for part, count in (("train", 200), ("test", 100)):
        labels = [i % 100 for i in range(count)]
        data = np.array([np.repeat(colour(label), 1024) for label in labels], dtype=np.uint8)
        parts[part] = {"data": data, "fine_labels": labels}
    for part, content in parts.items():
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))


def write_cub(data_dir):
    """A training image and a test image of each species, the bird in its box."""
    folder = data_dir / "CUB_200_2011"
    names = [f"{i + 1:03d}.{name.replace(' ', '_')}" for i, name in enumerate(NAMES["cub200"])]
    files = [f"{name}/{name[4:]}_{i}.jpg" for name in names for i in range(2)]
    for i, file in enumerate(files):
        write_image(folder / "images" / file, i // 2, box=(4, 6, 34, 30))
    tables = {
        "images": files,
        "image_class_labels": [i // 2 + 1 for i in range(400)],
        "train_test_split": [1, 0] * 200,
        "bounding_boxes": ["4.0 6.0 30.0 24.0"] * 400,
        "classes": names,
    }
    for table, rows in tables.items():
        (folder / f"{table}.txt").write_text("".join(f"{i + 1} {row}\n" for i, row in enumerate(rows)))


def write_caltech(data_dir):
    """Five images of each category, one of which is to be tested on."""
    top = data_dir / "caltech101/101_ObjectCategories"
    for label, name in enumerate(["BACKGROUND_Google", *NAMES["caltech101"]]):
        for i in range(5):
            write_image(top / name / f"image_{i + 1:04d}.jpg", label)


def write_flowers(data_dir):
    """Five images of each species, one of which is to be tested on."""
    numbers = np.tile(np.arange(1, 103, dtype=np.uint8), 5)
    for i, number in enumerate(numbers.tolist()):
        write_image(data_dir / "flowers-102/jpg" / f"image_{i + 1:05d}.jpg", number)
    savemat(data_dir / "flowers-102/imagelabels.mat", {"labels": numbers[None]})


@pytest.fixture(autouse=True, scope="module")
def _small_images():
    with pytest.MonkeyPatch.context() as patch:
        for module in (decode, paper_sets):
            patch.setattr(module, "CROP", 32)
            patch.setattr(module, "RESIZE", 36)
        patch.setattr(store, "SHAPE", (3, 32, 32))
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of the four datasets and of their decoded images, as options and recipe values."""
    data_dir = tmp_path_factory.mktemp("data")
    for write in (write_cifar, write_cub, write_caltech, write_flowers):
        write(data_dir)
    return {"data_dir": str(data_dir), "cache_dir": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def small(places):
    """Recipe values of a small network without weights on these folders."""
    return {**places, "model": "test_byobnet", "weights": "none", "device": "cpu"}


def given_as_options(values):
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", value)]


def call(*arguments):
    said = CliRunner().invoke(cli.app, ["reproduce", *map(str, arguments)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return said.output


def results_below(out):
    """By dataset, network, method and seed."""
    found = finished_runs(out).values()
    keyed = {(r.dataset, r.config["model"], r.method, r.seed): r for r in found}
    assert len(keyed) == len(found)
    return keyed


def numbers_replaced(out, copied, numbers):
    """A copy of the finished runs, of two tasks, with other accuracies, given by dataset, network and method."""
    shutil.copytree(out, copied)
    lines = []
    for result in finished_runs(out).values():
        new = numbers.get((result.dataset, result.config["model"].split(".")[0], result.method))
        if new is not None:
            acc, fgt = new.get("acc", 50.0), new.get("fgt", 0.0)
            matrix = np.array([[acc + fgt, acc], [np.nan, acc]])
            result = result.model_copy(update={**summary_of(matrix), "as_learned": None})
        lines.append(result.line())
    (copied / "runs.jsonl").write_bytes(b"".join(lines))


def asked_for_two_seeds(monkeypatch, given):
    """Recipe values with which claims are judged, though there is one run: the second seed is not run."""
    monkeypatch.setattr(session, "_run_missing", lambda parts, scope: [])
    return {**given, "seeds": 2}


# ---- table 1 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table1(small, tmp_path_factory):
    """What `--quick` leaves of table 1 for five methods on the four datasets: folder, record, output."""
    out = tmp_path_factory.mktemp("table1")
    chosen = ["--datasets", ",".join(SETS), "--methods", ",".join(METHODS)]
    said = call("table1", "--quick", *chosen, *given_as_options(small), "--out", out)
    return out, json.loads((out / "outcomes.json").read_text())["table1"], said


@pytest.mark.parametrize("dataset", SETS)
def test_every_method_stands_beside_the_papers_numbers_of_the_dataset(table1, dataset):
    out, record, _ = table1
    cells = {(c["method"], c["metric"]): c for c in record["cells"] if c["dataset"] == dataset}
    assert set(cells) == {(method, metric) for method in METHODS for metric in ("ACC", "FGT")}
    assert len([c for c in record["cells"] if c["dataset"] == dataset]) == len(cells)
    results, paper = results_below(out), reported("table1")
    for method in METHODS:
        result, told = results[dataset, "test_byobnet", method, 0], paper[method][dataset]
        acc, fgt = cells[method, "ACC"], cells[method, "FGT"]
        published = summary_of(result.published_matrix)
        assert (acc["measured"], acc["seeds"], acc["interval"]) == (published["acc"], 1, None)
        assert (acc["paper"], acc["paper_interval"]) == (told["acc"], told["acc_interval"])
        assert (fgt["measured"], fgt["paper"]) == (published["fgt"], told["fgt"])
        assert fgt["paper_interval"] == told["fgt_interval"]
        own = (result.acc, result.fgt) if method == "confit" else (None, None)
        assert (acc["recovered"], fgt["recovered"]) == own
        assert acc["difference"] == published["acc"] - told["acc"]
        measured = f"{published['acc']:.2f}"
        line = f"| {dataset} | {method} | ACC | {measured} | 1 | {told['acc']:.2f} ± {told['acc_interval']:.2f} |"
        assert line in (out / "reproduction.md").read_text()
    assert record["notes"] == ["one run of each method is too little to judge what the paper says"]


@pytest.mark.parametrize("dataset", SETS)
def test_tasks_are_the_papers(table1, dataset):
    """Classes in the order of seed 0, as many a task as the paper has, the first two tasks in quick runs."""
    out, _, _ = table1
    size = reported("datasets")[dataset]["classes_per_task"]
    order = torch.randperm(len(NAMES[dataset]), generator=torch.Generator().manual_seed(0)).tolist()
    names = [NAMES[dataset][i] for i in order]
    for method in METHODS:
        result = results_below(out)[dataset, "test_byobnet", method, 0]
        assert [task["classes"] for task in result.tasks] == [names[:size], names[size : 2 * size]]
        assert [(task["train_images"], task["test_images"]) for task in result.tasks] == [IMAGES[dataset]] * 2
        assert np.isnan(result.matrix).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("dataset", SETS)
def test_runs_have_the_papers_settings_of_the_dataset(table1, dataset):
    out, _, _ = table1
    results = results_below(out)
    configs = {method: filled(results[dataset, "test_byobnet", method, 0].config) for method in METHODS}
    for config in configs.values():
        assert (config["pipeline"], config["batch_size"]) == ("published", dataset_info(dataset).batch_size)
        assert (config["epochs"], config["tasks"], config["order_seed"], config["lr"]) == (5, 2, 0, 0.01)
    assert (configs["confit"]["means"], configs["confit"]["statistics"]) == ("phase", "running")
    chosen, ewc, mas_cpr = chosen_options(dataset), configs["ewc"]["options"], configs["mas-cpr"]["options"]
    assert ewc["ewc"]["strength"] == chosen["ewc"]["strength"] == EWC[dataset]
    for part, options in {**ewc, **mas_cpr}.items():
        assert {name: options[name] for name in chosen[part]} == chosen[part]
    assert (set(ewc), set(mas_cpr)) == ({"ewc"}, {"mas", "cpr"})
    assert not configs["finetune"]["options"]


def test_images_are_decoded_as_the_papers_code_did(table1, places):
    """Boxes cut out of CUB200; bytes wrapped around in Caltech101 and Flowers102; CIFAR100 needs no store."""
    stored = {}
    for path in Path(places["cache_dir"]).glob("*-published-*.u8"):
        data = np.fromfile(path, np.uint8)
        count = len(data) // (3 * 32 * 32 + 4)  # bytes of an image and its checksum
        stored[path.name.split("-")[0]] = data[: count * 3 * 32 * 32].reshape(count, 3, -1).astype(float)
    decoded = {name: len(images) for name, images in stored.items()}
    assert decoded == {"cub200": 400, "caltech101": 505, "flowers102": 510}  # without Caltech101's background
    colours = np.array([colour(label) for label in range(200)], dtype=float)
    away = {name: np.linalg.norm(images.mean(2)[:, None] - colours, axis=2).min(1) for name, images in stored.items()}
    assert stored["cub200"].std(2).max() < 10  # black around the boxes is cut off
    assert away["cub200"].max() < 10
    assert all(np.median(away[name]) > 10 for name in ("caltech101", "flowers102"))


def test_the_command_counts_the_verdicts(table1):
    _, record, said = table1
    verdicts = [cell["verdict"] for cell in record["cells"]]
    counts = {verdict: verdicts.count(verdict) for verdict in ("inside", "higher", "lower")}
    assert sum(counts.values()) == len(SETS) * len(METHODS) * 2
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    assert f"({told})" in " ".join(said.split())


@pytest.mark.parametrize(("winning", "holds"), [(SETS, True), (SETS[1:], True), (SETS[2:], False)])
def test_confit_against_single_task_is_judged_by_all_four(table1, small, tmp_path, winning, holds, monkeypatch):
    two_seeds = asked_for_two_seeds(monkeypatch, small)
    numbers = {(d, "test_byobnet", "confit"): {"acc": 80.25 if d in winning else 60.5} for d in SETS}
    numbers |= {(d, "test_byobnet", "single-task"): {"acc": 70.75} for d in SETS}
    numbers_replaced(table1[0], tmp_path / "out", numbers)
    (outcome,) = reproduce(["table1"], Scope(tmp_path / "out", SETS, METHODS, quick=True, given=two_seeds))
    *orders, claim = outcome.claims
    assert [order.text for order in orders] == [f"{d}: the order of the methods" for d in SETS]
    assert claim.text == "ConFiT beats single-task learning on three of four datasets"
    assert claim.measured == "; ".join(f"{d}: {'80.25' if d in winning else '60.50'} against 70.75" for d in SETS)
    assert claim.holds is holds
    (three,) = reproduce(["table1"], Scope(tmp_path / "out", SETS[:3], METHODS, quick=True, given=two_seeds))
    assert three.claims[-1].holds is None


def test_every_seed_counts(small, tmp_path):
    datasets, methods = ("cifar100", "caltech101"), ("confit", "linear-probe")
    scope = Scope(
        tmp_path, datasets, methods, given={**small, "epochs": 1, "tasks": 2, "seeds": 2}, place=Place(parallel_seeds=2)
    )
    (outcome,) = reproduce(["table1"], scope)
    results = results_below(tmp_path)
    assert set(results) == {(d, "test_byobnet", m, seed) for d in datasets for m in methods for seed in (0, 1)}
    assert {(c.dataset, c.method) for c in outcome.cells} == {(d, m) for d in datasets for m in methods}
    for cell in outcome.cells:
        runs = [results[cell.dataset, "test_byobnet", cell.method, seed] for seed in (0, 1)]
        mean = np.mean([summary_of(run.published_matrix)[cell.metric.lower()] for run in runs])
        assert (cell.seeds, cell.measured, cell.interval) == (2, pytest.approx(mean), None)  # too few for an interval


def test_a_dataset_without_the_papers_pipeline_is_taken_clean(small, tmp_path):
    for label, name in enumerate(("ant", "bee", "cat", "dog")):
        for i in range(5):
            write_image(tmp_path / "mine" / name / f"{i}.jpg", label)
    mine = f"folder:{tmp_path / 'mine'}"
    scope = Scope(tmp_path / "out", (mine, "cifar100"), ("linear-probe",), quick=True, given=small)
    (outcome,) = reproduce(["table1"], scope)
    used = {dataset: filled(run.config)["pipeline"] for (dataset, *_), run in results_below(tmp_path / "out").items()}
    assert used == {mine: "clean", "cifar100": "published"}
    told = {(c.dataset, c.metric): (c.paper, c.verdict) for c in outcome.cells}
    assert told[mine, "ACC"] == told[mine, "FGT"] == (None, "not reported")
    assert told["cifar100", "ACC"][0] == 91.48


# ---- datasets --------------------------------------------------------------------------------------------------------


def test_datasets_are_cut_as_the_paper_has_them(small, tmp_path):
    (outcome,) = reproduce(["datasets"], Scope(tmp_path, SETS, given=small))
    paper, left_over = reported("datasets"), {"cifar100": 0, "cub200": 0, "caltech101": 1, "flowers102": 2}
    assert list(outcome.data) == list(SETS)
    for dataset, found in outcome.data.items():
        told, (train, test) = paper[dataset], IMAGES[dataset]
        assert (found["tasks"], found["classes_per_task"]) == (told["tasks"], told["classes_per_task"])
        assert found["classes_left_over"] == left_over[dataset]
        assert (found["train_images"], found["test_images"]) == (train * told["tasks"], test * told["tasks"])
        line = f"| {dataset} | train images | {found['train_images']} | {told['train_images']:,} |"
        assert line in (tmp_path / "reproduction.md").read_text()


def test_datasets_are_counted_as_the_runs_cut_them(small, tmp_path):
    scope = Scope(tmp_path, ("flowers102",), quick=True, given={**small, "classes_per_task": 4})
    (outcome,) = reproduce(["datasets"], scope)
    found = outcome.data["flowers102"]
    assert (found["tasks"], found["classes_per_task"], found["train_images"]) == (2, 4, 2 * 4 * 4)


# ---- deeper networks -------------------------------------------------------------------------------------------------

NETWORKS = {"resnet34": "resnet34.bt_in1k", "resnet50": "resnet50.ram_in1k"}
FEATURES = {"resnet34": 512, "resnet50": 2048}
FORGETS, BEATS = "fine-tuned resnet50 forgets more than resnet34", "ConFiT on resnet50 beats ConFiT on resnet34"


@pytest.fixture(scope="module")
def deeper(places, tmp_path_factory):
    """What `--quick` leaves of the deeper networks on one dataset, with two classes a task: folder and record."""
    out = tmp_path_factory.mktemp("deeper")
    (out / "pairs.yaml").write_text("classes_per_task: 2\n")
    files = (RECIPES / "deeper.yaml", out / "pairs.yaml")
    call(*files, "--quick", "--datasets", "caltech101", *given_as_options(places), "--device", "cpu", "--out", out)
    return out, json.loads((out / "outcomes.json").read_text())["deeper"]


def test_both_deeper_networks_are_trained_by_both_methods(deeper):
    out, record = deeper
    rows, results = record["data"]["caltech101"], results_below(out)
    asked = [(network, method) for network in NETWORKS for method in ("finetune", "confit")]
    assert [(row["network"], row["method"]) for row in rows] == asked
    assert set(results) == {("caltech101", NETWORKS[network], method, 0) for network, method in asked}
    lines = record["tables"]["caltech101"].splitlines()[2:]
    for (network, method), row, line in zip(asked, rows, lines, strict=True):
        result = results["caltech101", NETWORKS[network], method, 0]
        assert (row["acc"], row["fgt"]) == (result.acc, result.fgt)
        assert line == f"| {NETWORKS[network]} | {method} | {result.acc:.2f} | {result.fgt:.2f} | 1 |"
        assert [task["head_numbers"] for task in result.tasks] == [2 * (FEATURES[network] + 1)] * 2
        assert [(task["train_images"], task["test_images"]) for task in result.tasks] == [(8, 2)] * 2
        assert (filled(result.config)["pipeline"], result.config["epochs"]) == ("published", 5)
        assert result.weights == "none (random start)"
    assert len({result.final_sha256 for result in results.values()}) == 4
    assert record["notes"] == ["one run of each method is too little to judge what the paper says"]


def test_what_the_paper_says_of_deeper_networks_is_not_judged_by_one_run(deeper):
    out, record = deeper
    results = results_below(out)
    fgt = [results["caltech101", model, "finetune", 0].fgt for model in NETWORKS.values()]
    acc = [results["caltech101", model, "confit", 0].acc for model in NETWORKS.values()]
    assert record["claims"] == [
        {"text": f"caltech101: {text}", "measured": f"{small:.2f} and {large:.2f}", "holds": None}
        for text, (small, large) in ((FORGETS, fgt), (BEATS, acc))
    ]


@pytest.mark.parametrize(
    ("fgt", "acc", "holds"),
    [((10.0, 12.5), (80.0, 85.0), (True, True)), ((12.5, 10.0), (85.0, 85.0), (False, False))],
)
def test_the_verdict_on_deeper_networks_follows_the_numbers(deeper, places, tmp_path, fgt, acc, holds, monkeypatch):
    given = asked_for_two_seeds(monkeypatch, {**places, "device": "cpu", "classes_per_task": 2})
    numbers = {}
    for network, lost, reached in zip(NETWORKS, fgt, acc, strict=True):
        numbers["caltech101", network, "finetune"] = {"fgt": lost, "acc": 1.0}
        numbers["caltech101", network, "confit"] = {"acc": reached, "fgt": 1.0}
    numbers_replaced(deeper[0], tmp_path / "out", numbers)
    (both,) = reproduce(["deeper"], Scope(tmp_path / "out", ("caltech101",), quick=True, given=given))
    told = [(f"{fgt[0]:.2f} and {fgt[1]:.2f}", holds[0]), (f"{acc[0]:.2f} and {acc[1]:.2f}", holds[1])]
    assert [(claim.measured, claim.holds) for claim in both.claims] == told
    (one,) = reproduce(["deeper"], Scope(tmp_path / "out", ("caltech101",), ("confit",), quick=True, given=given))
    assert [(claim.measured, claim.holds) for claim in one.claims] == [("-", None), told[1]]
