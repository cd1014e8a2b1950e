"""A process that does everything there is to do with a bucket, and prints and logs all it can.

    secrets_child.py JSON     keys: `Plan`

Its caller scans what comes out. Every logger is at DEBUG; NIXL and Rust are told to trace by the
environment.
"""

import base64
import contextlib
import http.server
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pools  # noqa: F401 - before SGLang

# isort: split
from hicache_nixl import HiCacheNixlConnector
from hicache_nixl.cli.main import app
from hicache_nixl.probe import describe_tier
from hicache_nixl.settings import load_settings
from object_connectors import bucket_config, environment
from s3_access import store_url
from storage_load import Load, make_pool


@dataclass(frozen=True)
class Plan:
    """What the process is told."""

    endpoint: str
    bucket: str
    directory: str
    access_key: str
    secret_key: str
    session_token: str
    """Empty if there is none."""
    other_secret_key: str
    """What the credentials file is changed to while a connector runs."""


def show(*things: object) -> None:
    """Print a thing as logs and debuggers do."""
    for thing in things:
        sys.stdout.write(f"{thing!r}\n{thing}\n")


class Ways:
    """The ways in which secrets get into a process; each is a context that gives settings."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.url = store_url(plan.endpoint, plan.bucket, "secrets")
        self.keys = {"access_key": plan.access_key, "secret_key": plan.secret_key}
        if plan.session_token:
            self.keys["session_token"] = plan.session_token
        self.file = Path(plan.directory, "credentials")

    def write_file(self, secret: str) -> None:
        token = f"aws_session_token={self.plan.session_token}\n" if self.plan.session_token else ""
        self.file.write_text(
            f"[default]\naws_access_key_id={self.plan.access_key}\n"
            f"aws_secret_access_key={secret}\n{token}"
        )

    @contextlib.contextmanager
    def inline(self) -> Iterator[dict[str, Any]]:
        yield {"store": self.url, **self.keys}

    @contextlib.contextmanager
    def in_tree(self) -> Iterator[dict[str, Any]]:
        obj = {
            "active": True,
            "bucket": self.plan.bucket,
            "endpoint_override": self.plan.endpoint,
            "scheme": "http",
            **self.keys,
        }
        yield {"plugin": {"obj": obj}}

    @contextlib.contextmanager
    def own_variables(self) -> Iterator[dict[str, Any]]:
        with environment(**{f"HICACHE_NIXL_{k.upper()}": v for k, v in self.keys.items()}):
            yield {"store": self.url}

    @contextlib.contextmanager
    def settings_file(self) -> Iterator[dict[str, Any]]:
        path = Path(self.plan.directory, "settings.json")
        path.write_text(json.dumps({"store": self.url, **self.keys}))
        with environment(HICACHE_NIXL_CONFIG=str(path)):
            yield {}

    @contextlib.contextmanager
    def aws_variables(self) -> Iterator[dict[str, Any]]:
        with environment(**self._aws()):
            yield {"store": self.url}

    @contextlib.contextmanager
    def credentials_file(self) -> Iterator[dict[str, Any]]:
        self.write_file(self.plan.secret_key)
        yield {"store": self.url, "credentials_file": str(self.file)}

    @contextlib.contextmanager
    def web_identity(self) -> Iterator[dict[str, Any]]:
        """Keys that a token service gives for a token in a file."""
        token = Path(self.plan.directory, "token")
        token.write_text(self.plan.other_secret_key)
        with (
            _token_service(self.plan) as endpoint,
            environment(
                AWS_ROLE_ARN="arn:aws:iam::123456789012:role/hicache",
                AWS_WEB_IDENTITY_TOKEN_FILE=str(token),
                AWS_ENDPOINT_URL_STS=endpoint,
                AWS_REGION="us-east-1",
            ),
        ):
            yield {"store": self.url}

    def _aws(self) -> dict[str, str]:
        names = {"access_key": "ACCESS_KEY_ID", "secret_key": "SECRET_ACCESS_KEY"}
        return {f"AWS_{names.get(k, k.upper())}": v for k, v in self.keys.items()}


@contextlib.contextmanager
def _token_service(plan: Plan) -> Iterator[str]:
    body = (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        "<AssumeRoleWithWebIdentityResult><Credentials>"
        f"<AccessKeyId>{plan.access_key}</AccessKeyId>"
        f"<SecretAccessKey>{plan.secret_key}</SecretAccessKey>"
        f"<SessionToken>{plan.session_token}</SessionToken>"
        "<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    ).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def show_settings(given: dict[str, Any]) -> None:
    settings = load_settings(given)
    show(settings, settings.bucket, settings.notes, settings.model_dump())
    show(settings.model_dump_json(), vars(settings))


def run_connector(settings: dict[str, Any], change: Any = None) -> None:
    given = bucket_config("", None, deadline="3s")
    del given.extra_config["store"]
    given.extra_config |= settings
    connector = HiCacheNixlConnector(given, {})
    try:
        pool = make_pool()
        connector.register_mem_pool_host(pool)
        connector.on_host_pools_registered()
        load = Load(connector, pool, deadline_s=3.0)
        load.set(0)
        load.exists(0)
        load.get(0)
        tier = connector._tier
        show(connector, tier, tier.settings, tier.choice, tier.store, tier.guard, tier.mover)
        show(tier.reader, tier.writer, tier.bucket, tier.guard.state(), describe_tier(tier))
        show(connector.get_stats())
        if change is not None:
            change()
            for group in range(1, 6):
                load.set(group)
                load.get(group)
            show(tier.guard.state())
        connector.clear()
    finally:
        connector.close()


def run_commands(settings: dict[str, Any]) -> None:
    given = [f"--set={key}={value}" for key, value in settings.items() if key != "store"]
    store = ["--store", settings["store"]] if "store" in settings else []
    for command in (
        ["probe"],
        ["probe", "--json"],
        ["launch-args"],
        ["ls", "--json"],
        ["verify"],
        ["lifecycle"],
        ["clear", "--yes"],
    ):
        sys.stdout.write(f"$ {command}\n")
        attempt(lambda words: app([*words, *store, *given], standalone_mode=False), command)


def attempt(work: Any, *arguments: Any) -> bool:
    """Run it, and print what it raises with everything that led to it; whether it worked."""
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - all of them are printed
        traceback.print_exc()
        show(error, error.args, error.__cause__, error.__context__)
        return False
    return True


def main(plan: Plan) -> None:
    ways = Ways(plan)
    worked: dict[str, bool] = {}
    for way in (
        ways.inline,
        ways.in_tree,
        ways.own_variables,
        ways.settings_file,
        ways.aws_variables,
        ways.credentials_file,
        ways.web_identity,
    ):
        name = way.__name__
        sys.stdout.write(f"\n== {name}\n")
        with way() as settings:
            attempt(show_settings, settings)
            worked[name] = attempt(run_connector, settings)
            if name in ("inline", "aws_variables", "credentials_file"):
                run_commands(settings)
    with ways.credentials_file() as settings:
        worked["changed"] = attempt(
            run_connector, settings, lambda: ways.write_file(plan.other_secret_key)
        )
    # Values that are wrong where they stand, in ways that make somebody quote them.
    for wrong in (
        {"store": ways.url, "secret_key": plan.secret_key},
        {"store": ways.url, "access_key": plan.access_key, "secret_key": [plan.secret_key]},
        {"store": ways.url, "acess_key": plan.secret_key},
        {"store": ways.url, "connection_string": plan.secret_key},
        {"store": f"s3://{plan.access_key}:{plan.secret_key}@host/bucket"},
        {"store": f"{ways.url}&secret_key={plan.secret_key}"},
        {"store": f"s3://b0b/p?endpoint=http://{plan.access_key}:{plan.secret_key}@host"},
        {"store": "slab:///nowhere", "access_key": "a", "secret_key": plan.secret_key},
    ):
        assert not attempt(load_settings, wrong), sorted(wrong)
    ways.file.write_text(f"no INI file {plan.secret_key}")
    attempt(run_connector, {"store": ways.url, "credentials_file": str(ways.file)})
    sys.stdout.write(f"\nworked: {json.dumps(worked)}\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)
    given = json.loads(base64.b64decode(sys.argv[1]))
    main(Plan(**given))
    os._exit(0)
