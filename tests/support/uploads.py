"""Files that are uploaded to a node."""

import base64
import hashlib
import io
import tarfile
from pathlib import Path

from orchestrate.node.files import PIECE, Files
from orchestrate.node.messages.protocol import Uploaded


def packed(**files: str) -> bytes:
    """A tar file with files of these names and contents; `__` in a name separates folders."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def put(files: Files, folder: Path, data: bytes, size: int = PIECE) -> Uploaded:
    """Upload a tar file to a node in pieces, and return the last answer."""
    answer = Uploaded({})
    for offset in range(0, len(data), size):
        last = offset + size >= len(data)
        tag = hashlib.sha256(data).hexdigest() if last else ""
        answer = files.upload(str(folder), base64.b64encode(data[offset : offset + size]).decode(), offset, tag)
    return answer


def text(data: str) -> bytes:
    return base64.b64decode(data)


def sparse(path: Path, size: int, *offsets: int) -> None:
    """Create a file of this size with a few bytes at each offset and holes elsewhere."""
    with path.open("wb") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(b"data")
        file.truncate(size)
