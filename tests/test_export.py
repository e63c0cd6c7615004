"""A job as a file for another engine must be valid there, and carry the same environment."""

import base64
import io
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, docker, eventually
from kubeflow_trainer_api import models
from test_export_compose import make_folder

from orchestrate import users
from orchestrate.cli import main
from orchestrate.errors import UsageError
from orchestrate.export import carries_node, shape
from orchestrate.export.kubernetes import kubernetes
from orchestrate.export.slurm import slurm
from orchestrate.spec import JobSpec, read_file, resolve

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


def pod_of(form: str, spec: dict) -> dict:
    """The pod of a Job or a JobSet."""
    *_, made = objects(form, spec)
    job = made if form == "job" else made["spec"]["replicatedJobs"][0]["template"]
    return job["spec"]["template"]["spec"]


def environment(pod: dict) -> dict[str, str]:
    return {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("asked", "workers", "gpus"),
    [
        ({}, 1, 0),
        ({"nproc_per_node": 4}, 4, 0),
        ({"gpus": "none", "nproc_per_node": 2}, 2, 0),
        ({"gpus": "all"}, 1, 1),
        ({"gpus": "all", "nproc_per_node": 4}, 4, 4),
        ({"gpus": 3}, 1, 1),
        ({"gpus": 6}, 2, 2),
        ({"gpus": 6, "nproc_per_node": 2}, 2, 2),
    ],
)
def test_workers_and_gpus_must_follow_from_what_the_job_says(asked, workers, gpus):
    found = shape(resolve({"trainers": 2}, asked), "digits")
    assert (found.nodes, found.nproc, found.gpus) == (3, workers, gpus)
    assert (found.env["NNODES"], found.env["NODE_NPROC"]) == ("3", str(workers))
    assert found.env.get("CUDA_VISIBLE_DEVICES") == (None if gpus else "")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": 3, "nproc_per_node": 2}, "2 workers and 1 GPUs on a node"),
        ({"gpus": 6, "nproc_per_node": 1}, "1 workers and 2 GPUs on a node"),
        ({"gpus": 2}, "2 GPUs cannot be shared out evenly to 3 nodes"),
        ({"pin": True}, "pin and network"),
        ({"encrypt": True}, "constraints and encrypt"),
    ],
)
def test_what_no_other_engine_has_must_be_refused(asked, message):
    with pytest.raises(UsageError, match=message) as caught:
        shape(resolve({"trainers": 2}, asked), "digits")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("cpus", "workers", "threads"), [(None, 2, None), (4, 1, "4"), (4, 2, "2"), (5.5, 2, "2"), (0.5, 1, "1")]
)
def test_threads_must_fit_the_cores_of_a_node(cpus, workers, threads):
    spec = resolve({"cpus": cpus, "nproc_per_node": workers})
    assert shape(spec, "digits").env.get("OMP_NUM_THREADS") == threads


def test_the_jobs_own_environment_must_win_where_it_may():
    spec = resolve({"cpus": 4, "grace": "1.5s", "max_restarts": 7, "env": {"OMP_NUM_THREADS": "3", "A": "b"}})
    env = shape(spec, "digits").env
    assert (env["OMP_NUM_THREADS"], env["A"]) == ("3", "b")
    assert (env["NODE_GRACE"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1.5", "7")
    assert env["JOB_ID"] == env["TORCHELASTIC_RUN_ID"] == "digits"


@pytest.mark.parametrize(
    ("image", "ours"),
    [
        ("orchestrate-node", True),
        ("orchestrate-node:0.1", True),
        ("registry.example:5000/team/orchestrate-node", True),
        ("registry.example:5000/orchestrate-node:mine", True),
        ("orchestrate-node@sha256:0123", True),
        ("orchestrate-node-x:0.1", False),
        ("orchestrate-node/mine:0.1", False),
        ("pytorch/pytorch:latest", False),
    ],
)
def test_an_image_of_ours_must_be_known_by_its_name(image, ours):
    assert carries_node(image) is ours


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


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("image", [SPEC["image"], OTHER["image"]])
def test_secrets_must_come_from_a_secret_of_the_cluster(form, image):
    env = {"HF_TOKEN": "canary", "A": "b", "URL": "https://me:canary@host"}
    text = kubernetes(resolve(SPEC | {"env": env, "image": image}), "2nd", form)
    assert "canary" not in text
    *_, made = yaml.safe_load_all(text)
    if form == "job":
        kubernetes_validate.validate(made, "1.31.0", strict=True)
    elif form == "trainjob":
        whole(models.TrainerV1alpha1TrainJob, made)
    for name in ("HF_TOKEN", "URL"):
        entry = {"name": name, "valueFrom": {"secretKeyRef": {"name": "job-2nd-env", "key": name}}}
        assert text.count(f"name: {name}\n") == 1 and json.dumps(entry) in json.dumps(made)
    assert '{"name": "A", "value": "b"}' in json.dumps(made)


def test_the_command_that_makes_the_secret_must_be_told_and_hold_no_value():
    text = kubernetes(resolve(SPEC | {"env": {"HF_TOKEN": "canary", "API_KEY": "canary"}}), "digits", "job")
    (line,) = (line for line in text.splitlines() if "kubectl create secret" in line)
    assert line.startswith("#") and "canary" not in text
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here")
    command = line.removeprefix("#").strip() + " --dry-run=client --output=json"
    values = {"HF_TOKEN": "it's $HOME\n", "API_KEY": "two\nlines é"}
    env = os.environ | {"KUBECONFIG": os.devnull} | values
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    secret = json.loads(done.stdout)
    assert secret["metadata"]["name"] == "digits-env"
    assert {name: base64.b64decode(value).decode() for name, value in secret["data"].items()} == values
    assert "kubectl create secret" not in kubernetes(resolve(SPEC), "digits", "job")


def test_a_pod_must_have_the_home_that_the_job_names():
    env = environment(pod_of("job", SPEC | {"env": {"HOME": "/job/home", "JOB_FLAG": "1"}}))
    assert (env["HOME"], env["USER"], env["JOB_FLAG"]) == ("/job/home", "node", "1")


def test_a_job_without_gpus_must_see_none():
    *_, job = objects("job", OTHER)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": ""} in container["env"]


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
def test_an_image_that_is_not_ours_must_get_the_program_of_a_node(form):
    config, *others = objects(form, OTHER)
    assert config["kind"] == "ConfigMap" and config["metadata"]["name"] == "digits-node"
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(config["binaryData"]["node"]))) as archive:
        assert "orchestrate/node/given.py" in archive.getnames()
    text = json.dumps(others)
    assert '"configMap": {"name": "digits-node"}' in text
    for mount in ({"name": "program", "mountPath": "/node", "readOnly": True}, {"name": "run", "mountPath": "/run"}):
        assert json.dumps(mount) in text
    assert "tarfile.open('/node/node')" in text and "/opt/orchestrate" not in text
    assert "ConfigMap" not in kubernetes(resolve(SPEC), "digits", form)


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize(("asked", "user", "group"), [("auto", 1000, 1000), ("7", 7, 7), ("7:8", 7, 8), ("root", 0, 0)])
def test_a_pod_must_run_as_the_user_of_the_job_file_and_as_root_only_where_that_asks_for_it(form, asked, user, group):
    found = pod_of(form, SPEC | {"user": asked})["securityContext"]
    assert (found["runAsUser"], found["runAsGroup"], found["fsGroup"]) == (user, group, group)
    assert found["runAsNonRoot"] is (user != 0)


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_a_pod_without_a_volume_must_have_a_folder_all_the_same(form):
    pod = pod_of(form, OTHER)
    assert {"name": "job", "emptyDir": {}} in pod["volumes"]
    assert environment(pod)["JOB_DIR"] == "/job"
    assert environment(pod_of(form, SPEC))["JOB_DIR"] == "/job/digits"


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("volume", ["/mnt/training", "Data", "my_data", "-a", "a.", "a..b", "a" * 254])
def test_a_volume_that_is_no_name_of_a_claim_must_be_refused(form, volume):
    with pytest.raises(UsageError, match="on Kubernetes it names a PersistentVolumeClaim") as caught:
        kubernetes(resolve(SPEC | {"volume": volume}), "digits", form)
    assert volume in str(caught.value) and "--set volume=NAME" in caught.value.hint
    assert "claimName: data.v-2\n" in kubernetes(resolve(SPEC | {"volume": "data.v-2"}), "digits", form)


def test_what_the_job_file_leaves_out_must_be_told_at_the_top():
    lost, cpu = "files and checkpoints are lost with their pod", "--gpus all asks for one per worker"
    for asked, told in (
        ({}, {lost, cpu}),
        ({"volume": "claim"}, {cpu}),
        ({"gpus": "none"}, {lost}),
        ({"volume": "claim", "gpus": "all"}, set()),
    ):
        text = kubernetes(resolve(asked), "digits", "job")
        head = [line for line in text.splitlines() if line.startswith("# ")]
        assert {words for words in (lost, cpu) if any(words in line for line in head)} == told


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_a_pod_must_have_the_limits_of_the_job_and_no_others(form):
    asked = {"gpus": "none", "cpus": 1.5, "memory": "512m", "shm_size": "2G", "grace": "1.5s", "max_run": "1.5s"}
    *_, made = objects(form, asked)
    job = made if form == "job" else made["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"cpu": "1.5", "memory": "512Mi"}}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["volumes"]
    assert (job["spec"]["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (2, 12)
    *_, made = objects(form, {"gpus": "none"})
    assert "activeDeadlineSeconds" not in json.dumps(made)
    assert pod_of(form, {"gpus": "none"})["containers"][0]["resources"] == {}


def test_a_trainjob_must_have_a_time_limit_where_the_job_has_one():
    assert objects("trainjob", {"max_run": "1.5s"})[-1]["spec"]["activeDeadlineSeconds"] == 2
    assert "activeDeadlineSeconds" not in objects("trainjob", {})[-1]["spec"]


@pytest.mark.parametrize(
    ("size", "quantity"), [("1024", "1024"), ("10b", "10"), ("4k", "4Ki"), ("64M", "64Mi"), ("8g", "8Gi")]
)
def test_kubernetes_must_get_sizes_in_its_own_units(size, quantity):
    pod = pod_of("job", {"memory": size, "shm_size": size})
    assert pod["containers"][0]["resources"]["limits"]["memory"] == quantity
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity}} in pod["volumes"]


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
    (other,) = objects("jobset", SPEC | {"max_restarts": 7})
    assert other["spec"]["failurePolicy"] == {"maxRestarts": 7}
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
    assert "#SBATCH --cpus-per-task=4\n" in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes", "--gpus", "3", "--trainers", "1"], "3 GPUs cannot be shared out evenly to 2 nodes"),
        (["slurm", "--form", "job"], "--form job"),
        (["compose", "--form", "job"], "--form job"),
        (["nomad"], "invalid choice: 'nomad'"),
        (["kubernetes", "--set", "network=host"], "pin and network are for this machine"),
        (["slurm", "--set", "user=root"], "user is root, and Slurm runs a job as the user who submits it"),
        (["slurm", "--set", "constraints=[node.labels.a == b]"], "constraints and encrypt are Swarm's"),
    ],
)
def test_what_cannot_be_exported_must_be_told(cli, arguments, message):
    done = cli("export", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["kubernetes"], "# mine, for Kubernetes 1.28"),
        (["kubernetes", "--form", "trainjob"], "kind: TrainJob\n"),
        (["slurm"], "# The interpreter is that of this environment"),
        (["slurm", "--form", "pyxis"], "--container-image=orchestrate-node:0.1 "),
        (["compose"], "name: mine\n"),
    ],
)
def test_the_first_form_must_be_the_default(capsys, words, printed):
    assert main(["export", *words, "--name", "Mine", "--gpus", "none", "--", "-m", "app.train"]) == 0
    told = capsys.readouterr()
    assert printed in told.out and not told.err


def test_flags_may_stand_before_the_job_file(cli):
    (cli.folder / "job.yaml").write_text("name: mine\ncommand: count.py\n")
    done = cli("export", "kubernetes", "--form", "jobset", "--gpus", "none", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "kind: JobSet" in done.stdout and "name: mine" in done.stdout


@pytest.mark.parametrize(
    ("memory", "slurms"), [("8g", "8G"), ("512M", "512M"), ("64k", "64K"), ("1073741824", "1048576K"), ("1025b", "2K")]
)
def test_slurm_must_get_memory_in_its_own_units(memory, slurms):
    assert f"#SBATCH --mem={slurms}\n" in slurm(resolve(SPEC | {"memory": memory}), "x", "venv")


@pytest.mark.parametrize("memory", [None, "unlimited"])
def test_memory_that_is_not_limited_must_not_be_asked_for(memory):
    assert "--mem" not in slurm(resolve(SPEC | {"memory": memory}), "x", "venv")
    assert pod_of("job", {"memory": memory})["containers"][0]["resources"] == {}


def test_compose_must_not_look_up_what_a_command_means_for_itself(cli):
    done = cli("export", "compose", "--gpus", "none", "--set", "env.A=$HOME", "--", "count.py", "${B}")
    assert done.returncode == 0, done.stderr
    master = yaml.safe_load(done.stdout)["services"]["master"]
    assert (master["command"][-1], master["environment"]["A"]) == ("$${B}", "$$HOME")


LOOK = """\
import os
print(os.listdir("runs"), os.listdir(".git"), repr(open(".env").read()))
"""


@pytest.mark.docker
def test_a_job_of_the_compose_file_must_see_nothing_that_is_hidden(cli, docker_engine, nothing_left):
    (cli.folder / ".git").mkdir()
    for name in (".git/config", ".env"):
        (cli.folder / name).write_text("canary")
    (cli.folder / ".dockerignore").write_text(".env\n")
    (cli.folder / "look.py").write_text(LOOK)
    file, log = cli.folder / "job.yml", cli.folder / "runs" / "look" / "job" / "logs" / "rank-0.log"
    file.write_text(cli("export", "compose", "--gpus", "none", "--trainers", "0", "--", "look.py").stdout)
    make_folder(file.read_text())
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up", "--scale", "trainer=0"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert "[] [] ''" in log.read_text()


@pytest.mark.docker
def test_the_compose_file_must_train(cli, docker_engine, nothing_left):
    file, job = cli.folder / "job.yml", cli.folder / "runs" / "steps" / "job"
    done = cli("export", "compose", "--gpus", "none", "--trainers", "2", "--", "steps.py", "0=0", "1=0", "2=0")
    file.write_text(done.stdout)
    make_folder(done.stdout)
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up", "--scale", "trainer=2"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
        assert eventually(lambda: len(list(job.glob("logs/*.log"))) == 3)
        owner = users.nodes_of(JobSpec()) or (os.getuid(), os.getgid())
        assert {(path.stat().st_uid, path.stat().st_gid) for path in job.rglob("*")} == {owner}
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert not docker("ps", "-aq", "--filter", "label=com.docker.compose.project=steps")
