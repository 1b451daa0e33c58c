{{/* Environment, mounts and volumes of a scheduler, as YAML lists. `model` is the entry of its model. */}}

{{- define "quire.schedulerEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- include "quire.redisEnv" . }}
{{- end -}}

{{- define "quire.schedulerMounts" -}}
{{- include "quire.redisMounts" .root }}
{{- with include "quire.trustMount" (dict "root" .root "role" "scheduler") }}
{{ . }}
{{- end }}
{{- if .model.scheduler.blockKey.existingSecret }}
- name: block-key
  mountPath: /etc/quire/block-key
  readOnly: true
{{- end }}
{{- end -}}

{{- define "quire.schedulerVolumes" -}}
{{- include "quire.emptyDir" (dict "name" "tmp" "size" .model.scheduler.tmpSize) }}
{{- include "quire.redisVolumes" .root }}
{{- with include "quire.trustVolume" (dict "root" .root "role" "scheduler") }}
{{ . }}
{{- end }}
{{- with .model.scheduler.blockKey.existingSecret }}
- name: block-key
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Time for which requests wait without a worker: the start of one, if the model's pools may have none. */}}
{{- define "quire.patienceSeconds" -}}
{{- $own := toString .model.scheduler.workerPatienceSeconds -}}
{{- $wait := 60 -}}
{{- range include "quire.pools" .root | fromJsonArray -}}
{{- if and (eq .model $.model.name) .autoscaling.enabled (eq (int .autoscaling.minReplicas) 0) -}}
{{- $wait = max $wait (add (int .startupSeconds) 300) -}}
{{- end -}}
{{- end -}}
{{ ternary $wait $own (eq $own "") }}
{{- end -}}
