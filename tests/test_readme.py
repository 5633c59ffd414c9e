"""Every Python block in the README and in docs/ runs as it stands; those of docs/hosts.md, which need a model and the
packages of hosts, are run by tests/integrations/test_recipes.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page, block, id=f"{page.name}-{position}")
    for page in PAGES
    if page.name != "hosts.md"
    for position, block in enumerate(BLOCK.findall(page.read_text()))
]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert BLOCK.search(text)
    assert len(text.splitlines()) <= 120
    assert text.count("<img") + text.count("![") == 1
    assert len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE)) == 1


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_example_runs(
    page: Path, block: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page.name, "exec", dont_inherit=True), {"__name__": page.stem})
    assert "Traceback" not in capsys.readouterr().out
