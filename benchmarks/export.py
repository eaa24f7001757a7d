"""One ONNX file of many tasks against a file of each task alone: answers, time and size, in the same run.

python benchmarks/export.py                                          # 100 tasks of a small network, two minutes
python benchmarks/export.py --model tf_efficientnet_lite0 --tasks 8 --pixels 224
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch
from report import write_report

from confitune.deploy import export_network
from confitune.methods import create_method
from confitune.nn import create_backbone


def session_of(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_byobnet", help="small, and not trained: neither matters here")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--alone", type=int, default=5, help="so many tasks are timed against files of their own")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--classes", type=int, default=10, help="of a task at least; some have one or two more")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("export.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    backbone = create_backbone(options.model, "none")
    net = create_method("best").network(backbone.module).eval()
    names = [f"task{number + 1}" for number in range(options.tasks)]
    for number, name in enumerate(names):  # norms and low-rank changes of its own, or every tenth a head alone
        net.add_task(name, options.classes + number % 3)
        with torch.no_grad():
            for parameter in [*net.groups()["norms"], *net.groups()["deltas"]]:
                parameter.add_(0.02 * torch.randn_like(parameter))
            net(torch.randn(2, 3, options.pixels, options.pixels))
        net.finish_task(owns=["head"] if number % 10 == 9 else ["norms", "deltas", "head"])
    x = torch.randn(options.batch_size, 3, options.pixels, options.pixels)
    shape = {"images": x.numpy()}
    with TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in [*names, "all"]}
        export_network(net, names, paths["all"], size=options.pixels)
        began = time.perf_counter()
        all_tasks = session_of(paths["all"])
        load_seconds = time.perf_counter() - began
        difference, ratios, seconds = 0.0, [], {"alone": [], "all": []}
        timed = set(names[:: max(options.tasks // options.alone, 1)])
        sizes = []
        for number, name in enumerate(names):
            feeds = {**shape, "task": np.array(number)}
            found = all_tasks.run(None, feeds)[0][:, : len(net.tasks[name].classes)]
            with torch.no_grad():
                difference = max(difference, float(np.abs(found - net(x, name).numpy()).max()))
            if name not in timed:
                continue
            export_network(net, name, paths[name], size=options.pixels)
            sizes.append(paths[name].stat().st_size)
            alone = session_of(paths[name])
            expected = alone.run(None, shape)[0]
            difference = max(difference, float(np.abs(found - expected).max()))
            for _ in range(options.repeats):  # in turns, so that whatever else the machine does meets both
                for how, session, inputs in (("alone", alone, shape), ("all", all_tasks, feeds)):
                    began = time.perf_counter()
                    session.run(None, inputs)
                    seconds[how].append(time.perf_counter() - began)
            ratios.append(min(seconds["all"][-options.repeats :]) / min(seconds["alone"][-options.repeats :]))
        size = paths["all"].stat().st_size
    numbers = {
        "model": options.model,
        "pixels": options.pixels,
        "batch_size": options.batch_size,
        "tasks": options.tasks,
        "largest_difference": difference,
        "alone_seconds": min(seconds["alone"]),
        "all_seconds": min(seconds["all"]),
        "ratio": statistics.median(ratios),
        "all_bytes": size,
        "alone_bytes": options.tasks * statistics.mean(sizes),
        "load_seconds": load_seconds,
    }
    print(json.dumps(numbers, indent=1))
    write_report(options.out, torch.device("cpu"), backbone.weights_sha256, numbers)


if __name__ == "__main__":
    main()
