{{/* The pod of a server, the same in a Deployment and a StatefulSet. */}}

{{- define "hicache-nixl.podTemplate" -}}
metadata:
  labels:
    # Not the chart's version: it alone does not make a model be loaded again.
    {{- include "hicache-nixl.selector" (list . "server") | nindent 4 }}
    {{- with merge dict .Values.server.podLabels .Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # The pods are replaced when what they read changes.
    checksum/config: {{ include "hicache-nixl.settings" . | sha256sum }}
    {{- if .Values.store.s3.secretKey }}
    checksum/secret: {{ printf "%s %s" .Values.store.s3.accessKey .Values.store.s3.secretKey | sha256sum }}
    {{- end }}
    {{- with .Values.server.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "hicache-nixl.serviceAccount" . }}
  automountServiceAccountToken: false
  # Variables of Services would begin with the prefix of the library's settings.
  enableServiceLinks: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int64 .Values.server.user }}
    runAsGroup: {{ int64 .Values.server.user }}
    # Volumes are the server's; on large ones only where they are not yet.
    fsGroup: {{ int64 .Values.server.user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: {{ .Values.seccomp.type }}
      {{- with .Values.seccomp.localhostProfile }}
      localhostProfile: {{ . }}
      {{- end }}
  terminationGracePeriodSeconds: {{ int .Values.server.terminationGracePeriod }}
  {{- with .Values.server.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.server.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- $init := list }}
  {{- if eq (include "hicache-nixl.hugepages" .) "pod" }}
  {{- $init = append $init (include "hicache-nixl.hugepagesContainer" . | fromYaml) }}
  {{- end }}
  {{- if eq .Values.connector.install "wheel" }}
  {{- $init = append $init (include "hicache-nixl.wheelContainer" . | fromYaml) }}
  {{- end }}
  {{- with concat $init .Values.server.extraInitContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "hicache-nixl.serverContainer" . | nindent 6 | trim }}
    {{- with .Values.server.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes: {{- include "hicache-nixl.volumes" . | nindent 4 }}
  {{- with .Values.server.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.server.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.server.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.server.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "hicache-nixl.selector" (list $ "server") | fromYaml)) }}
    - {{ merge dict . $own | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* Installs the library beside SGLang, where the image has none. */}}
{{- define "hicache-nixl.wheelContainer" -}}
name: install-connector
image: {{ include "hicache-nixl.image" (list . .Values.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [bash, -euc]
args:
  - >-
    python3 -m pip install --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check
    --upgrade --target /opt/hicache-nixl /wheels/*.whl
    && PYTHONPATH=/opt/hicache-nixl python3 -c 'import hicache_nixl'
env:
  - name: HOME
    value: /tmp
securityContext:
  {{- include "hicache-nixl.confined" . | nindent 2 }}
  readOnlyRootFilesystem: true
volumeMounts:
  - name: connector
    mountPath: /opt/hicache-nixl
  - name: wheels
    mountPath: /wheels
    readOnly: true
  - name: tmp
    mountPath: /tmp
{{- end -}}
