"""Output must be complete or an error, in any encoding, and must not control the terminal."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from support.commanded import create, end, process, runs_elsewhere, terminal_text
from support.pairs import pairs
from support.repo import ROOT
from support.scripted import ALL_WELL

from orchestrate import console
from orchestrate.cli.main import main
from orchestrate.doctor import checks
from orchestrate.errors import EngineError
from orchestrate.record.paths import JobPaths

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\x1bc\x7f\rb"
APP = ("--gpus", "none", "--", "-m", "app.train")


# --- clean


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain\ttext\n×", "plain\ttext\n×"),
        ("".join(map(chr, range(160))), "\t\n" + "".join(map(chr, range(32, 127)))),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;cm0=\x07a\x1b]0;b\x1b\\c", "ac"),
        ("\x1b]0;no end\nthe next line", "\nthe next line"),
        ("\x1b\x1b[0m[2J", "[2J"),
        ("a\rb\x85c\x9b2Jd", "abc2Jd"),
        ("pay\u202eexe.\u202cpdf\u2066\u2069", "payexe.pdf"),  # would be displayed from right to left
        ("one\u2028two\u2029three\ufeff\u200b", "onetwothree"),
        ("👩\u200d🚀 ❤\ufe0f é e\u0301 \u00a0", "👩\u200d🚀 ❤\ufe0f é e\u0301 \u00a0"),
    ],
    ids=ascii,
)
def test_all_control_characters_except_newline_and_tab_must_be_removed(text, cleaned):
    assert console.clean(text) == cleaned


def test_all_invisible_characters_except_the_emoji_joiner_must_be_removed():
    every = "".join(map(chr, range(160, sys.maxunicode + 1)))
    kept = set(console.clean(every))
    assert {char for char in kept if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")} == {"\u200d"}
    assert {unicodedata.category(char) for char in set(every) - kept} <= {"Cf", "Cn", "Zl", "Zp"}  # and nothing else


def test_all_printed_text_must_be_clean(capsys):
    for show in (console.print_message, console.out, console.stream, lambda text: console.table([(text, text)])):
        show(HOSTILE)
        out, err = capsys.readouterr()
        assert not CONTROL.search(out + err) and "a" in out + err
    console.print_message(EngineError(HOSTILE))
    assert not CONTROL.search(capsys.readouterr().err)


def test_a_table_row_must_stay_one_line_with_aligned_columns(capsys):
    console.table([("NAME", "RUN"), ("a\nforged  running\x1b[A", "/a\tb"), ("b", "c")])
    assert capsys.readouterr().out == "NAME               RUN\na forged  running  /a b\nb                  c\n"


def test_names_from_an_engine_must_not_control_the_terminal(do, tmp_path):
    do.engine.states = [runs_elsewhere(Path("/r" + HOSTILE), "j\n" + HOSTILE)]
    do.engine.things = ["container " + HOSTILE]
    end(create(JobPaths(tmp_path / "a-1")))
    for arguments in (["ps"], ["stop", "a-1", "--dry-run"], ["rm", "a-1", "--dry-run"], ["logs", "zz"]):
        code, out, err = do(*arguments)
        assert out + err and not CONTROL.search("".join(out + err)), arguments
    assert len(do("ps")[1]) == 2


def test_an_exported_file_must_be_exact_unless_it_is_printed_to_a_terminal(monkeypatch, tmp_path):
    text = "a: 'é\x1b[0m'\n"
    with captured(tmp_path) as (out, _):
        console.copy(text)
        assert console.finish() is None
    assert out.read_bytes() == text.encode()
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as tty:
        monkeypatch.setattr(sys, "stdout", tty)
        console.copy(text)
        assert console.finish() is None
        assert os.read(reader, 100) == "a: 'é'\r\n".encode()
        monkeypatch.undo()
    os.close(reader)


# --- output that cannot be written


@contextlib.contextmanager
def captured(folder: Path, out: str = "", err: str = "", encoding: str = "utf-8"):
    """Redirect output to files, as for a separate process; yields the files of stdout and stderr."""
    files = [Path(out or folder / "out"), Path(err or folder / "err")]
    saved, streams = [os.dup(number) for number in (1, 2)], (sys.stdout, sys.stderr)
    for number, path in enumerate(files, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    try:
        yield files
    finally:
        sys.stdout, sys.stderr = streams
        for number, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def test_output_of_workers_must_not_wait_for_more(tmp_path):
    with captured(tmp_path) as (out, _):
        console.stream("a line")
        assert out.read_text() == "a line\n"


COMMANDS = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["ps"],
    ["plan", "--trainers", "2", *APP],
    ["run", "--dry-run", "--trainers", "2", *APP],
    ["run", "--print-path", "--trainers", "2", *APP],
    ["up", "--trainers", "2", "--gpus", "none"],
    ["doctor"],
    ["export", "kubernetes", "--image", "a.example/b:1", *APP],
    ["export", "slurm", *APP],
    ["export", "compose", *APP],
    ["logs", "ended"],
    ["logs", "ended", "-f"],
    ["attach", "ended", "--json"],
    ["attach", "waiting", "--print-path"],
    ["stop", "ended", "--dry-run"],
    ["rm", "ended", "--dry-run"],
    ["down", "cluster", "--dry-run"],
]
# Each way to print.
WAYS = [["--help"], ["ps"], ["plan", "--trainers", "2", *APP], ["export", "compose", *APP], ["logs", "ended"]]
RUN = ["run", "--trainers", "2", *APP]
MESSAGES = [RUN, ["attach", "ended"], ["stop", "ended"], ["rm", "ended"], ["run", "--bogus"]]


@pytest.fixture
def jobs(do, tmp_path, monkeypatch):
    """A folder with a finished job, a job without a supervisor, and a cluster."""
    runs = tmp_path / "runs"
    ended = create(JobPaths(runs / "ended-1"))
    end(ended)
    ended.log(0).write_text("hello ×\n" * 3000)
    create(JobPaths(runs / "waiting-1"))
    create(JobPaths(runs / "cluster-1"), cluster="cluster-1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "doctor", lambda *_: [checks.Finding(checks.GOOD, "a thing", "do it")])
    do.engine.generations, do.engine.things = [[ALL_WELL]], ["container x"]
    return do


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_stdout_must_be_reported_in_one_line(jobs, tmp_path, arguments):
    with captured(tmp_path, out="/dev/full") as (_, err):
        code = main(arguments)
    lines = err.read_text().splitlines()
    assert (code, lines[-1]) == (1, "error: could not write all output: [Errno 28] No space left on device")
    assert sum("error" in line for line in lines) == 1


@pytest.mark.parametrize("arguments", MESSAGES, ids=" ".join)
def test_a_full_stderr_must_be_an_error_but_not_stop_the_command(jobs, tmp_path, arguments):
    with captured(tmp_path) as (out, err):
        usual = main(arguments)
        before = out.read_text()
    end(create(JobPaths(tmp_path / "runs" / "ended-1"))) if arguments[0] == "rm" else None
    jobs.engine.generations = [[ALL_WELL]]
    with captured(tmp_path, err="/dev/full") as (out, _):
        assert main(arguments) == (usual or 1)
    assert out.read_text().count("\n") == before.count("\n")


@pytest.mark.parametrize("arguments", WAYS, ids=" ".join)
def test_a_closed_pipe_on_stdout_must_not_be_an_error(jobs, tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with captured(tmp_path, out=f"/dev/fd/{writer}") as (_, err):
        assert main(arguments) == 0
    os.close(writer)
    assert "error" not in err.read_text()


@pytest.mark.parametrize("arguments", WAYS, ids=" ".join)
def test_unencodable_characters_must_be_printed_as_escapes(jobs, tmp_path, arguments):
    with captured(tmp_path, encoding="ascii") as (out, err):
        console.prepare()
        assert main(arguments) == 0
        assert console.finish() is None
    assert "Traceback" not in (text := out.read_text() + err.read_text())
    if arguments[0] in ("plan", "logs"):
        assert "\\xd7" in text


# --- as a separate process


PLAN = ("plan", "--engine", "process", "--trainers", "1", "--gpus", "none", "--set", "name=ä×", "--", "-m", "json.tool")


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1", "PYTHONUNBUFFERED": "1"},
    ],
    ids=str,
)
def test_a_plan_must_be_printable_in_every_encoding(env):
    done = process(*PLAN, **env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"2 nodes \\xd7 1 worker" in done.stdout or b"2 nodes \xd7 1 worker" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "shell"),
    pairs([PLAN, ("ps",), ("--help",), ("logs", "nope")], [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "<&-"]),
)
def test_closed_streams_must_not_be_an_error(tmp_path, arguments, shell):
    runs = () if arguments == ("--help",) else ("--runs", str(tmp_path))
    done = process(arguments[0], *runs, *arguments[1:], shell=shell)
    assert done.returncode == (2 if "nope" in arguments else 0)
    assert b"Traceback" not in done.stderr
    if "2>&-" in shell:  # and messages do not go to stdout
        assert b"error" not in done.stdout
    if shell == ">&-" and "nope" not in arguments and arguments != ("--help",):
        assert done.stderr == b""


# --- the current phase


PROGRAM = """
import os, sys, time
from orchestrate import console
console.ANNOUNCE_AFTER = console.PROGRESS_INTERVAL = AFTER
console.phase("starting 2 nodes")
time.sleep(PAUSE)
sys.argv[0] = "/usr/bin/orchestrate"
console.print_message("python -m orchestrate ps")
console.stream("master 0 | a line")
console.phase("")
for part in ("10%", "20%"):
    console.progress(f"master 0 | {part}", console.stream)
console.phase(HOSTILE + "x" * 500)
console.mute()
console.phase("muted")
console.print_later("of a signal handler")
console.finish()
os._exit(0)  # as the command line does: threads may still print
"""


def phase_program(after: float, pause: float = 0.0) -> list[str]:
    """A command that shows a phase and progress, in lines after and every some seconds, and other output."""
    code = PROGRAM.replace("= AFTER", f"= {after}").replace("PAUSE", str(pause))
    return [sys.executable, "-c", code.replace("HOSTILE", repr(HOSTILE))]


def test_the_current_phase_must_be_the_last_line_of_a_terminal_and_be_replaced():
    leader, follower = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    subprocess.run(phase_program(1000), stdout=follower, stderr=follower, env=env, check=True)
    os.close(follower)
    erase, phase = "\r\x1b[K", "starting 2 nodes"
    parts = [
        phase,
        "orchestrate ps\n" + phase,
        "master 0 | a line\n" + phase,
        "master 0 | 10%",
        "master 0 | 20%",
        "a31mcb" + "x" * 33,
    ]
    parts += ["of a signal handler\n"]
    assert terminal_text(leader).replace("\r\n", "\n") == erase.join(parts)


def test_a_shared_terminal_must_get_only_complete_lines():
    leader, follower = pty.openpty()
    env = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(phase_program(1000), stdout=subprocess.PIPE, stderr=follower, env=env, check=True)  # `| grep`
    os.close(follower)
    assert terminal_text(leader) == "orchestrate ps\r\nof a signal handler\r\n"
    assert done.stdout.splitlines() == [b"master 0 | a line", b"master 0 | 10%"]


@pytest.mark.parametrize(("after", "shown"), [(1000, []), (0.0, ["starting 2 nodes"])])
def test_a_long_phase_must_be_printed_as_a_line_without_a_terminal(after, shown):
    env = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(phase_program(after, pause=0.3), capture_output=True, text=True, env=env, check=True)
    assert done.stderr.splitlines()[: len(shown) + 1] == [*shown, "orchestrate ps"]
    assert done.stdout.splitlines() == ["master 0 | a line", "master 0 | 10%", *["master 0 | 20%"] * (not after)]
    assert "\x1b" not in done.stderr + done.stdout


def test_output_that_cannot_be_written_must_be_an_error_unless_the_reader_has_closed_it(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    ps = [sys.executable, "-m", "orchestrate", "ps"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(ps, stdout=full, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: could not write all output: [Errno 28] No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(ps, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("env", "expected"),
    [({"TERM": "xterm"}, True), ({}, False), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_only_a_terminal_that_is_known_to_understand_them_must_get_colors(monkeypatch, env, expected):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
        if name in env:
            monkeypatch.setenv(name, env[name])
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as stream:
        assert console.colors(stream) is expected
    assert not console.colors(io.StringIO()) and not console.colors(None)
