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

{{/* Metadata of a workload object, with the user's labels and annotations for this one (Kueue). */}}
{{- define "quire.workloadMetadata" -}}
{{ include "quire.metadata" (merge (dict "labels" (.spec.labels | default dict) "annotations" .spec.annotations) .) }}
{{- end -}}

{{/* Identity and placement of a pod. Service links are off, because QUIRE_* environment variables are read as settings. */}}
{{- define "quire.podPlacement" -}}
serviceAccountName: {{ default (include "quire.serviceAccountName" .root) .spec.serviceAccountName | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "quire.over" (dict "defaults" .root.Values.podSecurityContext "entry" (.spec.podSecurityContext | default dict)) | fromJson | toYaml | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .spec.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . | quote }}
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
{{- with .spec.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $selector := dict "labelSelector" (dict "matchLabels" (include "quire.selectorLabels" $ | fromYaml)) }}
  - {{ ternary . (merge (deepCopy .) $selector) (hasKey . "labelSelector") | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- with .spec.podSpec }}
{{- include "quire.validatePodSpec" (dict "podSpec" . "component" $.component) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Security context of the chart's containers of a component: (dict "root" $ "spec" values). */}}
{{- define "quire.containerSecurityContext" -}}
{{ include "quire.over" (dict "defaults" .root.Values.containerSecurityContext "entry" (.spec.containerSecurityContext | default dict)) | fromJson | toYaml }}
{{- end -}}

{{/* A field that the chart sets would be in the object twice. */}}
{{- define "quire.validatePodSpec" -}}
{{- $own := list "serviceAccountName" "automountServiceAccountToken" "enableServiceLinks" "securityContext" "imagePullSecrets" "priorityClassName" "schedulerName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" "resourceClaims" "topologySpreadConstraints" "terminationGracePeriodSeconds" "initContainers" "containers" "volumes" "restartPolicy" -}}
{{- range $field, $_ := .podSpec -}}
{{- if has $field $own -}}
{{- fail (printf "podSpec of the %ss sets %s, which the chart sets: use the value of the chart for it" $.component $field) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The chart's list (`own`, YAML text) and the user's (`extra`). Two items with one name would be one of them at random, so a
     name of the chart is refused: (dict "own" "..." "extra" list "key" "name" "value" "gateway.extraEnv"). */}}
{{- define "quire.joined" -}}
{{- $items := .own | fromYamlArray -}}
{{- $names := dict -}}
{{- range $items }}{{ $_ := set $names (get . $.key | toString) true }}{{ end -}}
{{- range .extra -}}
{{- $name := get . $.key | toString -}}
{{- if hasKey $names $name -}}
{{- fail (printf "%s has the %s %s, which the chart or another entry uses: choose another, or set the chart's value for it" $.value $.key $name) -}}
{{- end -}}
{{- $_ := set $names $name true -}}
{{- $items = append $items . -}}
{{- end -}}
{{ toYaml $items }}
{{- end -}}

{{/* A writable folder on the node's disk, or in memory. */}}
{{- define "quire.emptyDir" -}}
- name: {{ .name }}
  emptyDir: {{ ternary dict (dict "sizeLimit" .size) (empty .size) | toJson }}
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

{{/* Flags of all processes. */}}
{{- define "quire.logArgs" -}}
- --log-format={{ .Values.log.format }}
- --log-level={{ .Values.log.level }}
{{- end -}}

{{/* Flags of all services. */}}
{{- define "quire.commonArgs" -}}
{{- with .Values.tracing.otlpEndpoint }}
- {{ printf "--trace-endpoint=%s" . | quote }}
{{- end }}
{{ include "quire.logArgs" . }}
- --health-listen={{ include "quire.anyHost" . }}:{{ .Values.ports.health }}
- --metrics-listen={{ include "quire.anyHost" . }}:{{ .Values.ports.metrics }}
- --metrics-compat={{ ternary "inference-pool" .Values.metrics.compat .Values.gateway.inferencePool.enabled }}
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

{{/* QUIRE_REDIS of gateways and schedulers; empty without Redis. Passwords are files, which follow a change of a Secret. */}}
{{- define "quire.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.enabled }}
- name: QUIRE_REDIS
  value: redis://{{ include "quire.fullname" . }}-redis.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379/0
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
  value: {{ $redis.namespace | default (include "quire.fullname" .) | quote }}
{{- end }}
{{- range $folder, $secret := include "quire.redisSecrets" . | fromJson }}
{{- range $setting, $entry := $secret.files }}
- name: QUIRE_REDIS_{{ $setting }}_FILE
  value: /etc/quire/redis-{{ $folder }}/{{ $entry }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "quire.hasRedis" -}}
{{- if or .Values.redis.enabled .Values.redis.external.url .Values.redis.external.existingSecret }}true{{ end -}}
{{- end -}}

{{/* The Secret with the password of the bundled Redis. */}}
{{- define "quire.redisPasswordSecret" -}}
{{ default (printf "%s-redis" (include "quire.fullname" .)) .Values.redis.auth.existingSecret }}
{{- end -}}

{{/* The Secrets of Redis that pods mount, by folder: their name, and the entry of each setting. */}}
{{- define "quire.redisSecrets" -}}
{{- $external := .Values.redis.external -}}
{{- $secrets := dict -}}
{{- if .Values.redis.enabled -}}
{{- $_ := set $secrets "password" (dict "name" (include "quire.redisPasswordSecret" .) "files" (dict "PASSWORD" .Values.redis.auth.key)) -}}
{{- end -}}
{{- with $external.passwordSecret }}{{ $_ := set $secrets "password" (dict "name" . "files" (dict "PASSWORD" $external.passwordKey)) }}{{ end -}}
{{- with $external.sentinelPasswordSecret }}{{ $_ := set $secrets "sentinel" (dict "name" . "files" (dict "SENTINEL_PASSWORD" $external.sentinelPasswordKey)) }}{{ end -}}
{{- with $external.caSecret }}{{ $_ := set $secrets "ca" (dict "name" . "files" (dict "TLS_CA" $external.caKey)) }}{{ end -}}
{{- with $external.certSecret }}{{ $_ := set $secrets "cert" (dict "name" . "files" (dict "TLS_CERT" "tls.crt" "TLS_KEY" "tls.key")) }}{{ end -}}
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
{{- range $name, $secret := include "quire.redisSecrets" . | fromJson }}
- name: redis-{{ $name }}
  secret:
    secretName: {{ $secret.name | quote }}
{{- end }}
{{- end -}}

{{/* Pods that are not ready never block a node drain. `budget` has the values. */}}
{{- define "quire.podDisruptionBudget" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "quire.metadata" (merge (dict "objectName" .fullname) .) | nindent 2 }}
spec:
  {{- if ne (toString .budget.minAvailable) "" }}
  minAvailable: {{ .budget.minAvailable }}
  {{- else }}
  maxUnavailable: {{ .budget.maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "quire.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* The headless Service of a StatefulSet. It includes pods that are not ready, because peers check readiness themselves.
     `isLeader`: of workers on several nodes only the leaders' pods, which have the ports. */}}
{{- define "quire.headlessService" }}
apiVersion: v1
kind: Service
metadata:
  {{- include "quire.metadata" (merge (dict "objectName" .fullname "extraLabels" (dict "quire/scrape" "true")) .) | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "quire.selectorLabels" . | nindent 4 }}
    {{- if .isLeader }}
    leaderworkerset.sigs.k8s.io/worker-index: "0"
    {{- end }}
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
  {{- include "quire.metadata" (merge (dict "objectName" (printf "%s-%s" (include "quire.fullname" .root) .component)) .) | nindent 2 }}
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
        {{- if $.root.Values.gateway.admin.console.enabled }}
        - port: console
        {{- end }}
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
  {{- with concat .root.Values.networkPolicy.egress.extra (get .root.Values.networkPolicy.egress .component) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- else -}}
egress: []
{{- end -}}
{{- end -}}

{{/* The nodes of a pool's workers connect to each other, also on ports that NCCL chooses. */}}
{{- define "quire.nodesNetworkPolicy" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "quire.metadata" (merge (dict "objectName" (printf "%s-worker-%s-nodes" (include "quire.fullname" .root) .name)) .) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "quire.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress{{ if .root.Values.networkPolicy.egress.enabled }}, Egress{{ end }}]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {{- include "quire.selectorLabels" . | nindent 14 }}
  {{- if .root.Values.networkPolicy.egress.enabled }}
  egress:
    - to:
        - podSelector:
            matchLabels:
              {{- include "quire.selectorLabels" . | nindent 14 }}
  {{- end }}
{{- end }}
