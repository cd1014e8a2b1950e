"""Values that cannot work fail before anything is installed, with one line that names them."""

import re
from typing import Any

import pytest

from .charts import CHART, helm, template

pytestmark = pytest.mark.helm

S3 = {"store.kind": "s3", "store.s3.url": "s3://kv-cache/team"}
KEYS = {"store.s3.accessKey": "an-access-key", "store.s3.secretKey": "a-secret-key"}
HOST = {"store.slab.volume": "hostPath", "store.slab.hostPaths": ["/nvme0/hicache"]}
FILES = {"store.kind": "files", "store.files.existingClaim": "shared"}
PAGES = {
    "hugepages.mode": "node",
    "hugepages.node.nodeSelector": {"pool": "gpu"},
    "hicache.size": 10,
}
BY_KEYS = {"store.s3.existingSecret": "bucket", "store.s3.secretFormat": "keys"}


def variable(name: str, value: str = "abc") -> dict[str, Any]:
    """A variable of the server with that value."""
    return {"server.extraEnv": [{"name": name, "value": value}]}


def volume(name: str) -> dict[str, Any]:
    """A volume of the user's, with that name."""
    return {"server.extraVolumes": [{"name": name, "emptyDir": {}}]}


def mount(name: str, path: str) -> dict[str, Any]:
    """A volume of the user's, named extra, and a mount of one."""
    return {**volume("extra"), "server.extraVolumeMounts": [{"name": name, "mountPath": path}]}


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
    (url("s3://KV"), r"store\.s3\.url = s3://KV names the bucket KV: a"),
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
    ({"store.kind": "files", "store.files.hostPath": "mnt"}, r'store\.files\.hostPath is "mnt"'),
    # tensor parallelism
    (
        {"server.gpus": 8, "server.tensorParallelSize": 3},
        r"server\.tensorParallelSize = 3 does not",
    ),
    (
        {"server.gpus": 2, "server.tensorParallelSize": 4},
        r"server\.tensorParallelSize = 4 does not",
    ),
    # sizes
    ({"connector.settings.capacity": "-64GiB"}, r"connector\.settings\.capacity = -64GiB is not"),
    ({"connector.settings.capacity": -1}, r"connector\.settings\.capacity = -1 is not"),
    ({"connector.settings.capacity": "0"}, r"connector\.settings\.capacity = 0 is not more"),
    ({"connector.settings.capacity": "64G"}, r"connector\.settings\.capacity = 64G is not"),
    ({"connector.settings.capacity": "1KiB"}, r"connector\.settings\.capacity = 1KiB is less"),
    ({"connector.settings.capacity": "71GiB"}, r"connector\.settings\.capacity = 71GiB and"),
    ({"connector.settings.staging": "much"}, r"connector\.settings\.staging = much is not"),
    ({"connector.settings.segment": 1048577}, r"connector\.settings\.segment = 1048577 is not a m"),
    ({"connector.settings.segment": "65GiB"}, r"connector\.settings\.segment = 65GiB is larger"),
    ({"connector.settings.deadline": "soon"}, r"connector\.settings\.deadline = soon is not"),
    ({"store.slab.size": "-70Gi"}, r"store\.slab\.size = -70Gi is not"),
    ({"store.slab.size": "70GiB"}, r"store\.slab\.size = 70GiB is not"),
    ({"server.shm": "big"}, r"server\.shm = big is not"),
    ({"model.cache.size": -1}, r"model\.cache\.size = -1 is not"),
    # hugepages
    ({**PAGES, "hugepages.pageSize": "3Mi"}, r"hugepages\.pageSize = 3Mi is not a size"),
    ({**PAGES, "hugepages.pageSize": 2}, r"hugepages\.pageSize = 2 is not a size"),
    ({**PAGES, "hugepages.memory": "-1Gi"}, r"hugepages\.memory = -1Gi is not"),
    ({**PAGES, "hugepages.memory": "3Mi"}, r"hugepages\.memory = 3Mi is not a multiple"),
    ({**PAGES, "hugepages.perNode": "1Gi"}, r"hugepages\.perNode = 1Gi is not"),
    ({**PAGES, "server.resources": {"requests": None}}, r"server\.resources\.requests has neither"),
    (
        {**PAGES, "hicache.size": 20},
        r"hugepages\.memory = 16Gi is less than 1 rank\(s\) need, .*write for example 19Gi",
    ),
    (
        {**PAGES, "connector.settings.staging": "17GiB"},
        r"hugepages\.memory = 16Gi is less than .*write for example 27Gi",
    ),
    (
        {**PAGES, "hugepages.pageSize": "1Gi", "hicache.size": 16, "hugepages.memory": "15Gi"},
        r"hugepages\.memory = 15Gi is less than .*write for example 17Gi",
    ),
    ({**PAGES, "hicache.size": 0}, r"hicache\.size = 0 leaves host KV to"),
    (
        {**PAGES, "hugepages.node.nodeSelector": {}},
        r"hugepages\.node\.nodeSelector is empty, and so is server\.nodeSelector",
    ),
    ({**PAGES, "hugepages.memory": 460}, r"hugepages\.memory = 460 is not .*write 460Gi"),
    ({**PAGES, "hugepages.memory": "460G"}, r"hugepages\.memory = 460G is not .*write 460Gi"),
    ({**PAGES, "hugepages.perNode": 1000}, r"hugepages\.perNode = 1000 is not"),
    (
        {"server.resources": {"requests": {"memory": "32Gi"}, "limits": {"memory": "1G"}}},
        r"server\.resources\.limits has memory = 1G, less than .* has, 32Gi",
    ),
    (
        {"server.resources": {"requests": {"cpu": 4}, "limits": {"cpu": "500m"}}},
        r"server\.resources\.limits has cpu = 500m, less than .* has, 4;",
    ),
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
    *(
        ({"ingress.className": name}, r"ingress\.className = .* is not a name in Kubernetes")
        for name in ("a..b", "a.-b", "-a", "a-", "A", "a b")
    ),
    *(
        ({"httpRoute.hostnames": [host]}, r".* in ingress\.host or httpRoute\.hostnames is not")
        for host in ("*.", "*.a..b", "a.*.b", "http://a")
    ),
    (
        {
            "store.kind": "s3",
            "store.s3.url": "s3://bucket",
            "server.kind": "StatefulSet",
            "store.slab.volume": "claimTemplate",
            **mount("disk-0", "/disk"),
        },
        r'server\.extraVolumeMounts names "disk-0", which is not a volume',
    ),
    ({"model.cache.type": "hostPath"}, r'model\.cache\.hostPath is ""'),
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
    # names, labels and paths
    ({"nameOverride": "foo_bar"}, r'nameOverride = "foo_bar" is not'),
    ({"nameOverride": "foo: bar"}, r'nameOverride = "foo: bar" is not'),
    ({"fullnameOverride": "MyApp"}, r'fullnameOverride = "MyApp" is not'),
    ({"fullnameOverride": "-"}, r'fullnameOverride = "-" is not'),
    ({"fullnameOverride": "1llm"}, r'fullnameOverride = "1llm" is not'),
    ({"fullnameOverride": "a" * 53}, r'fullnameOverride = "a+" is not'),
    (
        {"model.huggingFace.existingSecret": "x\n      optional: true"},
        r'model\.huggingFace\.existingSecret = "x\\n +optional: true" is not',
    ),
    ({"server.runtimeClassName": "N V"}, r'server\.runtimeClassName = "N V" is not'),
    ({"serviceAccount.name": "Me"}, r'serviceAccount\.name = "Me" is not'),
    ({"tests.keySecret.key": ""}, r'tests\.keySecret\.key = "" is not a key'),
    ({"hugepages.node.kubeletUnit": "a b"}, r'hugepages\.node\.kubeletUnit = "a b" is not'),
    ({"ingress.host": "http://x y"}, r'"http://x y" in ingress\.host'),
    ({"httpRoute.hostnames": ["a/b"]}, r'"a/b" in ingress\.host or httpRoute\.hostnames'),
    (
        {"commonLabels": {"app.kubernetes.io/component": "x"}},
        r"commonLabels has app\.kubernetes\.io/component, which the chart sets",
    ),
    (
        {"server.podLabels": {"app.kubernetes.io/name": "x"}},
        r"server\.podLabels has app\.kubernetes\.io/name, which the chart sets",
    ),
    ({"commonLabels": {"team": "a b"}}, r'commonLabels has team = "a b", which is not'),
    ({"commonLabels": {"a b": "team"}}, r'commonLabels has "a b", which is not'),
    ({"server.nodeSelector": {"pool": "a/b"}}, r'server\.nodeSelector has pool = "a/b"'),
    (
        {"server.podAnnotations": {"checksum/config": "x"}},
        r"server\.podAnnotations has checksum/config, which the chart sets",
    ),
    (
        {"model.cache": {"type": "hostPath", "hostPath": "/x/../y"}},
        r'model\.cache\.hostPath is "/x/\.\./y", which is not',
    ),
    ({"model.cache.hostPath": "/nvme0"}, r"model\.cache\.hostPath is given and"),
    ({"model.cache.existingClaim": "a"}, r"model\.cache\.existingClaim is given and"),
    ({**HOST, "store.slab.hostPaths": ["/a", "/a/"]}, r"store\.slab\.hostPaths names /a twice"),
    ({**HOST, "store.slab.hostPaths": ["/a\n  b: c"]}, r'store\.slab\.hostPaths holds "/a\\n'),
    *(
        ({**FILES, "store.files.directory": path}, r"store\.files\.directory = .* is not")
        for path in ("../../etc", "..", ".", "a/../b", "a//b", "/a", "")
    ),
    # what is of another store
    ({"store.files.hostPath": "/mnt"}, r"store\.files\.hostPath is given and store\.kind = slab"),
    ({"store.s3.existingSecret": "a"}, r"store\.s3\.existingSecret is given and store\.kind"),
    ({"store.s3.ca.existingConfigMap": "a"}, r"store\.s3\.ca\.existingConfigMap is given and"),
    (KEYS, r"store\.s3\.accessKey is given and store\.kind = slab"),
    ({**FILES, "store.slab.existingClaim": "a"}, r"store\.slab\.existingClaim is given and"),
    ({**HOST, "store.slab.storageClassName": "a"}, r"store\.slab\.storageClassName is given and"),
    # what the URL of a bucket may hold is in test_settings.py, too
    (
        url("https://b.example.com/x?X-Amz-Signature=abc"),
        r"store\.s3\.url carries a user name or a credential",
    ),
    (url("http://b.example.com/x?a=abc"), r"store\.s3\.url = http://b\.example\.com/x is not"),
    (url("s3://KV-Cache/team"), r"store\.s3\.url = .* names the bucket KV-Cache: .* 3 to 63 small"),
    (url("s3://kv/team"), r"store\.s3\.url = s3://kv/team names the bucket kv: .* 3 to 63 small"),
    (
        {**url("s3://kv-cache?endpoint=http://s3"), "store.s3.ca.existingConfigMap": "ca"},
        r"store\.s3\.ca\.existingConfigMap is given and the endpoint is http",
    ),
    (
        {**url("s3://kv-cache?requests=8"), "connector.settings.requests": 9},
        r"store\.s3\.url has the parameter requests and",
    ),
    *(
        (
            {**S3, **keys, "connector.settings.profile": "prod"},
            r"connector\.settings\.profile = prod",
        )
        for keys in (KEYS, BY_KEYS)
    ),
    ({**S3, **KEYS, "store.s3.accessKey": "a b"}, r"store\.s3\.accessKey holds a space"),
    ({**S3, **KEYS, "store.s3.secretKey": "abc\nd"}, r"store\.s3\.secretKey holds a space"),
    (
        {**S3, **KEYS, "store.s3.accessKey": "ab", "minio.enabled": True},
        r"store\.s3\.accessKey has fewer than 3",
    ),
    ({**S3, **KEYS, "minio.enabled": True, "minio.size": -3}, r"minio\.size = -3 is not"),
    # flags and variables
    *(
        ({"server.extraArgs": [flag]}, rf"server\.extraArgs has {re.escape(flag.split('=')[0])}")
        for flag in (
            *("--page-size", "--hicache-size=1", "--hicache-mem-l", "--model-path", "--por=1"),
            *("--pp-size", "--nnodes", "--ssl-certfile", "--config", "--disable-radix-cache"),
        )
    ),
    ({"server.extraArgs": ["--api-k=abc"]}, r"server\.extraArgs has a secret in --api-k;"),
    ({"server.command": ["serve", "--api-key", "abc"]}, r"server\.command has a secret in --api"),
    *(
        (variable(name), rf"server\.extraEnv has {name} in clear")
        for name in ("hf_token", "DB_PASS", "AWS_ACCESS_KEY_ID", "MyPassword", "x_apikey")
    ),
    (variable("USER"), r"server\.extraEnv has USER, which the chart sets"),
    (variable("HICACHE_NIXL_CAPACITY"), r"server\.extraEnv has HICACHE_NIXL_CAPACITY; set"),
    (
        {
            "connector.install": "wheel",
            "connector.wheel.volume": {"emptyDir": {}},
            **variable("PYTHONPATH"),
        },
        r"server\.extraEnv has PYTHONPATH, which",
    ),
    (
        {"server.extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        r"server\.extraEnv has A, which",
    ),
    (
        {**S3, **BY_KEYS, "server.extraEnv": [{"name": "AWS_ACCESS_KEY_ID", "valueFrom": {}}]},
        r"server\.extraEnv has AWS_ACCESS_KEY_ID, which",
    ),
    # volumes, mounts and containers
    (volume("tmp"), r"server\.extraVolumes has the name tmp, which"),
    (
        {"store.slab.volume": "claimTemplate", "server.kind": "StatefulSet", **volume("disk-0")},
        r"server\.extraVolumes has the name disk-0, which",
    ),
    (mount("extra", "/tmp/"), r"server\.extraVolumeMounts has the path /tmp/, where"),
    (mount("other", "/other"), r'server\.extraVolumeMounts names "other", which is not'),
    *(
        ({f"server.{kind}": [{"name": name, "image": "a:1"}]}, rf"has the name {name}, which")
        for kind, name in (("extraContainers", "server"), ("extraInitContainers", "hugepages"))
    ),
    # the rest of Kubernetes
    ({"server.gpuResource": ""}, r"server\.gpuResource is empty"),
    (
        {"server.kind": "StatefulSet", "server.updateStrategy": {"type": "Recreate"}},
        r"server\.updateStrategy has the type Recreate and server\.kind = StatefulSet",
    ),
    *(
        ({"podDisruptionBudget.maxUnavailable": number}, r"podDisruptionBudget\.maxUnavailable = ")
        for number in (-1, "abc", "150%")
    ),
    ({"image.repository": "nginx:latest"}, r'image\.repository = "nginx:latest" is not'),
    ({"toolsImage.repository": "r.example.com/x:1"}, r"toolsImage\.repository = .* is not"),
    ({"image.tag": "a b"}, r'image\.tag = "a b" is not'),
]

# What the schema refuses, and the line that says so; Helm puts two others above it.
BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"store.kind": "tape"}, r"/store/kind"),
    ({"server.gpus": -1}, r"/server/gpus"),
    ({"connector.settings.requests": 0}, r"/connector/settings/requests"),
    ({"store.slab.volumes": 0}, r"/store/slab/volumes"),
    ({"hicache.size": -1}, r"/hicache/size"),
    ({"hugepages.mode": "on"}, r"/hugepages/mode"),
    ({"replicas": 2}, r"additional properties 'replicas' not allowed"),
    ({"server.replica": 2}, r"'/server': additional properties 'replica' not allowed"),
    ({"store.slab.path": "/a"}, r"'/store/slab': additional properties 'path' not allowed"),
    ({"connector.settings.capcity": "1GiB"}, r"additional properties 'capcity' not allowed"),
    ({"hicache.extraConfig.prefetch": 1}, r"additional properties 'prefetch' not allowed"),
    ({"server.user": 3000000000}, r"/server/user"),
    ({"networkPolicy.from": [{"foo": 1}]}, r"/networkPolicy/from/0': additional properties 'foo'"),
    ({"networkPolicy.from": [{}]}, r"/networkPolicy/from/0': minProperties"),
    ({"server.extraVolumes": [{"emptyDir": {}}]}, r"/server/extraVolumes/0': missing property"),
    ({"connector.settings.profile": "a\nb"}, r"/connector/settings/profile"),
]


@pytest.mark.parametrize(("values", "line"), CASES)
def test_one_line_names_the_value(values: dict[str, Any], line: str) -> None:
    """The error is one line about the value, beside Helm's own hint, and shows no credential."""
    ran = template(None, values)
    assert ran.status != 0
    shown, *others = [found for found in ran.errors.splitlines() if found.strip()]
    assert re.fullmatch(
        rf"Error: execution error at \(hicache-nixl/templates/validate/.*\): .*{line}.*", shown
    )
    assert [other.partition(" ")[0] for other in others] == ["Use"]
    for secret in ("a-secret-key", "pass@", "abc"):
        assert secret not in ran.errors.replace("= abc is not a number", "")


@pytest.mark.parametrize(("values", "line"), BY_SCHEMA)
def test_the_schema_names_the_value(values: dict[str, Any], line: str) -> None:
    """One line of what Helm says of a value of the wrong form names it."""
    ran = template(None, values)
    assert ran.status != 0
    about = [found for found in ran.errors.splitlines() if re.search(line, found)]
    assert len(about) == 1, ran.errors


@pytest.mark.parametrize(
    "values",
    [
        variable("TOKENIZERS_PARALLELISM", "false"),
        variable("SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR", "1"),
        variable("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"),
        variable("DB_PASSWORD", "$(OTHER)"),
        {"server.extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {}}}]},
        {"server.extraArgs": ["--api-key", "$(API_KEY)", "--enable-cache-report"]},
        {"server.gpus": 8, "server.extraArgs": ["--enable-dp-attention", "--dp-size", "8"]},
        {**PAGES, "server.resources": {"requests": None, "limits": {"memory": "40Gi"}}},
        {**PAGES, "hicache.size": 0, "hugepages.onShortage": "fallback"},
        {**PAGES, "hicache.size": 0, "server.replicas": 0},
        {"commonLabels": {"app.kubernetes.io/part-of": "llm", "example.com/team": ""}},
        {"image.repository": "registry.example.com:5000/team/a__b-c"},
        {"podDisruptionBudget.maxUnavailable": "25%"},
        {"server.kind": "StatefulSet", "server.updateStrategy": {"type": "OnDelete"}},
        {"connector.settings.capacity": "200GiB", "store.slab.volumes": 3},
        mount("models", "/models"),
    ],
    ids=str,
)
def test_nothing_else_is_refused(values: dict[str, Any]) -> None:
    """Values that only look like wrong ones are taken."""
    ran = template(None, values)
    assert ran.status == 0, ran.errors


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("llm", "llm-hicache-nixl"),
        ("my.llm", "my-llm-hicache-nixl"),
        ("l" * 51 + ".l", "l" * 43 + "-[0-9a-f]{8}"),
        ("l" * 53, "l" * 43 + "-[0-9a-f]{8}"),
        ("1llm", ""),
    ],
)
def test_names_of_a_release(release: str, name: str) -> None:
    """Each release gets the name of a Service, or one line that says how."""
    ran = helm("template", release, str(CHART), "--show-only", "templates/service.yaml")
    assert (ran.status == 0) == bool(name)
    assert re.search(
        rf'\n  name: "?{name}"?\n' if name else "set fullnameOverride", ran.output + ran.errors
    )


def test_long_names_of_two_releases_differ() -> None:
    """Two releases whose names differ in the last character have no object's name in common."""
    names = []
    for end in "ab":
        ran = helm("template", "l" * 52 + end, str(CHART))
        names.append(set(re.findall(r"^  name: (.+)$", ran.output, re.MULTILINE)))
    assert names[0]
    assert names[0].isdisjoint(names[1])
