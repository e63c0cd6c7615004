"""A job as a file for another engine must be valid there, and carry the same environment."""

import json
import subprocess
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, docker, eventually
from kubeflow_trainer_api import models

from orchestrate.export.kubernetes import kubernetes
from orchestrate.export.slurm import slurm
from orchestrate.spec import read_file, resolve

SPEC = {
    "trainers": 2,
    "gpus": "all",
    "nproc_per_node": 2,
    "cpus": 4,
    "memory": "8g",
    "max_run": "1h",
    "env": {"A": "b"},
}
SPEC |= {"volume": "claim", "image": "registry.example/orchestrate-node:1"}
OTHER = SPEC | {"image": "registry.example/mine:1", "gpus": "none", "volume": ""}


def objects(form: str, spec: dict = SPEC) -> list[dict]:
    return list(yaml.safe_load_all(kubernetes(resolve(spec), "digits", form)))


def whole(model, value: dict) -> None:
    """A model of the API must take the object, and know all of it."""
    assert json.loads(json.dumps(model.from_dict(value).to_dict(), default=str)) == value


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
@pytest.mark.parametrize("version", ["1.28.0", "1.31.0", "1.34.0", "1.37.0"])
def test_the_indexed_job_must_be_valid(version, spec):
    for thing in objects("job", spec):
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
def test_the_jobset_must_be_valid(spec):
    *_, jobset = objects("jobset", spec)
    whole(models.JobsetV1alpha2JobSet, jobset)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.37.0", strict=True)


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
def test_the_trainjob_must_be_valid(spec):
    *_, trainjob = objects("trainjob", spec)
    whole(models.TrainerV1alpha1TrainJob, trainjob)


def test_a_pod_must_have_what_a_container_of_ours_has():
    _, job = objects("job")
    assert (job["spec"]["completions"], job["spec"]["backoffLimit"]) == (3, 0)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["NNODES"] == "3" and env["NODE_NPROC"] == "2" and env["A"] == "b"
    assert env["MASTER_ADDR"] == "digits-0.digits" and env["OMP_NUM_THREADS"] == "2"
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 2}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (
        env["JOB_DIR"] == "/job/digits"
        and {"name": "job", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]
    )


def test_a_job_without_gpus_must_see_none():
    *_, job = objects("job", OTHER)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": ""} in container["env"]


def test_a_name_that_begins_with_a_digit_must_be_made_one_that_kubernetes_takes():
    text = kubernetes(resolve(SPEC), "2nd-try", "job")
    service, job = yaml.safe_load_all(text)
    assert service["metadata"]["name"] == job["metadata"]["name"] == "job-2nd-try"
    assert {"name": "MASTER_ADDR", "value": "job-2nd-try-0.job-2nd-try"} in job["spec"]["template"]["spec"][
        "containers"
    ][0]["env"]


def test_a_trainjob_must_have_the_pod_of_the_others():
    *_, trainjob = objects("trainjob")
    _, job = objects("job")
    pod = job["spec"]["template"]["spec"]
    text = json.dumps(trainjob)
    for name in ("tolerations", "securityContext", "volumes"):
        assert json.dumps(pod[name]) in text


def test_a_jobset_must_start_all_pods_again_as_another_generation():
    (jobset,) = objects("jobset")
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    (count,) = [one for one in container["env"] if one["name"] == "TORCHELASTIC_RESTART_COUNT"]
    assert "restart-attempt" in count["valueFrom"]["fieldRef"]["fieldPath"]


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob", "slurm"])
def test_the_examples_in_the_documentation_must_be_what_is_printed(form):
    spec = resolve(
        read_file(ROOT / "examples" / "job.yaml"), {"gpus": "all", "image": SPEC["image"].replace(":1", ":0.1")}
    )
    if form == "slurm":
        text = slurm(spec, "digits-short", "apptainer").replace(str(ROOT), "/home/me/orchestrate")
        assert (ROOT / "docs" / "export" / "job.sbatch").read_text() == text
    else:
        text = kubernetes(replace(spec, volume="training"), "digits-short", form)
        assert (ROOT / "docs" / "export" / f"{form}.yaml").read_text() == text


@pytest.mark.parametrize("form", ["venv", "apptainer", "pyxis"])
def test_the_script_for_slurm_must_be_one_for_bash(form):
    script = slurm(resolve(SPEC | {"name": "it's", "env": {"A": "two words; 'quoted'"}}), "its", form)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --gpus-per-node=2\n" in script
    assert "#SBATCH --mem=8G\n" in script and "#SBATCH --time=60\n" in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes", "--gpus", "3", "--trainers", "1"], "3 GPUs cannot be shared out evenly to 2 nodes"),
        (["slurm", "--form", "job"], "--form job"),
        (["compose", "--form", "job"], "--form job"),
        (["nomad"], "invalid choice: 'nomad'"),
        (["kubernetes", "--set", "network=host"], "pin and network are for this machine"),
        (["slurm", "--set", "constraints=[node.labels.a == b]"], "constraints and encrypt are Swarm's"),
    ],
)
def test_what_cannot_be_exported_must_be_told(cli, arguments, message):
    done = cli("export", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_flags_may_stand_before_the_job_file(cli):
    (cli.folder / "job.yaml").write_text("name: mine\ncommand: count.py\n")
    done = cli("export", "kubernetes", "--form", "jobset", "--gpus", "none", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "kind: JobSet" in done.stdout and "name: mine" in done.stdout


@pytest.mark.parametrize(("memory", "slurms"), [("8g", "8G"), ("512M", "512M"), ("1073741824", "1048576K")])
def test_slurm_must_get_memory_in_its_own_units(memory, slurms):
    assert f"#SBATCH --mem={slurms}\n" in slurm(resolve(SPEC | {"memory": memory}), "x", "venv")


def test_compose_must_not_look_up_what_a_command_means_for_itself(cli):
    done = cli("export", "compose", "--gpus", "none", "--set", "env.A=$HOME", "--", "count.py", "${B}")
    assert done.returncode == 0, done.stderr
    master = yaml.safe_load(done.stdout)["services"]["master"]
    assert (master["command"][-1], master["environment"]["A"]) == ("$${B}", "$$HOME")


@pytest.mark.docker
def test_the_compose_file_must_train(cli, docker_engine, nothing_left):
    file, job = cli.folder / "job.yml", cli.folder / "runs" / "steps"
    job.mkdir(parents=True)
    done = cli("export", "compose", "--gpus", "none", "--trainers", "2", "--", "steps.py", "0=0", "1=0", "2=0")
    file.write_text(done.stdout)
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up", "--scale", "trainer=2"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
        assert eventually(lambda: len(list(job.glob("logs/*.log"))) == 3)
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert not docker("ps", "-aq", "--filter", "label=com.docker.compose.project=steps")
