"""values.yaml, its schema and the templates as texts."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from .charts import CHART, PROJECT, helm

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEXT = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
READMES = [(directory / "README.md").read_text(encoding="utf-8") for directory in (PROJECT, CHART)]
INSTALLS = re.findall(
    r"(?:^|`)helm (?:install|upgrade) ((?:\\\n|[^\n`])+)", "\n".join([TEXT, *READMES]), re.MULTILINE
)


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


def test_a_null_is_refused() -> None:
    """A value that a null removes is missing for the schema, but for settings of the library and
    the lists of Kubernetes, where it means something."""
    free = (("connector", "settings"), ("server", "resources"))
    every = {path[:length] for path in PATHS for length in range(1, len(path) + 1)}
    for path in every:
        values = yaml.safe_load(VALUES)
        place = values
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        errors = [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]
        expected = [] if path[:-1] in free else [f"'{path[-1]}' is a required property"]
        assert errors == expected, path


@pytest.mark.helm
@pytest.mark.parametrize(
    ("value", "missing"),
    [
        *((f"connector.settings.{key}", "") for key in ("capacity", "staging", "deadline")),
        ("server.resources.requests", ""),
        ("server", "at '': missing property 'server'"),
        ("store.slab", "at '/store': missing property 'slab'"),
        ("server.extraArgs", "at '/server': missing property 'extraArgs'"),
    ],
)
def test_helm_reads_null_so(value: str, missing: str) -> None:
    """A null is a missing property, or a setting left to the library; never an error of a
    template."""
    ran = helm("template", "trial", str(CHART), "--set", f"{value}=null")
    assert (ran.status == 0) == (missing == "")
    assert missing in ran.errors
    assert "nil pointer" not in ran.errors


@pytest.mark.parametrize(
    "path", sorted((CHART / "templates").rglob("*.*")), ids=lambda path: path.name
)
def test_templates_are_short(path: Any) -> None:
    """No template is longer than 150 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.helm
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_values_in_the_documentation_render(block: str, tmp_path: Path) -> None:
    """Each block of values in docs/kubernetes.md is a set of values that the chart takes."""
    file = tmp_path / "values.yaml"
    file.write_text(block, encoding="utf-8")
    ran = helm("template", "trial", str(CHART), "--values", str(file))
    assert ran.status == 0, ran.errors


@pytest.mark.helm
@pytest.mark.parametrize("command", INSTALLS, ids=range(len(INSTALLS)))
def test_installs_in_the_documentation_render(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each helm install and upgrade of the documentation, with the first values of
    docs/kubernetes.md, is one that the chart takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helm").symlink_to(CHART.parent)
    (tmp_path / "values.yaml").write_text(BLOCKS[0], encoding="utf-8")
    ran = helm("template", *shlex.split(command.replace("\\\n", " ")))
    assert ran.status == 0, ran.errors


def test_the_documentation_names_what_exists() -> None:
    """Each value and scenario that docs/kubernetes.md names is one of the chart."""
    known = {".".join(path[:length]) for path in PATHS for length in range(1, 9)}
    roots = {path[0] for path in PATHS}
    named = re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:: [^`]*)?`", TEXT)
    values = [name for name in named if name.partition(".")[0] in roots]
    assert len(values) > 15
    assert [name for name in values if name not in known] == []
    for scenario in re.findall(r"\(\.\./helm/hicache-nixl/ci/([^)]+)\)", TEXT):
        assert (CHART / "ci" / scenario).is_file(), scenario
