{{/* Sizes and numbers from texts. A wrong one is an error that names its value. */}}

{{/* A value as it was written: helm reads whole numbers as floating ones. */}}
{{- define "hicache-nixl.text" -}}
{{- if kindIs "float64" . -}}
{{- eq . (floor .) | ternary (printf "%.0f" .) (toString .) -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* A number and its unit, multiplied. Call with (list NUMBER UNIT). */}}
{{- define "hicache-nixl.product" -}}
{{- $number := mulf (index . 0) (eq (index . 1) "m" | ternary 0.001 1.0) -}}
{{- $letter := index . 1 | trunc 1 | upper -}}
{{- if and (contains $letter "KMGTPE") (ne (index . 1) "m") $letter -}}
{{- $factor := regexMatch "i" (index . 1 | lower) | ternary 1024 1000 -}}
{{- range regexFind (printf ".*%s" $letter) "KMGTPE" | len | until -}}{{- $number = mulf $number $factor -}}{{- end -}}
{{- end -}}
{{- $number -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number, whatever its unit; "" for a text that is none. */}}
{{- define "hicache-nixl.quantity" -}}
{{- $text := include "hicache-nixl.text" . -}}
{{- if regexMatch "^[0-9]+([.][0-9]+)?(m|k|[KMGTPE]i|[MGTPE])?$" $text -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- include "hicache-nixl.product" (list (trimSuffix $unit $text) $unit) -}}
{{- end -}}
{{- end -}}

{{/*
Bytes in a size. Call with (list NAME VALUE); (list NAME VALUE "quantity") takes quantities of
Kubernetes in units of 1024. The other sizes are those of the library.
*/}}
{{- define "hicache-nixl.bytes" -}}
{{- $name := index . 0 -}}
{{- $text := include "hicache-nixl.text" (index . 1) | replace "\n" " " -}}
{{- $quantity := gt (len .) 2 -}}
{{- $last := $quantity | ternary "i" "iB" -}}
{{- $unit := regexFind "[A-Za-z]*$" ($quantity | ternary $text (trim $text)) -}}
{{- $number := trimSuffix $unit ($quantity | ternary $text (trim $text)) -}}
{{- $number = $quantity | ternary $number (trim $number) -}}
{{- $known := $quantity | ternary "^([KMGTPE]i)?$" "(?i)^(b|[kmgtpe]i?b|[kmgtpe]i)?$" -}}
{{- $digits := "^[0-9]{1,19}([.][0-9]{1,12})?$" -}}
{{- $better := printf "write for example 64G%s" $last -}}
{{- if not (and (regexMatch $known $unit) (regexMatch $digits $number)) -}}
{{- if and (regexMatch "(?i)^[kmgtpe]i?b?$" $unit) (regexMatch $digits $number) -}}
{{- $better = printf "write %s%s%s%s" $number ($unit | trunc 1 | upper) $last (eq (len $unit) 1 | ternary ", the letter alone counts in 1000" "") -}}
{{- end -}}
{{- fail (printf "%s = %s is not a size; %s" $name ($text | empty | ternary `""` $text) $better) -}}
{{- end -}}
{{- $bytes := include "hicache-nixl.product" (list $number $unit) | float64 -}}
{{- if le $bytes 0.0 -}}
{{- fail (printf "%s = %s is not more than nothing; %s" $name $text $better) -}}
{{- end -}}
{{- if ge $bytes 9223372036854775807.0 -}}
{{- fail (printf "%s = %s is not less than 8Ei; %s" $name $text $better) -}}
{{- end -}}
{{- if and (not $quantity) (ne $bytes (floor $bytes)) -}}
{{- fail (printf "%s = %s is not a whole number of bytes; %s" $name $text $better) -}}
{{- end -}}
{{- int64 $bytes -}}
{{- end -}}

{{/* Bytes of a hugepage. */}}
{{- define "hicache-nixl.hugepageBytes" -}}
{{- $sizes := dict "2Mi" 2097152 "1Gi" 1073741824 -}}
{{- $size := include "hicache-nixl.text" .Values.hugepages.pageSize -}}
{{- if not (hasKey $sizes $size) -}}
{{- fail (printf "hugepages.pageSize = %s is not a size of a hugepage; choose 2Mi or 1Gi" $size) -}}
{{- end -}}
{{- get $sizes $size -}}
{{- end -}}

{{/* Hugepages that a node shall have. */}}
{{- define "hicache-nixl.hugepageCount" -}}
{{- $own := .Values.hugepages.perNode | empty | ternary "memory" "perNode" -}}
{{- div (include "hicache-nixl.bytes" (list (printf "hugepages.%s" $own) (get .Values.hugepages $own) "quantity") | int64) (include "hicache-nixl.hugepageBytes" . | int64) -}}
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
