"""The GPUs of a job must follow from the output of `nvidia-smi` and the caller's environment."""

import dataclasses
import os

import pytest
from support.plans import HERE, plan

from orchestrate.errors import ResourceError
from orchestrate.host import gpus
from orchestrate.host.claims import Claim
from orchestrate.host.cores import PCI, near, shares_near
from orchestrate.host.gpus import Busy, Gpu, Offer, offer, read, trouble_of, why_none
from orchestrate.plan.plan import read_plan
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec

# As nvidia-smi 580 prints them, shortened: two GPUs, the second in MIG mode with two instances.
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-45cbf7b3-f919-7228-7a26-b06628ebefa1)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 1g.10gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
"""
DETAILS = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
	<driver_version>580.95.05</driver_version>
	<cuda_version>13.0</cuda_version>
	<attached_gpus>2</attached_gpus>
	<gpu id="00000000:07:00.0">
		<product_name>NVIDIA H200</product_name>
		<display_active>Disabled</display_active>
		<persistence_mode>Disabled</persistence_mode>
		<mig_mode>
			<current_mig>Disabled</current_mig>
		</mig_mode>
		<mig_devices>
			None
		</mig_devices>
		<uuid>GPU-45cbf7b3-f919-7228-7a26-b06628ebefa1</uuid>
		<fb_memory_usage>
			<total>143771 MiB</total>
			<reserved>651 MiB</reserved>
			<used>20000 MiB</used>
			<free>123120 MiB</free>
		</fb_memory_usage>
	</gpu>
	<gpu id="00000000:0A:00.0">
		<persistence_mode>Enabled</persistence_mode>
		<mig_mode>
			<current_mig>Enabled</current_mig>
		</mig_mode>
		<mig_devices>
			<mig_device>
				<index>0</index>
				<fb_memory_usage>
					<total>40192 MiB</total>
					<used>37 MiB</used>
				</fb_memory_usage>
			</mig_device>
			<mig_device>
				<index>1</index>
				<fb_memory_usage>
					<total>9728 MiB</total>
					<used>9000 MiB</used>
				</fb_memory_usage>
			</mig_device>
		</mig_devices>
		<uuid>GPU-8932f937-d72c-4106-c12f-20bd9faed9f6</uuid>
		<fb_memory_usage>
			<total>N/A</total>
			<used>N/A</used>
		</fb_memory_usage>
	</gpu>
</nvidia_smi_log>
"""
MIG_ALONE = LISTING.splitlines()[2]
FREE, BUSY = (
    Gpu(id=f"GPU-{name}", index=0, used=used << 20, total=1000 << 20) for name, used in (("f", 50), ("b", 51))
)
BOX = tuple(dataclasses.replace(gpu, id=f"{gpu.id}{i}", index=i) for i, gpu in enumerate((BUSY, FREE, BUSY, FREE)))


def ids(offered: Offer) -> list[str]:
    return [gpu.id for gpu in offered.gpus]


def test_gpus_and_mig_instances_must_be_read_with_their_memory_and_bus_id():
    whole, large, small = read(LISTING, DETAILS)
    assert whole == Gpu(
        id="GPU-45cbf7b3-f919-7228-7a26-b06628ebefa1",
        index=0,
        name="NVIDIA H200",
        bus="00000000:07:00.0",
        used=20000 << 20,
        total=143771 << 20,
        persistent=False,
        driver="580.95.05",
    )
    assert (large.id, small.id) == (
        "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
        "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d",
    )
    assert (large.index, large.bus, large.name, large.persistent) == (
        1,
        "00000000:0A:00.0",
        "NVIDIA A100-SXM4-80GB",
        True,
    )
    assert (large.used, large.total, small.used >> 20, small.total >> 20) == (37 << 20, 40192 << 20, 9000, 9728)
    assert (whole.busy, large.busy, small.busy) == (True, False, True)


@pytest.mark.parametrize(
    "details",
    ["", "No devices were found", "<nvidia_smi_log>", "<a/>", DETAILS.replace("MiB", "?").replace("00000000:", "../")],
)
def test_gpus_must_be_read_without_details_too(details):
    found = read(LISTING, details)
    assert [gpu.id[:8] for gpu in found] == ["GPU-45cb", "MIG-c738", "MIG-a28a"]
    assert not any(gpu.busy or gpu.bus for gpu in found)


def test_a_gpu_in_mig_mode_without_instances_must_not_be_offered():
    listing = "".join(line for line in LISTING.splitlines(keepends=True) if "MIG" not in line)
    assert [gpu.name for gpu in read(listing, DETAILS)] == ["NVIDIA H200"]
    assert len(read(listing, "")) == 2  # without details, the mode is not known


def test_a_desktop_on_the_same_gpu_must_not_count_as_another_program():
    details = DETAILS.replace("<display_active>Disabled", "<display_active>Enabled")
    desktop = read(LISTING, details)[0]
    assert desktop.display and desktop.busy  # 20 GB are in use
    assert read(LISTING, details.replace("display_active>", "display_mode>"))[0].display  # of older drivers
    assert not dataclasses.replace(desktop, used=9 << 30).busy and dataclasses.replace(desktop, used=10 << 30).busy


def test_gpu_names_with_parentheses_and_indices_with_gaps_must_be_read():
    (found,) = read("GPU 3: NVIDIA TITAN X (Pascal) (UUID: GPU-1)\n", "")
    assert (found.name, found.index) == ("NVIDIA TITAN X (Pascal)", 3)


def test_a_huge_listing_must_be_read_quickly_up_to_a_limit_and_without_duplicates():
    assert len(read("".join(f"GPU 0: x (UUID: GPU-{n})\n" for n in range(5000)), "")) == gpus.MAX_GPUS_READ
    assert len(read("GPU 0: x (UUID: GPU-1)\n" * 3 + "  MIG a (UUID: MIG-1)\n" * 3, "")) == 1
    flood = "GPU is lost " * 100_000
    assert read(flood, flood) == () and trouble_of(flood) == ""  # within the time limit of a test


def test_xml_entities_in_the_details_must_be_ignored():
    log = "<nvidia_smi_log><driver_version>&a;</driver_version></nvidia_smi_log>"
    bomb = f'<!DOCTYPE nvidia_smi_log [<!ENTITY a "580">]>{log}'
    assert read(LISTING, bomb)[0].driver == ""


@pytest.mark.parametrize(
    "listing", ["", "No devices were found\n", "GPU 0: x (UUID: ../../etc)", "(UUID: GPU-1)", MIG_ALONE]
)
def test_an_invalid_listing_must_give_no_gpus(listing):
    assert read(listing, DETAILS) == ()


def test_auto_must_leave_out_gpus_in_use_and_a_number_must_take_them_last():
    assert ids(offer(BOX, "auto", {})) == ["GPU-f1", "GPU-f3"]
    assert offer(BOX, "auto", {}).note == "2 GPUs in use by other programs, skipped" and not offer(BOX, "auto", {}).why
    assert ids(offer(BOX, 3, {})) == ["GPU-f1", "GPU-f3", "GPU-b0"]
    assert ids(offer(BOX, 4, {})) == ["GPU-f1", "GPU-f3", "GPU-b0", "GPU-b2"]
    assert offer(BOX, 3, {}).note == "GPU-b0, 5% of its memory in use" and offer(BOX, 2, {}).note == ""
    assert ids(offer(BOX, "all", {})) == [gpu.id for gpu in BOX]
    assert len(offer(BOX, 5, {}).gpus) == 4  # the plan reports that there are too few
    assert str(Gpu(id="GPU-u", index=0, used=1)) == "GPU-u"  # in use, of a total that is not known


def test_auto_must_report_that_all_gpus_are_in_use_with_a_hint():
    why = "1 GPU in use by other programs; use --gpus all to include it, or --queue to wait"
    assert offer((BOX[0],), "auto", {}) == Offer(why=why)
    assert offer((BOX[0], BOX[2]), "auto", {}).why.endswith("; use --gpus all to include them, or --queue to wait")


def test_gpus_of_other_jobs_must_count_as_in_use_and_name_the_job(monkeypatch):
    claim = Claim("a-1", ("GPU-f1",), (), 0, os.geteuid(), 0.0)
    monkeypatch.setattr(gpus.claims, "users", lambda job: {"GPU-f1": claim} if job == "b-1" else {})
    box = gpus.claimed(BOX, "b-1")
    assert ids(offer(box, "auto", {})) == ["GPU-f3"] and gpus.claimed(BOX, "a-1") == BOX
    assert "GPU-f1, in use by a-1" in offer(box, "all", {}).note


@pytest.mark.parametrize(
    ("asked", "least", "count"),
    [("auto", 1, 0), ("auto", 2, 0), ("auto", 3, 3), ("auto", 9, 4), (2, 1, 0), (3, 1, 3), ("all", 1, 4)],
)
def test_a_job_in_the_queue_must_wait_until_enough_gpus_are_free(asked, least, count):
    if not count:
        assert offer(BOX, asked, {}, queue=least).gpus
        return
    with pytest.raises(Busy) as busy:
        offer(BOX, asked, {}, queue=least)
    assert (busy.value.count, busy.value.among) == (count, tuple(gpu.id for gpu in BOX))
    assert busy.value.users == ("other programs",)
    assert str(busy.value).endswith("4 GPUs must be free, in use by other programs")


def test_a_job_in_the_queue_must_not_wait_on_a_machine_without_gpus():
    assert offer((), "auto", {}, queue=1) == Offer()


MIG = read(LISTING, DETAILS)


@pytest.mark.parametrize(
    ("found", "named", "seen"),
    [
        (BOX, "1,0", ["GPU-f1", "GPU-b0"]),
        (BOX, " 3 , 1 ", ["GPU-f3", "GPU-f1"]),
        (BOX, "GPU-f3", ["GPU-f3"]),
        (BOX, "1,9,2", ["GPU-f1"]),  # like CUDA, which stops at an index that does not exist
        (BOX, "1,1,2", ["GPU-f1"]),
        (BOX, ",1", []),
        (BOX, "", []),
        (BOX, "-1", []),
        (BOX, "NoDevFiles", []),
        (MIG, "1", [gpu.id for gpu in MIG[1:]]),
        (MIG, "MIG-a28", [MIG[2].id]),
    ],
)
def test_the_callers_cuda_visible_devices_must_be_respected(found, named, seen):
    offered = offer(found, "all", {"CUDA_VISIBLE_DEVICES": named})
    assert ids(offered) == seen
    assert offered.why == ("" if seen else f"CUDA_VISIBLE_DEVICES={named} matches none of the 4 GPUs")
    assert seen or offer(found, "auto", {"CUDA_VISIBLE_DEVICES": named}) == offered
    assert offer((), "auto", {"CUDA_VISIBLE_DEVICES": named}) == Offer()  # the reason is another one


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Fake a machine, with PCI devices and with or without an `nvidia-smi` script."""

    def fake(smi: str = "", **devices: tuple[str, str]) -> None:
        (tmp_path / "bin").mkdir()
        if smi:
            (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin" if smi else str(tmp_path / "bin"))
        for name, (kind, vendor) in devices.items():
            (tmp_path / "pci" / name).mkdir(parents=True)
            (tmp_path / "pci" / name / "class").write_text(f"{kind}\n")
            (tmp_path / "pci" / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "pci" / "removed").mkdir(parents=True)  # has no files anymore
        monkeypatch.setattr(gpus, "PCI", tmp_path / "pci")

    return fake


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ({}, "this machine has no NVIDIA GPU"),
        ({"net": ("0x020000", "0x8086")}, "this machine has no NVIDIA GPU"),
        ({"a": ("0x030000", "0x8086")}, "this machine has no NVIDIA GPU (Intel GPUs are not supported)"),
        (
            {"a": ("0x120000", "0x1002"), "b": ("0x038000", "0x8086")},
            "this machine has no NVIDIA GPU (AMD and Intel GPUs are not supported)",
        ),
        (
            {"a": ("0x030200", "0x10de"), "b": ("0x030000", "0x8086")},
            "nvidia-smi does not list this machine's NVIDIA GPU: install the NVIDIA driver",
        ),
    ],
)
def test_the_reason_why_there_is_no_gpu_must_follow_from_the_pci_devices(machine, devices, why):
    machine(**devices)
    assert gpus.look() == () and why_none() == why


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
UNREACHED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
LOST = "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (MISMATCH, f"nvidia-smi: {MISMATCH} (restart the machine to load the new driver)"),
        (UNREACHED, f"nvidia-smi: {UNREACHED.rstrip('.')}"),
        (LOST, f"nvidia-smi: {LOST}"),
    ],
)
def test_a_driver_that_fails_must_be_reported_with_its_own_message(machine, message, why):
    machine(f'echo "{message}" >&2; exit 18', a=("0x030200", "0x10de"))
    assert gpus.look() == () and why_none() == why == trouble_of(f"x\n{message}\nNVML library version: 580.95\n")


def test_control_characters_in_the_output_of_a_container_must_not_reach_the_terminal():
    assert (
        trouble_of("Failed to initialize NVML: \x1b]0;owned\x07") == "nvidia-smi: Failed to initialize NVML: ]0;owned"
    )
    listing, details = LISTING.replace("H200", "\x1b]0;H200\x07"), DETAILS.replace("580.95.05", "580.95\n\u009b2J")
    found = read(listing, details)[0]
    assert (found.name, found.driver) == ("NVIDIA 0H200", "")


def test_the_gpus_of_this_machine_must_be_the_ones_that_nvidia_smi_lists(machine, tmp_path):
    (tmp_path / "list").write_text(LISTING)
    (tmp_path / "details").write_text(DETAILS)
    machine(f'[ "$1" = -L ] && cat {tmp_path}/list || cat {tmp_path}/details')
    assert gpus.look() == MIG
    (tmp_path / "bin" / "nvidia-smi").chmod(0o644)  # which cannot be run
    assert gpus.look() == ()


def test_the_cores_near_a_gpu_must_be_those_of_its_numa_node(tmp_path):
    (tmp_path / "0000:0a:00.0").mkdir()
    (tmp_path / "0000:0a:00.0" / "local_cpulist").write_text("0-2,8\n")
    assert near("00000000:0A:00.0", tmp_path) == (0, 1, 2, 8)
    (tmp_path / "0000:0a:00.0" / "local_cpulist").write_text("\n")  # a machine without this information
    assert near("00000000:0A:00.0", tmp_path) == near("00000000:0B:00.0", tmp_path) == near("", tmp_path) == ()
    assert gpus.fields(Offer(gpus=BOX), pin=True)["gpu_cores"] == ((),) * len(BOX)  # whose bus is not known
    bus = next((f"0000{device.name}" for device in PCI.glob("*")), "")  # of any device of this machine
    found = [gpus.fields(Offer(gpus=(dataclasses.replace(FREE, bus=bus),)), pin)["gpu_cores"] for pin in (True, False)]
    assert found == [(near(bus),), ()]


def test_workers_must_be_bound_to_the_cores_near_their_gpus():
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    assert shares_near(tuple(range(8)), [second, first]) == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert shares_near(tuple(range(8)), [second, second, first]) == [(4, 5), (6, 7), (0, 1)]
    assert shares_near((2, 3, 5), [second, first]) == [(5,), (2,)]  # the other cores are not available to us
    assert shares_near((0, 2, 1, 3), [first, first]) == [(0, 2), (1, 3)]  # neighbors stay together
    for unknown in ([(), first], [(0, 1, 2), (2, 3)], [(9,), first]):
        assert shares_near(tuple(range(8)), unknown) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_pinned_plan_must_use_the_cores_near_the_gpus_and_be_read_as_it_was_written():
    site = HERE.but(gpus=("GPU-0", "GPU-1"), gpu_cores=((4, 5, 6, 7), (0, 1, 2, 3)))
    planned = plan(JobSpec(trainers=1, pin=True), site, "a-1")
    assert [worker.cores for worker in planned.workers] == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert read_plan(planned.to_json(Mask({})), {}) == planned
    spec = JobSpec(trainers=0, nproc_per_node=1, pin=True, command=("x.py",))
    (alone,) = plan(spec, site.but(gpu_cores=()), "a-1").workers
    assert alone.cores == (0, 1, 2, 3, 4, 5, 6, 7)


def test_shared_gpus_must_be_assigned_in_turn_and_be_shown_in_the_plan():
    site = HERE.but(gpus=("GPU-0", "GPU-1"), gpu_note="2 GPUs in use by other programs, skipped")
    planned = plan(JobSpec(trainers=2, share_gpus=True), site, "a-1")
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in planned.workers] == ["GPU-0", "GPU-1", "GPU-0"]
    assert {worker.env["NCCL_MULTI_RANK_GPU_ENABLE"] for worker in planned.workers} == {"1"}
    assert planned.gpus == ("GPU-0", "GPU-1")
    first = str(planned).splitlines()[0]
    assert first.endswith("3 nodes × 1 worker, on 2 shared GPUs (2 GPUs in use by other programs, skipped)")
    alone = plan(JobSpec(trainers=1, share_gpus=True), site, "a-1")
    assert "NCCL on GPU (2 GPUs" in str(alone) and alone.gpus == ("GPU-0", "GPU-1")
    with pytest.raises(ResourceError, match="3 workers need 3 GPUs"):  # which may be on other machines
        plan(JobSpec(trainers=2, share_gpus=True), site.but(engine="swarm"), "a-1")


def test_a_restart_with_a_gpu_for_each_node_must_not_share_any():
    site = HERE.but(gpus=("GPU-0", "GPU-1"))
    fewer = plan(JobSpec(trainers=2, share_gpus=True), site, "a-1", nodes=("master", "trainer-2"))
    assert "NCCL on GPU\n" in str(fewer) and "NCCL_MULTI_RANK_GPU_ENABLE" not in fewer.workers[0].env


def test_the_default_job_must_run_on_any_machine_with_a_gpu():
    site = HERE.but(gpus=("GPU-0",), gpu_note="1 GPU in use by other programs, skipped")
    assert ", on 1 shared GPU (" in str(plan(JobSpec(), site, "a-1"))
    for spec in (JobSpec(command=("x.py",)), JobSpec(gpus="all")):
        with pytest.raises(
            ResourceError, match=r"only 1 is available \(1 GPU in use by other programs, skipped\)"
        ) as e:
            plan(spec, site, "a-1")
        assert e.value.hint.startswith("wait for them (--queue), use fewer")


def test_a_node_must_use_one_mig_instance():
    site = HERE.but(gpus=("MIG-0", "MIG-1", "MIG-2"))
    assert [worker.gpu for worker in plan(JobSpec(trainers=1), site, "a-1").workers] == ["MIG-0", "MIG-1"]
    with pytest.raises(ResourceError, match="2 workers per node, but a node can use only one MIG instance"):
        plan(JobSpec(trainers=0, nproc_per_node=2), site, "a-1")


def test_the_workers_of_one_node_must_not_share_a_gpu():
    site = HERE.but(gpus=("GPU-0",))
    with pytest.raises(ResourceError, match="4 workers need 4 GPUs, but only 1 is available") as caught:
        plan(JobSpec(trainers=1, nproc_per_node=2, share_gpus=True), site, "a-1")
    assert "share_gpus" not in caught.value.hint
    with pytest.raises(ResourceError) as caught:
        plan(JobSpec(trainers=1, command=("x.py",)), site, "a-1")
    assert "let nodes share GPUs (--set share_gpus=true)" in caught.value.hint


def test_nvidia_smi_must_not_wait_for_input_or_for_a_driver_that_hangs(machine, monkeypatch):
    machine("cat; sleep 100")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_TIMEOUT", 0.2)
    assert gpus.look() == () and why_none() == "nvidia-smi: NVIDIA-SMI has failed to respond within 0.2 s"
