"""ONNX, for onnxruntime and others.

The file of one task takes `images` [batch, channels, height, width], preprocessed as its metadata says, and gives
`logits` [batch, classes]; batch norm is folded into convolutions. The file of several tasks also takes `task`, one
number for the batch, and pads logits with -inf to the largest number of classes.

Tasks with backbones of their own are branches of that file. A branch holds what the task owns: its norms, and changes
of weights as their factors; weights are in the file once. A runtime puts these together when it loads the file, so
that every branch is as fast as a file of the task alone, and takes as much memory.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from confitune.errors import ConfituneError

if TYPE_CHECKING:
    from confitune.deploy.export.export import Content, Own


def write(content: Content) -> bytes:
    """The file."""
    onnx = _optional("onnx")
    _optional("onnxscript")  # torch's exporter is built on it
    with _quiet():
        model = _of_all(content) if content.tasks else _program(content.module, content.example, "logits").model_proto
    onnx.helper.set_model_props(model, {key: json.dumps(fact) for key, fact in content.facts.items()})
    data: bytes = model.SerializeToString()
    return data


def run(path: Path, images: Tensor, task: str) -> Tensor:
    """The logits that a file gives for images of a task."""
    runtime = _optional("onnxruntime")
    try:
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feeds, count = {"images": images.numpy()}, None
        if len(session.get_inputs()) == 2:
            known = json.loads(session.get_modelmeta().custom_metadata_map["tasks"])
            place = [entry["name"] for entry in known].index(task)
            feeds["task"], count = np.array(place), len(known[place]["classes"])
        return torch.from_numpy(session.run(["logits"], feeds)[0])[:, :count]
    except Exception as error:
        raise ConfituneError(f"{path} does not run on images of shape {tuple(images.shape)}: {error}") from error


def _program(module: nn.Module, example: Tensor, output: str, optimize: bool = True) -> Any:
    program: Any = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=[output],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        optimize=optimize,
    )
    passes = importlib.import_module("onnxscript.ir.passes.common")
    passes.ClearMetadataAndDocStringPass()(program.model)  # stack traces, with the paths of source files
    return program


def _of_all(content: Content) -> Any:
    """Branches of the tasks' backbones, then the heads, of which the task's is taken."""
    onnx = _optional("onnx")
    helper, as_tensor = onnx.helper, onnx.numpy_helper.from_array
    # Not optimized: batch norms are to stay, tasks have their own.
    program = _program(content.module.get_submodule("backbone"), content.example, "features", optimize=False)
    optimizer = importlib.import_module("onnxscript.optimizer")
    optimizer.inline(program.model)  # a branch cannot call functions of the file
    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    model: Any = program.model_proto
    backbones: dict[str, Own] = {}
    for task in content.tasks:
        backbones.setdefault(task.backbone, task)
    shared, branches = content.module.get_submodule("backbone").state_dict(), _Branches(onnx, model.graph)
    graph = branches.tree(list(backbones.values()), 0, len(backbones), "all")
    weight = pad_sequence([task.head.weight for task in content.tasks], batch_first=True).numpy()
    bias = pad_sequence([task.head.bias for task in content.tasks], batch_first=True, padding_value=-torch.inf).numpy()
    places = np.array([list(backbones).index(task.backbone) for task in content.tasks])
    tables = {"heads.weight": weight, "heads.bias": bias, "backbones": places}
    tables |= {name: shared[name].numpy() for name in sorted(branches.used)}
    graph.initializer.extend(as_tensor(table, name) for name, table in tables.items())
    # The task's branch must be known before the tree asks for it.
    graph.node.insert(0, helper.make_node("Gather", ["backbones", "task"], ["backbone"]))
    graph.node.extend(
        [
            helper.make_node("Gather", ["heads.weight", "task"], ["head.weight"]),
            helper.make_node("Gather", ["heads.bias", "task"], ["head.bias"]),
            helper.make_node("Gemm", [graph.output[0].name, "head.weight", "head.bias"], ["logits"], transB=1),
        ]
    )
    batch = model.graph.output[0].type.tensor_type.shape.dim[0].dim_param
    number, integer = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("logits", number, [batch, weight.shape[1]]))
    graph.input.extend([model.graph.input[0], helper.make_tensor_value_info("task", integer, [])])
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


class _Branches:
    """A backbone's graph, once for every task that has its own, with what that has in place of the shared tensors."""

    def __init__(self, onnx: Any, graph: Any) -> None:
        self.helper, self.as_tensor = onnx.helper, onnx.numpy_helper.from_array
        self.graph = graph
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.used: set[str] = set()  # names of shared tensors

    def tree(self, backbones: Sequence[Own], first: int, stop: int, name: str) -> Any:
        """A graph that asks as few times as can be which of the backbones it is."""
        if stop - first == 1:
            return self._branch(backbones[first], str(first))
        middle = (first + stop) // 2
        output, limit, less = (f"{what} {name}" for what in ("features", "limit", "less"))
        branches = {
            "then_branch": self.tree(backbones, first, middle, f"{first} to {middle - 1}"),
            "else_branch": self.tree(backbones, middle, stop, f"{middle} to {stop - 1}"),
        }
        nodes = [
            self.helper.make_node("Less", ["backbone", limit], [less]),
            self.helper.make_node("If", [less], [output], **branches),
        ]
        limits = [self.as_tensor(np.array(middle), limit)]
        return self.helper.make_graph(nodes, name, [], [_copied(self.graph.output[0], output)], limits)

    def _branch(self, own: Own, suffix: str) -> Any:
        make, nodes, inside = self.helper.make_node, [], []

        def named(name: str) -> str:
            return name if name in ("", "images") else f"{name} {suffix}"

        for name, tensor in self.tensors.items():
            if name in own.tensors:
                inside.append(self.as_tensor(own.tensors[name].numpy(), named(name)))
            elif name in own.changes:
                factors = own.changes[name]
                inputs = [f"{named(name)} factor {n}" for n in range(len(factors))]
                inside += [self.as_tensor(f.numpy(), key) for f, key in zip(factors, inputs, strict=True)]
                equation = "or,ri->oi" if len(factors) == 2 else "or,ri,rk->oik"
                change, shape, shaped = (f"{named(name)} {what}" for what in ("change", "shape", "shaped"))
                inside.append(self.as_tensor(np.array(tensor.dims), shape))
                nodes.append(make("Einsum", inputs, [change], equation=equation))
                nodes.append(make("Reshape", [change, shape], [shaped]))
                nodes.append(make("Add", [name, shaped], [named(name)]))
                self.used.add(name)
            elif len(tensor.dims) > 1:
                # Runtimes rearrange weights only where these are a branch's own: this makes them so.
                shape = f"{named(name)} shape"
                inside.append(self.as_tensor(np.array(tensor.dims), shape))
                nodes.append(make("Reshape", [name, shape], [named(name)]))
                self.used.add(name)
            else:
                inside.append(_copied(tensor, named(name)))
        for node in self.graph.node:
            copied = _copied(node, named(node.name))
            copied.input[:] = [named(name) for name in node.input]
            copied.output[:] = [named(name) for name in node.output]
            nodes.append(copied)
        output = self.graph.output[0]
        return self.helper.make_graph(nodes, f"backbone {suffix}", [], [_copied(output, named(output.name))], inside)


def _copied(message: Any, name: str) -> Any:
    copied = copy.deepcopy(message)
    copied.name = name
    return copied


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfituneError(
            f"ONNX files need the package {package}, which is not installed: pip install 'confitune[export]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print, warn and log on the way; errors are raised as ever."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
