"""One job for Compose, Swarm, Kubernetes and Slurm: its nodes must be the same container everywhere.

Each target becomes a table of facts. All tables must be equal, except for facts that a target cannot express: these
are left out of its table and listed in `UNSUPPORTED`.
"""

import re
import shlex
from typing import Any

import pytest
import yaml
from support.ends import KEY
from support.optional import not_none
from support.plans import HERE, plan

from orchestrate.engines.swarm import service_spec
from orchestrate.export.compose import compose
from orchestrate.export.kubernetes import kubernetes
from orchestrate.export.slurm import slurm
from orchestrate.files.paths import PROJECT
from orchestrate.plan import container
from orchestrate.spec.layers import resolve
from orchestrate.spec.sizes import parse_size
from orchestrate.spec.spec import JobSpec

SPEC: dict[str, Any] = {"command": ["work.py", "--all"], "trainers": 2, "nproc_per_node": 2, "gpus": "none"}
SPEC |= {"cpus": 2, "memory": "3g", "shm_size": "512m", "grace": "44.5s", "user": "1234:1234", "env": {"A": "b"}}
EXPECTED: dict[str, Any] = {
    "command": ["work.py", "--all"],
    "account": container.ACCOUNT,
    "unbuffered": "1",
    "user": (1234, 1234),
    "rights": [],
    "new privileges": False,
    "root": "read-only",
    "memory": 3 << 30,
    "shm": 512 << 20,
    "cpus": 2.0,
    "grace": 44.5,
    "stop": 55,
    "processes": 5461,
    "oom": container.OOM_SCORE_ADJ,
    "core": 0,
    "own check": None,
    "process 1": "node",
    "log": container.LOG_OPTIONS,
    "nproc": 2,
    "nodes": 3,
    "env": "b",
    "port": 29500,
}
UNSUPPORTED = {
    "compose": {"port"},  # the node uses its own default
    "swarm": {"command", "env", "nproc", "nodes", "port"},  # the orchestrator tells the nodes
    # Set by the cluster's administrator, or not supported by Kubernetes.
    "kubernetes": {"processes", "oom", "core", "own check", "process 1", "log"},
    # A Slurm step runs as the user who submits it, with the rights, files and accounts of the machine.
    "slurm": {"account", "user", "rights", "new privileges", "root", "shm", "processes", "oom", "core", "own check"}
    | {"process 1", "log", "port"},
}


def from_compose() -> dict[str, Any]:
    text = compose(resolve(SPEC), "digits")
    services = yaml.safe_load(text)["services"]
    node, env = services["trainer"], services["trainer"]["environment"]
    return {
        "command": node["command"],
        "account": {name: env[name] for name in container.ACCOUNT},
        "unbuffered": env["PYTHONUNBUFFERED"],
        "user": tuple(map(int, node["user"].split(":"))),
        "rights": [] if node["cap_drop"] == ["ALL"] and "cap_add" not in node else ["some"],
        "new privileges": node["security_opt"] != ["no-new-privileges:true"],
        "root": "read-only" if node["read_only"] else "",
        "memory": parse_size(node["mem_limit"]),
        "shm": parse_size(node["shm_size"]),
        "cpus": float(node["cpus"]),
        "grace": float(env["NODE_GRACE"]),
        "stop": int(node["stop_grace_period"].removesuffix("s")),
        "processes": int(node["pids_limit"]),
        "oom": node["oom_score_adj"],
        "core": node["ulimits"]["core"],
        "own check": None if node["healthcheck"] == {"disable": True} else node["healthcheck"],
        "process 1": "init" if node["init"] else "node",
        "log": node["logging"]["options"],
        "nproc": int(env["NODE_NPROC"]),
        "nodes": int(services["trainer"]["scale"]) + 1,
        "env": env["A"],
    }


def from_swarm() -> dict[str, Any]:
    spec = resolve(SPEC)
    facts: dict[str, Any] = {
        "image": spec.image,
        "user": "1234:1234",
        "network": "n",
        "secret": ("id", "name"),
        "key": KEY,
    }
    task = service_spec.task(spec, plan(spec, HERE.but(memory=8 << 30), "digits"), "trainer", **facts)
    node, limits = task["ContainerSpec"], task["Resources"]["Limits"]
    env = dict(item.split("=", 1) for item in node["Env"])
    mounts = {mount["Target"]: mount for mount in node["Mounts"]}
    (core,) = (limit for limit in node["Ulimits"] if limit["Name"] == "core")
    return {
        "account": {name: env[name] for name in container.ACCOUNT},
        "unbuffered": env["PYTHONUNBUFFERED"],
        "user": tuple(map(int, node["User"].split(":"))),
        "rights": [] if node["CapabilityDrop"] == ["ALL"] and "CapabilityAdd" not in node else ["some"],
        "new privileges": not node["Privileges"]["NoNewPrivileges"],
        "root": "read-only" if node["ReadOnly"] else "",
        "memory": limits["MemoryBytes"],
        "shm": mounts["/dev/shm"]["TmpfsOptions"]["SizeBytes"],
        "cpus": limits["NanoCPUs"] / 1e9,
        "grace": float(env["NODE_GRACE"]),
        "stop": node["StopGracePeriod"] / 1e9,
        "processes": limits["Pids"],
        "oom": node["OomScoreAdj"],
        "core": core["Hard"],
        "own check": None if node["Healthcheck"] == {"Test": ["NONE"]} else node["Healthcheck"],
        "process 1": "init" if node["Init"] else "node",
        "log": task["LogDriver"]["Options"],
    }


def from_kubernetes(form: str = "job") -> dict[str, Any]:
    *_, manifest = yaml.safe_load_all(kubernetes(resolve(SPEC), "digits", form))
    job = manifest if form == "job" else manifest["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in node["env"]}
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in pod["volumes"]}
    return {
        "command": node["args"],
        "account": {name: env[name] for name in container.ACCOUNT},
        "unbuffered": env["PYTHONUNBUFFERED"],
        "user": (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]),
        "rights": [] if node["securityContext"]["capabilities"] == {"drop": ["ALL"]} else ["some"],
        "new privileges": node["securityContext"]["allowPrivilegeEscalation"],
        "root": "read-only" if node["securityContext"]["readOnlyRootFilesystem"] else "",
        "memory": parse_size(node["resources"]["limits"]["memory"].removesuffix("i")),
        "shm": parse_size(sizes["shm"].removesuffix("i")),
        "cpus": float(node["resources"]["limits"]["cpu"]),
        "grace": float(env["NODE_GRACE"]),
        "stop": pod["terminationGracePeriodSeconds"],
        "nproc": int(env["NODE_NPROC"]),
        "nodes": job["spec"]["completions"],
        "env": env["A"],
        "port": int(env["MASTER_PORT"]),
    }


def from_slurm(form: str = "venv") -> dict[str, Any]:
    spec = {name: value for name, value in SPEC.items() if name != "user"}
    text = slurm(resolve(spec), "digits", form)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    arguments = shlex.split(re.sub(r"\\\n", " ", text[text.index("    env ") : text.index("step=$!")]))
    env = dict(
        word.split("=", 1)
        for word in arguments[1 : next(i for i, word in enumerate(arguments[1:], 1) if "=" not in word)]
    )
    return {
        "command": arguments[-3:-1],
        "unbuffered": env["PYTHONUNBUFFERED"],
        "memory": parse_size(options["mem"]),
        "cpus": float(options["cpus-per-task"]),
        "grace": float(env["NODE_GRACE"]),
        "stop": int(not_none(re.search(r"--wait=(\d+)", text))[1]),
        "nproc": int(env["NODE_NPROC"]),
        "nodes": int(options["nodes"]),
        "env": env["A"],
    }


TARGETS = {"compose": from_compose, "swarm": from_swarm, "kubernetes": from_kubernetes, "slurm": from_slurm}


@pytest.mark.parametrize("target", TARGETS)
def test_a_node_must_be_the_same_container_wherever_it_runs(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = TARGETS[target]()
    assert found == {name: fact for name, fact in EXPECTED.items() if name not in UNSUPPORTED[target]}


def test_the_compose_file_must_match_the_shared_container_definition():
    file = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
    for name in ("master", "trainer", "master-cpu", "trainer-cpu"):
        node = file["services"][name]
        assert container.ENVIRONMENT.items() <= node["environment"].items()
        assert node["user"].endswith("{}:{}}}".format(*container.USER))
        assert node["entrypoint"][-1] == container.PROGRAM
        assert node["stop_grace_period"] == f"{container.stop_seconds(JobSpec().grace)}s"
        assert (node["oom_score_adj"], node["logging"]["options"]) == (container.OOM_SCORE_ADJ, container.LOG_OPTIONS)
