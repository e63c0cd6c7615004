"""JobSpec: the specification of a job. Its fields are the keys of a job file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from orchestrate.dataclass import dataclass
from orchestrate.spec import inputs, values
from orchestrate.spec.redact import Mask, redacted

APP = ("-m", "app.train", "--resume", "auto")
IMAGE = "orchestrate-node:0.1"
# Keys whose values are always text.
TEXTS = ("command", "before", "env", "hyperparameters", "labels", "metrics", "name", "slurm", "user")

NODES = values.integer(1, values.MAX_TRAINERS + 1)


@values.kind(values.list_of({"type": "string"}))
def _optional_keys(value: Any) -> list[str]:
    names = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name in FIELDS for name in names):
        raise ValueError("a list of job-file keys")
    return names


def _field(default: Any, kind: values.Kind, doc: str, absent: str = "") -> Any:
    """Define a key of the job file.

    `doc` is its description in Markdown, for the README, `--help`, errors and editors; `absent` describes the default
    if that is not a value of the key.
    """
    factory = (lambda: type(default)(default)) if isinstance(default, (dict, list)) else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={"kind": kind, "doc": doc, "absent": absent})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Specification of a job. Its fields are the keys of a job file; durations are in seconds."""

    name: str = _field(
        "", values.NAME, "name of the job; its id is the name plus six random characters", "the script's name"
    )
    command: tuple[str, ...] = _field(
        APP,
        values.command,
        "command of each worker: `SCRIPT.py ARGS`, `-m MODULE ARGS`, or any program with arguments",
        "the app",
    )
    hyperparameters: dict[str, Any] = _field(
        {},
        inputs.hyperparameters,
        "options to add to `command` unless it has them: `{lr: 0.1, amp: true, sizes: [1, 2]}` adds "
        "`--lr 0.1 --amp --sizes 1 2`; `false` and `null` add nothing",
    )
    source: str = _field(
        "",
        values.SOURCE,
        "code folder, or [a revision](packages.md#source-code) of a Git repository: `git+URL@REVISION#FOLDER`",
        "the current folder",
    )
    chdir: str = _field(
        "",
        values.PATH,
        "folder in the code folder in which workers start, and paths in `command`, if the script needs "
        "[files above its folder](data.md#files-above-the-scripts-folder)",
        "the code folder",
    )
    before: tuple[str, ...] = _field(
        (), values.optional_command, "command that each node runs once before its workers start, such as a download"
    )
    expand: bool = _field(
        True,
        values.boolean,
        "whether to expand `$JOB_DIR`, `$RANK`, `$WORLD_SIZE` and [the other "
        "variables](environment.md) (`$NAME` or `${NAME}`) in `command`, separately for each worker",
    )
    stdin: bool = _field(
        False, values.boolean, "whether rank 0 reads the standard input of `run`, which is read to its end at the start"
    )
    trainers: int = _field(
        3,
        values.integer(0, values.MAX_TRAINERS),
        "number of nodes besides the master; `nodes` includes it",
    )
    nproc_per_node: int | None = _field(
        None,
        values.optional(values.integer(1, values.MAX_WORKERS)),
        "number of workers per node",
        "one per GPU, or 1 without GPUs",
    )
    virtual_local_rank: bool = _field(
        False,
        values.boolean,
        "whether each worker sees only its own GPU, and has the local rank 0 (`torchrun --virtual-local-rank`)",
    )
    sagemaker: bool = _field(
        False,
        values.boolean,
        "whether to set the `SM_*` variables of [SageMaker's training scripts](sagemaker.md)",
    )
    gpus: str | int = _field("auto", values.gpus, "GPUs to use: `auto` (all that are free), `all`, `none`, or a number")
    share_gpus: bool = _field(
        False,
        values.boolean,
        "whether nodes may [share GPUs](gpu.md#several-workers-on-one-gpu) if there are fewer GPUs than workers",
    )
    queue: bool = _field(
        False,
        values.boolean,
        "whether to [wait](gpu.md#the-queue) until enough GPUs are free, or with `pin` cores, in order of arrival",
    )
    engine: str = _field(
        "auto",
        values.choice("auto", "docker", "process", "swarm", "slurm"),
        "where nodes run: `docker`, `process`, `swarm`, `slurm`, or `auto` (Slurm if `slurm` is set and its commands "
        "are installed; otherwise Docker if it is running, or local processes)",
    )
    image: str = _field(
        IMAGE,
        values.text(rf"{values.VISIBLE}+", "the name of an image"),
        "container image of the nodes, with Python 3.9 or later",
        "the project's image",
    )
    dockerfile: str = _field("", values.PATH, "folder with a `Dockerfile` to build the image from, instead of `image`")
    pip: list[str] = _field(
        [], inputs.packages, "Python packages to [install](packages.md), such as `[lightning, transformers>=4]`"
    )
    requirements: str = _field("", values.PATH, "requirements file with packages to install before those of `pip`")
    user: str = _field(
        "auto",
        values.USER,
        "user of nodes in containers: `auto` (you, or [an unprivileged user](files.md#ownership) if you are root), "
        "`root`, or `UID:GID`",
    )
    env: dict[str, str] = _field({}, values.env, "environment variables of every worker, in part [secrets](secrets.md)")
    secrets: dict[str, str] = _field(
        {},
        inputs.secrets,
        "[secrets](secrets.md): `{HF_TOKEN: env}` or `{HF_TOKEN: FILE}` makes a file with the value available, at the "
        "path in `$HF_TOKEN_FILE`; a list of names marks variables of `env` as secret",
    )
    data: dict[str, str] = _field(
        {},
        inputs.data,
        "folders with [data](data.md) by name: `{train: DIR}` is read-only in nodes, at the path in `$DATA_TRAIN`",
    )
    mounts: list[str] = _field(
        [], inputs.mounts, "folders of this machine to [mount](data.md) in nodes, such as `[~/models:/models]`"
    )
    services: str = _field(
        "",
        values.PATH,
        "Compose file with [services](tuning.md#services) that the job's nodes reach by name, such as a database",
    )
    ports: list[str] = _field(
        [],
        inputs.ports,
        "ports of the master to [open](tuning.md#ports) on this machine, such as `[6006]` or `[8080:80]`",
    )
    labels: dict[str, str] = _field(
        {}, inputs.labels, "labels of the job's containers, such as `{team: vision}`, for `docker ps --filter label=…`"
    )
    metrics: dict[str, str] = _field(
        {},
        inputs.metrics,
        "metrics in the [output](watching.md#metrics) of rank 0: `{loss: 'loss=([0-9.]+)'}`, a regular expression "
        "for each, whose first group is the value",
        "what Trainer, tqdm, Lightning and Keras print",
    )
    checkpoints: str = _field(
        "",
        values.STORAGE,
        "[object store](storage.md) such as `s3://bucket/digits`, to which checkpoints are copied while the job "
        "runs, and from which it continues",
    )
    output: str = _field(
        "", values.STORAGE, "[object store](storage.md) to which the files of the job are copied at its end"
    )
    memory: str | None = _field(
        None,
        values.optional(values.limit),
        "[memory limit](tuning.md#memory) of each node, such as `4g`, or `unlimited`",
        "an equal share of the machine's memory",
    )
    cpus: float | None = _field(
        None, values.optional(values.cpus), "CPU limit of each node, in cores, such as `1.5`", "no limit"
    )
    shm_size: str = _field("1g", values.size, "size of `/dev/shm` in each node, such as `512m`")
    pin: bool = _field(
        False, values.boolean, "whether to pin each worker to its own cores, for machines that run nothing else"
    )
    network: str = _field(
        "bridge",
        values.choice("bridge", "host"),
        "network of the nodes: `bridge` (private to the job) or `host` ([less isolated](tuning.md#network))",
    )
    isolated: bool = _field(
        False, values.boolean, "whether nodes can reach only each other: no other network, and not the internet"
    )
    host_access: bool = _field(
        False,
        values.boolean,
        "whether nodes can reach this machine's ports and the cloud's metadata service, and this machine can reach "
        "theirs; see [what nodes can reach](tuning.md#what-nodes-can-reach)",
    )
    encrypt: bool = _field(False, values.boolean, "Swarm: whether to encrypt traffic on the job's network")
    constraints: list[str] = _field(
        [],
        values.constraints,
        "Swarm: [placement constraints](swarm.md#where-nodes-go) of nodes, such as `node.labels.gpu==a100`",
    )
    volume: str = _field(
        "",
        values.VOLUME,
        "Swarm: folder or Docker volume shared by all hosts; Kubernetes: PersistentVolumeClaim for `$JOB_DIR`",
    )
    slurm: dict[str, str] = _field(
        {},
        inputs.slurm,
        "Slurm: [options of sbatch](slurm.md#options) such as `{partition: gpu, account: vision, time: 2h}`",
    )
    max_run: float | None = _field(
        None, values.optional(values.LONG), "time limit of the job, such as `2h`", "no limit"
    )
    grace: float = _field(30.0, values.GRACE, "grace period between SIGTERM and SIGKILL, at most `1d`")
    max_restarts: int = _field(
        3, values.integer(0, 1_000_000), "maximum number of restarts within `restart_window` before the job fails"
    )
    restart_window: float = _field(3600.0, values.LONG, "time window in which restarts are counted")
    rules: list[dict[str, Any]] = _field(
        [], values.rules, "[actions on failures](restarts.md#what-a-failure-means), by exit code, cause or log"
    )
    min_trainers: int | None = _field(
        None,
        values.optional(values.integer(0, values.MAX_TRAINERS)),
        "minimum number of trainers to continue with after a node is lost",
        "all",
    )
    spares: int = _field(0, values.integer(0, values.MAX_TRAINERS), "number of standby nodes that replace lost ones")
    hang_after: float | None = _field(
        600.0, values.optional_duration, "time without output or CPU use after which a job counts as hung, or `none`"
    )
    on_event: str = _field(
        "",
        values.PATH,
        "URL to [notify](restarts.md#notifications) when the job starts, restarts, hangs or ends; on the command "
        "line also a program",
    )
    optional: list[str] = _field(
        [],
        _optional_keys,
        "keys to ignore if the engine does not support them, such as `[memory]`; other unsupported keys are an error",
    )
    require_communication: bool = _field(
        False,
        values.boolean,
        "whether a job fails if its [workers exchange no data](frameworks.md#the-world-check)",
    )
    keep: float | None = _field(
        None,
        values.optional(values.LONG),
        "time for which the job's nodes [stay up](warm.md#kept-nodes) after it for the next job, such as `10m`",
        "not kept",
    )
    warm: bool = _field(True, values.boolean, "whether to fork workers from a process that has already imported torch")
    preload: list[str] = _field([], values.modules, "additional modules to import before forking workers")

    contents: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)  # of secret files; not a key

    @property
    def command_line(self) -> tuple[str, ...]:
        """The command with the options of `hyperparameters`, except those that it has already."""
        given = {word.partition("=")[0] for word in self.command}
        return (*self.command, *_options({k: v for k, v in self.hyperparameters.items() if f"--{k}" not in given}))

    @property
    def queued_gpus(self) -> int | None:
        """The least number of GPUs that a job in the queue waits for; None if it does not wait."""
        if not self.queue:
            return None
        return 1 if self.share_gpus or self.command == APP else (self.trainers + 1) * (self.nproc_per_node or 1)

    @property
    def files(self) -> dict[str, str]:
        """Sources of the secrets that become files: `env` or a path, by name."""
        return {name: source for name, source in self.secrets.items() if source != inputs.VARIABLE_OF_ENV}

    def mask(self) -> Mask:
        """Return a mask of all secrets of the job, and of the URL that is notified."""
        others = {f"{name} as a file": content for name, content in self.contents.items()}
        if self.on_event.startswith(("http://", "https://")):  # it may contain a token
            others["the URL of on_event"] = self.on_event
        return Mask(self.env | others, {*self.secrets, *others})

    def to_yaml(self, hide: Mask | None = None) -> str:
        """The job as a job file that resolves to this spec; with `hide`, without its secrets, which YAML may escape."""
        fields = {key: getattr(self, key) for key in FIELDS}
        fields |= {key: list(value) for key, value in fields.items() if isinstance(value, tuple)}
        if hide:
            fields = hide.inside(fields | {"env": redacted(self.env, self.secrets)})
        return yaml.safe_dump(fields, sort_keys=False)


def _options(hyperparameters: Mapping[str, Any]) -> Iterator[str]:
    for name, value in hyperparameters.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


FIELDS = {field.name: field for field in dataclasses.fields(JobSpec) if field.metadata}
# Keys with a value for each name: KEY.NAME sets one of them.
MAPPINGS = tuple(key for key in FIELDS if isinstance(getattr(JobSpec(), key), dict))


def description(key: str) -> str:
    """Description of a key, as plain text with its default."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", FIELDS[key].metadata["doc"])
    return f"{text} (default: {default})" if (default := default_of(key)) else text


def default_of(key: str) -> str:
    """Default of a key, as written in a job file or as a description; empty if there is none."""
    field, value = FIELDS[key], getattr(JobSpec(), key)
    if words := field.metadata["absent"]:
        return str(words)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):  # all are durations
        unit, seconds = next((unit, size) for unit, size in (("h", 3600), ("m", 60), ("s", 1)) if value % size == 0)
        return f"{value / seconds:g}{unit}"
    return str(value) if value not in (None, "", (), [], {}) else ""


def unencodable(spec: JobSpec) -> str:
    """Why the command and environment cannot be passed to processes of this machine; empty if they can be."""
    for key, text in [
        *(("command", word) for word in (*spec.command_line, *spec.before)),
        *((f"env.{name}", value) for name, value in spec.env.items()),
    ]:
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            return f"{key} has characters that this locale's encoding, {error.encoding}, cannot represent"
    return ""
