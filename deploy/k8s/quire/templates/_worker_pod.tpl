{{/* The template of a pool's pods: (dict "root" $ "pool" . "part" $part). */}}

{{- define "quire.workerPod" -}}
{{- $root := .root }}
{{- $part := .part }}
{{- $trust := dict "root" $root "role" "worker" }}
{{- with .pool }}
{{- $variant := ternary "-cuda" "-cpu" (gt (int .gpuCount) 0) }}
{{- $image := include "quire.image" (dict "root" $root "service" "worker" "suffix" $variant "own" .image) }}
{{- $own := dict "root" $root "pool" . "image" $image }}
{{- $where := printf "workers[%s]" .name }}
{{- $gpus := ternary (dict .gpuResource (int .gpuCount)) dict (gt (int .gpuCount) 0) }}
metadata:
  {{- include "quire.podMetadata" $part | nindent 2 }}
spec:
  {{- include "quire.podPlacement" $part | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "quire.graceSeconds" . }}
  {{- if or .initContainers (include "quire.downloads" .modelSpec) }}
  initContainers:
    {{- with .initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if include "quire.downloads" .modelSpec }}
    {{- include "quire.download" $own | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [quire-worker]
      args:
        - --listen={{ include "quire.anyHost" $root }}:{{ $root.Values.ports.worker }}
        - --advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq $root.Values.ipFamily "IPv6") }}:{{ $root.Values.ports.worker }}
        {{- include "quire.trustArgs" $trust | nindent 8 }}
        - --worker-id=$(POD_NAME)
        - --scheduler={{ include "quire.schedulerAddress" (dict "root" $root "model" .modelSpec) }}
        - {{ printf "--model=%s" (include "quire.modelPath" .modelSpec) | quote }}
        - {{ printf "--model-name=%s" .modelSpec.servedName | quote }}
        - --executor={{ .executor }}
        - {{ printf "--backend=%s" .backend | quote }}
        {{- if gt (int .gpuCount) 1 }}
        - --tensor-parallel-size={{ .gpuCount | int }}
        {{- end }}
        - --dtype={{ .dtype }}
        {{- if ne .kvCacheDtype "auto" }}
        - --kv-cache-dtype={{ .kvCacheDtype }}
        {{- end }}
        {{- with .quantize }}
        - --quantize={{ . }}
        {{- end }}
        {{- range .adapters }}
        - {{ printf "--adapter=%s=%s" .name .path | quote }}
        {{- end }}
        {{- with .adapterDir }}
        - {{ printf "--adapter-dir=%s" . | quote }}
        {{- end }}
        - --determinism={{ .determinism }}
        {{- with .blockSize | int }}
        - --block-size={{ . }}
        {{- end }}
        {{- with .numBlocks | int }}
        - --num-blocks={{ . }}
        {{- end }}
        {{- with .kvCacheMemory }}
        - --kv-cache-memory={{ trimSuffix "i" . }}
        {{- end }}
        {{- if eq .backend "cuda" }}
        - --gpu-memory-utilization={{ .gpuMemoryUtilization }}
        {{- end }}
        {{- with .maxModelLen | int }}
        - --max-model-len={{ . }}
        {{- end }}
        {{- with .imageCacheMemory }}
        - --image-cache-memory={{ . }}
        {{- end }}
        {{- with .maxNumSeqs | int }}
        - --max-num-seqs={{ . }}
        {{- end }}
        {{- with .maxNumBatchedTokens | int }}
        - --max-num-batched-tokens={{ . }}
        {{- end }}
        - --stuck-after-s={{ .stuckSeconds | int }}
        - --drain-timeout-s={{ .drainSeconds }}
        {{- include "quire.commonArgs" $root | nindent 8 }}
        {{- with .extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "quire.joined" (dict "own" (include "quire.workerEnv" $own) "extra" .extraEnv "key" "name" "value" (printf "%s.extraEnv" $where)) | nindent 8 }}
      ports:
        {{- include "quire.containerPorts" (dict "root" $root "port" $root.Values.ports.worker) | nindent 8 }}
      {{- /* Not ready: not leased. unreadyAfter: while the only scheduler restarts, no pod may count as disrupted. */}}
      {{- include "quire.probes" (dict "root" $root "startupSeconds" .startupSeconds "unreadyAfter" 6) | nindent 6 }}
      {{- with .lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- with .resources.claims }}
        claims:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        requests:
          {{- toYaml (merge (deepCopy $gpus) (.resources.requests | default dict)) | nindent 10 }}
        limits:
          {{- toYaml (merge (deepCopy $gpus) (.resources.limits | default dict)) | nindent 10 }}
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        {{- include "quire.joined" (dict "own" (include "quire.workerMounts" $own) "extra" .extraVolumeMounts "key" "mountPath" "value" (printf "%s.extraVolumeMounts" $where)) | nindent 8 }}
    {{- with .extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "quire.joined" (dict "own" (include "quire.workerVolumes" $own) "extra" .extraVolumes "key" "name" "value" (printf "%s.extraVolumes" $where)) | nindent 4 }}
{{- end }}
{{- end -}}
