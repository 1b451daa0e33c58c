{{/* Names, labels and the lists that other templates walk over. */}}

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

{{/* What selects the pods of one component: (dict "root" $ "component" "worker" "name" "a100"). */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- with .name }}
quire/{{ ternary "pool" "model" (eq $.component "worker") }}: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of objects. Pods get less: a label that changes with the chart's version would restart them all. `labels` are
     the user's for this object, which come on top of commonLabels. */}}
{{- define "quire.labels" -}}
{{- $own := dict "app.kubernetes.io/part-of" "quire" "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/version" (include "quire.versionLabel" .root.Chart.AppVersion) -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | include "quire.versionLabel") -}}
{{- $own = merge $own (include "quire.selectorLabels" . | fromYaml) (.extraLabels | default dict) -}}
{{ include "quire.mergedLabels" (dict "own" $own "more" (dict "commonLabels" .root.Values.commonLabels "labels" .labels)) }}
{{- end -}}

{{/* The chart's own labels and the user's: `more` has those by the names of their values. They replace what only tells
     people something, and never what finds objects. */}}
{{- define "quire.mergedLabels" -}}
{{- $labels := .own -}}
{{- range $value, $more := .more -}}
{{- range $key, $text := $more -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component|managed-by)|quire/(model|pool|scrape))$" $key -}}
{{- fail (printf "%s has the label %s, by which the chart and Helm find their objects: choose another name for it" $value $key) -}}
{{- end -}}
{{- $_ := set $labels $key $text -}}
{{- end -}}
{{- end -}}
{{ toYaml $labels }}
{{- end -}}

{{/* A version with build metadata (0.1.0+1a2b) as a label: no +, and 63 characters at most. */}}
{{- define "quire.versionLabel" -}}
{{ replace "+" "_" . | trunc 63 | trimAll "-_." }}
{{- end -}}

{{/* `own`: the whole image where a component names one. */}}
{{- define "quire.image" -}}
{{- $registry := empty .root.Values.image.registry | ternary "" (printf "%s/" .root.Values.image.registry) -}}
{{- $tag := default (replace "+" "_" .root.Chart.AppVersion) .root.Values.image.tag -}}
{{ default (printf "%squire-%s:%s%s" $registry .service $tag (.suffix | default "")) .own }}
{{- end -}}

{{- define "quire.serviceAccountName" -}}
{{- default (ternary (include "quire.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* `entry` over `defaults`, as JSON. Maps are merged as Helm does it everywhere else: null takes a key away. */}}
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

{{/* Entries of `models` with what they leave out, as a JSON list. */}}
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

{{/* Entries of `workers` with what they leave out, as a JSON list. `modelSpec` is the entry of models. */}}
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
{{- fail (printf "pool %q has model %q, which is none of models[].name (%s): add it to models, or correct it" $pool.name $pool.model (keys $byName | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $_ := set $pool "modelSpec" (get $byName $pool.model) -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{ toJson $pools }}
{{- end -}}

{{/* Addresses of a model's schedulers: a JSON list. A StatefulSet's pods keep their names. */}}
{{- define "quire.schedulerAddresses" -}}
{{- $set := printf "%s-scheduler-%s" (include "quire.fullname" .root) .model.name -}}
{{- $addresses := list -}}
{{- range until (int .model.scheduler.replicas) -}}
{{- $host := printf "%s-%d.%s.%s.svc.%s" $set . $set $.root.Release.Namespace $.root.Values.clusterDomain -}}
{{- $addresses = append $addresses (printf "%s:%d" $host (int $.root.Values.ports.scheduler)) -}}
{{- end -}}
{{ toJson $addresses }}
{{- end -}}

{{/* Times of leaving, all from drainSeconds. */}}
{{- define "quire.preStopSeconds" -}}
{{ max 1 (min 10 (div (int .) 6)) }}
{{- end -}}

{{- define "quire.graceSeconds" -}}
{{ add (div (mul 3 (int .drainSeconds)) 2) 10 (default 0 .preStop) }}
{{- end -}}

{{/* PromQL: requests that wait, per ready worker of the pool's model. */}}
{{- define "quire.waitingQuery" -}}
{{- $labels := printf "namespace=%q, model_name=%q" .root.Release.Namespace .pool.modelSpec.servedName -}}
sum(quire_num_requests_waiting{ {{- $labels -}} }) / clamp_min(sum(quire_workers{ {{- $labels -}} , state="ready"}), 1)
{{- end -}}

{{/* PromQL: rows that sequences hold on the pool's workers. */}}
{{- define "quire.rowsQuery" -}}
sum(quire_rows_used{namespace="{{ .root.Release.Namespace }}", worker_id=~"{{ include "quire.fullname" .root }}-worker-{{ .pool.name }}-[0-9]+"})
{{- end -}}

{{- define "quire.triggerAuthentication" -}}
{{- with .Values.keda.authenticationRef -}}
authenticationRef:
  name: {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* gRPC services of a gateway that clients outside the cluster may call: a JSON list. AdminService is none of them. */}}
{{- define "quire.publicServices" -}}
{{ list "quire.v1.InferenceService" "grpc.health.v1.Health" "grpc.reflection.v1alpha.ServerReflection" | toJson }}
{{- end -}}

{{/* What proxies in front of gateways are told to speak. */}}
{{- define "quire.gatewayProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (not (empty .Values.gateway.tls.existingSecret)) }}
{{- end -}}

{{/* Where services listen: at all addresses of their pod. */}}
{{- define "quire.anyHost" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end -}}
