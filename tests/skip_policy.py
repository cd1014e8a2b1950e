"""What holds for every test: its suite, the order of the long ones, and what may be skipped where.

A test marked ``docker``, ``engine`` or ``helm`` that skips is a failure where the environment says
``CI=true``, because there the machine was set up to run it; but nobody sets up a GPU. The JUnit
report has each test's suite as a property.
"""

import os
from collections.abc import Generator

import pytest

SUITES = ("gpu", "docker", "engine", "helm", "stress")
"""The markers by which a test belongs to a suite; the first that it has counts."""
ORDER = ("engine", "docker", "gpu", "stress", "helm", "rest")
MUST_RUN_IN_CI = ("docker", "engine", "helm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The long tests first: one that starts last is waited for by every other worker. Those of
    # containers after the engine's, because CI builds their images meanwhile. xdist deals out the
    # list in as many pieces as there are workers; who is done takes from the end of another's.
    items.sort(key=lambda item: ORDER.index(_suite(item)))
    for item in items:
        item.user_properties.append(("suite", _suite(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure is reported as skipped, too.
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped").removeprefix(": ").strip()
    if reason in ("", "unconditional skip"):
        return _failed(report, "a skip needs a reason")
    suite = _suite(item)
    if suite in MUST_RUN_IN_CI and _in_ci():
        return _failed(report, f"a test of the suite {suite} must run in CI, it skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # A module that skips as a whole hides what its tests are marked with.
    if report.skipped and _in_ci():
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: a whole module must not skip in CI: {report.longrepr}"
    return report


def _suite(item: pytest.Item) -> str:
    return next((name for name in SUITES if item.get_closest_marker(name)), "rest")


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


def _failed(report: pytest.TestReport, why: str) -> pytest.TestReport:
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {why}"
    return report
