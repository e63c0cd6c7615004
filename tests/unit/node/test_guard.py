"""The packet filter between a node and its host, in a separate network namespace, and the blocked addresses."""

import sys
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.namespaces import Space, possible

from orchestrate.engines.docker import guard
from orchestrate.node.programs import guard as program

PORT, DNS = 4000, 53
TRY = """
import errno, socket, sys
for place in sys.argv[1:]:
    way, host, port = place.split("/")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if "udp" in way else socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(60)
            if "near" in way:
                sock.setsockopt(socket.SOL_SOCKET, 5, 1)
            if "bound" in way:
                sock.setsockopt(socket.SOL_SOCKET, 25, b"eth0")
            place = (host, int(port), 0, 2) if host.startswith(("fe80", "ff02")) else (host, int(port))
            sock.sendto(b"", place) if "udp" in way else sock.connect(place)
            print("reached")
        except OSError as error:
            print(errno.errorcode.get(error.errno, "timeout"))
"""
V4, V6 = "10.99.0.1", "fd99::1"  # addresses of the host
REFUSED = {"EHOSTUNREACH", "ENETUNREACH", "EACCES", "EPERM"}


class Node:
    """A node, its host, and addresses beyond the host that are reachable through a route."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = Space((), ())
        host, node = (f"{V4}/24", f"{V6}/64", "fe80::1/64"), ("10.99.0.2/24", "fd99::2/64", "fe80::2/64")
        try:
            self.space = Space(host, node, self.host)
        except BaseException:
            self.host.remove()
            raise
        self.space.run("ip", "link", "set", "eth0", "up")
        for address in ("10.98.0.1/32", "fd98::1/128"):
            self.host.run("ip", "addr", "add", address, "dev", "lo", *["nodad"] * (":" in address))
        self.space.run("ip", "route", "add", "default", "via", V4)
        self.space.run("ip", "route", "add", "default", "via", V6)
        for port in (PORT, DNS):
            self.host.listen("0.0.0.0", port)
            self.host.listen("::", port)

    def filter(self, *blocked: str, names: str = "", mark: int = 7) -> None:
        arguments = [str(mark), f"dns:{names}", *blocked]
        self.space.run(sys.executable, "-I", "-S", program.__file__, *arguments)

    def reach(self, *places: str) -> list[str]:
        return self.space.run(sys.executable, "-I", "-S", "-c", TRY, *places).split()

    def remove(self) -> None:
        self.space.remove()
        self.host.remove()


@pytest.fixture
def node(tmp_path):
    possible()
    node = Node(tmp_path)
    yield node
    node.remove()


MASK4, MASK6 = "255.255.255.255", "ffff:" * 7 + "ffff"
BOTH = (f"{V4}/{MASK4}", f"{V6}/{MASK6}")
ALL = [f"tcp/{address}/{PORT}" for address in (V4, V6, "10.98.0.1", "fd98::1")] + [f"udp/fe80::1/{PORT}"]


def test_every_address_must_be_reachable_without_a_filter(node):
    assert node.reach(*ALL, f"near-tcp/{V4}/{PORT}", f"bound-tcp/{V6}/{PORT}", "udp/ff02::1/5353") == ["reached"] * 8


@pytest.mark.parametrize(
    ("blocked", "refused"),
    [
        ((f"{V4}/{MASK4}",), {V4}),
        ((f"{V6}/{MASK6}",), {V6}),
        (("10.98.0.0/255.255.255.0", "fe80::/ffc0::"), {"10.98.0.1", "fe80::1"}),
        (("10.0.0.1/255.0.0.255",), {V4, "10.98.0.1"}),
        (("fd00::/ff00::",), {V6, "fd98::1"}),
        ((), set()),
    ],
)
def test_only_blocked_addresses_must_be_refused_and_immediately(node, blocked, refused):
    node.filter(*blocked)
    for place, result in zip(ALL, node.reach(*ALL)):
        assert result in REFUSED if place.split("/")[1] in refused else result == "reached", place


def test_socket_options_must_not_bypass_the_filter(node):
    node.filter(f"{V4}/{MASK4}", f"{V6}/{MASK6}", "224.0.0.0/224.0.0.0", "ff00::/ff00::")
    connections = [f"{way}-tcp/{V4}/{PORT}" for way in ("near", "bound")]
    hosts = (V4, V6, "224.0.0.1", "ff02::1")
    datagrams = [f"{way}-udp/{host}/{PORT}" for way in ("plain", "near", "bound") for host in hosts]
    assert set(node.reach(*connections, *datagrams)) <= REFUSED


def test_a_name_server_must_be_reachable_only_on_the_dns_port(node):
    names = f"nameserver 127.0.0.11\n# ExtServers: [{V4} host(10.98.0.1) {V6}]\noptions ndots:0\n"
    node.filter("10.0.0.0/255.0.0.0", "fd00::/ff00::", names=names)
    for address, expected in ((V4, "reached"), (V6, "reached"), ("10.98.0.1", ""), ("fd98::1", "")):
        for way in ("tcp", "udp"):
            (found,) = node.reach(f"{way}/{address}/{DNS}")
            assert found == expected if expected else found in REFUSED, address
        (found,) = node.reach(f"tcp/{address}/{PORT}")
        assert found in REFUSED


def test_a_later_filter_must_replace_an_earlier_one(node):
    node.filter(f"{V4}/{MASK4}", mark=1)
    node.filter(f"{V6}/{MASK6}", mark=0x7FFFFFFF)
    first, second = node.reach(*ALL[:2])
    assert first == "reached" and second in REFUSED
    routes = node.space.run("cat", "/proc/net/route").splitlines()
    assert [line.split()[6] for line in routes if line.split()[1] == "000000F0"] == [str(0x7FFFFFFF)]


def test_the_host_must_reach_a_node_only_from_addresses_that_the_node_may_reach(node):
    node.space.listen("0.0.0.0", PORT)
    node.space.listen("::", PORT)
    places = [f"tcp/{address}/{PORT}" for address in ("10.99.0.2", "fd99::2")]
    for blocked, refused in (((), ()), (BOTH[:1], (0,)), ((*BOTH, "tcp:1"), (0, 1))):
        node.filter(*blocked)
        found = node.host.run(sys.executable, "-c", TRY, *places).split()
        assert [result in REFUSED for result in found] == [number in refused for number in range(2)], found
    node.filter(*BOTH, f"tcp:{PORT}")  # open for IPv4 only, see guard.outgoing
    assert node.host.run(sys.executable, "-c", TRY, places[0]) == "reached\n"
    assert node.reach("tcp/127.0.0.1/4000", "tcp/::1/4000", "tcp/10.98.0.1/4000", "tcp/fd98::1/4000") == ["reached"] * 4


FROM = """
import errno, socket, sys
for pair in sys.argv[2:]:
    own, host = pair.split("/")
    try:
        socket.create_connection((host, int(sys.argv[1])), 60, (own, 0)).close()
        print("reached")
    except OSError as error:
        print(errno.errorcode.get(error.errno, "timeout"))
"""


def test_only_its_own_networks_must_reach_a_node(node):
    node.space.listen("0.0.0.0", PORT)
    node.space.listen("::", PORT)
    networks = ("net:10.99.0.0/255.255.255.0", "net:fd99::/ffff:ffff:ffff:ffff::")
    ways = [f"{own}/10.99.0.2" for own in (V4, "10.98.0.1")] + [f"{own}/fd99::2" for own in (V6, "fd98::1")]

    def found() -> list[bool]:
        return [one in REFUSED for one in node.host.run(sys.executable, "-c", FROM, str(PORT), *ways).split()]

    node.filter(*networks)
    assert found() == [False, True, False, True]
    own = [f"tcp/{address}/{PORT}" for address in ("127.0.0.1", "::1", "10.99.0.2", "fd99::2")]
    assert node.reach(*own, *ALL) == ["reached"] * 9
    node.filter(*networks, BOTH[0])
    assert found() == [True, True, False, True]
    node.filter(*networks, f"tcp:{PORT}")
    assert found() == [False] * 4


SPOOF = """
import contextlib, socket, sys
own, host, port = sys.argv[1:]
family, level, option = (10, 41, 78) if ":" in own else (2, 0, 15)  # IPV6_FREEBIND, IP_FREEBIND
with socket.socket(family, socket.SOCK_DGRAM) as here, socket.socket(family, socket.SOCK_DGRAM) as spoofed:
    here.bind((own, 4001))
    spoofed.setsockopt(level, option, 1)
    spoofed.bind((host, int(port)))
    with contextlib.suppress(OSError):
        spoofed.sendto(b"as if from the host", (own, 4001))
    try:
        here.sendto(b"as if an answer", (host, int(port)))
        print("reached")
    except OSError:
        print("refused")
"""


@pytest.mark.parametrize(("own", "host"), [("10.99.0.2", V4), ("fd99::2", V6)])
def test_a_node_must_not_open_the_filter_with_packets_spoofed_from_the_host(node, own, host):
    node.filter(f"{V4}/{MASK4}", f"{V6}/{MASK6}")
    assert node.space.run(sys.executable, "-c", SPOOF, own, host, str(PORT)) == "refused\n"


def test_a_filter_that_the_kernel_refuses_must_be_an_error_and_leave_no_route(node):
    with pytest.raises(AssertionError, match="illegal IP address"):
        node.filter("10.0.0/255.0.0.0")
    assert "000000F0" not in node.space.run("cat", "/proc/net/route")


# --- blocked addresses


TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.1.2.0
        /24 link UNICAST
Local:
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
     |-- 10.1.2.3
        /32 host LOCAL
     |-- 10.1.2.255
        /32 link BROADCAST
     |-- 172.20.0.1
        /32 host LOCAL
     |-- 10.77.77.0
        /24 host LOCAL
        /32 link BROADCAST
Id 100:
     |-- 0.0.0.0
        /0 host LOCAL
"""
IF6 = """fd000000000000000000000000000002 04 40 00 82     eth0
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""
OWN = {
    "Gateway": "10.7.0.1",
    "IPAddress": "10.7.0.3",
    "IPPrefixLen": 16,
    "IPv6Gateway": "fd07::1",
    "EndpointID": "e",
}


def container(**network: object) -> Any:
    return SimpleNamespace(id="1", attrs={"NetworkSettings": {"Networks": {"j_job": network}}})


@pytest.fixture
def proc(tmp_path, monkeypatch) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "fib_trie").write_text(TRIE)
    (tmp_path / "net" / "if_inet6").write_text(IF6)
    monkeypatch.setattr(guard, "PROC", tmp_path)
    return tmp_path


def is_blocked(address: str, **info: object) -> bool:
    """Whether an address is blocked for a node on an engine with this `docker info`."""
    found, one = guard.blocked(info, container(**OWN)), ip_address(address)
    return any(one.version == value.version and int(one) & int(mask) == int(value) for value, mask in found)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd20:ce::254",
        "10.1.2.3",
        "10.1.2.255",
        "172.20.0.1",
        "fd00::2",
        "fe80::fc:ff:fe00:1",
        "fe80::1234",
        "10.7.0.1",
        "10.7.255.255",
        "fd07::1",
        "224.0.0.251",
        "255.255.255.255",
        "ff02::1",
        "172.17.0.1",
        "172.31.255.255",
        "192.168.16.1",
        "10.77.77.5",
    ],
)
def test_this_machine_and_the_metadata_service_must_be_blocked(proc, address):
    assert is_blocked(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "10.1.2.4", "10.7.0.2", "172.17.0.2", "192.168.16.2", "192.168.17.1", "127.0.0.1", "127.0.0.11"]
    + ["2001:db8::1", "::1", "fd00::3", "fd07::2"],
)
def test_all_other_addresses_must_stay_reachable(proc, address):
    assert not is_blocked(address)


def test_the_networks_of_a_node_must_be_those_of_its_addresses():
    found = guard.networks(container(**OWN, GlobalIPv6Address="fd07::3", GlobalIPv6PrefixLen=64))
    assert [f"{value}/{mask}" for value, mask in found] == ["10.7.0.0/255.255.0.0", "fd07::/ffff:ffff:ffff:ffff::"]


def test_addresses_of_future_networks_must_come_from_the_engines_pools(proc):
    pools = [{"Base": "10.96.0.0/12", "Size": 24}, {"Base": "fd12::/16", "Size": 64}]
    assert is_blocked("10.97.5.1", DefaultAddressPools=pools) and is_blocked("10.97.5.255", DefaultAddressPools=pools)
    assert is_blocked("fd12:1::1", DefaultAddressPools=pools) and not is_blocked("fd12:1::2", DefaultAddressPools=pools)
    assert not is_blocked("10.97.5.2", DefaultAddressPools=pools) and not is_blocked(
        "172.17.0.1", DefaultAddressPools=pools
    )


def test_networks_that_come_and_go_must_not_change_the_filter(proc):
    before = guard.blocked({}, container(**OWN))
    trie = proc / "net" / "fib_trie"
    trie.write_text(TRIE.replace("172.20.0.1", "172.23.0.1"))
    (proc / "net" / "if_inet6").write_text(IF6.replace("fe8000000000000000fc", "fe8000000000000000fd"))
    assert guard.blocked({}, container(**OWN)) == before
    trie.write_text(TRIE.replace("10.1.2.3", "10.1.2.4"))
    assert guard.blocked({}, container(**OWN)) != before


def test_gateways_must_be_blocked_even_if_the_machines_addresses_are_unknown(proc):
    for name in ("fib_trie", "if_inet6"):
        (proc / "net" / name).unlink()
    assert guard.addresses(proc / "net") == []
    assert (
        is_blocked("10.7.0.1")
        and is_blocked("172.17.0.1")
        and is_blocked("169.254.169.254")
        and not is_blocked("10.1.2.3")
    )


def test_a_marker_route_must_match_its_filter(proc):
    (proc / "5" / "net").mkdir(parents=True)
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    line = "*\t000000F0\t00000000\t0201\t0\t0\t77\t000000F0\t0\t0\t0\n"
    (proc / "5" / "net" / "route").write_text(head + line)
    assert guard.marked(5, 77) and not guard.marked(5, 7) and not guard.marked(6, 77)
    (proc / "5" / "net" / "route").write_text(head + line.replace("000000F0\t0000", "000000F1\t0000"))
    assert not guard.marked(5, 77)
