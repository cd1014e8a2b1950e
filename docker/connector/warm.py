"""Load what the commands load, so that its bytecode is written: `python warm.py`, as who may."""

import importlib
import pkgutil

import boto3
import rich.console

import hicache_nixl

NEEDS_SGLANG = "hicache_nixl.connector"

for module in pkgutil.walk_packages(hicache_nixl.__path__, "hicache_nixl."):
    if not module.name.startswith(NEEDS_SGLANG):
        importlib.import_module(module.name)
boto3.client("s3", region_name="us-east-1")
rich.console.Console(quiet=True).print("[bold]text[/]")
