"""The records that an account keeps of its jobs must be private, and valid only for the original folders."""

import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.commanded import NOT_OURS, Commands, create, end, runs_elsewhere, supervised
from support.scripted import ALL_WELL

from orchestrate.engines.client_session import key_of
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import private, records
from orchestrate.node.trees import identity
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

KEY = bytes(range(32))
SPEC = JobSpec(trainers=2, grace=0.01, env={"HF_TOKEN": "canary-1", "A": "b"}, command=("-m", "app.train"))


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The folder for the records of one test, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "orchestrate"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory without a record."""
    folder = tmp_path / "runs" / "a-1"
    folder.mkdir(parents=True)
    return folder


def test_a_record_must_be_readable_by_its_user_alone(kept, run):
    mask = os.umask(0)
    try:
        records.make(run, KEY, {"HF_TOKEN": "canary-1"})
    finally:
        os.umask(mask)
    (file,) = kept.iterdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (kept, file)]
    assert modes == [0o700, 0o600] and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    found = records.need(run)
    assert (bytes.fromhex(found.key), found.secrets) == (KEY, {"HF_TOKEN": "canary-1"})
    records.end(run)
    assert (records.need(run).key, records.need(run).secrets) == ("", {"HF_TOKEN": "canary-1"})
    records.reopen(run, KEY)
    assert records.need(run).key == KEY.hex()
    records.forget(run)
    assert records.find(run) is None and not [*kept.iterdir()]
    records.forget(run), records.end(run)  # no record exists
    with pytest.raises(UsageError, match=NOT_OURS):
        records.reopen(run, KEY)


def moved(run: Path) -> Path:
    return run.rename(run.with_name("b-1"))


def moved_with_its_project(run: Path) -> Path:
    return run.parent.rename(run.parent.with_name("elsewhere")) / run.name


def copied(run: Path) -> Path:
    return Path(shutil.copytree(run, run.with_name("b-1")))


def replaced(run: Path) -> Path:
    """Replace the folder by a copy, while the original still exists."""
    run.rename(run.with_name("b-1"))
    return Path(shutil.copytree(run.with_name("b-1"), run))


def linked(run: Path) -> Path:
    run.rename(run.with_name("b-1"))
    run.symlink_to("b-1")
    return run


@pytest.mark.parametrize("how", [moved, moved_with_its_project, copied, replaced, linked])
def test_a_record_must_be_valid_only_for_the_original_folder(kept, run, how: Callable[[Path], Path]):
    records.make(run, KEY)
    found = how(run)
    assert records.find(found) is None
    with pytest.raises(UsageError, match=f"{found} {NOT_OURS}"):
        records.need(found)


def test_the_record_of_a_folder_must_be_found_by_each_path_to_its_parent_folder(kept, run):
    records.make(run, KEY)
    (run.parent.parent / "link").symlink_to("runs")
    assert records.find(run.parent.parent / "link" / "a-1") == records.need(run)


def missing(home: Path) -> None:
    """An account without a home folder."""


def unwritable(home: Path) -> None:
    home.mkdir(mode=0o500)
    if os.geteuid() == 0:  # as if sudo kept the home folder of its caller
        os.chown(home, 12345, 12345)


def a_file(home: Path) -> None:
    (home / ".local" / "state").mkdir(parents=True)
    (home / ".local" / "state" / "orchestrate").write_text("mine")


def a_link(home: Path) -> None:
    (home / ".local" / "state").mkdir(parents=True)
    (home / ".local" / "state" / "orchestrate").symlink_to(home)


def open_to_others(home: Path) -> None:
    (home / ".local" / "state" / "orchestrate").mkdir(parents=True)
    (home / ".local" / "state" / "orchestrate").chmod(0o770)


def of_another_user(home: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to create a folder of another user")
    (home / ".local" / "state" / "orchestrate").mkdir(parents=True, mode=0o700)
    os.chown(home / ".local" / "state" / "orchestrate", 12345, 12345)


UNUSABLE = [missing, unwritable, a_file, a_link, open_to_others, of_another_user]


@pytest.mark.parametrize("how", UNUSABLE)
@pytest.mark.parametrize("state", [None, "", "relative"])
def test_records_must_be_kept_elsewhere_if_the_home_folder_cannot_be_used(tmp_path, monkeypatch, run, how, state):
    home = tmp_path / "home"
    how(home)
    before = sorted(home.rglob("*"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False) if state is None else monkeypatch.setenv(
        "XDG_STATE_HOME", state
    )
    monkeypatch.setattr(private, "TEMPORARY", tmp_path)
    records.make(run, KEY)
    assert records.need(run).key == KEY.hex()
    assert [path.parent for path in tmp_path.glob("orchestrate-*/records/*")] == [private.temporary() / "records"]
    assert sorted(home.rglob("*")) == before


def test_records_must_be_found_in_a_shell_with_other_settings(tmp_path, monkeypatch, run):
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    records.make(run, KEY)
    assert len([*home.glob(".local/state/orchestrate/*.json")]) == 1
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert records.need(run).key == KEY.hex()
    records.forget(run)
    assert not [*home.glob(".local/state/orchestrate/*.json")]


def test_a_job_must_not_be_created_if_no_record_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(private, "TEMPORARY", tmp_path / "none")
    with pytest.raises(UsageError, match=f"cannot write the record of {tmp_path}/a-1") as error:
        create(JobPaths(tmp_path / "a-1"))
    assert "XDG_STATE_HOME" in error.value.hint and not [*tmp_path.iterdir()]


def test_records_of_removed_folders_must_be_removed_except_those_of_other_machines(kept, run, monkeypatch):
    existing, remote, gone = (run.with_name(name) for name in ("existing", "remote", "gone"))
    for folder in (existing, remote, gone):
        folder.mkdir()
    records.make(existing), records.make(gone)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    records.make(remote)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(kept.parent))
    (kept / "damaged.json").write_text("{")
    remote.rmdir(), gone.rmdir()
    assert len([*kept.iterdir()]) == 4
    records.make(run)
    assert len([*kept.iterdir()]) == 4 and records.find(existing) and records.find(run)
    gone.mkdir()
    assert records.find(gone) is None


@pytest.mark.parametrize("left", ["no folder", "an empty folder", "a key", "an error"])
def test_the_record_of_a_folder_that_may_only_be_away_must_be_kept_for_a_week(kept, tmp_path, run, left, monkeypatch):
    folder = tmp_path / "disk" / "runs" / "a-1"
    folder.mkdir(parents=True)
    records.make(folder, b"1" * 32 if left == "a key" else b"")
    (record,) = kept.iterdir()
    if left == "a key":
        (folder.parent / "b-1").mkdir()
    if left == "an error":
        folder.parent.rename(tmp_path / "away")
        folder.parent.write_text("")  # so that the folder cannot be looked up
    else:
        folder.rename(tmp_path / "away")
    if left == "no folder":
        folder.parent.rmdir()
    records.make(run)
    assert record.exists()
    os.utime(record, (0, time.time() - 8 * 86400))
    records.forget(run)
    records.make(run)
    assert record.exists() == (left == "an error")


def test_many_records_must_not_delay_a_job_and_be_removed_over_time(kept, run):
    folders = [run.with_name(f"gone-{number}") for number in range(100)]
    for folder in folders:
        folder.mkdir()
        records.make(folder)
    for folder in folders:
        folder.rmdir()
    for left in (84, 68, 52):  # 16 of them each time, and the new one stays
        records.forget(run)
        records.make(run)
        assert len([*kept.iterdir()]) == left + 1


def test_using_a_record_must_leave_no_file_open(kept, run):
    before = len(os.listdir("/proc/self/fd"))
    records.make(run, KEY)
    (run / "job").mkdir()
    assert records.identity_in(run, "job") == identity((run / "job").stat())
    (run / "link").symlink_to("job")
    assert records.identity_in(run, "link") == identity((run / "link").lstat())
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_damaged_record_must_be_ignored(kept, run):
    records.make(run, KEY)
    (file,) = kept.iterdir()
    before = len(os.listdir("/proc/self/fd"))
    for text in ("", "{", "[]", "7", '{"run": 1}'):
        file.write_text(text)
        assert records.find(run) is None
    with file.open("r+b") as opened:
        opened.truncate(300 << 30)
    assert records.find(run) is None
    assert len(os.listdir("/proc/self/fd")) <= before


# --- jobs


def test_the_record_of_a_job_must_be_removed_with_its_files(do: Commands, kept):
    for name, command in (("a-1", ["rm", "a-1"]), ("c-1", ["down", "c-1"])):
        paths = create(JobPaths(do.runs / name), SPEC, cluster=name if name == "c-1" else "")
        assert len([*kept.iterdir()]) == 1 and records.need(paths.root).secrets == {"HF_TOKEN": "canary-1"}
        assert do(*command)[0] == 0 and not [*kept.iterdir()]


def test_the_key_of_a_job_must_not_be_available_after_its_end(do: Commands, paths):
    do.engine.generations = [[ALL_WELL]]
    assert len(key_of(paths.shared)) == 32
    assert do("attach", "a-1")[0] == 0
    with pytest.raises(EngineError, match="cannot connect to the nodes: a-1 has ended"):
        key_of(paths.shared)


@pytest.fixture
def copy(do: Commands, tmp_path) -> JobPaths:
    """A copy of the files of a job that belongs elsewhere and has a container in the engine."""
    original = create(JobPaths(tmp_path / "elsewhere" / "a-1"), SPEC)
    original.log(0).write_text("hello\n")
    do.engine.things = ["container a-1-master-1"]
    do.runs = tmp_path / "runs"
    shutil.copytree(original.root, do.runs / "a-1", symlinks=True)
    return JobPaths(do.runs / "a-1")


def test_a_copied_job_must_not_be_resumed_or_stopped_or_touch_an_engine(do: Commands, copy):
    for command in ("attach", "stop", "logs"):
        code, out, err = do(command, "a-1")
        assert (code, out, err[0]) == (2, [], f"error: {copy.root} {NOT_OURS}")
        assert len(err) == 2 and err[1].startswith("hint: ")
    assert do("wait", "a-1")[0] == 5
    assert do("ps") == (0, ["NAME  ENGINE  NODES  STATE  RUN"], [])
    with supervised(copy.root):
        assert do("ps") == (0, ["NAME  ENGINE  NODES  STATE  RUN"], [])
    assert do.engine.calls == [] and do.engine.things == ["container a-1-master-1"]


def test_copied_results_must_be_shown_and_removed_as_files_only(do: Commands, copy):
    end(copy)
    assert do("logs", "a-1") == (0, ["[0] hello"], [])
    assert do("wait", "a-1") == (0, [], [])
    assert do("rm", "a-1", "--dry-run") == (0, [f"folder {copy.root}"], [])
    assert do("rm", "a-1") == (0, [], ["a-1 removed"])
    assert not copy.root.exists() and do.engine.calls == [] and do.engine.things == ["container a-1-master-1"]
    assert records.find(do.runs.parent / "elsewhere" / "a-1")


def test_a_running_job_must_not_be_stopped_through_a_copy_of_its_files(do: Commands, copy):
    do.engine.states = [runs_elsewhere(copy.root)]
    assert do("stop", "a-1")[0] == 2 and do.engine.things == ["container a-1-master-1"]
    assert do("rm", "a-1")[0] == 0 and do.engine.things == ["container a-1-master-1"]
    assert do("stop", "a-1")[0] == 0 and do.engine.things == []  # by the labels of its nodes


def test_a_job_must_not_be_resumed_from_forged_events(do: Commands):
    paths = create(JobPaths(do.runs / "a-1"), SPEC)
    line = {"event": "outcome_decided", "time": 1.0, "seconds": 1.0, "outcome": "succeeded", "reason": "all is well"}
    paths.events.write_text(json.dumps(line) + "\n")
    code, _, err = do("attach", "a-1")
    assert (code, err[-1]) == (2, "hint: python -m orchestrate rm a-1")
    assert err[-2] == f"error: {paths.events} is damaged: event 1, 'outcome_decided', was not written by this job"
    assert do("rm", "a-1")[0] == 0


# --- job.yaml


def test_a_job_yaml_must_be_run_again_only_with_its_secrets(do: Commands, tmp_path):
    copy = shutil.copy(create(JobPaths(tmp_path / "a-1"), SPEC).spec, tmp_path / "again.yaml")
    assert "canary" not in Path(copy).read_text()
    for command in ("run", "plan"):
        code, out, err = do(command, copy)
        assert (code, out, err[0]) == (2, [], "error: env.HF_TOKEN is ***, the placeholder for a secret in job.yaml")
        assert "use -e HF_TOKEN" in err[1]
    assert do("plan", copy, "--set", "env.HF_TOKEN=another")[0] == 0


def test_secrets_must_be_read_from_the_record(tmp_path):
    paths = create(JobPaths(tmp_path / "a-1"), SPEC)
    spec, plan = run_dir.load(paths)
    assert spec == SPEC and {worker.env["HF_TOKEN"] for worker in plan.workers} == {"canary-1"}


def test_a_file_must_be_valid_before_its_next_version_is_written_and_if_it_cannot_be(run, kept, monkeypatch):
    records.make(run, KEY)
    path = run / "report.json"
    for text in ("oldest", "older", "old"):
        records.write(path, text)
    assert not records.written(records.need(run), path.name, "oldest")

    def full(path: Path | str, *more: Any) -> None:
        if Path(path).name == "report.json":
            assert records.written(records.need(run), "report.json", text)  # in case this ends here
            raise OSError(28, "No space left on device")
        write_whole(path, *more)

    write_whole = records.write_whole
    monkeypatch.setattr(records, "write_whole", full)
    for text in ("new", "new", "newer"):  # it is tried again until there is space
        with pytest.raises(OSError, match="No space left"):
            records.write(path, text)
        assert records.written(records.need(run), path.name, path.read_text())
    path.write_text("of a project")
    with pytest.raises(OSError, match="No space left"):
        records.write(path, text)
    assert not records.written(records.need(run), path.name, path.read_text())


def test_a_file_that_was_removed_must_not_be_valid_if_it_is_put_back(run, kept):
    records.make(run, KEY)
    path = run / "report.json"
    records.write(path, "old")
    records.remove(path)
    assert not path.exists() and not records.written(records.need(run), path.name, "old")
    records.write(path, "new")
    assert records.written(records.need(run), path.name, "new") and records.need(run).key == KEY.hex()


def test_the_key_of_an_account_must_stay_and_be_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "one"))
    with ThreadPoolExecutor(8) as pool:
        (key,) = {*pool.map(lambda _: records.account_key(), range(100))}
    path = tmp_path / "one" / "orchestrate" / "key"
    assert len(key) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "two"))
    assert records.account_key() != key
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "one"))
    path.write_text("")  # as on a full disk
    assert len(new := records.account_key()) == 64 and records.account_key() == new != key
