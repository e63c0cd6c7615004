"""Pages about jobs, as a browser reads them."""

import base64
import hashlib
import re
from collections.abc import Sequence
from html.parser import HTMLParser

from orchestrate.pages.curves import Progress
from orchestrate.pages.job import Run
from orchestrate.pages.spans import Moment, Span


class Page(HTMLParser):
    """A page: its elements, its text, and what it refers to."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & {*self.open}:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def references(self) -> set[str]:
        names = ("src", "href", "xlink:href", "action", "data", "srcset")
        return {values[name] or "" for _, values in self.elements for name in names if name in values}


def digest(html: str) -> str:
    """The hash of a page's only script, as its policy must have it."""
    (source,) = re.findall("<script>(.*)</script>", html, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def words(html: str) -> str:
    """The text of a page without what is in its charts and scripts."""
    return Page(re.sub(r"<(svg|script)\b.*?</\1>", "", html, flags=re.DOTALL)).text


def run(found: Progress, working: float, happened: Sequence[Moment] = ()) -> Run:
    """A job that started within 10 s, and has worked for some time."""
    times = [Span("starting", 0.0, 10.0, 0), Span("working", 10.0, 10.0 + working, 0)]
    return Run("job", {"duration_s": 0.0}, times, [*happened], found, {}, "step", "", {}, "", False)
