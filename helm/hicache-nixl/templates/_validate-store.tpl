{{/* What a store in directories needs, and what belongs to another kind. */}}

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
{{- $places := list -}}
{{- range $slab.hostPaths -}}
{{- include "hicache-nixl.validateDirectory" (list "store.slab.hostPaths holds" . "/nvme0/hicache") -}}
{{- if has (clean .) $places -}}
{{- fail (printf "store.slab.hostPaths names %s twice; name each disk once" (clean .)) -}}
{{- end -}}
{{- $places = append $places (clean .) -}}
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
{{- $given := default "64GiB" .Values.connector.settings.capacity -}}
{{- $capacity := include "hicache-nixl.bytes" (list "connector.settings.capacity" $given) | float64 -}}
{{- $size := include "hicache-nixl.bytes" (list "store.slab.size" $slab.size "quantity") | float64 -}}
{{- if gt (mulf $capacity 1.05) (mulf $size (int $slab.volumes)) -}}
{{- fail (printf "connector.settings.capacity = %s and a twentieth is more than store.slab.volumes = %d of store.slab.size = %s hold; lower the one or raise the others" (include "hicache-nixl.text" $given) (int $slab.volumes) (include "hicache-nixl.text" $slab.size)) -}}
{{- end -}}
{{- else if $slab.storageClassName -}}
{{- fail (printf "store.slab.storageClassName is given and store.slab.volume = %s; only ephemeral and claimTemplate use it, leave it out" $slab.volume) -}}
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
{{- with $files.hostPath -}}
{{- include "hicache-nixl.validateDirectory" (list "store.files.hostPath is" . "/mnt/shared") -}}
{{- end -}}
{{- $parts := splitList "/" $files.directory -}}
{{- if or (not (regexMatch "^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$" $files.directory)) (has "." $parts) (has ".." $parts) -}}
{{- fail (printf "store.files.directory = %q is not the name of a directory below the volume; write for example team/hicache" $files.directory) -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateOtherStores" -}}
{{- $kind := .Values.store.kind -}}
{{- range $path := list "slab.hostPaths" "slab.existingClaim" "slab.storageClassName" "files.existingClaim" "files.hostPath" "s3.url" "s3.existingSecret" "s3.accessKey" "s3.secretKey" "s3.ca.existingConfigMap" -}}
{{- $value := $.Values.store -}}
{{- range splitList "." $path -}}{{- $value = get $value . -}}{{- end -}}
{{- $other := splitList "." $path | first -}}
{{- if and (ne $other $kind) $value -}}
{{- fail (printf "store.%s is given and store.kind = %s; set store.kind to %s, or leave the value out" $path $kind $other) -}}
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
