"""The pages speak of files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
SUFFIXES = ("py", "md", "yaml", "yml", "proto", "toml", "json", "txt", "png")
PATH = re.compile(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{'|'.join(SUFFIXES)}))`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_leads_to_a_file(page: Path) -> None:
    text = page.read_text()
    paths = {path for path in PATH.findall(text) if "NAME" not in path}
    missing = {
        path for path in paths if not any((root / path).exists() for root in (ROOT, page.parent, ROOT / "proto"))
    }
    missing |= {link for link in LINK.findall(text) if not (page.parent / link).exists()}
    assert not missing
