#!/bin/bash
# Healthy: the buckets are there and S3 answers.
set -euo pipefail
[ -e /tmp/objectstore/ready ]
exec 3<>/dev/tcp/127.0.0.1/9000
printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3
read -r _ status _ <&3
[ "$status" = 200 ]
