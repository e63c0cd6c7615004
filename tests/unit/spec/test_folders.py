"""Folders that a job names: data and mounts, and what may not be mounted."""

import os
import re
import socket
from pathlib import Path

import pytest
from support.commanded import create

from orchestrate.cli.arguments import flags, parse
from orchestrate.engines.docker import folders, mounts, packages
from orchestrate.engines.docker.services import Services
from orchestrate.errors import ResourceError, UsageError
from orchestrate.host import mountinfo, writable
from orchestrate.record.paths import JobPaths
from orchestrate.spec import folders as job_folders
from orchestrate.spec import requirements, secret_files, source
from orchestrate.spec.folders import cached_data, data_folders, with_absolute, without_stores
from orchestrate.spec.layers import resolve
from orchestrate.spec.spec import JobSpec


def mounted(spec: dict, runs: Path) -> list[dict]:
    return folders.given_mounts(with_absolute(resolve({"user": "root", **spec} if not os.geteuid() else spec)), runs)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"mounts": "/:/x"}, "/ cannot be mounted: it is a system folder"),
        ({"mounts": "/proc/self:/x"}, "cannot be mounted: it is a system folder"),
        ({"mounts": "/run:/x"}, "/run cannot be mounted: it is a system folder"),
        ({"mounts": "/dev/null:/x"}, "/dev/null cannot be mounted: it is a system folder"),
        ({"mounts": "/boot:/x"}, "/boot cannot be mounted: it is a system folder"),
        ({"mounts": "none:/x"}, "none: No such file or directory"),
        ({"mounts": "data:/"}, "data cannot be mounted at /: that path is in use"),
        ({"mounts": "data:/job/x"}, "data cannot be mounted at /job/x: that path is in use"),
        ({"mounts": "data:/workspace"}, "data cannot be mounted at /workspace: that path is in use"),
        ({"mounts": "data:/run/secrets"}, "data cannot be mounted at /run/secrets: that path is in use"),
        ({"mounts": "data:/tmp/x"}, "data cannot be mounted at /tmp/x: that path is in use"),
        ({"mounts": "data:/opt"}, "data cannot be mounted at /opt: that path is in use"),
        ({"mounts": "data:/x/../etc"}, "data cannot be mounted at /etc: that path is in use"),
        ({"mounts": "data:/usr/lib"}, "data cannot be mounted at /usr/lib: that path is in use"),
        *(
            ({"mounts": f"data:{path}"}, f"data cannot be mounted at {path}: that path is in use")
            for path in ("/proc/x", "/sys", "/dev", "/var/run", "/lib", "/lib64", "/bin", "/sbin", "/opt/orchestrate")
        ),
        ({"mounts": ["data:/x", "data:/x"]}, "two folders are mounted at /x"),
        ({"mounts": ["data:/x", "data:/x/y"]}, "two folders are mounted at /x and /x/y, one inside the other"),
        ({"mounts": ["data:/x/y", "data:/x"]}, "two folders are mounted at /x/y and /x, one inside the other"),
        ({"data": {"a": "data"}, "mounts": "data:/data"}, "mounted at /data/a and /data, one inside the other"),
        ({"data": {"a": "data"}, "mounts": "data:/data/a"}, "two folders are mounted at /data/a"),
        ({"mounts": "runs:/x"}, "runs cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "runs/j-1:/x"}, "j-1 cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": ".:/x"}, "cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "state/orchestrate:/x"}, "cannot be mounted: it has files of jobs, which may contain secrets"),
        ({"mounts": "runs/j-1/job/link:/x"}, "link leads to "),
        ({"mounts": "runs/j-1/job/other:/x"}, "other leads to "),
        ({"mounts": "pipe:/x"}, "pipe cannot be mounted: it is neither a folder nor a file"),
        ({"mounts": f"{'x' * 300}:/x"}, "x: File name too long"),
        ({"data": {"train": "none"}}, "none: No such file"),
        ({"data": {"train": "data/a"}}, "a is not a folder"),
        ({"data": {"a-b": "data"}}, "data must be a mapping of names to folders"),
        ({"data": {"a": "data", "A": "data"}}, "data must be a mapping of names to folders"),
        ({"data": {"a": ""}}, "data must be a mapping of names to folders"),
        ({"data": {"a": "data\n"}}, "data must be a mapping of names to folders"),
        ({"mounts": ["data"]}, "mounts must be a list of mounts"),
        ({"mounts": "data:x"}, "mounts must be a list of mounts"),
        ({"mounts": "data:/x:wr"}, "mounts must be a list of mounts"),
    ],
)
def test_what_may_not_be_mounted_must_be_refused(tmp_path, monkeypatch, spec, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").touch()
    for name in ("j-1", "j-2"):
        create(JobPaths(tmp_path / "runs" / name)).events.touch()
    (tmp_path / "runs" / "j-1" / "job" / "link").symlink_to(tmp_path / "data")
    (tmp_path / "runs" / "j-1" / "job" / "other").symlink_to(tmp_path / "runs" / "j-2" / "job" / "logs")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as failure:
        mounted(spec, tmp_path / "runs")
    assert error in str(failure.value)


def test_a_folder_that_nodes_must_not_see_or_cannot_read_must_be_refused(tmp_path, monkeypatch):
    odd, data = tmp_path / "a\udcff", tmp_path / "data"
    for folder in (odd, data):
        folder.mkdir()
    with pytest.raises(UsageError, match="cannot be mounted: its name is not UTF-8"):
        folders.given_mounts(JobSpec(mounts=[f"{odd}:/x"]), tmp_path / "runs")
    data.chmod(0o700)
    if not os.geteuid():
        with pytest.raises(UsageError, match=rf"nodes run as user \d+, who cannot read {data}"):
            folders.given_mounts(JobSpec(mounts=[f"{data}:/x"]), tmp_path / "runs")
        data.chmod(0o755)
        with pytest.raises(UsageError, match=rf"nodes run as user \d+, who cannot write to {data}"):
            folders.given_mounts(JobSpec(mounts=[f"{data}:/x:rw"]), tmp_path / "runs")
        data.chmod(0o700)
    for name in ("one", "two"):
        os.mkfifo(data / name)
    monkeypatch.setattr(mounts, "MAX_MASKS", 1)
    with pytest.raises(UsageError, match=f"{data} has more than 1 sockets, pipes and run directories"):
        mounted({"mounts": f"{data}:/x"}, tmp_path / "runs")
    (tmp_path / "mountinfo").write_text(f"1 2 0:3 / {data}/deep/proc rw - proc proc rw")
    monkeypatch.setattr(mountinfo, "FILE", tmp_path / "mountinfo")
    with pytest.raises(UsageError, match=f"{data} cannot be mounted: a kernel file system is mounted in it"):
        mounted({"mounts": f"{data}:/x"}, tmp_path / "runs")


def test_files_that_an_earlier_job_wrote_must_be_mountable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    JobPaths(tmp_path / "runs" / "j-1").create()
    (mount,) = mounted({"data": {"start": "runs/j-1/checkpoints"}}, tmp_path / "runs")
    source = str(tmp_path / "runs" / "j-1" / "job" / "checkpoints")
    assert (mount["source"], mount["target"], mount["read_only"]) == (source, "/data/start", True)


def test_sockets_and_pipes_in_a_mounted_folder_must_be_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "data" / "deep" / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("data/door")
        hidden = [mount["target"] for mount in mounted({"mounts": "data:/x"}, tmp_path / "runs")[1:]]
    assert hidden == ["/x/door", "/x/deep/pipe"]
    assert mounted({"mounts": "data:/x:rw"}, tmp_path / "runs")[0]["read_only"] is False


def test_the_file_of_services_must_be_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compose.yaml").touch()
    assert with_absolute(resolve({"services": "compose.yaml"})).services == str(tmp_path / "compose.yaml")
    os.mkfifo("pipe")  # Compose would wait for its other end
    for path, why in (("none.yaml", "none.yaml: No such file"), ("pipe", "pipe is not a regular file")):
        with pytest.raises(UsageError, match=f"services: .*/{why}"):
            with_absolute(resolve({"services": path}))


LINKED = [{"mounts": "there:/x:rw"}, {"secrets": {"A": "there"}}, {"source": "there"}, {"services": "there"}]
LINKED += [{"dockerfile": "there"}]


@pytest.mark.parametrize("given", LINKED, ids=lambda given: next(iter(given)))
def test_a_project_must_not_bring_a_link_that_leads_out_of_it(tmp_path, monkeypatch, given):
    (tmp_path / "outside").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "there").symlink_to("../outside")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(UsageError, match=f"there leads to {tmp_path}/outside, out of the current folder"):
        with_absolute(resolve(given))
    (tmp_path / "project" / "there").unlink()
    (tmp_path / "project" / "inside").touch()
    (tmp_path / "project" / "there").symlink_to("inside")
    found = "inside" if "mounts" in given else "there"  # which a later link could replace
    assert f"{tmp_path}/project/{found}" in str(with_absolute(resolve(given)))


def test_a_job_that_continues_must_not_follow_a_link_that_has_come_since_it_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("out", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "linked").symlink_to("out")
    spec = with_absolute(resolve({"user": "root", "mounts": "linked:/x:rw", "trainers": 1}))
    folders.given_mounts(spec, tmp_path / "runs")
    (tmp_path / "out").rmdir()
    (tmp_path / "out").symlink_to("private")
    for use in (folders.identities, lambda spec: folders.given_mounts(spec, tmp_path / "runs")):
        with pytest.raises(UsageError, match=f"{tmp_path}/out leads to {tmp_path}/private now"):
            use(spec)


@pytest.mark.parametrize("key", ["services", "dockerfile"])
def test_a_job_that_continues_must_not_use_files_out_of_its_folder(tmp_path, monkeypatch, key):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "there").touch()
    monkeypatch.chdir(tmp_path / "project")
    spec = with_absolute(resolve({key: "there"}))
    job_folders.check_again(spec)
    (tmp_path / "project" / "there").unlink()
    (tmp_path / "project" / "there").symlink_to("../outside")
    with pytest.raises(UsageError, match=f"{key}: .*there leads to {tmp_path}/outside, out of the current folder"):
        job_folders.check_again(spec)


def test_where_a_link_to_data_leads_must_be_known(tmp_path, monkeypatch):
    for name in ("outside", "project"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "data").symlink_to("../outside")
    monkeypatch.chdir(tmp_path / "project")
    (mount,) = job_folders.mounts(with_absolute(resolve({"data": {"train": "data"}})))
    assert job_folders.led_out(mount.source) == str(tmp_path / "outside")
    assert job_folders.led_out(f"{tmp_path}/project") == job_folders.led_out(f"{tmp_path}/outside") == ""


@pytest.mark.parametrize("name", ["", "orchestrate", "orchestrate/sources"])
def test_a_job_must_not_write_to_caches_that_the_next_one_executes(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("orchestrate/sources", "other"):
        (tmp_path / "cache" / folder).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError, match="cannot be mounted writable: orchestrate runs programs from its cache"):
        mounted({"mounts": f"{tmp_path}/cache/{name}:/x:rw"}, tmp_path / "runs")
    assert mounted({"mounts": f"{tmp_path}/cache/{name}:/x"}, tmp_path / "runs")
    assert mounted({"mounts": f"{tmp_path}/cache/other:/x:rw"}, tmp_path / "runs")


def test_paths_must_mean_the_same_in_any_folder_and_urls_must_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    data = {"one": f"file://{tmp_path}/a%20b", "two": "~/a b", "three": "s3://bucket/c"}
    paths = {"source": "code", "dockerfile": "image", "secrets": {"A": "a", "B": "env"}}
    spec = with_absolute(resolve({"data": data, "mounts": ["a b:/x:rw", "a b:/y"], **paths}))
    assert spec.data == {"one": f"{tmp_path}/a b", "two": f"{tmp_path}/a b", "three": "s3://bucket/c"}
    assert (spec.source, spec.dockerfile) == (f"{tmp_path}/code", f"{tmp_path}/image")
    assert spec.secrets == {"A": f"{tmp_path}/a", "B": "env"}
    assert with_absolute(JobSpec(source="git+https://host/a")).source == "git+https://host/a"
    cache = str(cached_data("s3://bucket/c/"))
    assert [(mount.source, mount.target, mount.writable) for mount in job_folders.mounts(spec)] == [
        (f"{tmp_path}/a b", "/data/one", False),
        (f"{tmp_path}/a b", "/data/two", False),
        (cache, "/data/three", False),
        (f"{tmp_path}/a b", "/x", True),
        (f"{tmp_path}/a b", "/y", False),
    ]
    assert data_folders(spec) == spec.data | {"three": cache} and list(without_stores(spec).data) == ["one", "two"]


def test_data_of_the_command_line_must_be_added_to_that_of_the_job_file():
    options = flags(parse(["run", "--data", "b=z"]))
    assert resolve({"data": {"a": "x", "b": "y"}}, options).data == {
        "a": "x",
        "b": "z",
    }


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder that a job could write, in which it has made a link to a private one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("private/deep", "cache/own"):
        (tmp_path / name).mkdir(parents=True)
    spec = with_absolute(resolve({"mounts": "cache:/cache:rw"}))
    folders.identities(spec)
    (tmp_path / "cache" / "sub").symlink_to(tmp_path / "private")
    (tmp_path / "cache" / "inner").symlink_to("own")
    (tmp_path / "mine").symlink_to("cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("source", ["cache/sub", "cache/sub/deep", "mine/sub", "mine/sub/deep", "cache/own/../sub"])
@pytest.mark.parametrize("key", ["data", "mounts"])
def test_a_link_that_a_job_may_have_made_must_not_be_followed(cache, source, key):
    spec = {"data": {"d": source}} if key == "data" else {"mounts": f"{source}:/x"}
    with pytest.raises(UsageError, match=rf" leads to {cache.parent}/private\S*, out of {cache}, where a job may have"):
        mounted(spec, cache.parent / "runs")


def test_a_link_that_a_job_of_another_project_has_made_must_not_be_followed(cache, tmp_path):
    paths = create(JobPaths(tmp_path / "other" / "results" / "j-1"))
    paths.events.touch()
    (paths.shared / "out").symlink_to(tmp_path / "private")
    (tmp_path / "latest").symlink_to(paths.root)
    for path in (paths.shared / "out", "latest/job/out", "latest/job/out/deep"):
        with pytest.raises(UsageError, match=f"out of {paths.root}, where a job may have made the link"):
            mounted({"data": {"d": str(path)}}, tmp_path / "runs")


@pytest.mark.parametrize("key", ["source", "git", "secrets", "requirements", "services", "dockerfile"])
def test_no_file_or_folder_of_a_job_may_be_reached_by_a_link_of_an_earlier_one(cache, tmp_path, key, daemon):
    (tmp_path / "private" / "Dockerfile").touch()
    (tmp_path / "private" / "file").touch()
    (cache / "link").symlink_to(tmp_path / "private")
    folder = key in ("source", "git", "dockerfile")
    path = str(cache / "link") if folder else str(cache / "link" / "file")
    path = f"git+file://{path}" if key == "git" else path
    spec = resolve({"source" if key == "git" else key: {"A": path} if key == "secrets" else path})
    uses = {
        "source": source.enter,
        "git": source.enter,
        "secrets": secret_files.with_contents,
        "requirements": lambda spec: requirements.read(Path(spec.requirements)),
        "services": lambda spec: Services(daemon, "a-1", spec.services, "none", spec.mask()),
        "dockerfile": lambda spec: packages.build(daemon, spec),
    }
    with pytest.raises(UsageError, match=f"out of {cache}, where a job may have made the link") as caught:
        uses[key](spec)
    assert caught.value.hint.startswith(f"name {tmp_path}/private")
    assert Path.cwd() == tmp_path


def test_the_context_of_a_dockerfile_must_not_be_one_that_a_job_could_swap_meanwhile(cache, tmp_path, daemon):
    for folder in (cache, cache / "own"):
        (folder / "Dockerfile").touch()
    with pytest.raises(UsageError, match=f"{cache}/own is in {cache}, where a job could put another folder") as caught:
        packages.build(daemon, JobSpec(dockerfile=str(cache / "own")))
    (record,) = re.findall(f"; if no job can write there anymore: rm ({tmp_path}/state/.*)", caught.value.hint)
    for path in (cache, cache / "Dockerfile"):  # nodes cannot replace what is mounted
        with pytest.raises(ResourceError, match="could not build the image of the Dockerfile"):
            packages.build(daemon, JobSpec(dockerfile=str(path)))
    os.unlink(record)
    with pytest.raises(ResourceError, match="could not build the image of the Dockerfile"):
        packages.build(daemon, JobSpec(dockerfile=str(cache / "own")))


def test_a_loop_of_links_must_be_an_error_of_its_path(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=f"{tmp_path}/loop: Too many levels of symbolic links"):
        writable.resolved(str(tmp_path / "loop"))


def test_a_folder_that_a_job_could_write_must_be_known_by_another_name_too(cache):
    cache.rename(cache.parent / "new")
    cache.mkdir()
    for path in ("new/sub", "new/sub/deep"):
        with pytest.raises(UsageError, match=f" out of {cache.parent}/new, where a job may have made the link"):
            mounted({"data": {"d": path}}, cache.parent / "runs")


def test_links_of_the_user_and_those_that_stay_in_a_writable_folder_must_be_followed(cache):
    spec = {"data": {"a": "mine/inner", "b": "mine"}}
    assert [mount["source"] for mount in mounted(spec, cache.parent / "runs")] == [f"{cache}/own", str(cache)]


def test_the_identity_of_what_is_mounted_must_be_that_of_its_source(cache):
    spec = with_absolute(resolve({"data": {"d": "cache/own"}, "mounts": "private:/x"}))
    before = folders.identities(spec)
    assert before.keys() == {"/data/d", "/x"} and len({*before.values()}) == 2
    (cache / "own").rename(cache / "old")
    (cache / "own").mkdir()
    after = folders.identities(spec)
    assert before["/data/d"] != after["/data/d"] and before["/x"] == after["/x"]
