{{/* The library's settings, and the flags by which SGLang finds the library. */}}

{{- define "hicache-nixl.slabDisks" -}}
{{- if eq .Values.store.slab.volume "hostPath" -}}
{{- len .Values.store.slab.hostPaths -}}
{{- else -}}
{{- eq .Values.store.slab.volume "existingClaim" | ternary 1 (int .Values.store.slab.volumes) -}}
{{- end -}}
{{- end -}}

{{/* The URL of an s3 store, with the endpoint of the chart's own MinIO. */}}
{{- define "hicache-nixl.s3Url" -}}
{{- $url := .Values.store.s3.url -}}
{{- if .Values.minio.enabled -}}
{{- $url = printf "%s%sendpoint=http://%s-minio:9000" $url (contains "?" $url | ternary "&" "?") (include "hicache-nixl.fullname" .) -}}
{{- end -}}
{{- if .Values.store.s3.ca.existingConfigMap -}}
{{- $url = printf "%s%sca_bundle=/etc/hicache-nixl-ca/ca.crt" $url (contains "?" $url | ternary "&" "?") -}}
{{- end -}}
{{- $url -}}
{{- end -}}

{{/* Whether credentials come as a file. */}}
{{- define "hicache-nixl.credentialsFile" -}}
{{- if eq .Values.store.kind "s3" -}}
{{- $inline := and .Values.store.s3.accessKey .Values.store.s3.secretKey -}}
{{- if or $inline (and .Values.store.s3.existingSecret (eq .Values.store.s3.secretFormat "file")) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings file. */}}
{{- define "hicache-nixl.settings" -}}
{{- $settings := dict -}}
{{- range $key, $value := .Values.connector.settings -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $whole := and (kindIs "float64" $value) (regexMatch "^[0-9]+$" (include "hicache-nixl.text" $value)) -}}
{{- $_ := set $settings $key ($whole | ternary (int64 $value) $value) -}}
{{- end -}}
{{- end -}}
{{- $directories := list -}}
{{- if eq .Values.store.kind "slab" -}}
{{- range $disk := until (include "hicache-nixl.slabDisks" . | int) -}}
{{- $directories = append $directories (printf "slab:///hicache/disk-%d/store" $disk) -}}
{{- end -}}
{{- $_ := set $settings "store" $directories -}}
{{- else if eq .Values.store.kind "files" -}}
{{- $_ := set $settings "store" (list (printf "files:///hicache/shared/%s" .Values.store.files.directory)) -}}
{{- else -}}
{{- $_ := set $settings "store" (list (include "hicache-nixl.s3Url" .)) -}}
{{- end -}}
{{- $others := list "create_bucket" "profile" "requests" -}}
{{- if eq .Values.store.kind "s3" -}}
{{- $others = list "capacity" "segment" "use_direct_io" "queue" -}}
{{- end -}}
{{- range $others -}}{{- $_ := unset $settings . -}}{{- end -}}
{{- if .Values.minio.enabled -}}
{{- $_ := set $settings "create_bucket" true -}}
{{- end -}}
{{- if include "hicache-nixl.credentialsFile" . -}}
{{- $_ := set $settings "credentials_file" "/etc/hicache-nixl-credentials/credentials" -}}
{{- end -}}
{{- if and .Values.model.revision (not (hasKey $settings "model_revision")) -}}
{{- $_ := set $settings "model_revision" .Values.model.revision -}}
{{- end -}}
{{- if not (include "hicache-nixl.hugepages" .) -}}
{{- $_ := set $settings "hugepages" "off" -}}
{{- $_ := unset $settings "host_pool_allocator" -}}
{{- else -}}
{{- $_ := set $settings "hugepages" (include "hicache-nixl.shortage" .) -}}
{{- $_ := set $settings "hugepage_size" (include "hicache-nixl.hugepageName" .) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* The mode, "" for off: YAML reads a bare off as false. */}}
{{- define "hicache-nixl.hugepages" -}}
{{- $mode := toString .Values.hugepages.mode -}}
{{- has $mode (list "off" "false") | ternary "" $mode -}}
{{- end -}}

{{/* The library's word for what a shortage of hugepages is. */}}
{{- define "hicache-nixl.shortage" -}}
{{- eq .Values.hugepages.onShortage "fail" | ternary "required" "prefer" -}}
{{- end -}}

{{/* Whether a server runs at all: a release may be for the nodes alone. */}}
{{- define "hicache-nixl.runs" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.server.replicas) 0) -}}true{{- end -}}
{{- end -}}

{{/* Other policies store pages later, and the test waits for their being stored, by metrics. */}}
{{- define "hicache-nixl.hasTest" -}}
{{- if and (include "hicache-nixl.runs" .) (eq .Values.hicache.writePolicy "write_through") .Values.metrics.enabled -}}true{{- end -}}
{{- end -}}

{{/* SGLang's flags. */}}
{{- define "hicache-nixl.flags" -}}
{{- $loader := dict "backend_name" "hicache_nixl" "module_path" "hicache_nixl" "class_name" "HiCacheNixlConnector" "interface_v1" 1 "hicache_storage_pass_prefix_keys" true -}}
{{- $extra := merge $loader .Values.hicache.extraConfig -}}
{{- $tp := include "hicache-nixl.tensorParallel" . | int -}}
{{- $dp := include "hicache-nixl.dataParallel" . | int -}}
{{- $flags := list "--model-path" .Values.model.path -}}
{{- with .Values.model.revision }}{{- $flags = concat $flags (list "--revision" .) -}}{{- end -}}
{{- with .Values.model.servedName }}{{- $flags = concat $flags (list "--served-model-name" .) -}}{{- end -}}
{{- $flags = concat $flags (list "--host" "0.0.0.0" "--port" (include "hicache-nixl.port" .)) -}}
{{- $flags = concat $flags (list "--tp-size" (toString $tp)) -}}
{{- if gt $dp 1 }}{{- $flags = concat $flags (list "--dp-size" (toString $dp)) -}}{{- end -}}
{{- with .Values.hicache -}}
{{- $flags = concat $flags (list "--enable-hierarchical-cache" "--page-size" (toString (int .pageSize))) -}}
{{- $flags = concat $flags (list "--hicache-mem-layout" .layout "--hicache-io-backend" .ioBackend) -}}
{{- $flags = concat $flags (list "--hicache-write-policy" .writePolicy) -}}
{{- $flags = concat $flags (list "--hicache-storage-prefetch-policy" .prefetchPolicy) -}}
{{- $flags = concat $flags (gt (int .size) 0 | ternary (list "--hicache-size" (toString (int .size))) (list "--hicache-ratio" (toString .ratio))) -}}
{{- end -}}
{{- $flags = concat $flags (list "--hicache-storage-backend" "dynamic") -}}
{{- $flags = concat $flags (list "--hicache-storage-backend-extra-config" (mustToRawJson $extra) "--enable-cache-report") -}}
{{- if .Values.metrics.enabled }}{{- $flags = append $flags "--enable-metrics" -}}{{- end -}}
{{- toYaml (concat $flags .Values.server.extraArgs) -}}
{{- end -}}
