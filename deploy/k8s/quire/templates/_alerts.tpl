{{/* Alerts, as a YAML list. docs/operations.md explains them; a test compares the two. All select the services of this release,
     because another one may be in the same namespace. */}}

{{- define "quire.alerts" -}}
{{- $here := include "quire.releaseLabels" . -}}
{{- /* By service, not by model: a scheduler that has just started does not know its model. Each model has one
       Service, so a replica without workers counts together with the others. */}}
{{- with include "quire.modelServices" (dict "root" . "canBeIdle" false) }}
- alert: QuireNoWorkerReady
  expr: >-
    sum by (service) (quire_workers{ {{- include "quire.servicesLabels" (dict "root" $ "services" .) }}, state="ready"}) == 0
  for: 1m
  labels: {severity: critical}
  annotations:
    summary: 'No worker is ready for {{ "{{ $labels.service }}" }}'
{{- end }}
{{- with include "quire.modelServices" (dict "root" . "canBeIdle" true) }}
- alert: QuireNoWorkerStarts
  expr: >-
    {{- $idle := include "quire.servicesLabels" (dict "root" $ "services" .) }}
    sum by (service) (quire_num_requests_waiting{ {{- $idle -}} }) > 0 and sum by (service) (quire_workers{ {{- $idle }}, state="ready"}) == 0
  for: {{ include "quire.progressSeconds" $ }}s
  labels: {severity: critical}
  annotations:
    summary: 'Requests wait for {{ "{{ $labels.service }}" }}, which has no worker, and none has started'
{{- end }}
- alert: QuireGatewaysGone
  expr: >-
    absent(quire_gateway_schedulers{ {{- $here -}} })
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: 'No gateway exports metrics: none runs, or none is scraped'
- alert: QuireSchedulerAway
  expr: >-
    max(quire_gateway_schedulers{ {{- $here }}, state="away"}) > 0
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: 'A gateway has lost a scheduler and cannot reconnect'
- alert: QuireTwoRevisions
  expr: >-
    max by (model_name) (quire_gateway_revisions{ {{- $here -}} }) > 1
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: 'Workers serve two revisions of {{ "{{ $labels.model_name }}" }}'
- alert: QuireInternalErrors
  expr: >-
    sum by (method) (rate(quire_rpc_errors_total{ {{- $here }}, code=~"INTERNAL|UNKNOWN|DATA_LOSS"}[5m])) > 0
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: '{{ "{{ $labels.method }}" }} fails with errors that clients did not cause'
- alert: QuireRequestsFail
  {{- $failed := printf "sum(rate(quire_rpc_errors_total{%s, code=~\"UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|UNKNOWN|DATA_LOSS\", method=~\"Generate|http/.+\"}[5m]))" $here }}
  expr: >-
    {{ $failed }} / ({{ $failed }} + (sum(rate(quire_requests_total{ {{- $here }}, finished_reason!~"failed|cancelled"}[5m])) or vector(0))) > 0.05
  for: 10m
  labels: {severity: critical}
  annotations:
    summary: 'More than 5 % of the requests fail with errors that clients did not cause'
- alert: QuireRequestsRefused
  expr: >-
    sum by (model_name) (rate(quire_requests_refused_total{ {{- $here }}, code="RESOURCE_EXHAUSTED"}[5m])) > 0
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: 'The queue of {{ "{{ $labels.model_name }}" }} is full and requests are refused'
- alert: QuireRequestsWait
  expr: >-
    sum by (model_name) (quire_num_requests_waiting{ {{- $here -}} }) / clamp_min(sum by (model_name) (quire_workers{ {{- $here }}, state="ready"}), 1) > 20
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: 'More than 20 requests per worker are waiting for {{ "{{ $labels.model_name }}" }}'
- alert: QuireRequestsUnschedulable
  expr: >-
    sum by (model_name) (quire_num_requests_unschedulable{ {{- $here -}} }) > 0 and sum by (model_name) (quire_workers{ {{- $here }}, state="ready"}) > 0
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: 'Requests for {{ "{{ $labels.model_name }}" }} wait that none of its workers can run'
- alert: QuirePoolsFull
  expr: >-
    sum by (model_name) (quire_kv_blocks{ {{- $here }}, state="used"}) / sum by (model_name) (quire_kv_blocks{ {{- $here -}} }) > 0.95
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: 'More than 95 % of the KV blocks of {{ "{{ $labels.model_name }}" }} are in use'
- alert: QuireWorkersLost
  expr: >-
    sum by (model_name) (rate(quire_migrations_total{ {{- $here }}, reason=~"lost|failed"}[5m])) > 0
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: 'Workers of {{ "{{ $labels.model_name }}" }} are lost repeatedly'
- alert: QuireRedisDown
  expr: >-
    min by (service) (quire_redis_up{ {{- $here -}} }) == 0
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: '{{ "{{ $labels.service }}" }} cannot reach Redis'
- alert: QuireKvTierFails
  expr: >-
    sum by (tier) (rate(quire_worker_kv_tier_errors_total{ {{- $here -}} }[5m])) > 0
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: 'Workers cannot write KV blocks to the tier {{ "{{ $labels.tier }}" }}'
- alert: QuireAuditLinesLost
  expr: >-
    sum(rate(quire_audit_lost_lines_total{ {{- $here -}} }[5m])) > 0
  for: 1m
  labels: {severity: critical}
  annotations:
    summary: 'Gateways cannot write the audit log and drop its lines'
{{- /* cert-manager renews a certificate when a third of its lifetime is left. */}}
- alert: QuireCertificateExpires
  expr: >-
    min by (service, link) (quire_certificate_remaining_fraction{ {{- $here -}} }) < 0.1
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: 'A certificate of {{ "{{ $labels.service }}" }} ({{ "{{ $labels.link }}" }}) was not renewed and expires soon'
{{- range include "quire.objectives" . | fromJsonArray }}
{{- range .windows }}
- alert: {{ .alert }}
  expr: >-
    {{ .expr }}
  for: {{ .for }}
  labels: {severity: {{ .severity }}}
  annotations:
    summary: {{ .summary | squote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Names of the models whose pools can all have no worker on purpose (`canBeIdle`), or of the others, as a regular expression. */}}
{{- define "quire.modelServices" -}}
{{- $always := dict -}}
{{- range include "quire.pools" .root | fromJsonArray -}}
{{- if or (not $.root.Values.keda.enabled) (not .autoscaling.enabled) (gt (int .autoscaling.minReplicas) 0) }}{{ $_ := set $always .model true }}{{ end -}}
{{- end -}}
{{- $names := list -}}
{{- range include "quire.models" .root | fromJsonArray -}}
{{- if ne (hasKey $always .name) $.canBeIdle }}{{ $names = append $names .name }}{{ end -}}
{{- end -}}
{{ join "|" $names }}
{{- end -}}

{{/* Label matchers of the schedulers of these models. */}}
{{- define "quire.servicesLabels" -}}
{{ printf "namespace=%q, service=~%q" .root.Release.Namespace (printf "%s-scheduler-(%s)" (include "quire.fullname" .root) .services) }}
{{- end -}}

{{/* Alerts for latency objectives by burn rate: the error budget of 30 days is used up in two days (fast) or five days (slow).
     The short window ends an alert soon after its cause. */}}

{{/* Label matchers of this release's scraped pods. */}}
{{- define "quire.releaseLabels" -}}
{{- $services := list "gateway-headless" -}}
{{- range include "quire.models" . | fromJsonArray }}{{ $services = append $services (printf "scheduler-%s" .name) }}{{ end -}}
{{- range include "quire.pools" . | fromJsonArray }}{{ $services = append $services (printf "worker-%s" .name) }}{{ end -}}
{{ printf "namespace=%q, service=~%q" .Release.Namespace (printf "%s-(%s)" (include "quire.fullname" .) (join "|" $services)) }}
{{- end -}}

{{/* The fraction of slow events of a histogram by model: (dict "name" "ttft" "here" "..." "limit" 5 "window" "1h"). The text of
     a bound is 5 or 5.0, depending on the version of Prometheus. */}}
{{- define "quire.slowFraction" -}}
{{- $bound := toString .limit | replace "." "[.]" -}}
{{- if not (contains "." (toString .limit)) }}{{ $bound = printf "%s([.]0)?" $bound }}{{ end -}}
1 - sum by (model_name) (rate({{ .name }}_bucket{ {{- .here }}, le=~"{{ $bound }}"}[{{ .window }}])) / sum by (model_name) (rate({{ .name }}_count{ {{- .here -}} }[{{ .window }}]))
{{- end -}}

{{- define "quire.burnRate" -}}
{{- $budget := printf "%v * (1 - %v)" .rate .target -}}
{{- $long := include "quire.slowFraction" (merge (dict "window" .long) .) -}}
{{- $short := include "quire.slowFraction" (merge (dict "window" .short) .) -}}
({{ $long }} > {{ $budget }}) and ({{ $short }} > {{ $budget }})
{{- end -}}

{{/* The objectives with their alerts, as a JSON list. */}}
{{- define "quire.objectives" -}}
{{- $objectives := .Values.metrics.prometheusRule.objectives -}}
{{- $here := include "quire.releaseLabels" . -}}
{{- $rows := list (list "Ttft" "first tokens" "quire_time_to_first_token_seconds" $objectives.ttftSeconds) (list "Itl" "tokens" "quire_inter_token_latency_seconds" $objectives.itlSeconds) -}}
{{- $all := list -}}
{{- range $rows -}}
{{- if gt (index . 3 | float64) 0.0 -}}
{{- $common := dict "name" (index . 2) "here" $here "limit" (index . 3) "target" $objectives.target -}}
{{- $windows := list -}}
{{- $what := index . 1 -}}
{{- $limit := index . 3 -}}
{{- $prefix := index . 0 -}}
{{- range list (list "Fast" 14.4 "1h" "5m" "2m" "critical") (list "Slow" 6 "6h" "30m" "15m" "warning") -}}
{{- $expr := include "quire.burnRate" (merge (dict "rate" (index . 1) "long" (index . 2) "short" (index . 3)) $common) -}}
{{- $summary := printf "Too many %s of {{ $labels.model_name }} take longer than %v s" $what $limit -}}
{{- $windows = append $windows (dict "alert" (printf "Quire%sBudgetBurns%s" $prefix (index . 0)) "expr" $expr "for" (index . 4) "severity" (index . 5) "summary" $summary) -}}
{{- end -}}
{{- $all = append $all (dict "windows" $windows) -}}
{{- end -}}
{{- end -}}
{{ toJson $all }}
{{- end -}}
