"""A job as Kubernetes objects: each form must be valid, and have the same environment."""

import base64
import io
import json
import os
import shutil
import subprocess
import tarfile

import kubernetes_validate
import pytest
import yaml
from support.exports import SPEC, objects, pod_of

from orchestrate.errors import UsageError
from orchestrate.export.kubernetes import kubernetes
from orchestrate.spec.layers import resolve

OTHER = SPEC | {"image": "registry.example/mine:1", "gpus": "none", "volume": ""}


def environment(pod: dict) -> dict[str, str]:
    return {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}


def check_model(name: str, value: dict) -> None:
    """Check that the model of the API accepts the object with all its fields."""
    from kubeflow_trainer_api import models  # here, since each process that collects tests would import it

    assert json.loads(json.dumps(getattr(models, name).from_dict(value).to_dict(), default=str)) == value


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
@pytest.mark.parametrize("version", ["1.28.0", "1.31.0", "1.34.0", "1.37.0"])
def test_the_indexed_job_must_be_valid(version, spec):
    for one in objects("job", spec):
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
def test_the_jobset_must_be_valid(spec):
    *_, jobset = objects("jobset", spec)
    check_model("JobsetV1alpha2JobSet", jobset)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.37.0", strict=True)


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["ours", "other image"])
def test_the_trainjob_must_be_valid(spec):
    *_, trainjob = objects("trainjob", spec)
    check_model("TrainerV1alpha1TrainJob", trainjob)


def test_a_pod_must_have_the_settings_of_our_containers():
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
def test_secrets_must_come_from_a_kubernetes_secret(form, image):
    env = {"HF_TOKEN": "canary", "A": "b", "URL": "https://me:canary@host"}
    text = kubernetes(resolve(SPEC | {"env": env, "image": image}), "2nd", form)
    assert "canary" not in text
    *_, last = yaml.safe_load_all(text)
    if form == "job":
        kubernetes_validate.validate(last, "1.31.0", strict=True)
    elif form == "trainjob":
        check_model("TrainerV1alpha1TrainJob", last)
    for name in ("HF_TOKEN", "URL"):
        entry = {"name": name, "valueFrom": {"secretKeyRef": {"name": "job-2nd-env", "key": name}}}
        assert text.count(f"name: {name}\n") == 1 and json.dumps(entry) in json.dumps(last)
    assert '{"name": "A", "value": "b"}' in json.dumps(last)


def test_the_command_that_creates_the_secret_must_be_printed_without_values():
    text = kubernetes(resolve(SPEC | {"env": {"HF_TOKEN": "canary", "API_KEY": "canary"}}), "digits", "job")
    (line,) = (line for line in text.splitlines() if "kubectl create secret" in line)
    assert line.startswith("#") and "canary" not in text
    assert '--from-file=HF_TOKEN=<(printf %s "$HF_TOKEN")' in line
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    command = line.removeprefix("#").strip() + " --dry-run=client --output=json"
    values = {"HF_TOKEN": "it's $HOME\n", "API_KEY": "two\nlines é"}
    env = os.environ | {"KUBECONFIG": os.devnull} | values
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    secret = json.loads(done.stdout)
    assert secret["metadata"]["name"] == "digits-env"
    assert {name: base64.b64decode(value).decode() for name, value in secret["data"].items()} == values
    assert "kubectl create secret" not in kubernetes(resolve(SPEC), "digits", "job")


def test_a_pod_must_have_the_home_directory_that_the_job_sets():
    env = environment(pod_of("job", SPEC | {"env": {"HOME": "/job/home", "JOB_FLAG": "1"}}))
    assert (env["HOME"], env["USER"], env["JOB_FLAG"]) == ("/job/home", "node", "1")


def test_a_job_without_gpus_must_see_none():
    *_, job = objects("job", OTHER)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": ""} in container["env"]


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
def test_an_image_other_than_ours_must_get_the_node_program(form):
    config, *others = objects(form, OTHER)
    assert config["kind"] == "ConfigMap" and config["metadata"]["name"] == "digits-node"
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(config["binaryData"]["node"]))) as archive:
        assert "orchestrate/node/static.py" in archive.getnames()
    text = json.dumps(others)
    assert '"configMap": {"name": "digits-node"}' in text
    for mount in ({"name": "program", "mountPath": "/node", "readOnly": True}, {"name": "run", "mountPath": "/run"}):
        assert json.dumps(mount) in text
    assert "tarfile.open('/node/node')" in text and "/opt/orchestrate" not in text
    assert "ConfigMap" not in kubernetes(resolve(SPEC), "digits", form)


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize(
    ("setting", "user", "group"), [("auto", 1000, 1000), ("7", 7, 7), ("7:8", 7, 8), ("root", 0, 0)]
)
def test_a_pod_must_run_as_the_user_of_the_job_file_and_as_root_only_on_request(form, setting, user, group):
    found = pod_of(form, SPEC | {"user": setting})["securityContext"]
    assert (found["runAsUser"], found["runAsGroup"], found["fsGroup"]) == (user, group, group)
    assert found["runAsNonRoot"] is (user != 0)


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_a_pod_without_a_volume_must_still_have_a_job_folder(form):
    pod = pod_of(form, OTHER)
    assert {"name": "job", "emptyDir": {}} in pod["volumes"]
    assert environment(pod)["JOB_DIR"] == "/job"
    assert environment(pod_of(form, SPEC))["JOB_DIR"] == "/job/digits"


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("volume", ["/mnt/training", "Data", "my_data", "-a", "a.", "a..b", "a" * 254])
def test_a_volume_that_is_not_a_valid_claim_name_must_be_refused(form, volume):
    with pytest.raises(UsageError, match="is not a valid name of a PersistentVolumeClaim") as caught:
        kubernetes(resolve(SPEC | {"volume": volume}), "digits", form)
    assert volume in str(caught.value) and "--set volume=NAME" in caught.value.hint
    assert "claimName: data.v-2\n" in kubernetes(resolve(SPEC | {"volume": "data.v-2"}), "digits", form)


def test_notes_about_settings_missing_in_the_job_file_must_be_printed_at_the_top():
    lost, cpu = "files and checkpoints are lost with their pod", "--gpus all requests one per worker"
    for settings, notes in (
        ({}, {lost, cpu}),
        ({"volume": "claim"}, {cpu}),
        ({"gpus": "none"}, {lost}),
        ({"volume": "claim", "gpus": "all"}, set()),
    ):
        text = kubernetes(resolve(settings), "digits", "job")
        head = [line for line in text.splitlines() if line.startswith("# ")]
        assert {note for note in (lost, cpu) if any(note in line for line in head)} == notes


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_a_pod_must_have_the_limits_of_the_job_and_no_others(form):
    settings = {"gpus": "none", "cpus": 1.5, "memory": "512m", "shm_size": "2G", "grace": "1.5s", "max_run": "1.5s"}
    *_, last = objects(form, settings)
    job = last if form == "job" else last["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"cpu": "1.5", "memory": "512Mi"}}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["volumes"]
    assert (job["spec"]["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (2, 12)
    *_, last = objects(form, {"gpus": "none"})
    assert "activeDeadlineSeconds" not in json.dumps(last)
    assert pod_of(form, {"gpus": "none"})["containers"][0]["resources"] == {}


def test_a_trainjob_must_have_a_time_limit_if_the_job_has_one():
    assert objects("trainjob", {"max_run": "1.5s"})[-1]["spec"]["activeDeadlineSeconds"] == 2
    assert "activeDeadlineSeconds" not in objects("trainjob", {})[-1]["spec"]


@pytest.mark.parametrize(
    ("size", "quantity"),
    [("67108864", "67108864"), ("67108865b", "67108865"), ("65536k", "65536Ki"), ("64M", "64Mi"), ("8g", "8Gi")],
)
def test_sizes_must_be_written_in_units_of_kubernetes(size, quantity):
    pod = pod_of("job", {"memory": size, "shm_size": size})
    assert pod["containers"][0]["resources"]["limits"]["memory"] == quantity
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity}} in pod["volumes"]


def test_a_name_that_starts_with_a_digit_must_be_made_valid_for_kubernetes():
    text = kubernetes(resolve(SPEC), "2nd-try", "job")
    service, job = yaml.safe_load_all(text)
    assert service["metadata"]["name"] == job["metadata"]["name"] == "job-2nd-try"
    assert {"name": "MASTER_ADDR", "value": "job-2nd-try-0.job-2nd-try"} in job["spec"]["template"]["spec"][
        "containers"
    ][0]["env"]


def test_a_trainjob_must_have_the_same_pod_as_the_other_forms():
    *_, trainjob = objects("trainjob")
    _, job = objects("job")
    pod = job["spec"]["template"]["spec"]
    text = json.dumps(trainjob)
    for name in ("tolerations", "securityContext", "volumes"):
        assert json.dumps(pod[name]) in text


def test_a_jobset_must_restart_all_pods_as_the_next_generation():
    (jobset,) = objects("jobset")
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (other,) = objects("jobset", SPEC | {"max_restarts": 7})
    assert other["spec"]["failurePolicy"] == {"maxRestarts": 7}
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    (count,) = [one for one in container["env"] if one["name"] == "TORCHELASTIC_RESTART_COUNT"]
    assert "restart-attempt" in count["valueFrom"]["fieldRef"]["fieldPath"]
