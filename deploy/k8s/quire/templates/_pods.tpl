{{/* Common parts of gateway, scheduler and worker pods. `spec` has the values of the component. */}}

{{- define "quire.podMetadata" -}}
{{- $own := merge (dict "app.kubernetes.io/part-of" "quire") (.extraLabels | default dict) -}}
{{- $own = merge $own (include "quire.selectorLabels" . | fromYaml) -}}
{{- $more := dict "commonLabels" .root.Values.commonLabels "podLabels" .spec.podLabels -}}
labels:
  {{- include "quire.mergedLabels" (dict "own" $own "more" $more) | nindent 2 }}
{{- with .spec.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Identity and placement of a pod. Service links are off, because QUIRE_* environment variables are read as settings. */}}
{{- define "quire.podPlacement" -}}
serviceAccountName: {{ include "quire.serviceAccountName" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "quire.tolerations" .spec | fromJsonArray }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.topologySpread }}
{{- if .topologyKey }}
topologySpreadConstraints:
  - topologyKey: {{ .topologyKey | quote }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    maxSkew: {{ .maxSkew }}
    labelSelector:
      matchLabels:
        {{- include "quire.selectorLabels" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The user's tolerations, and those that limit the time on a lost node, as a JSON list. */}}
{{- define "quire.tolerations" -}}
{{- $tolerations := .tolerations | default list -}}
{{- $keys := list -}}
{{- range $tolerations }}{{ $keys = append $keys .key }}{{ end -}}
{{- if not (kindIs "invalid" .nodeLostSeconds) -}}
{{- range list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- if not (has . $keys) -}}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $.nodeLostSeconds)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $tolerations }}
{{- end -}}

{{/* Flags of all services. */}}
{{- define "quire.commonArgs" -}}
- --log-format={{ .Values.log.format }}
- --log-level={{ .Values.log.level }}
- --health-listen={{ include "quire.anyHost" . }}:{{ .Values.ports.health }}
- --metrics-listen={{ include "quire.anyHost" . }}:{{ .Values.ports.metrics }}
- --metrics-compat={{ .Values.metrics.compat }}
{{- end -}}

{{- define "quire.containerPorts" -}}
- name: grpc
  containerPort: {{ .port }}
- name: health
  containerPort: {{ .root.Values.ports.health }}
- name: metrics
  containerPort: {{ .root.Values.ports.metrics }}
{{- end -}}

{{/* Probes on the plaintext health port. startup: the service has loaded what it needs, within `startupSeconds`. liveness:
     it is not hanging. readiness: it can take requests; only this one depends on other services. */}}
{{- define "quire.probes" -}}
{{- $port := .root.Values.ports.health -}}
startupProbe:
  grpc:
    port: {{ $port }}
    service: startup
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int .startupSeconds) 5) }}
livenessProbe:
  grpc:
    port: {{ $port }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc:
    port: {{ $port }}
    service: readiness
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: {{ .unreadyAfter | default 1 }}
{{- end -}}

{{/* QUIRE_REDIS of gateways and schedulers; empty without Redis. */}}
{{- define "quire.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.enabled }}
{{- with $redis.auth.existingSecret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $redis.auth.key | quote }}
{{- end }}
- name: QUIRE_REDIS
  value: redis://{{ if $redis.auth.existingSecret }}:$(REDIS_PASSWORD)@{{ end }}{{ include "quire.fullname" . }}-redis.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379/0
{{- else if $redis.external.existingSecret }}
- name: QUIRE_REDIS
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.existingSecret | quote }}
      key: {{ $redis.external.key | quote }}
{{- else if $redis.external.url }}
- name: QUIRE_REDIS
  value: {{ $redis.external.url | quote }}
{{- end }}
{{- if include "quire.hasRedis" . }}
- name: QUIRE_REDIS_NAMESPACE
  value: {{ $redis.namespace | quote }}
{{- end }}
{{- with $redis.external.passwordSecret }}
- name: QUIRE_REDIS_PASSWORD_FILE
  value: /etc/quire/redis-password/{{ $redis.external.passwordKey }}
{{- end }}
{{- with $redis.external.caSecret }}
- name: QUIRE_REDIS_TLS_CA_FILE
  value: /etc/quire/redis-ca/{{ $redis.external.caKey }}
{{- end }}
{{- with $redis.external.certSecret }}
- name: QUIRE_REDIS_TLS_CERT_FILE
  value: /etc/quire/redis-cert/tls.crt
- name: QUIRE_REDIS_TLS_KEY_FILE
  value: /etc/quire/redis-cert/tls.key
{{- end }}
{{- end -}}

{{- define "quire.hasRedis" -}}
{{- if or .Values.redis.enabled .Values.redis.external.url .Values.redis.external.existingSecret }}true{{ end -}}
{{- end -}}

{{/* The Secrets of an external Redis that pods mount, by folder. Files follow a change of a Secret, variables do not. */}}
{{- define "quire.redisSecrets" -}}
{{- $external := .Values.redis.external -}}
{{- $secrets := dict -}}
{{- with $external.caSecret }}{{ $_ := set $secrets "ca" . }}{{ end -}}
{{- with $external.certSecret }}{{ $_ := set $secrets "cert" . }}{{ end -}}
{{- with $external.passwordSecret }}{{ $_ := set $secrets "password" . }}{{ end -}}
{{ $secrets | toJson }}
{{- end -}}

{{- define "quire.redisMounts" -}}
- name: tmp
  mountPath: /tmp
{{- range $name, $_ := include "quire.redisSecrets" . | fromJson }}
- name: redis-{{ $name }}
  mountPath: /etc/quire/redis-{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "quire.redisVolumes" -}}
- name: tmp
  emptyDir: {}
{{- range $name, $secret := include "quire.redisSecrets" . | fromJson }}
- name: redis-{{ $name }}
  secret:
    secretName: {{ $secret | quote }}
{{- end }}
{{- end -}}

{{/* Evicts one pod at a time. Pods that are not ready never block a node drain. */}}
{{- define "quire.podDisruptionBudget" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .fullname | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "quire.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* The headless Service of a StatefulSet. It includes pods that are not ready, because peers check readiness themselves. */}}
{{- define "quire.headlessService" }}
apiVersion: v1
kind: Service
metadata:
  name: {{ .fullname | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    quire/scrape: "true"
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "quire.selectorLabels" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: grpc
      appProtocol: {{ include "quire.internalProtocol" .root }}
    - name: metrics
      port: {{ .root.Values.ports.metrics }}
      targetPort: metrics
{{- end }}

{{/* NetworkPolicy of a component: `from` lists the components that may connect to its port, `to` those that it may
     connect to. `adminFrom`: peers that may connect to the admin port. */}}
{{- define "quire.networkPolicy" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "quire.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "quire.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress{{ if .root.Values.networkPolicy.egress.enabled }}, Egress{{ end }}]
  ingress:
    - ports:
        - port: {{ .port }}
        {{- with .httpPort }}
        - port: {{ . }}
        {{- end }}
      {{- if .from }}
      from:
        {{- range .from }}
        - podSelector:
            matchLabels:
              {{- include "quire.selectorLabels" (dict "root" $.root "component" .) | nindent 14 }}
        {{- end }}
      {{- else }}
      {{- with .root.Values.networkPolicy.clients }}
      from:
        {{- toYaml . | nindent 8 }}
        - podSelector:
            matchLabels:
              {{- include "quire.selectorLabels" (dict "root" $.root "component" "test") | nindent 14 }}
      {{- end }}
      {{- end }}
    {{- if ne .component "redis" }}
    - ports:
        - port: metrics
      {{- with .root.Values.networkPolicy.metricsClients }}
      from:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
    {{- with .adminFrom }}
    - ports:
        - port: admin
      from:
        {{- toYaml . | nindent 8 }}
    {{- end }}
  {{- if .root.Values.networkPolicy.egress.enabled }}
  {{- include "quire.egress" . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Egress rules; none for Redis. DNS: policies see the port of the DNS pod, which is 5353 on OpenShift. */}}
{{- define "quire.egress" -}}
{{- if .to -}}
egress:
  - ports:
      {{- range list 53 5353 }}
      - {port: {{ . }}, protocol: UDP}
      - {port: {{ . }}, protocol: TCP}
      {{- end }}
  {{- range .to }}
  - ports:
      - port: {{ get $.root.Values.ports . | default 6379 }}
    to:
      - podSelector:
          matchLabels:
            {{- include "quire.selectorLabels" (dict "root" $.root "component" .) | nindent 12 }}
  {{- end }}
  {{- with .root.Values.networkPolicy.egress.extra }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- else -}}
egress: []
{{- end -}}
{{- end -}}
