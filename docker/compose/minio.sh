#!/bin/sh
# Serve S3 on port 9000 from /data with MinIO, whose owner is the section [default] of
# /run/secrets/s3, a file as the AWS tools write it. MinIO itself takes keys from the environment, or
# from a file for each.
set -eu
secret=/run/secrets/s3
[ -r "$secret" ] || {
    echo "minio: cannot read the credentials in $secret — set S3_CREDENTIALS to a readable file" >&2
    exit 1
}

# The image has a shell, but neither sed nor awk.
section=
while IFS= read -r line || [ -n "$line" ]; do
    value=${line#*=}
    value=${value#"${value%%[! ]*}"}
    value=${value%"${value##*[! ]}"}
    case $line in '['*) section=$line ;; esac
    case $section$line in
        '[default]aws_access_key_id'*=*) export MINIO_ROOT_USER="$value" ;;
        '[default]aws_secret_access_key'*=*) export MINIO_ROOT_PASSWORD="$value" ;;
    esac
done <"$secret"
[ -n "${MINIO_ROOT_USER:-}" ] && [ -n "${MINIO_ROOT_PASSWORD:-}" ] || {
    echo "minio: $secret has no aws_access_key_id or aws_secret_access_key in [default]" >&2
    exit 1
}
exec minio server /data
