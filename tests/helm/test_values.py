"""values.yaml, its schema and the templates as texts."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from .charts import CHART

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
_KEY = re.compile(r"( *)([\w.]+):(.*)")


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


def commented() -> set[tuple[str, ...]]:
    """The paths of the keys that have a comment with ``# --`` above."""
    found: set[tuple[str, ...]] = set()
    stack: list[str] = []
    comment = False
    for line in VALUES.splitlines():
        text = line.strip()
        if text.startswith("# --"):
            comment = True
        elif (key := _KEY.fullmatch(line)) and not text.startswith("#"):
            stack = [*stack[: len(key[1]) // 2], key[2]]
            if comment:
                found.add(tuple(stack))
            comment = False
        elif not text:
            comment = False
    return found


def test_every_value_has_a_comment() -> None:
    """What a user can set is explained above, or its parent is, where that is one thing."""
    explained = commented()
    missing = [path for path in PATHS if not {path, path[:-1]} & explained]
    assert missing == []


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
