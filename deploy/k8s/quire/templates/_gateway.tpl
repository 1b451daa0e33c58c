{{/* Environment, mounts and volumes of a gateway, as YAML lists. */}}

{{- define "quire.gatewayEnv" -}}
- name: HOME
  value: /tmp
{{- include "quire.redisEnv" . }}
{{- end -}}

{{/* Names of the gateway's Service that the gateway does not permit by itself, as a JSON list. */}}
{{- define "quire.ownHosts" -}}
{{- $name := printf "%s-gateway.%s" (include "quire.fullname" .) .Release.Namespace -}}
{{ list $name (printf "%s.svc.%s" $name .Values.clusterDomain) | toJson }}
{{- end -}}

{{- define "quire.chunkIntervalMs" -}}
{{- $milliseconds := .Values.gateway.chunkIntervalMs | int -}}
{{- if lt $milliseconds 0 -}}
{{- $milliseconds = 0 -}}
{{- range include "quire.pools" . | fromJsonArray -}}
{{- $milliseconds = ternary 20 $milliseconds (gt (int .gpuCount) 0) -}}
{{- end -}}
{{- end -}}
{{ $milliseconds }}
{{- end -}}

{{/* The ConfigMap with the limits of owners; empty if there are none. */}}
{{- define "quire.keyLimits" -}}
{{- $own := ternary (printf "%s-gateway-key-limits" (include "quire.fullname" .)) "" (not (empty .Values.gateway.keyLimits.toml)) -}}
{{ default $own .Values.gateway.keyLimits.existingConfigMap }}
{{- end -}}

{{- define "quire.gatewayMounts" -}}
{{- $trust := dict "root" . "role" "gateway" -}}
{{- $keyLimits := include "quire.keyLimits" . -}}
{{- include "quire.redisMounts" . }}
{{- with include "quire.trustMount" $trust }}

{{ . }}
{{- end }}
{{- if .Values.gateway.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/quire/api-keys
  readOnly: true
{{- end }}
{{- if .Values.gateway.jwt.existingConfigMap }}
- name: jwks
  mountPath: /etc/quire/jwks
  readOnly: true
{{- end }}
{{- if $keyLimits }}
- name: key-limits
  mountPath: /etc/quire/key-limits
  readOnly: true
{{- end }}
{{- if .Values.gateway.routes }}
- name: routes
  mountPath: /etc/quire/routes
  readOnly: true
{{- end }}
{{- if .Values.gateway.admin.enabled }}
- name: admin-keys
  mountPath: /etc/quire/admin-keys
  readOnly: true
{{- end }}
{{- if .Values.gateway.records.existingSecret }}
- name: record-keys
  mountPath: /etc/quire/record-keys
  readOnly: true
{{- end }}
{{- if .Values.gateway.tls.existingSecret }}
- name: tls
  mountPath: /etc/quire/tls
  readOnly: true
{{- end }}
{{- if .Values.gateway.tls.clientCaSecret }}
- name: client-ca
  mountPath: /etc/quire/client-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "quire.gatewayVolumes" -}}
{{- $trust := dict "root" . "role" "gateway" -}}
{{- $keyLimits := include "quire.keyLimits" . -}}
{{- include "quire.emptyDir" (dict "name" "tmp" "size" .Values.gateway.tmpSize) }}
{{- include "quire.redisVolumes" . }}
{{- with include "quire.trustVolume" $trust }}

{{ . }}
{{- end }}
{{- with .Values.gateway.jwt.existingConfigMap }}
- name: jwks
  configMap:
    name: {{ . | quote }}
{{- end }}
{{- with $keyLimits }}
- name: key-limits
  configMap:
    name: {{ . | quote }}
{{- end }}
{{- if .Values.gateway.routes }}
- name: routes
  configMap:
    name: {{ printf "%s-gateway-routes" (include "quire.fullname" .) | quote }}
{{- end }}
{{- if .Values.gateway.admin.enabled }}
- name: admin-keys
  secret:
    secretName: {{ .Values.gateway.admin.existingSecret | quote }}
{{- end }}
{{- with .Values.gateway.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.gateway.records.existingSecret }}
- name: record-keys
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.gateway.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.gateway.tls.clientCaSecret }}
- name: client-ca
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- end -}}
