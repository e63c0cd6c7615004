"""A file of TensorBoard events: records of TFRecord, each with an `Event` of protocol buffers.

To import TensorBoard would double the CPU time of a short job. The format is that of TensorFlow: core/util/event.proto,
core/framework/summary.proto and core/lib/io/record_writer.h.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed (RFC 3720, appendix B.4)
VERSION = b"brain.Event:2"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
START = b"\x08\x01"  # SessionLog.status = START


class EventFile:
    """A new file in a folder, in which each write is a whole number of events."""

    def __init__(self, folder: Path) -> None:
        """Create it, with a name that TensorBoard looks for; raises OSError if that fails."""
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file, self.size = os.fdopen(os.open(folder / name, NEW, 0o600), "wb"), 0  # size in bytes
        self._add(0, _bytes(3, VERSION))

    def start(self, step: int) -> None:
        """Say that training starts at a step, so that later ones that were seen before are not shown."""
        self._add(step, _bytes(7, START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each name; values must fit 32 bits."""
        points = [
            _bytes(1, _bytes(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, one)) for name, one in values.items()
        ]
        self._add(step, _bytes(5, b"".join(points)))

    def flush(self) -> None:
        """Pass on what was added; raises OSError if that fails."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close it."""
        self._file.close()

    def _add(self, step: int, what: bytes) -> None:
        event = struct.pack("<BdB", 1 << 3 | 1, time.time(), 2 << 3) + _varint(step) + what
        size = struct.pack("<Q", len(event))
        self.size += self._file.write(size + _checksum(size) + event + _checksum(event))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
    return byte


TABLE = [_remainder(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
    """The CRC-32C, masked as in a TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
