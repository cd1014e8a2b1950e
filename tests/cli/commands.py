"""How tests call `hicache-nixl`."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from hicache_nixl.cli.main import app


def run(*args: str, code: int = 0, answer: str | None = None) -> Result:
    """Call a command; its exit code must be `code`."""
    result = CliRunner().invoke(app, args, input=answer)
    assert result.exit_code == code, result.output
    return result


def run_json(*args: str, code: int = 0) -> Any:
    """Call a command with --json; standard output must be one JSON document."""
    return json.loads(run(*args, "--json", code=code).stdout)
