{{/* Trust between the services. `role` is gateway, scheduler or worker. */}}

{{- define "quire.trustRoles" -}}
{{ list "gateway" "scheduler" "worker" | toJson }}
{{- end -}}

{{/* The Secret with the tokens or the certificate of a role. */}}
{{- define "quire.trustSecret" -}}
{{- $trust := .root.Values.trust -}}
{{- if eq $trust.mode "tokens" -}}
{{ default (printf "%s-tokens-%s" (include "quire.fullname" .root) .role) $trust.existingSecret }}
{{- else if $trust.certManager.enabled -}}
{{ printf "%s-trust-%s" (include "quire.fullname" .root) .role }}
{{- else -}}
{{ get $trust.tls.existingSecrets .role }}
{{- end -}}
{{- end -}}

{{/* A gateway has no port for other services, so it needs no flag for mode none. */}}
{{- define "quire.trustArgs" -}}
{{- $trust := .root.Values.trust -}}
{{- if eq $trust.mode "tokens" -}}
- --token-file=/etc/quire/trust/tokens
{{- else if eq $trust.mode "tls" -}}
- --internal-tls-cert-file=/etc/quire/trust/tls.crt
- --internal-tls-key-file=/etc/quire/trust/tls.key
- --internal-tls-ca-file=/etc/quire/trust/ca.crt
- {{ printf "--internal-tls-name=%s" $trust.tls.name | quote }}
{{- if and (eq .role "scheduler") $trust.certManager.workerName }}
- {{ printf "--internal-tls-worker-name=%s" $trust.certManager.workerName | quote }}
{{- end }}
{{- else if ne .role "gateway" -}}
- --insecure
{{- end -}}
{{- end -}}

{{/* A folder, because the kubelet does not update single files (subPath) when a Secret changes. */}}
{{- define "quire.trustMount" -}}
{{- if ne .root.Values.trust.mode "none" -}}
- name: trust
  mountPath: /etc/quire/trust
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "quire.trustVolume" -}}
{{- if ne .root.Values.trust.mode "none" -}}
{{- if and (eq .role "worker") .root.Values.trust.certManager.workerName -}}
{{- include "quire.workerCertificate" .root -}}
{{- else -}}
- name: trust
  secret:
    secretName: {{ include "quire.trustSecret" . | quote }}
    {{- if and (eq .root.Values.trust.mode "tokens") .root.Values.trust.existingSecret }}
    items: [{key: {{ .role }}, path: tokens}]
    {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A certificate of the pod's own, with its name as the id of the worker. The driver replaces ${POD_NAME}. */}}
{{- define "quire.workerCertificate" -}}
{{- $trust := .Values.trust -}}
- name: trust
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      {{- range $name, $value := $trust.certManager.issuerRef }}
      csi.cert-manager.io/issuer-{{ $name }}: {{ $value | quote }}
      {{- end }}
      csi.cert-manager.io/dns-names: {{ printf "%s,%s" (replace "{role}" "worker" $trust.tls.name) (replace "{id}" "${POD_NAME}" $trust.certManager.workerName) | quote }}
      csi.cert-manager.io/key-usages: "digital signature,server auth,client auth"
      {{- with .Values.podSecurityContext.fsGroup }}
      csi.cert-manager.io/fs-group: {{ . | quote }}
      {{- end }}
{{- end -}}

{{/* appProtocol of schedulers and workers. */}}
{{- define "quire.internalProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (eq .Values.trust.mode "tls") }}
{{- end -}}

{{- define "quire.validateTrust" -}}
{{- $trust := .Values.trust -}}
{{- $secrets := $trust.tls.existingSecrets -}}
{{- $given := list -}}
{{- range include "quire.trustRoles" . | fromJsonArray -}}
{{- if get $secrets . }}{{ $given = append $given . }}{{ end -}}
{{- end -}}
{{- if and $trust.existingSecret (ne $trust.mode "tokens") -}}
{{- fail (printf "trust.existingSecret has tokens, but trust.mode is %s: set trust.mode to tokens, or remove the secret" $trust.mode) -}}
{{- end -}}
{{- if and (or $given $trust.certManager.enabled) (ne $trust.mode "tls") -}}
{{- fail (printf "%s is set, but trust.mode is %s: set trust.mode to tls" (ternary "trust.certManager.enabled" (printf "trust.tls.existingSecrets.%s" (first $given)) (empty $given)) $trust.mode) -}}
{{- end -}}
{{- if and $given $trust.certManager.enabled -}}
{{- fail (printf "trust.tls.existingSecrets.%s is set, but trust.certManager creates all certificates: set only one of them" (first $given)) -}}
{{- end -}}
{{- if and $trust.certManager.enabled (not $trust.certManager.issuerRef.name) -}}
{{- fail "trust.certManager.enabled is true, but it has no issuer: set trust.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and $trust.certManager.workerName (not $trust.certManager.enabled) -}}
{{- fail "trust.certManager.workerName is set, but trust.certManager.enabled is false: only cert-manager creates a certificate for each worker pod" -}}
{{- end -}}
{{- if and $trust.certManager.enabled (contains "://" $trust.tls.name) -}}
{{- fail (printf "trust.tls.name is the URI %s: callers then check the address of a server, which cert-manager cannot put into a certificate of all pods; set a DNS name such as {role}.quire.svc" $trust.tls.name) -}}
{{- end -}}
{{- if and (eq $trust.mode "tls") (not $trust.certManager.enabled) -}}
{{- range include "quire.trustRoles" . | fromJsonArray -}}
{{- if not (get $secrets .) -}}
{{- fail (printf "trust.mode is tls, but the %ss have no certificate: set trust.tls.existingSecrets.%s, or trust.certManager.enabled" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
