"""Variables that a training script for SageMaker expects, with `sagemaker: true`.

The names are those in ENVIRONMENT_VARIABLES.md of https://github.com/aws/sagemaker-training-toolkit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from orchestrate.spec.spec import JobSpec

LOG_LEVEL = 20  # INFO


def variables(
    spec: JobSpec, data: Mapping[str, str], source: str, nodes: Sequence[str], env: Mapping[str, str], cpus: int
) -> dict[str, str]:
    """Return the variables of a worker, whose own are in `env`.

    `data` are the paths of its data by name, `source` its working directory, `nodes` the names of all nodes, and `cpus`
    the cores of its own.
    """
    node, job_dir = nodes[int(env["NODE_RANK"])], env["JOB_DIR"]
    gpus = len([each for each in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if each])
    script = spec.command[1] if spec.command[0] == "-m" else PurePath(spec.command[0]).name
    network = {"current_host": node, "hosts": list(nodes), "network_interface_name": env["GLOO_SOCKET_IFNAME"]}
    shared: dict[str, Any] = {
        **network,
        "input_dir": f"{job_dir}/input",
        "input_data_dir": f"{job_dir}/input/data",
        "log_level": LOG_LEVEL,
        "model_dir": f"{job_dir}/model",
        "module_dir": source,
        "module_name": script.removesuffix(".py"),
        "num_cpus": cpus,
        "num_gpus": gpus,
        "output_data_dir": f"{job_dir}/output/data",
        "output_dir": f"{job_dir}/output",
        "user_entry_point": script,
    }
    training_env = shared | {
        "channel_input_dirs": dict(data),
        "hyperparameters": dict(spec.hyperparameters),
        "is_master": env["NODE_RANK"] == "0",
        "job_name": env["JOB_ID"],
        "master_hostname": nodes[0],
        "resource_config": network,
    }
    values: dict[str, Any] = {
        **shared,
        "channels": sorted(data),
        "current_host_rank": env["NODE_RANK"],
        "entry_script": script,
        "host_count": len(nodes),
        "hps": dict(spec.hyperparameters),
        "master_addr": env["MASTER_ADDR"],
        "master_port": env["MASTER_PORT"],
        "source_dir": source,
        "training_env": training_env,
        "user_args": list(spec.command_line[1:]),
    }
    values |= {f"channel_{name}": path for name, path in data.items()}
    values |= {f"hp_{name}": value for name, value in spec.hyperparameters.items()}
    return {f"SM_{name.upper().replace('-', '_')}": _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
