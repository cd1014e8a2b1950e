{{/* The library's settings, hugepages, and what watches over the server. */}}

{{- define "hicache-nixl.validateSettings" -}}
{{- $settings := .Values.connector.settings -}}
{{- $bytes := dict -}}
{{- range $key := list "capacity" "staging" "segment" -}}
{{- $value := index $settings $key -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $size := include "hicache-nixl.bytes" (list (printf "connector.settings.%s" $key) $value) | int64 -}}
{{- if lt $size 1048576 -}}
{{- fail (printf "connector.settings.%s = %s is less than 1MiB" $key (include "hicache-nixl.text" $value)) -}}
{{- end -}}
{{- $_ := set $bytes $key $size -}}
{{- end -}}
{{- end -}}
{{- if hasKey $bytes "segment" -}}
{{- if mod $bytes.segment 4096 -}}
{{- fail (printf "connector.settings.segment = %s is not a multiple of 4KiB" (include "hicache-nixl.text" $settings.segment)) -}}
{{- end -}}
{{- if and (hasKey $bytes "capacity") (gt $bytes.segment $bytes.capacity) -}}
{{- fail (printf "connector.settings.segment = %s is larger than connector.settings.capacity = %s" (include "hicache-nixl.text" $settings.segment) (include "hicache-nixl.text" $settings.capacity)) -}}
{{- end -}}
{{- end -}}
{{- $deadline := toString $settings.deadline -}}
{{- if not (or (kindIs "invalid" $settings.deadline) (regexMatch "^[0-9]+([.][0-9]+)?(us|ms|s|m|h)?$" $deadline)) -}}
{{- fail (printf "connector.settings.deadline = %s is not a time; write for example 10s" $deadline) -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateHugepages" -}}
{{- if include "hicache-nixl.hugepages" . -}}
{{- $page := include "hicache-nixl.hugepageBytes" . | int64 -}}
{{- $memory := include "hicache-nixl.bytes" (list "hugepages.memory" .Values.hugepages.memory "quantity") | int64 -}}
{{- if mod $memory $page -}}
{{- fail (printf "hugepages.memory = %s is not a multiple of hugepages.pageSize = %s" .Values.hugepages.memory .Values.hugepages.pageSize) -}}
{{- end -}}
{{- with .Values.hugepages.perNode -}}
{{- $node := include "hicache-nixl.bytes" (list "hugepages.perNode" . "quantity") | int64 -}}
{{- if or (mod $node $page) (lt $node $memory) -}}
{{- fail (printf "hugepages.perNode = %s is not a multiple of hugepages.pageSize = %s, or less than hugepages.memory = %s" . $.Values.hugepages.pageSize $.Values.hugepages.memory) -}}
{{- end -}}
{{- end -}}
{{- $requests := default dict .Values.server.resources.requests -}}
{{- if not (or $requests.memory $requests.cpu) -}}
{{- fail "server.resources.requests has neither cpu nor memory; Kubernetes takes no hugepages without one of them" -}}
{{- end -}}
{{- $ranks := mul (include "hicache-nixl.tensorParallel" . | int) (include "hicache-nixl.dataParallel" . | int) -}}
{{- $staging := include "hicache-nixl.bytes" (list "connector.settings.staging" (default "256MiB" .Values.connector.settings.staging)) | int64 -}}
{{- $need := mul $ranks (add $staging (mul (int64 .Values.hicache.size) 1000000000)) -}}
{{- if and (eq .Values.hugepages.onShortage "fail") (gt $need $memory) -}}
{{- fail (printf "hugepages.memory = %s is less than what %d ranks need, each hicache.size = %d GB and connector.settings.staging; they need %d bytes" .Values.hugepages.memory $ranks (int64 .Values.hicache.size) $need) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.hugepages.node.restartKubelet (ne (include "hicache-nixl.hugepages" .) "node") -}}
{{- fail (printf "hugepages.node.restartKubelet is set and hugepages.mode = %s; only node does it" (toString .Values.hugepages.mode)) -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateMetrics" -}}
{{- $metrics := .Values.metrics -}}
{{- if and $metrics.serviceMonitor.enabled $metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor.enabled and metrics.podMonitor.enabled are both set; every pod would be scraped twice" -}}
{{- end -}}
{{- range $name := list "serviceMonitor" "podMonitor" "alerts" -}}
{{- if and (get $metrics $name).enabled (not $metrics.enabled) -}}
{{- fail (printf "metrics.%s.enabled is set and metrics.enabled is not; SGLang would serve no metrics" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
