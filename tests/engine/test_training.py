"""The training loop against one written by hand, and what it does with odd tasks."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import DivergedError, EpochEnd, Listener, TaskFit, TrainSettings, evaluate, fit, network_sha256
from confitune.engine.parameters import place_network
from confitune.errors import ConfituneError
from confitune.methods import METHODS, Penalty, create_method
from confitune.nn import InfiniteError
from confitune.tasks import Images, TaskSequence


class Events(Listener):
    def __init__(self):
        self.ends, self.steps, self.notes = [], [], []

    def step_done(self, step, steps):
        self.steps.append((step, steps))

    def epoch_ended(self, end):
        self.ends.append(end)

    def note(self, message):
        self.notes.append(message)


def assert_same_tensors(found, expected):
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[key], value, rtol=1e-6, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.01},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "step", "momentum": 0.9},
        {"clip_norm": 1.0},
    ],
    ids=["plain", "momentum", "cosine", "step", "clipped"],
)
def test_finetune_is_sgd_on_the_cross_entropy(make_net, sequence, options, batch_recorder):
    settings = TrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.05, "device": "cpu", **options})
    net = make_net("finetune")
    # In the engine's memory format, so that the kernels, and with them the rounding, are the same.
    backbone = copy.deepcopy(net.backbone).to(memory_format=torch.channels_last)
    recorder, events = batch_recorder(net), Events()
    method = dataclasses.replace("finetune", penalties=(recorder,))
    for index, task in enumerate(sequence.first(2)):
        recorder.inputs.clear()
        recorder.labels.clear()
        fitting = make_fit(net, task, method, settings, events)
        head = nn.Linear(16, len(task.classes))
        head.load_state_dict(net.head.linear.state_dict())
        fitting.run()

        # By hand, on the same batches and from the same head:
        model = nn.Sequential(backbone, head).train()
        parameters = list(model.parameters())
        velocity = [torch.zeros_like(p) for p in parameters]
        steps = len(task.train) // 8
        assert len(recorder.labels) == 3 * steps
        losses, right, norms = [], [], []
        for step, (x, labels) in enumerate(zip(recorder.inputs, recorder.labels, strict=True)):
            logits = model(x)
            loss = cross_entropy(logits, labels)
            gradients = torch.autograd.grad(loss, parameters)
            lr = settings.lr * settings.lr_factor(step // steps)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            norms.append(norm.item())
            if settings.clip_norm:
                gradients = [g * min(1.0, settings.clip_norm / (norm + 1e-6)) for g in gradients]
            with torch.no_grad():
                for p, v, g in zip(parameters, velocity, gradients, strict=True):
                    v.mul_(settings.momentum).add_(g + settings.weight_decay * p)
                    p.add_(v, alpha=-lr)
            losses.append(loss.item())
            right.append((logits.argmax(1) == labels).double().mean().item())
        assert_same_tensors(net.backbone, backbone)
        assert_same_tensors(net.head, head)
        if settings.clip_norm:  # some steps are clipped, some are not
            assert min(norms) < settings.clip_norm < max(norms)
        for epoch in range(3):
            end = events.ends[3 * index + epoch]
            mine = slice(epoch * steps, (epoch + 1) * steps)
            assert end.loss == pytest.approx(sum(losses[mine]) / steps, rel=1e-5)
            assert end.accuracy == pytest.approx(100 * sum(right[mine]) / steps)


def test_events_of_a_task(make_net, make_task):
    events = Events()
    fit(make_net("confit"), make_task("dark"), "confit", TrainSettings(epochs=5, device="cpu"), events)
    assert events.steps == [(1, 1)] * 5  # 48 images, batches of 32
    assert [end.epoch for end in events.ends] == [0, 1, 2, 3, 4]
    for end in events.ends:
        assert isinstance(end, EpochEnd)
        assert (end.task, end.task_name, end.epochs, end.images, end.lr) == (0, "dark", 5, 32, 0.01)
        assert end.seconds > 0


def test_the_last_smaller_batch_is_dropped(make_net, make_task, batch_recorder):
    net, events = make_net("finetune"), Events()
    recorder = batch_recorder(net)
    method = dataclasses.replace("finetune", penalties=(recorder,))
    fit(net, make_task("dark", (11, 9)), method, TrainSettings(epochs=3, batch_size=8, device="cpu"), events)
    assert events.steps == [(1, 2), (2, 2)] * 3
    assert [len(labels) for labels in recorder.labels] == [8] * 6
    assert [end.images for end in events.ends] == [16] * 3


def test_a_task_smaller_than_a_batch_is_one_smaller_batch(make_net, make_task):
    net, task, events = make_net("confit"), make_task("dark", (3, 2)), Events()
    settings = TrainSettings(epochs=20, batch_size=8, lr=0.05, device="cpu")
    fit(net, task, "confit", settings, events)
    (note,) = events.notes
    assert note == "task 'dark' has 5 training images, fewer than the batch size 8: batches of 5"
    assert events.steps == [(1, 1)] * 20
    assert {end.images for end in events.ends} == {5}
    assert events.ends[-1].loss < 0.5 * events.ends[0].loss
    assert events.ends[-1].accuracy == 100
    assert net.tasks["dark"].finished


@pytest.mark.parametrize("method", METHODS)
def test_two_training_images_are_enough(make_net, make_task, method):
    method = METHODS[method]
    task = make_task("dark", (1, 1))
    net = make_net(method.norm, **{**method.network, "statistics": "pass"})
    fit(net, task, method, TrainSettings(epochs=5, device="cpu"))
    assert net.tasks["dark"].finished
    assert 0 <= evaluate(net, task) <= 100


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if not method.joint] + ["ewc+confit", "rwalk", "mas+cpr+confit"]
)
@pytest.mark.parametrize("statistics", ["running", "pass"])
def test_a_last_batch_of_one_image_is_no_trouble(make_net, make_task, name, statistics):
    """17 images in batches of 8: in training, in estimating what weights matter, in the pass and in evaluation."""
    method = create_method(name)
    tasks = [make_task("dark", (9, 8), (9, 8)), make_task("bright", (8, 9), (8, 9), base=170)]
    net = make_net(method.norm, **{**method.network, "statistics": statistics})
    for task in tasks:
        fit(net, task, method, TrainSettings(epochs=4, batch_size=8, device="cpu"))
    for task in tasks:
        found = [evaluate(net, task, TrainSettings(eval_batch_size=size, device="cpu")) for size in (8, 16, 17)]
        assert found[0] == found[1] == found[2]
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_one_training_image_is_refused(make_net, make_task, make_run, sequence):
    task = make_task("lonely", (1, 0))
    with pytest.raises(ConfituneError, match="task 'lonely' has 1 training image; batch norm needs 2 or more"):
        fit(make_net("confit"), task)
    with pytest.raises(ConfituneError, match="lonely"):
        make_run(tasks=TaskSequence("tiny", "own", (sequence[0], task))).run()


def test_a_class_without_training_images_keeps_its_place(make_net, make_task):
    task = make_task("dark", (24, 0, 20), (10, 8, 9))
    net, events = make_net("confit"), Events()
    fit(net, task, "confit", TrainSettings(epochs=10, batch_size=8, lr=0.05, device="cpu"), events)
    assert net.head.out_features == 3
    assert events.ends[-1].accuracy > 90
    accuracy = []
    for label in range(3):
        chosen = task.test.labels == label
        accuracy.append(
            evaluate(net, task, images=Images(task.test.pixels, task.test.rows[chosen], task.test.labels[chosen]))
        )
    assert accuracy[1] == 0  # never seen, never answered
    assert min(accuracy[0], accuracy[2]) > 50


@pytest.mark.parametrize(("method", "norm"), [("confit", "shared"), ("finetune", "xconv"), ("linear-probe", "shared")])
def test_a_method_whose_norm_does_not_fit_the_network_is_refused(make_net, make_task, method, norm):
    needed = method
    message = (
        rf"method '{method}' needs norm='{needed}', the network has '{norm}': ContinualNet\(backbone, norm='{needed}'\)"
    )
    with pytest.raises(ConfituneError, match=message):
        fit(make_net(norm), make_task("dark"), METHODS[method])


def test_the_device_is_checked_before_anything_is_trained(make_net, make_task):
    net = make_net("confit")
    with pytest.raises(ConfituneError, match="device 'cuda:99' cannot be used"):
        fit(net, make_task("dark"), settings=TrainSettings(device="cuda:99"))
    assert not net.tasks


def test_input_statistics_are_silent_until_they_matter(make_net, make_task):
    """120 steps: of an average with momentum 0.1 the first 21 weigh less than 3e-5 together."""
    task, rows = make_task("dark"), []
    for track_from in (3e-5, 0):
        net = make_net("confit")
        settings = TrainSettings(epochs=20, batch_size=8, track_from=track_from, device="cpu")
        fit(net, task, "confit", settings)
        rows.append(net.task_state_dict("dark"))
        assert net.tasks["dark"].batches == ((99,) * 3 if track_from else (120,) * 3)
    silent, whole = rows
    for key in silent:
        if key.endswith("input_means"):
            assert not torch.equal(silent[key], whole[key])
            torch.testing.assert_close(silent[key], whole[key], rtol=0, atol=3e-5 * 4)  # inputs reach 4 or so
        elif not key.endswith("input_size"):
            assert torch.equal(silent[key], whole[key])  # nothing else depends on it


def test_the_pass_sees_full_batches_of_the_training_size_once(make_net, make_task):
    net = make_net("confit", statistics="pass")
    seen = []
    net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    fit(net, make_task("dark", (11, 9)), "confit", TrainSettings(epochs=5, batch_size=8, device="cpu"))
    assert [len(x) for x in seen] == [8] * (2 * 5 + 2)
    assert net.tasks["dark"].batches == (2, 2, 2)
    passed = torch.cat(seen[-2:])
    assert len({image.numpy().tobytes() for image in passed}) == 16
    # The first convolution reads the images: window (1, 1) at stride 2 and padding 1 is every other pixel from 0 on.
    means = net.task_state_dict("dark")["0.input_means"][:, 1, 1]
    torch.testing.assert_close(means, passed[:, :, ::2, ::2].mean((0, 2, 3)))


def test_statistics_that_wait_for_the_pass_are_silent_before_it(make_net, make_task):
    class Look(Listener):
        def step_done(self, step, steps):
            tracking.append([statistics.tracking for statistics in net._memory.statistics.values()])

    net, tracking = make_net("confit", statistics="pass"), []
    fit(net, make_task("dark"), "confit", TrainSettings(epochs=5, batch_size=24, device="cpu"), Look())
    assert tracking == [[False] * 3] * 10


def test_bf16_trains_float32_weights(make_net, make_task):
    net, events = make_net("confit"), Events()
    settings = TrainSettings(epochs=10, batch_size=8, lr=0.05, precision="bf16", device="cpu")
    kinds = set()
    net.backbone[0].register_forward_hook(lambda module, args, out: kinds.add(out.dtype))
    task = make_task("dark")
    fit(net, task, "confit", settings, events)
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net.tasks["dark"].row.dtype == torch.float32
    assert events.ends[-1].loss < events.ends[0].loss
    assert evaluate(net, task, settings) == pytest.approx(evaluate(net, task), abs=10)


def test_fit_defaults_to_confit(make_net, make_task):
    nets = [make_net("confit"), make_net("confit")]
    fit(nets[0], make_task("dark"), settings=TrainSettings(epochs=5, device="cpu"))
    fit(nets[1], make_task("dark"), "confit", TrainSettings(epochs=5, device="cpu"))
    assert torch.equal(nets[0].tasks["dark"].row, nets[1].tasks["dark"].row)


def test_an_interrupted_fit_leaves_nothing_frozen(make_net, make_task):
    class Stop(Listener):
        def epoch_ended(self, end):
            raise KeyboardInterrupt

    net = make_net("confit")
    with pytest.raises(KeyboardInterrupt):
        fit(net, make_task("dark"), settings=TrainSettings(epochs=5, device="cpu"), listener=Stop())
    assert all(p.requires_grad for p in net.parameters())
    assert not net.tasks["dark"].finished


# ---- statistics in float16, and again where that is not enough -------------------------------------------------------


def trained(net, task, scale=1.0):
    """A task whose training is over, but for the end of it; the first convolution's outputs grow by `scale`."""
    settings = TrainSettings(epochs=5, batch_size=8, precision="bf16", device="cpu")
    fitting = make_fit(net, task, "confit", settings, Listener())
    with torch.no_grad():
        net.backbone[0].weight.mul_(scale)
    return fitting


def test_a_pass_in_float16_is_nearer_to_float32_and_has_an_end(make_net, make_task):
    means = {}
    for kind, half, precision in (("exact", False, "fp32"), ("bfloat16", False, "bf16"), ("float16", True, "bf16")):
        net, kinds = make_net("confit", statistics="pass"), set()
        net.backbone[0].register_forward_hook(lambda module, args, out, kinds=kinds: kinds.add(out.dtype))
        fitting = trained(net, make_task("dark"))
        settings = fitting.settings.model_copy(update={"precision": precision})
        fitting.settings, fitting.step = settings, dataclasses.replace(fitting.step, settings=settings)
        fitting._finish_in(half)
        assert kinds == {{"exact": torch.float32}.get(kind) or getattr(torch, kind)}
        means[kind] = net.task_state_dict("dark")["6.input_means"]
    errors = {kind: (mean - means["exact"]).abs().max().item() for kind, mean in means.items()}
    assert 0 < errors["float16"] < 0.5 * errors["bfloat16"]
    net = make_net("confit", statistics="pass")
    fitting = trained(net, make_task("dark"), 1e5)
    with pytest.raises(InfiniteError):
        fitting._finish_in(half=True)
    assert not net.tasks["dark"].finished
    fitting._finish_in(half=False)
    assert net.tasks["dark"].finished
    assert net.tasks["dark"].row.isfinite().all()


@pytest.mark.parametrize(
    ("device", "precision", "infinite", "passes"),
    [
        ("cuda", "auto", {True}, [True, False]),
        ("cuda", "auto", set(), [True]),
        ("cuda", "fp32", set(), [False]),
        ("cpu", "bf16", set(), [False]),
        ("cuda", "auto", {True, False}, [True, False]),
        ("cpu", "auto", {False}, [False]),
    ],
)
def test_the_end_of_a_task_is_measured_again_where_float16_was_too_small(
    make_net, make_task, monkeypatch, device, precision, infinite, passes
):
    net, seen = make_net("confit", statistics="pass"), []
    settings = TrainSettings(epochs=5, batch_size=8, precision=precision, device="cpu")
    fitting = make_fit(net, make_task("dark"), "confit", settings, Listener())
    fitting.device = torch.device(device)  # asked for how to measure; nothing is computed there

    def finish_in(half):
        seen.append(half)
        if half in infinite:
            raise InfiniteError("too large")

    monkeypatch.setattr(fitting, "_finish_in", finish_in)
    if False in infinite:
        with pytest.raises(InfiniteError, match="too large"):
            fitting._finish()
    else:
        fitting._finish()
    assert seen == passes


def test_weights_that_no_pass_can_follow_end_a_fit_with_a_message(make_net, make_task):
    """The last step may do it: no later loss tells."""

    class Grows(Penalty):
        def end_task(self, context):
            with torch.no_grad():
                context.net.backbone[0].weight.mul_(1e38)

    net = make_net("confit", statistics="pass")
    method = dataclasses.replace("confit", penalties=(Grows(),))
    with pytest.raises(InfiniteError, match="statistics of task 'dark' are not finite"):
        fit(net, make_task("dark"), method, TrainSettings(epochs=5, batch_size=8, device="cpu"))
    assert not net.tasks["dark"].finished


class ReadLate(TaskFit):
    """What epochs measured is read as late as a GPU's: when all of the task is under way."""

    in_epoch = False

    def _train_epoch(self, stage, epoch):
        self.in_epoch = True
        super()._train_epoch(stage, epoch)
        self.in_epoch = False

    def report(self, all_but=0):
        if not self.in_epoch:
            super().report(all_but)


@pytest.mark.parametrize("statistics", ["running", "pass"])
@pytest.mark.parametrize("method", ["confit", "best"])
def test_a_task_that_diverged_is_not_finished_though_its_end_was_launched(make_net, make_task, method, statistics):
    method = create_method(method, {"probe": {"most": 0}} if method == "best" else {})
    net, events = make_net("confit", **{**method.network, "statistics": statistics}), Events()
    settings = TrainSettings(epochs=5, batch_size=8, lr=1e38, weight_decay=1e10, device="cpu")
    fitting = ReadLate(net, make_task("dark"), method, settings, events)
    with pytest.raises(DivergedError, match=r"task 'dark' became .* in epoch \d"):
        fitting.run()
    assert not net.tasks["dark"].finished


@pytest.mark.parametrize("method", ["confit", "best"])
def test_reading_late_changes_nothing(make_net, make_task, method):
    method = create_method(method, {"probe": {"most": 0}} if method == "best" else {})
    hashes, ends = set(), []
    for kind in (TaskFit, ReadLate):
        net, events = make_net("confit", **method.network), Events()
        kind(net, make_task("dark"), method, TrainSettings(epochs=5, batch_size=8, lr=0.01, device="cpu"), events).run()
        hashes.add(network_sha256(net))
        ends.append([(end.epoch, end.loss) for end in events.ends])
    assert len(hashes) == 1
    assert ends[0] == ends[1]
    assert len(ends[0]) == 5


def test_a_network_that_is_in_place_is_not_moved(make_net):
    net, device = make_net("confit"), torch.device("cpu")
    moves, apply = [], net._apply
    net._apply = lambda *args, **options: (moves.append(1), apply(*args, **options))[1]
    place_network(net, device)
    assert moves  # into another memory format
    weight = net.backbone[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    moves.clear()
    place_network(net, device)
    assert not moves
