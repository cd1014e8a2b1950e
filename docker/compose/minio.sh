#!/bin/sh
# Start MinIO with the credentials of a file as the AWS tools write it; MinIO itself takes them from
# the environment or from a file for each only.
set -eu
while IFS=' =' read -r name value; do
    case $name in
        aws_access_key_id) export MINIO_ROOT_USER="$value" ;;
        aws_secret_access_key) export MINIO_ROOT_PASSWORD="$value" ;;
    esac
done </run/secrets/s3
exec minio server /data
