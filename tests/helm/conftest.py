"""Fixtures of the chart's tests."""

import subprocess

import pytest

from .charts import PROJECT


@pytest.fixture(autouse=True)
def _has_tools(request: pytest.FixtureRequest, tools_missing: str) -> None:
    if tools_missing and request.node.get_closest_marker("helm"):
        pytest.skip(tools_missing)


@pytest.fixture(scope="session")
def tools_missing() -> str:
    """What is missing of helm and kubectl, or ""."""
    ran = subprocess.run(
        [str(PROJECT / "ci" / "helm-tools.sh"), "check"], capture_output=True, text=True
    )
    return ran.stderr.strip() if ran.returncode else ""
