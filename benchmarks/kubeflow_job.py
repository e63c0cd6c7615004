"""Run the all-reduce with the container backend of Kubeflow's SDK; needs a Python with that SDK.

python kubeflow_job.py IMAGE NODES
"""

import sys
import tempfile
from pathlib import Path

from kubeflow.trainer import ContainerBackendConfig, CustomTrainer, TrainerClient
from kubeflow.trainer.backends.container.types import TrainingRuntimeSource

RUNTIME = """
kind: ClusterTrainingRuntime
metadata: {name: allreduce, labels: {trainer.kubeflow.org/framework: torch}}
spec:
  mlPolicy: {numNodes: 1}
  template: {spec: {replicatedJobs: [{name: node, template: {spec: {template: {spec: {containers: [
    {name: node, image: IMAGE}]}}}}}]}}
"""


def allreduce() -> None:
    """The same as examples/allreduce.py, as a function, since the SDK sends a function's source."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(f"the ranks add up to {total.item():g}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Train, wait, delete."""
    image, nodes = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        runtime = Path(folder, "allreduce.yaml")
        runtime.write_text(RUNTIME.replace("IMAGE", image))
        source = TrainingRuntimeSource(sources=[f"file://{runtime}"])
        client = TrainerClient(ContainerBackendConfig(container_runtime="docker", runtime_source=source))
        env = {"OMP_NUM_THREADS": "1"}
        name = client.train("allreduce", trainer=CustomTrainer(func=allreduce, num_nodes=nodes, image=image, env=env))
        try:
            client.wait_for_job_status(name, timeout=120, polling_interval=1)
            logs = "".join(client.get_job_logs(name))
        finally:
            client.delete_job(name)
    if f"the ranks add up to {sum(range(nodes))}" not in logs:
        sys.exit(logs)


if __name__ == "__main__":
    main()
