"""A hostile image, whose labels are untrusted input, on a real engine."""

import os

import pytest
from support.leftovers import docker

from orchestrate.engines.docker import labels

COMPOSE = "com.docker.compose."


@pytest.mark.docker
def test_the_labels_of_a_hostile_image_must_neither_break_commands_nor_impersonate_a_job(
    cli, docker_engine, nothing_left
):
    name = f"evil-{os.getpid():x}"
    found = labels.only({key: name for key in (labels.JOB, labels.GUARD, labels.RELAY)})
    found |= {labels.RUN: f"/runs/{name}/job", labels.OWNER: "abc", labels.ROLE: "master"}
    found |= {f"{COMPOSE}project": name, f"{COMPOSE}service": "master", f"{COMPOSE}container-number": "1"}
    lines = "".join(f'LABEL "{key}"="{value}"\n' for key, value in found.items())
    (cli.folder / "Dockerfile").write_text(f"FROM orchestrate-node:0.1\n{lines}")
    docker("build", "--quiet", "--tag", f"{name}:1", str(cli.folder))
    containers = [docker("create", f"{name}:1").strip()]
    try:
        containers.append(docker("create", "--label", f"{labels.OWNER}={os.getuid()}", f"{name}:1").strip())
        done = cli("ps")
        assert (done.returncode, done.stderr) == (0, "") and name not in done.stdout
        for command in ("stop", "rm"):
            done = cli(command, name)
            assert done.returncode == 2 and done.stderr.startswith(f"error: no such job: {name}\n"), done.stderr
        options = ["--engine", "docker", "--image", f"{name}:1", "--gpus", "none", "--trainers", "1"]
        done = cli("run", *options, "--", "count.py", "1")
        assert done.returncode == 0, done.stderr
        assert docker("ps", "-aq", "--no-trunc", "--filter", f"ancestor={name}:1").split() == containers[::-1]
    finally:
        docker("rm", "--force", *containers)
        docker("image", "rm", f"{name}:1")
