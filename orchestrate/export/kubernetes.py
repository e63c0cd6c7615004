"""Export a job to Kubernetes: an Indexed Job with a headless service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from orchestrate.engines.swarm.service_spec import boot, program
from orchestrate.errors import UsageError
from orchestrate.export import Shape, carries_node, document, shape
from orchestrate.host import users
from orchestrate.node.ranks import MASTER_PORT
from orchestrate.plan import container
from orchestrate.spec.spec import JobSpec

VERSIONS = {  # the versions that the tests validate against
    "job": "Kubernetes 1.28 and later",
    "jobset": "JobSet v1alpha2 on Kubernetes 1.28 and later",
    "trainjob": "Kubeflow Trainer 2.3 with its runtime torch-distributed",
}
HEAD = {
    "job": "A failed pod ends the job; apply it again to continue from the last checkpoint.",
    "jobset": "When a pod fails, all pods restart from the last checkpoint.",
    "trainjob": "Kubeflow starts the pods through a JobSet.",
}
UNREACHABLE_SECONDS = 30  # until pods of an unreachable machine are evicted; the default of Kubernetes is 300
CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")  # a DNS subdomain (RFC 1123)
MOUNT_PATHS = {"job": "/job", "tmp": "/tmp", "shm": "/dev/shm"}
RESTART_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
Object = dict[str, Any]


def kubernetes(spec: JobSpec, name: str, form: str) -> str:
    """Return the manifests of a job for `kubectl apply`; `form` is job, jobset or trainjob.

    Raises UsageError for settings that cannot be exported.
    """
    job = shape(spec, name if name[0].isalpha() else f"job-{name}")
    if spec.volume and (len(spec.volume) > 253 or not CLAIM.fullmatch(spec.volume)):
        raise UsageError(
            f"volume {spec.volume} is not a valid name of a PersistentVolumeClaim",
            "create a claim for that storage, and export with --set volume=NAME",
        )
    objects = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[form](spec, job)
    if not carries_node(spec.image):
        content = base64.b64encode(program()).decode()
        objects.insert(0, _object("v1", "ConfigMap", f"{job.name}-node", binaryData={"node": content}))
    lines = [f"{job.name}, for {VERSIONS[form]}.", HEAD[form], f"Your code must be in the image {spec.image}."]
    if not spec.volume:
        lines.append("No volume in the job file: files and checkpoints are lost with their pod.")
    if spec.gpus == "auto":
        lines.append("No GPUs: --gpus all requests one per worker.")
    if job.secrets:
        keys = " ".join(f'--from-file={key}=<(printf %s "${key}")' for key in job.secrets)
        lines.append("Create its Secret first, from environment variables in bash:")
        lines.append(f"  kubectl create secret generic {job.name}-env {keys}")
    head = "".join(f"# {line}\n" for line in lines)
    return head + document(*objects)


def _object(version: str, kind: str, name: str, **content: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _job(spec: JobSpec, job: Shape) -> list[Object]:
    service = _object(
        "v1",
        "Service",
        job.name,
        spec={
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "publishNotReadyAddresses": True,
        },
    )
    pod = _pod(spec, job, f"{job.name}-0.{job.name}")
    pod["subdomain"] = job.name
    return [service, _object("batch/v1", "Job", job.name, spec=_indexed(spec, job, pod))]


def _jobset(spec: JobSpec, job: Shape) -> list[Object]:
    pod = _pod(spec, job, f"{job.name}-node-0-0.{job.name}")
    attempt = {"name": "TORCHELASTIC_RESTART_COUNT", "valueFrom": {"fieldRef": {"fieldPath": RESTART_ATTEMPT}}}
    pod["containers"][0]["env"].append(attempt)
    content = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": spec.max_restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": _indexed(spec, job, pod)}}],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, spec=content)]


def _trainjob(spec: JobSpec, job: Shape) -> list[Object]:
    node = _container(spec, job, "")
    patch = {
        "name": "node",
        "securityContext": node["securityContext"],
        "volumeMounts": node["volumeMounts"],
    }
    whole = _pod(spec, job, "")
    kept = ("terminationGracePeriodSeconds", "tolerations", "securityContext", "volumes")
    pod = {**{name: whole[name] for name in kept}, "containers": [patch]}
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    trainer = {
        "image": node["image"],
        "command": node["command"],
        "args": node["args"],
        "numNodes": job.nodes,
        "numProcPerNode": job.nproc,
        "resourcesPerNode": node["resources"],
        "env": node["env"],
    }
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    content: Object = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "orchestrate.export/kubernetes", "trainingRuntimeSpec": runtime}],
    }
    if spec.max_run:
        content["activeDeadlineSeconds"] = math.ceil(spec.max_run)
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", job.name, spec=content)]


def _indexed(spec: JobSpec, job: Shape, pod: Object) -> Object:
    """Return an Indexed Job that fails as soon as one pod does: a restarted rank could not rejoin the others."""
    content: Object = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    if spec.max_run:
        content["activeDeadlineSeconds"] = math.ceil(spec.max_run)
    return content | {"template": {"spec": pod}}


def _pod(spec: JobSpec, job: Shape, master: str) -> Object:
    tolerations = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": UNREACHABLE_SECONDS,
        }
        for taint in ("unreachable", "not-ready")
    ]
    user, group = users.asked(spec.user) or container.USER  # the accounts of the cluster's machines are unknown
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": container.stop_seconds(spec.grace),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": tolerations,
        "securityContext": {
            "runAsNonRoot": user != 0,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, job, master)],
        "volumes": _volumes(spec, job),
    }


def _container(spec: JobSpec, job: Shape, master: str) -> Object:
    env = job.env | {"JOB_DIR": f"/job/{job.name}" if spec.volume else "/job"}
    env |= {name: value for name, value in container.ACCOUNT.items() if name not in env}
    if master:  # otherwise Kubeflow sets them
        env |= {"MASTER_ADDR": master, "MASTER_PORT": str(MASTER_PORT)}
    secrets: list[Object] = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-env", "key": key}}} for key in job.secrets
    ]
    limits: dict[str, Any] = {}
    if spec.cpus:
        limits["cpu"] = f"{spec.cpus:g}"
    if job.memory:
        limits["memory"] = _quantity(job.memory)
    if job.gpus:
        limits["nvidia.com/gpu"] = job.gpus
    mounts: list[Object] = [{"name": name, "mountPath": path} for name, path in MOUNT_PATHS.items()]
    command = ["python", container.PROGRAM]
    if not carries_node(spec.image):
        command = ["python", "-c", boot("/node/node")]
        mounts += [{"name": "program", "mountPath": "/node", "readOnly": True}, {"name": "run", "mountPath": "/run"}]
    return {
        "name": "node",
        "image": spec.image,
        "command": command,
        "args": [_literal(word) for word in spec.command_line],
        "env": [{"name": key, "value": _literal(value)} for key, value in env.items()] + secrets,
        "resources": {"limits": limits} if limits else {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _literal(text: str) -> str:
    """Escape text so that Kubernetes does not expand `$(NAME)`."""
    return text.replace("$", "$$")


def _volumes(spec: JobSpec, job: Shape) -> list[Object]:
    memory = {"medium": "Memory", "sizeLimit": _quantity(spec.shm_size)}
    kept: Object = {"persistentVolumeClaim": {"claimName": spec.volume}} if spec.volume else {"emptyDir": {}}
    volumes = [{"name": "job", **kept}, {"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": memory}]
    if not carries_node(spec.image):
        volumes += [{"name": "program", "configMap": {"name": f"{job.name}-node"}}, {"name": "run", "emptyDir": {}}]
    return volumes


def _quantity(size: str) -> str:
    """Convert a size from Docker's form `4g` to Kubernetes' `4Gi`."""
    number, unit = size.rstrip("bkmgBKMG"), size.lstrip("0123456789").lower()
    return number + {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi"}[unit]
