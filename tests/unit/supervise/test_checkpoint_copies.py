"""Jobs with object stores, on a scripted engine."""

import itertools
import threading
from types import SimpleNamespace

import pytest
from support.commanded import create
from support.copies import Copies
from support.object_stores import Saved
from support.optional import not_none
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Clock, Job
from support.waiting import eventually

from orchestrate import console
from orchestrate.engines.base import never
from orchestrate.errors import StorageError, StorageLost
from orchestrate.files.folder import Folder
from orchestrate.node.ranks import FENCE
from orchestrate.record import events
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.record.report import Copied
from orchestrate.spec.spec import JobSpec
from orchestrate.storage.base import PART
from orchestrate.storage.content import Progress
from orchestrate.storage.manifest import manifest_key
from orchestrate.storage.mirror import Mirror, State
from orchestrate.storage.output import MAX_FAILURES, upload
from orchestrate.storage.parallel import AT_ONCE, Stopped
from orchestrate.storage.store import open_store
from orchestrate.supervise.checkpoint_copies import NO_PROGRESS, RETRY_INTERVAL, StoreCopies
from orchestrate.supervise.open_stores import NoCopies, prepare


def test_nodes_must_be_removed_if_the_store_fails_when_a_job_is_taken_over(tmp_path, monkeypatch):
    class Failing(NoCopies):
        def begin(self, stopped):
            raise StorageError("access denied")

    job = Job(tmp_path)
    before = Recorder(job.paths.events)
    before(events.GenerationStarting(0, ("master",), 1, 29500))
    before.close()
    with pytest.raises(StorageError):
        job.run(RecordingEngine(), copies=Failing())
    assert job.noted("nodes_down")


def test_a_store_must_be_checked_for_problems_while_workers_run(job):
    class Checked(NoCopies):
        def check(self):
            checks.append(job.names())

    checks: list = []
    job.run(RecordingEngine([[], [], ALL_WELL]), copies=Checked())
    assert len(checks) == 3


def test_a_file_that_the_store_refuses_must_keep_no_other_from_being_copied(tmp_path):
    job, out = tmp_path / "run" / "job", tmp_path / "my out"
    job.mkdir(parents=True)
    for name in (FENCE, "a\x01", "a\n", "b#1", *map(str, range(20))):
        (job / name).write_text(name)
    (out / "j" / "b#1").mkdir(parents=True)  # in the way
    store, done = open_store(out.as_uri()), set()
    with pytest.raises(StorageError, match="b#1: Is a directory"):
        upload(store, Folder(job.parent, "job"), "j", done, lambda: False, Progress())
    assert sorted(path.name for path in out.glob("j/*[0-9]") if path.is_file()) == sorted(map(str, range(20)))
    assert sorted(done) == sorted(map(str, range(20)))
    (job / "b#1").unlink()
    (out / "j" / "0").unlink()
    skipped = upload(store, Folder(job.parent, "job"), "j", done, lambda: False, Progress())
    assert set(skipped.values()) == {"its name has characters that cannot be printed"} and len(skipped) == 2
    assert not (out / "j" / "0").exists()  # a file that is done is not copied again


@pytest.mark.parametrize(
    ("error", "least"), [(StorageError("access denied"), MAX_FAILURES + 1), (StorageLost("down"), 1)]
)
def test_a_store_that_refuses_every_file_must_not_be_asked_for_all_of_them(tmp_path, error, least):
    job = Saved(tmp_path / "run")
    for number in range(100):
        job.write(str(number), b"1")
    store, asked = open_store(f"file://{tmp_path}/out"), []

    def refuse(key: str, data: bytes) -> None:
        asked.append(key)
        raise error

    store.put = refuse
    with pytest.raises(type(error), match=str(error)):
        upload(store, job.folder, "j", set(), lambda: False, Progress())
    assert least <= len(asked) < least + AT_ONCE


def test_a_job_must_not_write_where_its_record_is_published(tmp_path):
    copies = Copies(tmp_path, output=True)
    for path in ("report.html/x", "changes.patch", "events.jsonl"):
        copies.job.write(f"../orchestrate/{path}", b"forged")
    (copied,) = copies.end()
    assert [why for path in ("report.html/x", "changes.patch") for why in copied.skipped if path in why]
    copies.stored.publish()
    assert not [path for path in (tmp_path / "output").rglob("*") if path.is_file() and path.read_bytes() == b"forged"]


@pytest.mark.parametrize(("files", "asks"), [({"large": 3 << 20}, 2), ({"a": 0, "b": 0}, 1)])
def test_copying_of_output_must_be_stopped_within_a_file_and_before_the_next(tmp_path, files, asks):
    job, asked = Saved(tmp_path / "run"), iter(range(asks))
    for name, size in files.items():
        job.write(name, bytes(size))
    with pytest.raises(Stopped):
        upload(
            open_store(f"file://{tmp_path}/out"), job.folder, "j", set(), lambda: next(asked, None) is None, Progress()
        )


@pytest.mark.parametrize(
    ("patience", "stops", "error", "hint"),
    [
        (0.1, itertools.repeat(0), "does not respond", "check the network"),
        (3600.0, itertools.count(), "copying was stopped", ""),
    ],
)
def test_the_end_of_a_job_must_not_wait_forever_for_a_store_that_is_down(
    tmp_path, monkeypatch, rclone, patience, stops, error, hint
):
    """Until nothing has been copied for long, or the user asks to stop."""
    monkeypatch.setattr("orchestrate.supervise.checkpoint_copies.NO_PROGRESS", patience)
    rclone.kill()
    job = Saved(tmp_path / "run")
    job.write("last.pt", b"weights")
    spec = JobSpec(checkpoints="s3://bucket/checkpoints", output="s3://bucket/output")
    emit = Recorder(tmp_path / "events.jsonl")
    stored = StoreCopies(spec, JobPaths(tmp_path / "run"), lambda: next(stops), emit)
    stored.begin(never)
    copies: list[Copied] = []
    phases: list[str] = []
    ending = threading.Thread(target=lambda: copies.extend(stored.end()), daemon=True)
    console.attach(SimpleNamespace(above=pytest.fail, phase=phases.append))
    try:
        ending.start()
        ending.join(120)
    finally:
        console.attach(None)
    emit.close()
    assert [copy.what for copy in copies if copy.error] == ["checkpoints", "output"]
    assert error in copies[1].error and copies[1].hint.startswith(hint)
    name = JobPaths(tmp_path / "run").root.name
    assert phases[-3:] == ["", f"copying output to s3://bucket/output/{name}", ""]  # nothing stays on the screen


def test_a_job_that_is_stopped_before_it_starts_must_not_fetch_its_checkpoints(tmp_path, earlier):
    copies = Copies(tmp_path, stops=1)
    copies.stored.begin(lambda: True)
    copies.end("nodes may still write")
    assert not copies.emit.events and not copies.job.files()


def test_a_problem_with_the_store_must_be_reported_once(tmp_path):
    class Failing(Mirror):
        @property
        def state(self) -> State:
            return State(error="access denied")

    copies = Copies(tmp_path)
    copies.stored.mirror = Failing(open_store(f"file://{tmp_path}/store"), copies.job.folder, "checkpoints", "j")
    copies.stored.check()
    copies.stored.check()
    (event,) = copies.emit.events
    assert isinstance(event, events.WarningIssued) and event.text == "checkpoints are not copied: access denied"
    copies.emit.close()


def test_problems_that_a_job_can_name_must_not_be_reported_without_end(tmp_path):
    class Failing(Mirror):
        @property
        def state(self) -> State:
            return State(error=f"{next(numbers)} {'x' * 9000}")

    numbers, copies = itertools.count(), Copies(tmp_path)
    copies.stored.mirror = Failing(open_store(f"file://{tmp_path}/store"), copies.job.folder, "checkpoints", "j")
    for _ in range(100):
        copies.stored.check()
    assert 1 < len(copies.emit.events) < 50
    assert all(isinstance(each, events.WarningIssued) and len(each.text) < 1000 for each in copies.emit.events)
    copies.emit.close()


def test_checkpoints_that_are_in_the_store_already_must_not_count_as_missing(tmp_path, earlier):
    """For example, the job is resumed although it had done all steps."""
    copies = Copies(tmp_path)
    copies.stored.begin(never)
    (fetched,) = copies.emit.events
    assert isinstance(fetched, events.CheckpointsFetched) and (fetched.files, fetched.bytes) == (1, 7)
    (copy,) = copies.end()
    assert (copy.files, copy.error) == (0, "") and copies.job.files() == {"last.pt": b"weights"}


def test_the_files_of_a_job_that_was_stopped_must_be_copied(tmp_path):
    copies = Copies(tmp_path, output=True)
    copies.job.write("last.pt", weights := bytes(PART + 1))
    copies.job.write("bad\x01", b"")
    (copies.job.path / "link").symlink_to("last.pt")
    copies.stored.begin(never)
    copies.stops = 1  # only a second request ends the copying
    copied = copies.end()
    assert [(copy.what, copy.files, copy.error) for copy in copied] == [("checkpoints", 2, ""), ("output", 1, "")]
    assert [len(copy.skipped) for copy in copied] == [1, 2]
    assert copied[1].skipped[1].endswith(": its name has characters that cannot be printed")
    assert [path.read_bytes() for path in (tmp_path / "output").rglob("last.pt")] == [weights]


def test_a_job_whose_nodes_may_still_write_must_not_be_copied_as_complete(tmp_path):
    """Waiting for the end of writing would take as long as they write."""
    copies = Copies(tmp_path, output=True)
    copies.job.write("last.pt", b"weights")
    copies.stored.begin(never)
    assert [(copy.what, copy.error) for copy in copies.end("nodes may still write")] == [
        ("checkpoints", "nodes may still write"),
        ("output", "nodes may still write"),
    ]
    assert not list((tmp_path / "output").glob("*"))
    eventually(lambda: not_none(copies.stored.mirror).finished, timeout=30)  # later changes are not copied, either


def test_damage_of_the_newest_copy_must_be_reported_before_an_older_one_is_used(tmp_path, earlier):
    open_store(f"file://{tmp_path}/store").put(manifest_key(2), b"{")
    copies = Copies(tmp_path)
    copies.stored.begin(never)
    warning, fetched = copies.emit.events
    assert isinstance(warning, events.WarningIssued) and warning.text.endswith("; using an older copy")
    assert isinstance(fetched, events.CheckpointsFetched)
    copies.end("nodes may still write")


@pytest.mark.parametrize(("minutes", "error"), [(5, ""), (0, "away")])
def test_a_copy_of_checkpoints_must_be_given_up_only_after_two_minutes_without_progress(tmp_path, minutes, error):
    class Slow(Mirror):
        """Reads one byte of a file in each of some minutes."""

        @property
        def state(self) -> State:
            self.progress.count = min(int(copies.emit.seconds() // 60), minutes)
            return State(pending_bytes=5 << 20, error="away", committed=1.0, complete=self.finished)

        @property
        def finished(self) -> bool:
            return 0 < minutes <= copies.emit.seconds() / 60

    copies, phases = Copies(tmp_path, clock=Clock()), []
    copies.stored.mirror = Slow(open_store(f"file://{tmp_path}/store"), copies.job.folder, "checkpoints", "j")
    console.attach(SimpleNamespace(above=pytest.fail, phase=phases.append))
    try:
        (copied,) = copies.end()
    finally:
        console.attach(None)
    assert copies.emit.seconds() == pytest.approx(60 * minutes or NO_PROGRESS, abs=0.2)
    assert copied.error == error and phases[0].endswith(": 5 MiB left") and phases[-1] == ""


def test_files_that_are_tried_again_and_again_must_not_count_as_progress(tmp_path):
    class Failing(Mirror):
        """Begins with all files in each round, and copies none."""

        @property
        def state(self) -> State:
            return State(pending_files=int(copies.emit.seconds() * 7) % 5, error="away")

        @property
        def finished(self) -> bool:
            return copies.emit.seconds() > 10 * NO_PROGRESS

    copies = Copies(tmp_path, clock=Clock())
    copies.stored.mirror = Failing(open_store(f"file://{tmp_path}/store"), copies.job.folder, "checkpoints", "j")
    (copied,) = copies.end()
    assert copied.error == "away" and copies.emit.seconds() == pytest.approx(NO_PROGRESS, abs=0.2)


def test_a_request_to_stop_must_end_a_copy_of_output_that_has_begun(tmp_path):
    copies, requests = Copies(tmp_path, output=True), itertools.chain([0, 0], itertools.repeat(1))
    copies.stored.stops = lambda: next(requests)
    copies.job.write("last.pt", b"weights")
    (copied,) = copies.end()
    assert (copied.files, copied.error) == (0, "copying was stopped")


@pytest.mark.parametrize("spec", [JobSpec(checkpoints="s3://nowhere/x"), JobSpec(output="s3://nowhere/x")])
def test_each_store_of_a_job_must_answer_before_it_starts(rclone, spec):
    with pytest.raises(StorageError, match="s3://nowhere/x: the bucket does not exist"):
        prepare(spec)


def test_no_secret_must_be_published_with_the_output_of_a_job(tmp_path):
    spec = JobSpec(
        output=(tmp_path / "out").as_uri(), env={"TOKEN": "canary-7"}, command=("a.py", "--token", "canary-7")
    )
    paths = create(JobPaths(tmp_path / "j-1"), spec)
    assert "canary-7" in paths.spec.read_text()
    emit = Recorder(paths.events, key=bytes(32))
    emit(events.JobResumed())
    for path in (paths.report, paths.page, paths.patch):
        path.write_text("canary-7")
    StoreCopies(spec, paths, lambda: 0, emit).publish()
    emit.close()
    published = {path.name: path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert published.keys() == {
        path.name for path in (paths.report, paths.page, paths.events, paths.spec, paths.plan, paths.patch)
    }
    assert "canary-7" not in "".join(published.values())


def test_the_end_of_a_job_must_not_wait_forever_for_a_file_that_cannot_be_copied(tmp_path):
    copies = Copies(tmp_path, output=True, clock=Clock())
    for name in ("a", "b"):
        copies.job.write(name, b"content")
    (tmp_path / "output" / "run" / "checkpoints" / "b").mkdir(parents=True)  # in the way of a file
    (copied,) = copies.end()
    assert copied.files == 1 and copied.error
    assert NO_PROGRESS <= copies.emit.seconds() <= NO_PROGRESS + 2 * RETRY_INTERVAL


class Minutes(Clock):
    """A clock whose `sleep` takes a minute, in each of the first four of which something happens."""

    def __init__(self, happens) -> None:
        super().__init__()
        self.happens, self.left = happens, 4

    def sleep(self, seconds: float) -> None:
        self.now += 60.0
        self.left -= 1
        if self.left >= 0:
            self.happens()


def test_a_copy_of_output_must_not_be_given_up_while_it_makes_progress(tmp_path):
    ways = [tmp_path / "output" / "run" / "checkpoints" / name for name in "abcde"]
    copies = Copies(tmp_path, output=True, clock=Minutes(lambda: ways.pop().rmdir()))
    for folder in ways:
        copies.job.write(folder.name, b"content")
        folder.mkdir(parents=True)  # in the way of the file
    (copied,) = copies.end()
    assert copied.files == 4 and copied.error and copies.emit.seconds() > 4 * 60.0 + NO_PROGRESS - 1


def test_copying_must_end_at_once_if_a_store_refuses_many_files(tmp_path):
    """Again and again a few others would be copied beside those that come first, for hours."""
    copies = Copies(tmp_path, output=True, clock=Clock())
    for number in range(MAX_FAILURES + 1):
        copies.job.write(f"a{number}", b"content")
        (tmp_path / "output" / "run" / "checkpoints" / f"a{number}").mkdir(parents=True)
    for number in range(1000):
        copies.job.write(f"b{number}", b"content")
    (copied,) = copies.end()
    assert copied.error and copied.files < 1000 and copies.emit.seconds() < RETRY_INTERVAL
