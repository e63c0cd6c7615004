"""URLs of Git repositories, and their errors."""

import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest
from support.commanded import create
from support.plans import HERE, plan

from orchestrate.errors import ResourceError, UsageError
from orchestrate.files import writable
from orchestrate.files.paths import JobPaths
from orchestrate.job import source, store
from orchestrate.job.layers import resolve
from orchestrate.job.spec import JobSpec


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "train.py").touch()
    subprocess.run(["git", "init", "--quiet"], cwd=there, check=True)
    commit(there)
    return there


def commit(repository: Path) -> None:
    """Commit all files."""
    who = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for arguments in ("add .", "commit --quiet --message x"):
        subprocess.run(["git", *arguments.split()], cwd=repository, env=os.environ | who, check=True)


@pytest.mark.parametrize(
    ("text", "url", "revision", "folder"),
    [
        ("git+https://host/a/b.git", "https://host/a/b.git", "HEAD", ""),
        ("git+https://me@host/a/b@v1", "https://me@host/a/b", "v1", ""),
        ("git+ssh://git@host/a@feature/x#sub/dir", "ssh://git@host/a", "feature/x", "sub/dir"),
        ("git+ssh://git@host:22/a", "ssh://git@host:22/a", "HEAD", ""),
        ("git+file:///a/b@abc", "file:///a/b", "abc", ""),
    ],
)
def test_a_url_must_be_split(text, url, revision, folder):
    assert source.parsed(text) == source.Repository(url, revision, folder)


@pytest.mark.parametrize("text", ["git+https://h/a#../b", "git+https://h/a#/b", "git+https://h/a@--upload-pack=x"])
def test_a_url_that_leads_elsewhere_must_be_refused(text):
    with pytest.raises(UsageError, match="source: "):
        source.parsed(text)


@pytest.mark.parametrize("text", ["git+ext::sh -c x", "git+http://me:pass@host/a", "git+/a/b", "git+git@host:a"])
def test_other_protocols_must_be_refused_without_repeating_a_password(text):
    with pytest.raises(UsageError, match="source must be") as caught:
        resolve({"source": text})
    assert "pass@" not in str(caught.value)


def test_a_folder_without_a_repository_must_have_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source.revision(tmp_path)() == source.changes(tmp_path) == ""


@pytest.mark.parametrize("url", ["git+https://me:pass@host/a", f"git+https://ghp_{'x' * 30}@host/a"])
def test_a_password_in_the_url_must_be_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="source: the URL contains a password or token") as caught:
        source.parsed(url)
    assert "pass@" not in str(caught.value) and "ghp_" not in str(caught.value)


def test_an_error_of_git_must_be_shown_without_its_advice(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'me@host: Permission denied (publickey).' >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_SSH_COMMAND", str(tmp_path / "ssh"))
    expected = r"publickey\)\.; fatal: Could not read from remote repository\.$"
    with pytest.raises(ResourceError, match=expected):
        source.check_out(source.parsed("git+ssh://me@host/a"))


def test_a_protocol_that_only_the_shell_allows_must_be_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "git")
    with pytest.raises(ResourceError, match="transport 'git' not allowed"):
        source.check_out(source.Repository("git://127.0.0.1:1/a", "HEAD", ""))


def test_changes_must_be_shown_as_the_environment_of_the_shell_configures_git(repository, monkeypatch):
    for name, value in (("COUNT", "1"), ("KEY_0", "diff.noprefix"), ("VALUE_0", "true")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    (repository / "train.py").write_text("x\n")
    assert "\n+++ train.py\n" in source.changes(repository)


def test_no_program_that_a_repository_names_must_run_to_show_its_changes(repository, tmp_path):
    (tmp_path / "evil.sh").write_text(f"#!/bin/sh\ntouch {tmp_path}/evil\n")
    (tmp_path / "evil.sh").chmod(0o755)
    (repository / ".git" / "info" / "attributes").write_text("* diff=x filter=x\n")
    with (repository / ".git" / "config").open("a") as config:
        for name in ("[diff]external", '[diff "x"]textconv', '[filter "x"]clean', "[core]fsmonitor"):
            config.write(f"{name} = {tmp_path}/evil.sh\n")
    (repository / "train.py").write_text("x\n")
    assert "\n+x\n" in source.changes(repository) and not (tmp_path / "evil").exists()


def test_the_index_of_a_repository_must_not_be_written(repository, tmp_path):
    """A job could put a link in its place, and git would write the index to its target."""
    (repository / ".git" / "index").rename(tmp_path / "index")
    (repository / ".git" / "index").symlink_to(tmp_path / "index")
    os.utime(repository / "train.py", (1, 1))  # so that git would note the new time
    before = (tmp_path / "index").stat()
    assert len(source.revision(repository)()) == 40 and source.changes(repository) == ""
    assert (tmp_path / "index").stat() == before


@pytest.mark.parametrize("linked", [".git", ".git/objects"])
def test_a_repository_that_a_job_could_write_must_not_be_fetched(repository, tmp_path, monkeypatch, linked):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ours = tmp_path / "mine" / "repo"
    shutil.copytree(repository, ours)
    shutil.rmtree(ours / linked)
    (ours / linked).symlink_to(repository / linked)
    writable.note([tmp_path / "mine"])
    with pytest.raises(UsageError, match=f" {tmp_path}/mine, where a job "):
        source.check_out(source.parsed(f"git+file://{ours}"))


def test_a_configuration_that_changes_meanwhile_must_not_count(repository, tmp_path, monkeypatch):
    """A job that can write to the repository could name a program just when git looks again."""
    (repository / ".git" / "info" / "attributes").write_text("* filter=x\n")
    (tmp_path / "git").write_text(
        f"""#!/bin/sh
{shutil.which("git")} "$@"; code=$?
printf '[filter "x"]\n clean = "touch {tmp_path}/evil; cat"\n' >> {repository}/.git/config
exit $code
"""
    )
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (repository / "train.py").write_text("x\n")
    assert source.revision(repository)().endswith("-dirty") and "\n+x\n" in source.changes(repository)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", ["sha1", "sha256", "worktree", "subfolder", "split index", "touched"])
def test_the_commit_must_be_known_and_whether_tracked_files_are_changed(repository, tmp_path, kind):
    git = ["git", "-C", str(repository)]
    if kind == "sha256":
        shutil.rmtree(repository / ".git")
        subprocess.run(["git", "init", "--quiet", "--object-format=sha256"], cwd=repository, check=True)
        commit(repository)
    (repository / "deep").mkdir()
    folder = {"worktree": tmp_path / "tree", "subfolder": repository / "deep"}.get(kind, repository)
    if kind == "worktree":
        subprocess.run([*git, "worktree", "add", "--quiet", str(folder)], check=True)
    if kind == "split index":
        subprocess.run([*git, "update-index", "--split-index"], check=True)
    file = (folder if kind == "worktree" else repository) / "train.py"
    if kind == "touched":
        os.utime(file, (1, 1))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    (repository / "new.txt").touch()
    assert source.revision(folder)() == head and source.changes(folder) == ""
    file.write_text("x\n")
    assert source.revision(folder)() == f"{head}-dirty" and "\n+x\n" in source.changes(folder)


def test_lines_that_git_converts_and_a_changed_mode_must_count_as_git_counts_them(repository):
    git = ["git", "-C", str(repository)]
    (repository / "lines.txt").write_bytes(b"a\n")
    commit(repository)
    subprocess.run([*git, "config", "core.autocrlf", "true"], check=True)
    (repository / "lines.txt").write_bytes(b"a\r\n")
    assert not source.revision(repository)().endswith("-dirty")
    (repository / "train.py").chmod(0o755)
    assert source.revision(repository)().endswith("-dirty")
    subprocess.run([*git, "config", "core.filemode", "false"], check=True)
    assert not source.revision(repository)().endswith("-dirty")


def test_a_cache_that_cannot_be_used_and_a_missing_git_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ResourceError, match="source: no git command on PATH"):
        source.check_out(repository := source.parsed("git+https://host/a"))
    shutil.rmtree(repository.cache)
    repository.cache.touch()
    with pytest.raises(ResourceError, match=f"source: cannot write to {repository.cache}: "):
        source.check_out(repository)


def test_changes_must_be_kept_without_secrets_and_up_to_a_limit(repository, tmp_path):
    (repository / "train.py").write_text("login('hunter22')\n" + "x\n" * source.MAX_CHANGES)
    paths, spec = create(JobPaths(tmp_path / "a-1")), JobSpec(env={"A_TOKEN": "hunter22"})
    store.keep_changes(spec, plan(spec, HERE.but(code=str(repository), revision="a-dirty"), "a-1"), paths)
    text = paths.patch.read_text()
    assert "\n+login('***')\n" in text and text.endswith("\n(and more)\n")
    assert len(text) < source.MAX_CHANGES + 100
    store.keep_changes(spec, plan(spec, HERE.but(code=str(repository), revision="a"), "a-1"), paths)
    assert not paths.patch.exists()


def test_what_an_interrupted_checkout_has_left_must_not_prevent_a_later_one(repository):
    where = source.parsed(f"git+file://{repository}")
    folder = source.check_out(where)
    (folder.parent / f".{folder.name}").mkdir()  # as if this run had ended before it renamed the folder
    (folder.parent / f".{folder.name}" / "half").touch()
    shutil.rmtree(folder)
    assert source.check_out(where) == folder and os.listdir(folder) == ["train.py"]


def test_a_folder_of_a_repository_that_is_a_link_to_elsewhere_must_be_refused(repository):
    (repository / "src").symlink_to("/etc")
    commit(repository)
    with pytest.raises(UsageError, match="src leads out of the repository"):
        source.enter(JobSpec(source=f"git+file://{repository}#src"))


def test_changes_must_be_those_of_the_repository_and_not_of_a_folder_that_it_names(repository, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "train.py").write_text("the host's\n")
    with (repository / ".git" / "config").open("a") as config:
        config.write(f"[core]\n worktree = {tmp_path}/secret\n")
    assert source.changes(repository) == ""
    (repository / "train.py").write_text("mine\n")
    assert "+mine\n" in (found := source.changes(repository)) and "host" not in found
    assert source.revision(repository)().endswith("-dirty")


def test_a_large_difference_must_not_be_read_whole(repository, tmp_path):
    (repository / "train.py").write_bytes(b"x\n" * (32 << 20))
    tracemalloc.start()
    assert len(source.changes(repository)) < source.MAX_CHANGES + 100
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * source.MAX_CHANGES
