"""What the documents point at exists: files, jobs, benchmarks, make targets, and pictures that a browser can draw."""

import re
import xml.dom.minidom
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "cache_store" / "FORMAT.md",
    ROOT / "docker" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_sources_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"(?<![\w/.])((?:jobs|benchmarks|tests|docker|model|pipeline|cache_store)/[\w/.-]*\.(?:py|yaml|json|md))", text
    )
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert not missing


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))}
    assert named <= set(targets)


def test_pages_hold_no_unfilled_places():
    assert not [
        page.name
        for page in PAGES
        if re.search(r"^(?:@?[A-Z]{4,}[A-Z0-9]*@?)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda picture: picture.name)
def test_svg_pictures_are_well_formed(picture: Path):
    xml.dom.minidom.parse(str(picture))
