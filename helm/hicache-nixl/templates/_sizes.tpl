{{/* Sizes and numbers from texts. A wrong one is an error that names its value. */}}

{{/* A value as it was written: helm reads whole numbers as floating ones. */}}
{{- define "hicache-nixl.text" -}}
{{- if kindIs "float64" . -}}
{{- eq . (floor .) | ternary (printf "%.0f" .) (toString .) -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/*
Bytes in a size. Call with (list NAME VALUE); (list NAME VALUE "quantity") takes quantities of
Kubernetes alone.
*/}}
{{- define "hicache-nixl.bytes" -}}
{{- $name := index . 0 -}}
{{- $value := index . 1 -}}
{{- $quantity := gt (len .) 2 -}}
{{- $text := include "hicache-nixl.text" $value -}}
{{- $binary := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $decimal := dict "kB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 "PB" 1000000000000000 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $number := trimSuffix $unit $text | trim -}}
{{- $factor := eq $unit "" | ternary 1 0 -}}
{{- range $key, $bytes := $binary -}}
{{- if or (eq $unit $key) (and (not $quantity) (eq $unit (printf "%sB" $key))) -}}{{- $factor = $bytes -}}{{- end -}}
{{- end -}}
{{- if and (not $quantity) (hasKey $decimal $unit) -}}{{- $factor = get $decimal $unit -}}{{- end -}}
{{- if or (not (regexMatch "^[0-9]{1,15}([.][0-9]{1,6})?$" $number)) (eq (int64 $factor) 0) -}}
{{- fail (printf "%s = %s is not a size; write for example %s" $name $text ($quantity | ternary "64Gi" "64GiB")) -}}
{{- end -}}
{{- $bytes := contains "." $number | ternary (int64 (mulf (float64 $number) $factor)) (mul (int64 $number) $factor) -}}
{{- if le (int64 $bytes) 0 -}}
{{- fail (printf "%s = %s is not more than nothing; write for example %s" $name $text ($quantity | ternary "64Gi" "64GiB")) -}}
{{- end -}}
{{- $bytes -}}
{{- end -}}

{{/* Bytes of a hugepage. */}}
{{- define "hicache-nixl.hugepageBytes" -}}
{{- $sizes := dict "2Mi" 2097152 "1Gi" 1073741824 -}}
{{- $size := toString .Values.hugepages.pageSize -}}
{{- if not (hasKey $sizes $size) -}}
{{- fail (printf "hugepages.pageSize = %s is not a size of a hugepage; choose 2Mi or 1Gi" $size) -}}
{{- end -}}
{{- get $sizes $size -}}
{{- end -}}

{{/* Hugepages that a node shall have. */}}
{{- define "hicache-nixl.hugepageCount" -}}
{{- $own := default .Values.hugepages.memory .Values.hugepages.perNode -}}
{{- div (include "hicache-nixl.bytes" (list "hugepages.memory" $own "quantity") | int64) (include "hicache-nixl.hugepageBytes" . | int64) -}}
{{- end -}}

{{/* How the library and SGLang write the size of a hugepage. */}}
{{- define "hicache-nixl.hugepageName" -}}
{{- get (dict "2Mi" "2MB" "1Gi" "1GB") (toString .Values.hugepages.pageSize) -}}
{{- end -}}

{{/* GPUs of one copy of the model, and how many copies a pod has. */}}
{{- define "hicache-nixl.tensorParallel" -}}
{{- default (max 1 (int .Values.server.gpus)) (int .Values.server.tensorParallelSize) -}}
{{- end -}}
{{- define "hicache-nixl.dataParallel" -}}
{{- div (max 1 (int .Values.server.gpus)) (include "hicache-nixl.tensorParallel" . | int) | max 1 -}}
{{- end -}}
