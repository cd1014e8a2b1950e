"""How a bucket is reached: parameters of obstore's client and of NIXL's plug-ins.

The only module that knows their names. Secrets go in and are not shown.
"""

import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import Credentials, missing_extra
from hicache_nixl.errors import StoreError

PLUGINS = {"s3": "OBJ", "azure": "AZURE_BLOB"}

_CONNECT_S = 3.0
_RETRIES = 1
_RETRY_AFTER = datetime.timedelta(milliseconds=50)


def engine_parameters(bucket: Bucket, credentials: Credentials, threads: int) -> dict[str, str]:
    """What NIXL's plug-in is created with; what the user gave for it wins. Holds secrets."""
    found: dict[str, str | None]
    if bucket.kind == "azure":
        found = {
            "account_url": bucket.endpoint,
            "connection_string": _shown(credentials.connection_string),
            "container_name": bucket.name,
        }
    else:
        found = {
            "access_key": _shown(credentials.access_key),
            "secret_key": _shown(credentials.secret_key),
            "session_token": _shown(credentials.session_token),
            "bucket": bucket.name,
            "endpoint_override": bucket.endpoint,
            "scheme": urlsplit(bucket.endpoint or "https://").scheme,
            "region": bucket.region,
            "use_virtual_addressing": str(bucket.virtual_addressing).lower(),
            # Records carry a checksum of their own.
            "req_checksum": "required",
            "resp_checksum": "required",
        }
    found |= {"ca_bundle": bucket.ca_bundle, "num_threads": str(threads), **dict(bucket.nixl)}
    return {name: value for name, value in found.items() if value is not None}


def make_store(bucket: Bucket, credentials: Credentials, *, timeout_s: float) -> Any:
    """obstore's client of a bucket; one request takes `timeout_s` seconds at most. StoreError."""
    try:
        from obstore.store import AzureStore, S3Store
    except ImportError as error:
        raise missing_extra("obstore") from error
    given = _azure(bucket, credentials) if bucket.kind == "azure" else _s3(bucket)
    options: Any = {
        "allow_http": given.get("endpoint", "").startswith("http://"),
        "timeout": datetime.timedelta(seconds=timeout_s),
        "connect_timeout": datetime.timedelta(seconds=min(_CONNECT_S, timeout_s)),
        "http1_only": True,
    }
    if bucket.ca_bundle is not None:
        try:
            options["root_certificate"] = Path(bucket.ca_bundle).read_bytes()
        except OSError as error:
            raise StoreError(
                f"ca_bundle {bucket.ca_bundle} cannot be read: {error.strerror}"
            ) from error
    retries: Any = {
        "max_retries": _RETRIES,
        "backoff": {"init_backoff": _RETRY_AFTER, "max_backoff": _RETRY_AFTER, "base": 2},
        "retry_timeout": datetime.timedelta(seconds=timeout_s),
    }
    if bucket.kind == "azure":
        return AzureStore(bucket.name, client_options=options, retry_config=retries, config=given)

    def provide() -> Any:
        return {
            "access_key_id": _shown(credentials.access_key),
            "secret_access_key": _shown(credentials.secret_key),
            "token": _shown(credentials.session_token),
            "expires_at": None,
        }

    return S3Store(
        bucket.name,
        config=given,
        client_options=options,
        retry_config=retries,
        # Not as parameters: those would be mixed with AWS_SESSION_TOKEN of the environment.
        credential_provider=provide,
    )


def obstore_error() -> type[Exception]:
    """What obstore's errors have in common, but for those that are Python's own."""
    from obstore.exceptions import BaseError

    return BaseError


def _s3(bucket: Bucket) -> Any:
    found: dict[str, object] = {
        "region": bucket.region,
        "virtual_hosted_style_request": bucket.virtual_addressing,
    }
    # Always named: obstore would take another one from the environment.
    parts = urlsplit(bucket.endpoint or _aws_endpoint(bucket.region))
    host = f"{bucket.name}.{parts.netloc}" if bucket.virtual_addressing else parts.netloc
    found["endpoint"] = f"{parts.scheme}://{host}"
    return found


def _aws_endpoint(region: str) -> str:
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"https://s3.{region}.{domain}"


def _azure(bucket: Bucket, credentials: Credentials) -> Any:
    """obstore knows no connection strings: their parts, by its names."""
    parts: dict[str, str] = {}
    if credentials.connection_string is not None:
        pairs = credentials.connection_string.get_secret_value().split(";")
        parts = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    account = parts.get("AccountName")
    endpoint = parts.get("BlobEndpoint") or bucket.endpoint
    if account is None and endpoint is not None:
        account = (urlsplit(endpoint).hostname or "").partition(".")[0]
    if account is None:
        raise StoreError(
            f"{bucket}: no account; give the account's URL as endpoint, or a connection string"
        )
    if endpoint is None and (suffix := parts.get("EndpointSuffix")) is not None:
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    found = {
        "account_name": account,
        "account_key": parts.get("AccountKey"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint": endpoint,
    }
    return {name: value for name, value in found.items() if value}


def _shown(secret: Any) -> Any:
    return None if secret is None else secret.get_secret_value()
