"""The paper's propositions as numerical checks, with plots."""

from __future__ import annotations

from collections.abc import Sequence

from confitune.analysis import check_proposition1, check_proposition2, check_proposition3
from confitune.experiments.place import Place
from confitune.experiments.reproduce.compare import Claim
from confitune.experiments.reproduce.outcome import Outcome
from confitune.experiments.reproduce.pictures import draw_panels
from confitune.experiments.reproduce.plan import Part, Scope


def theory(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Propositions 1 to 3 as numerical checks."""
    first, second, third = check_proposition1(), check_proposition2(), check_proposition3()
    outcome = Outcome(what="theory", title="Propositions 1 to 3, checked by numbers")
    outcome.claims = [
        Claim(
            text="1: the mean of a convolution's output is the convolution of the mean (padding K - 1, any stride)",
            measured=f"largest difference {first.worst_violation:.1e} in {first.cases} random cases",
            holds=first.holds,
        ),
        Claim(
            text="2: the loss of an earlier task is bounded below by how badly the head was aligned",
            measured=f"largest violation {second.worst_violation:.1e} in {second.instances} instances",
            holds=second.holds,
        ),
        Claim(
            text="2: the bound is tighter the better the features are",
            measured=", ".join(f"{level.distance:.2f}: {level.tightness:.2f}" for level in second.levels),
            holds=second.tighter_with_better_features,
        ),
        Claim(
            text="3: probing first, then fine-tuning moves no features and forgets nothing",
            measured=f"largest move or loss {third.worst_violation:.1e}",
            holds=third.holds,
        ),
    ]
    sizes = {
        f"padding {padding}": (
            [b.size for b in first.borders if b.padding == padding],
            [max(b.error, 1e-17) for b in first.borders if b.padding == padding],
        )
        for padding in sorted({b.padding for b in first.borders})
    }
    levels = [level.distance for level in second.levels]
    tasks = list(range(1, len(third.plain.forgotten) + 1))
    for name, title, lines, x, y, scale in (
        ("proposition-1", "Proposition 1: error of a 3 x 3 convolution's mean", sizes, "image size", "error", "log"),
        (
            "proposition-2",
            "Proposition 2: the loss and its bound",
            {
                "loss of the earlier task": (levels, [level.error for level in second.levels]),
                "bound": (levels, [level.bound for level in second.levels]),
            },
            "distance of the features from good ones",
            "worst-case loss, square root",
            "linear",
        ),
        (
            "proposition-3",
            "Proposition 3: what earlier tasks lose",
            {
                "fine-tuning": (tasks, third.plain.forgotten),
                "probing first": (tasks, third.probing_first.forgotten),
            },
            "tasks learned",
            "worst-case loss added",
            "linear",
        ),
    ):
        picture = f"{name}.png"
        draw_panels({"": lines}, scope.out / picture, title=title, x=x, y={"": y}, scale=scale)  # type: ignore[arg-type]
        outcome.pictures.append(picture)
    outcome.data = {
        "proposition 1": first.model_dump(mode="json"),
        "proposition 2": second.model_dump(mode="json"),
        "proposition 3": third.model_dump(mode="json"),
    }
    return outcome
