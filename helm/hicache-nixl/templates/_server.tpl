{{/* The container of SGLang. */}}

{{- define "hicache-nixl.serverContainer" -}}
name: server
image: {{ include "hicache-nixl.image" (list . .Values.image) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if .Values.server.command }}
command: {{- toYaml .Values.server.command | nindent 2 }}
{{- else if eq .Values.connector.install "wheel" }}
command: [python3, -m, sglang.launch_server]
{{- end }}
# The image's entrypoint may set some of these flags before; the later one wins.
args: {{- include "hicache-nixl.flags" . | nindent 2 }}
env: {{- include "hicache-nixl.env" . | nindent 2 }}
{{- with .Values.server.extraEnvFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ include "hicache-nixl.port" . }}
# Nothing else is asked until the model is loaded.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: {{ int .Values.server.readiness.timeout }}
  failureThreshold: {{ div (add (int .Values.server.startupTimeout) 9) 10 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ int .Values.server.readiness.period }}
  timeoutSeconds: {{ int .Values.server.readiness.timeout }}
  failureThreshold: {{ int .Values.server.readiness.failures }}
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ int .Values.server.liveness.period }}
  timeoutSeconds: {{ int .Values.server.liveness.timeout }}
  failureThreshold: {{ int .Values.server.liveness.failures }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ int .Values.server.preStopSleep | quote }}]
resources: {{- include "hicache-nixl.resources" . | nindent 2 }}
securityContext:
  # Not the capability IPC_LOCK: a user that is not root would not get it.
  {{- include "hicache-nixl.confined" . | nindent 2 }}
  readOnlyRootFilesystem: {{ .Values.server.readOnlyRootFilesystem }}
volumeMounts: {{- include "hicache-nixl.mounts" . | nindent 2 }}
{{- end -}}

{{/* Hugepages as request and limit: without them the pod's limit is none, and the first touch kills. */}}
{{- define "hicache-nixl.resources" -}}
{{- $own := dict -}}
{{- if gt (int .Values.server.gpus) 0 -}}
{{- $_ := set $own .Values.server.gpuResource (int .Values.server.gpus) -}}
{{- end -}}
{{- if include "hicache-nixl.hugepages" . -}}
{{- $_ := set $own (printf "hugepages-%s" .Values.hugepages.pageSize) (include "hicache-nixl.text" .Values.hugepages.memory) -}}
{{- end -}}
{{- $resources := deepCopy .Values.server.resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- $merged := merge (default dict (get $resources $kind)) $own -}}
{{- if $merged -}}{{- $_ := set $resources $kind $merged -}}{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "hicache-nixl.env" -}}
- name: HICACHE_NIXL_CONFIG
  value: /etc/hicache-nixl/settings.yaml
# SGLang's own host pools ask it; empty means ordinary pages, whatever the image says.
- name: SGLANG_HUGEPAGE_SIZE
  value: {{ include "hicache-nixl.hugepages" . | empty | ternary "" (include "hicache-nixl.hugepageName" .) | quote }}
{{- if include "hicache-nixl.hugepages" . }}
# The image's entrypoint looks at it before SGLang starts.
- name: HICACHE_NIXL_HUGEPAGES
  value: {{ include "hicache-nixl.shortage" . }}
{{- end }}
{{- if .Values.server.writableHome }}
- name: HOME
  value: /home/hicache
{{- end }}
# For an image that does not know the user.
- name: USER
  value: hicache
- name: HF_HOME
  value: /var/cache/huggingface
{{- with .Values.model.huggingFace }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ quote .existingSecret }}
      key: {{ quote .key }}
{{- end }}
{{- end }}
{{- if eq .Values.connector.install "wheel" }}
- name: PYTHONPATH
  value: /opt/hicache-nixl
{{- end }}
{{- with .Values.connector.saltSecret }}
{{- if .name }}
- name: HICACHE_NIXL_SALT
  valueFrom:
    secretKeyRef:
      name: {{ quote .name }}
      key: {{ quote .key }}
{{- end }}
{{- end }}
{{- if and (eq .Values.store.kind "s3") .Values.store.s3.existingSecret (eq .Values.store.s3.secretFormat "keys") }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ quote .Values.store.s3.existingSecret }}
      key: {{ quote .Values.store.s3.secretKeys.accessKey }}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ quote .Values.store.s3.existingSecret }}
      key: {{ quote .Values.store.s3.secretKeys.secretKey }}
{{- end }}
{{- with .Values.server.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
