"""Environment variables of a worker that follow from the settings of its job."""

from __future__ import annotations

from orchestrate.spec.spec import JobSpec


def of_worker(spec: JobSpec, cores: tuple[int, ...], gpu: str, shared: bool) -> dict[str, str]:
    """Variables for non-default settings of a worker: its cores, command and only GPU, and NCCL on a shared GPU."""
    own = {"WORKER_CORES": ",".join(map(str, cores))} if cores else {}
    own |= {} if spec.expand else {"WORKER_EXPAND": "false"}
    own |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu} if spec.virtual_local_rank else {}
    return own | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if shared else {})
