"""Documents must link only to files and headings that exist, and their pictures must load nothing."""

import re

import pytest
from support.repo import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings: lower case, without punctuation, and with `-` for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_must_lead_to_files_and_headings_that_exist(path):
    for found in LINK.finditer(CODE.sub("", path.read_text())):
        address, _, anchor = (found[1] or found[2]).partition("#")
        if "://" in address:
            continue
        target = (path.parent / address).resolve() if address else path
        assert target.exists(), found[0]
        assert not anchor or anchor in anchors(target.read_text()), found[0]


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_must_load_nothing(path):
    text = path.read_text()
    addresses = {*re.findall(r"\w+://[^\s\"')]+", text)} - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not addresses and "@import" not in text and "<script" not in text
