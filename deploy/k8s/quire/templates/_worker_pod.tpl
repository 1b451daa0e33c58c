{{/* The template of a pool's pods: (dict "root" $ "pool" . "part" $part "node" ""). `node`: of a worker on several nodes
     "leader" or "follower". A follower has ranks only: no gRPC port, no probes, no scheduler. */}}

{{- define "quire.workerPod" -}}
{{- $root := .root }}
{{- $node := .node }}
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
        {{- if eq $node "follower" }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --leader-address=$(LWS_LEADER_ADDRESS):{{ $root.Values.ports.nodes }}
        {{- else }}
        - --listen={{ include "quire.anyHost" $root }}:{{ $root.Values.ports.worker }}
        - --advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq $root.Values.ipFamily "IPv6") }}:{{ $root.Values.ports.worker }}
        {{- end }}
        {{- if eq $node "leader" }}
        - --node-listen={{ include "quire.anyHost" $root }}:{{ $root.Values.ports.nodes }}
        {{- end }}
        {{- if $node }}
        - --nnodes={{ .nodesPerWorker }}
        - --node-timeout-s={{ .startupSeconds }}
        {{- end }}
        {{- include "quire.trustArgs" $trust | nindent 8 }}
        - --worker-id=$(POD_NAME)
        {{- if ne $node "follower" }}
        - --scheduler={{ include "quire.schedulerAddress" (dict "root" $root "model" .modelSpec) }}
        {{- end }}
        - {{ printf "--model=%s" (include "quire.modelPath" .modelSpec) | quote }}
        - {{ printf "--model-name=%s" .modelSpec.servedName | quote }}
        - --executor={{ .executor }}
        - {{ printf "--backend=%s" .backend | quote }}
        {{- if gt (include "quire.numRanks" . | int) 1 }}
        - --tensor-parallel-size={{ include "quire.numRanks" . }}
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
        {{- with .kvHostMemory }}
        - --kv-host-memory={{ . }}
        {{- end }}
        {{- with .kvDisk }}
        - --kv-disk={{ . }}
        - --kv-disk-size={{ $.pool.kvDiskSize }}
        {{- end }}
        {{- if .kvTransfer }}
        - --kv-transfer
        - --role={{ .role }}
        {{- end }}
        {{- with .maxNumSeqs | int }}
        - --max-num-seqs={{ . }}
        {{- end }}
        {{- with .maxNumBatchedTokens | int }}
        - --max-num-batched-tokens={{ . }}
        {{- end }}
        - --stuck-after-s={{ .stuckSeconds | int }}
        - --drain-timeout-s={{ .drainSeconds }}
        {{- include (ternary "quire.logArgs" "quire.commonArgs" (eq $node "follower")) $root | nindent 8 }}
        {{- with .extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "quire.joined" (dict "own" (include "quire.workerEnv" $own) "extra" .extraEnv "key" "name" "value" (printf "%s.extraEnv" $where)) | nindent 8 }}
      {{- if ne $node "follower" }}
      ports:
        {{- include "quire.containerPorts" (dict "root" $root "port" $root.Values.ports.worker) | nindent 8 }}
        {{- if eq $node "leader" }}
        - name: nodes
          containerPort: {{ $root.Values.ports.nodes }}
        {{- end }}
      {{- /* Not ready: not leased. unreadyAfter: while the only scheduler restarts, no pod may count as disrupted. */}}
      {{- include "quire.probes" (dict "root" $root "startupSeconds" .startupSeconds "unreadyAfter" 6) | nindent 6 }}
      {{- end }}
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
        {{- include "quire.containerSecurityContext" (dict "root" $root "spec" .) | nindent 8 }}
      volumeMounts:
        {{- include "quire.joined" (dict "own" (include "quire.workerMounts" $own) "extra" .extraVolumeMounts "key" "mountPath" "value" (printf "%s.extraVolumeMounts" $where)) | nindent 8 }}
    {{- with .extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "quire.joined" (dict "own" (include "quire.workerVolumes" $own) "extra" .extraVolumes "key" "name" "value" (printf "%s.extraVolumes" $where)) | nindent 4 }}
{{- end }}
{{- end -}}
