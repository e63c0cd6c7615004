"""The orchestrator must log its actions to a file of the job, and to stderr on request, without secrets."""

import logging
import re
import stat
import time
from pathlib import Path

import pytest
from support.commanded import create, watched
from support.methods import raising
from support.recording import RecordingEngine
from support.scripted import ALL_WELL

from orchestrate.errors import EngineError
from orchestrate.files import log_file
from orchestrate.record.paths import JobPaths
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch

LOG = logging.getLogger("orchestrate.tests")


def text(path) -> str:
    return path.read_text()


@pytest.fixture
def timezone(monkeypatch):
    """A time zone other than UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


def test_a_job_must_have_a_log_that_only_its_user_can_read(paths):
    launch.supervise(paths, RecordingEngine([ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None)))
    lines = text(paths.orchestrate_log).splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ orchestrate\.", line) for line in lines)
    assert re.search(r"INFO orchestrate.supervise.launch: orchestrate \d.*, Python 3\.", lines[0])
    assert "GenerationEnded" in "".join(lines) and "JobEnded" in lines[-1]
    assert stat.S_IMODE(paths.orchestrate_log.stat().st_mode) == 0o600


def test_an_error_must_be_logged_with_its_traceback(paths):
    engine = RecordingEngine()
    engine.missing = {"master"}
    with pytest.raises(EngineError, match="no such node"):
        launch.supervise(paths, engine, lambda: 0, watched(paths, Display(lambda _: None)))
    assert re.search(r"Traceback.*in up\n.*EngineError: no such node\n", text(paths.orchestrate_log), re.S)


def test_an_internal_error_must_be_logged_and_end_the_command(paths):
    engine = RecordingEngine([ALL_WELL])
    engine.start = raising(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        launch.supervise(paths, engine, lambda: 0, watched(paths, Display(lambda _: None)))
    assert "KeyError: 'a bug'" in text(paths.orchestrate_log)


def test_a_second_supervisor_must_append_to_the_log(paths):
    for _ in range(2):
        launch.supervise(paths, RecordingEngine([ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None)))
    assert text(paths.orchestrate_log).count("SupervisorStarted") == 2


def test_secrets_must_not_be_logged(tmp_path, capsys):
    spec = JobSpec(trainers=0, env={"API_TOKEN": "hunter2000"}, command=("-m", "app.train"))
    paths, engine = create(JobPaths(tmp_path / "a-1"), spec), RecordingEngine()

    engine.up = raising(EngineError("the engine refused hunter2000"))
    with log_file.shown("debug"), pytest.raises(EngineError):
        launch.supervise(paths, engine, lambda: 0, watched(paths, Display(lambda _: None)))
    for log in (text(paths.orchestrate_log), capsys.readouterr().err):
        assert "the engine refused ***" in log and "hunter2000" not in log


def test_escape_sequences_and_forged_lines_must_not_be_logged(tmp_path):
    with log_file.kept(tmp_path / "log", str):
        LOG.info("a\x1b[2J%s\udcff", "b\n2026-01-01T00:00:00.000Z INFO orchestrate: c")
    (line,) = text(tmp_path / "log").splitlines()
    assert line.endswith("INFO orchestrate.tests: ab\\n2026-01-01T00:00:00.000Z INFO orchestrate: c\\udcff")


def test_times_in_the_log_must_be_in_utc(tmp_path, timezone):
    record = logging.makeLogRecord(
        {"name": LOG.name, "levelno": logging.INFO, "msg": "x", "created": 0.0, "msecs": 0.0}
    )
    with log_file.kept(tmp_path / "log", str):
        LOG.handle(record)
    assert text(tmp_path / "log").startswith("1970-01-01T00:00:00.000Z ")


def test_a_link_in_place_of_the_log_must_not_be_followed(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with log_file.kept(tmp_path / "log", str):
        LOG.info("kept")
    assert not (tmp_path / "victim").exists() and "kept" in text(tmp_path / "log")


def test_a_full_disk_must_only_lose_the_log_message(capsys):
    with log_file.kept(Path("/dev/full"), str):
        LOG.info("lost")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("level", "seen"), [("debug", "DIWEC"), ("INFO", "IWEC"), ("Warning", "WEC"), ("error", "EC"), ("critical", "C")]
)
def test_messages_must_be_shown_from_the_requested_level(level, seen, capsys, tmp_path):
    with log_file.kept(tmp_path / "log", str), log_file.shown(level):
        for name in ("debug", "info", "warning", "error", "critical"):
            getattr(LOG, name)("x")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{name} orchestrate.tests: x" for name in logging.getLevelNamesMapping() if name[0] in seen][
        ::-1
    ] or [line[0] for line in lines] == [*seen]
    assert text(tmp_path / "log").count(": x\n") == 5


def test_nothing_of_the_log_of_a_job_must_affect_that_of_the_next(tmp_path, capsys):
    with log_file.kept(tmp_path / "log", str.upper):
        pass
    assert not LOG.isEnabledFor(logging.ERROR)
    with log_file.shown("info"):
        LOG.info("x")
    assert capsys.readouterr().err == "INFO orchestrate.tests: x\n"


def test_messages_must_not_be_shown_without_a_level(capsys):
    with log_file.shown(""):
        LOG.critical("x")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", ["trace", "10", "\x1b[2J"])
def test_an_unknown_level_must_be_reported_and_ignored(level, do, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", level)
    code, _, err = do("ps")
    assert code == 0
    assert err == [f"warning: LOGLEVEL is {ascii(level)}, not one of {', '.join(log_file.LEVELS)}; ignoring it"]


@pytest.mark.parametrize("options", [("--verbose",), ("-v",), ()])
def test_a_command_must_show_its_log_on_request(options, do, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "" if options else "Info")
    do.engine.generations = [[ALL_WELL]]
    code, _, err = do("run", "--trainers", "2", *options)
    assert code == 0
    assert any(line.startswith("INFO orchestrate.supervise.launch: JobEnded(") for line in err)
