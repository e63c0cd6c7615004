"""Documents must link only to what exists, name what is there, and have one sentence per line."""

import re
import subprocess

import pytest
from support.repo import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
README = (ROOT / "README.md").read_text()
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


def test_the_two_commands_must_be_make_targets():
    for target in ("run", "test"):
        assert f"make {target}" in README
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_file_tree_must_match_the_project():
    tree = README[README.index("## Project layout") :]
    named = set(re.findall(r"^([\w./-]+?)/? {2,}\S", tree, re.M))
    assert named and all((ROOT / name).exists() for name in named)
    top = {path.name for path in ROOT.iterdir() if path.name in {"app", "orchestrate", "tests", "examples", ".ci"}}
    assert top <= {name.split("/")[0] for name in named}


def test_markdown_must_have_one_sentence_per_line():
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for line in text.splitlines():
            if not line.startswith(("|", "#")):
                assert not re.search(r"[a-z)`][.!?] [A-Z]", line), f"{path.name}: {line}"
