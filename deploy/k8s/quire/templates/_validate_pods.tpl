{{/* Refuses values of pods that Kubernetes or a service would refuse later, or accept with another meaning. */}}

{{- define "quire.validateQuantity" -}}
{{- if and (ne (toString .text) "") (not (include "quire.bytes" (dict "text" .text))) -}}
{{- fail (printf "%s is %q, which is not an amount of memory or storage: write 512Mi, 8Gi, or 8G for powers of 1000" .value (toString .text)) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateMemory" -}}
{{- range $kind := list "requests" "limits" -}}
{{- include "quire.validateQuantity" (dict "text" (dig $kind "memory" "" $.resources) "value" (printf "%s.resources.%s.memory" $.value $kind)) -}}
{{- end -}}
{{- include "quire.validateQuantity" (dict "text" .tmpSize "value" (printf "%s.tmpSize" .value)) -}}
{{- end -}}

{{/* The KV cache of a worker without a GPU is in the memory of its pod, and so is /dev/shm. */}}
{{- define "quire.validatePoolMemory" -}}
{{- $value := printf "workers[%s]" .name -}}
{{- include "quire.validateMemory" (dict "resources" .resources "tmpSize" .tmpSize "value" $value) -}}
{{- include "quire.validateQuantity" (dict "text" .shmSize "value" (printf "%s.shmSize" $value)) -}}
{{- include "quire.validateQuantity" (dict "text" .cacheSize "value" (printf "%s.cacheSize" $value)) -}}
{{- if and .kvCacheMemory (not (include "quire.bytes" (dict "text" .kvCacheMemory))) -}}
{{- fail (printf "%s.kvCacheMemory is %q, which is not an amount of memory: write 8G or 8Gi (powers of 1024), or 512M" $value .kvCacheMemory) -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" .resources -}}
{{- if $limit -}}
{{- $bytes := include "quire.bytes" (dict "text" $limit) | int64 -}}
{{- if and .kvCacheMemory (eq .backend "cpu") (ne .executor "sim") (ge (include "quire.bytes" (dict "text" .kvCacheMemory "binary" true) | int64) $bytes) -}}
{{- fail (printf "%s.kvCacheMemory is %s, but the pod's memory limit is %s, which must hold the weights too: set a larger resources.limits.memory, or a smaller kvCacheMemory" $value .kvCacheMemory (toString $limit)) -}}
{{- end -}}
{{- $shm := include "quire.shmSize" . -}}
{{- if and $shm (ge (include "quire.bytes" (dict "text" $shm) | int64) $bytes) -}}
{{- fail (printf "%s.shmSize is %s, but it counts towards the pod's memory, whose limit is %s: set a larger resources.limits.memory" $value $shm (toString $limit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* GPUs are counted by gpuCount. Another GPU resource beside them would give the pod two kinds of GPUs. */}}
{{- define "quire.validateGpus" -}}
{{- $pool := . -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $name, $_ := dig $kind dict $pool.resources -}}
{{- if regexMatch "(^|[.])nvidia[.]com/|/gpu$|/mig-" $name -}}
{{- fail (printf "pool %q has %s in resources.%s: set gpuCount instead, and gpuResource to %s if it is not nvidia.com/gpu" $pool.name $name $kind $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (contains "/mig-" .gpuResource) (gt (int .gpuCount) 1) -}}
{{- fail (printf "pool %q has gpuCount %d of %s: GPUs cannot exchange data between MIG slices, so set gpuCount to 1" .name (int .gpuCount) .gpuResource) -}}
{{- end -}}
{{- end -}}

{{/* Labels that Kubernetes would refuse: (dict "labels" map "value" "commonLabels"). */}}
{{- define "quire.validateLabels" -}}
{{- range $key, $text := .labels -}}
{{- if not (regexMatch "^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$" (toString $text)) -}}
{{- fail (printf "%s.%s is %q, which is not a label value: write at most 63 letters, digits, dashes, dots and underscores, beginning and ending with a letter or digit" $.value $key (toString $text)) -}}
{{- end -}}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $key) -}}
{{- fail (printf "%s has the key %q, which is not a label key: write a name of at most 63 characters, after a DNS prefix and / if it has one" $.value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateAllLabels" -}}
{{- include "quire.validateLabels" (dict "labels" .Values.commonLabels "value" "commonLabels") -}}
{{- $parts := dict "gateway" .Values.gateway "redis" .Values.redis -}}
{{- range include "quire.models" . | fromJsonArray }}{{ $_ := set $parts (printf "models[%s].scheduler" .name) .scheduler }}{{ end -}}
{{- range include "quire.pools" . | fromJsonArray }}{{ $_ := set $parts (printf "workers[%s]" .name) . }}{{ end -}}
{{- range $name, $part := $parts -}}
{{- range list "labels" "podLabels" "nodeSelector" -}}
{{- include "quire.validateLabels" (dict "labels" (get $part . | default dict) "value" (printf "%s.%s" $name .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validatePods" -}}
{{- include "quire.validateAllLabels" . -}}
{{- if regexMatch "://|[ @]" .Values.image.registry -}}
{{- fail (printf "image.registry is %q: write a host and a path, such as registry.example.com/quire, without https:// and tag" .Values.image.registry) -}}
{{- end -}}
{{- include "quire.validateMemory" (dict "resources" .Values.gateway.resources "tmpSize" .Values.gateway.tmpSize "value" "gateway") -}}
{{- include "quire.validateMemory" (dict "resources" .Values.redis.resources "tmpSize" "" "value" "redis") -}}
{{- range include "quire.models" . | fromJsonArray -}}
{{- include "quire.validateMemory" (dict "resources" .scheduler.resources "tmpSize" .scheduler.tmpSize "value" (printf "models[%s].scheduler" .name)) -}}
{{- end -}}
{{- range include "quire.pools" . | fromJsonArray -}}
{{- include "quire.validatePoolMemory" . -}}
{{- include "quire.validateGpus" . -}}
{{- end -}}
{{- $service := .Values.gateway.service -}}
{{- if and $service.externalTrafficPolicy (eq $service.type "ClusterIP") -}}
{{- fail "gateway.service.externalTrafficPolicy is set, but a ClusterIP has no external traffic: set gateway.service.type to NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and $service.loadBalancerClass (ne $service.type "LoadBalancer") -}}
{{- fail (printf "gateway.service.loadBalancerClass is set, but gateway.service.type is %s: set it to LoadBalancer" $service.type) -}}
{{- end -}}
{{- $pool := .Values.gateway.inferencePool -}}
{{- if and $pool.enabled (or (not $pool.endpointPicker) (not .Values.gateway.http.enabled)) -}}
{{- fail "gateway.inferencePool.enabled needs gateway.inferencePool.endpointPicker (a Service) and gateway.http.enabled" -}}
{{- end -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{- if and .Values.tracing.otlpEndpoint $egress.enabled (not $egress.extra) (not (and $egress.gateway $egress.scheduler $egress.worker)) -}}
{{- fail "networkPolicy.egress blocks the export of traces: add the address of tracing.otlpEndpoint to networkPolicy.egress.extra, or to its gateway, scheduler and worker" -}}
{{- end -}}
{{- end -}}
