"""The plan, compared as text: the rank, GPU and environment of each worker."""

import json
from dataclasses import replace

import pytest
from support.plans import HERE, plan, with_gpus

from orchestrate.errors import ResourceError
from orchestrate.node.ranks import assign, gpu_ids
from orchestrate.plan.plan import in_order, may_use_torch, names, read_plan
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec


def test_without_gpus_the_plan_must_use_gloo_on_cpu():
    assert str(plan(JobSpec(trainers=2), HERE, "mnist-4f2a")) == (
        "job mnist-4f2a: 3 nodes × 1 worker, gloo on CPU (the engine has no NVIDIA runtime)\n"
        "Docker Engine 26.1.5, master at master:29500, 2 threads per worker\n"
        "  rank 0   master     local rank 0  cpu\n"
        "  rank 1   trainer-1  local rank 0  cpu\n"
        "  rank 2   trainer-2  local rank 0  cpu"
    )


def test_the_number_of_workers_per_node_must_follow_from_the_gpus():
    assert str(plan(JobSpec(trainers=1, gpus="all"), with_gpus(4), "a-1")) == (
        "job a-1: 2 nodes × 2 workers, NCCL on GPU\n"
        "Docker Engine 26.1.5, master at master:29500, 2 threads per worker\n"
        "  rank 0   master     local rank 0  GPU-0\n"
        "  rank 1   master     local rank 1  GPU-1\n"
        "  rank 2   trainer-1  local rank 0  GPU-2\n"
        "  rank 3   trainer-1  local rank 1  GPU-3"
    )


def test_the_plan_must_name_the_cluster_whose_nodes_are_used():
    site = HERE.but(cluster="box-77aa", preload=("torch", "torch.distributed"))
    assert site.placement.packages == ("torch",)
    planned = plan(JobSpec(trainers=1, cpus=0.5), site, "a-1")
    first, second, *_ = str(planned).splitlines()
    assert first.startswith("job a-1: 2 nodes × 1 worker, gloo on CPU (") and first.endswith("), on box-77aa")
    assert second == "Docker Engine 26.1.5, master at master:29500, 1 thread per worker, warm"
    assert (planned.project, planned.job_id) == ("box-77aa", "a-1")
    assert plan(JobSpec(), HERE, "a-1").project == "a-1"
    without_master = plan(JobSpec(trainers=1), site, "a-1", nodes=("trainer-1",))
    assert without_master.workers[0].env["MASTER_ADDR"] == "box-77aa-trainer-1"
    for name in ("TORCHELASTIC_RUN_ID", "JOB_ID"):
        assert without_master.workers[0].env[name] == "a-1"


def test_a_pinned_worker_must_have_its_own_cores():
    planned = plan(JobSpec(trainers=2, pin=True), HERE, "a-1")
    assert [line.split("cpu, ")[1] for line in str(planned).splitlines()[2:]] == ["cores 0,1", "cores 2,3", "cores 4,5"]
    assert [worker.env["WORKER_CORES"] for worker in planned.workers] == ["0,1", "2,3", "4,5"]
    assert read_plan(planned.to_json(Mask({})), {}) == planned
    planned = plan(JobSpec(trainers=1, nproc_per_node=2, pin=True), HERE, "a-1")
    assert [worker.cores for worker in planned.workers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    every = plan(JobSpec(trainers=7, pin=True), HERE, "a-1")  # as many workers as there are cores
    assert str(every).splitlines()[-1].endswith("  cpu, core 7")


def test_a_worker_that_is_not_pinned_must_have_no_cores():
    planned = plan(JobSpec(trainers=1), HERE, "a-1")
    assert [(worker.cores, "WORKER_CORES" in worker.env) for worker in planned.workers] == [((), False)] * 2
    more = plan(JobSpec(trainers=20), HERE, "a-1")  # more workers than there are cores
    assert {worker.env["OMP_NUM_THREADS"] for worker in more.workers} == {"1"}


def test_standby_nodes_must_have_no_workers():
    planned = plan(JobSpec(trainers=1, spares=2), HERE, "a-1")
    assert planned.nodes == ("master", "trainer-1") and planned.world_size == 2
    assert plan(JobSpec(trainers=1, spares=2), with_gpus(4), "a-1").nproc_per_node == 2


def test_pin_must_be_refused_if_there_are_too_few_cores():
    with pytest.raises(ResourceError, match="pin: 9 workers need 9 cores, but only 8 are available"):
        plan(JobSpec(trainers=8, pin=True), HERE, "a-1")


@pytest.mark.parametrize(
    ("limit", "engine", "threads"),
    [
        (1.5, "docker", "1"),
        (1.75, "docker", "1"),
        (3, "docker", "3"),
        (3, "swarm", "3"),
        (100, "docker", "4"),
        (0.1, "docker", "1"),
        (1, "process", "4"),
    ],
)
def test_the_number_of_threads_must_not_exceed_a_nodes_limit_of_cores(limit, engine, threads):
    planned = plan(JobSpec(trainers=1, cpus=limit), HERE.but(engine=engine), "a-1")
    assert {worker.env["OMP_NUM_THREADS"] for worker in planned.workers} == {threads}
    fewer = plan(JobSpec(trainers=3, cpus=limit), HERE.but(engine=engine), "a-1", nodes=("master", "trainer-2"))
    assert fewer.workers[0].env["OMP_NUM_THREADS"] == threads


def test_the_plan_must_show_that_a_job_uses_the_host_network():
    local = str(plan(JobSpec(trainers=0), HERE.but(network=""), "a-1"))  # as local processes
    assert "master at master:29500 (open on all interfaces), 8 threads per worker\n" in local
    site = HERE.but(network="host", master_addr="127.0.0.1", interface="lo")
    planned = plan(JobSpec(trainers=0, network="host"), site, "a-1")
    assert "master at 127.0.0.1:29500, 8 threads per worker, on the host network\n" in str(planned)
    assert planned.workers[0].env["GLOO_SOCKET_IFNAME"] == "lo"
    without_master = plan(JobSpec(trainers=1), site, "a-1", nodes=("trainer-1",))
    assert without_master.workers[0].env["MASTER_ADDR"] == "127.0.0.1"


def test_a_worker_must_see_its_gpu_at_its_local_rank_and_no_gpus_of_other_nodes():
    planned = plan(JobSpec(trainers=1, nproc_per_node=2), with_gpus(4), "a-1")
    for worker in planned.workers:
        visible = worker.env["CUDA_VISIBLE_DEVICES"].split(",")
        assert visible[int(worker.env["LOCAL_RANK"])] == worker.gpu
        assert len(visible) == 2
    assert len({worker.gpu for worker in planned.workers}) == 4


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_worker_with_a_virtual_local_rank_must_see_only_its_own_gpu(gpus):
    planned = plan(JobSpec(trainers=1, nproc_per_node=2, virtual_local_rank=True), with_gpus(gpus), "a-1")
    seen = [(worker.env["LOCAL_RANK"], worker.env["CUDA_VISIBLE_DEVICES"]) for worker in planned.workers]
    assert seen == [("0", worker.gpu) for worker in planned.workers]
    assert [worker.local_rank for worker in planned.workers] == [0, 1, 0, 1]


def test_the_environment_must_match_torchruns():
    first, last = plan(JobSpec(trainers=1, nproc_per_node=2), HERE, "a-1").workers[::3]
    assert last.env == first.env | {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
    }
    assert first.env == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "master",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "a-1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "",
        "PL_TRAINER_NUM_NODES": "2",
        "PL_TRAINER_DEVICES": "2",
        "LT_NUM_NODES": "2",
        "LT_DEVICES": "2",
        "LOCAL_SIZE": "2",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
        "JOB_ID": "a-1",
        "JOB_DIR": "/job",
    }


@pytest.mark.parametrize(
    ("command", "modules", "warm", "may"),
    [
        ("a.py", (), True, False),
        ("a.py", ("numpy",), True, False),
        ("a.py", ("torch",), True, True),
        ("a.py", (), False, True),
        ("a.sh", (), True, True),
        ("-m", (), True, True),
    ],
)
def test_only_a_script_that_was_read_must_be_known_not_to_use_torch(command, modules, warm, may):
    spec = JobSpec(command=(command, "x"), trainers=1, warm=warm)
    assert may_use_torch(spec, modules) is may
    workers = plan(spec, HERE.but(preload=modules), "a-1").workers
    assert {worker.env["TORCHELASTIC_USE_AGENT_STORE"] for worker in workers} == {str(may)}  # torchrun's variable
    chosen = replace(spec, env={"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert plan(chosen, HERE, "a-1").workers[0].env["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_only_rank_0_must_read_standard_input():
    planned = plan(JobSpec(trainers=1, nproc_per_node=2, stdin=True), HERE, "a-1")
    assert [worker.env.get("WORKER_STDIN") for worker in planned.workers] == ["/job/stdin", None, None, None]


def test_nodes_must_be_ordered_with_the_master_first_and_trainers_by_number():
    nodes = names(JobSpec(trainers=12))
    assert nodes[:3] == ("master", "trainer-1", "trainer-2") and nodes[-1] == "trainer-12"
    assert in_order(sorted(nodes)) == in_order(reversed(nodes)) == nodes
    assert names(JobSpec(trainers=1, spares=2), spares=True) == ("master", "trainer-1", "trainer-2", "trainer-3")


def test_the_number_of_a_generation_must_be_in_every_workers_environment():
    planned = plan(JobSpec(trainers=2, max_restarts=7), HERE, "a-1", generation=4)
    assert planned.generation == 4
    for worker in planned.workers:
        assert worker.env["TORCHELASTIC_RESTART_COUNT"] == "4"
        assert worker.env["TORCHELASTIC_MAX_RESTARTS"] == "7"


def test_remaining_nodes_must_keep_their_names_and_the_first_must_become_the_master():
    spec = JobSpec(trainers=3)
    planned = plan(spec, HERE, "a-1", generation=1, nodes=("master", "trainer-2", "trainer-3"))
    assert [(worker.node, worker.env["RANK"], worker.env["WORLD_SIZE"]) for worker in planned.workers] == [
        ("master", "0", "3"),
        ("trainer-2", "1", "3"),
        ("trainer-3", "2", "3"),
    ]
    without_master = plan(spec, HERE, "a-1", generation=1, nodes=("trainer-1", "trainer-3"))
    assert {worker.env["MASTER_ADDR"] for worker in without_master.workers} == {"a-1-trainer-1"}


def test_remaining_nodes_must_keep_their_number_of_workers():
    planned = plan(JobSpec(trainers=1), with_gpus(4), "a-1", nodes=("trainer-1",))
    assert [worker.gpu for worker in planned.workers] == ["GPU-0", "GPU-1"] and len(planned.gpus) == 4


def test_a_plan_must_contain_only_the_gpus_that_have_a_worker():
    planned = plan(JobSpec(trainers=0, nproc_per_node=2), with_gpus(4), "a-1")
    assert planned.gpus == ("GPU-0", "GPU-1")
    planned = plan(JobSpec(trainers=1, gpus=4), with_gpus(4), "a-1")
    assert planned.gpus == ("GPU-0", "GPU-1", "GPU-2", "GPU-3") and planned.reason == ""
    planned = plan(JobSpec(trainers=1, gpus=2), with_gpus(4), "a-1")
    assert (planned.gpus, planned.nproc_per_node) == (("GPU-0", "GPU-1"), 1)


def test_a_plan_must_be_read_as_it_was_written():
    planned = plan(JobSpec(trainers=1), with_gpus(4), "a-1", generation=2)
    assert read_plan(planned.to_json(Mask({})), {}) == planned
    site = HERE.but(preload=("torch", "numpy"), code="/code", cluster="box-77aa")
    planned = plan(JobSpec(command=("x.py", "a b"), hyperparameters={"lr": "0.1"}, pin=True), site, "a-1")
    assert planned.command == ("x.py", "a b", "--lr", "0.1")
    assert read_plan(planned.to_json(Mask({})), {}) == planned


def test_a_plan_must_be_written_without_secrets_and_be_read_with_the_secrets_of_the_job():
    env = {"HF_TOKEN": "canary", "URL": "https://me:canary@host", "A": "b", "PHRASE": "canaries"}
    spec = JobSpec(trainers=1, env=env, secrets={"PHRASE": "variable"}, command=("x.py", "canaries"))
    planned = plan(spec, HERE, "a-1")
    text = planned.to_json(spec.mask())
    assert "canar" not in text and '"A": "b"' in text and '"HF_TOKEN": "***"' in text
    assert read_plan(text, spec.env) == replace(planned, command=("x.py", "***"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"inventory": {}}'])
def test_an_invalid_plan_must_be_refused(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_plan(text, {})


def test_the_users_environment_must_reach_every_worker():
    planned = plan(JobSpec(trainers=1, env={"A": "1", "OMP_NUM_THREADS": "7"}), HERE.but(data={"train": "/d"}), "a-1")
    env = {"A": "1", "OMP_NUM_THREADS": "7", "DATA_TRAIN": "/d"}
    assert all(env.items() <= worker.env.items() for worker in planned.workers)
    assert ", 7 threads per worker" in str(planned)
    assert ", 4,2 threads per worker" in str(plan(JobSpec(env={"OMP_NUM_THREADS": "4,2"}), HERE, "a-1"))


@pytest.mark.parametrize(
    ("spec", "gpus", "message", "hint"),
    [
        (JobSpec(trainers=3, command=("x.py",)), 2, "4 workers need 4 GPUs, but only 2 are available", "--nodes 2"),
        (JobSpec(trainers=3, gpus=2), 4, "4 workers need 4 GPUs, but --gpus is 2", "set --gpus 4, use fewer"),
        (
            JobSpec(trainers=0, nproc_per_node=2),
            1,
            "2 workers need 2 GPUs, but only 1 is available",
            "(--nproc-per-node 1)",
        ),
        (JobSpec(nproc_per_node=2, gpus="all"), 5, "8 workers need 8 GPUs", "(--nodes 2, --nproc-per-node 1)"),
        (JobSpec(trainers=2, command=("x.py",)), 1, "3 workers need 3 GPUs, but only 1 is available", "(--nodes 1)"),
        (JobSpec(gpus=5), 4, "--gpus 5: only 4 are available: GPU-0, GPU-1, GPU-2, GPU-3", "--gpus 4"),
        (JobSpec(gpus="all"), 0, "--gpus all: the engine has no NVIDIA runtime", "--gpus none"),
        (JobSpec(gpus=1), 0, "--gpus 1: the engine has no NVIDIA runtime", "--gpus none"),
    ],
)
def test_too_few_gpus_must_be_refused_with_a_hint(spec, gpus, message, hint):
    with pytest.raises(ResourceError, match=message) as caught:
        plan(spec, with_gpus(gpus), "a-1")
    assert hint in caught.value.hint


def test_gpus_none_must_hide_the_gpus():
    planned = plan(JobSpec(gpus="none"), with_gpus(4), "a-1")
    assert {worker.env["CUDA_VISIBLE_DEVICES"] for worker in planned.workers} == {""}
    assert {worker.gpu for worker in planned.workers} == {""} and planned.gpus == ()
    assert ", gloo on CPU (--gpus none)\n" in str(planned)


def test_only_nodes_on_different_machines_must_get_gpus_of_equal_index():
    nodes = [{"host": host, "cpus": 4, "gpus": ["0", "1"]} for host in ("a", "b", "a")]
    envs = assign(nodes, 1, "m", 1, "j", "eth0")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0", "0", "1"]
    assert [env["OMP_NUM_THREADS"] for env in envs] == ["2", "4", "2"]


def test_a_machine_with_fewer_gpus_than_workers_must_be_refused():
    with pytest.raises(ValueError, match="2 workers on one machine need as many GPUs; it has 1"):
        assign([{"host": "a", "cpus": 1, "gpus": ["0"]}] * 2, 1, "m", 1, "j", "eth0")


def test_gpus_with_mig_instances_must_count_as_their_instances():
    listing = (
        "GPU 0: NVIDIA A100 (UUID: GPU-aa)\n  MIG 1g.5gb Device 0: (UUID: MIG-b1)\n"
        "  MIG 1g.5gb Device 1: (UUID: MIG-b2)\nGPU 1: NVIDIA A100 (UUID: GPU-cc)\n"
    )
    assert gpu_ids(listing) == ["MIG-b1", "MIG-b2", "GPU-cc"]


def forged(nodes: int, nproc: int, node: str = "", **more) -> str:
    """A plan of `nodes` nodes with `nproc` workers each, whose workers claim to be on `node`, if it is given."""
    values = json.loads(plan(JobSpec(trainers=1), HERE, "j").to_json(Mask({})))
    names = ["master", *(f"trainer-{number}" for number in range(1, nodes))][:nodes]
    places = enumerate(name for name in names for _ in range(nproc))
    workers = [values["workers"][0] | {"rank": rank, "node": node or name, "env": {}} for rank, name in places]
    return json.dumps(values | {"nodes": names, "nproc_per_node": nproc, "workers": workers, **more})


@pytest.mark.parametrize("name", ["/etc", "..", "../a-0000", "a/../b-0000", "a-0000\n", "A-0000", ""])
@pytest.mark.parametrize("key", ["job_id", "cluster"])
def test_a_plan_with_an_invalid_job_or_cluster_name_must_be_refused(name, key):
    values = json.loads(forged(2, 1))
    if key == "cluster":
        values["placement"]["cluster"] = name or " "
    else:
        values["job_id"] = name
    with pytest.raises(ValueError, match="is not the name of a job"):
        read_plan(json.dumps(values), {})


@pytest.mark.parametrize("name", ["/etc", "trainer-0", "trainer-1\n", "trainer-1/..", "master-1", ""])
def test_a_plan_with_an_invalid_node_name_must_be_refused(name):
    values = json.loads(forged(2, 1))
    values["nodes"][1] = values["workers"][1]["node"] = name
    with pytest.raises(ValueError, match="is not the name of a node"):
        read_plan(json.dumps(values), {})


@pytest.mark.parametrize(("nodes", "nproc"), [(1001, 1), (1, 1024)])
def test_a_plan_with_the_maximum_number_of_nodes_or_workers_must_be_read(nodes, nproc):
    assert read_plan(forged(nodes, nproc), {}).world_size == nodes * nproc


@pytest.mark.parametrize(
    ("nodes", "nproc", "more"),
    [(1002, 1, {}), (20_000, 1, {}), (1, 1025, {}), (0, 1, {}), (1, 0, {}), (1, 1, {"nproc_per_node": 10**12})],
)
def test_a_plan_with_an_invalid_number_of_nodes_or_workers_must_be_refused(nodes, nproc, more):
    wrong = f"it has {nodes} nodes with [0-9]+ workers each, but a job has 1 to 1001 nodes with 1 to [0-9]+ workers"
    with pytest.raises(ValueError, match=wrong):
        read_plan(forged(nodes, nproc, **more), {})


@pytest.mark.parametrize(
    ("nodes", "nproc", "node", "more"),
    [(2, 1, "trainer-7", {}), (2, 2, "master", {}), (1, 2, "", {"nproc_per_node": 1}), (1, 1, "", {"workers": []})],
)
def test_a_plan_whose_workers_are_not_on_the_nodes_of_their_ranks_must_be_refused(nodes, nproc, node, more):
    with pytest.raises(ValueError, match="its ranks are not numbered from 0, or not on its nodes"):
        read_plan(forged(nodes, nproc, node, **more), {})


@pytest.mark.parametrize("wrong", ["\ud800", "a\0b"], ids=ascii)
def test_a_plan_with_text_that_cannot_be_passed_to_a_process_must_be_refused(wrong):
    values = json.loads(plan(JobSpec(trainers=1), HERE, "j").to_json(Mask({})))
    with pytest.raises(ValueError, match="its command has text that cannot be passed to a process"):
        read_plan(json.dumps(values | {"command": ["x.py", wrong]}), {})
    for env in ({wrong: "a"}, {"A": wrong}, {"": "a"}, {"A=B": "a"}):
        workers = [values["workers"][0], values["workers"][1] | {"env": env}]
        with pytest.raises(ValueError, match="the environment variable .* cannot be passed to rank 1"):
            read_plan(json.dumps(values | {"workers": workers}), {})
    path = [worker | {"env": worker["env"] | {"JOB_DIR": "/a\udcff"}} for worker in values["workers"]]
    assert read_plan(json.dumps(values | {"workers": path}), {}).workers[0].env["JOB_DIR"] == "/a\udcff"
