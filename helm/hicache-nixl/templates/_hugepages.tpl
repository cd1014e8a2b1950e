{{/* The one privileged container, in the pod of a server or in the DaemonSet. */}}

{{- define "hicache-nixl.hugepagesContainer" -}}
name: hugepages
image: {{ include "hicache-nixl.image" (list . .Values.toolsImage) | quote }}
imagePullPolicy: {{ .Values.toolsImage.pullPolicy }}
command:
  - bash
  - /scripts/{{ eq (include "hicache-nixl.hugepages" .) "node" | ternary "prepare-node.sh" "raise-hugepages.sh" }}
args:
  - --size
  - {{ include "hicache-nixl.hugepageName" . }}
  {{- if .Values.hugepages.perNuma }}
  - --numa
  {{- end }}
  {{- if eq .Values.hugepages.onShortage "fallback" }}
  - --or-less
  {{- end }}
  - {{ include "hicache-nixl.hugepageCount" . | quote }}
{{- if .Values.hugepages.node.restartKubelet }}
env:
  - name: KUBELET_UNIT
    value: {{ quote .Values.hugepages.node.kubeletUnit }}
{{- end }}
securityContext:
  # The number of hugepages is the node's, in /proc/sys/vm and /sys, which are read-only for a container
  # that is not privileged. No capability alone opens them.
  privileged: true
  # The files belong to user 0.
  runAsUser: 0
  runAsGroup: 0
  runAsNonRoot: false
  # It runs no program but those of its own image.
  readOnlyRootFilesystem: true
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {memory: 128Mi}
volumeMounts:
  - {name: scripts, mountPath: /scripts, readOnly: true}
  - {name: hugepages, mountPath: /sys/kernel/mm/hugepages}
  {{- if .Values.hugepages.perNuma }}
  - {name: numa-nodes, mountPath: /sys/devices/system/node}
  {{- end }}
  {{- if eq (include "hicache-nixl.hugepages" .) "node" }}
  - {name: state, mountPath: /state}
  {{- end }}
{{- end -}}

{{/* What that container mounts. */}}
{{- define "hicache-nixl.hugepagesVolumes" -}}
- name: scripts
  configMap:
    name: {{ include "hicache-nixl.fullname" . }}-scripts
# The /sys of a pod belongs to its network and is mounted read-only for the pod's sandbox, which holds
# even for its privileged containers. The node's is not.
- name: hugepages
  hostPath:
    path: /sys/kernel/mm/hugepages
    type: Directory
{{- if .Values.hugepages.perNuma }}
- name: numa-nodes
  hostPath:
    path: /sys/devices/system/node
    type: Directory
{{- end }}
{{- end -}}
