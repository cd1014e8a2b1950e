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
{{- if not (kindIs "invalid" $settings.deadline) -}}
{{- $deadline := include "hicache-nixl.text" $settings.deadline | lower | trim -}}
{{- $unit := regexFind "[a-z]*$" $deadline -}}
{{- $factors := dict "us" 1 "ms" 1000 "s" 1000000 "" 1000000 "m" 60000000 "h" 3600000000 -}}
{{- $number := trimSuffix $unit $deadline | trim -}}
{{- if not (and (hasKey $factors $unit) (regexMatch "^[0-9]{1,18}([.][0-9]{1,12})?$" $number)) -}}
{{- fail (printf "connector.settings.deadline = %s is not a time; write for example 10s" $deadline) -}}
{{- end -}}
{{- $time := mulf $number (get $factors $unit) -}}
{{- if or (le $time 0.0) (gt $time 600000000.0) -}}
{{- fail (printf "connector.settings.deadline = %s is not more than 0 and at most 10m; write for example 10s" $deadline) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateHugepages" -}}
{{- $pages := .Values.hugepages -}}
{{- $mode := include "hicache-nixl.hugepages" . -}}
{{- if $mode -}}
{{- $page := include "hicache-nixl.hugepageBytes" . | int64 -}}
{{- $text := include "hicache-nixl.text" $pages.memory -}}
{{- $memory := include "hicache-nixl.bytes" (list "hugepages.memory" $pages.memory "quantity") | int64 -}}
{{- if mod $memory $page -}}
{{- $better := regexMatch "^[0-9]+$" $text | ternary (printf "without a unit it counts bytes; write %sGi" $text) "write for example 64Gi" -}}
{{- fail (printf "hugepages.memory = %s is not a multiple of hugepages.pageSize = %s; %s" $text $pages.pageSize $better) -}}
{{- end -}}
{{- with $pages.perNode -}}
{{- $own := include "hicache-nixl.text" . -}}
{{- $node := include "hicache-nixl.bytes" (list "hugepages.perNode" . "quantity") | int64 -}}
{{- if or (mod $node $page) (lt $node $memory) -}}
{{- fail (printf "hugepages.perNode = %s is not a multiple of hugepages.pageSize = %s, or less than hugepages.memory = %s; write for example %s" $own $pages.pageSize $text $text) -}}
{{- end -}}
{{- end -}}
{{- $resources := .Values.server.resources -}}
{{- $given := merge dict (default dict $resources.requests) (default dict $resources.limits) -}}
{{- if not (or $given.memory $given.cpu) -}}
{{- fail "server.resources.requests has neither cpu nor memory; Kubernetes takes no hugepages without one of them" -}}
{{- end -}}
{{- if and (eq $pages.onShortage "fail") (or .Values.server.replicas .Values.autoscaling.enabled) -}}
{{- if and (gt (int .Values.server.gpus) 0) (eq (int .Values.hicache.size) 0) -}}
{{- fail (printf "hicache.size = 0 leaves host KV to the GPU's memory, and hugepages.mode = %s must hold it; set hicache.size in GB, or hugepages.onShortage = fallback" $mode) -}}
{{- end -}}
{{- $ranks := mul (include "hicache-nixl.tensorParallel" . | int) (include "hicache-nixl.dataParallel" . | int) -}}
{{- $staging := include "hicache-nixl.bytes" (list "connector.settings.staging" (default "256MiB" .Values.connector.settings.staging)) | int64 -}}
{{- $kv := mul (int64 .Values.hicache.size) 1000000000 -}}
{{/* Both are mapped on their own, in whole pages. The example leaves room for SGLang's page of tokens. */}}
{{- $each := add (div (add $kv $page -1) $page) (div (add $staging $page -1) $page) -}}
{{- $need := mul $ranks $each $page -}}
{{- if gt $need $memory -}}
{{- fail (printf "hugepages.memory = %s is less than %d rank(s) need, each hicache.size = %d GB and connector.settings.staging; write for example %dGi" $text $ranks (int64 .Values.hicache.size) (div (add $need (mul $ranks (max $page 67108864)) 1073741823) 1073741824)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $mode "node") (not $pages.node.nodeSelector) (not .Values.server.nodeSelector) -}}
{{- fail "hugepages.node.nodeSelector is empty, and so is server.nodeSelector: hugepages.mode = node would take memory of every node; name a label of those that are meant" -}}
{{- end -}}
{{- if and $pages.node.restartKubelet (ne $mode "node") -}}
{{- fail (printf "hugepages.node.restartKubelet is set and hugepages.mode = %s; only node does it" (default "off" $mode)) -}}
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
