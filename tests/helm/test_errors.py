"""Values that cannot work fail before anything is installed, with one line that names them."""

import re
from typing import Any

import pytest

from .charts import template

pytestmark = pytest.mark.helm

S3 = {"store.kind": "s3", "store.s3.url": "s3://kv-cache/team"}
KEYS = {"store.s3.accessKey": "an-access-key", "store.s3.secretKey": "a-secret-key"}
HOST = {"store.slab.volume": "hostPath", "store.slab.hostPaths": ["/nvme0/hicache"]}
PAGES = {"hugepages.mode": "node"}


def url(text: str) -> dict[str, Any]:
    """An s3 store there."""
    return {"store.kind": "s3", "store.s3.url": text}


# The values, and what the line must say: the name of the value first.
CASES: list[tuple[dict[str, Any], str]] = [
    # the store's URL
    (url(""), r"store\.s3\.url is empty"),
    (url("http://minio:9000/kv-cache"), r"store\.s3\.url = http://minio:9000/kv-cache is not"),
    (url("s3:/kv-cache"), r"store\.s3\.url = s3:/kv-cache is not"),
    (url("slab:///nvme0"), r"store\.s3\.url = slab:///nvme0 is not"),
    (url("s3://KV"), r"store\.s3\.url = s3://KV is not"),
    (url("s3://kv-cache?endpoint=minio:9000"), r"store\.s3\.url has the endpoint minio:9000"),
    (url("s3://kv-cache?endpiont=http://minio"), r"store\.s3\.url has the parameter endpiont"),
    (url("s3://me:pass@kv-cache/team"), r"store\.s3\.url carries"),
    (url("s3://kv-cache?secret_key=abc"), r"store\.s3\.url carries"),
    (
        {**url("s3://kv-cache?ca_bundle=/a"), "store.s3.ca.existingConfigMap": "ca"},
        r"store\.s3\.url has the parameter ca_bundle and",
    ),
    # its credentials
    (
        {**S3, **KEYS, "store.s3.existingSecret": "bucket"},
        r"store\.s3\.existingSecret is given, and",
    ),
    ({**S3, "store.s3.accessKey": "an-access-key"}, r"store\.s3\.secretKey is empty"),
    ({**S3, "store.s3.secretKey": "a-secret-key"}, r"store\.s3\.accessKey is empty"),
    ({**S3, "minio.enabled": True}, r"minio\.enabled needs store\.s3\.accessKey"),
    (
        {**url("s3://kv-cache?endpoint=http://s3"), **KEYS, "minio.enabled": True},
        r"store\.s3\.url has an endpoint",
    ),
    (
        {**S3, **KEYS, "store.s3.secretKey": "short", "minio.enabled": True},
        r"store\.s3\.secretKey has fewer",
    ),
    ({"minio.enabled": True}, r"minio\.enabled is set and store\.kind = slab"),
    ({"store.s3.url": "s3://kv-cache"}, r"store\.s3\.url is given and store\.kind = slab"),
    # a slab store without a volume, or with another one's
    ({"store.slab.volume": ""}, r'store\.slab\.volume = "": a slab store needs a volume'),
    ({"store.slab.volume": "emptyDir"}, r'store\.slab\.volume = "emptyDir"'),
    ({"store.slab.volume": "hostPath"}, r"store\.slab\.hostPaths is empty"),
    ({**HOST, "store.slab.hostPaths": ["nvme0"]}, r'store\.slab\.hostPaths holds "nvme0"'),
    ({**HOST, "store.slab.hostPaths": ["/"]}, r'store\.slab\.hostPaths holds "/"'),
    ({**HOST, "store.slab.hostPaths": ["/a/../b"]}, r"store\.slab\.hostPaths holds"),
    ({**HOST, "store.slab.hostPaths": ["/a", "/a"]}, r"store\.slab\.hostPaths names .* twice"),
    ({"store.slab.hostPaths": ["/nvme0"]}, r"store\.slab\.hostPaths is given and"),
    ({"store.slab.volume": "existingClaim"}, r"store\.slab\.existingClaim is empty"),
    ({"store.slab.existingClaim": "mine"}, r"store\.slab\.existingClaim is given and"),
    (
        {
            "store.slab.volume": "existingClaim",
            "store.slab.existingClaim": "mine",
            "server.replicas": 2,
        },
        r"store\.slab\.volume = existingClaim is for server\.replicas = 1",
    ),
    ({"store.slab.volume": "claimTemplate"}, r"store\.slab\.volume = claimTemplate needs"),
    ({"store.kind": "files"}, r"store\.files\.existingClaim is empty"),
    (
        {"store.kind": "files", "store.files.existingClaim": "a", "store.files.hostPath": "/b"},
        r"store\.files\.existingClaim and store\.files\.hostPath",
    ),
    ({"store.kind": "files", "store.files.hostPath": "mnt"}, r'store\.files\.hostPath = "mnt"'),
    ({"store.kind": "tape"}, r"/store/kind"),
    # tensor parallelism
    (
        {"server.gpus": 8, "server.tensorParallelSize": 3},
        r"server\.tensorParallelSize = 3 does not",
    ),
    (
        {"server.gpus": 2, "server.tensorParallelSize": 4},
        r"server\.tensorParallelSize = 4 does not",
    ),
    ({"server.gpus": -1}, r"/server/gpus"),
    # sizes
    ({"connector.settings.capacity": "-64GiB"}, r"connector\.settings\.capacity = -64GiB is not"),
    ({"connector.settings.capacity": -1}, r"connector\.settings\.capacity = -1 is not"),
    ({"connector.settings.capacity": "0"}, r"connector\.settings\.capacity = 0 is not more"),
    ({"connector.settings.capacity": "64G"}, r"connector\.settings\.capacity = 64G is not"),
    ({"connector.settings.capacity": "1KiB"}, r"connector\.settings\.capacity = 1KiB is less"),
    ({"connector.settings.capacity": "71GiB"}, r"connector\.settings\.capacity = 71GiB is more"),
    ({"connector.settings.staging": "much"}, r"connector\.settings\.staging = much is not"),
    ({"connector.settings.segment": 1048577}, r"connector\.settings\.segment = 1048577 is not a m"),
    ({"connector.settings.segment": "65GiB"}, r"connector\.settings\.segment = 65GiB is larger"),
    ({"connector.settings.deadline": "soon"}, r"connector\.settings\.deadline = soon is not"),
    ({"connector.settings.requests": 0}, r"/connector/settings/requests"),
    ({"store.slab.size": "-70Gi"}, r"store\.slab\.size = -70Gi is not"),
    ({"store.slab.size": "70GiB"}, r"store\.slab\.size = 70GiB is not"),
    ({"store.slab.volumes": 0}, r"/store/slab/volumes"),
    ({"server.shm": "big"}, r"server\.shm = big is not"),
    ({"model.cache.size": -1}, r"model\.cache\.size = -1 is not"),
    ({"hicache.size": -1}, r"/hicache/size"),
    # hugepages
    ({**PAGES, "hugepages.pageSize": "3Mi"}, r"hugepages\.pageSize = 3Mi is not a size"),
    ({**PAGES, "hugepages.pageSize": 2}, r"hugepages\.pageSize = 2 is not a size"),
    ({**PAGES, "hugepages.memory": "-1Gi"}, r"hugepages\.memory = -1Gi is not"),
    ({**PAGES, "hugepages.memory": "3Mi"}, r"hugepages\.memory = 3Mi is not a multiple"),
    ({**PAGES, "hugepages.perNode": "1Gi"}, r"hugepages\.perNode = 1Gi is not"),
    ({**PAGES, "server.resources": {"requests": None}}, r"server\.resources\.requests has neither"),
    ({**PAGES, "hicache.size": 20}, r"hugepages\.memory = 16Gi is less than what 1 ranks need"),
    (
        {**PAGES, "connector.settings.staging": "17GiB"},
        r"hugepages\.memory = 16Gi is less than what",
    ),
    ({"hugepages.mode": "on"}, r"/hugepages/mode"),
    ({"hugepages.node.restartKubelet": True}, r"hugepages\.node\.restartKubelet is set"),
    (
        {"server.resources.limits": {"hugepages-2Mi": "1Gi"}},
        r"server\.resources\.limits has hugepages-2Mi; set hugepages\.memory",
    ),
    (
        {"server.resources.limits": {"nvidia.com/gpu": 1}},
        r"server\.resources\.limits has nvidia\.com/gpu; set server\.gpus",
    ),
    # secrets where they are readable
    ({"server.extraArgs": ["--api-key", "abc"]}, r"server\.extraArgs has a secret in --api-key"),
    ({"server.extraArgs": ["--admin-api-key=abc"]}, r"server\.extraArgs has a secret in --admin"),
    ({"server.extraEnv": [{"name": "MY_TOKEN", "value": "abc"}]}, r"server\.extraEnv has MY_TOKEN"),
    # what the chart owns
    (
        {"server.extraEnv": [{"name": "SGLANG_HUGEPAGE_SIZE", "value": "2MB"}]},
        r"server\.extraEnv has SGLANG_HUGEPAGE_SIZE",
    ),
    ({"server.extraArgs": ["--tp-size", "2"]}, r"server\.extraArgs has --tp-size"),
    ({"server.extraArgs": ["--port=1"]}, r"server\.extraArgs has --port"),
    # images
    ({"image.tag": "latest"}, r"image\.tag = latest"),
    ({"toolsImage.tag": "latest"}, r"toolsImage\.tag = latest"),
    ({"image.digest": "sha256:1"}, r"image\.digest = sha256:1 is not"),
    ({"connector.install": "wheel"}, r"connector\.wheel\.volume is empty"),
    # the rest
    ({"hicache.layout": "page_first"}, r"hicache\.ioBackend = direct does not go"),
    ({"seccomp.type": "Localhost"}, r"seccomp\.type = Localhost"),
    ({"seccomp.localhostProfile": "a.json"}, r"seccomp\.type = RuntimeDefault"),
    ({"model.cache.type": "claim"}, r"model\.cache\.existingClaim is empty"),
    ({"model.cache.type": "hostPath"}, r'model\.cache\.hostPath = "" is not'),
    ({"server.writableHome": False}, r"server\.writableHome = false needs"),
    ({"server.preStopSleep": 200}, r"server\.preStopSleep = 200 leaves nothing"),
    ({"autoscaling.enabled": True}, r"autoscaling\.metrics is empty"),
    (
        {"autoscaling": {"enabled": True, "minReplicas": 5, "metrics": [{"type": "Pods"}]}},
        r"autoscaling\.minReplicas = 5 is more",
    ),
    ({"httpRoute.enabled": True}, r"httpRoute\.parentRefs is empty"),
    (
        {"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True},
        r"metrics\.serviceMonitor\.enabled and metrics\.podMonitor\.enabled",
    ),
    (
        {"metrics.enabled": False, "metrics.alerts.enabled": True},
        r"metrics\.alerts\.enabled is set and metrics\.enabled is not",
    ),
    ({**S3, "connector.settings.plugin": "posix"}, r"connector\.settings\.plugin = posix does not"),
    # keys that nobody knows
    ({"replicas": 2}, r"additional properties 'replicas' not allowed"),
    ({"server.replica": 2}, r"'/server': additional properties 'replica' not allowed"),
    ({"store.slab.path": "/a"}, r"'/store/slab': additional properties 'path' not allowed"),
    ({"connector.settings.capcity": "1GiB"}, r"additional properties 'capcity' not allowed"),
    ({"hicache.extraConfig.prefetch": 1}, r"additional properties 'prefetch' not allowed"),
]


@pytest.mark.parametrize(("values", "line"), CASES, ids=[line for _, line in CASES])
def test_one_line_names_the_value(values: dict[str, Any], line: str) -> None:
    """The error has one line that is about the value, and shows no credential."""
    ran = template(None, values)
    assert ran.status != 0
    about = [found for found in ran.errors.splitlines() if re.search(line, found)]
    assert len(about) == 1, ran.errors
    for secret in ("a-secret-key", "pass@", "abc"):
        assert secret not in ran.errors


def test_helm_says_little_else() -> None:
    """Beside the line about a wrong combination helm gives no more than its own hint."""
    ran = template(None, {"server.gpus": 8, "server.tensorParallelSize": 3})
    lines = [line for line in ran.errors.splitlines() if line.strip()]
    assert len(lines) == 2
    assert lines[0].startswith("Error: ")
    assert lines[1].startswith("Use --debug")
