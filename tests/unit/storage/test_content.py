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


def test_a_file_that_was_copied_before_and_is_written_again_at_the_end_must_count(tmp_path, saved):
    mirror = saved.mirror(open_store(f"file://{tmp_path}/store"))
    saved.write("last.pt", b"1" * MIB)
    assert not mirror.sync(never) and mirror.sync(never)
    saved.write("last.pt", b"2" * MIB)
    before = mirror.progress.count
    assert mirror.sync(never, final=True) and mirror.progress.count > before + MIB


def test_each_file_and_each_byte_must_count_once_at_the_end():
    progress = Progress()
    progress.read("a", 1)
    progress.copied("a")
    assert (began := progress.count) > 0
    progress.limit({"a": 4, "c": 2, "empty": 0})
    progress.limit({"b": 9})
    for total in (1, 3, 2, 4):
        progress.read("a", total)
    assert progress.count == began + 4
    for name in ("a", "a", "b", "c", "empty", "empty"):
        progress.read(name, 100)
        progress.copied(name)
    assert progress.count == began + (2 * 4 + 1) + (2 * 2 + 1) + 1
