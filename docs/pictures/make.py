"""Make the pictures of the documentation from a real job: `python docs/pictures/make.py` (needs pyte and Chromium).

A job of four nodes loses one and continues. `live.svg` is its terminal while it trains; `report.png` is the
beginning of its report.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, ROWS = 110, 24
COMMAND = ["run", "--trainers", "3", "--set", "name=digits"]
COMMAND += ["--", "-m", "app.train", "--epochs", "12", "--resume", "auto"]
LOST_AFTER, SHOWN_AFTER = "epoch 3/", "epoch 11/"  # output after which a node is killed, and the terminal is shown
REPORT = (1000, 1250)  # pixels
# As in rich, without the fonts, which a browser would load from another site.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> None:
    """Run the job in a new folder, and make the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        screen = run(Path(folder))
        draw(screen, HERE / "live.svg")
        (run_directory,) = Path(folder, "runs").glob("digits-*")
        photograph(run_directory / "report.html", HERE / "report.png")


def run(folder: Path) -> list[Text]:
    """Run the job to its end; return its terminal, line by line, as it was at the moment that is to be shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execv(sys.executable, [sys.executable, "-m", "orchestrate", *COMMAND])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, shown, lost = pyte.ByteStream(screen), None, False
    while output := read(terminal):
        stream.feed(output)
        text = "\n".join(screen.display)
        if LOST_AFTER in text and not lost:
            lost = True
            (run_directory,) = Path(folder, "runs").glob("digits-*")
            subprocess.run(["docker", "kill", f"{run_directory.name}-trainer-2"], check=True, stdout=subprocess.DEVNULL)
        if SHOWN_AFTER in text and "% " in text and shown is None:
            shown = [line(screen, row) for row in range(ROWS)]
    os.waitpid(child, 0)
    assert shown, "\n".join(screen.display)
    return shown


def read(terminal: int) -> bytes:
    """Return the next output, a whole picture if possible; nothing at the end."""
    output = b""
    try:
        while not output or select.select([terminal], [], [], 0.05)[0]:
            output += os.read(terminal, 1 << 16)
    except OSError:
        return output
    return output


def line(screen: pyte.Screen, row: int) -> Text:
    """Return a line of the terminal with its colors."""
    text = Text()
    for column in range(COLUMNS):
        cell = screen.buffer[row][column]
        color = None if cell.fg == "default" else "yellow" if cell.fg == "brown" else cell.fg
        color = f"#{color}" if color and re.fullmatch("[0-9a-f]{6}", color) else color
        text.append(cell.data, Style(color=color, bold=cell.bold))
    text.rstrip()
    return text


def draw(lines: list[Text], path: Path) -> None:
    """Write the lines that are not empty as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("\n").join(text for text in lines if text.plain), soft_wrap=True)
    title = f"orchestrate {' '.join(COMMAND)}"
    path.write_text(console.export_svg(title=title, theme=SVG_EXPORT_THEME, code_format=FORMAT, unique_id="live"))


def photograph(page: Path, path: Path) -> None:
    """Write a picture of a page."""
    browser = shutil.which("chromium") or "chromium"
    size = ",".join(map(str, REPORT))
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}")
    subprocess.run([browser, *options, f"--screenshot={path}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
