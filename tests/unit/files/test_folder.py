"""Nodes can write anything to the job folder: the host must not follow links, block or leak its own files."""

import json
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest
from support.commanded import Whole, create, end, watched
from support.pairs import pairs
from support.scripted import ALL_WELL, KILLED

from orchestrate.files import folder, lines
from orchestrate.files.folder import Folder
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.show.screen import Display
from orchestrate.supervise import launch
from orchestrate.supervise.job_files import JobFiles

CANARY = "a secret of the host"
OUTSIDE = f'{CANARY}\n{{"step": 7, "secret": "{CANARY}"}}\n'
PLACES = ("logs", "logs/rank-0.log", "checkpoints", "checkpoints/step-1", "metrics.jsonl", "generation", "other")
ROOT = os.geteuid() == 0


def nest(path: Path, depth: int = 3000) -> None:
    """Nest folders deeper than the longest path, with a file in the innermost one."""
    path.mkdir()
    here = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o4755, dir_fd=here))
    os.close(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 4)
        file.write(b"end\n")


def closed(path: Path) -> None:
    (path / "in").mkdir(parents=True)
    (path / "in" / "file").write_text("x")
    path.chmod(0)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{(parent := os.open(path.parent, os.O_PATH))}/{path.name}")
        os.close(parent)


KINDS = {
    "nothing": lambda path, outside: None,
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "relative link": lambda path, outside: path.symlink_to(os.path.relpath(outside / "file", path.parent)),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "link to /proc": lambda path, outside: path.symlink_to("/proc/self/fd/0"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: listening(path),
    "device": lambda path, outside: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),  # endless zeros
    "folder": lambda path, outside: (path / "rank-0.log").mkdir(parents=True),
    "deep folder": lambda path, outside: nest(path),
    "closed folder": lambda path, outside: closed(path),
    "sparse file": lambda path, outside: sparse(path),
    "closed file": lambda path, outside: (path.touch(), path.chmod(0)),
    "deep value": lambda path, outside: path.write_text('{"step": ' + "[" * 100_000 + "\n"),
    "nested value": lambda path, outside: path.write_text('{"a": ' + "[" * 400 + "]" * 400 + "}\n"),
    "huge number": lambda path, outside: path.write_text('{"step": 1' + "0" * 4000 + ', "rank_seconds": [1e999]}\n'),
    "no text": lambda path, outside: path.write_bytes(bytes(range(256)) * 10),
}


@pytest.fixture
def outside(tmp_path):
    target = tmp_path / "outside"
    target.mkdir()
    (target / "file").write_text(OUTSIDE)
    (target / "rank-0.log").write_text(OUTSIDE)
    return target


def plant(path: Path, kind: str, outside: Path) -> None:
    """Replace a path in a job folder with something of this kind."""
    if kind == "device" and not ROOT:
        pytest.skip("must be root to make a device")
    if not path.parent.is_dir():
        path.parent.mkdir()
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path, outside)


def untouched(outside: Path) -> bool:
    return {path.name: path.read_text() for path in outside.iterdir()} == {"file": OUTSIDE, "rank-0.log": OUTSIDE}


COMMANDS = [("logs",), ("logs", "--rank", "0"), ("attach",), ("wait",), ("ps",), ("stop",), ("rm",)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "place"), pairs([*KINDS], PLACES))
def test_commands_must_end_and_leak_nothing_of_the_host_whatever_a_node_leaves(
    do, paths, outside, tmp_path, place, kind
):
    plant(paths.shared / place, kind, outside)
    do.engine.generations = [[KILLED], [ALL_WELL]]
    for ended in (False, True):
        for name, *arguments in COMMANDS[: None if ended else 2]:
            if ended and not paths.report.exists():
                do("attach", "a-1")  # runs it
            job_ = () if name == "ps" else ("a-1",)
            code, out, err = do(name, *job_, *arguments)
            shown = "\n".join([*out, *err])
            assert CANARY not in shown and "Traceback" not in shown
            assert code in (0, 1), shown
    assert untouched(outside)
    assert not paths.root.exists()  # `rm` came last


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "place"), pairs([*KINDS], PLACES))
def test_the_supervisor_must_continue_and_report_whatever_a_node_leaves(paths, outside, place, kind):
    plant(paths.shared / place, kind, outside)
    files = JobFiles(paths)
    assert files.step() == 0 and isinstance(files.saved(), tuple) and isinstance(files.activity(), tuple)
    assert CANARY not in files.text(0) + "".join(files.last_lines(0))
    shown: list[str] = []
    data = launch.supervise(paths, Whole([KILLED], [ALL_WELL]), lambda: 0, watched(paths, Display(shown.append)))
    assert data["outcome"] == "succeeded"
    assert CANARY not in json.dumps(data) + "".join(shown)
    assert json.loads(paths.report.read_text()) == json.loads(json.dumps(data))
    assert untouched(outside)


@pytest.mark.timeout(60)
def test_a_link_in_place_of_a_job_folder_on_a_cluster_must_not_move_files_of_the_host(tmp_path, outside):
    JobPaths(tmp_path / "runs" / "c-1").create_cluster()
    paths = create(JobPaths(tmp_path / "runs" / "a-1"), cluster="c-1")
    inside = tmp_path / "runs" / "c-1" / "nodes" / "a-1"
    engine, shown = Whole([ALL_WELL]), []
    start = engine.start

    def swap(plan, stopped=None) -> None:
        start(plan)
        shutil.rmtree(inside)
        inside.symlink_to(outside)

    engine.start = swap
    data = launch.supervise(paths, engine, lambda: 0, watched(paths, Display(shown.append)))
    assert data["outcome"] == "succeeded"
    assert untouched(outside) and not os.path.lexists(inside)
    assert not paths.shared.is_symlink() and os.listdir(paths.shared) == [] and CANARY not in json.dumps(data)
    assert any("the nodes have replaced the job's folder" in line for line in shown)
    run_dir.remove(paths)
    assert untouched(outside)


@pytest.mark.parametrize(
    "target", ["/", "..", "../c-1/nodes/b-1", "../c-1/nodes/../..", "../../x/nodes/a-1", "c-1/nodes/a-1"]
)
def test_only_links_that_we_create_must_lead_to_a_cluster(tmp_path, target):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    shutil.rmtree(paths.shared)
    paths.shared.symlink_to(target)
    assert paths.cluster == "" and paths.folder.path == paths.shared
    with pytest.raises(OSError), paths.folder.opened():
        pass


def test_a_folder_that_cannot_be_opened_must_leave_no_file_open(tmp_path):
    job_folder = Folder(tmp_path, "a")
    job_folder.make("x")
    (tmp_path / "a" / "x" / "link").symlink_to(".")
    before = len(os.listdir("/proc/self/fd"))
    for below in ("missing", "x/missing", "x/link"):
        assert job_folder.entries(below) == []
    assert len(os.listdir("/proc/self/fd")) <= before


# --- limits


def test_files_must_be_listed_in_name_order_and_within_limits(tmp_path, monkeypatch):
    job_folder = Folder(tmp_path, "a")
    job_folder.make("x")
    for name in ("x/b", "x/a", "x/.hidden", "x/.half/file", "x/c/d/e"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).touch()
    assert job_folder.files("x") == (["x/a", "x/b", "x/c/d/e"], True)
    assert job_folder.files("none") == ([], True)
    (tmp_path / "link").symlink_to(".")
    assert Folder(tmp_path / "link", "a").files("x") == job_folder.files("x")  # only nodes' links are not followed
    monkeypatch.setattr(folder, "MAX_DEPTH", 1)
    assert job_folder.files("x") == (["x/a", "x/b"], True)
    monkeypatch.setattr(folder, "MAX_ENTRIES", 5)
    assert job_folder.files("x") == (["x/a", "x/b"], True)
    monkeypatch.setattr(folder, "MAX_ENTRIES", 1)
    found, complete = job_folder.files("x")
    assert len(found) <= 1 and not complete and len(job_folder.entries("x")) == 1


@pytest.mark.parametrize("name", ["{}", ".{}", "{}/{}"])
def test_a_search_through_empty_folders_must_be_bounded(tmp_path, monkeypatch, name):
    job_folder = Folder(tmp_path, "a")
    job_folder.make("x")
    for number in range(20):
        (tmp_path / "a" / "x" / name.format(number, number)).mkdir(parents=True)
    calls: list[str] = []
    original = Folder.opened

    def opened(self, below=""):
        calls.append(below)
        return original(self, below)

    monkeypatch.setattr(Folder, "opened", opened)
    monkeypatch.setattr(folder, "MAX_ENTRIES", 5)
    assert job_folder.files("x") == ([], False) and len(calls) <= 6


@pytest.mark.timeout(120)
def test_a_report_must_be_readable_whatever_the_job_has_left(paths, do):
    deep = paths.shared.joinpath("checkpoints", *["\N{ROCKET}" * 63] * 12)  # 9 KB as JSON
    deep.mkdir(parents=True)
    for number in range(folder.MAX_ENTRIES):
        (deep / f"{number}").touch()
    with paths.metrics.open("w") as file:
        for number in range(1001):
            file.write(json.dumps({f"{number}": ["\N{ROCKET}" * 1000] * 8}, ensure_ascii=False) + "\n")
    do.engine.generations = [[ALL_WELL]]
    (code, _, stderr), *others = (do(name, "a-1") for name in ("attach", "wait", "logs", "attach"))
    assert code == 0 and [code for code, *_ in others] == [0, 0, 0], others
    assert "warning: report.json does not list all checkpoints, final_metrics: too many or too large" in stderr
    assert paths.report.stat().st_size < folder.MAX_FILE / 3


@pytest.mark.parametrize("length", [10, 1000, 5000])
def test_a_long_line_must_be_read_in_pieces_without_loss(tmp_path, monkeypatch, length):
    monkeypatch.setattr(lines, "MAX_LINE", 100)
    monkeypatch.setattr(lines, "CHUNK", 64)
    text = bytes(97 + number % 26 for number in range(length))
    (tmp_path / "log").write_bytes(b"before\n" + text + b"\nafter\nhal")
    read = lines.Lines()
    with (tmp_path / "log").open("rb") as file:
        found = list(read.new(file))
        assert (found[0], found[-1]) == (b"before", b"after")
        assert b"".join(found[1:-1]) == text and max(map(len, found)) <= 164
        assert list(read.new(file)) == [] and read.rest() == b"hal" and read.rest() == b""


def test_a_file_that_was_truncated_must_be_read_again_from_its_start(tmp_path):
    read = lines.Lines()
    (tmp_path / "log").write_bytes(b"one\nan incomplete li")
    with (tmp_path / "log").open("rb") as file:
        assert list(read.new(file)) == [b"one"]
        (tmp_path / "log").write_bytes(b"one\ntwo\n")
        read.near_end(file, 5)
        assert list(read.new(file)) == [b"two"]


def test_an_incomplete_line_must_not_be_joined_to_one_after_a_skipped_part(tmp_path):
    read = lines.Lines()
    (tmp_path / "log").write_bytes(b"one\nha")
    with (tmp_path / "log").open("rb") as file:
        assert list(read.new(file)) == [b"one"]
        (tmp_path / "log").write_bytes(b"one\nhalf\nthree\nfour\n")
        read.near_end(file, 6)
        assert list(read.new(file)) == [b"four"]


def test_a_read_must_stop_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "CHUNK", 4)
    (tmp_path / "log").write_bytes(b"".join(b"%03d\n" % number for number in range(10)))
    read = lines.Lines()
    with (tmp_path / "log").open("rb") as file:
        assert list(read.new(file, 8)) == [b"000", b"001"]
        assert list(read.new(file, 4)) == [b"002"]
        assert len(list(read.new(file))) == 7


def test_a_read_must_end_although_the_file_grows(tmp_path):
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    read = lines.Lines()
    with (tmp_path / "log").open("rb") as file, (tmp_path / "log").open("ab", buffering=0) as log:
        assert [(line, log.write(b"more\n")) for line in read.new(file)] == [(b"one", 5), (b"two", 5)]
        assert [*read.new(file)] == [b"more", b"more"]


@pytest.mark.skipif(sys.platform != "linux", reason="finding holes needs Linux")
def test_a_hole_in_a_file_must_not_be_read(tmp_path):
    sparse(tmp_path / "log")
    read = lines.Lines()
    with (tmp_path / "log").open("rb") as file:
        found = list(read.new(file))
    assert b"".join(found).strip(b"\0") == b"end" and sum(map(len, found)) < 1 << 20


# --- leftovers


def test_set_id_bits_must_be_removed_from_the_files_of_an_ended_job(paths, outside):
    nest(paths.shared / "deep")
    (outside / "file").chmod(0o4755)
    (paths.shared / "link").symlink_to(outside / "file")
    for name, mode in {"program": 0o6755, "closed": 0o4000, "plain": 0o644}.items():
        (paths.shared / name).touch()
        (paths.shared / name).chmod(mode)
    (paths.shared / "checkpoints").chmod(0o2755)
    launch.supervise(paths, Whole([ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None)))
    modes = {name: stat.S_IMODE((paths.shared / name).stat().st_mode) for name in ("program", "closed", "plain")}
    assert modes == {"program": 0o755, "closed": 0, "plain": 0o644}
    assert stat.S_IMODE((outside / "file").stat().st_mode) == 0o4755
    set_ids = [
        name
        for _, _, names, descriptor in os.fwalk(paths.shared)
        for name in names
        if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode & 0o6000
    ]
    assert set_ids == []


def test_a_report_must_keep_measurements_and_drop_everything_else_a_script_writes(paths):
    values = {"loss": 0.5, "step": 3, "name": "a", "on": True, "none": None, "list": [1, 2.5, "x"], "eval": {"a": [1]}}
    dropped = {
        "deep": [[[[1]]]],
        "mapping": {"a": {"b": {"c": {"d": 1}}}},
        "long": "x" * 2000,
        "many": [0] * 2000,
        "large": 1 << 64,
    }
    paths.metrics.write_text(json.dumps(values) + "\n" + json.dumps(dropped) + "\n")
    data = launch.supervise(paths, Whole([ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None)))
    assert data["final_metrics"] == values
    end(paths)


@pytest.mark.parametrize("closed_to", [False, True])
def test_set_id_bits_must_be_removed_whatever_names_and_modes_a_job_uses(tmp_path, monkeypatch, closed_to):
    job_folder = tmp_path / "job"
    nest(job_folder, 100)
    for number in range(5):
        (job_folder / f".deep-{number}" / "full").mkdir(parents=True)
    programs = [job_folder / "program", job_folder / "unreadable" / "program"]
    programs[1].parent.mkdir()
    for program in programs:
        program.touch()
        program.chmod(0o6755)
    programs[1].parent.chmod(0o300)
    if closed_to:
        job_folder.chmod(0)
    if not ROOT or not closed_to:
        before = len(os.listdir("/proc/self/fd"))
        folder.harmless(job_folder)
        assert len(os.listdir("/proc/self/fd")) <= before
    else:  # modes do not restrict root, so run it as another user
        os.chown(job_folder, 65534, 65534)
        for _, folders, names, here in os.fwalk(job_folder):
            for name in folders + names:
                os.chown(name, 65534, 65534, dir_fd=here)
        tmp_path.chmod(0o755)
        for program in programs:
            program.chmod(0o6755)
        (job_folder / "of root").touch()
        (job_folder / "of root").chmod(0o4755)
        if not (pid := os.fork()):
            os.chdir(tmp_path)  # as root, since only root can enter the folders above
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                folder.harmless(Path("job"))
            except PermissionError:  # reported after all others
                os._exit(7)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [stat.S_IMODE(program.stat().st_mode) for program in programs] == [0o755] * 2
    run_dir.remove(JobPaths(job_folder))


def test_of_many_metrics_only_the_last_must_be_read(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.job_files.MAX_ROWS", 3)
    lines = [*({"old": step} for step in range(7)), *({"rank_seconds": [step]} for step in range(3))]
    paths.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert JobFiles(paths).metrics() == [{"rank_seconds": [0]}, {"rank_seconds": [1]}, {"rank_seconds": [2]}]
