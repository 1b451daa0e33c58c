{{/* Names, labels, and the lists of models and pools. */}}

{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ include "quire.shortened" .Values.fullnameOverride }}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{ include "quire.shortened" .Release.Name }}
{{- else -}}
{{ include "quire.shortened" (printf "%s-%s" .Release.Name $name) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* At most 40 characters. Long names that begin alike stay different, because they end with a digest of the whole name. */}}
{{- define "quire.shortened" -}}
{{- if gt (len .) 40 -}}
{{ printf "%s-%s" (trunc 31 . | trimSuffix "-") (sha256sum . | trunc 8) }}
{{- else -}}
{{ trimSuffix "-" . }}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component: (dict "root" $ "component" "worker" "name" "a100"). */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- with .name }}
quire/{{ ternary "pool" "model" (eq $.component "worker") }}: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of objects. Pods get fewer, because a label that changes with the chart version would restart them all.
     `labels` are the user's labels for this object, in addition to commonLabels. */}}
{{- define "quire.labels" -}}
{{- $own := dict "app.kubernetes.io/part-of" "quire" "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/version" (include "quire.versionLabel" .root.Chart.AppVersion) -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | include "quire.versionLabel") -}}
{{- $own = merge $own (include "quire.selectorLabels" . | fromYaml) (.extraLabels | default dict) -}}
{{ include "quire.mergedLabels" (dict "own" $own "more" (dict "commonLabels" .root.Values.commonLabels "labels" .labels)) }}
{{- end -}}

{{/* Metadata of an object: (dict "root" $ "component" "gateway" "objectName" "..." "annotations" map), and what quire.labels takes. */}}
{{- define "quire.metadata" -}}
name: {{ .objectName | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
{{- with merge dict (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The chart's labels (`own`) and the user's (`more`, by the name of their value). The user's may replace informative
     labels, but no label used in selectors. */}}
{{- define "quire.mergedLabels" -}}
{{- $labels := .own -}}
{{- range $value, $more := .more -}}
{{- range $key, $text := $more -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component|managed-by)|quire/(model|pool|scrape))$" $key -}}
{{- fail (printf "%s sets the label %s, which the chart or Helm uses in selectors: use another label" $value $key) -}}
{{- end -}}
{{- $_ := set $labels $key $text -}}
{{- end -}}
{{- end -}}
{{ toYaml $labels }}
{{- end -}}

{{/* A version as a label: no + (build metadata), at most 63 characters. */}}
{{- define "quire.versionLabel" -}}
{{ replace "+" "_" . | trunc 63 | trimAll "-_." }}
{{- end -}}

{{/* Image of a component. `own`: the complete image, if set. */}}
{{- define "quire.image" -}}
{{- $tag := default (replace "+" "_" .root.Chart.AppVersion) .root.Values.image.tag -}}
{{ default (printf "%squire-%s:%s%s" (include "quire.registry" .root) .service $tag (.suffix | default "")) .own }}
{{- end -}}

{{/* image.registry with a slash; empty without a registry. */}}
{{- define "quire.registry" -}}
{{- with .Values.image.registry | trimSuffix "/" }}{{ . }}/{{ end -}}
{{- end -}}

{{/* An image of Docker Hub, from image.registry if it is set. */}}
{{- define "quire.mirrored" -}}
{{- $registry := include "quire.registry" .root -}}
{{- if and $registry (hasPrefix "docker.io/" .image) -}}
{{ printf "%s%s" $registry (trimPrefix "docker.io/" .image) }}
{{- else -}}
{{ .image }}
{{- end -}}
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- default (ternary (include "quire.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* `entry` merged over `defaults`, as JSON. Maps are merged by key as in Helm: null removes a key. A null in a security context stays,
     because it removes a field of the context of all pods. */}}
{{- define "quire.over" -}}
{{- $merged := deepCopy .defaults -}}
{{- range $key, $value := .entry -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $key -}}
{{- else if hasSuffix "SecurityContext" $key -}}
{{- $kept := get $merged $key | default dict -}}
{{- range $field, $setting := $value }}{{ $_ := set $kept $field $setting }}{{ end -}}
{{- $_ := set $merged $key $kept -}}
{{- else if kindIs "map" $value -}}
{{- $default := get $merged $key | default dict -}}
{{- $_ := include "quire.over" (dict "defaults" $default "entry" $value) | fromJson | set $merged $key -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $merged }}
{{- end -}}

{{/* Entries of `models` with defaults, as a JSON list. They are computed once for all templates of a rendering. */}}
{{- define "quire.models" -}}
{{- if not (hasKey .Values "computedModels") -}}
{{- $_ := include "quire.computedModels" . | set .Values "computedModels" -}}
{{- end -}}
{{ get .Values "computedModels" }}
{{- end -}}

{{- define "quire.computedModels" -}}
{{- $models := list -}}
{{- $scheduler := include "quire.over" (dict "defaults" .Values.scheduler "entry" .Values.modelDefaults.scheduler) | fromJson -}}
{{- range .Values.models -}}
{{- $model := include "quire.over" (dict "defaults" $.Values.modelDefaults "entry" .) | fromJson -}}
{{- $_ := set $model "servedName" (default $model.name $model.servedName) -}}
{{- $_ := include "quire.over" (dict "defaults" $scheduler "entry" (.scheduler | default dict)) | fromJson | set $model "scheduler" -}}
{{- $models = append $models $model -}}
{{- end -}}
{{ toJson $models }}
{{- end -}}

{{/* Entries of `workers` with defaults, as a JSON list. `modelSpec` is the entry of their model. */}}
{{- define "quire.pools" -}}
{{- if not (hasKey .Values "computedPools") -}}
{{- $_ := include "quire.computedPools" . | set .Values "computedPools" -}}
{{- end -}}
{{ get .Values "computedPools" }}
{{- end -}}

{{- define "quire.computedPools" -}}
{{- $byName := dict -}}
{{- range include "quire.models" . | fromJsonArray -}}
{{- $_ := set $byName .name . -}}
{{- end -}}
{{- $pools := list -}}
{{- range .Values.workers -}}
{{- $gpuCount := default $.Values.workerDefaults.gpuCount .gpuCount | int -}}
{{- $kind := dict "resources" (include "quire.resourcesOfKind" $gpuCount | fromJson) -}}
{{- $defaults := include "quire.over" (dict "defaults" $kind "entry" $.Values.workerDefaults) | fromJson -}}
{{- $pool := include "quire.over" (dict "defaults" $defaults "entry" .) | fromJson -}}
{{- $_ := set $pool "backend" (default (ternary "cuda" "cpu" (gt (int $pool.gpuCount) 0)) $pool.backend) -}}
{{- if not (hasKey $byName $pool.model) -}}
{{- fail (printf "pool %q has model %q, which is not a name in models (%s): add it to models, or correct it" $pool.name $pool.model (keys $byName | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and (ne $pool.role "both") (not $pool.kvTransfer) -}}
{{- fail (printf "pool %q has role %s, but its streams cannot move: set kvTransfer for it and the other pools of the model" $pool.name $pool.role) -}}
{{- end -}}
{{- $_ := set $pool "modelSpec" (get $byName $pool.model) -}}
{{- if and (not $pool.kvCacheMemory) (eq $pool.backend "cpu") (not (int $pool.numBlocks)) -}}
{{- $_ := set $pool "kvCacheMemory" "1G" -}}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{ toJson $pools }}
{{- end -}}

{{/* Requests and limits of a worker pod that sets none, as JSON. Each GPU has its own process. */}}
{{- define "quire.resourcesOfKind" -}}
{{- if . -}}
{{- $requests := dict "cpu" (mul 4 . | toString) "memory" (printf "%dGi" (mul 16 .)) -}}
{{ dict "requests" $requests "limits" (dict "memory" (printf "%dGi" (mul 32 .))) | toJson }}
{{- else -}}
{{ dict "requests" (dict "cpu" "2" "memory" "4Gi") "limits" (dict "memory" "8Gi") | toJson }}
{{- end -}}
{{- end -}}

{{/* The schedulers of a model: all addresses of their headless Service. Their number may change without a new flag. */}}
{{- define "quire.schedulerAddress" -}}
{{- $service := printf "%s-scheduler-%s" (include "quire.fullname" .root) .model.name -}}
{{ printf "dns:///%s.%s.svc.%s:%d" $service .root.Release.Namespace .root.Values.clusterDomain (int .root.Values.ports.scheduler) }}
{{- end -}}

{{/* The update strategy of a Deployment: new pods start before old ones are terminated. */}}
{{- define "quire.strategy" -}}
{{- $own := dict "type" "RollingUpdate" "rollingUpdate" (dict "maxUnavailable" 0 "maxSurge" 1) -}}
{{ default $own .updateStrategy | toYaml }}
{{- end -}}

{{/* Shutdown times, all computed from drainSeconds. */}}
{{- define "quire.preStopSeconds" -}}
{{ max 1 (min 10 (div (int .) 6)) }}
{{- end -}}

{{- define "quire.graceSeconds" -}}
{{ add (div (mul 3 (int .drainSeconds)) 2) 10 (default 0 .preStop) }}
{{- end -}}

{{/* Time for a rollout of gateways to progress: the longest start of a worker, and five minutes for its node. */}}
{{- define "quire.progressSeconds" -}}
{{- $longest := 600 -}}
{{- range include "quire.pools" . | fromJsonArray }}{{ $longest = max $longest (int .startupSeconds) }}{{ end -}}
{{ add $longest 300 }}
{{- end -}}

{{- define "quire.triggerAuthentication" -}}
{{- with .Values.keda.authenticationRef -}}
authenticationRef:
  name: {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity of Kubernetes (`8Gi`, `500M`, `1.5G`). With `binary` K, M, G and T are powers of 1024, as in Quire's
     flags. Empty if it is not a quantity: (dict "text" "8Gi"). */}}
{{- define "quire.bytes" -}}
{{- $powers := dict "" 0 "k" 1 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6 -}}
{{- $text := toString .text -}}
{{- if regexMatch "^[0-9]+([.][0-9]+)?([kKMGTPE]i?)?$" $text -}}
{{- $unit := regexFind "[kKMGTPE]?i?$" $text -}}
{{- $base := ternary 1024.0 1000.0 (or (hasSuffix "i" $unit) (.binary | default false)) -}}
{{- $bytes := trimSuffix $unit $text | float64 -}}
{{- range until (get $powers (trimSuffix "i" $unit) | int) }}{{ $bytes = mulf $bytes $base }}{{ end -}}
{{ $bytes | int64 }}
{{- end -}}
{{- end -}}

{{/* gRPC services for clients outside the cluster, as a JSON list. AdminService and RolloutService are not among them. */}}
{{- define "quire.publicServices" -}}
{{ list "quire.v1.InferenceService" "quire.v1.SessionService" "inference.GRPCInferenceService" "vllm.grpc.engine.VllmEngine" "grpc.health.v1.Health" "grpc.reflection.v1.ServerReflection" "grpc.reflection.v1alpha.ServerReflection" | toJson }}
{{- end -}}

{{/* appProtocol for proxies in front of gateways. */}}
{{- define "quire.gatewayProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (not (empty .Values.gateway.tls.existingSecret)) }}
{{- end -}}

{{/* Listen address: all addresses of the pod. */}}
{{- define "quire.anyHost" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end -}}
