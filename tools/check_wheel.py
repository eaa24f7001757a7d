"""Builds the wheel and tries it in a fresh environment that has no extra: what a user gets from pip alone.

    python tools/check_wheel.py [--constraints constraints.txt]

`run`, `report`, `learn` and `predict` must work; `serve`, `export` and `run --on ray` must say which extra to install.
Everything happens in a temporary folder, which takes about 7 GB and is removed at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ["fastapi", "uvicorn", "onnx", "onnxruntime", "ray", "tensorboard", "pytest", "mkdocs"]

# Two folders of small photos, cut from a photograph that scikit-image installs.
PHOTOS = """
from pathlib import Path
from skimage.data import astronaut
from PIL import Image
picture = Image.fromarray(astronaut())
for name, top in (("face", 0), ("suit", 300)):
    folder = Path("photos", name)
    folder.mkdir(parents=True)
    for i in range(20):
        picture.crop((160 + 3 * i, top + 2 * i, 260 + 3 * i, top + 2 * i + 100)).save(folder / f"{i}.png")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, help="versions to install (default: the newest)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="confitune-wheel-") as folder:
        check(Path(folder), options.constraints)
    print("The wheel works.")


def check(folder: Path, constraints: Path | None) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], folder)
    (wheel,) = folder.glob("confitune-*.whl")
    print(f"built {wheel.name}; installing it takes some minutes", flush=True)

    venv.create(folder / "env", with_pip=True)
    python = folder / "env/bin/python"
    limits = ["-c", constraints.resolve()] if constraints else []
    call([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *limits, wheel], folder)
    found = f"from importlib.util import find_spec; print([name for name in {EXTRAS} if find_spec(name)])"
    assert call([python, "-c", found], folder).strip() == "[]", "an extra came with the wheel"
    call([python, "-c", PHOTOS], folder)

    def confitune(*arguments: str, code: int = 0, says: str) -> None:
        said = call([folder / "env/bin/confitune", *arguments], folder, code)
        assert says in said, f"confitune {' '.join(arguments)} does not say {says!r} but\n{said}"
        print(f"confitune {' '.join(arguments)}: ok", flush=True)

    small = ("--device", "cpu", "--epochs", "1")
    confitune("--version", says=wheel.name.split("-")[1])
    confitune("run", "--method", "confit", "--tasks", "2", "--out", "run", *small, says="confit")
    confitune("report", "run", says="report.html")
    confitune("learn", "photos", "--name", "parts", "--bundle", "model", "--size", "64", *small, says="parts")
    confitune("predict", "model", "photos/face/0.png", "--task", "parts", says="face")
    confitune("serve", "model", code=2, says="confitune[serve]")
    confitune("export", "model", "--all", code=2, says="confitune[export]")
    confitune("run", "--on", "ray", "--out", "on-ray", code=2, says="confitune[ray]")


def call(command: list[object], folder: Path, code: int = 0) -> str:
    """What a program says, if it ends with this code."""
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != code:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}, not {code}:\n{said}")
    return said


if __name__ == "__main__":
    main()
