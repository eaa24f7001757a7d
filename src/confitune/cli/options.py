"""Options of the command line, made from settings: their types, help, choices and defaults have their home there."""

import functools
import inspect
import re
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from confitune.settings import DataSettings, NetworkSettings, TrainSettings

GROUPS: dict[str, type[BaseModel]] = {"Data": DataSettings, "Network": NetworkSettings, "Training": TrainSettings}
FIELDS: dict[str, FieldInfo] = {name: field for group in GROUPS.values() for name, field in group.model_fields.items()}
DATASETS_OWN = ("epochs", "batch_size")  # the dataset has a default for them that wins over the field's


def default_of(name: str) -> str:
    """A setting's default in words; nothing where its description says what is done without it."""
    default = None if name in DATASETS_OWN else FIELDS[name].default
    if isinstance(default, tuple):
        return ", ".join(f"{number:.3g}" for number in default)
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def settings_option(name: str, default: str | None = None) -> Any:
    """A typer annotation for a setting; None: not given. The default shown is the setting's, or the command's own."""
    field = FIELDS[name]
    kind: Any = next((kind for kind in get_args(field.annotation) if kind is not NoneType), field.annotation)
    kind = field.annotation if get_origin(field.annotation) is Literal else kind
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    option = typer.Option(
        *([f"--{name.replace('_', '-')}"] if kind is bool else []),  # no --no-...: it is off without
        help=field.description,
        metavar=f"[{'|'.join(choices)}]" if choices else None,
        show_default=default or default_of(name) or False,
        rich_help_panel=next(title for title, group in GROUPS.items() if name in group.model_fields),
    )
    return Annotated[(str if choices else kind) | None, option]


def with_settings(
    *names: str, place: Callable[..., Any] | None = None, **defaults: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; its `**settings` are those that were given.

    The help shows `defaults` where the command has another default than the setting. With the options of `place`, too,
    the command's `place` is that function with the values of its options.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        by_name, rest = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        own = [p for p in signature.parameters.values() if p.kind is not rest and p.name != "place"]
        _, *where = inspect.signature(place, eval_str=True).parameters.values() if place else (None,)
        kinds = {name: settings_option(name, defaults.get(name)) for name in names}
        added = [inspect.Parameter(name, by_name, default=None, annotation=kind) for name, kind in kinds.items()]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            asked = {p.name: given.pop(p.name) for p in where}
            given = {name: value for name, value in given.items() if name not in names or value is not None}
            command(**given, **({"place": functools.partial(place, **asked)} if place else {}))

        together = [*added, *(p.replace(kind=by_name) for p in (*own, *where))]
        called.__signature__ = signature.replace(parameters=together)  # type: ignore[attr-defined]
        return called

    return add


class CommandGroup(TyperGroup):
    """All commands. Their help shows no types of Python's; a setting that has no option is answered with --set."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types(command.get_params(ctx))
            # Typer breaks lines where the docstring does.
            command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(command.help or ""))
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer keeps the class of this error to itself
            name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
            if name in FIELDS:
                error.message += f"; write --set {name}=VALUE"  # type: ignore[attr-defined]
            raise


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        plain = param.metavar is None and (getattr(param, "is_flag", False) or param.multiple)
        if plain or param.nargs == -1:
            param.display_type_rich = lambda ctx: None
    return params
