"""Two hosts on one directory against a model of what must, may and must not be there."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from filestores import leftovers, open_plain_files, page_files
from slabs import Tenant, chain_keys

PAGES = 12
SPANS = st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)).map(sorted)
MODELS = ("one", "two")


class Hosts(RuleBasedStateMachine):
    """Puts, gets, damage, clear and restarts in any order; nothing is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "store"
        self.cleanups: dict[str, ExitStack] = {}
        self.tenants: dict[tuple[str, str], Tenant] = {}
        self.stored: dict[str, set[int]] = {model: set() for model in MODELS}
        self.damaged: dict[str, set[int]] = {model: set() for model in MODELS}

    @initialize()
    def start(self) -> None:
        for host in ("a", "b"):
            self.open(host)

    def open(self, host: str) -> None:
        self.cleanups[host] = ExitStack()
        for model in MODELS:
            self.tenants[host, model] = self.cleanups[host].enter_context(
                open_plain_files(self.root, host=host, model=model)
            )

    def teardown(self) -> None:
        for cleanup in self.cleanups.values():
            cleanup.close()
        shutil.rmtree(self.root.parent)

    @rule(host=st.sampled_from("ab"), model=st.sampled_from(MODELS), span=SPANS)
    def put(self, host: str, model: str, span: list[int]) -> None:
        keys = chain_keys("k", PAGES)
        start, end = span
        assert all(self.tenants[host, model].put(keys[start:end], prefix=keys[:start]))
        self.stored[model] |= set(range(start, end))

    @rule(host=st.sampled_from("ab"), model=st.sampled_from(MODELS), span=SPANS)
    def get(self, host: str, model: str, span: list[int]) -> None:
        keys = chain_keys("k", PAGES)
        start, end = span
        flags = self.tenants[host, model].get(keys[start:end], prefix=keys[:start])
        right = self.stored[model] - self.damaged[model]
        run = next((n for n in range(start, end) if n not in self.stored[model]), end)
        assert flags == [n < run and n in right for n in range(start, end)]
        seen = self.damaged[model] & set(range(start, run))
        self.stored[model] -= seen
        self.damaged[model] -= seen

    @rule(host=st.sampled_from("ab"), model=st.sampled_from(MODELS))
    def look(self, host: str, model: str) -> None:
        tenant = self.tenants[host, model]
        keys = chain_keys("k", PAGES)
        present = tenant.store.present(tenant.namespace.digest, keys).tolist()
        assert present == [n in self.stored[model] for n in range(PAGES)]
        assert tenant.exists(keys) == [*present, False].index(False)

    @precondition(lambda self: any(self.stored.values()))
    @rule(model=st.sampled_from(MODELS), number=st.integers(0, PAGES - 1))
    def damage(self, model: str, number: int) -> None:
        if number in self.stored[model] - self.damaged[model]:
            digest = self.tenants["a", model].namespace.digest.hex()
            (path,) = (self.root / "namespaces" / digest).rglob(
                chain_keys("k", PAGES)[number].hex()
            )
            content = bytearray(path.read_bytes())
            content[7] ^= 1
            path.write_bytes(content)
            self.damaged[model].add(number)

    @rule(host=st.sampled_from("ab"), model=st.sampled_from(MODELS))
    def clear(self, host: str, model: str) -> None:
        tenant = self.tenants[host, model]
        assert tenant.store.clear(tenant.namespace.digest) == len(self.stored[model])
        self.stored[model].clear()
        self.damaged[model].clear()

    @rule(host=st.sampled_from("ab"))
    def restart(self, host: str) -> None:
        self.cleanups[host].close()
        self.open(host)

    @rule(host=st.sampled_from("ab"), model=st.sampled_from(MODELS))
    def verify(self, host: str, model: str) -> None:
        tenant = self.tenants[host, model]
        checked = {page.key: page.good for page in tenant.store.verify(tenant.namespace.digest)}
        keys = chain_keys("k", PAGES)
        assert checked == {keys[n]: n not in self.damaged[model] for n in self.stored[model]}
        self.stored[model] -= self.damaged[model]
        self.damaged[model].clear()

    @invariant()
    def nothing_lies_around(self) -> None:
        assert not leftovers(self.root)
        assert len(page_files(self.root)) == sum(map(len, self.stored.values()))


TestHosts = Hosts.TestCase
TestHosts.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
