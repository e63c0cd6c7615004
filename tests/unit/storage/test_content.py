"""Progress of copies must end with what there was to copy, whatever a process that the job has left still writes."""

import pytest
from support.object_stores import MIB

from orchestrate.errors import StorageError
from orchestrate.storage.content import Changed, Progress, Unreadable
from orchestrate.storage.fetch import never
from orchestrate.storage.store import open_store


@pytest.mark.parametrize("how", ["grows", "is replaced", "is followed by others"])
def test_a_file_that_something_still_writes_must_not_count_as_progress(tmp_path, saved, how):
    path, mirror = saved.write("a", bytes(2 * MIB)), saved.mirror(open_store(f"file://{tmp_path}/store"))
    counts = []
    put = mirror.store.put

    def write_and_put(key: str, data: bytes) -> None:
        if how == "grows":
            path.write_bytes(bytes(path.stat().st_size + MIB))
        elif how == "is replaced":
            path.unlink(missing_ok=True)
            saved.write(f"a{len(counts)}", bytes(2 * MIB))
        else:
            saved.write(f"b{len(counts)}", bytes(MIB))
            raise StorageError("no")
        put(key, data)

    mirror.store.put = write_and_put
    for _ in range(5):
        with pytest.raises((Changed, Unreadable, StorageError)):
            mirror.sync(never, final=True)
            raise Changed
        counts.append(mirror.progress.count)
    assert counts[0] > 0 and counts[-1] <= 2 * 2 * MIB + 1


def test_each_file_and_each_byte_must_count_once():
    progress, counts = Progress(), []
    for total in (1, 5, 3, 6):
        progress.read("a", total)
        counts.append(progress.count)
    progress.copied("a")
    progress.copied("a")
    progress.copied("empty")
    assert counts == [1, 5, 5, 6] and progress.count == 8
    progress.forget({"a": 1})
    progress.copied("empty")  # another one with its name
    progress.read("a", 6)
    assert progress.count == 9
    progress.limit({"a": 4, "c": 2})
    progress.forget({})
    for name in ("a", "b", "c", "c"):
        progress.read(name, 100)
        progress.copied(name)
    assert progress.count == 9 + (2 * 4 - 6) + 2 * 2 + 1
