{{/* What of the server's values does not go together. */}}

{{- define "hicache-nixl.validateServer" -}}
{{- $server := .Values.server -}}
{{- $gpus := int $server.gpus -}}
{{- $tp := int $server.tensorParallelSize -}}
{{- if and $gpus $tp (ne 0 (mod $gpus $tp)) -}}
{{- fail (printf "server.tensorParallelSize = %d does not divide server.gpus = %d; the ranks of a pod are its GPUs" $tp $gpus) -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $name, $_ := default dict (get $server.resources $kind) -}}
{{- if or (hasPrefix "hugepages-" $name) (eq $name $server.gpuResource) -}}
{{- fail (printf "server.resources.%s has %s; set %s" $kind $name (hasPrefix "hugepages-" $name | ternary "hugepages.memory" "server.gpus")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $next := append (rest $server.extraArgs) "" -}}
{{- range $at, $flag := $server.extraArgs -}}
{{- $parts := splitList "=" $flag -}}
{{- if has (first $parts) (list "--api-key" "--admin-api-key" "--ssl-keyfile-password") -}}
{{- $value := gt (len $parts) 1 | ternary (rest $parts | join "=") (index $next $at) -}}
{{- if not (regexMatch "^[$][(][A-Za-z0-9_]+[)]$" $value) -}}
{{- fail (printf "server.extraArgs has a secret in %s; write $(NAME), and take NAME from a Secret in server.extraEnv" (first $parts)) -}}
{{- end -}}
{{- end -}}
{{- if has (first $parts) (list "--port" "--host" "--tp" "--tp-size" "--tensor-parallel-size" "--dp" "--dp-size" "--data-parallel-size" "--hicache-storage-backend" "--hicache-storage-backend-extra-config") -}}
{{- fail (printf "server.extraArgs has %s, which the chart sets; use its values" (first $parts)) -}}
{{- end -}}
{{- end -}}
{{- $own := list "HICACHE_NIXL_CONFIG" "HICACHE_NIXL_STORE" "HICACHE_NIXL_HUGEPAGES" "SGLANG_HUGEPAGE_SIZE" "HICACHE_NIXL_SALT" "HF_TOKEN" "HF_HOME" "HOME" -}}
{{- range $server.extraEnv -}}
{{- if has .name $own -}}
{{- fail (printf "server.extraEnv has %s, which the chart sets; use its values" .name) -}}
{{- end -}}
{{- if and .value (regexMatch "(SECRET|TOKEN|PASSWORD|ACCESS_KEY|API_KEY)" .name) -}}
{{- fail (printf "server.extraEnv has %s in clear; take it from a Secret with valueFrom" .name) -}}
{{- end -}}
{{- end -}}
{{- if and $server.readOnlyRootFilesystem (not $server.writableHome) -}}
{{- fail "server.writableHome = false needs server.readOnlyRootFilesystem = false: SGLang's compilers write below HOME" -}}
{{- end -}}
{{- if ge (int $server.preStopSleep) (int $server.terminationGracePeriod) -}}
{{- fail (printf "server.preStopSleep = %d leaves nothing of server.terminationGracePeriod = %d; lower the one or raise the other" (int $server.preStopSleep) (int $server.terminationGracePeriod)) -}}
{{- end -}}
{{- $_ := include "hicache-nixl.bytes" (list "server.shm" $server.shm "quantity") -}}
{{- $pairs := dict "page_first_direct" (list "direct") "page_first" (list "kernel") "layer_first" (list "direct" "kernel") "page_head" (list "kernel") -}}
{{- $fits := get $pairs .Values.hicache.layout -}}
{{- if not (has .Values.hicache.ioBackend $fits) -}}
{{- fail (printf "hicache.ioBackend = %s does not go with hicache.layout = %s; choose %s" .Values.hicache.ioBackend .Values.hicache.layout (join " or " $fits)) -}}
{{- end -}}
{{- if ne (eq .Values.seccomp.type "Localhost") (not (empty .Values.seccomp.localhostProfile)) -}}
{{- fail (printf "seccomp.type = %s and seccomp.localhostProfile = %q; Localhost needs a profile, and only Localhost has one" .Values.seccomp.type .Values.seccomp.localhostProfile) -}}
{{- end -}}
{{- $cache := .Values.model.cache -}}
{{- if and (eq $cache.type "claim") (not $cache.existingClaim) -}}
{{- fail "model.cache.existingClaim is empty and model.cache.type = claim; name a PersistentVolumeClaim" -}}
{{- end -}}
{{- if and (eq $cache.type "hostPath") (not (hasPrefix "/" $cache.hostPath)) -}}
{{- fail (printf "model.cache.hostPath = %q is not an absolute directory; write for example /nvme0/models" $cache.hostPath) -}}
{{- end -}}
{{- $_ = include "hicache-nixl.bytes" (list "model.cache.size" $cache.size "quantity") -}}
{{- if .Values.autoscaling.enabled -}}
{{- if not .Values.autoscaling.metrics -}}
{{- fail "autoscaling.metrics is empty; name what says that the GPUs are busy, for example a Pods metric of sglang:num_queue_reqs" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas = %d is more than autoscaling.maxReplicas = %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs is empty; name a Gateway" -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateImages" -}}
{{- $images := dict "image" .Values.image "toolsImage" .Values.toolsImage "minio.image" .Values.minio.image -}}
{{- range $name, $image := $images -}}
{{- if eq $image.tag "latest" -}}
{{- fail (printf "%s.tag = latest names another image tomorrow; name a version, or %s.digest" $name $name) -}}
{{- end -}}
{{- if and $image.digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $image.digest)) -}}
{{- fail (printf "%s.digest = %s is not sha256: and 64 digits" $name $image.digest) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.connector.install "wheel") (empty .Values.connector.wheel.volume) -}}
{{- fail "connector.wheel.volume is empty and connector.install = wheel; name the volume with the wheels, for example {persistentVolumeClaim: {claimName: wheels}}" -}}
{{- end -}}
{{- end -}}
