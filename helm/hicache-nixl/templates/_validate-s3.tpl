{{/* The URL of a bucket, by the library's rules, and its credentials. */}}

{{- define "hicache-nixl.validateUrl" -}}
{{- $url := .Values.store.s3.url -}}
{{- $example := "write for example s3://bucket/prefix?endpoint=http://minio:9000" -}}
{{- if not $url -}}
{{- fail (printf "store.s3.url is empty; %s" $example) -}}
{{- end -}}
{{- if or (contains "@" $url) (regexMatch "(?i)[?&;][^=]*(secret|token|key|passw|credential|signature)[^=]*=" $url) -}}
{{- fail "store.s3.url carries a user name or a credential; use store.s3.existingSecret" -}}
{{- end -}}
{{- if regexMatch "[\\x00-\\x20]" $url -}}
{{- fail (printf "store.s3.url holds a space or a line break; %s" $example) -}}
{{- end -}}
{{/* What may be secret is not shown. */}}
{{- $place := splitList "?" $url | first -}}
{{- if not (regexMatch "^s3://[^/]" $place) -}}
{{- fail (printf "store.s3.url = %s is not the URL of a bucket; %s" $place $example) -}}
{{- end -}}
{{- $parts := trimPrefix "s3://" $place | splitList "/" -}}
{{- $bucket := first $parts -}}
{{- $prefix := rest $parts | join "/" -}}
{{- if or (not (regexMatch "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$" $bucket)) (contains ".." $bucket) (regexMatch "^[0-9]+([.][0-9]+){3}$" $bucket) -}}
{{- fail (printf "store.s3.url = %s names the bucket %s: a bucket's name has 3 to 63 small letters, digits, - and single dots, and is no address; %s" $place $bucket $example) -}}
{{- end -}}
{{- if or (not (regexMatch "^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?/?$" $prefix)) (has "." $parts) (has ".." $parts) (gt (len $prefix) 512) -}}
{{- fail (printf "store.s3.url = %s has the prefix %s: names of letters, digits and ._=- with single slashes between, 512 characters at most; %s" $place $prefix $example) -}}
{{- end -}}
{{- if not (regexMatch "^([?][a-z_]+=[^?&#,%]+(&[a-z_]+=[^?&#,%]+)*)?$" (trimPrefix $place $url)) -}}
{{- fail (printf "store.s3.url = %s?... does not go on with name=value and & between; %s" $place $example) -}}
{{- end -}}
{{- $checks := dict
  "endpoint" (list "^https?://([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?/?$" "http:// or https:// with a host, and no more than a port")
  "region" (list "^[A-Za-z0-9-]{1,64}$" "a region such as eu-west-1")
  "addressing" (list "^(path|virtual)$" "path or virtual")
  "ca_bundle" (list "^/" "the absolute name of a file")
  "requests" (list "^(?i)(auto|0*([1-9][0-9]{0,2}|10[01][0-9]|102[0-4]))$" "auto or 1 to 1024") -}}
{{- $seen := dict -}}
{{- range regexFindAll "[?&][a-z_]+=[^&]*" $url -1 -}}
{{- $name := splitList "=" . | first | trimAll "?&" -}}
{{- $value := splitList "=" . | rest | join "=" -}}
{{- if not (hasKey $checks $name) -}}
{{- fail (printf "store.s3.url has the parameter %s; known are %s" $name (keys $checks | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "store.s3.url has the parameter %s twice; keep one" $name) -}}
{{- end -}}
{{- $_ := set $seen $name $value -}}
{{- $check := get $checks $name -}}
{{- $port := eq $name "endpoint" | ternary (regexFind ":[0-9]+/?$" $value | trimAll ":/") "" -}}
{{- if or (not (regexMatch (first $check) $value)) (and $port (or (lt (int $port) 1) (gt (int $port) 65535))) -}}
{{- fail (printf "store.s3.url has %s %s, which is not %s; %s" (eq $name "endpoint" | ternary "the endpoint" (printf "the parameter %s =" $name)) $value (last $check) $example) -}}
{{- end -}}
{{- end -}}
{{- $requests := .Values.connector.settings.requests -}}
{{- if and $requests $seen.requests (ne (include "hicache-nixl.text" $requests) (regexReplaceAll "^0+" $seen.requests "")) -}}
{{- fail "store.s3.url has the parameter requests and connector.settings.requests is given, another; keep one" -}}
{{- end -}}
{{- if .Values.store.s3.ca.existingConfigMap -}}
{{- if $seen.ca_bundle -}}
{{- fail "store.s3.url has the parameter ca_bundle and store.s3.ca.existingConfigMap is given; keep one" -}}
{{- end -}}
{{- if or .Values.minio.enabled (hasPrefix "http:" (default "" $seen.endpoint)) -}}
{{- fail "store.s3.ca.existingConfigMap is given and the endpoint is http, which has no certificate; leave it out, or write https" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.minio.enabled $seen.endpoint -}}
{{- fail "store.s3.url has an endpoint and minio.enabled is set; leave the one or the other out" -}}
{{- end -}}
{{- end -}}

{{- define "hicache-nixl.validateCredentials" -}}
{{- $s3 := .Values.store.s3 -}}
{{- if and $s3.existingSecret (or $s3.accessKey $s3.secretKey) -}}
{{- fail "store.s3.existingSecret is given, and so are store.s3.accessKey or secretKey; keep the Secret" -}}
{{- end -}}
{{- if ne (empty $s3.accessKey) (empty $s3.secretKey) -}}
{{- fail (printf "store.s3.%s is empty; give both keys, or better store.s3.existingSecret" (empty $s3.accessKey | ternary "accessKey" "secretKey")) -}}
{{- end -}}
{{- range $name := list "accessKey" "secretKey" -}}
{{- if regexMatch "\\s" (get $s3 $name) -}}
{{- fail (printf "store.s3.%s holds a space or a line break, which no key has; give it without" $name) -}}
{{- end -}}
{{- end -}}
{{- $profile := .Values.connector.settings.profile -}}
{{- if and $profile (ne $profile "default") (or $s3.accessKey (and $s3.existingSecret (eq $s3.secretFormat "keys"))) -}}
{{- fail (printf "connector.settings.profile = %s names a section of a credentials file, and store.s3 gives the keys without one; leave it out" $profile) -}}
{{- end -}}
{{- if .Values.minio.enabled -}}
{{- if not $s3.accessKey -}}
{{- fail "minio.enabled needs store.s3.accessKey and secretKey, which MinIO makes its owner; give both" -}}
{{- end -}}
{{- range $name, $least := dict "accessKey" 3 "secretKey" 8 -}}
{{- if lt (len (get $s3 $name)) $least -}}
{{- fail (printf "store.s3.%s has fewer than %d characters, which MinIO refuses; give a longer one" $name $least) -}}
{{- end -}}
{{- end -}}
{{- $_ := include "hicache-nixl.bytes" (list "minio.size" .Values.minio.size "quantity") -}}
{{- end -}}
{{- end -}}
