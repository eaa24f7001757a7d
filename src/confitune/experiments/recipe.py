"""A recipe: which methods, on which tasks, with which network and settings."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from confitune.engine import TrainOptions, TrainSettings
from confitune.errors import ConfituneError
from confitune.methods import create_method
from confitune.tasks import dataset_info


class Recipe(TrainOptions):
    """One experiment. What is left out takes the default of the dataset, or the paper's."""

    dataset: str = Field(
        "photos", description="photos, digits, flowers102, cifar100, cub200, caltech101 or folder:PATH"
    )
    methods: tuple[str, ...] = Field(("finetune", "confit"), min_length=1, description="methods to compare")
    model: str = Field("tf_efficientnet_lite0", description="a timm or torchvision name")
    weights: str | None = Field(None, description="a .safetensors or .pth file, or 'none'; default: the published ones")
    data_dir: Path | None = Field(None, description="folder that holds the datasets")
    cache_dir: Path | None = Field(None, description="folder for decoded images")
    order_seed: int = Field(0, ge=0, description="of the order of classes, and so of what makes a task (paper: 0)")
    tasks: int | None = Field(None, ge=1, description="only the first so many tasks")
    classes_per_task: int | None = Field(None, ge=2, description="default: the dataset's")
    seeds: int = Field(1, ge=1, description="how many runs of each method, with seeds 0, 1, ...")
    pipeline: Literal["clean", "published"] = Field("clean", description="'published': what the paper's code fed")
    means: Literal["window", "phase"] = Field("window", description="input means of Xconv BN (the paper's: phase)")
    statistics: Literal["running", "pass"] = Field(
        "running", description="when they are measured (the paper's: running)"
    )
    epochs: int | None = Field(None, ge=1, description="a task; default: the dataset's")
    batch_size: int | None = Field(None, ge=2, description="default: the dataset's")

    @field_validator("methods", mode="before")
    @classmethod
    def _one_method(cls, value: Any) -> Any:
        """`methods: confit` means a list of one."""
        return [value] if isinstance(value, str) else value

    def train_settings(self, seed: int) -> TrainSettings:
        """Settings of the run with this seed."""
        info = dataset_info(self.dataset)
        return TrainSettings(
            epochs=self.epochs or info.epochs,
            batch_size=self.batch_size or info.batch_size,
            seed=seed,
            **{name: getattr(self, name) for name in TrainOptions.model_fields},
        )

    def identity(self, method: str, seed: int, weights_sha256: str) -> dict[str, Any]:
        """What determines a run's result: compared before a result is taken for this run's."""
        train = self.train_settings(seed)
        how = {"device", "step", "pixels", "deterministic", "eval_batch_size"}  # may change last bits, no more
        settings = train.model_dump(mode="json", exclude=how)
        settings["precision"] = "bf16" if train.bf16(train.torch_device()) else "fp32"
        xconv = create_method(method).norm == "xconv"
        return {
            "dataset": self.dataset,
            "pipeline": self.pipeline,
            "order_seed": self.order_seed,
            "tasks": self.tasks,
            "classes_per_task": self.classes_per_task,
            "model": self.model,
            "weights_sha256": weights_sha256,
            "method": method,
            "means": self.means if xconv else None,
            "statistics": self.statistics if xconv else None,
            **settings,
        }


def make_recipe(values: dict[str, Any], source: str = "the options given") -> Recipe:
    """A checked recipe, or an error that says which value to change, and to what."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfituneError("\n".join(_explained(problem, source) for problem in error.errors())) from error
    dataset_info(recipe.dataset)
    for method in recipe.methods:
        create_method(method)
    if len(set(recipe.methods)) != len(recipe.methods):
        raise ConfituneError(f"{source} name a method twice: {', '.join(recipe.methods)}")
    return recipe


def read_recipe(path: Path) -> dict[str, Any]:
    """The values in a recipe file."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfituneError(f"no recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfituneError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfituneError(f"{path} must hold options by name, e.g. 'dataset: photos'")
    return values


def _explained(problem: Any, source: str) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, Recipe.model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(Recipe.model_fields)}"
        return f"{source}: no option {name!r}{hint}"
    if problem["type"] == "literal_error":
        allowed = problem["ctx"]["expected"]
        near = difflib.get_close_matches(
            str(problem["input"]), allowed.replace("'", "").replace(" or ", ", ").split(", "), 1
        )
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{source}: {name}={problem['input']!r} is not known: {hint}There are {allowed}."
    return f"{source}: {name}={problem['input']!r}: {problem['msg']}"
