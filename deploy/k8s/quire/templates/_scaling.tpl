{{/* PromQL for KEDA. A ServiceMonitor sets the labels namespace and service of its targets. */}}

{{- define "quire.schedulerLabels" -}}
namespace="{{ .root.Release.Namespace }}", service="{{ include "quire.fullname" .root }}-scheduler-{{ .pool.model }}"
{{- end -}}

{{/* Workers that a pool needs now: those that its used rows fill, and those that its part of the queue is worth. Background work
     needs one. */}}
{{- define "quire.neededWorkersQuery" -}}
{{- $labels := include "quire.schedulerLabels" . -}}
{{- $ids := printf "%s-worker-%s-[0-9]+" (include "quire.fullname" .root) .pool.name -}}
{{- $rows := printf "sum(quire_rows_used{%s, worker_id=~%q} / (quire_rows_limit{%s, worker_id=~%q} * %s) or vector(0))" $labels $ids $labels $ids (divf (float64 .root.Values.keda.busyRowsPercent) 100 | toString) -}}
{{- $waiting := printf "sum(quire_num_requests_waiting{%s}) * %s / %d" $labels (include "quire.queueFraction" .) (int .root.Values.keda.waitingPerWorker) -}}
{{ $rows }} + {{ if include "quire.startsFromZero" . }}{{ $waiting }} + (clamp_max(sum(quire_num_requests_background{ {{- $labels -}} }), 0.01) or vector(0)){{ else }}floor({{ $waiting }}){{ end }}
{{- end -}}

{{/* Whether a pool at zero starts for the first waiting request: only the first pool of a model that has no worker otherwise. Another
     one starts when its part of the queue is worth a whole worker. */}}
{{- define "quire.startsFromZero" -}}
{{- $names := list -}}
{{- $hasWorkers := false -}}
{{- range include "quire.pools" .root | fromJsonArray -}}
{{- if eq .model $.pool.model -}}
{{- $names = append $names .name -}}
{{- $hasWorkers = or $hasWorkers (not .autoscaling.enabled) (gt (int .autoscaling.minReplicas) 0) -}}
{{- end -}}
{{- end -}}
{{- if or (gt (int .pool.autoscaling.minReplicas) 0) (and (not $hasWorkers) (eq (first $names) .pool.name)) }}true{{ end -}}
{{- end -}}

{{/* The fraction of the model's queue that this pool adds workers for, so that two pools do not both add them. */}}
{{- define "quire.queueFraction" -}}
{{- $sum := 0 -}}
{{- range include "quire.pools" .root | fromJsonArray -}}
{{- if and (eq .model $.pool.model) .autoscaling.enabled }}{{ $sum = add $sum (int .autoscaling.maxReplicas) }}{{ end -}}
{{- end -}}
{{ divf (int .pool.autoscaling.maxReplicas) $sum | toString | trunc 6 }}
{{- end -}}

{{/* Requests for the model that arrived at gateways while it has no worker: a scheduler that has started since does not know its
     model and queues nothing. Those without a name are for a model that gateways do not know. */}}
{{- define "quire.refusedQuery" -}}
{{- $gateways := printf "namespace=%q, service=%q" .root.Release.Namespace (printf "%s-gateway-headless" (include "quire.fullname" .root)) -}}
{{- $names := printf "%s|" (regexQuoteMeta .pool.modelSpec.servedName) -}}
sum(increase(quire_gateway_unready_requests_total{ {{- $gateways }}, model_name=~{{ $names | quote }}}[2m])) unless on() sum(quire_workers{ {{- include "quire.schedulerLabels" . }}, state=~"loading|joining|ready"}) > 0
{{- end -}}
