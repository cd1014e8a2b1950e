"""What must be in the manifests of every scenario, and what must never be."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from .charts import (
    PROJECT,
    SCENARIOS,
    Manifest,
    Manifests,
    containers,
    environment,
    named,
    render,
    template,
)

pytestmark = pytest.mark.helm

CREDENTIAL = "only-for-trials"
"""The secret key that the scenario minio has in its values."""
TEN_MINUTES = 600


@pytest.fixture(params=SCENARIOS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """Those of each scenario."""
    return render(request.param)


def test_only_one_container_is_privileged(manifests: Manifests) -> None:
    """No container but the one that raises hugepages is privileged or user 0."""
    for name, spec in manifests.pods:
        for container in containers(spec):
            if container["name"] in ("wait", "proxy"):  # the user's own
                continue
            security = container.get("securityContext", {})
            if container["name"] == "hugepages":
                assert security["privileged"] is True, name
                assert container in spec["initContainers"], name
                continue
            assert not security.get("privileged"), name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            user = {**spec.get("securityContext", {}), **security}
            assert user["runAsNonRoot"] is True, name
            assert user["runAsUser"] > 0, name


def test_no_token(manifests: Manifests) -> None:
    """No pod gets a token of Kubernetes, nor variables of Services."""
    for name, spec in manifests.pods:
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
    for account in manifests.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_no_host_namespace(manifests: Manifests) -> None:
    """No pod shares a namespace of the host but the one that restarts the kubelet."""
    for name, spec in manifests.pods:
        assert not spec.get("hostNetwork"), name
        assert not spec.get("hostIPC"), name
        kubelet = any("KUBELET_UNIT" in environment(container) for container in containers(spec))
        assert bool(spec.get("hostPID")) == kubelet, name


def test_images_have_versions(manifests: Manifests) -> None:
    """Each image has a tag that is not latest, or a digest."""
    for name, spec in manifests.pods:
        for container in containers(spec):
            image = container["image"]
            assert "@sha256:" in image or re.fullmatch(r".+:(?!latest$)[\w.-]+", image), name


def test_hugepages_hang_together(manifests: Manifests) -> None:
    """Requests of hugepages are limits, and with them comes SGLang's variable; never one alone."""
    for name, spec in manifests.pods:
        for container in containers(spec):
            resources = container.get("resources", {})
            kinds = {
                kind: {
                    key: value
                    for key, value in resources.get(kind, {}).items()
                    if key.startswith("hugepages-")
                }
                for kind in ("requests", "limits")
            }
            assert kinds["requests"] == kinds["limits"], name
            size = environment(container).get("SGLANG_HUGEPAGE_SIZE", "")
            sizes = {"": [], "2MB": ["hugepages-2Mi"], "1GB": ["hugepages-1Gi"]}
            assert list(kinds["requests"]) == sizes[size], name
            if size:
                # Kubernetes takes no hugepages without one of them.
                assert {"cpu", "memory"} & set(resources["requests"]), name


def test_gpus_are_the_ranks(manifests: Manifests) -> None:
    """The GPUs of a pod are limited, and as many as tensor and data parallel ranks."""
    flags = manifests.flags
    ranks = int(flags["--tp-size"]) * int(flags.get("--dp-size", "1"))
    gpus = manifests.container["resources"].get("limits", {}).get("nvidia.com/gpu")
    on_cpu = "sglang-cpu" in manifests.container["image"]
    assert gpus == (None if on_cpu else ranks)


def test_a_long_load_is_survived(manifests: Manifests) -> None:
    """A load of ten minutes is waited for by the startup probe and by the rollout."""
    container = manifests.container
    startup = container["startupProbe"]
    patience = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience >= TEN_MINUTES
    assert "initialDelaySeconds" not in container["livenessProbe"]
    if manifests.workload["kind"] == "Deployment":
        assert manifests.workload["spec"]["progressDeadlineSeconds"] > patience


def test_a_busy_server_is_not_restarted(manifests: Manifests) -> None:
    """A look waits longer than SGLang's own 20 seconds, and minutes pass before a restart."""
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert manifests.container[probe]["timeoutSeconds"] > 20
    liveness = manifests.container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 300


def test_stopping_is_graceful(manifests: Manifests) -> None:
    """Requests stop coming before SIGTERM does, and there is time after it."""
    command = manifests.container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert 0 < int(command[1]) < manifests.server["terminationGracePeriodSeconds"]


def test_volumes_and_mounts_match(manifests: Manifests) -> None:
    """Each mount has a volume and each volume a mount."""
    claims = [
        claim["metadata"]["name"]
        for claim in manifests.workload["spec"].get("volumeClaimTemplates", ())
    ]
    for name, spec in manifests.pods:
        there = {volume["name"] for volume in spec.get("volumes", ())}
        if spec is manifests.server:
            there |= set(claims)
        used = {
            mount["name"]
            for container in containers(spec)
            for mount in container.get("volumeMounts", ())
        }
        assert used == there, name


def test_no_mount_is_in_a_directory_of_the_image(manifests: Manifests) -> None:
    """No volume of a store is below /var/lib/hicache, which the images keep for their own user."""
    paths = [mount["mountPath"] for mount in manifests.container["volumeMounts"]]
    assert not [path for path in paths if path.startswith("/var/lib/")]
    for url in manifests.settings["store"]:
        kind, _, path = url.partition("://")
        assert kind == "s3" or any(path.startswith(f"{mount}/") for mount in paths)


def test_containers_say_what_they_take(manifests: Manifests) -> None:
    """Each container requests CPU and memory, without which a quota refuses its pod."""
    for name, spec in manifests.pods:
        for container in containers(spec):
            if container["name"] not in ("wait", "proxy"):  # the user's own
                assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name


def test_shared_memory(manifests: Manifests) -> None:
    """/dev/shm is memory with a limit."""
    volume = named(manifests.server["volumes"], "shm")["emptyDir"]
    assert volume["medium"] == "Memory"
    assert volume["sizeLimit"]
    assert named(manifests.container["volumeMounts"], "shm")["mountPath"] == "/dev/shm"


@pytest.mark.parametrize(
    ("given", "rendered"), [(1, 1), ("1", 1), ("25%", "25%")], ids=["number", "text", "percent"]
)
def test_pods_that_may_be_away(given: int | str, rendered: int | str) -> None:
    """A number is one and a percentage a text, as Kubernetes takes them."""
    manifests = render(None, {"podDisruptionBudget.maxUnavailable": given})
    assert manifests.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == rendered


def test_selectors_match(manifests: Manifests) -> None:
    """What selects the server's pods selects them and no others."""
    labels = manifests.workload["spec"]["template"]["metadata"]["labels"]
    chosen = [
        manifests.workload["spec"]["selector"]["matchLabels"],
        manifests.one("Service")["spec"]["selector"],
        manifests.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifests.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in chosen:
        assert selector.items() <= labels.items()
    others = [
        found["spec"]["template"]["metadata"]["labels"]
        for found in manifests.every
        if found["kind"] in ("Deployment", "DaemonSet") and found is not manifests.workload
    ]
    for other in others:
        assert not any(selector.items() <= other.items() for selector in chosen)


def test_a_secret_is_in_secrets_alone() -> None:
    """A key given inline changes the Secret and no other manifest, not even by a digest."""
    manifests = render("minio").every
    others = render("minio", {"store.s3.secretKey": "another-for-trials"}).every
    changing = [one["kind"] for one, other in zip(manifests, others, strict=True) if one != other]
    holding = [found["kind"] for found in manifests if CREDENTIAL in json.dumps(found)]
    assert changing == holding == ["Secret"]


@pytest.mark.parametrize(
    ("scenario", "variables"),
    [
        ("s3-keys", {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}),
        ("files", {"HF_TOKEN", "HICACHE_NIXL_SALT"}),
        ("everything", {"HF_TOKEN", "API_KEY"}),
    ],
)
def test_secrets_are_references(scenario: str, variables: set[str]) -> None:
    """Variables that hold a secret refer to a Secret."""
    found = environment(render(scenario).container)
    for name in variables:
        assert "secretKeyRef" in found[name], name


def changed(first: Manifests, second: Manifests) -> bool:
    """Whether the pods of the one are replaced on the way to the other."""
    templates = [one.workload["spec"]["template"] for one in (first, second)]
    return bool(templates[0] != templates[1])


@pytest.mark.parametrize(
    ("values", "replaced"),
    [
        ({"connector.settings.deadline": "20s"}, True),
        ({"server.podAnnotations": {"example.com/note": "another"}}, True),
        # It is in a file, which the library reads again.
        ({"store.s3.secretKey": "another-for-trials"}, False),
        ({"service.port": 8000}, False),
        ({"metrics.dashboard.enabled": True}, False),
    ],
    ids=str,
)
def test_pods_are_replaced_for_what_they_read(values: dict[str, Any], replaced: bool) -> None:
    """A change of settings replaces the pods, one of what is read again or of nothing in them does
    not."""
    assert changed(render("minio"), render("minio", values)) == replaced


def test_stateful_volumes() -> None:
    """A StatefulSet has a claim template for each disk, and a headless Service."""
    manifests = render("slab-claims", {"store.slab.volumes": 2})
    spec = manifests.workload["spec"]
    assert [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]] == [
        "disk-0",
        "disk-1",
    ]
    headless = manifests.one("Service", "-pods")
    assert spec["serviceName"] == headless["metadata"]["name"]
    assert headless["spec"]["clusterIP"] == "None"


def claims(manifests: Manifests) -> list[Manifest]:
    """Templates of claims, those of a StatefulSet and those in a pod."""
    inside = [
        volume["ephemeral"]["volumeClaimTemplate"]
        for volume in manifests.server["volumes"]
        if "ephemeral" in volume
    ]
    return [*manifests.workload["spec"].get("volumeClaimTemplates", ()), *inside]


@pytest.mark.parametrize("scenario", ["everything", "hugepages-node", "minio", "slab-claims"])
def test_common_labels(scenario: str) -> None:
    """They are on every object, pod and claim but those of a StatefulSet, and on no selector."""
    label = {"team": "serving"}
    manifests = render(scenario, {"commonLabels": label})
    for found in manifests.every:
        metadata = [found["metadata"]]
        if found["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            metadata.append(found["spec"]["template"]["metadata"])
            assert not label.items() <= found["spec"]["selector"]["matchLabels"].items()
        for place in metadata if not found["metadata"]["name"].endswith("-more") else ():
            assert label.items() <= place["labels"].items(), found["metadata"]["name"]
    stateful = manifests.workload["kind"] == "StatefulSet"
    for claim in claims(manifests):
        assert claim["metadata"]["labels"]["app.kubernetes.io/instance"] == "trial"
        assert ("team" in claim["metadata"]["labels"]) != stateful


@pytest.mark.parametrize(
    ("values", "kind", "found"),
    [
        ({"server.podLabels": {"team": "own"}}, "pod", "own"),
        ({"metrics.serviceMonitor": {"enabled": True, "labels": {"team": "own"}}}, "", "own"),
        ({"metrics.podMonitor": {"enabled": True, "labels": {"team": "own"}}}, "", "own"),
        ({"metrics.alerts": {"enabled": True, "labels": {"team": "own"}}}, "", "own"),
    ],
    ids=str,
)
def test_an_own_label_wins(values: dict[str, Any], kind: str, found: str) -> None:
    """A label of one object wins over commonLabels, and stands once."""
    manifests = render(None, {"commonLabels": {"team": "common"}, **values})
    if kind == "pod":
        labels = [manifests.workload["spec"]["template"]["metadata"]["labels"]]
    else:
        custom = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
        labels = [one["metadata"]["labels"] for one in manifests.every if one["kind"] in custom]
    assert [one["team"] for one in labels] == [found]


def test_own_annotations() -> None:
    """Those of the user stand beside the chart's own."""
    annotations = {"example.com/note": "a note"}
    manifests = render(None, {"server.podAnnotations": annotations})
    found = manifests.workload["spec"]["template"]["metadata"]["annotations"]
    assert found.keys() == {"example.com/note", "checksum/config"}


@pytest.mark.parametrize("own", [None, {"matchLabels": {"tier": "model"}}])
def test_spread(own: dict[str, Any] | None) -> None:
    """An own labelSelector is kept as it is; without one it is that of the server's pods."""
    rule = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    given = rule if own is None else {**rule, "labelSelector": own}
    manifests = render(None, {"server.topologySpreadConstraints": [given]})
    (found,) = manifests.server["topologySpreadConstraints"]
    selector = manifests.workload["spec"]["selector"]
    assert found == {**rule, "labelSelector": selector if own is None else own}


def test_optional_objects_are_off_by_default() -> None:
    """The chart makes little unless it is asked."""
    assert sorted(found["kind"] for found in render().every) == [
        "ConfigMap",
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "Pod",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    ]


def test_autoscaling_owns_the_number_of_pods() -> None:
    """With an autoscaler the workload says no number, which an upgrade would set back."""
    manifests = render("everything")
    assert "replicas" not in manifests.workload["spec"]
    assert manifests.one("HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 8


@pytest.mark.parametrize("kind", ["serviceMonitor", "podMonitor"])
def test_monitors(kind: str) -> None:
    """A monitor selects the server's pods, or their Service and no other, by the port's name."""
    manifests = render(None, {f"metrics.{kind}.enabled": True})
    spec = manifests.one(kind[0].upper() + kind[1:])["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    endpoints = spec["endpoints" if kind == "serviceMonitor" else "podMetricsEndpoints"]
    assert endpoints[0]["port"] == manifests.container["ports"][0]["name"] == "http"
    services = [
        service["metadata"]["name"]
        for service in manifests.of("Service")
        if wanted <= service["metadata"]["labels"].items()
    ]
    assert services == ["trial-hicache-nixl"]
    assert wanted <= manifests.workload["spec"]["template"]["metadata"]["labels"].items()


def test_egress() -> None:
    """Where egress is restricted, DNS, the port of the bucket and the user's rules are open."""
    spec = render("s3").one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    ports = [port["port"] for rule in spec["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 8443, 443]


def test_only_the_server_reaches_minio() -> None:
    """MinIO lets the server's pods in and nobody else."""
    manifests = render("minio")
    spec = manifests.one("NetworkPolicy", "-minio")["spec"]
    minio = manifests.one("Deployment", "-minio")["spec"]
    assert spec["podSelector"] == minio["selector"]
    assert spec["policyTypes"] == ["Ingress"]
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": manifests.workload["spec"]["selector"]}]
    (port,) = minio["template"]["spec"]["containers"][0]["ports"]
    assert rule["ports"] == [{"port": port["name"]}]


def test_minio_is_the_image_of_compose() -> None:
    """MinIO is one image, here and in compose.yaml."""
    compose = PROJECT / "docker" / "compose" / "minio.yaml"
    image = yaml.safe_load(compose.read_text())["services"]["objectstore"]["image"]
    minio = render("minio").one("Deployment", "-minio")["spec"]["template"]["spec"]
    assert image == f"${{MINIO_IMAGE:-{minio['containers'][0]['image']}}}"


def test_the_helm_test_may_reach_the_server() -> None:
    """Where few may reach the server, the pod of helm test is one of them."""
    manifests = render("s3")
    labels = manifests.one("Pod", "-test")["metadata"]["labels"]
    peers = manifests.one("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert any(
        peer.get("podSelector", {}).get("matchLabels", {"none": ""}).items() <= labels.items()
        for peer in peers
    )


def test_the_wheel_is_found() -> None:
    """What the init container installs is what SGLang's Python looks at."""
    manifests = render("wheel")
    init = named(manifests.server["initContainers"], "install-connector")
    target = named(init["volumeMounts"], "connector")["mountPath"]
    assert f"--target {target}" in init["args"][0]
    assert named(manifests.container["volumeMounts"], "connector")["mountPath"] == target
    assert environment(manifests.container)["PYTHONPATH"] == target
    assert init["image"] == manifests.container["image"] == "lmsysorg/sglang:v0.5.23"


def test_a_bare_off_is_off() -> None:
    """YAML's own reading of `off` is the mode off."""
    assert template(None, {"hugepages.mode": False}).output == template().output


def test_own_flags() -> None:
    """What the user adds to the command line stands after what the chart sets."""
    arguments = render(None, {"server.extraArgs": ["--log-level", "debug"]}).container["args"]
    assert arguments[-2:] == ["--log-level", "debug"]


def test_command() -> None:
    """The image's entrypoint is kept unless another command is given."""
    assert "command" not in render().container
    assert render(None, {"server.command": ["serve"]}).container["command"] == ["serve"]


def test_references_resolve(manifests: Manifests) -> None:
    """What a pod asks of the chart's own ConfigMaps, Secrets and account is there, key by key."""
    there = {
        (found["kind"], found["metadata"]["name"]): set(
            {**found.get("data", {}), **found.get("stringData", {})}
        )
        for found in manifests.every
        if found["kind"] in ("ConfigMap", "Secret")
    }

    def asked(spec: dict[str, Any]) -> Iterator[tuple[str, str, str | None]]:
        for volume in spec.get("volumes", ()):
            for kind, source, name in (
                ("ConfigMap", volume.get("configMap"), "name"),
                ("Secret", volume.get("secret"), "secretName"),
            ):
                if source is not None:
                    keys = [item["key"] for item in source.get("items", ())] or [None]
                    yield from ((kind, source[name], key) for key in keys)
        for container in containers(spec):
            for value in environment(container).values():
                if isinstance(value, dict):
                    ((kind, source),) = value.items()
                    kind = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}[kind]
                    yield kind, source["name"], source["key"]

    count = 0
    for pod, spec in manifests.pods:
        for kind, name, key in asked(spec):
            if name.startswith("trial-"):
                count += 1
                assert (kind, name) in there, pod
                assert key is None or key in there[kind, name], pod
    assert count >= 1
    account = manifests.server["serviceAccountName"]
    assert [found["metadata"]["name"] for found in manifests.of("ServiceAccount")] == [account]
