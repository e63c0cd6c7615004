"""No command must accept a run directory that other users created or can replace."""

import contextlib
import fcntl
import grp
import os
import pwd
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commanded import create, end, runs_elsewhere, supervised
from support.pairs import pairs
from support.repo import ROOT as REPOSITORY

from orchestrate.cli import table
from orchestrate.errors import UsageError
from orchestrate.host import owners, private, users
from orchestrate.host.writable import note
from orchestrate.record.paths import JobPaths
from orchestrate.record.run_dir import load
from orchestrate.spec.spec import JobSpec

ROOT = os.geteuid() == 0
JOB_COMMANDS = [name for name, command in table.COMMANDS.items() if command.job]


def linked(path: Path) -> None:
    """Replace a run directory with a link to it."""
    path.rename(path.parent / "far")
    path.symlink_to(path.parent / "far")


def writable(path: Path) -> None:
    path.chmod(0o757)


def of_a_group(path: Path) -> None:
    path.chmod(0o770)


def of_another_user(path: Path) -> None:
    if not ROOT:
        pytest.skip("must be root to make a folder of another user")
    os.chown(path, 65534, 65534)


FORGED: dict[Callable[[Path], None], str] = {
    linked: "it is a link",
    writable: "other users can write to it",
    of_a_group: "other users can write to it",
    of_another_user: "it belongs to nobody (user 65534)",
}


@pytest.mark.parametrize("found", ["by its folder", "by its nodes"])
@pytest.mark.parametrize(("command", "forge"), pairs(JOB_COMMANDS, [*FORGED]))
def test_no_command_must_act_on_a_run_directory_that_is_not_ours(
    do, paths, command: str, forge: Callable[[Path], None], found: str
):
    end(paths)
    forge(paths.root)
    before = sorted(os.listdir(paths.root))
    if found == "by its nodes":
        do.engine.states = [runs_elsewhere(paths.root)]
    with supervised(paths.root) as other:
        code, out, err = do(command, "a-1", *(["--", "ls"] if command == "exec" else []))
        assert (code, out) == (2, [])
        assert err == [
            f"error: {paths.root} is not one of your run directories: {FORGED[forge]}",
            f"hint: run it as that user: runuser -u nobody -- python -m orchestrate {command} a-1"
            if forge is of_another_user
            else "hint: name a job that you have started: python -m orchestrate ps --all",
        ]
        assert other.poll() is None and do.engine.calls == []
    assert {*before, "supervisor.lock"} == {*os.listdir(paths.root)}
    with pytest.raises(UsageError, match="does not contain a job that can continue"):
        load(paths)


@pytest.mark.parametrize("forge", FORGED)
def test_a_run_directory_that_is_not_ours_must_be_neither_listed_nor_matched(do, paths, forge):
    forge(create(JobPaths(paths.root.parent / "a-12")).root)
    with supervised(paths.root.parent / "a-12"):
        code, (_, *rows), err = do("ps")
        assert (code, [row.split()[0] for row in rows], err) == (0, ["a-1"], [])
    assert do("rm", "a", "--dry-run") == (0, [f"folder {paths.root}"], [])


def test_a_running_job_must_be_found_even_if_a_link_has_its_name(do, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    far.log(0).write_text("hello\n")
    end(far)
    (tmp_path / "a-1").symlink_to(far.root)
    do.engine.states = [runs_elsewhere(far.root)]
    assert do("logs", "a-1") == (0, ["[0] hello"], [])
    assert do("wait", "a-1")[0] == 0


def test_a_job_whose_run_directory_is_gone_must_still_be_stopped(do, tmp_path):
    do.engine.states, do.engine.things = [runs_elsewhere(tmp_path / "a-1")], ["container a-1-master"]
    assert do("stop", "a-1")[0] == 0 and do.engine.things == []


@pytest.mark.parametrize("forge", [linked, writable])
def test_files_of_a_cluster_must_not_be_moved_to_a_run_directory_that_is_not_ours(do, tmp_path, forge):
    cluster = create(JobPaths(tmp_path / "c-1"), cluster="c-1")
    job = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    forge(job.root)
    code, _, err = do("down", "c-1")
    why = f"{job.root} is not one of your run directories: {FORGED[forge]}"
    assert (code, err[0]) == (1, f"error: cannot move {cluster.nodes / 'a-1'} to {job.root}: {why}")
    assert job.shared.is_symlink() and (cluster.nodes / "a-1").is_dir()


# --- folders where root must not keep jobs

NOBODY = pwd.getpwnam("nobody").pw_uid  # an account that every machine has
NODE, _ = users.without_account()
NONE = next(user for user in range(54321, 60000) if not users.account(user))
NOGROUP = pwd.getpwnam("nobody").pw_gid
COMMANDS = [("run", "--engine", "process", "--", "-m", "app.train"), ("up",), ("plan",), ("ps",), ("down", "c-1")]
COMMANDS += [(name, "a-1") for name in JOB_COMMANDS]
needs_root = pytest.mark.skipif(not ROOT, reason="must be root to be refused, and to make folders of other users")


@needs_root
def test_root_must_not_use_a_running_job_in_a_folder_that_another_account_can_change(do, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    do.engine.states = [runs_elsewhere(far.root)]
    os.chown(far.root.parent, NOBODY, 0)
    assert do("stop", "a-1")[2][0].startswith(f"error: root cannot keep jobs in {far.root.parent}: ")
    assert do.engine.calls == []


@needs_root
@pytest.mark.parametrize(("command", "below"), pairs(COMMANDS, ["", "runs", "not/yet/there"]))
def test_root_must_not_keep_jobs_where_another_account_can_replace_them(do, tmp_path, command, below):
    theirs = tmp_path / "theirs"
    do.runs = theirs / below
    do.runs.mkdir(parents=True) if below != "not/yet/there" else theirs.mkdir()
    os.chown(theirs, NOBODY, 0)
    code, out, err = do(*command)
    assert (code, out) == (2, [])
    own = "run it as that user: runuser -u nobody -- python -m orchestrate " + " ".join(command)
    other = "use --runs to name a folder that only root can change, such as --runs /root/runs"
    assert err == [
        f"error: root cannot keep jobs in {do.runs}: nobody (user {NOBODY}) can change {theirs}",
        f"hint: {other if below or command[0] in ('run', 'up', 'plan') else own}",
    ]
    assert do.engine.calls == [] and not theirs.joinpath("not").exists()


@needs_root
@pytest.mark.parametrize(
    ("user", "group", "mode", "sudo", "who"),
    [
        (0, 0, 0o755, "", ""),
        (0, NOGROUP, 0o755, "", ""),
        (0, NOGROUP, 0o775, "", f"nobody (user {NOBODY})"),
        (0, NOGROUP, 0o775, NOBODY, ""),
        (0, NOGROUP, 0o1775, "", ""),
        (0, NONE, 0o775, "", ""),  # a group without members
        (0, 0, 0o777, "", "every user"),
        (0, 0, 0o1777, "", ""),  # like /tmp
        (NOBODY, 0, 0o700, "", f"nobody (user {NOBODY})"),
        (NOBODY, 0, 0o1777, "", f"nobody (user {NOBODY})"),
        (NOBODY, 0, 0o700, NOBODY, ""),
        (NODE, 0, 0o755, "", f"user {NODE}"),  # the job folder of another job, which may be running
        (NONE, NONE, 0o755, "", ""),  # a checkout in CI, whose user the container does not know
        (NONE, NONE, 0o775, "", ""),
        (NONE, NONE, 0o777, "", "every user"),
    ],
)
def test_a_folder_must_belong_to_root_by_owner_mode_and_group(tmp_path, monkeypatch, user, group, mode, sudo, who):
    for name in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.setenv(name, str(sudo))
    # No other accounts, since nogroup may have more members.
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.getpwuid(0), pwd.getpwuid(NOBODY)])
    runs = tmp_path / "above" / "runs"
    runs.mkdir(parents=True)
    for folder in (runs, runs.parent):
        os.chown(folder, user, group)
        folder.chmod(mode)
        if who:
            with pytest.raises(UsageError, match=re.escape(f"{who} can change {folder}")):
                owners.check(runs)
            os.chown(folder, 0, 0)
            folder.chmod(0o755)
        else:
            owners.check(runs)


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="access control lists need Linux")
@pytest.mark.parametrize(
    ("tag", "who", "rights", "mask", "may"),
    [
        (owners.ACL_USER, NOBODY, 7, 7, True),
        (owners.ACL_USER, NOBODY, 7, 5, False),
        (owners.ACL_USER, NOBODY, 5, 7, False),
        (owners.ACL_USER, 0, 7, 7, False),
        (owners.ACL_GROUP, NOGROUP, 7, 7, True),
        (owners.ACL_GROUP, NONE, 7, 7, False),
    ],
)
def test_an_access_control_list_must_count(tmp_path, monkeypatch, tag, who, rights, mask, may):
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.getpwuid(0), pwd.getpwuid(NOBODY)])
    none = 0xFFFFFFFF
    entries = sorted([(1, 7, none), (tag, rights, who), (4, 5, none), (0x10, mask, none), (0x20, 5, none)])
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", value)
    except OSError:
        pytest.skip("the file system has no access control lists")
    with pytest.raises(UsageError, match="nobody") if may else contextlib.nullcontext():
        owners.check(tmp_path)


@needs_root
def test_members_listed_by_a_group_must_count(tmp_path, monkeypatch):
    group = grp.getgrgid(0)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((*group[:3], ["root", "gone", "nobody"])))
    os.chown(tmp_path, 0, NONE)
    tmp_path.chmod(0o770)
    with pytest.raises(UsageError, match="nobody"):
        owners.check(tmp_path)


@needs_root
def test_a_folder_created_meanwhile_by_another_user_must_be_refused(tmp_path):
    spec, paths = JobSpec(command=("-m", "app.train")), JobPaths(tmp_path / "runs" / "a-1")
    paths.root.parent.mkdir()
    os.chown(paths.root.parent, NOBODY, 0)
    with pytest.raises(UsageError, match="root cannot keep jobs in"):
        create(paths, spec)
    assert not paths.root.exists()


@pytest.fixture
def link(do, tmp_path):
    """A link that root owns, to root's own runs, in a folder where everyone can create files, like /tmp."""
    (tmp_path / "real" / "runs").mkdir(parents=True)
    create(JobPaths(tmp_path / "real" / "runs" / "a-1"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    path = tmp_path / "shared" / "link"
    path.symlink_to("../real")
    do.runs = path / "runs"
    return path


@needs_root
def test_a_link_owned_by_root_must_be_followed_once(do, tmp_path, link):
    assert do("rm", "a-1", "--dry-run") == (0, [f"folder {tmp_path}/real/runs/a-1"], [])
    do.engine.states = [runs_elsewhere(link / "runs" / "b-1", "b-1")]
    assert do("rm", "b-1", "--dry-run") == (0, [f"folder {tmp_path}/shared/link/runs/b-1"], [])


@needs_root
@pytest.mark.parametrize(("command", "by"), pairs(COMMANDS, ["its owner", "its folder", "another link"]))
def test_root_must_not_follow_a_link_of_another_account(do, tmp_path, link, command, by):
    theirs = link.parent if by == "its folder" else link
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    if by == "another link":
        do.runs = tmp_path / "ours"
        do.runs.symlink_to("shared/link/runs")
    code, out, err = do(*command)
    assert (code, out) == (2, [])
    assert err[0] == f"error: root cannot keep jobs in {do.runs}: nobody (user {NOBODY}) can change {theirs}"
    assert do.engine.calls == [] and os.listdir(tmp_path / "real" / "runs") == ["a-1"]


@needs_root
def test_a_link_created_meanwhile_must_not_be_followed(tmp_path, link):
    runs = owners.check(link.parent / "runs")
    assert runs == link.parent / "runs"  # which does not exist yet
    runs.symlink_to("../real")
    os.chown(runs, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UsageError, match="root cannot keep jobs in"):
        owners.make(runs)


@needs_root
def test_a_new_folder_that_everyone_can_change_must_be_refused(tmp_path):
    mask = os.umask(0)
    try:
        with pytest.raises(UsageError, match="every user can change"):
            owners.make(tmp_path / "runs")
    finally:
        os.umask(mask)


@pytest.mark.parametrize("path", ["a/to/b", "a/to/../b", "gone/../a/to", "a/./up/a", "a/all/etc", "new/one"])
def test_a_path_must_be_resolved_as_the_system_resolves_it(tmp_path, monkeypatch, path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, target in (("to", "../a"), ("up", ".."), ("all", "/")):
        (tmp_path / "a" / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    for given in (Path(path), tmp_path / path):
        assert owners.check(given) == given.resolve()


def test_users_other_than_root_must_not_be_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    owners.check(tmp_path)


IN_A_CONTAINER = """
import os, subprocess, sys
from pathlib import Path
from orchestrate.host import owners
if sys.argv[2]:
    subprocess.Popen(["sleep", "60"], user=int(sys.argv[2]))
try:
    owners.check(Path(sys.argv[1]))
    print("used")
except Exception as error:
    print(error)
"""


@needs_root
@pytest.mark.parametrize(
    ("ci", "contained", "other", "used"),
    [("true", True, "", True), ("", True, "", False), ("true", False, "", False), ("true", True, "65534", False)],
)
def test_a_folder_that_every_user_can_change_must_be_used_only_where_there_is_no_other(
    tmp_path, ci, contained, other, used
):
    """As in the containers of GitLab's runners, whose folders have the mode 0777."""
    (tmp_path / "builds" / "runs").mkdir(parents=True)
    (tmp_path / "builds").chmod(0o777)
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if contained else []
    command = [*namespace, sys.executable, "-c", IN_A_CONTAINER, str(tmp_path / "builds" / "runs"), other]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"CI": ci}, stdout=subprocess.PIPE, text=True)
    assert (done.stdout == "used\n") == used and (used or "every user can change" in done.stdout)


@needs_root
def test_circular_links_must_be_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a/c")
    with pytest.raises(OSError, match="Too many levels"):
        owners.check(tmp_path / "a")


@needs_root
@pytest.mark.parametrize("place", ["cache", "cache/orchestrate", "cache/orchestrate/sources"])
def test_a_cache_that_another_account_can_change_must_not_be_used(tmp_path, monkeypatch, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "orchestrate" / "sources").mkdir(parents=True)
    assert owners.cache("sources") == tmp_path / "cache" / "orchestrate" / "sources"
    os.chown(tmp_path / place, NOBODY, 0)
    with pytest.raises(UsageError) as error:
        owners.cache("sources")
    assert error.value.hint.startswith("set XDG_CACHE_HOME to a folder")


@pytest.mark.parametrize("mounted", ["scratch", "scratch/cache", "scratch/cache/orchestrate/sources"])
def test_a_cache_that_a_job_could_have_filled_must_not_be_used(tmp_path, monkeypatch, mounted):
    (tmp_path / "scratch" / "cache" / "orchestrate" / "sources").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scratch" / "cache"))
    assert owners.cache("sources") == tmp_path / "scratch" / "cache" / "orchestrate" / "sources"
    note([tmp_path / mounted])
    (tmp_path / "scratch").rename(tmp_path / "renamed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "renamed" / "cache"))
    with pytest.raises(UsageError, match="a job could put|could have been filled") as error:
        owners.cache("sources")
    assert error.value.hint.startswith("use one that is not below")


def test_a_link_must_not_be_used_as_a_cache(tmp_path, monkeypatch, do):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "orchestrate").mkdir(parents=True)
    (tmp_path / "victim" / "data").mkdir(parents=True)
    (tmp_path / "cache" / "orchestrate" / "data").symlink_to(tmp_path / "victim")
    assert do("prune", "--caches")[0] == 2 and (tmp_path / "victim" / "data").exists()


def test_a_cache_that_is_removed_while_a_run_waits_for_its_lock_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock, removed, flock = private.cache("data") / "set" / "lock", [], fcntl.flock

    def after_prune(file, how):
        if not removed:
            removed.append(shutil.rmtree(lock.parent))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_prune)
    with owners.filling("data", lock), lock.open() as file, pytest.raises(BlockingIOError):  # nobody else fills it
        flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert removed
