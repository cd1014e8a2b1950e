"""Dashboard, alerts and notes: what they name exists."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from .charts import CHART, SCENARIOS, TOOLS, notes, render

METRIC = re.compile(r"sglang:\w+")
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def alerts() -> list[str]:
    """Their expressions."""
    groups = render("everything").one("PrometheusRule")["spec"]["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def sglang_metrics() -> dict[str, str]:
    """The kind of each metric in SGLang's sources: Counter, Gauge, Histogram or Summary."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0]) / "srt/observability"
    text = "".join(file.read_text(encoding="utf-8") for file in source.glob("*.py"))
    return {name: kind for kind, name in re.findall(r'(\w+)\(\s*name="(sglang:\w+)"', text)}


def check(expressions: list[str]) -> None:
    """Each metric exists, and is read as its kind allows."""
    known = sglang_metrics()
    for expression in expressions:
        names = METRIC.findall(expression)
        assert names, expression
        for name in names:
            kind = known.get(name.removesuffix("_bucket"))
            assert kind is not None, name
            assert name.endswith("_bucket") == (kind == "Histogram"), name
            rated = re.search(rf"rate\({name}\b", expression) is not None
            assert rated == (kind != "Gauge"), name


def test_the_dashboard_reads_metrics_of_sglang() -> None:
    """Each panel asks for metrics that the pinned SGLang has."""
    check(EXPRESSIONS)


@pytest.mark.helm
def test_alerts_read_metrics_of_sglang() -> None:
    """Each alert asks for metrics that the pinned SGLang has."""
    check(alerts())


@pytest.mark.parametrize("label", ["cache_source", "reason"])
def test_labels(label: str) -> None:
    """A label that panels group by is one of SGLang's."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0])
    text = (root / "srt/observability/metrics_collector.py").read_text(encoding="utf-8")
    assert any(label in expression for expression in EXPRESSIONS)
    assert f'["{label}"]' in text


def test_the_dashboard_is_whole() -> None:
    """Panels have titles and ids of their own, do not overlap, and use the chosen data source."""
    panels = DASHBOARD["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}


@pytest.mark.helm
def test_the_dashboard_is_rendered() -> None:
    """The ConfigMap holds the dashboard under the label that Grafana looks for."""
    found = render("everything").one("ConfigMap", "-dashboard")
    assert json.loads(found["data"]["hicache-nixl.json"]) == DASHBOARD
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.helm
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_notes(scenario: str) -> None:
    """The notes say what was installed, and three commands to check it, without a secret."""
    text = notes(scenario)
    commands = [line.strip() for line in text.splitlines() if line.startswith("  kubectl ")]
    commands += [line.strip() for line in text.splitlines() if line.startswith("  helm ")]
    assert len(commands) == 3
    assert (
        f"KV cache in storage: {render(scenario).settings['store'][0].partition('://')[0]}" in text
    )
    assert "only-for-trials" not in text


@pytest.mark.helm
@pytest.mark.parametrize("scenario", ["slab-claims", "hugepages-node"])
def test_commands_of_the_notes_are_understood(scenario: str) -> None:
    """kubectl and helm understand each command of the notes, and then find no cluster."""
    lines = [
        line.partition(": ")[2] if "Pending" in line else line.strip()
        for line in notes(scenario).splitlines()
    ]
    commands = [line for line in lines if line.startswith(("kubectl ", "helm "))]
    assert len(commands) >= 3
    for command in commands:
        tool, *arguments = shlex.split(command)
        ran = subprocess.run(
            [str(TOOLS / tool), *arguments],
            # Port 9 is nobody's.
            env={
                **os.environ,
                "KUBECONFIG": "/dev/null",
                "KUBERNETES_MASTER": "http://127.0.0.1:9",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode != 0
        assert re.search("refused|unreachable", ran.stderr), f"{command}: {ran.stderr}"


@pytest.mark.helm
@pytest.mark.parametrize(
    ("scenario", "line"),
    [
        ("minio", "FOR DEVELOPMENT ONLY"),
        ("minio", "prefer store.s3.existingSecret"),
        ("slab-ephemeral", "It goes with its pod"),
        ("hugepages-node", "restarts the kubelet where it did"),
        ("hugepages-pod", "on a node that reports enough already"),
        ("slab-hostpath", "hugepagesz=1G hugepages=460"),
    ],
)
def test_notes_warn(scenario: str, line: str) -> None:
    """What may surprise is in the notes."""
    assert line in notes(scenario)
