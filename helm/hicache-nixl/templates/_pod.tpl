{{/* The pod of a server, the same in a Deployment and a StatefulSet. */}}

{{- define "hicache-nixl.podTemplate" -}}
metadata:
  labels: {{- include "hicache-nixl.podLabels" (list . "server" .Values.server.podLabels) | nindent 4 }}
  # The pods are replaced when their settings change. Keys of a bucket are in a file that is read again; a
  # digest of inline ones would let everybody who may read pods test guesses.
  {{- $checksum := dict "checksum/config" (include "hicache-nixl.settings" . | sha256sum) }}
  annotations: {{- merge $checksum .Values.server.podAnnotations | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "hicache-nixl.serviceAccount" . | quote }}
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
      localhostProfile: {{ quote . }}
      {{- end }}
  terminationGracePeriodSeconds: {{ int .Values.server.terminationGracePeriod }}
  {{- with .Values.server.runtimeClassName }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  {{- with .Values.server.priorityClassName }}
  priorityClassName: {{ quote . }}
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
    - {{ hasKey . "labelSelector" | ternary . (merge $own (omit . "labelSelector")) | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* Installs the library beside SGLang, where the image has none. */}}
{{- define "hicache-nixl.wheelContainer" -}}
name: install-connector
image: {{ include "hicache-nixl.image" (list . .Values.image) | quote }}
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
resources:
  requests: {cpu: 100m, memory: 256Mi}
  limits: {memory: 1Gi}
volumeMounts:
  - name: connector
    mountPath: /opt/hicache-nixl
  - name: wheels
    mountPath: /wheels
    readOnly: true
  - name: tmp
    mountPath: /tmp
{{- end -}}
