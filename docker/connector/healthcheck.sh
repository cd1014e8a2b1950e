#!/bin/sh
# Healthy: the configured store can be listed; where none is configured, the program starts.
set -eu
if [ -n "${HICACHE_NIXL_STORE:-}${HICACHE_NIXL_CONFIG:-}" ]; then
    exec hicache-nixl ls --json >/dev/null
fi
exec hicache-nixl --version >/dev/null
