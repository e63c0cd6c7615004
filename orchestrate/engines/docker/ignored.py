"""Files excluded by .dockerignore: https://docs.docker.com/build/concepts/context/#dockerignore-files.

The code folder is untrusted: the size of the file, the number of patterns and the matching time are limited. Patterns
are matched component by component; wildcards use Python's `fnmatch`, which does not backtrack across them.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from orchestrate.dataclass import dataclass
from orchestrate.errors import UsageError
from orchestrate.files.folder import regular
from orchestrate.files.paths import is_run

NAME = ".dockerignore"
MAX_FILE, MAX_PATTERNS = 64 << 10, 1000  # bytes; number of patterns
MAX_CLASSES = 1000  # characters of a name with brackets: a translation looks for the end of each
MAX_STEPS, SHORT = 5_000_000, 40  # comparisons of a pattern with a name of as many characters, about 1 µs each
ANY = "**"  # any number of folders
WILDCARDS = set("*?[\\")  # characters with a special meaning in a pattern

States = frozenset[int]  # parts of a pattern that may match next; len(parts): the path matches


@dataclass(frozen=True)
class Pattern:
    """A pattern or exception (`!`): a regular expression for each path component, None for `**`."""

    parts: tuple[re.Pattern[str] | None, ...]
    excepts: bool = False

    @property
    def end(self) -> int:
        """The state of a matching path."""
        return len(self.parts)

    def begin(self) -> States:
        """Return the states at the root of the code folder."""
        return self._closure({0})

    def after(self, states: States, name: str) -> States:
        """Return the states after one more component; everything in a matching folder also matches."""
        reached = set()
        for state in states:
            part = self.parts[state] if state < self.end else None
            if part is None:
                reached.add(state)
            if state < self.end and (part.match(name) if part else state + 1 == self.end):
                reached.add(state + 1)
        return self._closure(reached)

    def _closure(self, states: set[int]) -> States:
        """Add the states after each `**`, which may match no folder; a final `**` matches at least one component."""
        return frozenset(states | {state + 1 for state in states if state + 1 < self.end and self.parts[state] is None})


@dataclass(frozen=True)
class Place:
    """A file or folder in the code folder, with the states of all patterns that can match it or its content."""

    live: tuple[tuple[Pattern, States], ...]
    path: str = ""

    @property
    def steps(self) -> int:
        """The number of comparisons for one entry of the folder."""
        return sum(len(states) for _, states in self.live)

    def inside(self, name: str) -> Place:
        """Return the entry with this name in the folder."""
        reached = ((pattern, pattern.after(states, name)) for pattern, states in self.live)
        return Place(tuple(one for one in reached if one[1]), self.below(name))

    def below(self, name: str) -> str:
        """Return the path of the entry with this name in the folder."""
        return f"{self.path}/{name}" if self.path else name

    @property
    def ignored(self) -> bool:
        """Whether the last pattern that matches is not an exception."""
        matching = [one for one, states in self.live if one.end in states]
        return bool(matching) and not matching[-1].excepts

    def leads_to(self, excepts: bool) -> bool:
        """Whether patterns, or exceptions, can match something inside the folder, not only the folder itself."""
        return any(one.excepts is excepts and bool(states - {one.end}) for one, states in self.live)


def top(patterns: tuple[Pattern, ...]) -> Place:
    """Return the code folder itself."""
    return Place(tuple((pattern, pattern.begin()) for pattern in patterns))


class Walk:
    """A traversal of the code folder with a limited number of comparisons.

    It leaves out the paths in `outside` and all run directories: what a job writes there must not reach the limits.
    """

    def __init__(self, code: Path, outside: Collection[str]) -> None:
        self._code, self._outside, self._left = code, outside, MAX_STEPS

    def inside(self, folder: Place) -> list[tuple[os.DirEntry[str], Place]]:
        """List a folder; raises UsageError if it cannot be read, or matching takes too long."""
        try:
            with os.scandir(self._code / folder.path) as entries:
                found = {folder.below(entry.name): entry for entry in entries}
        except FileNotFoundError:  # removed meanwhile
            return []
        except OSError as error:
            why = f"cannot read the folder {self._code / folder.path}: {error.strerror}"
            raise UsageError(why, f"add it to {NAME}, or make it readable") from None
        if folder.path and is_run(entry.name for entry in found.values()):
            return []
        return [(entry, self._next(folder, entry.name)) for path, entry in found.items() if path not in self._outside]

    def _next(self, folder: Place, name: str) -> Place:
        self._left -= folder.steps * (1 + len(name) // SHORT)
        if self._left < 0:
            problem = f"{self._code / NAME} has too many patterns for the number of files in {self._code}"
            raise UsageError(problem, "use fewer patterns with **, or start the job from a folder with fewer files")
        return folder.inside(name)


def ignored(code: Path, but: tuple[str, ...] = (), outside: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths that .dockerignore excludes: whole folders, unless an exception (`!`) can match something inside.

    Ignores patterns whose last component is in `but`, all that is in the paths in `outside`, and run directories.
    Raises UsageError if the file or a folder cannot be read, or matching takes too long.
    """
    patterns = read(code, but)
    waiting, walk = [top(patterns)] if patterns else [], Walk(code, outside)
    while waiting:
        for entry, place in walk.inside(waiting.pop()):
            folder = entry.is_dir(follow_symlinks=False)
            if folder and (place.leads_to(excepts=True) if place.ignored else place.leads_to(excepts=False)):
                waiting.append(place)
            elif place.ignored and not entry.is_symlink():
                yield place.path


def kept(code: Path, but: tuple[str, ...] = (), outside: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of files that .dockerignore does not exclude.

    Leaves out hidden files and folders, names in `but`, paths in `outside`, and run directories.

    Raises UsageError if the file or a folder cannot be read, or matching takes too long.
    """
    waiting, walk = [top(read(code))], Walk(code, outside)
    while waiting:
        for entry, place in walk.inside(waiting.pop()):
            if entry.name.startswith(".") or entry.name in but:
                continue
            if not entry.is_dir(follow_symlinks=False):
                if not place.ignored:
                    yield place.path
            elif not place.ignored or place.leads_to(excepts=True):
                waiting.append(place)


def read(code: Path, but: tuple[str, ...] = ()) -> tuple[Pattern, ...]:
    """Read the .dockerignore of a folder; raises UsageError if it cannot be read."""
    file = code / NAME
    try:
        with regular(file) as opened:
            content = opened.read(MAX_FILE + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        why = "it is a link" if file.is_symlink() else error.strerror
        raise UsageError(f"cannot read {file}: {why}", "replace it with a text file, or remove it") from None
    lines = content.decode("utf-8-sig", "replace").splitlines()
    texts = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if len(content) > MAX_FILE or len(texts) > MAX_PATTERNS:
        problem = f"{file} has more than {MAX_FILE >> 10} KiB or {MAX_PATTERNS} patterns"
        raise UsageError(problem, "list folders or use wildcards instead of single files")
    found = [(text, _names(text.removeprefix("!").strip())) for text in texts]
    try:
        return tuple(
            Pattern(tuple(map(_part, names)), text.startswith("!"))
            for text, names in [*found, (f"!{NAME}", [NAME])]
            if names and names[-1] not in but
        )
    except (re.error, ValueError) as error:
        hint = "use ** only as a whole path component (a/**/b), and [^a] for any character but a"
        raise UsageError(f"{file} has an unsupported pattern: {error}", hint) from None


def _names(text: str) -> list[str]:
    """Split a pattern into path components, without `.` and `..`; also splits components that begin with `**`.

    Plain text after a leading `**` is the end of a path: in Docker's patternmatcher, `**.key` matches `a/id.key`, and
    `**.ke?` does not (https://pkg.go.dev/github.com/moby/patternmatcher).
    """
    names: list[str] = []
    literal = not WILDCARDS & set(text.lstrip("/")[len(ANY) :])
    for name in text.split("/"):
        if name == "..":
            del names[-1:]
        elif name.startswith(ANY):
            plain = not names and literal
            names += [ANY] * (names[-1:] != [ANY])
            rest = re.sub(r"^(\*\*)+", "", name)
            names += [f"*{rest}" if plain else rest] if rest else []
        elif name not in ("", "."):
            names.append(name)
    return names


def _part(name: str) -> re.Pattern[str] | None:
    """Compile one component of a pattern, in the syntax of Go's `path.Match`; None for `**`."""
    if name == ANY:
        return None
    if ANY in name.rstrip("*"):
        raise ValueError(f"** within {ascii(name[:60])}")
    if "[" in name and len(name) > MAX_CLASSES:
        raise ValueError(f"brackets in a name of more than {MAX_CLASSES} characters")
    if "[!" in name:  # literal in Docker, but [^ in most other programs
        raise ValueError(f"[! in {ascii(name[:60])}")
    if re.search(r"\[[^]]*\\", name):
        raise ValueError(f"a backslash within brackets in {ascii(name[:60])}")
    literal = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], name)
    return re.compile(fnmatch.translate(literal.replace("[^", "[!")))
