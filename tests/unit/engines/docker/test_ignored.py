"""A .dockerignore must be read as Docker reads it, within limits, whatever it is or contains."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrate.engines.docker.ignored import MAX_FILE, MAX_PATTERNS, ignored, kept, read, top
from orchestrate.engines.docker.mounts import hidden, masks
from orchestrate.engines.swarm.upload import code_files
from orchestrate.errors import UsageError
from orchestrate.node.trees import clear


def fits(tmp_path: Path, text: str, path: str) -> bool:
    """Whether a .dockerignore ignores a path."""
    (tmp_path / ".dockerignore").write_text(text)
    place = top(read(tmp_path))
    for name in path.split("/"):
        place = place.inside(name)
    return place.ignored


@pytest.mark.parametrize(
    ("text", "path", "ignored"),
    [
        ("data", "data", True),
        ("data", "data/a/b", True),
        ("data", "a/data", False),
        ("data", "data2", False),
        ("/data/", "data", True),
        ("./a//../data", "data", True),
        ("..", "a", False),
        ("*", ".env", True),
        ("*", ".dockerignore", False),
        ("*.py", "a.py", True),
        ("*.py", "a.pyc", False),
        ("*.py", "a/b.py", False),
        ("a/*/c", "a/b/c", True),
        ("a/*/c", "a/c", False),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("[^a-c]x", "dx", True),
        ("[a", "[a", True),
        (r"\*.py", "*.py", True),
        (r"\*.py", "a.py", False),
        (r"\a\[b", "a[b", True),
        ("**", "a", True),
        ("**/a", "a", True),
        ("**/a", "x/y/a", True),
        ("**/a", "x/y/a/z", True),
        ("**/**/a", "x/a", True),
        ("**a", "x/a", True),
        ("**.key", "id.key", True),
        ("**.key", "a/b/id.key", True),
        ("**.key", "id.key/x", True),
        ("**.key", "id.keys", False),
        ("/**.key", "a/id.key", True),
        ("**a/b", "xa/b", True),
        ("**a/b", "x/y", False),
        ("**.ke?", "id.key", False),
        ("**.ke?", "a/.key", True),
        ("***.key", "a/id.key", True),
        ("****", "a/b", True),
        ("a/**.key", "a/id.key", False),
        ("a/**.key", "a/b/.key", True),
        ("a**", "abc/d", True),
        ("a/**", "a", False),
        ("a/**", "a/b/c", True),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/x/y", False),
        ("a/**/b/**/c", "a/b/x/b/y/c", True),
        ("a\n!a/b", "a/b", False),
        ("a\n!a/b", "a/c", True),
        ("a\n!a/b\na/b/c", "a/b/c", True),
        ("!a\na", "a", True),
        ("# a\n#b", "#b", False),
        (" #b", "#b", True),
        ("\ufeffa", "a", True),
        ("a.b", "axb", False),
        ("a+(b|c)$", "a+(b|c)$", True),
        ("a\nb", "a\nb", False),
    ],
)
def test_a_pattern_must_mean_what_it_means_to_docker(tmp_path, text, path, ignored):
    assert fits(tmp_path, text, path) is ignored


@pytest.mark.parametrize(
    "text",
    [
        f"{'*a' * 60}b",
        f"{'a*' * 5000}b",
        f"{'?*' * 100}b",
        f"{'[a]*' * 100}b",
        f"{'**/a/' * 1000}b",
        f"{'**/*/' * 1000}b",
        f"{'**/*a*a*a*a/' * 100}b",
        "*" * 60_000 + "b",
        "**/" * 20_000 + "b",
        "\n".join(["**/*a*a*a*a*a*a*b"] * MAX_PATTERNS),
    ],
)
def test_no_pattern_must_backtrack(tmp_path, text):
    """With backtracking, each of them would practically never end."""
    assert not fits(tmp_path, text, "a" * 255)
    assert not fits(tmp_path, text, "a/" * 1000 + "a" * 255)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (lambda path: path.symlink_to("/dev/zero"), "it is a link"),
    "a link in the folder": (lambda path: path.symlink_to("work.py"), "it is a link"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "too large": (lambda path: path.write_text("#" * (MAX_FILE + 1)), "has more than 64 KiB or 1000 patterns"),
    "endless": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has more than 64 KiB or 1000 patterns"),
    "too many": (lambda path: path.write_text("a\n" * (MAX_PATTERNS + 1)), "has more than 64 KiB or 1000 patterns"),
    "not in brackets": (lambda path: path.write_text("[!a]\n"), r"has an unsupported pattern: \[! in '\[!a\]'"),
    "escaped": (lambda path: path.write_text("[\\\\]]\n"), "has an unsupported pattern: a backslash within brackets"),
    "two stars": (lambda path: path.write_text("a**b\n"), r"has an unsupported pattern: \*\* within 'a\*\*b'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_dockerignore_must_be_refused_by_path_with_a_hint(tmp_path, name):
    make, reason = WRONG[name]
    make(tmp_path / ".dockerignore")
    for look in (
        lambda: masks(tmp_path, tmp_path / "runs", "/workspace"),
        lambda: code_files(tmp_path, tmp_path / "runs"),
    ):
        with pytest.raises(UsageError, match=rf"{tmp_path}/\.dockerignore.*{reason}") as error:
            look()
        assert error.value.hint


def test_a_name_with_endless_brackets_must_be_refused(tmp_path):
    (tmp_path / ".dockerignore").write_text("[" * 60_000)
    with pytest.raises(UsageError, match="brackets in a name of more than 1000 characters"):
        list(ignored(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("look", [ignored, kept])
def test_too_many_patterns_for_the_number_of_files_must_be_refused(tmp_path, look):
    """Without the limit, these take half a minute."""
    folder = tmp_path.joinpath(*("abcdefghijklmn"))
    folder.mkdir(parents=True)
    for number in range(3000):
        (folder / str(number)).touch()
    (tmp_path / ".dockerignore").write_text((f"{'**/*/' * 20}x\n") * 600)
    with pytest.raises(UsageError, match=rf"{tmp_path}/.dockerignore has too many patterns for the number of files"):
        list(look(tmp_path))


def test_the_limit_of_steps_must_be_for_all_folders_together(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.engines.docker.ignored.MAX_STEPS", 50)
    (tmp_path / ".dockerignore").write_text("**/x")
    for number in range(30):  # two steps for each
        (tmp_path / str(number % 3)).mkdir(exist_ok=True)
        (tmp_path / str(number % 3) / str(number)).touch()
    with pytest.raises(UsageError, match="has too many patterns for the number of files"):
        list(ignored(tmp_path))


def test_ordinary_patterns_must_take_few_steps_for_many_files(tmp_path, monkeypatch):
    """Patterns that cannot match below a folder are not tried there."""
    monkeypatch.setattr("orchestrate.engines.docker.ignored.MAX_STEPS", 1000)
    (tmp_path / ".dockerignore").write_text("\n".join([f"folder-{number}/data" for number in range(20)]))
    (tmp_path / "src").mkdir()
    for number in range(500):
        (tmp_path / "src" / str(number)).touch()
    assert list(ignored(tmp_path)) == [] and len(list(kept(tmp_path))) == 500


def test_an_exception_must_keep_files_of_an_ignored_folder(tmp_path):
    (tmp_path / ".dockerignore").write_text("data\n!data/deep/keep\n")
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("data/other", "data/deep/keep", "data/deep/drop"):
        (tmp_path / name).touch()
    assert list(kept(tmp_path)) == ["data/deep/keep"]
    assert sorted(ignored(tmp_path)) == ["data/deep/drop", "data/other"]


def test_invalid_utf_8_must_not_hide_other_patterns(tmp_path):
    (tmp_path / ".dockerignore").write_bytes(b"\xff\xfe\nkey\n")
    assert top(read(tmp_path)).inside("key").ignored


def test_an_unreadable_folder_must_be_refused_unless_it_is_ignored_entirely(tmp_path, monkeypatch):
    (tmp_path / ".dockerignore").write_text("**/*.pem")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("orchestrate.engines.docker.ignored.os.scandir", closed)
    with pytest.raises(UsageError, match=f"cannot read the folder {tmp_path}/closed: Permission denied") as error:
        list(ignored(tmp_path))
    assert error.value.hint == "add it to .dockerignore, or make it readable"
    (tmp_path / ".dockerignore").write_text("**/*.pem\nclosed")
    assert list(ignored(tmp_path)) == ["closed"]


def test_an_ignored_name_that_is_not_utf_8_must_be_refused(tmp_path):
    (tmp_path / ".dockerignore").write_text("*.pem")
    (tmp_path / "a\udcff.pem").touch()
    with pytest.raises(UsageError, match=r"cannot hide 'a.udcff.pem': its name is not UTF-8"):
        masks(tmp_path, tmp_path / "runs", "/workspace")


def nested(folder: Path) -> None:
    """A path that is too long to be opened."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(18):
        os.mkdir("d" * 250, dir_fd=here)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def many(folder: Path) -> None:
    """More files than can be hidden, and more names than are compared."""
    for number in range(100):
        (folder / f"{number}.pem").touch()


@pytest.mark.parametrize("make", [nested, many])
@pytest.mark.parametrize("run", ["runs/a-1", "elsewhere/a-1"])
def test_what_a_job_writes_must_not_keep_others_from_starting(tmp_path, monkeypatch, make, run):
    monkeypatch.setattr("orchestrate.engines.docker.ignored.MAX_STEPS", 200)
    monkeypatch.setattr("orchestrate.engines.docker.mounts.MAX_MASKS", 50)
    (tmp_path / ".dockerignore").write_text("**/*.pem")
    (tmp_path / run / "job").mkdir(parents=True)
    for name in ("plan.json", "job.yaml", "events.jsonl", "../../train.py"):
        (tmp_path / run / name).touch()
    make(tmp_path / run / "job")
    try:
        assert hidden(tmp_path, tmp_path / "runs") == ["runs"]
        assert code_files(tmp_path, tmp_path / "runs") == [tmp_path / "train.py"]
    finally:
        clear(str(tmp_path / run))  # pytest cannot remove such paths
