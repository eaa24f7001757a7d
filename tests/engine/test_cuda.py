"""On a GPU: captured, compiled, streamed and side by side, training gives what it gives kernel by kernel.

Bits are compared in float32 (or bfloat16) with deterministic algorithms; everything runs on the tiny tasks.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from confitune.engine import Executor, Listener, TrainSettings, Turns, evaluate, fit, library_switches, place
from confitune.engine.feed import batches
from confitune.errors import ConfituneError
from confitune.methods import Method, create_method
from confitune.tasks import Images, Preprocess, TaskSequence
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD
from killed import Killed, Killer, Starts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when the first test that multiplies starts

# Five epochs: one for the head, one for head and norms, three for everything; enough steps in each to be captured.
EXACT = {"device": "cuda", "precision": "fp32", "deterministic": True, "epochs": 5}

CASES = {
    "confit window running": {"method": "confit", "means": "window", "statistics": "running"},
    "confit window pass": {"method": "confit", "means": "window", "statistics": "pass"},
    "confit phase running": {"method": "confit", "means": "phase", "statistics": "running"},
    "confit phase pass": {"method": "confit", "means": "phase", "statistics": "pass"},
    "confit silent at first": {"method": "confit", "track_from": 0.3},
    "finetune": {"method": "finetune"},
    "joint": {"method": "joint"},
    "single-task": {"method": "single-task"},
    "bn-only": {"method": "bn-only"},
    "linear-probe": {"method": "linear-probe"},
    "class-incremental": {"method": "bn-only", "scenario": "class"},
    "momentum": {"method": "confit", "momentum": 0.9, "lr": 0.01},
    "adam": {"method": "confit", "optimizer": "adam", "lr": 0.003},
    "cosine": {"method": "finetune", "lr_schedule": "cosine"},
    "clipped": {"method": "finetune", "clip_norm": 1.0},
    "augmentation": {"method": "confit", "augmentation": "flip"},
    "dropout": {"method": "confit", "dropout": 0.3},
    "everything random": {"method": "finetune", "dropout": 0.3, "augmentation": "flip", "momentum": 0.9},
}
SOME = ["confit window running", "confit phase pass", "finetune", "adam", "everything random"]


class Notes(Listener):
    def __init__(self):
        self.notes, self.ends = [], []

    def note(self, message):
        self.notes.append(message)

    def epoch_ended(self, end):
        self.ends.append(end)


@pytest.fixture
def ran(make_run):
    """A run that is over, and its result."""

    def ran(**options):
        run = make_run(**{**EXACT, **options})
        return run, run.run()

    return ran


def tensors(net):
    """The backbone's and each task's own, by name."""
    found = {f"backbone.{key}": value.detach().cpu() for key, value in net.backbone.state_dict().items()}
    return found | {f"row of {name}": entry.row.detach().cpu() for name, entry in net.tasks.items()}


def assert_same_bits(first, second):
    """Weights, rows, counts and accuracies of two finished runs (run, result)."""
    (run, result), (other, expected) = first, second
    found, wanted = tensors(run.net), tensors(other.net)
    assert found.keys() == wanted.keys()
    differing = {
        key: (found[key].double() - wanted[key].double()).abs().max().item()
        for key in wanted
        if not torch.equal(found[key], wanted[key])
    }
    assert differing == {}
    assert all(tensor.isfinite().all() for tensor in found.values())
    for name, entry in other.net.tasks.items():
        assert run.net.tasks[name].facts == entry.facts
        assert run.net.tasks[name].owns == entry.owns
        assert run.net.tasks[name].image_size == entry.image_size
    assert result.accuracy_matrix == expected.accuracy_matrix
    assert result.final_sha256 == expected.final_sha256


def captured(run):
    return len(run._executor._graphs)


# ---- captured against kernel by kernel -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_captured_steps_give_the_same_bits(ran, options):
    losses = []
    runs = []
    for step in ("eager", "graph"):
        notes = Notes()
        runs.append(ran(step=step, listeners=(notes,), **options))
        losses.append([(end.task, end.epoch, end.stage, end.loss, end.accuracy, end.lr) for end in notes.ends])
        assert notes.notes == []
    eager, graph = runs
    assert captured(eager[0]) == 0
    assert captured(graph[0]) > 0
    assert_same_bits(graph, eager)
    assert losses[0] == losses[1]
    assert eager[1].execution == "fp32, eager, deterministic"
    assert graph[1].execution == "fp32, graph, deterministic"


@pytest.mark.parametrize("means", ["window", "phase"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_batches_are_taken_in_as_those_kernel_by_kernel(make_net, means, precision):
    """Captured at a task's third batch; the second task's first one, which counts in full, is a replay."""
    draw = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randn(8, 3, 16, 16, device="cuda", generator=draw) * (1 + k) + k for k in range(6)]
    found = {}
    for step in ("eager", "graph"):
        net = make_net("confit", means=means)
        executor = Executor(net, TrainSettings(**{**EXACT, "precision": precision, "step": step}))

        @torch.no_grad()
        def forward(x, net=net):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
                return net(x)

        with executor.session():
            for task in "ab":
                net.add_task(task, 2, torch.Generator().manual_seed(0))
                net.train()
                for x in batches:
                    executor("step", forward, x)
                net.finish_task()
        assert len(executor._graphs) == (step == "graph")
        found[step] = net
    eager, graph = found["eager"], found["graph"]
    for task in "ab":
        assert graph.tasks[task].facts == eager.tasks[task].facts
        assert torch.equal(graph.tasks[task].row, eager.tasks[task].row)
        assert graph.tasks[task].row.isfinite().all()


@pytest.mark.parametrize("name", SOME)
def test_captured_steps_give_the_same_bits_in_bf16(ran, name):
    options = {**CASES[name], "precision": "bf16"}
    eager, graph = (ran(step=step, **options) for step in ("eager", "graph"))
    assert captured(graph[0]) > 0
    assert_same_bits(graph, eager)
    exact = ran(step="eager", **CASES[name])
    assert exact[1].final_sha256 != eager[1].final_sha256  # it was bfloat16


def test_captured_training_agrees_with_the_cpu(ran, sequence, monkeypatch):
    """Not to the bit, but to what float32 sums in another order differ by."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    options = {"method": "confit", "tasks": sequence[:1]}
    run, _ = ran(step="graph", **options)
    cpu, _ = ran(device="cpu", **options)
    wanted = tensors(cpu.net)
    for key, found in tensors(run.net).items():
        torch.testing.assert_close(found, wanted[key], rtol=1e-2, atol=1e-3, msg=lambda m, k=key: f"{k}: {m}")


WEAK = {"ewc": {"strength": 1.0}, "si": {"strength": 1.0}, "rwalk": {"strength": 1.0}, "mas": {"strength": 1.0}}


@pytest.mark.parametrize("name", ["ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "confit+ewc", "ccll"])
def test_captured_steps_and_passes_of_a_comparison_method_give_the_same_bits(ran, name):
    """Pulls, paths and importance passes run inside the graphs; each run has a method of its own."""
    eager, graph = (ran(method=create_method(name, WEAK), step=step) for step in ("eager", "graph"))
    assert_same_importance(graph, eager)


@pytest.mark.parametrize("name", ["ewc", "mas", "mas-afec"])
def test_passes_with_batch_moments_give_the_same_bits(ran, name):
    weak = {
        "ewc": {"strength": 1.0, "mode": "train"},
        "mas": {"strength": 1.0, "mode": "train"},
        "afec": {"mode": "train"},
    }
    eager, graph = (ran(method=create_method(name, weak), step=step) for step in ("eager", "graph"))
    assert_same_importance(graph, eager)


def assert_same_importance(graph, eager):
    assert_same_bits(graph, eager)
    for found, wanted in zip(graph[0].method.hooks, eager[0].method.hooks, strict=True):
        for field in found.kept:
            for key, tensor in getattr(wanted, field).items():
                assert torch.equal(getattr(found, field)[key], tensor), (field, key)


def test_a_task_that_settles_does_so_captured_or_not(ran):
    """Of three one does, the others are trained; they share what was captured, though AdamW keeps a state."""

    class SecondIsAHead(type(create_method("best"))):
        name = "second-is-a-head"

        def settle(self, context):
            if context.index == 1 and context.epoch == 0:
                return self._settle(context, self._head(context), "as the test asks for")
            return False

    eager, graph = (ran(method=SecondIsAHead(), step=step) for step in ("eager", "graph"))
    assert captured(graph[0]) > 0
    assert [len(entry.owns) for entry in graph[0].net.tasks.values()] == [4, 1, 3]
    assert_same_bits(graph, eager)
    assert graph[1].fgt == 0


def test_a_method_that_keeps_a_network_of_its_own_gives_the_same_bits(ran):
    """Whose answers are a part of the captured step; in half precision, too."""
    lwf = f"{Path(__file__).parents[2] / 'examples' / 'lwf.py'}:LwF"
    for precision in ("fp32", "bf16"):
        eager, graph = (ran(method=create_method(lwf), step=step, precision=precision) for step in ("eager", "graph"))
        assert captured(graph[0]) == 3  # each task for itself
        assert_same_bits(graph, eager)


@pytest.mark.parametrize("options", [{"lr_schedule": "cosine"}, {"momentum": 0.9, "lr": 0.01}, CASES["adam"]])
def test_learning_rates_of_groups_are_those_of_the_epoch_in_captured_steps(ran, options):
    class Slow(Method):
        lr_factors: ClassVar = {"weights": 0.1}

    options = {key: value for key, value in options.items() if key != "method"}
    eager, graph = (ran(method=Slow(), step=step, **options) for step in ("eager", "graph"))
    assert captured(graph[0]) > 0
    assert_same_bits(graph, eager)
    plain, _ = ran(method=Method(), step="graph", **options)
    assert not torch.equal(plain.net.backbone[0].weight, graph[0].net.backbone[0].weight)


def test_tasks_of_one_shape_share_their_captures(ran):
    """Three stages, for heads of 3 classes (tasks 1 and 3) and of 2; the pass is the same for all."""
    assert captured(ran(method="confit", step="graph")[0]) == 6
    assert captured(ran(method="confit", step="graph", statistics="pass")[0]) == 7
    assert captured(ran(method="confit", step="graph", momentum=0.9, lr=0.01)[0]) == 6
    assert captured(ran(step="graph", **CASES["adam"])[0]) == 6


def test_two_runs_of_one_seed_give_the_same_bits_and_another_seed_others(ran):
    options = {"precision": "auto", "step": "auto", "dropout": 0.3, "augmentation": "flip"}
    first, again, other = (ran(seed=seed, **options) for seed in (0, 0, 1))
    assert first[1].execution == "bf16, graph, deterministic"
    assert_same_bits(first, again)
    assert first[1].final_sha256 != other[1].final_sha256


def test_dropout_is_drawn_anew_in_every_replay(make_net, make_task):
    """A graph that had captured the chance itself would repeat one mask."""
    net = make_net("finetune", dropout=0.5)
    drawn = torch.zeros(200, 24 * 16, device="cuda")
    place_ = torch.zeros((), dtype=torch.long, device="cuda")

    def remember(module, args, out):
        drawn.index_copy_(0, place_.view(1), (out == 0).float().reshape(1, -1))
        place_.add_(1)

    net.backbone[-1].register_forward_hook(remember)
    settings = TrainSettings(epochs=10, batch_size=24, device="cuda", step="graph", precision="fp32")
    fit(net, make_task("dark"), "finetune", settings)
    steps = int(place_)
    assert steps == 20
    masks = drawn[:steps].cpu()
    assert len({mask.numpy().tobytes() for mask in masks}) == steps
    # Features behind a ReLU and an average are hardly ever zero by themselves.
    assert masks.mean().item() == pytest.approx(0.5, abs=0.05)


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Pull(Method):
    """Sums squared gradients in place, and pulls each weight back to its start by them and by a constant.

    With one capture for all tasks its tensors stay where they are; otherwise it makes new ones for every task.
    """

    strength = 0.3

    def __init__(self, one_capture):
        super().__init__()
        self.one_capture, self.start, self.importance = one_capture, {}, {}

    def begin_task(self, context):
        for name, p in context.net.shared_parameters().items():
            if self.one_capture and name in self.start:
                self.start[name].copy_(p.detach())
            else:
                self.start[name] = p.detach().clone()
                self.importance[name] = self.importance.get(name, torch.zeros_like(p)).detach().clone()

    def read_gradients(self, net):
        for name, p in net.shared_parameters().items():
            if p.grad is not None:
                self.importance[name].addcmul_(p.grad, p.grad)

    def add_gradients(self, net):
        for name, p in net.shared_parameters().items():
            if p.grad is not None:
                away = p.detach() - self.start[name]
                p.grad.addcmul_(away, self.importance[name]).add_(away, alpha=self.strength)

    def captured_kind(self, index):
        return "in place" if self.one_capture else super().captured_kind(index)


@pytest.mark.parametrize("one_capture", [False, True], ids=["captured for each task", "captured once"])
@pytest.mark.parametrize("base", ["finetune", "confit"])
def test_a_hook_with_state_of_its_own_gives_the_same_bits(ran, make_method, one_capture, base):
    found = {}
    for step in ("eager", "graph"):
        penalty = Pull(one_capture)
        found[step] = (ran(method=make_method(base, penalty), step=step), penalty)
    (eager, by_hand), (graph, replayed) = found["eager"], found["graph"]
    stages = 1 if base == "finetune" else 3
    assert captured(graph[0]) == stages * (2 if one_capture else 3)
    assert_same_bits(graph, eager)
    for name, importance in by_hand.importance.items():
        assert torch.equal(replayed.importance[name], importance), name
        assert torch.equal(replayed.start[name], by_hand.start[name]), name
    assert max(importance.max().item() for importance in by_hand.importance.values()) > 1e-4
    # ... and it does something.
    bare, _ = ran(method=base, step="eager")
    assert not torch.equal(bare.net.backbone[0].weight, eager[0].net.backbone[0].weight)


def test_a_term_of_the_loss_gives_the_same_bits(ran, make_method):
    class Entropy(Method):
        def loss(self, step):
            p = step.logits.float().softmax(1)
            return 0.3 * (p * p.clamp_min(1e-12).log()).sum(1).mean()

    eager, graph = (ran(method=make_method("confit", Entropy()), step=step) for step in ("eager", "graph"))
    assert captured(graph[0]) > 0
    assert_same_bits(graph, eager)


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["eager", "graph"])
@pytest.mark.parametrize("name", ["confit window running", "confit phase pass", "joint", "augmentation"])
def test_streamed_pixels_give_the_same_bits(ran, name, step):
    runs = [ran(pixels=where, step=step, eval_batch_size=7, **CASES[name]) for where in ("device", "host")]
    for (run, _), where in zip(runs, ("cuda", "cpu"), strict=True):
        assert run.sequence[0].train.pixels.device.type == where
        assert run.sequence[0].test.pixels.device.type == where
    assert_same_bits(*runs)


def test_streamed_batches_are_those_that_lie_on_the_device(sequence):
    task, device = sequence[0], torch.device("cuda")
    placed = place(sequence, device, "device")[0]
    orders = [None, torch.randperm(48, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 5, 0])]
    for order in orders:
        for size in (1, 7, 48, 100):
            wanted = torch.arange(48) if order is None else order
            kinds = [list(batches(images, size, device, order)) for images in (task.train, placed.train)]
            for found in kinds:
                assert [len(labels) for _, labels in found] == [len(part) for part in wanted.split(size)]
                pixels, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
                assert pixels.device.type == labels.device.type == "cuda"
                assert torch.equal(pixels.cpu(), task.train.pixels[task.train.rows[wanted]])
                assert torch.equal(labels.cpu(), task.train.labels[wanted])


def test_streaming_that_is_left_in_the_middle_leaves_nothing_behind(sequence):
    device = torch.device("cuda")
    for _ in range(3):
        stream = batches(sequence[0].train, 4, device)
        pixels, _ = next(stream)
        assert torch.equal(pixels.cpu(), sequence[0].train.batch(torch.arange(4))[0])
        stream.close()
    assert sum(len(labels) for _, labels in batches(sequence[0].train, 4, device)) == 48


@pytest.fixture
def overlapping(sequence):
    """Two tasks in one block of pixels of which not every image is used, and one of them in both."""
    task = sequence[0]
    rows = torch.tensor([40, 3, 17, 60, 5])
    labels = torch.tensor([0, 1, 2, 0, 1])

    def part(name, train, test):
        of = lambda rows: Images(task.train.pixels, rows, labels[: len(rows)])  # noqa: E731
        return dataclasses.replace(task, name=name, train=of(train), test=of(test))

    tasks = part("one", rows, rows[:3] + 1), part("two", rows.flip(0), torch.tensor([80, 3]))
    return TaskSequence("shared", "own", tasks)


@pytest.mark.parametrize("where", ["auto", "device"])
def test_each_image_is_placed_once(overlapping, where):
    placed = place(overlapping, torch.device("cuda"), where)
    blocks = {id(images.pixels): images.pixels for task in placed for images in (task.train, task.test)}
    (block,) = blocks.values()
    assert block.device.type == "cuda"
    assert len(block) == len({40, 3, 17, 60, 5, 41, 4, 18, 80})
    assert len({image.numpy().tobytes() for image in block.cpu()}) == len(block)
    for task, original in zip(placed, overlapping, strict=True):
        for split in ("train", "test"):
            found, wanted = getattr(task, split), getattr(original, split)
            assert torch.equal(found.pixels[found.rows].cpu(), wanted.pixels[wanted.rows])
            assert torch.equal(found.labels.cpu(), wanted.labels)
    again = place(placed, torch.device("cuda"), where)
    assert again[0].train.pixels is placed[0].train.pixels


def test_what_does_not_fit_is_streamed_unless_it_must_be_there(sequence, monkeypatch):
    device = torch.device("cuda")
    images = sum(len(task.train) + len(task.test) for task in sequence)
    needed = images * 3 * 16 * 16
    for free, fits in ((2 * needed, True), (2 * needed - 2, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10 * needed))
        assert (place(sequence, device, "auto")[0].train.pixels.device.type == "cuda") == fits
        assert place(sequence, device, "device")[0].train.pixels.device.type == "cuda"


def test_evaluation_does_not_depend_on_where_the_pixels_lie(ran, sequence):
    run, result = ran(method="confit", step="graph")
    placed = place(sequence, torch.device("cuda"), "device")
    settings = TrainSettings(device="cuda", precision="fp32", eval_batch_size=9)
    with library_switches(run.settings, "graph"):
        for index, (task, there) in enumerate(zip(sequence, placed, strict=True)):
            accuracy = evaluate(run.net, task, settings)
            assert accuracy == evaluate(run.net, there, settings)
            # Other batches, so other kernels may round a logit otherwise; an image is at most a few percent.
            assert accuracy == pytest.approx(result.matrix[index, -1], abs=100 / len(task.test) + 1e-9)


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (300, 260)])
def test_preprocessing_is_the_cpus_within_a_grey_level(size):
    pixels = torch.randint(0, 256, (4, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    preprocess = Preprocess(IMAGENET_MEAN, IMAGENET_STD, resize=224, crop=224)
    ready = [preprocess(pixels.to(device)) for device in ("cpu", "cuda")]
    assert ready[0].shape == ready[1].shape == (4, 3, 224, 224)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    levels = [255 * (x.cpu().double() * std + mean) for x in ready]
    difference = (levels[0] - levels[1]).abs()
    assert difference.mean().item() < 0.1
    assert difference.max().item() < 2.01
    assert levels[1].std().item() > 20  # a picture, not a grey plane


# ---- side by side, and broken off ------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [0, 4])
@pytest.mark.parametrize("name", ["confit window running", "confit phase pass", "adam", "dropout", "everything random"])
def test_seeds_side_by_side_give_the_same_bits_as_alone(make_run, ran, name, apart):
    options = {**EXACT, **CASES[name], "step": "graph"}
    turns = Turns(3, apart)
    runs = [make_run(seed=seed, listeners=(turns.listener(seed),), **options) for seed in range(3)]
    with library_switches(runs[0].settings, "graph"):
        results = turns.run([run.run for run in runs])
    for seed, pair in enumerate(zip(runs, results, strict=True)):
        assert captured(pair[0]) > 0
        assert_same_bits(pair, ran(seed=seed, step="graph", **CASES[name]))
    assert len({result.final_sha256 for result in results}) == 3


def test_streams_side_by_side_give_the_same_bits_as_alone(make_run, ran):
    options = {**EXACT, "step": "graph", "pixels": "host"}
    turns = Turns(2)
    runs = [make_run(seed=seed, listeners=(turns.listener(seed),), **options) for seed in range(2)]
    with library_switches(runs[0].settings, "graph"):
        results = turns.run([run.run for run in runs])
    for seed, pair in enumerate(zip(runs, results, strict=True)):
        assert_same_bits(pair, ran(seed=seed, step="graph"))


@pytest.mark.parametrize("name", [*SOME, "momentum", "confit phase running"])
def test_resumed_in_the_middle_of_a_task_gives_the_same_bits(ran, make_run, tmp_path, name):
    options = {**EXACT, **CASES[name], "step": "graph"}
    whole = ran(**options)
    with pytest.raises(Killed):
        make_run(folder=tmp_path, listeners=(Killer(1, 3),), **options).run()
    starts = Starts()
    run = make_run(folder=tmp_path, listeners=(starts,), **options)
    assert run.resume()
    pair = run, run.run()
    assert starts.tasks == [(1, 3), (2, 0)]
    assert starts.epochs == [(1, 3), (1, 4), *((2, epoch) for epoch in range(5))]
    assert_same_bits(pair, whole)


def test_every_epoch_is_told_once_and_in_order(ran):
    """A GPU's epochs are read one behind."""
    starts = Starts()
    ran(step="graph", listeners=(starts,))
    assert starts.epochs == [(task, epoch) for task in range(3) for epoch in range(5)]


# ---- what cannot be captured, and what goes wrong --------------------------------------------------------------------


class Waits(nn.Module):
    """Looks at a value, for which Python has to wait: no graph can do that."""

    def forward(self, x):
        return x * 2 if x.sum().item() > 1e30 else x


@pytest.mark.parametrize("place_", ["first", "last"])
@pytest.mark.parametrize(
    "options", [{"method": "confit"}, {"method": "confit", "statistics": "pass"}, {"method": "finetune"}]
)
def test_a_network_that_waits_is_noted_and_trained_kernel_by_kernel(ran, make_net, options, place_):
    pairs, notes = [], Notes()
    for step in ("eager", "graph"):
        net = make_net(**options)
        net.backbone.insert(3 if place_ == "first" else len(net.backbone), Waits())  # 3: behind the first block
        pairs.append(ran(net=net, step=step, listeners=(notes,), **options))
    (note,) = notes.notes
    assert note.startswith("this network cannot be captured as a CUDA graph and is trained kernel by kernel")
    assert captured(pairs[1][0]) == 0
    assert_same_bits(pairs[1], pairs[0])


def test_a_network_that_waits_and_draws_chance(ran, make_net):
    pairs, notes = [], Notes()
    for step in ("eager", "graph"):
        net = make_net("confit", dropout=0.3)
        net.backbone.append(Waits())
        pairs.append(ran(net=net, step=step, listeners=(notes,)))
    assert len(notes.notes) == 1
    assert_same_bits(pairs[1], pairs[0])


def test_other_networks_are_captured_after_one_that_could_not_be(ran, make_net):
    net = make_net("confit")
    net.backbone.append(Waits())
    ran(net=net, step="graph", epochs=1)
    run, result = ran(step="graph")
    assert captured(run) == 6
    assert_same_bits((run, result), ran(step="eager"))


def test_a_loss_that_is_not_finite_is_reported_with_its_step(make_run):
    said = {}
    for step in ("eager", "graph"):
        with pytest.raises(ConfituneError) as caught:
            make_run("finetune", **{**EXACT, "lr": 1e12, "step": step}).run()
        said[step] = str(caught.value)
    found = re.search(
        r"the loss of task 'dark' became (nan|inf).* in epoch 1 from step (\d) of 6 on \(stage 'all'\)", said["eager"]
    )
    assert found, said["eager"]
    assert 2 <= int(found[2]) <= 6  # the first step's loss is that of the start
    assert said["graph"] == said["eager"]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_is_not_finite_in_a_late_epoch_is_named(make_net, make_task, epochs):
    """In the third step of the last epoch, when graphs are replayed and their numbers read one epoch behind."""
    net, task = make_net("finetune"), make_task("dark")  # 6 steps an epoch
    bad_step = 6 * (epochs - 1) + 3
    count = torch.zeros((), device="cuda")

    class Breaks(nn.Module):
        def forward(self, x):
            if not self.training:
                return x
            count.add_(1)
            # Added, not multiplied: a product would give NaN gradients from the first step on.
            return x + torch.where(count >= bad_step, torch.full_like(count, float("nan")), torch.zeros_like(count))

    net.backbone.append(Breaks())
    notes = Notes()
    settings = TrainSettings(epochs=epochs, batch_size=8, lr=0.01, device="cuda", precision="fp32", step="graph")
    message = rf"the loss of task 'dark' became nan, its weights infinite in epoch {epochs} from step 3 of 6 on"
    with pytest.raises(ConfituneError, match=message):
        fit(net, task, "finetune", settings, notes)
    assert [end.epoch for end in notes.ends] == list(range(epochs - 1))
    assert notes.notes == []


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_compiled_steps_agree_with_kernel_by_kernel(ran, make_net, sequence, monkeypatch, precision, most):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ten bits would hide what is compared
    options = {"method": "confit", "tasks": sequence[:1], "precision": precision, "lr": 0.01}
    start = make_net("confit").backbone[0].weight.detach()
    (eager, _), (compiled, result) = (ran(step=step, **options) for step in ("eager", "compile"))
    assert result.execution == f"{precision}, compile, deterministic"
    assert captured(compiled) == len(compiled._executor._compiled) == 3
    wanted, found = tensors(eager.net), tensors(compiled.net)

    def whole(state):
        return torch.cat([state[f"backbone.{name}"].reshape(-1) for name, _ in eager.net.backbone.named_parameters()])

    for mine, other in ((whole(found), whole(wanted)), (found["row of dark"], wanted["row of dark"])):
        assert (mine - other).norm() <= most * other.norm()
    for key, value in wanted.items():
        if key.endswith("num_batches_tracked"):
            assert torch.equal(found[key], value), key
    assert compiled.net.tasks["dark"].facts == eager.net.tasks["dark"].facts
    # The last stage has moved the convolutions, and alike.
    moved = (wanted["backbone.0.weight"] - start).norm()
    assert moved > 0
    assert (found["backbone.0.weight"] - wanted["backbone.0.weight"]).norm() < 0.2 * moved
