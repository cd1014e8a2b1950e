{{/* What of the user's own flags, variables, volumes and containers collides with the chart's. */}}

{{- define "hicache-nixl.validateArguments" -}}
{{- $secret := list "--api-key" "--admin-api-key" "--ssl-keyfile-password" -}}
{{- $values := dict
  "--model-path" "model.path" "--model" "model.path" "--revision" "model.revision"
  "--served-model-name" "model.servedName"
  "--host" "service" "--port" "service.port"
  "--tp" "server.tensorParallelSize" "--tp-size" "server.tensorParallelSize" "--tensor-parallel-size" "server.tensorParallelSize"
  "--dp" "server.gpus and server.tensorParallelSize" "--dp-size" "server.gpus and server.tensorParallelSize"
  "--data-parallel-size" "server.gpus and server.tensorParallelSize"
  "--page-size" "hicache.pageSize" "--hicache-ratio" "hicache.ratio" "--hicache-size" "hicache.size"
  "--hicache-mem-layout" "hicache.layout" "--hicache-io-backend" "hicache.ioBackend"
  "--hicache-write-policy" "hicache.writePolicy" "--hicache-storage-prefetch-policy" "hicache.prefetchPolicy"
  "--hicache-storage-backend" "connector.settings" "--hicache-storage-backend-extra-config" "hicache.extraConfig"
  "--enable-metrics" "metrics.enabled" -}}
{{/* Ranks that attend to requests of their own share the GPUs of one copy: no value says that. */}}
{{- if and (has "--enable-dp-attention" .Values.server.extraArgs) (eq "1" (include "hicache-nixl.dataParallel" .)) -}}
{{- $values = omit $values "--dp" "--dp-size" "--data-parallel-size" -}}
{{- end -}}
{{- $pod := "the ranks of a server are the GPUs of one pod" -}}
{{- $http := "probes and Service speak HTTP; end TLS at the Ingress" -}}
{{- $never := dict
  "--pp" $pod "--pp-size" $pod "--pipeline-parallel-size" $pod "--nnodes" $pod "--node-rank" $pod
  "--ssl-certfile" $http "--ssl-keyfile" $http "--ssl-keyfile-password" $http
  "--config" "the chart does not see what that file sets; write the flags here"
  "--disable-radix-cache" "the KV cache needs it" -}}
{{- range $name, $words := dict "server.command" .Values.server.command "server.extraArgs" .Values.server.extraArgs -}}
{{- $next := append (rest $words) "" -}}
{{- range $at, $word := $words -}}
{{- $parts := splitList "=" $word -}}
{{- $flag := first $parts -}}
{{- $short := and (hasPrefix "--" $flag) (ge (len $flag) 5) -}}
{{- $value := gt (len $parts) 1 | ternary (rest $parts | join "=") (index $next $at) -}}
{{- range $secret -}}
{{- if and $short (hasPrefix $flag .) (ne $flag "--ssl-keyfile") (not (regexMatch "^[$][(][A-Za-z0-9_]+[)]$" $value)) -}}
{{- fail (printf "%s has a secret in %s; write $(NAME), and take NAME from a Secret in server.extraEnv" $name $flag) -}}
{{- end -}}
{{- end -}}
{{- if eq $name "server.extraArgs" -}}
{{/* SGLang takes the beginning of a flag for the flag. */}}
{{- range $own, $reason := $never -}}
{{- if or (eq $flag $own) (and $short (hasPrefix $flag $own)) -}}
{{- fail (printf "server.extraArgs has %s: %s" $flag $reason) -}}
{{- end -}}
{{- end -}}
{{- range $own, $value := $values -}}
{{- if or (eq $flag $own) (and $short (hasPrefix $flag $own)) -}}
{{- fail (printf "server.extraArgs has %s, which the chart sets; set %s" $flag $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables. The chart's own are those that it renders without the user's. */}}
{{- define "hicache-nixl.validateVariables" -}}
{{- $names := list -}}
{{- range include "hicache-nixl.env" . | fromYamlArray -}}{{- $names = append $names .name -}}{{- end -}}
{{- $own := slice $names 0 (sub (len $names) (len .Values.server.extraEnv) | int) -}}
{{- range .Values.server.extraEnv -}}
{{- if hasPrefix "HICACHE_NIXL_" .name -}}
{{- fail (printf "server.extraEnv has %s; set connector.settings, which the chart checks, or connector.saltSecret" .name) -}}
{{- end -}}
{{- if has .name $own -}}
{{- fail (printf "server.extraEnv has %s, which the chart sets, or which it has twice; leave it out" .name) -}}
{{- end -}}
{{- $own = append $own .name -}}
{{- $secret := "(?i)secret|passw|token$|(^|_)pass$|(access|api|private|auth)_?key(_id)?$" -}}
{{- if and .value (regexMatch $secret .name) (not (regexMatch "^[$][(][A-Za-z0-9_]+[)]$" .value)) -}}
{{- fail (printf "server.extraEnv has %s in clear; take it from a Secret with valueFrom" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Volumes, mounts and containers. */}}
{{- define "hicache-nixl.validateExtras" -}}
{{- $volumes := list -}}
{{- if and (eq .Values.store.kind "slab") (eq .Values.store.slab.volume "claimTemplate") -}}
{{- range $disk := until (int .Values.store.slab.volumes) -}}{{- $volumes = append $volumes (printf "disk-%d" $disk) -}}{{- end -}}
{{- end -}}
{{- range include "hicache-nixl.volumes" . | fromYamlArray -}}
{{- if has .name $volumes -}}
{{- fail (printf "server.extraVolumes has the name %s, which the chart uses, or which it has twice; choose another" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range include "hicache-nixl.mounts" . | fromYamlArray -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "server.extraVolumeMounts names %q, which is not a volume; add it to server.extraVolumes" .name) -}}
{{- end -}}
{{- if has (clean .mountPath) $paths -}}
{{- fail (printf "server.extraVolumeMounts has the path %s, where the chart mounts something, or which it has twice; choose another" .mountPath) -}}
{{- end -}}
{{- $paths = append $paths (clean .mountPath) -}}
{{- end -}}
{{- $names := list "server" "hugepages" "install-connector" -}}
{{- range concat .Values.server.extraInitContainers .Values.server.extraContainers -}}
{{- if has .name $names -}}
{{- fail (printf "server.extraContainers or extraInitContainers has the name %s, which the chart uses, or which it has twice; choose another" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
