"""Two hosts on one bucket against a model of what must, may and must not be there."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from hicache_nixl.stores import objects
from hicache_nixl.stores.objects_layout import Names
from objectstores import open_objects_tenant
from s3_server import S3Address, bucket
from slabs import Tenant, chain_keys

PAGES = 12
KEYS = chain_keys("k", PAGES)
MODELS = ("one", "two")
SPANS = st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)).map(sorted)
HOSTS, WHOSE = st.sampled_from("ab"), st.sampled_from(MODELS)


class Hosts(RuleBasedStateMachine):
    """Puts, gets, damage, removal behind their backs and clear, in any order."""

    tenants: ClassVar[dict[tuple[str, str], Tenant]]
    spoil: ClassVar[Callable[[Tenant, bytes, bytes | None], None]]

    @initialize()
    def start(self) -> None:
        for tenant in self.tenants.values():
            tenant.store.clear(tenant.namespace.digest)
        self.stored: dict[str, set[int]] = {model: set() for model in MODELS}
        self.damaged: dict[str, set[int]] = {model: set() for model in MODELS}
        self.noted: dict[tuple[str, str], set[int]] = {each: set() for each in self.tenants}
        """Pages that a host found damaged, and has not read or written right since."""

    @rule(host=HOSTS, model=WHOSE, span=SPANS)
    def put(self, host: str, model: str, span: list[int]) -> None:
        start, end = span
        flags = self.tenants[host, model].put(KEYS[start:end], prefix=KEYS[:start])
        assert all(flags)
        whole = set(range(start, end))
        there = self.stored[model] - self.noted[host, model]
        written = whole - there if start in there else whole
        self.damaged[model] -= written
        self.noted[host, model] -= written
        self.stored[model] |= whole

    @rule(host=HOSTS, model=WHOSE, span=SPANS)
    def get(self, host: str, model: str, span: list[int]) -> None:
        start, end = span
        tenant = self.tenants[host, model]
        flags = tenant.get(KEYS[start:end], prefix=KEYS[:start])
        right = self.stored[model] - self.damaged[model]
        read = {i for i, good in enumerate(flags, start) if good}
        run = next((i for i in range(start, end) if i not in right), end)
        assert set(range(start, run)) <= read <= right
        found = tenant.store._damaged.which(tenant.namespace.digest, KEYS)
        noted = {i for i in range(PAGES) if found[i]}
        before = self.noted[host, model]
        assert before - read <= noted <= (before - read) | (self.damaged[model] & set(range(*span)))
        assert run == end or run not in self.damaged[model] or run in noted
        self.noted[host, model] = noted

    @rule(host=HOSTS, model=WHOSE, span=SPANS)
    def look(self, host: str, model: str, span: list[int]) -> None:
        start, end = span
        tenant, there = self.tenants[host, model], self.stored[model] - self.noted[host, model]
        run = start + tenant.exists(KEYS[start:end])
        assert run == start or {start, run - 1} <= there
        assert run == end or run not in there
        flags = tenant.store.present(tenant.namespace.digest, KEYS[start:end]).tolist()
        assert flags == [i in there for i in range(start, end)]

    @rule(model=WHOSE, number=st.integers(0, PAGES - 1), where=st.integers(0, 8191))
    def damage(self, model: str, number: int, where: int) -> None:
        if number in self.stored[model] - self.damaged[model]:
            self.spoil(self.tenants["a", model], KEYS[number], where)
            self.damaged[model].add(number)

    @rule(model=WHOSE, number=st.integers(0, PAGES - 1))
    def remove(self, model: str, number: int) -> None:
        if number in self.stored[model]:
            self.spoil(self.tenants["a", model], KEYS[number], None)
            self.stored[model].discard(number)
            self.damaged[model].discard(number)

    @rule(host=HOSTS, model=WHOSE)
    def clear(self, host: str, model: str) -> None:
        tenant = self.tenants[host, model]
        assert tenant.store.clear(tenant.namespace.digest) == len(self.stored[model])
        self.stored[model], self.damaged[model] = set(), set()
        self.noted[host, model] = set()

    @rule(model=WHOSE)
    def verify(self, model: str) -> None:
        tenant = self.tenants["b", model]
        checked = {page.key: page.good for page in tenant.store.verify(tenant.namespace.digest)}
        assert checked == {KEYS[i]: i not in self.damaged[model] for i in self.stored[model]}
        self.stored[model] -= self.damaged[model]
        self.damaged[model] = set()


def test_two_hosts_agree_with_the_model(
    s3: S3Address, make_bucket: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they do, nothing wrong is read, and what is right is found by both at once."""
    monkeypatch.setattr(objects, "_SEEN_S", 0.0)
    monkeypatch.setattr(objects, "_DAMAGED_S", 1e9)
    place, client = bucket(s3, make_bucket(), "p"), s3.client()

    def spoil(tenant: Tenant, page_key: bytes, where: int | None) -> None:
        name = Names(place).page(tenant.namespace.digest, page_key)
        if where is None:
            client.delete_object(Bucket=place.name, Key=name)
            return
        body = bytearray(client.get_object(Bucket=place.name, Key=name)["Body"].read())
        body[where] ^= 1
        client.put_object(Bucket=place.name, Key=name, Body=bytes(body))

    with ExitStack() as stack:
        Hosts.spoil = staticmethod(spoil)
        Hosts.tenants = {
            (host, model): stack.enter_context(open_objects_tenant(place, model=model))
            for host in "ab"
            for model in MODELS
        }
        run_state_machine_as_test(
            Hosts,
            settings=settings(
                max_examples=12,
                stateful_step_count=25,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
