"""A recipe: which methods, on which tasks, with which network and settings; and the YAML file that holds one.

What a few lines of YAML can stand for has no bound: aliases that refer to one another double with every line. Recipes
need none, nor deep nesting, so both are refused before anything is built.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from confitune.errors import ConfituneError
from confitune.experiments.catalog import method_options
from confitune.experiments.paper.numbers import chosen_options
from confitune.experiments.runs.identity import DEFAULTS, XCONV, options_of, shortened
from confitune.methods import METHODS, Method, create_method, method_classes
from confitune.settings import DataSettings, NetworkSettings, TrainSettings
from confitune.tasks import Progress, TaskSequence, dataset_info, dataset_parts, load_tasks

MOST_BYTES = 2**16  # a recipe has a few hundred
MOST_DEEP = 20
MOST_LONG = 2000  # characters of one value: Python does not print numbers of more than 4,300 digits

_OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)  # `methods: confit`, too


class Recipe(DataSettings, NetworkSettings, TrainSettings):
    """One experiment. What is left out takes the default of the dataset (of several: the first), or the paper's."""

    methods: Annotated[tuple[str, ...], _OneOrMore] = Field(
        ("finetune", "confit"), min_length=1, description="methods to compare"
    )
    seeds: int = Field(1, ge=1, le=10_000, description="how many runs of each method, with seeds 0, 1, ...")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="of methods, by part: {ewc: {strength: 3000}}; default: the paper's"
    )

    @property
    def run_seeds(self) -> range:
        """The seed of each run of a method."""
        return range(self.seed, self.seed + self.seeds)

    def method(self, name: str) -> Method:
        """A method with this recipe's options; where it has none, with the paper's for the (first) dataset."""
        known = chosen_options(dataset_parts(self.dataset)[0].dataset)
        options = {}
        for kind in method_classes(name):
            of_network = {field: getattr(self, field) for field in XCONV if field in kind.Options.model_fields}
            options[kind.name] = {**of_network, **known.get(kind.name, {}), **self.options.get(kind.name, {})}
        return create_method(name, options)

    def load_tasks(self, mean: Sequence[float], std: Sequence[float], progress: Progress | None = None) -> TaskSequence:
        """The dataset's tasks, preprocessed with mean and std; some images held out where the recipe says so."""
        cut = self.model_dump(include=set(DataSettings.model_fields) - {"dataset", "held_out", "scenario"})
        sequence = load_tasks(self.dataset, mean=mean, std=std, progress=progress, **cut)
        return sequence if self.held_out is None else sequence.validating(self.held_out, self.order_seed)

    def train_settings(self, seed: int, method: str) -> TrainSettings:
        """Settings of the run with this seed: what is given, else the method's own, else the dataset's defaults."""
        info = dataset_info(self.dataset)
        given = {name: getattr(self, name) for name in self.model_fields_set & set(TrainSettings.model_fields)}
        given = self.method(method).training(info.name == "folder", given)
        return TrainSettings(**{"epochs": info.epochs, "batch_size": info.batch_size, **given, "seed": seed})

    def identity(self, method: str, seed: int, weights_sha256: str) -> dict[str, Any]:
        """What determines a run's result: compared before a result is taken for this run's."""
        train = self.train_settings(seed, method)
        chosen = self.method(method)
        config = {
            **self.model_dump(mode="json", include=set(DEFAULTS)),
            **train.model_dump(mode="json", include=set(DEFAULTS)),
            # None: there is no Xconv BN that they could matter to.
            **{name: getattr(chosen.options, name, None) for name in XCONV},
            "method": method,
            "weights_sha256": weights_sha256,
            "options": {
                type(hook).name: hook.options.model_dump(mode="json", exclude={*XCONV}, exclude_defaults=True)
                for hook in chosen.hooks
            },
        }
        if train.precision == "auto":  # else it does not matter which device there is here
            config["precision"] = "bf16" if train.bf16(train.torch_device()) else "fp32"
        return shortened(config)


def make_recipe(values: Mapping[str, Any], source: str = "the options given") -> Recipe:
    """A checked recipe, or an error that says which value to change, and to what."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfituneError("\n".join(_explained(problem, source) for problem in error.errors())) from error
    dataset_info(recipe.dataset)
    methods = [recipe.method(method) for method in recipe.methods]
    known = {*METHODS, *(part for method in methods for part in options_of(method))}
    if unused := set(recipe.options) - known:
        part = min(unused)
        raise ConfituneError(f"{source} set options of {part!r}, which is not part of any method{_hint(part, known)}")
    if len(set(recipe.methods)) != len(recipe.methods):
        raise ConfituneError(f"{source} name a method twice: {', '.join(recipe.methods)}")
    return recipe


def merge_settings(values: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """A recipe's values with some of them set anew from texts such as 'lr=0.1' or 'ewc.strength=3000'.

    >>> merge_settings({"options": {"ewc": {"mode": "train"}}}, ["ewc.strength=3e3", "lr=0.1"])
    {'options': {'ewc': {'mode': 'train', 'strength': 3000.0}}, 'lr': 0.1}
    """
    merged = dict(values)
    options = values.get("options") or {}
    if not isinstance(options, dict) or not all(isinstance(of_part, dict) for of_part in options.values()):
        raise ConfituneError("the recipe's options must be by part, e.g. {ewc: {strength: 3000}}")
    options = {part: dict(of_part) for part, of_part in options.items()}
    for text in given:
        name, equals, value = text.partition("=")
        part, dot, option = name.rpartition(".")
        if not equals or not option or (dot and not part):
            raise ConfituneError(
                f"--set {text}: write NAME=VALUE, e.g. lr=0.1, or PART.OPTION=VALUE: ewc.strength=3000"
            )
        if part:
            options.setdefault(part, {})[option] = read_value(value)
        elif name in Recipe.model_fields and name != "options":
            merged[name] = read_value(value)
        else:
            options_too = [option.name for option in method_options() if option.name.endswith(f".{name}")]
            hint = f"; did you mean {options_too[0]!r}?" if options_too else _hint(name, Recipe.model_fields)
            raise ConfituneError(f"--set {text}: there is no setting {name!r}{hint}")
    return {**merged, "options": options} if options else merged


def read_recipe(path: Path | str) -> dict[str, Any]:
    """The values in a recipe file, by name; where there is no such file, of the recipe that comes along under its name.

    >>> read_recipe("recipes/default.yaml")["dataset"]
    'photos'
    """
    path = Path(path)
    try:
        own = files("confitune") / "recipes" / path.with_suffix(".yaml").name
        with (own if own.is_file() and not path.exists() else path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfituneError(f"no recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MOST_BYTES:
        raise ConfituneError(f"{path} is larger than {MOST_BYTES:,} bytes; it is not a recipe")
    values = _parse_yaml(data, str(path))
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfituneError(f"{path} must hold options by name, e.g. 'dataset: photos'")
    return values


def read_value(text: str) -> Any:
    """A value as it is typed: a number, true or false, a list, or a word."""
    try:
        return float(text)  # YAML reads 3e3 as text
    except ValueError:
        return _parse_yaml(text, f"the value {text[:100]!r}")


def _parse_yaml(data: bytes | str, source: str) -> Any:
    """Plain values; whatever else the text is raises an error that names its source."""
    depth = 0
    try:
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfituneError(f"{source} has an alias, *{event.anchor}; write out what it stands for")
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_LONG:
                raise ConfituneError(f"{source} has a value of {len(event.value):,} characters; options are shorter")
            if depth > MOST_DEEP:
                raise ConfituneError(f"{source} is nested more than {MOST_DEEP} deep; options are not")
        return yaml.safe_load(data)
    except ConfituneError:
        raise
    except Exception as error:  # PyYAML raises almost anything: on a 13th month, on a number that is none
        raise ConfituneError(f"{source} is not YAML: {error}") from error


def _explained(problem: Any, source: str) -> str:
    name = ".".join(map(str, problem["loc"]))[:100]
    given = repr(problem["input"])[:200]
    if problem["type"] == "extra_forbidden":
        return f"{source}: no option {name!r}{_hint(name, Recipe.model_fields)}"
    return f"{source}: {name}={given}: {problem['msg']}"


def _hint(name: str, known: Iterable[str]) -> str:
    """What may have been meant, or what there is."""
    near = difflib.get_close_matches(name, known := list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
