"""The index by itself: claims, publication, order of eviction, and what a query costs."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_nixl.stores import slab_sql
from hicache_nixl.stores.slab_index import SlabIndex
from hicache_nixl.stores.slab_segments import SegmentFile
from hicache_nixl.stores.slab_sql import Claim, NewPage, page_hash
from slabs import KIB, chain_keys, check_slots, key, namespace, query

SIZE = 8 * KIB


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SlabIndex]:
    made = SlabIndex(tmp_path / "index.sqlite", busy_timeout_s=5, create=True)
    yield made
    check_slots(tmp_path)
    made.close()


def segment(index: SlabIndex, slots: int, size: int = SIZE, directory: int = 0) -> SegmentFile:
    made = SegmentFile(index.reserve_segment_id(), directory, size, slots)
    index.add_segment(made)
    return made


def claim(index: SlabIndex, count: int, size: int = SIZE, evict: bool = True) -> Claim:
    return index.claim(count=count, record_bytes=size, writer=b"w", evict=evict)


def put(
    index: SlabIndex, keys: list[bytes], number: int = 1, size: int = SIZE, depth: int = 0
) -> Claim:
    """Claim and publish, as a put does."""
    made = claim(index, len(keys), size)
    pages = [
        NewPage(name, slot, depth + i)
        for i, (name, slot) in enumerate(zip(keys, made.slots, strict=False))
    ]
    assert index.publish(made, namespace=number, pages=pages) == set()
    return made


def test_publish_and_locate(index: SlabIndex) -> None:
    """What is published is found where it is, and nothing else is."""
    made = segment(index, 10)
    keys = chain_keys("a", 6)
    done = put(index, keys)
    found = index.locate(1, [*keys, key("other")])
    assert found.keys() == set(keys)
    assert {(place.segment, place.slot) for place in found.values()} == set(done.slots)
    assert all(place.generation == done.generation for place in found.values())
    assert all(place.segment == made.id for place in found.values())
    assert index.locate(2, keys) == {}
    assert index.locate(1, []) == {}


@pytest.mark.parametrize("count", [1, 7, 8, 9, 127, 128, 129, 300])
def test_leading_run(index: SlabIndex, count: int) -> None:
    """The run ends at the first gap, whatever the number of keys and where the gap is."""
    segment(index, 400)
    keys = chain_keys("a", count)
    assert index.leading_run(1, keys) == 0
    for gap in {0, count // 2, count - 1}:
        index.clear(1)
        present = keys[:gap] + keys[gap + 1 :]
        if present:
            put(index, present)
        assert index.leading_run(1, keys) == gap
        assert index.leading_run(1, keys[gap + 1 :]) == count - gap - 1
    put(index, [keys[gap]])
    assert index.leading_run(1, keys) == count


def test_queries_use_the_hash(index: SlabIndex, tmp_path: Path) -> None:
    """Looking pages up is a search in one index, so that its cost does not grow with the store."""
    statement, parameters = slab_sql.find("key", 1, chain_keys("a", 128))
    plan = query(tmp_path, f"EXPLAIN QUERY PLAN {statement}", parameters)
    steps = [step[-1] for step in plan if "LIST SUBQUERY" not in step[-1]]
    assert steps == ["SEARCH pages USING INDEX pages_by_hash (hash=?)"]
    eviction = (
        "SELECT id FROM pages WHERE record_bytes=1 AND used<2 ORDER BY used, depth DESC LIMIT 3"
    )
    ((*_, step),) = query(tmp_path, f"EXPLAIN QUERY PLAN {eviction}")
    assert "USING" in step
    assert "pages_by_use (record_bytes=? AND used<?)" in step


def test_database_pages_are_small(index: SlabIndex, tmp_path: Path) -> None:
    """Entries of new pages lie at random, so every one of them costs a database page of writing."""
    assert query(tmp_path, "PRAGMA page_size") == [(1024,)]


def test_slots_come_vacant_first_then_fresh_then_evicted(index: SlabIndex, tmp_path: Path) -> None:
    """Nothing is evicted while there are free slots."""
    made = segment(index, 10)
    first = put(index, chain_keys("a", 4))
    assert first.slots == [(made.id, slot) for slot in range(4)]
    put(index, chain_keys("b", 2))
    index.release(claim(index, 2), [(made.id, 6), (made.id, 7)])
    assert check_slots(tmp_path).vacant == 2
    more = claim(index, 4, evict=False)
    assert more.slots == [(made.id, slot) for slot in range(6, 10)]
    assert claim(index, 1, evict=False).slots == []
    assert claim(index, 5).slots == [(made.id, slot) for slot in (0, 1, 2, 3, 5)]
    assert index.leading_run(1, chain_keys("b", 2)) == 1, "of a prefix, the deepest goes first"


def test_fresh_slots_come_from_all_directories(index: SlabIndex) -> None:
    """The pages of one call are spread over the directories, by turns."""
    one, two = segment(index, 10, directory=0), segment(index, 6, directory=1)
    slots = claim(index, 8).slots
    assert [slot for slot, _ in slots] == [one.id, two.id] * 4
    assert len(claim(index, 100).slots) == 8
    assert claim(index, 100).slots == []


def test_eviction_order(index: SlabIndex) -> None:
    """Least recently used first, and what the claim itself uses not at all."""
    segment(index, 9)
    for name in "abc":
        put(index, chain_keys(name, 3))
    early = claim(index, 0)
    index.touch([(1, page, 2**61) for page in chain_keys("a", 3)])
    victims = index.claim(
        count=4,
        record_bytes=SIZE,
        writer=b"w",
        evict=True,
        namespace=1,
        in_use=chain_keys("c", 1),
        earlier=early,
    )
    assert len(victims.slots) == 4
    assert [index.leading_run(1, chain_keys(name, 3)) for name in "abc"] == [3, 0, 2]
    more = index.claim(count=9, record_bytes=SIZE, writer=b"w", evict=True, earlier=victims)
    assert len(more.slots) == 4 + 1, "a page used since the claim began stays"
    assert [index.leading_run(1, chain_keys(name, 3)) for name in "abc"] == [3, 0, 1]
    assert len(claim(index, 9).slots) == 4, "what was used before a claim can be evicted"


def test_later_use_wins(index: SlabIndex, tmp_path: Path) -> None:
    """A use that is noted late does not make a page older."""
    segment(index, 3)
    put(index, chain_keys("a", 1))
    index.touch([(1, key("a", 0), 2**61)])
    index.touch([(1, key("a", 0), 5)])
    assert query(tmp_path, "SELECT used FROM pages") == [(2**61,)]


def test_claims_grow(index: SlabIndex, tmp_path: Path) -> None:
    """A second claim for the same put adds slots and keeps the generation."""
    segment(index, 3)
    first = claim(index, 5, evict=False)
    segment(index, 4)
    both = index.claim(count=2, record_bytes=SIZE, writer=b"w", evict=False, earlier=first)
    assert (both.id, both.generation) == (first.id, first.generation)
    assert both.slots[:3] == first.slots
    assert len(both.slots) == 5
    assert check_slots(tmp_path).claimed == 5


def test_generations_are_unique(index: SlabIndex, tmp_path: Path) -> None:
    """Two processes never write the same generation, and it only grows."""
    other = SlabIndex(tmp_path / "index.sqlite", busy_timeout_s=5)
    segment(index, 100)
    ticks = [claim(each, 1).generation for _ in range(20) for each in (index, other)]
    ticks.append(index.next_tick())
    assert ticks == sorted(set(ticks))
    other.close()


def test_page_published_by_two(index: SlabIndex, tmp_path: Path) -> None:
    """The second to publish a page returns its slot, and its use counts."""
    segment(index, 20)
    keys = chain_keys("a", 5)
    early, late = claim(index, 5), claim(index, 7)
    assert index.publish(early, namespace=1, pages=pages(keys, early)) == set()
    more = [*keys, *chain_keys("b", 2)]
    assert index.publish(late, namespace=1, pages=pages(more, late)) == set()
    found = index.locate(1, more)
    assert {(found[k].segment, found[k].slot) for k in keys} == set(early.slots)
    assert query(tmp_path, "SELECT DISTINCT used FROM pages") == [(late.generation,)]
    slots = check_slots(tmp_path)
    assert (slots.pages, slots.vacant, slots.claimed) == (7, 5, 0)


def pages(keys: list[bytes], made: Claim) -> list[NewPage]:
    return [NewPage(page, made.slots[i], i) for i, page in enumerate(keys)]


def test_two_pages_of_one_hash(
    index: SlabIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of them is not stored, and never taken for the first."""
    segment(index, 20)
    monkeypatch.setattr(slab_sql, "page_hash", lambda namespace, page: page[0] % 2)
    keys = [bytes([number]) * 32 for number in range(4)]
    made = claim(index, 4)
    assert index.publish(made, namespace=1, pages=pages(keys, made)) == set(keys[2:])
    assert index.locate(1, keys).keys() == set(keys[:2])
    assert index.leading_run(1, keys) == 2
    assert index.leading_run(1, keys[2:]) == 0
    assert index.forget(1, [(keys[2], index.locate(1, keys)[keys[0]])]) == 0
    assert index.locate(2, keys) == {}
    slots = check_slots(tmp_path)
    assert (slots.pages, slots.vacant) == (2, 2)


def test_hashes_differ_between_namespaces() -> None:
    """The same key in two namespaces does not meet in one entry, and hashes fit SQLite."""
    hashes = [page_hash(number, name) for number in range(50) for name in chain_keys("a", 50)]
    assert len(set(hashes)) == 2500
    assert all(0 <= value < 1 << 63 for value in hashes)


def test_partial_publication(index: SlabIndex, tmp_path: Path) -> None:
    """Slots that are kept stay claimed, until they are released one by one."""
    segment(index, 10)
    made = claim(index, 6)
    index.publish(made, namespace=1, pages=pages(chain_keys("a", 2), made), keep=made.slots[4:])
    slots = check_slots(tmp_path)
    assert (slots.pages, slots.vacant, slots.claimed) == (2, 2, 2)
    index.release(made, made.slots[4:5])
    assert check_slots(tmp_path).claimed == 1
    index.release(made, made.slots[5:])
    index.release(made, made.slots[5:])
    slots = check_slots(tmp_path)
    assert (slots.pages, slots.vacant, slots.claimed) == (2, 4, 0)


def test_forget(index: SlabIndex, tmp_path: Path) -> None:
    """A page is forgotten only if it still is where it was found."""
    segment(index, 10)
    (name,) = chain_keys("a", 1)
    put(index, [name])
    place = index.locate(1, [name])[name]
    assert index.forget(1, [(name, place._replace(generation=place.generation - 1))]) == 0
    assert index.forget(1, [(name, place._replace(slot=place.slot + 1))]) == 0
    assert index.forget(2, [(name, place)]) == 0
    assert index.forget(1, [(name, place), (name, place)]) == 1
    assert check_slots(tmp_path).vacant == 1


def test_dead_writers_claims(index: SlabIndex, tmp_path: Path) -> None:
    """The claims of one writer end together; those of others stay."""
    segment(index, 10)
    segment(index, 10, size=2 * SIZE)
    for writer, size in ((b"x", SIZE), (b"x", 2 * SIZE), (b"y", SIZE)):
        index.claim(count=3, record_bytes=size, writer=writer, evict=False)
    assert index.claiming_writers() == {b"x", b"y"}
    assert index.end_claims(b"x") == 6
    assert index.end_claims(b"x") == 0
    assert index.claiming_writers() == {b"y"}
    slots = check_slots(tmp_path)
    assert (slots.vacant, slots.claimed) == (6, 3)


def test_coldest_segment(index: SlabIndex) -> None:
    """It is of another size, not in use, and all its pages are older than the limit."""
    segments = [segment(index, 2) for _ in range(3)]
    for name in "abc":
        put(index, chain_keys(name, 2))
    big = segment(index, 2, size=2 * SIZE)
    put(index, chain_keys("big", 2), size=2 * SIZE)
    assert index.coldest_segment(None, None) == segments[0]
    assert index.coldest_segment(2 * SIZE, None) == segments[0]
    assert index.coldest_segment(SIZE, None) == big
    index.touch([(1, chain_keys("a", 2)[1], 2**62)])
    assert index.coldest_segment(2 * SIZE, None) == segments[1]
    assert index.coldest_segment(2 * SIZE, 2**62) == segments[1]
    oldest = index.oldest_use(SIZE)
    assert oldest is not None
    assert index.coldest_segment(2 * SIZE, oldest) is None
    index.clear(1)
    claim(index, 1)  # a slot of the first segment
    assert index.coldest_segment(None, 1) == segments[1]
    assert index.oldest_use(SIZE) is None


def test_drop_segment(index: SlabIndex, tmp_path: Path) -> None:
    """A segment goes with its pages, unless a slot of it is being written; ids are not reused."""
    made = segment(index, 4)
    put(index, chain_keys("a", 2))
    pending = claim(index, 1)
    assert index.drop_segment(made) is None
    index.release(pending, pending.slots)
    assert index.drop_segment(made) == 2
    assert index.segments() == []
    assert index.segment(made.id) is None
    assert check_slots(tmp_path).pages == 0
    assert index.totals() == (0, 0, 2)
    assert segment(index, 4).id > made.id


def test_slots_that_were_cut_off(index: SlabIndex, tmp_path: Path) -> None:
    """Pages behind the end of a file are forgotten."""
    made = segment(index, 10)
    put(index, chain_keys("a", 6))
    assert index.forget_slots_from(made, 4) == 2
    assert index.leading_run(1, chain_keys("a", 6)) == 4
    assert check_slots(tmp_path).vacant == 2


def test_namespaces(index: SlabIndex) -> None:
    """A namespace keeps its number, and says what it holds."""
    one, two = namespace(4 * KIB, "one"), namespace(4 * KIB, "two")
    assert index.namespace(one.digest) is None
    number = index.add_namespace(one)
    assert index.add_namespace(two) != number
    assert index.add_namespace(one) == number
    assert index.namespace(one.digest) == (number, one)
    segment(index, 10)
    put(index, chain_keys("a", 3), number)
    uses = index.namespace_uses()
    assert [(use.namespace, use.pages, use.record_bytes) for use in uses] == [
        (one, 3, 3 * SIZE),
        (two, 0, 0),
    ]


def test_every_page_is_listed(index: SlabIndex) -> None:
    """Pages are listed in chunks, while others come and go."""
    segment(index, 5000)
    for number in range(3):
        put(index, chain_keys(number, 900), 1)
    put(index, chain_keys("other", 10), 2)
    listed = index.pages_of(1)
    names = [next(listed)[0]]
    put(index, chain_keys("later", 10), 1)
    names += [name for name, _ in listed]
    assert len(names) == len(set(names)) == 2710
    assert index.clear(1) == 2710
    assert list(index.pages_of(1)) == []
    assert len(list(index.pages_of(2))) == 10


def test_restore(index: SlabIndex, tmp_path: Path) -> None:
    """Slots below the last page of a segment are vacant, those behind it fresh."""
    one, two = SegmentFile(3, 0, SIZE, 6), SegmentFile(9, 0, SIZE, 4)
    rows = [
        (page_hash(1, name), 1, name, 3, slot, 7, SIZE, 7, slot)
        for slot, name in zip((1, 3), chain_keys("a", 2), strict=True)
    ]
    index.restore({one: {1, 3}, two: set()}, rows)
    slots = check_slots(tmp_path)
    assert (slots.pages, slots.vacant, slots.fresh) == (2, 2, 2 + 4)
    assert index.leading_run(1, chain_keys("a", 2)) == 2
    assert claim(index, 1).generation > 7
    assert index.reserve_segment_id() == 10


def test_integrity_is_enforced(index: SlabIndex, tmp_path: Path) -> None:
    """A slot cannot become vacant twice, nor a page be entered twice."""
    made = segment(index, 4)
    index.release(claim(index, 1), [(made.id, 0)])
    with pytest.raises(sqlite3.IntegrityError):
        query(tmp_path, "INSERT INTO vacant VALUES(?, 0, ?)", (SIZE, made.id))
