"""Markdown for a terminal."""

from __future__ import annotations

import re

from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment
from rich.theme import Theme

COMMENT = re.compile(r"<!--.*?-->\n?", re.S)
THEME = Theme({"markdown.code": "bold cyan"})  # without a background


def formatted(markdown: str, width: int) -> str:
    """Format Markdown for a terminal, with escape sequences for styles; `width` is in columns."""
    screen = Console(width=width, theme=THEME)
    document = Markdown(COMMENT.sub("", markdown), code_theme="ansi_dark", hyperlinks=False)

    def styled(part: Segment) -> str:
        style = part.style and (part.style.without_color if screen.no_color else part.style)
        return style.render(part.text) if style else part.text

    return "\n".join("".join(map(styled, line)) for line in screen.render_lines(document, pad=False))
