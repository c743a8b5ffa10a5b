"""Records: who waits for whom, by what operations say that they read and write."""

from __future__ import annotations

import pytest

from stronghold.devices.fences import (
    MANY_READERS,
    Fence,
    LaneName,
    Record,
    completed,
    dependences,
    record_accesses,
)
from stronghold.errors import LaneError


def pending(lane: LaneName, operation: str = "work") -> Fence:
    """The fence of an operation that is not done."""
    return Fence(lane, operation)


def test_nothing_is_waited_for_where_nothing_was_written() -> None:
    record = Record()
    assert dependences((), (record,), (record,)) == ()
    record.wait()


def test_a_reader_waits_for_the_newest_writer_alone() -> None:
    record, old, new, reader = (
        Record(),
        pending(LaneName.UPDATE),
        pending(LaneName.OFFLOAD),
        pending(LaneName.FETCH),
    )
    record_accesses(old, (), (record,))
    record_accesses(new, (), (record,))
    record_accesses(reader, (record,), ())
    assert record.writer is new
    assert dependences((), (record,), ()) == (new,)


def test_a_writer_waits_for_the_newest_writer_and_for_every_reader_since() -> None:
    record, before, writer = Record(), pending(LaneName.IO), pending(LaneName.UPDATE)
    fetch, save = pending(LaneName.FETCH), pending(LaneName.IO)
    record_accesses(before, (record,), ())
    # The writer has waited for the reader before it. So an operation that waits for the writer has.
    record_accesses(writer, (), (record,))
    record_accesses(fetch, (record,), ())
    record_accesses(save, (record,), ())
    assert dependences((), (), (record,)) == (writer, fetch, save)


def test_who_reads_and_writes_waits_as_a_writer_and_is_the_newest_one() -> None:
    record, writer, reader, both = (
        Record(),
        pending(LaneName.OFFLOAD),
        pending(LaneName.FETCH),
        pending(LaneName.UPDATE),
    )
    record_accesses(writer, (), (record,))
    record_accesses(reader, (record,), ())
    assert dependences((), (record,), (record,)) == (writer, reader)
    record_accesses(both, (record,), (record,))
    assert record.users == (both,)


def test_what_is_given_beside_records_is_waited_for_and_nothing_twice() -> None:
    one, two, writer, given = (
        Record(),
        Record(),
        pending(LaneName.UPDATE),
        pending(LaneName.COMPUTE),
    )
    record_accesses(writer, (), (one, two))
    assert dependences((given, writer), (one,), (two,)) == (given, writer)


def test_the_newest_reader_of_a_lane_stands_for_those_before() -> None:
    record, other = Record(), pending(LaneName.IO)
    fetches = [pending(LaneName.FETCH, f"fetch {k}") for k in range(3)]
    for fence in (fetches[0], other, *fetches[1:]):
        record.read(fence)
    assert record.users[1:] == (other, fetches[-1])


def test_a_reader_on_compute_stands_for_no_other_one() -> None:
    """Compute may run on several streams, which are not in order."""
    record, streams = (Record(), [pending(LaneName.COMPUTE, f"stream {k}") for k in range(3)])
    for fence in streams:
        record.read(fence)
    assert record.users[1:] == tuple(streams)


def test_of_many_readers_those_that_have_ended_are_forgotten_and_no_others() -> None:
    record, running = (Record(), [pending(LaneName.COMPUTE, f"stream {k}") for k in range(3)])
    for fence in running:
        record.read(fence)
    for k in range(20 * MANY_READERS):
        record.read(completed(LaneName.COMPUTE, f"ended {k}"))
    assert record.users[1:4] == tuple(running)
    assert len(record.users) <= 2 + MANY_READERS


def test_a_failed_reader_is_told_to_the_writer_that_waits_for_it() -> None:
    record, writer, reader, later = (
        Record(),
        completed(LaneName.UPDATE, "update 3"),
        pending(LaneName.IO, "save 3"),
        pending(LaneName.FETCH, "fetch 3"),
    )
    record_accesses(writer, (), (record,))
    record_accesses(reader, (record,), ())
    record_accesses(later, (record,), ())
    reader.fail(LaneError(LaneName.IO, "save 3", OSError("disk full")))
    later.issue(None)
    assert reader in dependences((), (), (record,))
    # other readers have nothing to do with it
    assert dependences((), (record,), ()) == (writer,)
    with pytest.raises(LaneError, match="save 3"):
        record.wait()


def test_a_wait_for_a_record_is_one_for_its_writer_too() -> None:
    record, writer = Record(), pending(LaneName.UPDATE, "update 3")
    record_accesses(writer, (), (record,))
    record_accesses(completed(LaneName.FETCH, "fetch 3"), (record,), ())
    writer.fail(LaneError(LaneName.UPDATE, "update 3", ValueError("no")))
    with pytest.raises(LaneError, match="update 3"):
        record.wait()
