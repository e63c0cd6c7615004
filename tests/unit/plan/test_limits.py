"""By default, all nodes of a job together must leave memory for the machine; limits of the job file take precedence."""

import dataclasses

import pytest
from support.plans import HERE, plan, with_gpus

from orchestrate.api.cluster import Cluster
from orchestrate.errors import UsageError
from orchestrate.host.users import nodes_of
from orchestrate.plan.limits import limits
from orchestrate.plan.plan import read_plan
from orchestrate.record.paths import JobPaths
from orchestrate.spec.layers import resolve
from orchestrate.spec.redact import Mask
from orchestrate.spec.sizes import parse_size
from orchestrate.spec.spec import JobSpec

MB, GB = 1 << 20, 1 << 30
MACHINE = HERE.but(memory=64 * GB)


@pytest.mark.parametrize(
    ("machine", "nodes", "each"),
    [
        (64 * GB, 1, 64 * GB * 9 // 10),
        (64 * GB, 4, 64 * GB * 9 // 40),
        (8 * GB, 1, 7 * GB),  # the machine keeps a gigabyte, which is more than a tenth
        (8 * GB, 2, 7 * GB // 2),
        (4 * GB, 8, 512 * MB),  # the minimum
        (GB // 2, 1, 512 * MB),
        (0, 3, 0),  # not known
    ],
)
def test_a_nodes_share_must_be_what_the_machine_can_spare(machine, nodes, each):
    found = limits(None, machine, nodes).memory
    assert found == pytest.approx(each, abs=1)
    assert not machine or found == 512 * MB or found * nodes <= machine - max(GB, machine // 10)


@pytest.mark.parametrize(("limit", "memory"), [("4g", 4 * GB), ("100m", 100 * MB), ("unlimited", 0)])
def test_the_limit_of_the_job_file_must_take_precedence_over_the_share(limit, memory):
    for machine in (64 * GB, 0):
        assert limits(limit, machine, 4).memory == memory


@pytest.mark.parametrize(
    ("limit", "machine", "tmp"),
    [
        (None, 8 * GB, 7 * GB // 2),
        ("100m", 8 * GB, 50 * MB),
        ("unlimited", 8 * GB, 7 * GB // 2),  # half of the default share
        (None, 0, 2 * GB),
        ("unlimited", 0, 2 * GB),
        ("4g", 0, 2 * GB),
    ],
)
def test_temporary_files_must_be_limited_to_half_of_a_nodes_memory(limit, machine, tmp):
    assert limits(limit, machine, 1).tmp == tmp


@pytest.mark.parametrize(("nodes", "each"), [(1, 16384), (4, 4096), (5, 3276), (16, 1024), (32, 512), (1001, 512)])
def test_the_process_limit_of_a_job_must_be_divided_among_its_nodes_with_a_minimum(nodes, each):
    assert limits(None, 0, nodes).processes == each


def test_the_plan_must_show_the_memory_of_each_node():
    shared = plan(JobSpec(trainers=3), MACHINE, "a-1")
    assert shared.limits == limits(None, 64 * GB, 4)
    second = str(shared).splitlines()[1]
    assert second.endswith("master at master:29500, 2 threads per worker, 14.4 GiB of memory per node")
    for limit, size in (("512m", "512 MiB"), ("4g", "4 GiB"), ("1100m", "1.1 GiB"), ("64k", "64 KiB")):
        assert f", {size} of memory per node\n" in str(plan(JobSpec(memory=limit), MACHINE, "a-1"))
    for spec, site in ((JobSpec(), HERE), (JobSpec(memory="unlimited"), MACHINE)):
        assert "memory" not in str(plan(spec, site, "a-1"))


def test_standby_and_lost_nodes_must_count_among_the_nodes_of_a_machine():
    assert plan(JobSpec(trainers=1, spares=2), MACHINE, "a-1").limits == limits(None, 64 * GB, 4)
    fewer = plan(JobSpec(trainers=3), MACHINE, "a-1", nodes=("master", "trainer-2"))
    assert fewer.limits == limits(None, 64 * GB, 4)  # otherwise a node that comes back would get more than the others
    assert plan(JobSpec(trainers=1, gpus="all"), with_gpus(4).but(memory=GB), "a").limits.processes


def test_local_processes_must_have_no_limits():
    site = MACHINE.but(engine="process")
    for limit in (None, "4g", "unlimited"):
        assert plan(JobSpec(memory=limit), site, "a-1").limits.memory == 0


def test_the_limits_of_a_clusters_nodes_must_not_depend_on_the_job(tmp_path):
    spec = JobSpec(trainers=6, spares=1)
    one = Cluster(JobPaths(tmp_path / "c-1"), spec, plan(spec, MACHINE, "c-1"))
    one.paths.create_cluster(nodes_of(spec.user))
    job = JobSpec(trainers=1)
    planned = plan(job, (MACHINE.inventory, one.placement(MACHINE.placement, "a-1")), "a-1")
    assert one.differences(job, planned) == [] and planned.limits == one.plan.limits == limits(None, 64 * GB, 8)
    (why,) = one.differences(dataclasses.replace(job, memory="unlimited"), planned)
    assert why == "memory is not set on the cluster, unlimited in the job"


def test_limits_must_be_read_as_they_were_written():
    planned = plan(JobSpec(memory="4g"), MACHINE.but(hosts=2, sharing=9), "a-1")
    assert read_plan(planned.to_json(Mask({})), {}) == planned


@pytest.mark.parametrize("memory", ["unlimited", "4g", None])
def test_memory_must_be_a_size_unlimited_or_not_set(memory):
    assert resolve({"memory": memory}).memory == memory


@pytest.mark.parametrize("memory", ["none", "0", "4 g", "-1", "", True, "Unlimited", "4t"])
def test_an_invalid_size_must_be_refused(memory):
    with pytest.raises(UsageError, match="memory must be a size such as 512m or 4g, or unlimited, not"):
        resolve({"memory": memory})


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("10b", 10), ("4k", 4096), ("64M", 64 << 20), ("2g", 2 << 30)])
def test_sizes_must_have_the_same_units_as_dockers(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(("hosts", "most"), [(1, 7), (2, 4), (3, 3), (7, 1), (9, 1)])
def test_of_several_machines_the_one_with_the_most_nodes_must_count(hosts, most):
    site = MACHINE.but(engine="swarm", hosts=hosts)
    assert plan(JobSpec(trainers=5, spares=1), site, "a-1").limits == limits(None, 64 * GB, most)
