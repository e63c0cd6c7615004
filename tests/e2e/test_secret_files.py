"""Secrets that workers get as files, and where their values must not be."""

import json
import re
import textwrap
from pathlib import Path

import pytest
from support.leaks import leaks
from support.leftovers import docker

CANARY = "canary-of-files-7b1e"
SCRIPT = textwrap.dedent("""
    import os, pathlib, stat
    for name in ("HF_TOKEN", "CERT"):
        path = pathlib.Path(os.environ[f"{name}_FILE"])
        print(name, len(path.read_bytes()), oct(stat.S_IMODE(path.stat().st_mode)), name in os.environ)
    print("the value is", pathlib.Path(os.environ["CERT_FILE"]).read_bytes().decode(errors="replace"))
    print("at", path)
    if os.environ["RANK"] == "0":
        pathlib.Path(os.environ["JOB_DIR"], "checkpoints", "one").touch()
""")
OPTIONS = ("--trainers", "1", "--gpus", "none", "--secret", "HF_TOKEN", "--secret", "CERT=cert.pem")


@pytest.fixture
def secret(cli):
    """The command line in a folder with a secret and a script that reads it."""
    (cli.folder / "cert.pem").write_bytes(f"{CANARY}\nline two".encode() + b"\xff")
    (cli.folder / "reads.py").write_text(SCRIPT)
    return cli


def test_workers_must_get_secrets_as_files_and_nothing_else_must_contain_them(secret, engine):
    done = secret("run", "--engine", engine, *OPTIONS, "reads.py", HF_TOKEN=f"{CANARY}-2")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"HF_TOKEN {len(CANARY) + 2} 0o400 False\nCERT {len(CANARY) + 10} 0o400 False\n" in secret.log(rank)
    assert CANARY not in done.stdout + done.stderr and "the value is ***" in done.stdout
    for name in ("logs", "work", "job"):
        for path in (secret.run_dir() / name).rglob("*"):
            path.unlink() if path.is_file() or path.is_symlink() else None
    (secret.folder / "cert.pem").unlink()
    assert leaks(secret.folder) == set()
    spec = (secret.run_dir() / "job.yaml").read_text()
    assert f"secrets:\n  HF_TOKEN: env\n  CERT: {secret.folder}/cert.pem\n" in spec


@pytest.mark.docker
def test_secret_files_must_be_in_memory_hidden_from_the_engine_and_gone_after_the_job(secret, docker_engine):
    assert secret("up", "--trainers", "1", "--gpus", "none", "--set", "warm=false").returncode == 0
    try:
        done = secret("run", *OPTIONS, "reads.py", HF_TOKEN=CANARY)
        assert done.returncode == 0 and "at /run/secrets/CERT" in done.stdout, done.stderr
        (cluster,) = (secret.folder / "runs").glob("cluster-*")
        nodes = docker("ps", "--quiet", "--filter", f"name={cluster.name}").split()
        for node in nodes:
            assert docker("exec", node, "ls", "--almost-all", "/run/secrets") == ""
            assert "tmpfs" in docker("exec", node, "grep", "/run/secrets", "/proc/mounts")
            assert CANARY not in docker("inspect", node)
        assert len(nodes) == 2
    finally:
        assert secret("down", "cluster").returncode == 0


def test_secret_files_must_be_gone_after_a_job_on_local_processes_that_stay_up(secret, nothing_left):
    up = ("up", "--engine", "process", "--trainers", "1", "--gpus", "none", "--set", "warm=false")
    cluster = secret(*up).stdout.strip()
    done = secret("run", "--engine", "process", *OPTIONS, "reads.py", HF_TOKEN=CANARY)
    assert (done.returncode, f", on {cluster}\n" in done.stderr) == (0, True), done.stderr
    (cert,) = set(re.findall("^at (.*)$", secret.log(0) + secret.log(1), re.M))
    assert cluster in cert and not Path(cert).exists()
    assert secret("down", cluster).returncode == 0


def test_a_resumed_job_must_get_its_secrets_again(secret, nothing_left):
    fails = "\nimport sys; sys.exit(os.path.exists('fail') and os.environ['RANK'] == '0')\n"
    (secret.folder / "fails.py").write_text(SCRIPT + fails)
    (secret.folder / "fail").touch()
    run = ("run", "--engine", "process", "--max-restarts", "0", *OPTIONS, "fails.py")
    assert secret(*run, HF_TOKEN=CANARY).returncode == 1
    (secret.folder / "fail").unlink()
    (secret.folder / "cert.pem").unlink()
    done = secret("resume")
    assert done.returncode == 0, done.stderr
    assert secret.log(0).count(f"CERT {len(CANARY) + 10} 0o400") == 2
    assert json.loads((secret.run_dir() / "report.json").read_text())["outcome"] == "succeeded"


def test_the_record_in_the_output_must_contain_no_secret(secret, nothing_left):
    (secret.folder / "token").write_text(f"{CANARY}-file")
    text = (
        "--set",
        f"hyperparameters={{a: {CANARY}-file, b: {CANARY}-variable}}",
        "--set",
        f"before=echo {CANARY}-file",
    )
    stores = ("--output", f"file://{secret.folder}/store", "--secret", "TOKEN=token", "-e", "API_KEY")
    run = ("run", "--engine", "process", "--trainers", "0", "--gpus", "none", *stores, *text, "true")
    done = secret(*run, API_KEY=f"{CANARY}-variable")
    assert done.returncode == 0, done.stderr
    for name in ("job.yaml", "plan.json", "events.jsonl", "report.json"):
        content = (secret.folder / "store" / secret.run_dir().name / "orchestrate" / name).read_text()
        assert content and CANARY not in content, name
