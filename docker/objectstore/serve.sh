#!/bin/bash
# Serve S3 on port 9000 from /data.
#
#   S3_CREDENTIALS_FILE   who may do everything: a file as the AWS tools write it, its section
#                         [default]; /run/secrets/s3 unless given
#   S3_READER_FILE        the same of somebody who may only read; optional
#   S3_BUCKETS            buckets to make, separated by spaces; none unless given
#
# A bucket that nobody made is an error to whoever uses it, as with AWS.
set -euo pipefail
shopt -s inherit_errexit
credentials=${S3_CREDENTIALS_FILE:-/run/secrets/s3}
state=/tmp/objectstore
mkdir -p "$state"
rm -f "$state/ready"

value() { # FILE NAME, from the section [default]
    if [ ! -r "$1" ]; then
        echo "objectstore: cannot read the credentials in $1 — mount them, readable by user 10001" >&2
        exit 1
    fi
    sed -n '/^\[default\]/,/^\[/ s/^'"$2"' *= *\([^ ]*\) *$/\1/p' "$1"
}

identity() { # NAME FILE ACTIONS
    local access secret
    access=$(value "$2" aws_access_key_id)
    secret=$(value "$2" aws_secret_access_key)
    if [ -z "$access" ] || [ -z "$secret" ]; then
        echo "objectstore: $2 has no aws_access_key_id or aws_secret_access_key in [default]" >&2
        exit 1
    fi
    printf '{"name":"%s","credentials":[{"accessKey":"%s","secretKey":"%s"}],"actions":[%s]}' \
        "$1" "$access" "$secret" "$3"
}

everything='"Admin","Read","Write","List","Tagging"'
identities=$(identity owner "$credentials" "$everything")
if [ -n "${S3_READER_FILE:-}" ]; then
    reader=$(identity reader "$S3_READER_FILE" '"Read","List"')
    identities+=,$reader
fi
(umask 077 && printf '{"identities":[%s]}' "$identities" >"$state/s3.json")

shell() { weed shell -master=127.0.0.1:9333 <<<"$1" 2>/dev/null; }

make_buckets() {
    local there bucket
    until there=$(shell s3.bucket.list | awk '{ print $1 }'); do
        sleep 0.5
    done
    for bucket in ${S3_BUCKETS:-}; do
        if ! grep -qxF -- "$bucket" <<<"$there" &&
            ! shell "s3.bucket.create -name $bucket" >/dev/null; then
            echo "objectstore: cannot make the bucket $bucket — 3 to 63 of a-z, 0-9, . and -" >&2
            kill $$
            exit 1
        fi
        echo "objectstore: bucket $bucket is there"
    done
    touch "$state/ready"
}
make_buckets &

# Only S3 is reachable from outside. A small volume size, or the first bucket reserves gigabytes.
# When told to end, it closes its volumes at once and then waits for connections of its own, which
# nobody closes: timeout, which forwards signals, ends that.
exec timeout --kill-after=2 0 \
    weed server -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 -master.telemetry=false \
    -master.peers=none -master.volumeSizeLimitMB=256 -volume.max=0 -volume.preStopSeconds=0 -filer \
    -s3 -s3.port=9000 -s3.ip.bind=0.0.0.0 -s3.config="$state/s3.json" -s3.autoCreateBucket=false \
    -s3.port.iceberg=0 -s3.port.lance=0 -s3.iam=false
