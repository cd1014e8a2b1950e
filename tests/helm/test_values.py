"""values.yaml, its schema and the templates as texts."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .charts import CHART, PROJECT, helm

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of what a user sets."""
    if isinstance(value, dict) and value and path not in ITEMS:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


ITEMS = {("metrics", "dashboard", "labels"), ("server", "resources")}
"""Mappings whose keys are the user's, or Kubernetes'."""
PATHS = sorted(leaves(yaml.safe_load(VALUES)))


def test_the_readme_is_up_to_date() -> None:
    """The table of values is what values.yaml says."""
    assert chart_readme(CHART) == (0, "")


def test_every_value_has_a_comment(tmp_path: Path) -> None:
    """A value that nothing is said of is an error that names it."""
    (tmp_path / "README.md").write_text("<!-- values -->\n", encoding="utf-8")
    lines = VALUES.splitlines()
    below = lines.index("  replicas: 1")
    assert lines[below - 1].startswith("  # -- ")
    (tmp_path / "values.yaml").write_text("\n".join(lines[: below - 1] + lines[below:]))
    status, errors = chart_readme(tmp_path)
    assert (status, errors.partition(" — ")[0]) == (1, "chart: server.replicas has no comment")


def chart_readme(chart: Path) -> tuple[int, str]:
    """Status and errors of the script that checks the README."""
    script = PROJECT / "ci" / "chart_readme.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--check", str(chart)], capture_output=True, text=True
    )
    return ran.returncode, ran.stderr


def test_every_value_is_in_the_schema() -> None:
    """The schema knows each value by its path."""
    for path in PATHS:
        schema = SCHEMA
        for key in path:
            schema = schema["properties"][key]


def test_the_schema_knows_nothing_else() -> None:
    """Each value of the schema is in values.yaml; keys below are the user's, or Kubernetes'."""
    known: set[tuple[str, ...]] = {path[:length] for path in PATHS for length in range(1, 9)}

    def walk(schema: dict[str, Any], path: tuple[str, ...]) -> None:
        assert path == () or path in known or path == ("global",), path
        if path not in PATHS:
            for key, inner in schema.get("properties", {}).items():
                walk(inner, (*path, key))

    walk(SCHEMA, ())


def test_unknown_keys_are_refused_everywhere() -> None:
    """Each object of the schema with named keys takes no other."""

    def walk(schema: dict[str, Any]) -> None:
        if "properties" in schema:
            assert schema["additionalProperties"] is False
        for inner in schema.get("properties", {}).values():
            walk(inner)

    walk(SCHEMA)


@pytest.mark.parametrize(
    "path", sorted((CHART / "templates").rglob("*.*")), ids=lambda path: path.name
)
def test_templates_are_short(path: Any) -> None:
    """No template is longer than 150 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.helm
@pytest.mark.parametrize("number", range(4))
def test_values_in_the_documentation_render(number: int, tmp_path: Path) -> None:
    """Each block of values in docs/kubernetes.md is a set of values that the chart takes."""
    text = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    file = tmp_path / "values.yaml"
    file.write_text(blocks[number], encoding="utf-8")
    ran = helm("template", "trial", str(CHART), "--values", str(file))
    assert ran.status == 0, ran.errors


def test_the_documentation_names_what_exists() -> None:
    """Each value and scenario that docs/kubernetes.md names is one of the chart."""
    text = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    known = {".".join(path[:length]) for path in PATHS for length in range(1, 9)}
    roots = {path[0] for path in PATHS}
    named = re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:: [^`]*)?`", text)
    values = [name for name in named if name.partition(".")[0] in roots]
    assert len(values) > 15
    assert [name for name in values if name not in known] == []
    for scenario in re.findall(r"\(\.\./helm/hicache-nixl/ci/([^)]+)\)", text):
        assert (CHART / "ci" / scenario).is_file(), scenario
