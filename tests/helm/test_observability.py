"""Dashboard, alerts and notes: what they name exists."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .charts import CHART, SCENARIOS, TOOLS, notes, render

METRIC = re.compile(r"sglang:\w+")
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def alerts() -> list[str]:
    """Their expressions."""
    groups = render("everything").one("PrometheusRule")["spec"]["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def observability() -> Path:
    """Where SGLang's sources have its metrics."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "srt/observability"


def sglang_metrics() -> dict[str, str]:
    """The kind of each metric in SGLang's sources: Counter, Gauge, Histogram or Summary."""
    files = observability().glob("*.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
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


@pytest.mark.helm
def test_a_store_without_a_series_raises_the_alert() -> None:
    """SGLang has no series of stored tokens before the first one, and the alert needs none: what is
    stored only takes pods away."""
    (expression,) = [found for found in alerts() if "backuped" in found]
    assert re.sub(r"\{.*?\}", "", expression) == (
        "sum by (pod) (rate(sglang:prompt_tokens_total[30m])) > 100"
        " unless sum by (pod) (rate(sglang:backuped_tokens_total[30m])) > 0"
    )


@pytest.mark.parametrize("label", ["cache_source", "reason"])
def test_labels(label: str) -> None:
    """A label that panels group by is one of SGLang's."""
    text = (observability() / "metrics_collector.py").read_text(encoding="utf-8")
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


def commands(text: str) -> list[str]:
    """Those in notes."""
    found = re.findall(
        r"^(?:  |If it stays Pending: )((?:kubectl|helm|curl) .*)", text, re.MULTILINE
    )
    return [command.removesuffix(" &") for command in found]


@pytest.mark.helm
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_notes(scenario: str) -> None:
    """The notes say what was installed, with commands to check it and to ask it, and no secret."""
    text = notes(scenario)
    verbs = [command.split()[3] for command in commands(text) if "--namespace" in command]
    assert verbs[:2] == ["rollout", "logs"]
    assert commands(text)[-1].startswith("curl ")
    store = render(scenario).settings["store"][0].partition("://")[0]
    assert f"KV cache in storage: {store}" in text
    assert "only-for-trials" not in text


NODES_ALONE = {"server.replicas": 0, "hicache.size": 0}


@pytest.mark.helm
@pytest.mark.parametrize(
    ("scenario", "values"),
    [("slab-claims", {}), ("hugepages-node", {}), ("hugepages-node", NODES_ALONE)],
    ids=str,
)
def test_commands_of_the_notes_are_understood(scenario: str, values: dict[str, Any]) -> None:
    """kubectl and helm understand each command of the notes, and then find no cluster."""
    given = [found for found in commands(notes(scenario, values)) if not found.startswith("curl ")]
    assert len(given) >= 3
    for command in given:
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


FROM = {"networkPolicy.from": [{"podSelector": {}}]}
HERE = {"image.repository": "registry.example.com/sglang"}
HERE_TOO = {"toolsImage.repository": "localhost:5000/hicache-nixl/connector"}
LOCAL = "no registry is named"
NETWORK_DISK = "Its StorageClass is the cluster's default"
HOST_KV = "Host KV is 2 times the KV of each GPU, which the pod's memory must hold"


@pytest.mark.helm
@pytest.mark.parametrize(
    ("scenario", "values", "line"),
    [
        ("minio", {}, "FOR DEVELOPMENT ONLY"),
        ("minio", {}, "prefer store.s3.existingSecret"),
        ("slab-ephemeral", {}, "It goes with its pod"),
        ("hugepages-node", {}, "raises them and restarts the kubelet where it did"),
        ("hugepages-pod", {}, "on a node that reports enough already"),
        ("slab-hostpath", {}, "hugepagesz=1G hugepages=460"),
        (None, {}, f"hicache-nixl/sglang-gpu, hicache-nixl/connector: {LOCAL}"),
        (None, HERE, f"hicache-nixl/connector: {LOCAL}"),
        (None, {}, NETWORK_DISK),
        ("slab-claims", {"store.slab.storageClassName": ""}, NETWORK_DISK),
        (None, {}, HOST_KV),
        ("everything", FROM, "let in Prometheus, the ingress controller, the gateway, too"),
        ("s3", {}, "networkPolicy.from must let in Prometheus, too"),
        ("everything", {}, "curl https://llm.example.com/v1/models"),
        ("s3", {}, "port-forward service/trial-hicache-nixl 30000:30000"),
        ("s3", {"service.port": 80}, "port-forward service/trial-hicache-nixl 30000:80"),
    ],
)
def test_notes_say(scenario: str | None, values: dict[str, Any], line: str) -> None:
    """What may surprise is in the notes, and how to ask the server."""
    assert line in notes(scenario, values)


@pytest.mark.helm
@pytest.mark.parametrize(
    ("scenario", "values", "line"),
    [
        (None, {**HERE, **HERE_TOO}, LOCAL),
        ("cpu", {}, LOCAL),
        ("slab-claims", {}, NETWORK_DISK),
        ("slab-hostpath", {}, NETWORK_DISK),
        (None, {"hicache.size": 5}, HOST_KV),
        ("cpu", {}, HOST_KV),
        (None, FROM, "networkPolicy.from"),
        ("everything", {}, "networkPolicy.from"),
        ("everything", {**FROM, "networkPolicy.enabled": False}, "networkPolicy.from"),
    ],
)
def test_notes_do_not_say(scenario: str | None, values: dict[str, Any], line: str) -> None:
    """What does not apply is not in the notes."""
    assert line not in notes(scenario, values)


@pytest.mark.helm
@pytest.mark.parametrize(
    ("restart", "line"),
    [
        (True, "raises the hugepages of its nodes to 32768 of 2Mi and restarts the kubelet"),
        (
            False,
            "; then restart the kubelet of the nodes where it did: systemctl restart k3s-agent",
        ),
    ],
)
def test_notes_of_nodes_alone(restart: bool, line: str) -> None:
    """A release without a server says what its DaemonSet does, and nothing of a server."""
    text = notes("hugepages-node", {**NODES_ALONE, "hugepages.node.restartKubelet": restart})
    assert line in text
    assert "rollout status daemonset/trial-hicache-nixl-hugepages" in text
    assert not re.search("SGLang|deployment|helm test|curl|KV cache", text)
    assert notes(None, {"server.replicas": 0}).endswith("No server runs, server.replicas is 0.\n")
