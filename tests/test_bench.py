"""The benchmark without its clock: sizes, fio's report, the check of bytes, ratios and tables."""

import ctypes
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench is no part of the wheel

from bench import fio, plan
from bench.plan import GIB, KIB, MIB, BenchError


def fio_report(operation: str = "write", error: int = 0, nbytes: int = 10**9) -> str:
    """What fio 3 prints, cut to what is read, with a note in front as it sometimes has."""
    idle = {"io_bytes": 0, "bw_bytes": 0, "runtime": 0}
    job = {"jobname": "device", "error": error, "read": dict(idle), "write": dict(idle)}
    job[operation] = {"io_bytes": nbytes, "bw_bytes": 2 * 10**9, "runtime": 500}
    return "note: both iodepth >= 1 and synchronous I/O engine\n" + json.dumps({"jobs": [job]})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64KiB", 64 * KIB), ("2MiB", 2 * MIB), ("1G", GIB), ("4096", 4096), (" 9 mib ", 9 * MIB)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    """Binary units, any case, with or without a space."""
    assert plan.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "64KB", "-1MiB", "1.5MiB", "many"])
def test_a_size_that_cannot_be_read_is_named(text: str) -> None:
    """The error quotes the text."""
    with pytest.raises(BenchError, match=re.escape(repr(text))):
        plan.parse_size(text)


@pytest.mark.parametrize("nbytes", [4 * KIB, 64 * KIB, 256 * KIB, 2 * MIB, 8 * MIB, 9 * MIB])
def test_a_shape_has_exactly_the_bytes_of_its_page(nbytes: int) -> None:
    """K and V of all tokens and layers add up."""
    shape = plan.shape_of(nbytes)
    assert shape.nbytes == nbytes
    assert 2 * shape.tokens * shape.layers * shape.heads * shape.head_dim * 2 == nbytes


def test_a_page_that_no_pool_can_have_is_refused() -> None:
    """3 KiB holds no whole number of layers."""
    with pytest.raises(BenchError, match="3 KiB"):
        plan.parse_pages("64KiB,3KiB")


def test_lists_keep_the_known_order_and_refuse_the_unknown() -> None:
    """A misspelt entry is named together with the known ones."""
    assert plan.choose("what", "get, set", plan.WHAT) == ("set", "get")
    with pytest.raises(BenchError, match=r"--what 'gets': known are set, get"):
        plan.choose("what", "gets", plan.WHAT)
    with pytest.raises(BenchError, match="--what is empty"):
        plan.choose("what", " , ", plan.WHAT)


def test_a_batch_is_the_engines_unless_memory_forbids_it() -> None:
    """128 pages a call; a quick run cuts 9 MiB pages down."""
    full = plan.full_plan((64 * KIB, 9 * MIB), ("page_first",), ("set",), ("ours",), 5)
    quick = plan.quick_plan((9 * MIB,), ("page_first",), ("set",), ("ours",), 3)
    assert [full.batch_pages(page) for page in full.pages] == [128, 128]
    assert quick.batch_pages(9 * MIB) * 9 * MIB <= quick.max_batch_bytes
    assert full.batches(64 * KIB) * 128 * 64 * KIB == full.sample_bytes


def test_the_disk_asked_for_covers_the_largest_store_twice_and_the_device_file() -> None:
    """Ours and bare NIXL have the capacity each; fio has its file."""
    whole = plan.full_plan((64 * KIB, 9 * MIB), ("page_first",), ("set",), ("ours",), 5)
    assert whole.disk_needed() > 2 * whole.capacity(9 * MIB) + whole.fio_file


@pytest.mark.parametrize("operation", ["read", "write"])
def test_fio_bandwidth_is_bytes_over_io_time(operation: str) -> None:
    """The seconds come from the exact rate, not from whole milliseconds."""
    result = fio.parse(fio_report(operation), operation)
    assert result.nbytes == 10**9
    assert result.seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("fio: engine libaio not loadable", "unreadable report"),
        ('{"jobs": []}', "unreadable report"),
        (fio_report(error=28), "error 28"),
        (fio_report(nbytes=0), "after 0 bytes"),
    ],
)
def test_a_fio_run_that_moved_nothing_is_an_error(output: str, said: str) -> None:
    """No report, no job, a device error, no bytes."""
    with pytest.raises(BenchError, match=said):
        fio.parse(output, "write")


@pytest.mark.parametrize("page", [64 * KIB, 256 * KIB, 2 * MIB, 9 * MIB])
def test_fio_has_one_batch_in_flight(page: int) -> None:
    """At most 128 requests and 256 MiB."""
    assert fio.block_size(page) == min(page, 4 * MIB)
    assert fio.depth(page) <= 128
    assert fio.depth(page) * fio.block_size(page) <= 256 * MIB


def test_a_missing_fio_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line, with apt-get install fio."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="apt-get install fio"):
        fio.fio_version()


class TestReport:
    """What samples become. Needs SGLang's torch, as the measuring itself does."""

    report = pytest.importorskip("bench.report", reason="torch is not installed")
    measure = pytest.importorskip("bench.measure", reason="torch is not installed")

    def samples(self, operation: str, page: int = 256 * KIB, **rates: list[float]) -> list[object]:
        """Samples of one second each, GB/s by subject."""
        return [
            self.measure.Sample(
                operation, page, "page_first", who.replace("_", "-"), number, 1.0, int(rate * 1e9)
            )
            for who, taken in rates.items()
            for number, rate in enumerate(taken)
        ]

    def test_a_row_holds_medians_and_ratios_of_medians(self) -> None:
        """One fast round changes neither."""
        taken = self.samples(
            self.measure.STEADY, ours=[1.8, 9.0, 1.7], in_tree=[0.6, 0.6, 0.6], fio=[2.0, 2.0, 2.0]
        )
        (row,) = self.report.build_rows(taken)
        assert row.values == {"ours": 1.8, "in-tree": 0.6, "fio": 2.0}
        assert math.isclose(row.over_fio, 0.9)
        assert math.isclose(row.over_in_tree, 3.0)
        assert row.reached is True

    @pytest.mark.parametrize(
        ("operation", "page", "over_fio", "reached"),
        [
            ("STEADY", 64 * KIB, 0.60, True),
            ("STEADY", 64 * KIB, 0.59, False),
            ("STEADY", 256 * KIB, 0.84, False),
            ("COLD", 256 * KIB, 0.90, True),
            ("COLD", 2 * MIB, 0.89, False),
            ("COLD", 64 * KIB, 0.10, None),
            ("FRESH", 2 * MIB, 0.10, None),
        ],
    )
    def test_targets_follow_operation_and_page(
        self, operation: str, page: int, over_fio: float, reached: bool | None
    ) -> None:
        """0.6 below 256 KiB and 0.85 from there for sets, 0.9 for gets, none for fresh keys."""
        taken = self.samples(getattr(self.measure, operation), page, ours=[over_fio], fio=[1.0])
        assert self.report.build_rows(taken)[0].reached is reached

    @pytest.mark.parametrize(
        ("operation", "seconds", "reached"),
        [
            ("exists, present", 0.0005, True),
            ("exists, 300,000 stored, absent", 0.00051, False),
            ("open", 1.9, True),
            ("index rebuild", 15.1, False),
        ],
    )
    def test_times_are_judged_by_their_limit(
        self, operation: str, seconds: float, reached: bool
    ) -> None:
        """0.5 ms, 2 s and 15 s."""
        sample = self.measure.Sample(operation, 4 * KIB, "page_first", "ours", 0, seconds, keys=128)
        (row,) = self.report.build_rows([sample])
        assert row.values == {"ours": seconds}
        assert row.reached is reached

    def test_what_was_not_measured_is_not_judged(self) -> None:
        """Without ours or without fio there is no ratio and no verdict."""
        for rates in ({"fio": [2.0]}, {"ours": [2.0]}):
            (row,) = self.report.build_rows(self.samples(self.measure.STEADY, **rates))
            assert (row.over_fio, row.reached) == (None, None)
        assert self.report.over(1.0, 0.0) is None

    def test_a_device_that_wavers_is_marked(self) -> None:
        """fio rounds that differ by more than half make their row noisy."""
        steady = self.samples(self.measure.STEADY, ours=[1.0], fio=[2.0, 2.9])
        wavering = self.samples(self.measure.STEADY, ours=[1.0], fio=[2.0, 3.1])
        assert not self.report.build_rows(steady)[0].noisy
        assert self.report.build_rows(wavering)[0].noisy

    def test_failed_pages_are_counted_and_said(self) -> None:
        """They are in the verdict and bring no bytes."""
        sample = self.measure.Sample(
            self.measure.COLD, 64 * KIB, "page_first", "ours", 0, 1.0, 10, failed_pages=3
        )
        rows = self.report.build_rows([sample])
        assert rows[0].failed_pages == 3
        assert "3 pages failed" in self.report.verdict(rows)

    def test_the_tables_show_every_row(self) -> None:
        """A table for each operation, the figures in it, dashes where nothing was measured."""
        rows = self.report.build_rows(
            [
                *self.samples(self.measure.STEADY, 64 * KIB, ours=[1.25], fio=[1.5]),
                *self.samples(self.measure.STEADY, 2 * MIB, ours=[1.75], fio=[1.75]),
                self.measure.Sample("exists, present", 64 * KIB, "page_first", "ours", 0, 0.00025),
                self.measure.Sample("open", 4 * KIB, "page_first", "ours", 0, 0.5, keys=300_000),
                *self.samples("get, again", 2 * MIB, ours=[3.5]),
            ]
        )
        console = Console(width=120, record=True, file=io.StringIO())
        for table in self.report.tables(rows, ("ours", "fio")):
            console.print(table)
        text = console.export_text()
        for part in ("set full store", "64 KiB", "1.25", "0.83", "1.00", "0.25", "300,000", "3.50"):
            assert part in text
        assert text.count("reached") == 4
        assert "4 of 4 targets reached" in self.report.verdict(rows)

    def test_the_files_store_is_set_beside_in_tree(self) -> None:
        """Its rates have a ratio of their own; its times for 512 keys are judged by its limits."""
        sample = self.measure.Sample
        rows = self.report.build_rows(
            [
                *self.samples(self.measure.STEADY, ours=[4.0], files=[3.0], in_tree=[2.0]),
                sample("exists 512, present", 64 * KIB, "page_first", "files", 0, 0.0029),
                sample("exists 512, present", 64 * KIB, "page_first", "in-tree", 0, 0.0145),
                sample("exists 512 slow, present", 64 * KIB, "page_first", "files", 0, 0.041),
            ]
        )
        assert rows[0].files_over_in_tree == 1.5
        assert [row.reached for row in rows[1:]] == [True, False]
        console = Console(width=120, record=True, file=io.StringIO())
        for table in self.report.tables(rows, ("ours", "files", "in-tree")):
            console.print(table)
        text = console.export_text()
        for part in ("1.5", "slow, present", "2.90", "5.0", "41.00", "40 ms"):
            assert part in text

    def test_the_json_file_has_every_sample(self, tmp_path: Path) -> None:
        """Samples and rows come back as numbers, beside what was said of the machine."""
        taken = self.samples(self.measure.COLD, ours=[1.0, 2.0, 3.0], fio=[4.0, 4.0, 4.0])
        file = tmp_path / "deep" / "bench.json"
        self.report.write_json(
            file, taken, self.report.build_rows(taken), {"machine": {"cores": 2}}
        )
        content = json.loads(file.read_text())
        assert content["machine"] == {"cores": 2}
        assert len(content["samples"]) == 6
        assert content["rows"][0]["over_fio"] == 0.5


class TestHostPages:
    """The bytes that tell right reads from wrong ones, on real SGLang host pools."""

    pools = pytest.importorskip("bench.pools", reason="torch is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def pages(self, layout: str) -> Any:
        pytest.importorskip("sglang", reason="sglang is not installed")
        host = self.pools.HostPages(64 * KIB, layout, 3)
        host.stamp(7)
        return host

    @pytest.mark.parametrize("layout", plan.LAYOUTS)
    def test_only_the_bytes_of_the_asked_batch_pass(self, layout: str) -> None:
        """Another batch, poison, or one flipped bit of a page reported as read is an error."""
        host = self.pages(layout)
        assert host.verified(7, [True] * 3) == 3
        for spoil in (lambda: host.stamp(8), host.poison, lambda: self.flip(host, page=1)):
            host.stamp(7)
            spoil()
            with pytest.raises(BenchError, match="of batch 7 came back with wrong bytes"):
                host.verified(7, [True] * 3)

    @pytest.mark.parametrize("layout", plan.LAYOUTS)
    def test_a_page_reported_as_missing_is_not_counted(self, layout: str) -> None:
        """Its bytes do not matter, and the pages beside it still count."""
        host = self.pages(layout)
        self.flip(host, page=1)
        assert host.verified(7, [True, False, True]) == 2
        with pytest.raises(BenchError, match="2 results for 3 pages"):
            host.verified(7, [True, True])

    @pytest.mark.parametrize("layout", plan.LAYOUTS)
    def test_the_segments_are_the_bytes_sglang_gives_for_a_page(self, layout: str) -> None:
        """In the same order, none left out."""
        host = self.pages(layout)
        addresses, length = host.segments()
        for page in range(host.count):
            mine = b"".join(ctypes.string_at(int(start), length) for start in addresses[page])
            flat = host.pool.get_data_page(page * host.shape.tokens, flat=True)
            assert mine == flat.contiguous().view(self.torch.uint8).numpy().tobytes()

    def flip(self, host: Any, page: int) -> None:
        """Change one bit in the middle of a page's last segment."""
        addresses, length = host.segments()
        place = (ctypes.c_uint8 * 1).from_address(int(addresses[page][-1]) + length // 2 + 1)
        place[0] ^= 1
