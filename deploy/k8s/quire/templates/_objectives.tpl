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
