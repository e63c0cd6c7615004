"""Parts of the code folder that nodes must not see: run directories, .git, and what .dockerignore names."""

import os
import pwd
import subprocess
from pathlib import Path

import pytest
from support.ends import listening

from orchestrate.engines.docker import mounts as mounts_module
from orchestrate.engines.docker.mounts import check_link, check_script, masks
from orchestrate.engines.swarm.upload import code_files
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import mountinfo, private, records
from orchestrate.node.trees import identity
from orchestrate.record.paths import JobPaths

TREE = (
    ".env",
    ".git/config",
    ".venv/lib/torch.py",
    "data/raw/large",
    "data/small",
    "logs/1.log",
    "runs/a-1/plan.json",
    "src/keys/a.pem",
    "src/keys/b.pub",
    "src/train.py",
    "src/__pycache__/train.pyc",
    "train.py",
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of code."""
    folder = tmp_path / "code"
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def hidden(code: Path, ignore: str = "", runs: str = "runs") -> set[str]:
    """The hidden paths; those of folders end with a slash."""
    if ignore:
        (code / ".dockerignore").write_text(ignore)
    found = masks(code, (code / runs).resolve(), "/workspace")
    for mount in found:
        assert mount["read_only"] and mount["target"].startswith("/workspace/")
        assert mount.get("tmpfs") == {"size": 4096, "mode": 0o555} or mount["source"] == os.devnull
    names = {mount["target"].removeprefix("/workspace/"): "/" * (mount["type"] == "tmpfs") for mount in found}
    return {name + slash for name, slash in names.items()}


@pytest.mark.parametrize(
    ("ignore", "more"),
    [
        ("", set()),
        ("# nothing\n\n   \n", set()),
        ("none\n", set()),
        (".venv\ndata/\n/.env\n", {".venv/", "data/", ".env"}),
        ("data\ndata/raw\n", {"data/"}),
        ("data/*\n", {"data/raw/", "data/small"}),
        ("*.env\n*.pem\n", {".env"}),  # as Docker reads it: in this folder alone
        ("**/*.pem\n", {"src/keys/a.pem"}),
        ("src/keys\n!src/keys/b.pub\n", {"src/keys/a.pem"}),
        ("data\n!data\n", set()),
        ("**/__pycache__\n*.pyc\n**/*.py[cod]\n", set()),
        (".git\nruns\n", set()),
    ],
)
def test_files_that_are_not_code_must_be_hidden(code, ignore, more):
    assert hidden(code, ignore) == {".git/", "runs/"} | more


def test_what_is_never_shown_must_also_be_hidden_in_the_folder_in_which_workers_start(code):
    for name in ("src/runs", "data/runs", "src/.git"):
        (code / name).mkdir(parents=True)
    assert mounts_module.hidden(code, code / "runs", "src") == [".git", "runs", "src/.git", "src/runs"]


def test_only_existing_paths_must_be_hidden_but_run_directories_always(code):
    assert hidden(code, runs="src/jobs") == {".git/", "runs/", "src/jobs/"}  # which may be created later
    (code / "src" / "jobs").mkdir()
    assert hidden(code, runs="src/jobs") == {".git/", "runs/", "src/jobs/"}
    assert hidden(code, runs="../elsewhere") == {".git/", "runs/"}
    (code / "src-2").touch()
    hidden_too = {".git/", "runs/", "src/", "src-2"}
    assert hidden(code, "src\nsrc-2\nsrc2\n", runs="src/jobs") == hidden_too  # which hides the runs in it
    (code / ".dockerignore").unlink()
    (code / ".git" / "config").unlink()
    (code / ".git").rmdir()
    (code / ".git").write_text("gitdir: ../main/.git/worktrees/code")
    assert hidden(code) == {".git", "runs/"}


def test_records_of_jobs_must_be_hidden_wherever_they_are(code, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(code / "data"))
    assert hidden(code) == {".git/", "runs/"}
    (code / "data" / "orchestrate").mkdir()
    assert hidden(code) == {".git/", "runs/", "data/orchestrate/"}
    monkeypatch.setenv("HOME", str(code / "src"))
    (code / "elsewhere" / "orchestrate").mkdir(parents=True)
    (code / "src" / ".local").mkdir()
    (code / "src" / ".local" / "state").symlink_to(code / "elsewhere")
    assert hidden(code) == {".git/", "runs/", "data/orchestrate/", "elsewhere/orchestrate/"}
    with pytest.raises(UsageError, match="contains keys and secrets of jobs"):
        masks(code / "data" / "orchestrate", code / "runs", "/workspace")


def test_records_of_other_accounts_must_also_be_hidden(code, monkeypatch):
    account = pwd.struct_passwd(("ada", "x", os.getuid(), 4242, "", str(code / "src"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [account])
    monkeypatch.setattr(private, "TEMPORARY", code / "data")
    (code / "src" / ".local" / "state" / "orchestrate").mkdir(parents=True)
    (code / "data" / "orchestrate-4242").mkdir()
    theirs = {"src/.local/state/orchestrate/", "data/orchestrate-4242/"}
    assert hidden(code) >= {".git/", "runs/"} | theirs


def test_other_accounts_must_not_decide_what_is_hidden(code, monkeypatch):
    homes = code.parent / "homes"
    account = pwd.struct_passwd(("eve", "x", 4242, 4242, "", str(homes), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [account])
    monkeypatch.setattr(private, "TEMPORARY", homes)
    (homes / ".local").mkdir(parents=True)
    (homes / ".local" / "state").symlink_to(code / "src")
    (homes / "orchestrate-4242").symlink_to(code / "data")
    (code / "src" / "orchestrate").mkdir()
    assert hidden(code) == {".git/", "runs/"}
    assert masks(code / "src" / "orchestrate", code / "runs", "/workspace") == []
    assert masks(code / "data", code / "runs", "/workspace") == []


def test_folders_in_tmp_must_not_be_listed_for_code_elsewhere(code, monkeypatch):
    (others := code.parent / "others").mkdir()
    for number in range(100):
        (others / f"orchestrate-4242-{number}").mkdir()
    monkeypatch.setattr(private, "TEMPORARY", others)
    found = {path for path in records.kept(code) if path.is_relative_to(others)}
    assert found <= {others / f"orchestrate-{os.geteuid()}" / "records"}
    assert {others / "orchestrate-4242-1", others / "orchestrate-4242-99"} <= records.kept(others)


def test_sockets_and_pipes_of_this_machine_must_be_hidden_from_nodes(code, tmp_path, monkeypatch):
    os.mkfifo(code / "src" / "pipe")
    listening(code, "agent.sock").close()
    listening(code / "data", "hidden.sock").close()
    (code / ".dockerignore").write_text("data\n")
    (code / "way").symlink_to("agent.sock")
    run = tmp_path / "elsewhere" / "a-1" / "job"
    doors = [mount for mount in mounts_module.node_mounts(run, code) if mount.get("source") == os.devnull]
    assert [mount["target"] for mount in doors] == ["/workspace/agent.sock", "/workspace/src/pipe"]
    monkeypatch.setattr(mounts_module, "MAX_MASKS", 4)
    with pytest.raises(UsageError, match=f"{code} has more than 4 sockets, pipes, run directories and files to hide"):
        mounts_module.node_mounts(run, code)
    (code / ".dockerignore").write_text("src\nlogs\n.env\n.venv\n")  # more than allowed, with .git
    with pytest.raises(UsageError, match=f"{code} has more than 4 sockets, pipes, run directories and files to hide"):
        mounts_module.node_mounts(run, code)


def test_run_directories_must_be_hidden_wherever_they_are(code, tmp_path):
    for name in ("plan.json", "job.yaml", "events.jsonl"):
        for folder in ("src/old/a-1", "data/b-2"):
            (code / folder).mkdir(parents=True, exist_ok=True)
            (code / folder / name).touch()
    found = mounts_module.node_mounts(tmp_path / "elsewhere" / "a-1" / "job", code)
    wanted = {"/workspace/.git", "/workspace/runs", "/workspace/src/old/a-1", "/workspace/data/b-2"}
    assert {mount["target"] for mount in found if mount["type"] == "tmpfs"} == wanted
    sent = {str(path.relative_to(code)) for path in code_files(code, tmp_path / "elsewhere")}
    assert "data/small" in sent and not any("a-1" in name or "b-2" in name for name in sent)


def test_only_a_limited_number_of_files_must_be_checked_for_pipes(code, monkeypatch):
    for number in range(40):
        os.mkfifo(code / ("src" if number % 2 else "data") / f"pipe-{number}")
    monkeypatch.setattr(mounts_module, "MAX_ENTRIES", 30)
    assert 0 < len([*mounts_module.special(code, ())]) < 30


def test_pipes_must_be_looked_for_in_all_folders_before_those_in_them(code, monkeypatch):
    for name in ("src/keys", "data/raw"):
        os.mkfifo((code / name).parent / "pipe")
        for number in range(40):
            (code / name / str(number)).touch()
    monkeypatch.setattr(mounts_module, "MAX_ENTRIES", 40)
    assert {name for name, _ in mounts_module.special(code, ())} == {"src/pipe", "data/pipe"}


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to mount a folder")
def test_a_hidden_folder_must_be_hidden_at_each_of_its_paths(code, tmp_path, monkeypatch):
    source = tmp_path / "home"
    (source / "state" / "orchestrate").mkdir(parents=True)
    (source / "runs").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(source / "state"))
    subprocess.run(["mount", "--bind", source, code / "data"], check=True)
    try:
        assert hidden(code, runs=str(source / "runs")) == {".git/", "runs/", "data/runs/", "data/state/orchestrate/"}
        with pytest.raises(UsageError, match="contains keys and secrets of jobs"):
            masks(code / "data" / "state" / "orchestrate", code / "runs", "/workspace")
        assert not any("orchestrate" in path.parts for path in code_files(code, source / "runs"))
    finally:
        subprocess.run(["umount", code / "data"], check=True)


def test_kernel_file_systems_must_be_hidden_and_refused_as_code(code, tmp_path, monkeypatch):
    rows = [
        f"1 2 0:3 / {code}/src/a\\040b/proc rw - proc proc rw",
        f"2 2 0:4 / {code}/data rw shared:1 - ext4 /dev/sda rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join([*rows, "3 2 0:5 / /somewhere/proc rw - proc proc rw"]))
    monkeypatch.setattr(mountinfo, "FILE", tmp_path / "mountinfo")
    (code / "src" / "a b" / "proc").mkdir(parents=True)
    assert hidden(code) == {".git/", "runs/", "src/a b/proc/"}
    for inside in (Path("/"), Path("/somewhere/proc"), Path("/somewhere/proc/sys")):
        with pytest.raises(UsageError, match=f"{inside} cannot be the code folder"):
            masks(inside, code / "runs", "/workspace")


def test_of_mounts_on_top_of_each_other_only_the_last_must_count(code, tmp_path, monkeypatch):
    """For example /dev/shm on /dev; a mount that another one covers does not count."""
    rows = [
        f"1 2 0:3 / {tmp_path} rw - devtmpfs none rw",
        f"2 2 0:4 / {code} rw - tmpfs none rw",
        f"3 2 0:5 / {code}/data rw - proc proc rw",
        f"4 2 0:6 / {code}/data rw - tmpfs none rw",
        f"5 2 0:7 / {code}/gone/proc rw - proc proc rw",
        f"6 2 0:8 / {code}/src rw - autofs systemd-1 rw",
        f"7 2 0:9 / {code}/logs rw - tmpfs none rw",
        f"8 2 0:3 / {code}/logs rw - sysfs none rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(rows))
    monkeypatch.setattr(mountinfo, "FILE", tmp_path / "mountinfo")
    assert hidden(code) == {".git/", "runs/", "logs/"}
    with pytest.raises(UsageError, match="it is a system folder"):
        masks(code / "logs", tmp_path / "runs", "/workspace")


def test_a_link_must_not_be_hidden_since_a_mount_would_cover_its_target(code):
    (code / "data" / "link").symlink_to("../train.py")
    (code / "shortcut").symlink_to("src")
    assert hidden(code, "data/link\nshortcut\n") == {".git/", "runs/"}


def test_run_directories_directly_in_the_code_folder_must_be_refused(code):
    with pytest.raises(UsageError, match=f"{code} is the code folder") as error:
        masks(code, code, "/workspace")
    assert error.value.hint == "use --runs runs"


def test_more_hidden_paths_than_a_node_can_have_must_be_refused(code, monkeypatch):
    monkeypatch.setattr(mounts_module, "MAX_MASKS", 2)
    assert len(hidden(code, ".env\ndata\n")) == 4  # including runs and .git, which do not count
    with pytest.raises(UsageError, match=f".dockerignore excludes more than 2 files and folders of {code}"):
        hidden(code, ".env\ndata\nlogs\n")


@pytest.mark.parametrize(
    ("ignore", "command", "name"),
    [
        ("*\n", ("train.py",), "train.py"),
        ("src\n", ("src/train.py", "--lr", "1"), "src"),
        ("**/*.py\n", ("-m", "src.train"), "src/train.py"),
        ("src\n", ("-m", "src"), "src"),
        ("train.py\n", ("bash", "-x", "train.py"), "train.py"),
        ("src\n", ("./src/train.sh",), "src"),
        ("", ("runs/a-1/plan.json",), "runs"),
    ],
)
def test_a_script_that_is_hidden_from_nodes_must_be_refused(code, ignore, command, name):
    (code / ".dockerignore").write_text(ignore)
    with pytest.raises(UsageError, match=f"nodes cannot see the script: {name} is hidden") as error:
        check_script(masks(code, code / "runs", "/workspace"), command)
    assert ".dockerignore" in error.value.hint


def test_a_script_next_to_hidden_files_must_be_accepted(code):
    (code / ".dockerignore").write_text("data\ntrain\n")
    (code / "train").mkdir()
    for command in (("train.py",), ("train.py", "data/small"), ("-m", "app.train")):  # a module may be installed
        check_script(masks(code, code / "runs", "/workspace"), command)
    (code / ".dockerignore").write_text("*\n!src/train.py\n")
    check_script(masks(code, code / "runs", "/workspace"), ("-m", "src.train"))


def test_folders_must_be_identified_by_device_and_inode_and_a_replaced_run_directory_refused(tmp_path, monkeypatch):
    paths, code = JobPaths(tmp_path / "runs" / "a-1"), tmp_path / "code"
    paths.create()
    code.mkdir()
    wanted = {"/job": identity(paths.shared.stat()), "/workspace": identity(code.stat())}
    assert wanted["/job"] == f"{paths.shared.stat().st_dev}:{paths.shared.stat().st_ino}"
    assert mounts_module.identities(paths.shared, code) == wanted
    monkeypatch.chdir(code)
    code.rename(tmp_path / "moved")
    (tmp_path / "code").symlink_to(tmp_path)
    assert mounts_module.identities(paths.shared, Path.cwd()) == wanted  # the working directory of this process
    paths.root.rename(tmp_path / "runs" / "mine")
    paths.shared.mkdir(parents=True)
    with pytest.raises(EngineError, match="not created by this account"):
        mounts_module.identities(paths.shared, code)


@pytest.mark.parametrize(
    ("link", "target", "follows"),
    [
        ("train.py", "src/main.py", True),
        ("a/train.py", "../src/main.py", True),
        ("train.py", "{code}/src/main.py", False),
        ("train.py", "../main.py", False),
        ("train.py", "loop.py", False),
    ],
)
def test_a_script_that_is_a_link_must_be_one_that_nodes_can_follow(tmp_path, link, target, follows):
    code = tmp_path / "code"
    for path in (code / "src" / "main.py", code / "a" / "x", tmp_path / "main.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (code / "loop.py").symlink_to("/none/loop.py")
    (code / link).symlink_to(target.format(code=code))
    if follows:
        check_link(link, code)
        check_link("src/main.py", code)
    else:
        with pytest.raises(UsageError, match=f"nodes cannot follow the link {link} to ") as error:
            check_link(link, code)
        assert "ln -sr" in error.value.hint
