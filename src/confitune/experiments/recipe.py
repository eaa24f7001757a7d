"""A recipe: which methods, on which tasks, with which network and settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from confitune.engine import TrainOptions, TrainSettings
from confitune.errors import ConfituneError
from confitune.experiments.paper import chosen_options
from confitune.experiments.recipe_file import parse_yaml
from confitune.methods import METHODS, PENALTIES, Method, create_method
from confitune.tasks import Progress, TaskSequence, dataset_info, dataset_parts, load_tasks


class Recipe(TrainOptions):
    """One experiment. What is left out takes the default of the dataset (of several: the first), or the paper's."""

    dataset: str = Field(
        "photos",
        description="photos, digits, flowers102, cifar100, cub200, caltech101 or folder:PATH; tasks of several: "
        "photos:1-2+digits:1+photos:3-5",
    )
    methods: tuple[str, ...] = Field(("finetune", "confit"), min_length=1, description="methods to compare")
    model: str = Field("tf_efficientnet_lite0", description="a timm or torchvision name")
    weights: str | None = Field(None, description="a .safetensors or .pth file, or 'none'; default: the published ones")
    data_dir: Path | None = Field(None, description="folder that holds the datasets")
    cache_dir: Path | None = Field(None, description="folder for decoded images")
    order_seed: int = Field(
        0, ge=0, lt=2**63, description="of the order of classes, and so of what makes a task (paper: 0)"
    )
    tasks: int | None = Field(None, ge=1, description="only the first so many tasks, of all parts together")
    classes_per_task: int | None = Field(None, ge=2, description="in every part; default: the dataset's")
    held_out: float | None = Field(
        None, gt=0, lt=1, description="test on this share of the training images instead, to choose options by"
    )
    seeds: int = Field(1, ge=1, le=10_000, description="how many runs of each method, with seeds 0, 1, ...")
    pipeline: Literal["clean", "published"] = Field("clean", description="'published': what the paper's code fed")
    means: Literal["window", "phase"] = Field("window", description="input means of Xconv BN (the paper's: phase)")
    statistics: Literal["running", "pass"] = Field(
        "running", description="when they are measured (the paper's: running)"
    )
    variance: Literal["stored", "ratio"] = Field(
        "stored", description="of earlier tasks: as it was (the paper's), or times what later tasks did to variances"
    )
    follow: Literal["weights", "images"] = Field(
        "weights",
        description="what moments of earlier tasks follow: weights (the paper's), or later tasks' images, too",
    )
    rank: int | None = Field(None, ge=1, description="of what is kept of window means; default: all of them")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="of methods, by part: {ewc: {strength: 3000}}; default: the paper's"
    )
    epochs: int | None = Field(None, ge=1, description="a task; default: the method's or the dataset's")
    batch_size: int | None = Field(None, ge=2, description="default: the dataset's")

    @field_validator("methods", mode="before")
    @classmethod
    def _one_method(cls, value: Any) -> Any:
        """`methods: confit` means a list of one."""
        return [value] if isinstance(value, str) else value

    @field_validator("dataset", "model", "weights", "device", "data_dir", "cache_dir")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        """What no file can be called is said here, not where it would be opened."""
        if value is not None:
            os.fsencode(str(value))
            if "\0" in str(value):
                raise ValueError("it has a character of code 0, which no name has")
        return value

    def method(self, name: str) -> Method:
        """A method with this recipe's options; where it has none, with the paper's for the (first) dataset."""
        known = chosen_options(dataset_parts(self.dataset)[0].dataset)
        parts = {*known, *self.options}
        return create_method(name, {part: {**known.get(part, {}), **self.options.get(part, {})} for part in parts})

    def network(self, method: str) -> dict[str, Any]:
        """Arguments of `ContinualNet`; a method's own hold where the recipe does not say otherwise."""
        chosen = self.method(method)
        values = {name: getattr(self, name) for name in ("means", "statistics", "variance", "follow", "rank")}
        own = {name: value for name, value in chosen.network.items() if name not in self.model_fields_set}
        return {"norm": chosen.norm, **values, **own}

    def load_tasks(self, mean: Sequence[float], std: Sequence[float], progress: Progress | None = None) -> TaskSequence:
        """The dataset's tasks, all their training images included; see `confitune.tasks.load_tasks`."""
        return load_tasks(
            self.dataset,
            mean=mean,
            std=std,
            data_dir=self.data_dir,
            cache_dir=self.cache_dir,
            pipeline=self.pipeline,
            order_seed=self.order_seed,
            tasks=self.tasks,
            classes_per_task=self.classes_per_task,
            progress=progress,
        )

    def train_settings(self, seed: int, method: str | None = None) -> TrainSettings:
        """Settings of the run with this seed; a method's own hold where the recipe does not say otherwise."""
        info = dataset_info(self.dataset)
        values = {"epochs": info.epochs, "batch_size": info.batch_size}
        values |= {name: getattr(self, name) for name in TrainOptions.model_fields}
        own = self.method(method).settings if method else {}
        values |= {name: value for name, value in own.items() if name not in self.model_fields_set}
        given = {name: getattr(self, name) for name in ("epochs", "batch_size") if getattr(self, name) is not None}
        return TrainSettings(**{**values, **given}, seed=seed)

    def identity(self, method: str, seed: int, weights_sha256: str) -> dict[str, Any]:
        """What determines a run's result: compared before a result is taken for this run's."""
        train, chosen, network = self.train_settings(seed, method), self.method(method), self.network(method)
        how = {"device", "step", "pixels", "deterministic", "eval_batch_size"}  # may change last bits, no more
        settings = train.model_dump(mode="json", exclude=how)
        if train.precision == "auto":  # else it does not matter which device there is here
            settings["precision"] = "bf16" if train.bf16(train.torch_device()) else "fp32"
        xconv = chosen.norm == "xconv"
        return {
            "dataset": self.dataset,
            "pipeline": self.pipeline,
            "order_seed": self.order_seed,
            "tasks": self.tasks,
            "classes_per_task": self.classes_per_task,
            "held_out": self.held_out,
            "model": self.model,
            "weights_sha256": weights_sha256,
            "method": method,
            "options": {penalty.name: penalty.options.model_dump(mode="json") for penalty in chosen.penalties}
            | ({chosen.name: dict(chosen.chosen)} if chosen.chosen else {}),
            "means": network["means"] if xconv else None,
            "statistics": network["statistics"] if xconv else None,
            # Results from before there were others have the defaults.
            **({"variance": network["variance"]} if xconv and network["variance"] != "stored" else {}),
            **({"follow": network["follow"]} if xconv and network["follow"] != "weights" else {}),
            **({"rank": network["rank"]} if xconv and network["rank"] is not None else {}),
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
        recipe.method(method)
    unused = set(recipe.options) - {*METHODS, *PENALTIES}
    if unused:
        raise ConfituneError(f"{source} set options of {', '.join(sorted(unused))}, which is no part of any method")
    if len(set(recipe.methods)) != len(recipe.methods):
        raise ConfituneError(f"{source} name a method twice: {', '.join(recipe.methods)}")
    return recipe


def merge_options(options: dict[str, dict[str, Any]], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options with some of them set anew from texts such as 'ewc.strength=3000'.

    >>> merge_options({"ewc": {"fisher": "exact"}}, ["ewc.strength=3e3"])
    {'ewc': {'fisher': 'exact', 'strength': 3000.0}}
    """
    if not isinstance(options, dict) or not all(isinstance(values, dict) for values in options.values()):
        raise ConfituneError("the recipe's options must be by part, e.g. {ewc: {strength: 3000}}")
    merged = {part: dict(values) for part, values in options.items()}
    for text in given:
        place, equals, value = text.partition("=")
        part, dot, name = place.partition(".")
        if not (equals and dot and part and name):
            raise ConfituneError(f"--set {text}: write PART.OPTION=VALUE, e.g. ewc.strength=3000")
        merged.setdefault(part, {})[name] = _number_or_text(value)
    return merged


def _number_or_text(text: str) -> Any:
    try:
        return float(text)  # YAML reads 3e3 as text
    except ValueError:
        return parse_yaml(text, f"the value {text[:100]!r}")


def _explained(problem: Any, source: str) -> str:
    name, given = ".".join(map(str, problem["loc"]))[:100], repr(problem["input"])[:200]
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
        return f"{source}: {name}={given} is not known: {hint}There are {allowed}."
    return f"{source}: {name}={given}: {problem['msg']}"
