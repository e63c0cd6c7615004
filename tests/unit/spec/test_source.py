"""URLs of Git repositories, and their errors."""

import contextlib
import os
import random
import shutil
import subprocess
from urllib.parse import quote

import pytest
from support.repositories import commit

from orchestrate.errors import ResourceError, UsageError
from orchestrate.host import writable
from orchestrate.spec import source
from orchestrate.spec.layers import resolve
from orchestrate.spec.spec import JobSpec


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


@pytest.mark.parametrize("host", ["localhost", "elsewhere", "[::1"])
def test_a_host_that_git_would_ignore_must_be_refused(host):
    with pytest.raises(UsageError, match="source: a file:// URL has no host"):
        source.parsed(f"git+file://{host}/a/b")


@pytest.mark.parametrize("text", ["git+ext::sh -c x", "git+http://me:pass@host/a", "git+/a/b", "git+git@host:a"])
def test_other_protocols_must_be_refused_without_repeating_a_password(text):
    with pytest.raises(UsageError, match="source must be") as caught:
        resolve({"source": text})
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("user", ["me:pass", f"ghp_{'x' * 30}", "glpat-abcdefghijklmnop", "ghp_0123456789abcde"])
def test_a_password_in_the_url_must_be_refused_and_not_repeated(user):
    with pytest.raises(UsageError, match="source: the URL contains a password or token") as caught:
        source.parsed(f"git+https://{user}@host/a")
    assert user not in str(caught.value)


def test_an_error_of_git_must_be_shown_without_its_advice(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'me@host: Permission denied (publickey).' >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_SSH_COMMAND", str(tmp_path / "ssh"))
    expected = r"publickey\)\.; fatal: Could not read from remote repository\.(\n|$)"
    with pytest.raises(ResourceError, match=expected):
        source.check_out(source.parsed("git+ssh://me@host/a"))


def test_a_protocol_that_only_the_shell_allows_must_be_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "git")
    with pytest.raises(ResourceError, match="transport 'git' not allowed"):
        source.check_out(source.Repository("git://127.0.0.1:1/a", "HEAD", ""))


@pytest.mark.parametrize("name", [b"\xff", "ü".encode(), b"a%41 b"])
@pytest.mark.parametrize("links", [True, False])
def test_git_must_read_the_path_that_was_checked(repository, tmp_path, monkeypatch, name, links):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = os.fsencode(tmp_path / "mine") + b"/" + name
    os.mkdir(tmp_path / "mine")
    if links:
        os.symlink(repository, path)
        writable.note([tmp_path / "mine"])
    else:
        shutil.copytree(repository, os.fsdecode(path))
    where = source.parsed(f"git+file://{quote(path)}")
    with pytest.raises(UsageError, match="/mine") if links else contextlib.nullcontext():
        assert source.check_out(where).is_dir()


def test_a_path_with_a_null_must_be_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="names no path"):
        source.check_out(source.parsed(f"git+file://{tmp_path}%00/x"))


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


@pytest.mark.parametrize("way", [".git", "alternates", "commondir", "objects", "pack", "loose"])
def test_a_folder_that_leads_to_another_repository_must_be_refused(repository, tmp_path, way):
    theirs = tmp_path / "theirs"
    git, of = theirs / ".git", repository / ".git"
    if way == ".git":
        theirs.mkdir()
        git.write_text(f"gitdir: {of}\n")
    else:
        subprocess.run(["git", "init", "-q", theirs], check=True)
    if way == "alternates":
        (git / "objects" / "info" / "alternates").write_text(f"{of}/objects\n")
    elif way == "commondir":
        (git / "commondir").write_text(f"{of}\n")
    elif way == "loose":
        (git / "objects" / "ab").symlink_to(next((of / "objects").glob("[0-9a-f][0-9a-f]")))
    elif way != ".git":
        path = git / "objects" if way == "objects" else git / "objects" / "pack"
        shutil.rmtree(path)
        path.symlink_to(of / "objects")
    with pytest.raises(UsageError, match=f"{theirs} has parts of the repository of another folder"):
        source.check_out(source.parsed(f"git+file://{theirs}"))


@pytest.mark.parametrize("way", ["bare links", "bare commondir", "foreign commondir", "loose objects", "refs"])
def test_a_repository_must_not_be_made_of_parts_of_another_one(repository, tmp_path, way):
    of, theirs = repository / ".git", tmp_path / "theirs"
    git = theirs if way.startswith("bare") else theirs / (".git" if way in ("loose objects", "refs") else "meta")
    git.mkdir(parents=True)
    shutil.copy(of / "HEAD", git)
    if way.endswith("commondir"):
        (git / "commondir").write_text(f"{of}\n")
        if git.name == "meta":
            (theirs / ".git").write_text("gitdir: meta\n")
            (git / "gitdir").write_text("../.git\n")
    elif way == "bare links":
        for name in ("objects", "refs"):
            (git / name).symlink_to(of / name)
    else:
        for name in ("objects", "refs"):
            shutil.copytree(of / name, git / name)
        path = next((git / "objects").glob("??/*" if way == "loose objects" else "../refs/heads/*"))
        path.unlink()
        path.symlink_to(of / path.relative_to(git))
    with pytest.raises(UsageError, match=f"{theirs} has parts of the repository of another folder"):
        source.check_out(source.parsed(f"git+file://{theirs}"))


def test_a_linked_working_tree_and_a_bare_repository_must_be_sources(repository, tmp_path):
    subprocess.run(["git", "worktree", "add", "-q", tmp_path / "tree"], cwd=repository, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", "--no-hardlinks", repository, tmp_path / "bare"], check=True)
    for name in ("tree", "bare"):
        assert os.listdir(source.check_out(source.parsed(f"git+file://{tmp_path / name}"))) == ["train.py"]


def test_a_cache_that_cannot_be_used_and_a_missing_git_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ResourceError, match="source: no git command on PATH"):
        source.check_out(repository := source.parsed("git+https://host/a"))
    shutil.rmtree(repository.cache)
    repository.cache.touch()
    with pytest.raises(ResourceError, match=f"source: cannot write to {repository.cache}: "):
        source.check_out(repository)


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


def test_a_revision_with_too_many_files_must_be_refused_before_they_are_created(repository, monkeypatch):
    monkeypatch.setattr(source, "MAX_FILES", 3)
    for number in range(4):
        (repository / f"{number}.py").touch()
    commit(repository)
    with pytest.raises(ResourceError, match="has more than 3 files"):
        source.check_out(source.parsed(f"git+file://{repository}"))


def test_a_revision_with_too_many_bytes_must_be_refused_before_they_are_written(repository, monkeypatch):
    monkeypatch.setattr(source, "MAX_BYTES", 1 << 30)
    (repository / "empty.bin").touch()
    os.truncate(repository / "empty.bin", 300 << 20)
    for number in range(4):
        os.link(repository / "empty.bin", repository / f"{number}.bin")
    commit(repository)
    with pytest.raises(ResourceError, match="has more than 200,000 files, 1 GiB, or "):
        source.check_out(source.parsed(f"git+file://{repository}"))


def test_an_interrupted_checkout_must_leave_no_files(repository, tmp_path, monkeypatch):
    (repository / "train.py").write_text("x")
    commit(repository)
    where = source.parsed(f"git+file://{repository}")
    monkeypatch.setattr(source, "FETCH_TIMEOUT", 5.0)
    (tmp_path / "smudge").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "smudge").chmod(0o755)
    (repository / ".gitattributes").write_text("train.py filter=slow\n")
    commit(repository)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "filter.slow.smudge")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(tmp_path / "smudge"))
    with pytest.raises(ResourceError, match="git did not finish within 5 s"):
        source.check_out(where)
    assert [path.name for path in where.cache.iterdir()] == ["lock"]


def test_a_checkout_must_not_be_larger_than_the_files_of_its_revision(repository):
    (repository / ".gitattributes").write_text("*.txt ident\n")
    (repository / "a.txt").write_text("$Id$\n" * 1000)
    commit(repository)
    assert (source.check_out(source.parsed(f"git+file://{repository}")) / "a.txt").stat().st_size == 5000


@pytest.mark.parametrize("limit", ["-v 200000", "-f 2048"])
def test_git_must_have_limits_of_memory_and_of_a_file_and_leave_nothing_if_it_exceeds_them(
    repository, monkeypatch, limit
):
    monkeypatch.setattr(source, "LIMITED", ("sh", "-c", f'ulimit {limit}; exec "$@"', "sh"))
    (repository / "large.bin").write_bytes(random.Random(1).randbytes(3 << 20))
    os.truncate(repository / "large.bin", 300 << 20)
    commit(repository)
    where = source.parsed(f"git+file://{repository}")
    with pytest.raises(ResourceError, match="source: git: "):
        source.check_out(where)
    assert [path.name for path in where.cache.iterdir()] == ["lock"]


@pytest.mark.parametrize("way", ["beside .git", "no refs", "suffix", "carriage return"])
def test_git_must_read_no_other_folder_than_the_one_that_was_checked(repository, tmp_path, way):
    """It looks for a repository in several places, and ends a line at a carriage return."""
    of, theirs = repository / ".git", tmp_path / "theirs"
    for name in ("objects", "refs"):
        (theirs / name if way == "suffix" else theirs / ".git" / name).mkdir(parents=True)
    if way == "no refs":
        (theirs / ".git" / "refs").rmdir()
    if way in ("beside .git", "no refs"):
        shutil.copy(of / "HEAD", theirs)
        (theirs / "config").write_text("[core]\n")
        for name in ("objects", "refs"):
            (theirs / name).symlink_to(of / name)
    elif way == "suffix":
        (tmp_path / "theirs.git").symlink_to(of)
    else:
        shutil.rmtree(theirs / ".git")
        (tmp_path / "repo").symlink_to(of)
        git = tmp_path / "repo\r" / "worktrees" / "w"
        git.mkdir(parents=True)
        for name in ("objects", "refs"):
            (tmp_path / "repo\r" / name).mkdir()
        shutil.copy(of / "HEAD", git)
        (git / "gitdir").write_text(f"{theirs}/.git\n")
        (git / "commondir").write_text(f"{tmp_path}/repo\r\n")
        (theirs / ".git").write_text(f"gitdir: {git}\n")
    with pytest.raises((UsageError, ResourceError), match=r"source: (git: |/.* has parts of |/.* cannot be read)"):
        source.check_out(source.parsed(f"git+file://{theirs}"))
