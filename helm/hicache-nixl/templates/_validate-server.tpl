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
{{- if and $gpus (not $server.gpuResource) -}}
{{- fail "server.gpuResource is empty and server.gpus is not 0; write for example nvidia.com/gpu" -}}
{{- end -}}
{{- range $name := list "cpu" "memory" -}}
{{- $request := get (default dict $server.resources.requests) $name -}}
{{- $limit := get (default dict $server.resources.limits) $name -}}
{{- $least := include "hicache-nixl.quantity" $request -}}
{{- $most := include "hicache-nixl.quantity" $limit -}}
{{- if and $least $most (lt (float64 $most) (float64 $least)) -}}
{{- fail (printf "server.resources.limits has %s = %s, less than server.resources.requests has, %s; raise it" $name (include "hicache-nixl.text" $limit) (include "hicache-nixl.text" $request)) -}}
{{- end -}}
{{- end -}}
{{- $types := eq $server.kind "StatefulSet" | ternary (list "RollingUpdate" "OnDelete") (list "RollingUpdate" "Recreate") -}}
{{- with $server.updateStrategy.type -}}
{{- if not (has . $types) -}}
{{- fail (printf "server.updateStrategy has the type %s and server.kind = %s; choose %s" (toString .) $server.kind (join " or " $types)) -}}
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
{{- range $type, $name := dict "claim" "existingClaim" "hostPath" "hostPath" -}}
{{- if and (get $cache $name) (ne $cache.type $type) -}}
{{- fail (printf "model.cache.%s is given and model.cache.type = %s; set the latter to %s, or leave the former out" $name $cache.type $type) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $cache.type "claim") (not $cache.existingClaim) -}}
{{- fail "model.cache.existingClaim is empty and model.cache.type = claim; name a PersistentVolumeClaim" -}}
{{- end -}}
{{- if eq $cache.type "hostPath" -}}
{{- include "hicache-nixl.validateDirectory" (list "model.cache.hostPath is" $cache.hostPath "/nvme0/models") -}}
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
{{- $away := .Values.podDisruptionBudget.maxUnavailable -}}
{{- if not (regexMatch "^([0-9]{1,9}|([0-9]{1,2}|100)%)$" (include "hicache-nixl.text" $away)) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable = %s is not a number of pods or a percentage of them; write for example 1 or 25%%" (include "hicache-nixl.text" $away)) -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs is empty; name a Gateway" -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateImages" -}}
{{- $images := dict "image" .Values.image "toolsImage" .Values.toolsImage "minio.image" .Values.minio.image -}}
{{- range $name, $image := $images -}}
{{- if not (regexMatch "^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$" $image.repository) -}}
{{- fail (printf "%s.repository = %q is not the name of an image alone; its tag belongs in %s.tag, its digest in %s.digest" $name $image.repository $name $name) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?$" $image.tag) -}}
{{- fail (printf "%s.tag = %q is not a tag; write for example 0.1.0" $name $image.tag) -}}
{{- end -}}
{{- if eq $image.tag "latest" -}}
{{- fail (printf "%s.tag = latest names another image tomorrow; name a version, or %s.digest" $name $name) -}}
{{- end -}}
{{- if and $image.digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $image.digest)) -}}
{{- fail (printf "%s.digest = %s is not sha256: and 64 digits; take what the registry says" $name $image.digest) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.connector.install "wheel") (empty .Values.connector.wheel.volume) -}}
{{- fail "connector.wheel.volume is empty and connector.install = wheel; name the volume with the wheels, for example {persistentVolumeClaim: {claimName: wheels}}" -}}
{{- end -}}
{{- end -}}
