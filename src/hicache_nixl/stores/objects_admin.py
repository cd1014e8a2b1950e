"""What people set up once for a bucket of S3: that it exists, and when its objects expire.

By boto3, because obstore does neither. Azure keeps such rules in the account, out of reach here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from hicache_nixl.bucket import Bucket
from hicache_nixl.credentials import CredentialResolver, missing_extra, quiet_botocore
from hicache_nixl.errors import StoreError

_CONNECT_S = 3.0
_ANSWER_S = 10.0

Result = TypeVar("Result")


def create_bucket(bucket: Bucket, resolver: CredentialResolver) -> bool:
    """Make the bucket; False if it is there. Raises StoreError."""

    def create(client: Any) -> bool:
        # In us-east-1 making one's own bucket again succeeds, so it is looked for first.
        if _is_there(client, bucket.name):
            return False
        where = (
            {}
            if bucket.endpoint is not None or bucket.region == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": bucket.region}}
        )
        client.create_bucket(Bucket=bucket.name, **where)
        return True

    return _ask(bucket, resolver, "create the bucket", create)


def show_lifecycle(bucket: Bucket, resolver: CredentialResolver) -> int | None:
    """Days after which the bucket removes objects of the store; None if it does not. StoreError."""

    def show(client: Any) -> int | None:
        ours = [rule for rule in _rules(client, bucket) if rule.get("ID") == _rule_id(bucket)]
        days = [rule["Expiration"]["Days"] for rule in ours if rule.get("Status") == "Enabled"]
        return int(days[0]) if days else None

    return _ask(bucket, resolver, "show the expiry rule", show)


def set_lifecycle(bucket: Bucket, resolver: CredentialResolver, *, days: int) -> None:
    """Let objects of the store expire `days` days after they were written, used or not. Other
    rules of the bucket stay as they are. Raises StoreError."""
    if days < 1:
        raise StoreError(f"{bucket}: objects cannot expire after {days} days; give 1 or more")

    def put(client: Any) -> None:
        _put_rules(client, bucket, [*_others(client, bucket), _rule(bucket, days)])

    _ask(bucket, resolver, "set the expiry rule", put)


def remove_lifecycle(bucket: Bucket, resolver: CredentialResolver) -> bool:
    """Let objects of the store live for ever; False if they did. Raises StoreError."""

    def remove(client: Any) -> bool:
        others = _others(client, bucket)
        if len(others) == len(_rules(client, bucket)):
            return False
        _put_rules(client, bucket, others)
        return True

    return _ask(bucket, resolver, "remove the expiry rule", remove)


# -- rules ---------------------------------------------------------------------------------------


def _rule_id(bucket: Bucket) -> str:
    return f"hicache-nixl {bucket.root}pages/"[:255]


def _rule(bucket: Bucket, days: int) -> dict[str, Any]:
    return {
        "ID": _rule_id(bucket),
        "Status": "Enabled",
        "Filter": {"Prefix": f"{bucket.root}pages/"},
        "Expiration": {"Days": days},
    }


def _rules(client: Any, bucket: Bucket) -> list[dict[str, Any]]:
    from botocore.exceptions import ClientError

    try:
        found: list[dict[str, Any]] = client.get_bucket_lifecycle_configuration(Bucket=bucket.name)[
            "Rules"
        ]
    except ClientError as error:
        if _code(error) == "NoSuchLifecycleConfiguration":
            return []
        raise
    return found


def _others(client: Any, bucket: Bucket) -> list[dict[str, Any]]:
    return [rule for rule in _rules(client, bucket) if rule.get("ID") != _rule_id(bucket)]


def _put_rules(client: Any, bucket: Bucket, rules: list[dict[str, Any]]) -> None:
    if rules:
        client.put_bucket_lifecycle_configuration(
            Bucket=bucket.name, LifecycleConfiguration={"Rules": rules}
        )
    else:
        client.delete_bucket_lifecycle(Bucket=bucket.name)


# -- asking --------------------------------------------------------------------------------------


def _is_there(client: Any, name: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(Bucket=name)
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
            return False
        raise
    return True


def _ask(
    bucket: Bucket, resolver: CredentialResolver, what: str, request: Callable[[Any], Result]
) -> Result:
    """Run a request with a client of its own; StoreError in one line."""
    if bucket.kind != "s3":
        raise StoreError(f"{bucket} cannot {what}: do it in the account, by Azure's own tools")
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise missing_extra("boto3") from error
    quiet_botocore()
    keys = resolver.current()
    values = [
        None if key is None else key.get_secret_value()
        for key in (keys.access_key, keys.secret_key, keys.session_token)
    ]
    try:
        client = Session(*values).client(
            "s3",
            endpoint_url=bucket.endpoint,
            region_name=bucket.region,
            verify=bucket.ca_bundle,
            config=Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_ANSWER_S,
                retries={"total_max_attempts": 2, "mode": "standard"},
                s3={"addressing_style": "virtual" if bucket.virtual_addressing else "path"},
            ),
        )
        try:
            return request(client)
        finally:
            client.close()
    except ClientError as error:
        raise StoreError(
            f"{bucket} refuses to {what} ({_code(error)}) with {bucket.credentials}; correct the "
            "bucket's name, the credentials or what they may do"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise StoreError(
            f"{bucket} cannot {what}: {type(error).__name__}; correct the endpoint or see whether "
            "the server runs"
        ) from None


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "error"))
