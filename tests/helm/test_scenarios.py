"""Every scenario of the chart against helm and against the schemas of Kubernetes."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT7

from .charts import CHART, SCENARIOS, helm, options, render, template

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
    for manifest in render(scenario).every:
        if manifest["kind"] not in CUSTOM:
            _validator(version, manifest["kind"], manifest["apiVersion"]).validate(manifest)


def test_the_schemas_reject_something() -> None:
    """A misspelt field of a pod is not valid."""
    manifest = json.loads(json.dumps(render().workload))
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        _validator(VERSIONS[0], "Deployment", "apps/v1").validate(manifest)


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
