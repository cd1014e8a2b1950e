{{/* What a store of each kind needs, and what belongs to another kind. */}}

{{- define "hicache-nixl.validateSlab" -}}
{{- $slab := .Values.store.slab -}}
{{- $several := or (gt (int .Values.server.replicas) 1) .Values.autoscaling.enabled -}}
{{- if not (has $slab.volume (list "ephemeral" "claimTemplate" "existingClaim" "hostPath")) -}}
{{- fail (printf "store.slab.volume = %q: a slab store needs a volume; choose ephemeral, claimTemplate, existingClaim or hostPath" $slab.volume) -}}
{{- end -}}
{{- if eq $slab.volume "hostPath" -}}
{{- if not $slab.hostPaths -}}
{{- fail "store.slab.hostPaths is empty; name a directory on each disk, for example [/nvme0/hicache]" -}}
{{- end -}}
{{- range $slab.hostPaths -}}
{{- if or (not (hasPrefix "/" .)) (has ".." (splitList "/" .)) (eq "" (trimAll "/" .)) -}}
{{- fail (printf "store.slab.hostPaths holds %q, which is not an absolute directory of its own; write for example /nvme0/hicache" .) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $slab.hostPaths) (len (uniq $slab.hostPaths)) -}}
{{- fail "store.slab.hostPaths names a directory twice; name each disk once" -}}
{{- end -}}
{{- else if $slab.hostPaths -}}
{{- fail (printf "store.slab.hostPaths is given and store.slab.volume = %s; set the latter to hostPath, or leave the former out" $slab.volume) -}}
{{- end -}}
{{- if eq $slab.volume "existingClaim" -}}
{{- if not $slab.existingClaim -}}
{{- fail "store.slab.existingClaim is empty; name a PersistentVolumeClaim" -}}
{{- end -}}
{{- if $several -}}
{{- fail "store.slab.volume = existingClaim is for server.replicas = 1 without autoscaling; use claimTemplate for several" -}}
{{- end -}}
{{- else if $slab.existingClaim -}}
{{- fail (printf "store.slab.existingClaim is given and store.slab.volume = %s; set the latter to existingClaim, or leave the former out" $slab.volume) -}}
{{- end -}}
{{- if and (eq $slab.volume "claimTemplate") (ne .Values.server.kind "StatefulSet") -}}
{{- fail (printf "store.slab.volume = claimTemplate needs server.kind = StatefulSet, it is %s" .Values.server.kind) -}}
{{- end -}}
{{- if has $slab.volume (list "ephemeral" "claimTemplate") -}}
{{- $capacity := include "hicache-nixl.bytes" (list "connector.settings.capacity" .Values.connector.settings.capacity) | int64 -}}
{{- $size := include "hicache-nixl.bytes" (list "store.slab.size" $slab.size "quantity") | int64 -}}
{{- if gt $capacity (mul $size (int $slab.volumes)) -}}
{{- fail (printf "connector.settings.capacity = %s is more than store.slab.volumes = %d of store.slab.size = %s hold; lower the one or raise the others" (include "hicache-nixl.text" .Values.connector.settings.capacity) (int $slab.volumes) $slab.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateFiles" -}}
{{- $files := .Values.store.files -}}
{{- if and $files.existingClaim $files.hostPath -}}
{{- fail "store.files.existingClaim and store.files.hostPath are both given; keep one" -}}
{{- end -}}
{{- if not (or $files.existingClaim $files.hostPath) -}}
{{- fail "store.files.existingClaim is empty; name an RWX PersistentVolumeClaim, or set store.files.hostPath" -}}
{{- end -}}
{{- if and $files.hostPath (not (regexMatch "^/[^/]" $files.hostPath)) -}}
{{- fail (printf "store.files.hostPath = %q is not an absolute directory; write for example /mnt/shared" $files.hostPath) -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateS3" -}}
{{- $s3 := .Values.store.s3 -}}
{{- $example := "write for example s3://bucket/prefix?endpoint=http://minio:9000" -}}
{{- if not $s3.url -}}
{{- fail (printf "store.s3.url is empty; %s" $example) -}}
{{- end -}}
{{- if or (contains "@" $s3.url) (regexMatch "(?i)[?&;][^=]*(secret|token|key|passw|credential)[^=]*=" $s3.url) -}}
{{- fail "store.s3.url carries a user name or a credential; use store.s3.existingSecret" -}}
{{- end -}}
{{- if not (regexMatch "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?([?][a-z_]+=[^?&#\\s,]+(&[a-z_]+=[^?&#\\s,]+)*)?$" $s3.url) -}}
{{- fail (printf "store.s3.url = %s is not the URL of a bucket; %s" $s3.url $example) -}}
{{- end -}}
{{- $known := list "endpoint" "region" "addressing" "ca_bundle" "requests" -}}
{{- range $pair := regexFindAll "[?&][a-z_]+=" $s3.url -1 -}}
{{- if not (has (trimAll "?&=" $pair) $known) -}}
{{- fail (printf "store.s3.url has the parameter %s; known are %s" (trimAll "?&=" $pair) (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- $endpoint := regexFind "endpoint=[^&]*" $s3.url | trimPrefix "endpoint=" -}}
{{- if and $endpoint (not (regexMatch "^https?://[A-Za-z0-9._:\\[\\]-]+/?$" $endpoint)) -}}
{{- fail (printf "store.s3.url has the endpoint %s, which is not http:// or https:// with a host alone; %s" $endpoint $example) -}}
{{- end -}}
{{- if and $s3.ca.existingConfigMap (contains "ca_bundle=" $s3.url) -}}
{{- fail "store.s3.url has the parameter ca_bundle and store.s3.ca.existingConfigMap is given; keep one" -}}
{{- end -}}
{{- if and $s3.existingSecret (or $s3.accessKey $s3.secretKey) -}}
{{- fail "store.s3.existingSecret is given, and so are store.s3.accessKey or secretKey; keep the Secret" -}}
{{- end -}}
{{- if ne (empty $s3.accessKey) (empty $s3.secretKey) -}}
{{- fail (printf "store.s3.%s is empty; give both keys, or better store.s3.existingSecret" (empty $s3.accessKey | ternary "accessKey" "secretKey")) -}}
{{- end -}}
{{- if .Values.minio.enabled -}}
{{- if not $s3.accessKey -}}
{{- fail "minio.enabled needs store.s3.accessKey and secretKey, which MinIO makes its owner" -}}
{{- end -}}
{{- if lt (len $s3.secretKey) 8 -}}
{{- fail "store.s3.secretKey has fewer than 8 characters, which MinIO refuses" -}}
{{- end -}}
{{- if $endpoint -}}
{{- fail "store.s3.url has an endpoint and minio.enabled is set; leave the one or the other out" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateOtherStores" -}}
{{- $kind := .Values.store.kind -}}
{{- $given := dict "slab" .Values.store.slab.hostPaths "files" .Values.store.files.existingClaim "s3" .Values.store.s3.url -}}
{{- $names := dict "slab" "store.slab.hostPaths" "files" "store.files.existingClaim" "s3" "store.s3.url" -}}
{{- range $other, $value := $given -}}
{{- if and (ne $other $kind) $value -}}
{{- fail (printf "%s is given and store.kind = %s; set store.kind to %s, or leave the value out" (get $names $other) $kind $other) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.minio.enabled (ne $kind "s3") -}}
{{- fail (printf "minio.enabled is set and store.kind = %s; set store.kind to s3" $kind) -}}
{{- end -}}
{{- $plugin := toString .Values.connector.settings.plugin -}}
{{- $fits := eq $kind "s3" | ternary (list "auto" "obj") (list "auto" "posix" "gds" "gds_mt" "3fs") -}}
{{- if and (not (has $plugin $fits)) (ne $plugin "<nil>") -}}
{{- fail (printf "connector.settings.plugin = %s does not serve store.kind = %s; choose one of %s" $plugin $kind (join ", " $fits)) -}}
{{- end -}}
{{- end -}}
