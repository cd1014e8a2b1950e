{{/* Volumes of a server, and where they are mounted. */}}

{{- define "hicache-nixl.volumes" -}}
- name: config
  configMap:
    name: {{ include "hicache-nixl.fullname" . | quote }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "hicache-nixl.text" .Values.server.shm | quote }}
- name: tmp
  emptyDir: {}
{{- if .Values.server.writableHome }}
- name: home
  emptyDir: {}
{{- end }}
- name: models
  {{- with .Values.model.cache }}
  {{- if eq .type "claim" }}
  persistentVolumeClaim:
    claimName: {{ quote .existingClaim }}
  {{- else if eq .type "hostPath" }}
  hostPath:
    path: {{ quote .hostPath }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ include "hicache-nixl.text" .size | quote }}
  {{- end }}
  {{- end }}
{{- if eq .Values.store.kind "slab" }}
{{- include "hicache-nixl.slabVolumes" . }}
{{- else if eq .Values.store.kind "files" }}
- name: shared
  {{- if .Values.store.files.hostPath }}
  hostPath:
    path: {{ quote .Values.store.files.hostPath }}
    type: Directory
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ quote .Values.store.files.existingClaim }}
  {{- end }}
{{- end }}
{{- if include "hicache-nixl.credentialsFile" . }}
- name: credentials
  secret:
    secretName: {{ default (printf "%s-s3" (include "hicache-nixl.fullname" .)) .Values.store.s3.existingSecret | quote }}
    items:
      - key: {{ .Values.store.s3.existingSecret | empty | ternary "credentials" .Values.store.s3.secretKeys.file | quote }}
        path: credentials
    defaultMode: 0440
{{- end }}
{{- if and (eq .Values.store.kind "s3") .Values.store.s3.ca.existingConfigMap }}
- name: ca
  configMap:
    name: {{ quote .Values.store.s3.ca.existingConfigMap }}
    items:
      - key: {{ quote .Values.store.s3.ca.key }}
        path: ca.crt
{{- end }}
{{- if eq (include "hicache-nixl.hugepages" .) "pod" }}
{{ include "hicache-nixl.hugepagesVolumes" . }}
{{- end }}
{{- if eq .Values.connector.install "wheel" }}
- name: connector
  emptyDir: {}
- name: wheels
  {{- toYaml .Values.connector.wheel.volume | nindent 2 }}
{{- end }}
{{- with .Values.server.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Those of a claimTemplate come from the StatefulSet. */}}
{{- define "hicache-nixl.slabVolumes" -}}
{{- $slab := .Values.store.slab -}}
{{- range $disk := until (include "hicache-nixl.slabDisks" . | int) }}
{{- if ne $slab.volume "claimTemplate" }}
- name: disk-{{ $disk }}
  {{- if eq $slab.volume "hostPath" }}
  hostPath:
    path: {{ index $slab.hostPaths $disk | quote }}
    type: Directory
  {{- else if eq $slab.volume "existingClaim" }}
  persistentVolumeClaim:
    claimName: {{ quote $slab.existingClaim }}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels: {{- include "hicache-nixl.podLabels" (list $ "server") | nindent 10 }}
      spec: {{- include "hicache-nixl.slabClaim" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The claim of one disk. */}}
{{- define "hicache-nixl.slabClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.store.slab.storageClassName }}
storageClassName: {{ quote . }}
{{- end }}
resources:
  requests:
    storage: {{ include "hicache-nixl.text" .Values.store.slab.size | quote }}
{{- end -}}

{{/* The stores are not below /var/lib/hicache, which the images keep for user 10001 alone. */}}
{{- define "hicache-nixl.mounts" -}}
- {name: config, mountPath: /etc/hicache-nixl, readOnly: true}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- if .Values.server.writableHome }}
- {name: home, mountPath: /home/hicache}
{{- end }}
- {name: models, mountPath: /var/cache/huggingface}
{{- if eq .Values.store.kind "slab" }}
{{- range $disk := until (include "hicache-nixl.slabDisks" . | int) }}
- {name: disk-{{ $disk }}, mountPath: /hicache/disk-{{ $disk }}}
{{- end }}
{{- else if eq .Values.store.kind "files" }}
- {name: shared, mountPath: /hicache/shared}
{{- end }}
{{- if include "hicache-nixl.credentialsFile" . }}
- {name: credentials, mountPath: /etc/hicache-nixl-credentials, readOnly: true}
{{- end }}
{{- if and (eq .Values.store.kind "s3") .Values.store.s3.ca.existingConfigMap }}
- {name: ca, mountPath: /etc/hicache-nixl-ca, readOnly: true}
{{- end }}
{{- if eq .Values.connector.install "wheel" }}
- {name: connector, mountPath: /opt/hicache-nixl, readOnly: true}
{{- end }}
{{- with .Values.server.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
