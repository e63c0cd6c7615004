"""Findings of `doctor` on the settings of an engine and on the limits of this machine."""

import datetime

import pytest

from orchestrate.doctor import machine


def network(*subnets: object, **attrs: object) -> object:
    return {"IPAM": {"Config": [{"Subnet": one} for one in subnets]}, **attrs}


def lines_with(found, capsys, word: str, **facts: object) -> list[str]:
    """The findings that have a word, with their hints."""
    lines, code = found(capsys, **facts)
    assert code == 0
    return [line for i, line in enumerate(lines) if word in line or ("hint" in line and word in lines[i - 1])]


def test_address_pools_must_be_counted_and_a_warning_before_they_are_used_up(found, capsys):
    some = [network(f"172.{n}.0.0/16") for n in range(17, 20)]
    others = [network(), network("10.1.0.0/24"), network("fd00::/64"), network(None), network("", "no subnet")]
    others += [network("fd00::/64", "172.30.0.0/16"), network(IPAM=None), network(IPAM={"Config": [None]})]
    (line,) = lines_with(found, capsys, "address pools", networks=[*some, *others])
    assert line == "ok       address pools for 27 more networks: one for each job"
    pool = [{"Base": "10.5.0.0/16", "Size": 24}, {"Base": "fd00::/48", "Size": 64}, {"Base": "x"}, {}]
    full = [network(f"10.5.{n}.0/24") for n in range(254)]
    warning, hint = lines_with(found, capsys, "address pools", networks=full, DefaultAddressPools=pool)
    assert warning == "warning  address pools for 2 more networks: one for each job" and "network prune" in hint


@pytest.mark.parametrize(("ahead", "reported"), [(0, False), (-2, False), (60, True), (-3600, True)])
@pytest.mark.parametrize("zone", [0, 2, -5.5])
def test_a_clock_that_differs_must_be_reported(found, capsys, ahead, reported, zone):
    offset = datetime.timezone(datetime.timedelta(hours=zone))
    there = (datetime.datetime.now(offset) + datetime.timedelta(seconds=ahead)).isoformat()
    if zone == 0:
        there = there.replace("+00:00", "Z")
    assert bool(lines_with(found, capsys, "clock", SystemTime=there)) is reported


@pytest.mark.parametrize("text", ["", None, "0001-01-01T00:00:00Z", "soon"])
def test_an_engine_that_does_not_know_the_time_must_not_be_compared(found, capsys, text):
    assert lines_with(found, capsys, "clock", SystemTime=text) == []


@pytest.mark.parametrize(("own", "link", "reported"), [("", 1500, False), ("", 1450, True), ("1400", 1450, False)])
def test_packets_that_are_too_large_must_be_reported(found, capsys, monkeypatch, own, link, reported):
    monkeypatch.setattr(machine, "link_mtu", lambda: link)
    options = {"com.docker.network.driver.mtu": own} if own else {}
    found_lines = lines_with(found, capsys, "packets", NetworkOptions=options)
    assert bool(found_lines) is reported and (not reported or '"1450"' in found_lines[1])


def test_warnings_of_the_engine_and_its_settings_must_be_reported(found, capsys):
    lines, _ = found(capsys, Warnings=["WARNING: No swap limit support"], CgroupVersion="1", LiveRestoreEnabled=True)
    assert "warning  the engine reports: No swap limit support" in lines
    assert "ok       when the engine restarts, jobs continue" in lines


def test_disks_and_shared_memory_that_are_almost_full_must_be_reported(found, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "LITTLE_DISK", 1 << 62)
    (warning, hint) = lines_with(found, capsys, "the disk of the engine", DockerRootDir=str(tmp_path))
    assert warning.startswith("warning ") and "docker system df" in hint
    monkeypatch.setattr(machine, "LITTLE_SHARED_MEMORY", 1 << 62)
    assert [finding.state for finding in machine.limits()][:1] == ["warning"]
