{{/* Names, labels and paths that Kubernetes would refuse, or read as something else. */}}

{{- define "hicache-nixl.validateNames" -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$" .Values.nameOverride) -}}
{{- fail (printf "nameOverride = %q is not a name in Kubernetes: small letters, digits and - between them" .Values.nameOverride) -}}
{{- end -}}
{{- $full := include "hicache-nixl.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$" $full) -}}
{{- $rule := "at most 52 small letters, digits and - between them, a letter first" -}}
{{- if .Values.fullnameOverride -}}
{{- fail (printf "fullnameOverride = %q is not a name of a Service: %s" $full $rule) -}}
{{- end -}}
{{- fail (printf "the release's name makes %q, which is not a name of a Service: %s; set fullnameOverride" $full $rule) -}}
{{- end -}}
{{- $objects := dict
  "model.huggingFace.existingSecret" .Values.model.huggingFace.existingSecret
  "model.cache.existingClaim" .Values.model.cache.existingClaim
  "server.runtimeClassName" .Values.server.runtimeClassName
  "server.priorityClassName" .Values.server.priorityClassName
  "connector.saltSecret.name" .Values.connector.saltSecret.name
  "store.slab.existingClaim" .Values.store.slab.existingClaim
  "store.slab.storageClassName" .Values.store.slab.storageClassName
  "store.files.existingClaim" .Values.store.files.existingClaim
  "store.s3.existingSecret" .Values.store.s3.existingSecret
  "store.s3.ca.existingConfigMap" .Values.store.s3.ca.existingConfigMap
  "ingress.className" .Values.ingress.className
  "ingress.tlsSecret" .Values.ingress.tlsSecret
  "serviceAccount.name" .Values.serviceAccount.name
  "tests.keySecret.name" .Values.tests.keySecret.name -}}
{{- range $name, $value := $objects -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$" $value) -}}
{{- fail (printf "%s = %q is not a name in Kubernetes: small letters, digits, - and ." $name $value) -}}
{{- end -}}
{{- end -}}
{{- $keys := dict
  "model.huggingFace.key" .Values.model.huggingFace.key
  "connector.saltSecret.key" .Values.connector.saltSecret.key
  "store.s3.secretKeys.file" .Values.store.s3.secretKeys.file
  "store.s3.secretKeys.accessKey" .Values.store.s3.secretKeys.accessKey
  "store.s3.secretKeys.secretKey" .Values.store.s3.secretKeys.secretKey
  "store.s3.ca.key" .Values.store.s3.ca.key
  "tests.keySecret.key" .Values.tests.keySecret.key -}}
{{- range $name, $value := $keys -}}
{{- if not (regexMatch "^[-._A-Za-z0-9]{1,253}$" $value) -}}
{{- fail (printf "%s = %q is not a key of a Secret or ConfigMap: letters, digits, -, _ and ." $name $value) -}}
{{- end -}}
{{- end -}}
{{- range append .Values.httpRoute.hostnames .Values.ingress.host -}}
{{- if not (regexMatch "^(([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$" .) -}}
{{- fail (printf "%q in ingress.host or httpRoute.hostnames is not the name of a host; write for example llm.example.com" .) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[A-Za-z0-9:_.@-]+$" .Values.hugepages.node.kubeletUnit) -}}
{{- fail (printf "hugepages.node.kubeletUnit = %q is not the name of a unit; write for example kubelet" .Values.hugepages.node.kubeletUnit) -}}
{{- end -}}
{{- end -}}

{{/* Labels: those that the chart sets are its own, because selectors rest on them. */}}
{{- define "hicache-nixl.validateLabels" -}}
{{- $selected := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- $all := concat $selected (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- $given := dict
  "commonLabels" (list .Values.commonLabels $all)
  "server.podLabels" (list .Values.server.podLabels $selected)
  "metrics.serviceMonitor.labels" (list .Values.metrics.serviceMonitor.labels $all)
  "metrics.podMonitor.labels" (list .Values.metrics.podMonitor.labels $all)
  "metrics.dashboard.labels" (list .Values.metrics.dashboard.labels $all)
  "metrics.alerts.labels" (list .Values.metrics.alerts.labels $all)
  "server.nodeSelector" (list .Values.server.nodeSelector list)
  "hugepages.node.nodeSelector" (list .Values.hugepages.node.nodeSelector list) -}}
{{- range $name, $labels := $given -}}
{{- range $key, $value := index $labels 0 -}}
{{- if has $key (index $labels 1) -}}
{{- fail (printf "%s has %s, which the chart sets; choose another key" $name $key) -}}
{{- end -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $key) -}}
{{- fail (printf "%s has %q, which is not the key of a label; write for example example.com/team" $name $key) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$" $value) -}}
{{- fail (printf "%s has %s = %q, which is not the value of a label: at most 63 letters, digits, -, _ and ., letters or digits at its ends" $name $key $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := .Values.server.podAnnotations -}}
{{- if eq $key "checksum/config" -}}
{{- fail (printf "server.podAnnotations has %s, which the chart sets; choose another key" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A directory of the node. Call with (list NAME PATH EXAMPLE). */}}
{{- define "hicache-nixl.validateDirectory" -}}
{{- $path := index . 1 -}}
{{- if or (not (regexMatch "^/[^\\x00-\\x1f]*$" $path)) (has ".." (splitList "/" $path)) (eq "/" (clean $path)) -}}
{{- fail (printf "%s %q, which is not an absolute directory of its own; write for example %s" (index . 0) $path (index . 2)) -}}
{{- end -}}
{{- end -}}
