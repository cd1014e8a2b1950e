"""Say what tests did, suite by suite, and why some skipped: `python summary.py JUNIT_FILE...`.

A test's suite is the property of that name in the report, which tests/skip_policy.py puts there.
What has none, a file that could not be read as tests, counts for `collection`.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SUITES = ("engine", "docker", "gpu", "helm", "stress", "rest", "collection")
COLUMNS = ("ran", "passed", "failed", "skipped")


@dataclass(frozen=True)
class Case:
    """One test of a report."""

    suite: str
    name: str
    outcome: str
    """`passed`, `failed` or `skipped`."""
    reason: str
    """Why it skipped."""
    seconds: float


def read(report: Path) -> Iterator[Case]:
    """The tests of a JUnit file."""
    for case in ElementTree.parse(report).iter("testcase"):
        suite = case.find("properties/property[@name='suite']")
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        yield Case(
            suite="collection" if suite is None else suite.attrib["value"],
            name=f"{case.get('classname', '')}::{case.get('name', '')}",
            outcome="failed" if failed else "passed" if skipped is None else "skipped",
            reason="" if skipped is None else skipped.get("message", ""),
            seconds=float(case.get("time", 0)),
        )


def table(cases: list[Case]) -> Iterator[str]:
    """The lines that count the tests of each suite, and the time that they took one by one."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in cases:
        for row in (case.suite, "all"):
            counts[row][case.outcome] += 1
            counts[row]["ran"] += case.outcome != "skipped"
            seconds[row] += case.seconds
    yield f"{'suite':<11}{''.join(f'{name:>9}' for name in COLUMNS)}{'time':>9}"
    for row in (*SUITES, "all"):
        # A suite without tests is shown, but that every file could be read goes without saying.
        if row != "collection" or counts[row]:
            numbers = "".join(f"{counts[row][name]:>9}" for name in COLUMNS)
            yield f"{row:<11}{numbers}{f'{seconds[row]:.0f} s':>9}"


def skips(cases: list[Case]) -> Iterator[str]:
    """The lines that name every test that skipped, under the reason."""
    names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for case in cases:
        if case.outcome == "skipped":
            names[case.suite, case.reason].append(case.name)
    for (suite, reason), skipped in sorted(names.items()):
        yield f"skipped, {suite}: {reason}"
        yield from (f"    {name}" for name in sorted(skipped))


def main(reports: list[str]) -> None:
    """Print the summary of all the reports together."""
    cases = [case for report in reports for case in read(Path(report))]
    sys.stdout.write("".join(f"{line}\n" for line in (*table(cases), *skips(cases))))


if __name__ == "__main__":
    main(sys.argv[1:])
