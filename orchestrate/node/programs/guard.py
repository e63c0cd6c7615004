"""Block a node's access to its host's ports and the cloud's metadata service, and others' access to the node.

A program that runs next to the node:

    python -I -S guard.py MARK [dns:TEXT] ADDRESS/MASK ... net:ADDRESS/MASK ... tcp:PORT ...

The orchestrator runs it in the node's network namespace with CAP_NET_ADMIN there, which no node has: as root itself, or
in a separate container. TEXT is the node's resolv.conf, by default that of the container. It sets up a packet filter
(nf_tables) that rejects what the node sends to these addresses, and what it receives from them and from outside of its
own networks (`net:`): torch's store has no password, and any user of the host could change its content; so could other
containers, while Docker replaces its own rules between networks.
Routes are not enough: a socket that is bound to an interface (SO_BINDTODEVICE) or skips gateways (SO_DONTROUTE)
bypasses them, and needs no capability for that.

Everyone can still connect to the ports that are listed.
It also adds a route to an unused address: a mark that shows the orchestrator, in /proc, that the filter is in place.
Numbers are those of linux/netlink.h, linux/rtnetlink.h and linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

NAME = "orchestrate"  # of the table
INCOMING, OUTGOING = ("in", 1), ("out", 3)  # names of chains, and their hooks
MARK = "240.0.0.0"  # a reserved block of addresses that are never used
ROUTE, NETFILTER = 0, 12  # families of netlink
ADD_ROUTE, DELETE_ROUTE = 24, 25
BEGIN, END = 16, 17
TABLE, DELETE_TABLE, CHAIN, RULE = 0xA00, 0xA02, 0xA03, 0xA06
REQUEST, ACK, CREATE, APPEND = 1, 4, 0x400, 0x800
REGISTER = 8  # the register that expressions use
UNREACHABLE = 7
IPV4, IPV6 = 2, 10
LENGTH = {IPV4: 4, IPV6: 16}  # bytes of an address
SOURCE, DESTINATION = {IPV4: 12, IPV6: 8}, {IPV4: 16, IPV6: 24}  # its offsets in the packet's header
PROHIBITED = {IPV4: b"\x0d", IPV6: b"\x01"}  # ICMP: "administratively prohibited"
ICMP6, TCP = 58, 6
DNS = 53
LOOPBACK = ["127.0.0.0/255.0.0.0", "::1/ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]
ANY = ["0.0.0.0/0.0.0.0", "::/::"]


def attribute(kind: int, *parts: bytes) -> bytes:
    """An attribute of a netlink message, or several within one."""
    content = b"".join(parts)
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def number(kind: int, value: int) -> bytes:
    """A numeric attribute."""
    return attribute(kind, struct.pack(">I", value))


def text(kind: int, value: str) -> bytes:
    """A text attribute."""
    return attribute(kind, value.encode() + b"\0")


def expression(name: str, *attributes: bytes) -> bytes:
    """An expression of a rule."""
    return attribute(1, text(1, name), attribute(2, *attributes))


def equals(value: bytes) -> bytes:
    """Continue with the rule if the register has this value."""
    return expression("cmp", number(1, REGISTER), number(2, 0), attribute(3, attribute(1, value)))


def field(base: int, offset: int, length: int) -> bytes:
    """Load a part of the packet, from its network header (1) or transport header (2)."""
    return expression("payload", number(1, REGISTER), number(2, base), number(3, offset), number(4, length))


def masked(mask: bytes) -> bytes:
    """Keep the bits of a mask."""
    whole = [number(1, REGISTER), number(2, REGISTER), number(3, len(mask))]
    return expression("bitwise", *whole, attribute(4, attribute(1, mask)), attribute(5, attribute(1, bytes(len(mask)))))


ACCEPT = expression("immediate", number(1, 0), attribute(2, attribute(2, number(1, 1))))
IS_ANSWER = expression("ct", number(1, REGISTER), number(2, 1)) + equals(b"\x01")  # on connections to the node
IS_ICMP6 = expression("meta", number(1, REGISTER), number(2, 16)) + equals(bytes([ICMP6]))  # neighbor discovery
IS_TCP = expression("meta", number(1, REGISTER), number(2, 16)) + equals(bytes([TCP]))
IS_DNS = field(2, 2, 2) + equals(struct.pack(">H", DNS))


def outgoing(family: int, blocked: list[str], servers: list[bytes]) -> list[bytes]:
    """Rules for packets that a node sends; `blocked` has addresses of both families, `servers` are DNS servers."""
    to = field(1, DESTINATION[family], LENGTH[family])
    # Only IPv4 allows answers: with IPv6, a process could fake a connection from the host (IPV6_FREEBIND) and answer.
    found = [IS_ANSWER + ACCEPT if family == IPV4 else IS_ICMP6 + ACCEPT]
    found += [to + equals(server) + IS_DNS + ACCEPT for server in servers if len(server) == LENGTH[family]]
    return found + refused(family, to, blocked)


def incoming(family: int, blocked: list[str], ports: list[int], own: list[str]) -> list[bytes]:
    """Rules for packets that a node receives: from its `own` networks, if there are any, without blocked addresses.

    Answers, and connections to these ports, may come from anywhere.
    """
    sender = field(1, SOURCE[family], LENGTH[family])
    found = [IS_ANSWER + ACCEPT] + [IS_ICMP6 + ACCEPT] * (family == IPV6)
    found += [IS_TCP + field(2, 2, 2) + equals(struct.pack(">H", port)) + ACCEPT for port in ports]
    found += refused(family, sender, blocked)
    if own:
        found += [match + ACCEPT for match in matches(family, sender, [*own, *LOOPBACK])]
        found += refused(family, sender, ANY)
    return found


def refused(family: int, address: bytes, blocked: list[str]) -> list[bytes]:
    """A rule for each blocked address of a family; `address` loads the packet's."""
    refuse = expression("reject", number(1, 0), attribute(2, PROHIBITED[family]))
    return [match + refuse for match in matches(family, address, blocked)]


def matches(family: int, address: bytes, patterns: list[str]) -> list[bytes]:
    """The beginning of a rule for each ADDRESS/MASK of a family; `address` loads the packet's."""
    pairs = [[*map(packed, word.split("/"))] for word in patterns]
    return [address + masked(mask) + equals(value) for value, mask in pairs if len(value) == LENGTH[family]]


def packed(address: str) -> bytes:
    """The bytes of an address; raises OSError if it is invalid."""
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def message(kind: int, flags: int, head: bytes, *attributes: bytes) -> bytes:
    """A netlink message with its type as the sequence number."""
    body = head + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, flags | REQUEST, kind, 0) + body


def batch(family: int, wanted: dict[tuple[str, int], list[bytes]]) -> list[bytes]:
    """The messages that replace all rules of an earlier call in one transaction; `wanted` are the rules by chain."""
    head, table = struct.pack("=BBH", family, 0, 0), text(1, NAME)
    edge = struct.pack(">BBH", 0, 0, 10)
    new = CREATE | ACK
    chains = []
    for (name, hook), rules in wanted.items():
        where = attribute(4, number(1, hook), number(2, 0))  # at the default priority
        chains.append(message(CHAIN, new, head, table, text(3, name), where, text(7, "filter")))
        chains += [message(RULE, new | APPEND, head, table, text(2, name), attribute(4, rule)) for rule in rules]
    return [
        message(BEGIN, 0, edge),
        message(TABLE, new, head, table),
        message(DELETE_TABLE, ACK, head, table),
        message(TABLE, new, head, table),
        *chains,
        message(END, 0, edge),
    ]


def send(protocol: int, messages: list[bytes]) -> None:
    """Send messages to the kernel; raises OSError for the first one that fails."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.send(b"".join(messages))
        for one in messages:
            if struct.unpack_from("=H", one, 6)[0] & ACK:
                code = -struct.unpack_from("=i", sock.recv(1 << 16), 16)[0]
                if code:
                    raise OSError(code, os.strerror(code))


def mark(value: int) -> None:
    """Replace the mark of an earlier call."""
    head = struct.pack("=8BI", IPV4, 4, 0, 0, 254, 4, 0, UNREACHABLE, 0)
    to = attribute(1, packed(MARK))
    with contextlib.suppress(OSError):
        while True:
            send(ROUTE, [message(DELETE_ROUTE, ACK, head, to)])
    send(ROUTE, [message(ADD_ROUTE, CREATE | ACK, head, to, attribute(6, struct.pack("=I", value)))])


def marked(routes: str, value: int | None = None) -> bool:
    """Whether `/proc/net/route` has a mark: with this value, or with any."""
    first = f"{int.from_bytes(packed(MARK), 'little'):08X}"
    found = [words[6] for words in map(str.split, routes.splitlines()) if words[1] == first]
    return str(value) in found if value is not None else bool(found)


def resolvers(names: str) -> list[bytes]:
    """All addresses in a resolv.conf, including the upstream servers that Docker lists in a comment."""
    found = []
    for word in names.replace("[", " ").replace("]", " ").split():
        with contextlib.suppress(OSError):
            found.append(packed(word))
    return found


def main() -> None:
    """Set up the filter, then the mark."""
    words = sys.argv[2:]
    given = [word[4:] for word in words if word[:4] == "dns:"]
    if not given:
        with open("/etc/resolv.conf") as file:
            given = [file.read()]
    servers = resolvers(given[0])
    ports, own = [word[4:] for word in words if word[:4] == "tcp:"], [word[4:] for word in words if word[:4] == "net:"]
    blocked = [word for word in words if word[:4] not in ("dns:", "tcp:", "net:")]
    for family in [IPV4] + [IPV6] * os.path.exists("/proc/net/if_inet6"):
        into = incoming(family, blocked, [*map(int, ports)], own)
        rules = {INCOMING: into, OUTGOING: outgoing(family, blocked, servers)}
        send(NETFILTER, batch(family, rules))
    mark(int(sys.argv[1]))


if __name__ == "__main__":
    main()
