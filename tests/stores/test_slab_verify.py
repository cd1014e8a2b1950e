"""`verify`: reads everything, forgets what is damaged, and lets others go on."""

from pathlib import Path
from typing import Any

from slabs import KIB, MIB, chain_keys, check_slots, open_plain, query


def spoil(directory: Path, count: int) -> list[bytes]:
    """Flip a bit in the payload of some pages; their keys."""
    spoiled = []
    for name, segment, slot, size in query(
        directory,
        "SELECT key, segment, slot, record_bytes FROM pages ORDER BY key LIMIT ?",
        (count,),
    ):
        (path,) = directory.glob(f"segment-{segment:08d}-*")
        with path.open("r+b") as file:
            file.seek(slot * size + 100)
            byte = file.read(1)
            file.seek(slot * size + 100)
            file.write(bytes([byte[0] ^ 4]))
        spoiled.append(name)
    return spoiled


def test_verify(root: Path) -> None:
    """Every page is checked once; damaged ones are named and forgotten, and stay away."""
    with open_plain(root, model="one") as one, open_plain(root, model="two") as two:
        one.put(chain_keys("a", 50))
        two.put(chain_keys("b", 20))
        assert all(page.good for page in one.store.verify())
        spoiled = spoil(root, 3)
        checked = list(one.store.verify())
        assert len(checked) == 70
        assert {page.key for page in checked if not page.good} == set(spoiled)
        assert check_slots(root).vacant == 3
        again = list(one.store.verify(two.namespace.digest))
        assert {page.namespace for page in again} == {two.namespace.digest}
        assert all(page.good for page in again)
        assert list(one.store.verify(bytes(32))) == []


def test_pages_that_move_meanwhile_are_not_damage(root: Path) -> None:
    """A page that is evicted or written anew during the check is neither good nor damaged."""
    how: dict[str, Any] = {"segment": 20 * 8 * KIB, "capacity": 20 * 8 * KIB}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 20))
        checking = tenant.store.verify()
        next(checking)
        tenant.put(chain_keys("b", 15))
        tenant.put(chain_keys("a", 20))
        assert all(page.good for page in checking)
        assert check_slots(root).pages == 20


def test_segments_that_come_up_meanwhile(root: Path) -> None:
    """Pages in a segment that was made during the check are checked, not forgotten."""
    how: dict[str, Any] = {"segment": 10 * 8 * KIB, "capacity": 4 * MIB}
    with open_plain(root, **how) as tenant:
        tenant.put(chain_keys("a", 10))
        checking = tenant.store.verify()
        next(checking)
        tenant.put(chain_keys("b", 30))
        assert all(page.good for page in checking)
        assert tenant.exists(chain_keys("b", 30)) == 30


def test_missing_segment(root: Path) -> None:
    """Pages whose segment file is gone are damaged."""
    with open_plain(root) as tenant:
        tenant.put(chain_keys("a", 5))
        next(root.glob("segment-*")).unlink()
        assert [page.good for page in tenant.store.verify()] == [False] * 5
        assert tenant.exists(chain_keys("a", 5)) == 0
