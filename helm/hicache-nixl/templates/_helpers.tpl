{{/* Names, labels and images. */}}

{{- define "hicache-nixl.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What never changes, because a selector cannot. Call with (list $ "server"). */}}
{{- define "hicache-nixl.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Call with (list $ "server"). */}}
{{- define "hicache-nixl.labels" -}}
{{- $root := index . 0 -}}
{{ include "hicache-nixl.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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
