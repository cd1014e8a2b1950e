"""What every test may use and must keep to."""

import os
from typing import Any

from containers.runs import Run

pytest_plugins = ("s3_fixtures", "skip_policy")
"""The rules of skip_policy.py about skipped tests."""


def pytest_unconfigure() -> None:
    # The last process of the run: every worker has ended, and nobody uses a container any more.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        run = Run.current()
        if run.directory.exists():
            run.remove()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    chosen = Run.current().made_once("s3-server")
    if chosen is not None:
        terminalreporter.write_line(f"S3 server in containers: {chosen[0]}, {chosen[1]}")
