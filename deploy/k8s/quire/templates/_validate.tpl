{{/* Refuses invalid combinations of values. Each error names the value to set. */}}

{{- define "quire.validate" -}}
{{- include "quire.validateFullname" . -}}
{{- include "quire.validateModels" . -}}
{{- include "quire.validatePools" . -}}
{{- include "quire.validatePods" . -}}
{{- include "quire.validateAgreement" . -}}
{{- include "quire.validateRedis" . -}}
{{- include "quire.validateScaling" . -}}
{{- include "quire.validatePorts" . -}}
{{- include "quire.validateNetwork" . -}}
{{- include "quire.validateTrust" . -}}
{{- include "quire.validateAdmin" . -}}
{{- include "quire.validateJwt" . -}}
{{- include "quire.validateKeyLimits" . -}}
{{- end -}}

{{/* A release name may contain dots and begin with a digit, a Service name must not. */}}
{{- define "quire.validateFullname" -}}
{{- $fullname := include "quire.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "object names would begin with %q, but they must begin with a lowercase letter and contain only lowercase letters, digits and dashes: set fullnameOverride, or choose another release name" $fullname) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateModels" -}}
{{- $fullname := include "quire.fullname" . -}}
{{- $names := dict -}}
{{- $served := dict -}}
{{- $used := dict -}}
{{- range .Values.workers }}{{ $_ := set $used .model true }}{{ end -}}
{{- range include "quire.models" . | fromJsonArray -}}
{{- if hasKey $names .name -}}
{{- fail (printf "models has two entries named %q: give each its own name" .name) -}}
{{- end -}}
{{- if hasKey $served .servedName -}}
{{- fail (printf "models %q and %q are both served as %q: set another servedName for one of them" (get $served .servedName) .name .servedName) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- $_ := set $served .servedName .name -}}
{{- include "quire.validateName" (dict "name" (printf "%s-scheduler-%s" $fullname .name) "fullname" $fullname "what" "model") -}}
{{- if not (hasKey $used .name) -}}
{{- fail (printf "no pool in workers serves model %q: add a pool with model: %s, or remove the model" .name .name) -}}
{{- end -}}
{{- include "quire.validateStorage" . -}}
{{- end -}}
{{- end -}}

{{/* The name of a StatefulSet plus a hash becomes a pod label, which is limited to 63 characters, like the name of a Service. A
     LeaderWorkerSet has a StatefulSet per replica, with the number of the replica in its name. */}}
{{- define "quire.validateName" -}}
{{- $kind := .kind | default "Service" -}}
{{- $limit := dict "Service" 63 "StatefulSet" 52 "LeaderWorkerSet" 48 | dig $kind 0 -}}
{{- if gt (len .name) $limit -}}
{{- fail (printf "the name of %s %s would have %d characters, but the limit is %d: shorten fullnameOverride or the release name (%s), or the name of the %s" $kind .name (len .name) $limit .fullname .what) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateStorage" -}}
{{- $storage := .storage -}}
{{- $kinds := list -}}
{{- range list "existingClaim" "image" "hostPath" "emptyDirSize" "claimSize" }}{{ if get $storage . }}{{ $kinds = append $kinds . }}{{ end }}{{ end -}}
{{- $downloads := include "quire.downloads" . -}}
{{- range list "emptyDirSize" "claimSize" -}}
{{- include "quire.validateQuantity" (dict "text" (get $storage .) "value" (printf "models[%s].storage.%s" $.name .)) -}}
{{- end -}}
{{- if gt (len $kinds) 1 -}}
{{- fail (printf "model %q has storage.%s: set only one of them" .name (join " and storage." $kinds)) -}}
{{- end -}}
{{- if and .source (not (regexMatch "^hf://[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*@[0-9a-f]{40}$" .source)) -}}
{{- fail (printf "model %q has source %q: write hf://ORGANIZATION/NAME@COMMIT, with the 40 hexadecimal digits of a commit, because a branch or tag may change" .name .source) -}}
{{- end -}}
{{- if and .source .download.command -}}
{{- fail (printf "model %q has source and download.command: set only one of them" .name) -}}
{{- end -}}
{{- if and .source (ne .path "/opt/quire/demo-model") -}}
{{- fail (printf "model %q has source and path %s: remove path, because source determines the folder" .name .path) -}}
{{- end -}}
{{- if and $storage.image (not (regexMatch "@sha256:[0-9a-f]{64}$" $storage.image)) -}}
{{- fail (printf "model %q has storage.image %s: add its digest, @sha256:..., because a tag may change" .name $storage.image) -}}
{{- end -}}
{{- if and $storage.image $downloads -}}
{{- fail (printf "model %q has storage.image, which is read-only, and a download: set only one of them" .name) -}}
{{- end -}}
{{- if and $downloads (not $kinds) -}}
{{- fail (printf "model %q has %s but no storage to download to: set storage.emptyDirSize, storage.claimSize, storage.existingClaim or storage.hostPath" .name (ternary "source" "download.command" (not (empty .source)))) -}}
{{- end -}}
{{- $path := include "quire.modelPath" . -}}
{{- if and $kinds (not (hasPrefix "/models/" (printf "%s/" $path))) -}}
{{- fail (printf "model %q has storage, which is mounted at /models, but its path is %s: set path to a folder under /models" .name .path) -}}
{{- end -}}
{{- if and (not $kinds) (hasPrefix "/models/" (printf "%s/" $path)) -}}
{{- fail (printf "model %q has path %s but no storage, so nothing is mounted there: set one of storage.existingClaim, storage.image, storage.hostPath, storage.emptyDirSize, storage.claimSize" .name .path) -}}
{{- end -}}
{{- if and (or $storage.emptyDirSize $storage.claimSize) (not $downloads) -}}
{{- fail (printf "model %q has an empty volume as storage, but no download: set source or download.command, or use storage.existingClaim" .name) -}}
{{- end -}}
{{- if and $storage.storageClass (not $storage.claimSize) -}}
{{- fail (printf "model %q has storage.storageClass without storage.claimSize: set storage.claimSize too" .name) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validatePools" -}}
{{- $fullname := include "quire.fullname" . -}}
{{- $names := dict -}}
{{- range include "quire.pools" . | fromJsonArray -}}
{{- if hasKey $names .name -}}
{{- fail (printf "workers has two pools named %q: give each its own name" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- include "quire.validateName" (dict "name" (printf "%s-worker-%s" $fullname .name) "fullname" $fullname "what" "pool" "kind" (ternary "LeaderWorkerSet" "StatefulSet" (gt (int .nodesPerWorker) 1))) -}}
{{- if and (eq .backend "cpu") (int .gpuCount) -}}
{{- fail (printf "pool %q has gpuCount %d but backend cpu: set gpuCount to 0, or leave backend empty" .name (int .gpuCount)) -}}
{{- end -}}
{{- if and (eq .backend "cuda") (not (int .gpuCount)) -}}
{{- fail (printf "pool %q has backend cuda but gpuCount 0: set gpuCount to 1 or more" .name) -}}
{{- end -}}
{{- if and (gt (int .nodesPerWorker) 1) (ne .backend "cuda") -}}
{{- fail (printf "pool %q has nodesPerWorker %d but backend %s: several nodes need GPUs, so set gpuCount to the GPUs of each node" .name (int .nodesPerWorker) .backend) -}}
{{- end -}}
{{- if and (gt (int .nodesPerWorker) 1) .modelSpec.storage.claimSize -}}
{{- fail (printf "pool %q has nodesPerWorker %d, but its model has storage.claimSize, a volume per pod of a StatefulSet: use storage.existingClaim, image, hostPath or emptyDirSize" .name (int .nodesPerWorker)) -}}
{{- end -}}
{{- if and (ne .backend "cuda") (or (eq .dtype "float16") (eq .kvCacheDtype "fp8")) -}}
{{- fail (printf "pool %q has dtype %s and kvCacheDtype %s but no GPU: float16 and fp8 need gpuCount 1 or more" .name .dtype .kvCacheDtype) -}}
{{- end -}}
{{- if and (gt (mul (int .gpuCount) (int .nodesPerWorker)) 1) (or .kvHostMemory .kvDisk .kvTransfer) -}}
{{- fail (printf "pool %q has %s, whose blocks cannot move: leave kvHostMemory and kvDisk empty and kvTransfer false for it" .name (include "quire.gpusOfWorker" .)) -}}
{{- end -}}
{{- if and (eq .executor "sim") (int .gpuCount) -}}
{{- fail (printf "pool %q has executor sim, which uses no GPU: set gpuCount to 0" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A scheduler leases only workers with the same settings as its first one (SHARED_FACTS in the scheduler). */}}
{{- define "quire.validateAgreement" -}}
{{- $firsts := dict -}}
{{- range include "quire.pools" . | fromJsonArray -}}
{{- if hasKey $firsts .model -}}
{{- include "quire.validatePair" (dict "first" (get $firsts .model) "pool" .) -}}
{{- else -}}
{{- $_ := set $firsts .model . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validatePair" -}}
{{- $first := .first -}}
{{- $pool := .pool -}}
{{- range list "executor" "determinism" "dtype" "kvCacheDtype" "quantize" "blockSize" "maxModelLen" -}}
{{- $values := list (get $first . | toJson) (get $pool . | toJson) -}}
{{- if ne (index $values 0) (index $values 1) -}}
{{- fail (printf "pools %q and %q of model %q have %s %s: set the same %s in all of them" $first.name $pool.name $pool.model . (join " and " $values) .) -}}
{{- end -}}
{{- end -}}
{{- $kinds := list (include "quire.poolKind" $first) (include "quire.poolKind" $pool) -}}
{{- if and (ne (index $kinds 0) (index $kinds 1)) (eq $pool.determinism "exact") (eq $pool.executor "model") -}}
{{- fail (printf "pools of model %q have %s, which give different tokens: set the same values in all of them, or set determinism to best_effort" $pool.model (join " and " $kinds)) -}}
{{- end -}}
{{- $sizes := list (include "quire.poolSize" $first) (include "quire.poolSize" $pool) -}}
{{- if and (not (int $pool.maxModelLen)) (ne (index $sizes 0) (index $sizes 1)) -}}
{{- fail (printf "pools %q and %q of model %q have %s, so the maximum sequence length of their workers may differ: set maxModelLen in all of them to a length that fits the smallest KV cache" $first.name $pool.name $pool.model (join " and " $sizes)) -}}
{{- end -}}
{{- if and (not (int $pool.maxModelLen)) (not $pool.kvCacheMemory) (not (int $pool.numBlocks)) -}}
{{- fail (printf "pools %q and %q of model %q leave the size of the KV cache to the workers, so their maximum sequence length may differ: set maxModelLen in all of them to a length that fits the smallest KV cache" $first.name $pool.name $pool.model) -}}
{{- end -}}
{{- end -}}

{{- define "quire.poolKind" -}}
{{ printf "backend %s, %s" .backend (include "quire.gpusOfWorker" .) }}
{{- end -}}

{{/* The values that limit a worker's maximum sequence length if maxModelLen is 0. */}}
{{- define "quire.poolSize" -}}
{{ printf "kvCacheMemory %q, numBlocks %d, %s" .kvCacheMemory (int .numBlocks) (include "quire.gpusOfWorker" .) }}
{{- end -}}

{{- define "quire.gpusOfWorker" -}}
{{ printf "gpuCount %d" (int .gpuCount) }}{{ if gt (int .nodesPerWorker) 1 }}{{ printf " x nodesPerWorker %d" (int .nodesPerWorker) }}{{ end }}
{{- end -}}

{{- define "quire.validateRedis" -}}
{{- $external := .Values.redis.external -}}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret) -}}
{{- fail "redis.enabled is true, but redis.external is set: set redis.enabled to false to use the external Redis" -}}
{{- end -}}
{{- if and $external.url $external.existingSecret -}}
{{- fail "redis.external.url and redis.external.existingSecret are both set: set only one; the secret contains the whole URL" -}}
{{- end -}}
{{- if and .Values.redis.auth.existingSecret (not .Values.redis.enabled) -}}
{{- fail "redis.auth is for the bundled Redis, but redis.enabled is false: set redis.external.passwordSecret to the password of the external Redis" -}}
{{- end -}}
{{- range list "caSecret" "certSecret" "passwordSecret" "sentinelPasswordSecret" -}}
{{- if and (get $external .) (not (or $external.url $external.existingSecret)) -}}
{{- fail (printf "redis.external.%s is set without an external Redis: set redis.external.url or redis.external.existingSecret" .) -}}
{{- end -}}
{{- end -}}
{{- range list "caSecret" "certSecret" -}}
{{- if and (get $external .) $external.url (not (hasPrefix "rediss" $external.url)) -}}
{{- fail (printf "redis.external.%s is set, but redis.external.url does not begin with rediss://: use a rediss:// URL, or remove %s" . .) -}}
{{- end -}}
{{- end -}}
{{- if and $external.sentinelPasswordSecret $external.url (not (contains "+sentinel://" $external.url)) -}}
{{- fail "redis.external.sentinelPasswordSecret is set, but redis.external.url names no Sentinels: write redis+sentinel://HOST:26379,HOST:26379/MASTER/0" -}}
{{- end -}}
{{- if regexMatch "^rediss?([+]sentinel)?://[^/]*:[^/]*@" $external.url -}}
{{- fail "redis.external.url contains a password: put the password into a secret and set redis.external.passwordSecret" -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateScaling" -}}
{{- $budgets := dict "gateway" .Values.gateway.podDisruptionBudget -}}
{{- range include "quire.models" . | fromJsonArray }}{{ $_ := set $budgets (printf "models[%s].scheduler" .name) .scheduler.podDisruptionBudget }}{{ end -}}
{{- range include "quire.pools" . | fromJsonArray }}{{ $_ := set $budgets (printf "workers[%s]" .name) .podDisruptionBudget }}{{ end -}}
{{- range $name, $budget := $budgets -}}
{{- if and $budget.enabled (has (toString $budget.maxUnavailable) (list "0" "0%")) (eq (toString $budget.minAvailable) "") -}}
{{- fail (printf "%s.podDisruptionBudget.maxUnavailable is 0, so nodes could never be drained: set it to 1 or more" $name) -}}
{{- end -}}
{{- end -}}
{{- $hpa := .Values.gateway.autoscaling -}}
{{- if and $hpa.enabled (gt (int $hpa.minReplicas) (int $hpa.maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling.minReplicas is %d, but maxReplicas is %d: set maxReplicas to %d or more" (int $hpa.minReplicas) (int $hpa.maxReplicas) (int $hpa.minReplicas)) -}}
{{- end -}}
{{- if and $hpa.enabled (not (dig "requests" "cpu" "" .Values.gateway.resources)) -}}
{{- fail "gateway.autoscaling is enabled, but its target is a percentage of the CPU request, which is not set: set gateway.resources.requests.cpu" -}}
{{- end -}}
{{- $isScaled := false -}}
{{- range include "quire.pools" . | fromJsonArray -}}
{{- if .autoscaling.enabled -}}
{{- $isScaled = true -}}
{{- if and $.Values.keda.enabled (not $.Values.keda.prometheusAddress) (not .autoscaling.triggers) -}}
{{- fail (printf "pool %q has nothing to scale on: set keda.prometheusAddress, for example to http://prometheus-operated.monitoring:9090, or autoscaling.triggers" .name) -}}
{{- end -}}
{{- if not $.Values.keda.enabled -}}
{{- fail (printf "pool %q has autoscaling.enabled, but keda.enabled is false: set keda.enabled and keda.prometheusAddress" .name) -}}
{{- end -}}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) -}}
{{- fail (printf "pool %q has autoscaling.minReplicas %d but maxReplicas %d: set maxReplicas to %d or more" .name (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) (int .autoscaling.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.keda.enabled (not $isScaled) -}}
{{- fail "keda.enabled is true, but no pool has autoscaling: set autoscaling.enabled in an entry of workers" -}}
{{- end -}}
{{- end -}}

{{/* The gRPC ports may be equal, because they are on different pods. */}}
{{- define "quire.validatePorts" -}}
{{- $ports := .Values.ports -}}
{{- if eq (int $ports.health) (int $ports.metrics) -}}
{{- fail (printf "ports.health and ports.metrics are both %d: set different ports" (int $ports.health)) -}}
{{- end -}}
{{- if eq (int $ports.nodes) (int $ports.worker) -}}
{{- fail (printf "ports.nodes and ports.worker are both %d: set different ports" (int $ports.nodes)) -}}
{{- end -}}
{{- range list "gateway" "scheduler" "worker" "nodes" -}}
{{- $port := get $ports . | int -}}
{{- if or (eq $port (int $ports.health)) (eq $port (int $ports.metrics)) -}}
{{- fail (printf "ports.%s is %d, the same as ports.%s: set different ports" . $port (ternary "health" "metrics" (eq $port (int $ports.health)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateNetwork" -}}
{{- $ingress := .Values.gateway.ingress -}}
{{- if and $ingress.enabled (not $ingress.hosts) -}}
{{- fail "gateway.ingress.enabled is true, but it has no host: set gateway.ingress.hosts, for example to [llm.example.com]" -}}
{{- end -}}
{{- if and .Values.gateway.grpcRoute.enabled (not .Values.gateway.grpcRoute.parentRefs) -}}
{{- fail "gateway.grpcRoute.enabled is true, but it has no parent Gateway: set gateway.grpcRoute.parentRefs, for example to [{name: public}]" -}}
{{- end -}}
{{- $http := .Values.gateway.http -}}
{{- range $name, $port := .Values.ports -}}
{{- if and $http.enabled (eq (int $http.port) (int $port)) (has $name (list "gateway" "health" "metrics")) -}}
{{- fail (printf "gateway.http.port is %d, the same as ports.%s: set different ports" (int $port) $name) -}}
{{- end -}}
{{- end -}}
{{- if and (or $http.ingress.enabled $http.route.enabled) (not $http.enabled) -}}
{{- fail "gateway.http.ingress or gateway.http.route is enabled, but the HTTP API is off: set gateway.http.enabled" -}}
{{- end -}}
{{- if and $http.ingress.enabled (not $http.ingress.hosts) -}}
{{- fail "gateway.http.ingress.enabled is true, but it has no host: set gateway.http.ingress.hosts, for example to [api.example.com]" -}}
{{- end -}}
{{- if and $http.route.enabled (not $http.route.parentRefs) -}}
{{- fail "gateway.http.route.enabled is true, but it has no parent Gateway: set gateway.http.route.parentRefs, for example to [{name: public}]" -}}
{{- end -}}
{{- $service := .Values.gateway.service -}}
{{- if and $service.loadBalancerSourceRanges (ne $service.type "LoadBalancer") -}}
{{- fail (printf "gateway.service.loadBalancerSourceRanges needs a LoadBalancer, but gateway.service.type is %s: set gateway.service.type to LoadBalancer, or use networkPolicy.clients" $service.type) -}}
{{- end -}}
{{- $keys := .Values.gateway.apiKeys -}}
{{- if ne (empty $keys.existingSecret) (empty $keys.testEntry) -}}
{{- fail "only one of gateway.apiKeys.existingSecret and gateway.apiKeys.testEntry is set: set both; helm test uses that entry of the secret" -}}
{{- end -}}
{{- if and .Values.gateway.tls.clientCaSecret (not .Values.gateway.tls.existingSecret) -}}
{{- fail "gateway.tls.clientCaSecret is set, but TLS is off: set gateway.tls.existingSecret too" -}}
{{- end -}}
{{- if and .Values.gateway.tls.clientCaSecret (not .Values.test.tlsSecret) -}}
{{- fail "gateway.tls.clientCaSecret requires client certificates, but helm test has none: set test.tlsSecret to a secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{- if and $egress.enabled (not .Values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.egress.enabled is true, but networkPolicy.enabled is false: set networkPolicy.enabled" -}}
{{- end -}}
{{- if and $egress.enabled (not $egress.extra) (not (and $egress.gateway $egress.scheduler)) (not .Values.redis.enabled) (include "quire.hasRedis" .) -}}
{{- fail "networkPolicy.egress blocks the external Redis: add its address to networkPolicy.egress.extra, or to networkPolicy.egress.gateway and networkPolicy.egress.scheduler" -}}
{{- end -}}
{{- range include "quire.models" . | fromJsonArray -}}
{{- if and $egress.enabled (not $egress.extra) (not $egress.worker) (include "quire.downloads" .) -}}
{{- fail (printf "networkPolicy.egress blocks the download of model %q: add the address of its source to networkPolicy.egress.extra or networkPolicy.egress.worker" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateAdmin" -}}
{{- $admin := .Values.gateway.admin -}}
{{- if and $admin.enabled (not $admin.existingSecret) -}}
{{- fail "gateway.admin.enabled is true, but it has no keys of operators: set gateway.admin.existingSecret" -}}
{{- end -}}
{{- if and $admin.existingSecret (not $admin.enabled) -}}
{{- fail "gateway.admin.existingSecret is set, but the admin port is off: set gateway.admin.enabled" -}}
{{- end -}}
{{- if and $admin.console.enabled (not $admin.enabled) -}}
{{- fail "gateway.admin.console.enabled is true, but the console needs the keys of gateway.admin: set gateway.admin.enabled and gateway.admin.existingSecret" -}}
{{- end -}}
{{- if and .Values.networkPolicy.adminClients (not (and $admin.enabled .Values.networkPolicy.enabled)) -}}
{{- fail "networkPolicy.adminClients is set without an admin port or without network policies: set gateway.admin.enabled and networkPolicy.enabled" -}}
{{- end -}}
{{- $used := dict -}}
{{- range $name := list "gateway" "health" "metrics" }}{{ $_ := set $used (get $.Values.ports $name | int | toString) (printf "ports.%s" $name) }}{{ end -}}
{{- $http := .Values.gateway.http -}}
{{- range list (list $http "gateway.http.port") (list $admin "gateway.admin.port") (list $admin.console "gateway.admin.console.port") -}}
{{- $port := index . 0 -}}
{{- $name := index . 1 -}}
{{- $key := $port.port | int | toString -}}
{{- if $port.enabled -}}
{{- with get $used $key }}{{ fail (printf "%s is %s, the same as %s: set different ports" $name $key .) }}{{ end -}}
{{- $_ := set $used $key $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateJwt" -}}
{{- $jwt := .Values.gateway.jwt -}}
{{- if and (or $jwt.audiences $jwt.jwksUrl $jwt.existingConfigMap $jwt.scope) (not $jwt.issuer) -}}
{{- fail "gateway.jwt has values, but tokens are off: set gateway.jwt.issuer too" -}}
{{- end -}}
{{- if and $jwt.issuer (not $jwt.audiences) -}}
{{- fail "gateway.jwt.issuer is set without audiences: set gateway.jwt.audiences, such as [quire]" -}}
{{- end -}}
{{- if and $jwt.issuer (eq (empty $jwt.jwksUrl) (empty $jwt.existingConfigMap)) -}}
{{- fail "gateway.jwt needs the keys of the issuer: set one of gateway.jwt.jwksUrl and gateway.jwt.existingConfigMap" -}}
{{- end -}}
{{- if and $jwt.issuer (not .Values.gateway.apiKeys.existingSecret) -}}
{{- fail "gateway.jwt is on, but helm test has no token: set gateway.apiKeys.existingSecret and gateway.apiKeys.testEntry too" -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateKeyLimits" -}}
{{- if and (eq .Values.gateway.isolation "tenant") (not .Values.gateway.apiKeys.existingSecret) -}}
{{- fail "gateway.isolation is tenant, but requests have no owners: set gateway.apiKeys.existingSecret too" -}}
{{- end -}}
{{- $limits := .Values.gateway.keyLimits -}}
{{- if and $limits.toml $limits.existingConfigMap -}}
{{- fail "gateway.keyLimits.toml and gateway.keyLimits.existingConfigMap are both set: set only one of them" -}}
{{- end -}}
{{- if and (or $limits.toml $limits.existingConfigMap) (not .Values.gateway.apiKeys.existingSecret) -}}
{{- fail "gateway.keyLimits is set, but its limits apply to owners of API keys: set gateway.apiKeys.existingSecret too" -}}
{{- end -}}
{{- end -}}
