{{/* Names, labels and images. */}}

{{/*
At most 52 characters: a StatefulSet makes a label of 63 of it. A name that is cut ends in a digest, so that
two stay two.
*/}}
{{- define "hicache-nixl.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | replace "." "-" -}}
{{- if gt (len $full) 52 -}}
{{- $full = printf "%s-%s" (trunc 43 $full) (sha256sum $full | trunc 8) -}}
{{- end -}}
{{- default $full .Values.fullnameOverride -}}
{{- end -}}

{{/* What never changes, because a selector cannot. Call with (list $ "server"). */}}
{{- define "hicache-nixl.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/*
Labels of a pod. Call with (list $ "server" OWN...), further labels as dicts. The selector's win, then the
first dict, commonLabels last.
*/}}
{{- define "hicache-nixl.podLabels" -}}
{{- $labels := include "hicache-nixl.selector" . | fromYaml -}}
{{- range append (slice . 2) (index . 0).Values.commonLabels -}}
{{- $labels = merge $labels . -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* Labels of any other object, called likewise. A pod has no versions: they alone must not replace it. */}}
{{- define "hicache-nixl.labels" -}}
{{- $root := index . 0 -}}
{{- $chart := printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" -}}
{{- $versions := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" $chart -}}
{{- include "hicache-nixl.podLabels" (concat (list $root (index . 1) $versions) (slice . 2)) -}}
{{- end -}}

{{- define "hicache-nixl.serviceAccount" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "hicache-nixl.fullname" .) "default" -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end -}}

{{/* Call with (list $ "image"), the value that describes it. */}}
{{- define "hicache-nixl.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* The port of the server; its images know no other. */}}
{{- define "hicache-nixl.port" -}}30000{{- end -}}

{{/* What every container but the one that raises hugepages is confined to. */}}
{{- define "hicache-nixl.confined" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The security of a pod whose containers are all confined. */}}
{{- define "hicache-nixl.confinedPod" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.server.user }}
runAsGroup: {{ int64 .Values.server.user }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
