"""How steps are run where there is no GPU: directly or compiled; and what torch is told meanwhile."""

import os
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from confitune.engine import Executor, Listener, TrainSettings, fit, library_switches
from confitune.engine.capture import _compiled as compile_backbone, _Drawing
from confitune.errors import ConfituneError
from confitune.tasks import TaskSequence

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # the latter is only named here, never used


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_a_graph_needs_a_gpu_and_the_message_says_what_to_do(make_net, make_task, make_run):
    settings = TrainSettings(step="graph", device="cpu")
    message = r"step='graph' captures CUDA graphs and needs a GPU; leave it at 'auto'"
    with pytest.raises(ConfituneError, match=message):
        settings.step_mode(CPU)
    net = make_net("confit")
    with pytest.raises(ConfituneError, match=message):
        fit(net, make_task("dark"), settings=settings)
    assert not net.tasks
    with pytest.raises(ConfituneError, match=message):
        make_run(step="graph")


@pytest.mark.parametrize(
    ("step", "on_cpu", "on_gpu"),
    [("auto", "eager", "graph"), ("eager", "eager", "eager"), ("compile", "compile", "compile")],
)
def test_auto_is_a_graph_on_gpus_only(step, on_cpu, on_gpu):
    assert TrainSettings(step=step).step_mode(CPU) == on_cpu
    assert TrainSettings(step=step).step_mode(CUDA) == on_gpu
    assert TrainSettings(step="graph").step_mode(CUDA) == "graph"


@pytest.mark.parametrize(
    ("options", "device", "text"),
    [
        ({}, CPU, "fp32, eager"),
        ({}, CUDA, "bf16, graph"),
        ({"precision": "fp32"}, CUDA, "fp32, graph"),
        ({"precision": "bf16", "step": "compile"}, CPU, "bf16, compile"),
        ({"step": "eager", "deterministic": True}, CUDA, "bf16, eager, deterministic"),
        ({"deterministic": True}, CPU, "fp32, eager, deterministic"),
    ],
)
def test_execution_says_what_may_change_the_last_bits(options, device, text):
    assert TrainSettings(**options).execution(device) == text


def test_the_result_says_how_it_was_computed(make_run, sequence):
    result = make_run("linear-probe", epochs=1, tasks=sequence[:1], deterministic=True).run()
    assert result.execution == "fp32, eager, deterministic"


# ---- torch's switches ------------------------------------------------------------------------------------------------


def switches():
    cudnn = torch.backends.cudnn
    return {
        "benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


@pytest.fixture(params=["torch's defaults", "the other way round"])
def before(request, monkeypatch):
    """Switches as someone may have left them, and put back after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be removed")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    found, other = switches(), request.param != "torch's defaults"
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = other, other
    torch.use_deterministic_algorithms(other, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = not other
    yield switches()
    torch.backends.cudnn.benchmark = found["benchmark"]
    torch.backends.cudnn.deterministic = found["cudnn.deterministic"]
    torch.use_deterministic_algorithms(found["deterministic"], warn_only=found["warn only"])
    torch.utils.deterministic.fill_uninitialized_memory = found["fill"]


@pytest.mark.parametrize("mode", ["eager", "graph", "compile"])
def test_deterministic_sets_torchs_switches_and_puts_them_back(before, mode):
    with library_switches(TrainSettings(deterministic=True), mode):
        assert switches() == {
            "benchmark": False,  # it may choose another algorithm each time
            "cudnn.deterministic": True,
            "deterministic": True,
            "warn only": True,
            "fill": False,
        }
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_switches_are_put_back_when_the_body_raises(before, deterministic):
    inside = []

    def broken():
        with library_switches(TrainSettings(deterministic=deterministic), "compile"):
            inside.append(switches())
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert inside[0]["cudnn.deterministic"] == deterministic
    assert inside[0]["benchmark"] != deterministic
    assert switches() == before


@pytest.mark.parametrize(("mode", "benchmark"), [("eager", False), ("graph", False), ("compile", True)])
def test_algorithms_are_tried_out_for_long_runs_only(before, mode, benchmark):
    with library_switches(TrainSettings(), mode):
        inside = switches()
    assert inside == {**before, "benchmark": benchmark, "cudnn.deterministic": False}
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert switches() == before


def test_training_is_deterministic_within_and_not_after(make_net, make_task):
    inside = []

    class Look(Listener):
        def step_done(self, step, steps):
            inside.append(switches())

    found = switches()
    settings = TrainSettings(epochs=1, batch_size=24, device="cpu", deterministic=True)
    fit(make_net("confit"), make_task("dark"), settings=settings, listener=Look())
    assert len(inside) == 2
    assert all(seen["deterministic"] and seen["cudnn.deterministic"] for seen in inside)
    assert switches() == found


# ---- compiled --------------------------------------------------------------------------------------------------------


class Convolutions(Listener):
    """The first convolution's weight after every epoch, and the stages the epochs belong to."""

    def __init__(self, net):
        self.net, self.stages, self.after = net, [], []

    def epoch_ended(self, end):
        self.stages.append(end.stage)
        self.after.append((self.net.backbone[0].weight.detach().clone(), self.net.backbone[1].weight.detach().clone()))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
def test_compiled_steps_equal_direct_ones_and_train_what_the_stage_says(make_net, make_run, make_task):
    """Both kinds of statistics in one test: what is compiled for the first is a start for the second."""
    tasks = TaskSequence("two", "own", (make_task("dark"), make_task("minus", base=200, step=-70)))
    for statistics in ("running", "pass"):
        nets = {}
        for step in ("eager", "compile"):
            net = nets[step] = make_net("confit", statistics=statistics)
            start = tuple(layer.weight.detach().clone() for layer in net.backbone[:2])
            watch = Convolutions(net)
            run = make_run(
                net=net, tasks=tasks, epochs=10, batch_size=24, step=step, listeners=(watch,), statistics=statistics
            )
            run.run()
            # Three stages; the pass is a step of its own kind.
            compiled = {"eager": 0, "compile": 4 if statistics == "pass" else 3}[step]
            assert len(run._executor._compiled) == compiled
            assert run._executor._backbone is None
            assert watch.stages == (["head"] * 2 + ["head+norms"] * 3 + ["all"] * 5) * 2
            earlier = start
            for stage, (conv, norm) in zip(watch.stages, watch.after, strict=True):
                assert torch.equal(conv, earlier[0]) == (stage != "all"), (step, stage)
                assert torch.equal(norm, earlier[1]) == (stage == "head"), (step, stage)
                earlier = conv, norm
        eager, compiled = nets["eager"], nets["compile"]
        for name in ("dark", "minus"):
            expected = eager.task_state_dict(name)
            found = compiled.task_state_dict(name)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
            batches = 20 if statistics == "running" else 2
            assert compiled.tasks[name].facts == eager.tasks[name].facts
            assert [fact[2] for fact in eager.tasks[name].facts.values()] == [batches] * 3
        for key, value in eager.backbone.state_dict().items():
            torch.testing.assert_close(compiled.backbone.state_dict()[key], value, rtol=0, atol=1e-5)


def test_each_kind_of_step_is_compiled_for_itself(make_run, sequence, monkeypatch):
    """Code that was compiled while a parameter was frozen would leave it frozen (torch 2.11)."""
    made = []

    def compiled(net):
        used_for = set()
        made.append(used_for)

        def forward(x):
            trained = tuple(layer.weight.requires_grad for layer in net.backbone[:2])
            used_for.add((*trained, torch.is_grad_enabled()))
            return net.backbone(x)

        return forward

    monkeypatch.setattr("confitune.engine.capture._compiled", compiled)
    make_run(tasks=sequence[:1], epochs=5, step="compile", statistics="pass").run()
    stages = [{(False, False, True)}, {(False, True, True)}, {(True, True, True)}]
    assert made == [*stages, {(True, True, False)}]  # the last is the pass


def test_what_is_compiled_is_the_backbone_under_a_code_of_its_own(make_net, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    net, x = make_net("confit").eval(), torch.rand(2, 3, 16, 16)
    first, second = compile_backbone(net), compile_backbone(net)
    assert first.__code__ is not second.__code__
    with torch.no_grad():
        assert torch.equal(first(x), net.backbone(x))


# ---- the order of things in a capture, with graphs that only count ---------------------------------------------------


class Graph:
    """Stands in for a CUDA graph."""

    made = ()  # all since the test began
    capturing = False

    def __init__(self):
        self.replays = 0
        Graph.made.append(self)

    def capture_begin(self, **_):
        Graph.capturing = True

    def capture_end(self):
        Graph.capturing = False

    def replay(self):
        self.replays += 1


class Draws:
    def in_turn(self, captures=False):
        assert not Graph.capturing
        return nullcontext()


class Device:
    """A GPU's generator, streams and events, as far as their order goes."""

    def __init__(self, monkeypatch):
        self.offset, self.stream, self.log = 0, "a", []
        monkeypatch.setattr(torch.cuda, "default_generators", [self])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)

    def get_offset(self):
        return self.offset

    def wait_event(self, event):
        self.log.append(f"{self.stream} waits")

    def record(self):
        self.log.append(f"{self.stream} has drawn")


def test_graphs_that_draw_random_numbers_wait_for_those_before(monkeypatch):
    device = Device(monkeypatch)
    drawing = _Drawing(0)
    for stream, draws in (("a", False), ("a", True), ("b", False), ("b", True), ("a", True)):
        device.stream = stream
        with drawing.in_turn():
            device.offset += 4 * draws
    assert device.log == ["a has drawn", "b waits", "b waits", "b has drawn", "a waits", "a has drawn"]


def test_a_capture_waits_for_graphs_that_draw_and_those_after_wait_for_it(monkeypatch):
    device = Device(monkeypatch)
    drawing = _Drawing(0)
    for stream, draws, captures in (("a", True, False), ("b", False, True), ("a", True, False)):
        device.stream = stream
        with drawing.in_turn(captures):
            device.offset += 4 * draws
    assert device.log == ["a has drawn", "b waits", "b has drawn", "a waits", "a has drawn"]


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that can be made without a GPU; capturing runs the function, replaying only counts."""

    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("confitune.engine.capture._drawing", lambda device: Draws())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Graph.made


class Notes(Listener):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def capturing(net, listener=None):
    executor = Executor(net, TrainSettings(device="cpu"), listener)
    executor._captures = True
    return executor


def test_the_third_step_of_a_kind_is_captured_and_replayed_from_then_on(make_net, graphs):
    net = make_net("confit")
    told, replayed = [], net.observer.replayed
    net.observer.replayed = lambda seen: (told.append(seen), replayed(seen))
    executor, calls = capturing(net), []

    def double(x, nothing):
        assert nothing is None
        calls.append(x)
        return 2 * x

    given = [torch.full((3,), float(k)) for k in range(6)]
    outputs = [executor("a", double, x, None) for x in given]
    assert all(found is x for found, x in zip(calls[:2], given, strict=False))
    assert len(calls) == 3  # two directly, one to capture; that one on tensors that stay
    assert calls[2] is not given[2]
    assert [graph.replays for graph in graphs] == [4]
    assert torch.equal(calls[2], given[5])  # the last step's input is where the graph reads it
    assert outputs[3] is outputs[4] is outputs[5]
    assert len(told) == 4  # nothing counted while it was captured

    # Another kind, another size and another dtype are captured for themselves.
    for kind, x in (("b", given[0]), ("a", torch.zeros(4)), ("a", torch.zeros(3, dtype=torch.float64))):
        before = len(calls)
        for _ in range(4):
            executor(kind, double, x, None)
        assert len(calls) == before + 3
    assert [graph.replays for graph in graphs] == [4, 2, 2, 2]


def test_a_network_that_cannot_be_captured_is_noted_once_and_run_directly(make_net, graphs):
    notes, calls = Notes(), []
    executor = capturing(make_net("confit"), notes)

    def waits(x):
        calls.append(Graph.capturing)
        if Graph.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return x + 1

    outputs = [executor(kind, waits, torch.tensor([float(k)])) for kind in "ab" for k in range(5)]
    assert [output.item() for output in outputs] == [1, 2, 3, 4, 5] * 2
    assert calls == [False, False, True, False, False, False] + [False] * 5
    (note,) = notes.notes
    assert note.startswith("this network cannot be captured as a CUDA graph and is trained kernel by kernel")
    assert note.endswith("operation not permitted when stream is capturing")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_no_batch_but_what_runs_in_its_place(make_net, graphs, fails):
    """Its replay, or where it fails the step itself."""

    class Waits(nn.Module):
        def forward(self, x):
            if fails and Graph.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return x

    net = make_net("confit")
    net.backbone.append(Waits())
    net.add_task("a", 2)
    net.train()
    executor = capturing(net)
    for _ in range(5):
        executor("step", net, torch.rand(4, 3, 16, 16))
    assert [inputs.batches for inputs in net.parts["norms"].input_means] == [5, 5, 5]
    assert [graph.replays for graph in graphs] == ([0] if fails else [3])
    assert not net.observer.recording


def test_methods_say_no_more_than_what_tensors_hold_in_their_kind(make_fit, make_net, make_task):
    """One kind for tasks of one shape; another for another stage, another tracking, another head."""

    def fitting(task, index, **options):
        net = make_net("confit")
        settings = TrainSettings(epochs=5, batch_size=8, device="cpu", **options)
        return make_fit(net, task, "confit", settings, index=index)

    everything, head = frozenset({"head", "norms", "weights"}), frozenset({"head"})
    first, third = (fitting(make_task(name), index).step for index, name in enumerate(("dark", "minus")))
    assert first.kind(everything, True, 0) == third.kind(everything, True, 1)
    assert len({hash(first.kind(everything, True, 0)), hash(third.kind(everything, True, 1))}) == 1
    smaller = fitting(make_task("bright", (20, 20)), 1).step
    kinds = {
        first.kind(everything, True, 0),
        first.kind(everything, False, 0),
        first.kind(head, True, 0),
        smaller.kind(everything, True, 1),
    }
    assert len(kinds) == 4
