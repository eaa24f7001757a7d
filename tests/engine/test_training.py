"""The training loop against one written by hand, and what it does with odd tasks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import DivergedError, EpochEnd, Listener, TaskFit, TrainSettings, evaluate, fit, network_sha256
from confitune.engine.feed import batches
from confitune.errors import ConfituneError
from confitune.methods import METHODS, Method
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
def test_finetune_is_sgd_on_the_cross_entropy(make_fit, make_method, make_net, sequence, options, batch_recorder):
    settings = TrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.05, "device": "cpu", **options})
    net = make_net("finetune")
    # In the engine's memory format, so that the kernels, and with them the rounding, are the same.
    backbone = copy.deepcopy(net.backbone).to(memory_format=torch.channels_last)
    recorder, events = batch_recorder(), Events()
    method = make_method("finetune", recorder)
    for index, task in enumerate(sequence[:2]):
        recorder.inputs.clear()
        recorder.labels.clear()
        fitting = make_fit(net, task, method, settings, events)
        head = nn.Linear(16, len(task.classes))
        head.load_state_dict(net.head.linear.state_dict())
        fitting.fit()

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
            lr = settings.lr * settings.lr_factor(step / steps)
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
        assert_same_tensors(net.head.linear, head)
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


def test_the_last_smaller_batch_is_dropped(make_method, make_net, make_task, batch_recorder):
    net, events, recorder = make_net("finetune"), Events(), batch_recorder()
    method = make_method("finetune", recorder)
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


@pytest.mark.parametrize("name", METHODS)
def test_two_training_images_are_enough(make_method, make_net, make_task, name):
    method, task = make_method(name, statistics="pass"), make_task("dark", (1, 1))
    net = make_net(method)
    fit(net, task, method, TrainSettings(epochs=5, device="cpu"))
    assert net.tasks["dark"].finished
    assert 0 <= evaluate(net, task) <= 100


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        *((name, "running") for name, method in METHODS.items() if not method.joint),
        *((name, "pass") for name in ("confit", "finetune-xconv", "ewc+confit", "mas+cpr+confit")),
    ],
)
def test_a_last_batch_of_one_image_is_no_trouble(make_method, make_net, make_task, name, statistics):
    """17 images in batches of 8: in training, in estimating what weights matter, in the pass and in evaluation."""
    method = make_method(name, statistics=statistics)
    tasks = [make_task("dark", (9, 8), (9, 8)), make_task("bright", (8, 9), (8, 9), base=170)]
    net = make_net(method)
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
    assert net.head.linear.out_features == 3
    assert events.ends[-1].accuracy > 90
    accuracy = []
    for label in range(3):
        chosen = task.test.labels == label
        accuracy.append(
            evaluate(net, task, images=Images(task.test.pixels, task.test.rows[chosen], task.test.labels[chosen]))
        )
    assert accuracy[1] == 0  # never seen, never answered
    assert min(accuracy[0], accuracy[2]) > 50


@pytest.mark.parametrize(
    ("method", "other", "needs", "has"),
    [
        ("confit", "finetune", r"XconvNorms\(window, running\), Head", "Head"),
        ("finetune", "confit", "Head", r"XconvNorms\(window, running\), Head"),
        ("linear-probe", "bn-only", r"Norms\(pretrained .*\), Head", r"Norms\(affine, own .*\), Head"),
    ],
)
def test_a_network_of_other_parts_is_refused(make_net, make_task, method, other, needs, has):
    net = make_net(other)
    message = rf"method '{method}' needs a network with {needs}, this one has {has}: make it with method\.network"
    with pytest.raises(ConfituneError, match=message):
        fit(net, make_task("dark"), method)
    assert not net.tasks


def test_a_network_of_other_options_is_refused(make_method, make_net, make_task):
    with pytest.raises(ConfituneError, match=r"needs a network with XconvNorms\(phase.* has XconvNorms\(window"):
        fit(make_net("confit"), make_task("dark"), make_method("confit", means="phase"))


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
        assert [fact[2] for fact in net.tasks["dark"].facts.values()] == [99 if track_from else 120] * 3
    silent, whole = rows
    for key in silent:
        if key.endswith("input_means"):
            assert not torch.equal(silent[key], whole[key])
            torch.testing.assert_close(silent[key], whole[key], rtol=0, atol=3e-5 * 4)  # inputs reach 4 or so
        elif not key.endswith("input_size"):
            assert torch.equal(silent[key], whole[key])  # nothing else depends on it


def test_the_pass_sees_full_batches_of_the_training_size_once(make_method, make_net, make_task):
    method, seen = make_method("confit", statistics="pass"), []
    net = make_net(method)
    net.backbone.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    fit(net, make_task("dark", (11, 9)), method, TrainSettings(epochs=5, batch_size=8, device="cpu"))
    assert [len(x) for x in seen] == [8] * (2 * 5 + 2)
    assert [fact[2] for fact in net.tasks["dark"].facts.values()] == [2, 2, 2]
    passed = torch.cat(seen[-2:])
    assert len({image.numpy().tobytes() for image in passed}) == 16
    # The first convolution reads the images: window (1, 1) at stride 2 and padding 1 is every other pixel from 0 on.
    means = net.task_state_dict("dark")["0.input_means"][:, 1, 1]
    torch.testing.assert_close(means, passed[:, :, ::2, ::2].mean((0, 2, 3)))


def test_statistics_that_wait_for_the_pass_are_silent_before_it(make_method, make_net, make_task):
    class Look(Listener):
        def step_done(self, step, steps):
            tracking.append([inputs.tracking for inputs in net.parts["norms"].input_means])

    method, tracking = make_method("confit", statistics="pass"), []
    net = make_net(method)
    fit(net, make_task("dark"), method, TrainSettings(epochs=5, batch_size=24, device="cpu"), Look())
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


@pytest.fixture
def ends(make_fit, make_method, make_net, make_task):
    """A network whose training is over, but for the end of it, which is done as on a `device`; and in which precision.

    The first convolution's outputs grow by `scale`.
    """

    def ends(device, precision, scale=1.0):
        method, task, kinds = make_method("confit", statistics="pass"), make_task("dark"), []
        settings = TrainSettings(epochs=5, batch_size=8, precision=precision, device="cpu")
        net = make_net(method)
        fitting = make_fit(net, task, method, settings)
        fitting.device = torch.device(device)  # asked for how to measure; nothing is computed there
        order = fitting._order("pass", 0)[: fitting.steps_an_epoch * 8]
        fitting._batches = lambda *given: batches(task.train, 8, torch.device("cpu"), order)
        net.backbone[0].register_forward_hook(lambda module, args, out: kinds.append(out.dtype))
        with torch.no_grad():
            net.backbone[0].weight.mul_(scale)
        fitting._finish()
        return net, list(dict.fromkeys(kinds))

    return ends


def test_a_pass_in_float16_is_nearer_to_float32_than_one_in_bfloat16(ends):
    means = {}
    for device, precision, kind in (
        ("cuda", "fp32", torch.float32),
        ("cpu", "bf16", torch.bfloat16),
        ("cuda", "bf16", torch.float16),
    ):
        net, kinds = ends(device, precision)
        assert kinds == [kind]
        assert net.tasks["dark"].finished
        means[kind] = net.task_state_dict("dark")["6.input_means"]
    errors = {kind: (mean - means[torch.float32]).abs().max().item() for kind, mean in means.items()}
    assert 0 < errors[torch.float16] < 0.5 * errors[torch.bfloat16]


def test_statistics_that_float16_cannot_hold_are_measured_in_bfloat16(ends):
    net, kinds = ends("cuda", "bf16", scale=1e5)
    assert kinds == [torch.float16, torch.bfloat16]
    assert net.tasks["dark"].finished
    assert net.tasks["dark"].row.isfinite().all()
    assert [fact[2] for fact in net.tasks["dark"].facts.values()] == [6, 6, 6]  # of the second pass alone


@pytest.mark.parametrize(("device", "precision"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_statistics_that_nothing_can_hold_are_an_error(ends, device, precision):
    with pytest.raises(DivergedError, match="statistics of task 'dark' are not finite"):
        ends(device, precision, scale=1e38)


def test_weights_that_no_pass_can_follow_end_a_fit_with_a_message(make_method, make_net, make_task):
    """The last step may do it: no later loss tells."""

    class Grows(Method):
        def end_task(self, context):
            with torch.no_grad():
                context.net.backbone[0].weight.mul_(1e38)

    method = make_method("confit", Grows(), statistics="pass")
    net = make_net(method)
    with pytest.raises(DivergedError, match="statistics of task 'dark' are not finite"):
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


LATE = [("confit", {"statistics": "running"}), ("confit", {"statistics": "pass"}), ("bn-only", {}), ("best", {})]
NEVER = {"best": {"owns": "moments"}}  # settles


@pytest.mark.parametrize(("name", "xconv"), LATE)
def test_a_task_that_diverged_is_not_finished_though_its_end_was_launched(
    make_fit, make_method, make_net, make_task, name, xconv
):
    method = make_method(name, options=NEVER, **xconv)
    net = make_net(method)
    settings = TrainSettings(epochs=5, batch_size=8, lr=1e37, weight_decay=1e10, device="cpu")
    fitting = make_fit(net, make_task("dark"), method, settings, kind=ReadLate)
    with pytest.raises(DivergedError, match=r"task 'dark' became .* in epoch \d"):
        fitting.fit()
    assert not net.tasks["dark"].finished


@pytest.mark.parametrize(("name", "xconv"), LATE)
def test_reading_late_changes_nothing(make_fit, make_method, make_net, make_task, name, xconv):
    hashes, ends = set(), []
    for kind in (TaskFit, ReadLate):
        method, events = make_method(name, options=NEVER, **xconv), Events()
        net, settings = make_net(method), TrainSettings(epochs=5, batch_size=8, lr=0.01, device="cpu")
        make_fit(net, make_task("dark"), method, settings, events, kind=kind).fit()
        hashes.add(network_sha256(net))
        ends.append([(end.epoch, end.loss) for end in events.ends])
    assert len(hashes) == 1
    assert ends[0] == ends[1]
    assert len(ends[0]) == 5
