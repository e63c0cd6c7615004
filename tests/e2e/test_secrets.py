"""Secret values must be only in a job's record and its workers' environment, and in nothing else that it leaves.

Output that workers write themselves is in their logs unchanged.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
from pathlib import Path

from support.leaks import CANARY, ENV, leaks
from support.leftovers import docker
from support.optional import not_none
from support.processes import proc
from support.suites import Suite

from orchestrate.cli.parser import EXPORTS
from orchestrate.record import lock
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

# --- on real engines

SCRIPT = """\
import hashlib, os, pathlib, sys, time
print(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest(), flush=True)
while not os.path.exists(os.path.join(os.environ["JOB_DIR"], "finish")):
    time.sleep(0.02)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def seen(name: str) -> str:
    """What other users of this machine can see of a job: command lines, and containers as the engine shows them."""
    found = [" ".join(proc(path.name, "cmdline")) for path in Path("/proc").glob("[0-9]*")]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        nodes = docker("ps", "-aq", "--no-trunc", "--filter", f"label=orchestrate.job={name}").split()
        found += [docker("inspect", *nodes), *(docker("logs", node) for node in nodes)] if nodes else []
    return "\n".join(found)


def test_a_secret_must_reach_the_workers_of_each_supervisor_and_nothing_else(cli, engine):
    (cli.folder / "digest.py").write_text(SCRIPT)
    (cli.folder / "job.yaml").write_text(
        JobSpec(trainers=1, env=ENV, secrets={"PHRASE": "variable"}, command=("digest.py",), warm=False).to_yaml()
    )
    output = ""
    plans = [["plan", "job.yaml", "--engine", engine], ["run", "job.yaml", "--engine", engine, "--detach"]]
    for command in (*(["export", target, "job.yaml"] for target in EXPORTS), *plans):
        done = cli(*command)
        output += f"{done.stdout}{done.stderr}"
        assert done.returncode == 0, done.stderr
    name = cli.run_dir().name
    digest = hashlib.sha256(ENV["HF_TOKEN"].encode()).hexdigest()
    cli.wait_for(digest, rank=1)
    assert CANARY not in seen(name)
    os.kill(not_none(lock.holder(JobPaths(cli.run_dir()))).pid, signal.SIGKILL)
    cli.finish_jobs()
    for command in (["ps"], ["attach", name], ["logs", name], ["wait", name]):
        done = cli(*command)
        output += f"{done.stdout}{done.stderr}"
        assert done.returncode == 0, done.stderr
    assert cli.log(1).count(digest) == 2 and cli.report()["generations"] == 2
    assert leaks(cli.folder / "runs") == set()
    assert CANARY not in output


def test_secrets_must_not_be_in_the_results_of_tests(cli):
    suite = Suite(cli, "")
    (suite.folder / "test_it.py").write_text(
        "import os, pytest\n\n@pytest.mark.nodes(2, env={'DB_PASSWORD': 'pa55word'})\ndef test_it(rank):\n"
        "    print('with', os.environ['DB_PASSWORD'])\n    assert os.environ['DB_PASSWORD'] == ''\n"
    )
    out = suite()
    assert "pa55word" not in out + (suite.folder / "results.xml").read_text()
    assert "with ***" in out and "assert '***' == ''" in out
