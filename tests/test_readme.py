"""What README claims is what results/ holds and what the program does."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "docs/reproduction.md").read_text() + (ROOT / "docs/best.md").read_text()
BLOCKS = re.findall(r"<!-- (\S+\.md) -->\n(.*?)<!-- end -->", PAGES, re.DOTALL)


@pytest.mark.parametrize(("source", "block"), BLOCKS, ids=range(len(BLOCKS)))
def test_tables_are_the_measured_ones(source: str, block: str) -> None:
    assert block.strip() == _without_headings((ROOT / source).read_text())


def _without_headings(text: str) -> str:
    """A page has its own."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def test_there_are_tables_and_every_link_leads_somewhere() -> None:
    assert len(BLOCKS) == 14
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_python_example_runs_and_forgets_little(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, object] = {}
    exec(compile(code.replace("epochs=5", "epochs=2"), "README.md", "exec"), names)
    first, second, numbers = map(eval, capsys.readouterr().out.strip().splitlines())
    assert first["task1"] > 60  # chance is 25
    assert first["task1"] - second["task1"] < 15
    assert numbers == {name: {"norms": 255_835, "head": 5_124} for name in ("task1", "task2")}
