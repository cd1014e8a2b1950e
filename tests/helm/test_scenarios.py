"""Every scenario of the chart against helm and against the schemas of Kubernetes."""

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT7

from .charts import CHART, SCENARIOS, Manifest, helm, manifests, options, render, template

pytestmark = pytest.mark.helm

VERSIONS = ("1.28", "1.31", "1.34", "1.37")
CUSTOM = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ServiceMonitor"}
"""Kinds that Kubernetes itself does not know, and so has no schema of."""


@cache
def _schemas(version: str) -> Path:
    package = importlib.util.find_spec("kubernetes_validate")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0]) / "kubernetes-json-schema"
    return root / f"v{version}.0-local-strict"


@cache
def _validator(version: str, kind: str, group_version: str) -> jsonschema.Draft7Validator:
    group, _, name = group_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.partition(".")[0], name) if part)
    schema = json.loads((_schemas(version) / f"{file}.json").read_text(encoding="utf-8"))
    resource = DRAFT7.create_resource(_definitions(version))
    registry: Registry[Any] = Registry().with_resource("_definitions.json", resource)
    return jsonschema.Draft7Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Any:
    return json.loads((_schemas(version) / "_definitions.json").read_text(encoding="utf-8"))


def check(manifests: Iterable[Manifest], version: str) -> None:
    """ValidationError for the first that Kubernetes' strict schema refuses."""
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            _validator(version, manifest["kind"], manifest["apiVersion"]).validate(manifest)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_lint(scenario: str) -> None:
    """helm lint finds nothing to warn of."""
    ran = helm("lint", "--strict", "--quiet", str(CHART), *options(scenario, None))
    assert (ran.status, ran.output.strip(), ran.errors.strip()) == (0, "", "")


def test_defaults_render() -> None:
    """The chart renders without any value given, and warns of nothing."""
    ran = template()
    assert (ran.status, ran.errors) == (0, "")
    assert render().workload["kind"] == "Deployment"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_manifests_are_valid(scenario: str, version: str) -> None:
    """Kubernetes' strict schemas of each version accept every manifest."""
    check(render(scenario).every, version)


def test_the_schemas_reject_something() -> None:
    """A misspelt field of a pod is not valid."""
    manifest = json.loads(json.dumps(render().workload))
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        _validator(VERSIONS[0], "Deployment", "apps/v1").validate(manifest)


SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
ODD = ("123", "true", "a\nb: true")
"""Strings that YAML reads as something else where they stand bare."""
USED = {
    "connector": "files",
    "connector.settings.profile": "s3",
    "hugepages": "hugepages-node",
    "minio": "minio",
    "model.cache.existingClaim": "files",
    "model.cache.hostPath": "slab-hostpath",
    "model.revision": "files",
    "server.runtimeClassName": "slab-hostpath",
    "store.files.existingClaim": "files",
    "store.files": "files-hostpath",
    "store.s3": "s3",
    "store.s3.accessKey": "minio",
    "store.s3.secretKey": "minio",
    "store.s3.secretKeys.accessKey": "s3-keys",
    "store.s3.secretKeys.secretKey": "s3-keys",
    "store.slab.existingClaim": "slab-claim",
    "store.slab.storageClassName": "slab-claims",
}
"""A scenario that renders these values; everything renders the others."""


def strings(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The values that may be strings, with the odd ones that their schema takes."""
    if "string" in schema.get("type", ()) and path:
        for text in ODD:
            if jsonschema.Draft7Validator(schema).is_valid(text):
                yield path, text
    for name, inner in schema.get("properties", {}).items():
        yield from strings(inner, f"{path}.{name}".removeprefix("."))


def texts(value: object) -> Iterator[str]:
    """All strings in a manifest, keys among them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


def used(path: str) -> str:
    """A scenario that renders a value."""
    known = [name for name in USED if f"{path}.".startswith(f"{name}.")]
    return USED[max(known, key=len)] if known else "everything"


@pytest.mark.parametrize(("path", "text"), list(strings(SCHEMA)))
def test_a_string_stays_one(path: str, text: str) -> None:
    """A string that looks like a number, a truth or several lines arrives as it is, or is refused
    by the chart's own line and not by the reader of YAML."""
    values = {path: text, "image.digest": ""} if path == "image.tag" else {path: text}
    ran = template(used(path), values)
    if ran.status != 0:
        assert not re.search("YAML parse error|converting YAML", ran.errors)
        return
    every = manifests(ran).every
    assert any(text in found for found in texts(list(every)))
    check(every, VERSIONS[-1])


@pytest.mark.parametrize("name", ["123", "true", "null"])
def test_a_release_may_have_any_name(name: str) -> None:
    """A release whose name YAML reads as something else has valid manifests."""
    ran = helm("template", name, str(CHART), "--set", "fullnameOverride=llm")
    every = manifests(ran).every
    for manifest in every:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == name
    check(every, VERSIONS[-1])


@pytest.mark.parametrize(("version", "accepted"), [("1.27.9", False), ("1.28.0", True)])
def test_kubernetes_version(version: str, accepted: bool) -> None:
    """The oldest version that is accepted is the oldest that is tested."""
    ran = helm("template", "trial", str(CHART), "--kube-version", version)
    assert (ran.status == 0) == accepted
    assert accepted or "kubeVersion: >=1.28" in ran.errors


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rendering_is_repeatable(scenario: str) -> None:
    """The same values give the same manifests, so that an upgrade without a change is none."""
    assert template(scenario).output == template(scenario).output


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_names_are_unique(scenario: str) -> None:
    """No two manifests have the same kind and name, and every one has the chart's labels."""
    found = [
        manifest
        for manifest in render(scenario).every
        if not manifest["metadata"]["name"].endswith("-more")
    ]
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in found]
    assert len(names) == len(set(names))
    for manifest in found:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "trial"


def test_versions() -> None:
    """The chart is of the library's version, and asks for images of it."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{chart["appVersion"]}"' in project
    assert render().container["image"] == f"hicache-nixl/sglang-gpu:{chart['appVersion']}"
