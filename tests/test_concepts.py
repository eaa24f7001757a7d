"""docs/concepts.md says truly where each thing of the paper is done: `python tests/test_concepts.py --update`."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/concepts.md"
SOURCE = ROOT / "src/confitune"
EQUATIONS = 15  # numbered ones of the paper
UPDATE = "python tests/test_concepts.py --update writes the right lines"

PLACE = re.compile(r"`((?:src/confitune|examples)/[\w/]+\.py):(\d+)` `([\w.]+)`")
_CITED = re.compile(r"\bEqs?\. (\d+(?:(?:, | and )\d+)*)")


def table(page):
    """The rows below the heading, each as its cells."""
    _, _, below = page.partition("## Where to find each equation and section of the paper\n")
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def equations(text):
    return {int(number) for found in _CITED.findall(text) for number in re.findall(r"\d+", found)}


def definitions(path):
    """Names that a file defines, members of classes as Class.member -> their lines."""
    found = {}

    def look(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found[prefix + target.id] = node.lineno

    look(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def updated(page):
    """The page with the line at which each name is defined today; a name that is gone stays as it is."""

    def right(match):
        file, _, name = match.groups()
        line = definitions(ROOT / file).get(name) if (ROOT / file).exists() else None
        return match[0] if line is None else f"`{file}:{line}` `{name}`"

    return PLACE.sub(right, page)


ROWS = table(PAGE.read_text(encoding="utf-8"))
PLACES = [place for row in ROWS for place in PLACE.findall(row[-1])]


@pytest.mark.parametrize(("file", "line", "name"), PLACES, ids=[name for _, _, name in PLACES])
def test_each_name_is_defined_where_the_table_says(file, line, name):
    assert (ROOT / file).exists(), f"{file} is gone: name another in docs/concepts.md"
    found = definitions(ROOT / file)
    assert name in found, f"{file} no longer defines {name}: name another in docs/concepts.md"
    assert found[name] == int(line), UPDATE


def test_every_row_names_a_place_and_nothing_that_looks_like_one():
    assert ROWS
    for row in ROWS:
        assert len(row) == 3, row
        assert PLACE.findall(row[-1]), f"no place in {row}"
        assert not re.search(r"[\w/]+\.py", PLACE.sub("", row[-1])), f"not `file:line` `name`: {row}"


def test_every_equation_of_the_paper_is_in_the_table_and_so_is_every_one_that_the_code_cites():
    listed = set().union(*(equations(row[0]) for row in ROWS))
    assert listed == set(range(1, EQUATIONS + 1))
    files = [*SOURCE.glob("nn/**/*.py"), SOURCE / "methods/confit.py", *SOURCE.glob("analysis/**/*.py")]
    files.append(ROOT / "examples/propositions.py")
    cited = {file: equations(file.read_text(encoding="utf-8")) for file in files}
    assert any(cited.values())
    for file, numbers in cited.items():
        assert numbers <= listed, f"{file.name} cites equations that the table does not have"


def test_lines_that_moved_are_put_right_and_nothing_else():
    page = (
        "Eq. 11: `src/confitune/nn/parts/xconv.py:1` `recover_output_mean`, `src/confitune/nn/parts/xconv.py:1` `gone`"
    )
    line = definitions(SOURCE / "nn/parts/xconv.py")["recover_output_mean"]
    assert updated(page) == page.replace("1` `recover", f"{line}` `recover")
    assert (SOURCE / "nn/parts/xconv.py").read_text().splitlines()[line - 1].startswith("def recover_output_mean(")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {UPDATE}")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
