{{/* Names, labels, and the lists of models and pools. */}}

{{- define "quire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end -}}
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
{{- $registry := empty .root.Values.image.registry | ternary "" (printf "%s/" .root.Values.image.registry) -}}
{{- $tag := default (replace "+" "_" .root.Chart.AppVersion) .root.Values.image.tag -}}
{{ default (printf "%squire-%s:%s%s" $registry .service $tag (.suffix | default "")) .own }}
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- default (ternary (include "quire.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* `entry` merged over `defaults`, as JSON. Maps are merged by key as in Helm: null removes a key. */}}
{{- define "quire.over" -}}
{{- $merged := deepCopy .defaults -}}
{{- range $key, $value := .entry -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $key -}}
{{- else if kindIs "map" $value -}}
{{- $default := get $merged $key | default dict -}}
{{- $_ := include "quire.over" (dict "defaults" $default "entry" $value) | fromJson | set $merged $key -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $merged }}
{{- end -}}

{{/* Entries of `models` with defaults, as a JSON list. */}}
{{- define "quire.models" -}}
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
{{- $byName := dict -}}
{{- range include "quire.models" . | fromJsonArray -}}
{{- $_ := set $byName .name . -}}
{{- end -}}
{{- $pools := list -}}
{{- range .Values.workers -}}
{{- $pool := include "quire.over" (dict "defaults" $.Values.workerDefaults "entry" .) | fromJson -}}
{{- $_ := set $pool "backend" (default (ternary "cuda" "cpu" (gt (int $pool.gpuCount) 0)) $pool.backend) -}}
{{- if not (hasKey $byName $pool.model) -}}
{{- fail (printf "pool %q has model %q, which is not a name in models (%s): add it to models, or correct it" $pool.name $pool.model (keys $byName | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $_ := set $pool "modelSpec" (get $byName $pool.model) -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{ toJson $pools }}
{{- end -}}

{{/* The schedulers of a model: all addresses of their headless Service. Their number may change without a new flag. */}}
{{- define "quire.schedulerAddress" -}}
{{- $service := printf "%s-scheduler-%s" (include "quire.fullname" .root) .model.name -}}
{{ printf "dns:///%s.%s.svc.%s:%d" $service .root.Release.Namespace .root.Values.clusterDomain (int .root.Values.ports.scheduler) }}
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

{{/* PromQL: waiting requests per ready worker of the pool's model. */}}
{{- define "quire.waitingQuery" -}}
{{- $labels := printf "namespace=%q, model_name=%q" .root.Release.Namespace .pool.modelSpec.servedName -}}
sum(quire_num_requests_waiting{ {{- $labels -}} }) / clamp_min(sum(quire_workers{ {{- $labels -}} , state="ready"}), 1)
{{- end -}}

{{/* PromQL: used rows on the pool's workers. */}}
{{- define "quire.rowsQuery" -}}
sum(quire_rows_used{namespace="{{ .root.Release.Namespace }}", worker_id=~"{{ include "quire.fullname" .root }}-worker-{{ .pool.name }}-[0-9]+"})
{{- end -}}

{{- define "quire.triggerAuthentication" -}}
{{- with .Values.keda.authenticationRef -}}
authenticationRef:
  name: {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* gRPC services for clients outside the cluster, as a JSON list. AdminService is not among them. */}}
{{- define "quire.publicServices" -}}
{{ list "quire.v1.InferenceService" "grpc.health.v1.Health" "grpc.reflection.v1alpha.ServerReflection" | toJson }}
{{- end -}}

{{/* appProtocol for proxies in front of gateways. */}}
{{- define "quire.gatewayProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (not (empty .Values.gateway.tls.existingSecret)) }}
{{- end -}}

{{/* Listen address: all addresses of the pod. */}}
{{- define "quire.anyHost" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end -}}
