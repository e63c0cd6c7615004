"""Data of a job in an object store, and jobs that use it."""

import os
import textwrap

from support.object_stores import URL

from orchestrate.spec.folders import cached_data
from orchestrate.storage.store import open_store

SCRIPT = textwrap.dedent("""
    import os, pathlib
    data = pathlib.Path(os.environ["DATA_TRAIN"])
    print({str(path.relative_to(data)): path.read_text() for path in sorted(data.rglob("*")) if path.is_file()})
""")


def test_workers_must_see_the_data_and_only_what_has_changed_must_be_fetched_again(cli, engine, bucket):
    (cli.folder / "lists.py").write_text(SCRIPT)
    cli.env |= {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_"))}
    run = ("run", "--engine", engine, "--trainers", "1", "--gpus", "none", "--data", f"train={URL}", "lists.py")
    done = cli(*run)
    assert done.returncode == 0 and f"fetched 2 files (2 bytes) of {URL}" in done.stderr, done.stderr
    assert "{'a': 'A', 'sub/b': 'B'}" in done.stdout
    done = cli(*run)
    assert f"{URL} has not changed" in done.stderr
    store = open_store(URL)  # rclone caches what it has served
    store.put("a", b"new")
    store.delete(["sub/b"])
    store.put("sub/c", b"C")
    done = cli(*run)
    assert f"fetched 2 files (4 bytes) of {URL}" in done.stderr and "{'a': 'new', 'sub/c': 'C'}" in done.stdout


def test_a_plan_must_fetch_nothing_and_a_cluster_must_have_the_data(cli, engine, bucket):
    (cli.folder / "lists.py").write_text(SCRIPT)
    cli.env |= {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_"))}
    options = ("--engine", engine, "--trainers", "1", "--gpus", "none", "--data", f"train={URL}")
    done = cli("plan", *options, "lists.py")
    assert done.returncode == 0 and not cached_data(URL).exists(), done.stderr
    up = cli("up", *options, "--set", "warm=false")
    assert up.returncode == 0 and f"fetched 2 files (2 bytes) of {URL}" in up.stderr, up.stderr
    done = cli("run", *options, "lists.py")
    assert cli("down", up.stdout.strip()).returncode == 0
    assert "not using" not in done.stderr and "{'a': 'A', 'sub/b': 'B'}" in done.stdout, done.stderr
