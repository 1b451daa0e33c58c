{{/* Environment, mounts, volumes and the download of a worker. `pool` is the entry of its pool. */}}

{{- define "quire.workerEnv" -}}
{{- $cpuLimit := dig "limits" "cpu" "" .pool.resources -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if .pool.threads | int }}
- name: QUIRE_THREADS
  value: {{ .pool.threads | int | quote }}
{{- else if or $cpuLimit (dig "requests" "cpu" "" .pool.resources) }}
- name: QUIRE_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: worker
      resource: {{ ternary "requests.cpu" "limits.cpu" (empty $cpuLimit) }}
{{- end }}
- name: QUIRE_CACHE_DIR
  value: /var/cache/quire
- name: HOME
  value: /tmp
{{- end -}}

{{/* GPUs of one worker, each with its own process (rank). */}}
{{- define "quire.numRanks" -}}
{{ mul (int .gpuCount) (int .nodesPerWorker) }}
{{- end -}}

{{/* Size of /dev/shm, which NCCL uses between GPUs without peer-to-peer access; empty: the container runtime's default. */}}
{{- define "quire.shmSize" -}}
{{- $ranks := int .gpuCount -}}
{{ default (ternary (printf "%dGi" $ranks) "" (gt $ranks 1)) .shmSize }}
{{- end -}}

{{- define "quire.hasStorage" -}}
{{- if or .existingClaim .hostPath .emptyDirSize .claimSize .image }}true{{ end -}}
{{- end -}}

{{- define "quire.workerMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/quire
{{- with include "quire.trustMount" (dict "root" .root "role" "worker") }}
{{ . }}
{{- end }}
{{- if include "quire.shmSize" .pool }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if include "quire.hasStorage" .pool.modelSpec.storage }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{- define "quire.workerVolumes" -}}
{{- $storage := .pool.modelSpec.storage -}}
{{- include "quire.emptyDir" (dict "name" "tmp" "size" .pool.tmpSize) }}
{{- /* Cache of kernels compiled for the node's processor. */}}
{{ include "quire.emptyDir" (dict "name" "cache" "size" .pool.cacheSize) }}
{{- with include "quire.trustVolume" (dict "root" .root "role" "worker") }}
{{ . }}
{{- end }}
{{- with include "quire.shmSize" .pool }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . | quote }}
{{- end }}
{{- if $storage.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $storage.existingClaim | quote }}
    {{- if not (include "quire.downloads" .pool.modelSpec) }}
    readOnly: true
    {{- end }}
{{- else if $storage.image }}
- name: models
  image:
    reference: {{ $storage.image | quote }}
    pullPolicy: {{ .root.Values.image.pullPolicy }}
{{- else if $storage.hostPath }}
- name: models
  hostPath:
    path: {{ $storage.hostPath | quote }}
    type: Directory
{{- else if $storage.emptyDirSize }}
- name: models
  emptyDir:
    sizeLimit: {{ $storage.emptyDirSize | quote }}
{{- end }}
{{- end -}}

{{/* Whether an init container fills the storage of a model. */}}
{{- define "quire.downloads" -}}
{{- if or .source .download.command }}true{{ end -}}
{{- end -}}

{{/* The folder of a model: with `source` the folder of its commit in a cache of the Hub, which `quire fetch` makes. */}}
{{- define "quire.modelPath" -}}
{{- if .source -}}
{{- $repo := trimPrefix "hf://" .source | splitList "@" -}}
/models/models--{{ first $repo | replace "/" "--" }}/snapshots/{{ last $repo }}
{{- else -}}
{{ .path }}
{{- end -}}
{{- end -}}

{{/* The init container that downloads the model of a pool. */}}
{{- define "quire.download" -}}
{{- $model := .pool.modelSpec -}}
{{- $download := $model.download -}}
- name: download
  image: {{ default .image $download.image | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if $download.command }}
  command:
    {{- toYaml $download.command | nindent 4 }}
  {{- else }}
  command: [quire, fetch]
  args:
    - {{ trimPrefix "hf://" $model.source | quote }}
    - --to=/models
  {{- end }}
  env:
    {{- include "quire.joined" (dict "own" "- {name: HOME, value: /tmp}" "extra" $download.env "key" "name" "value" "download.env") | nindent 4 }}
  {{- with $download.existingSecret }}
  envFrom:
    - secretRef:
        name: {{ . | quote }}
  {{- end }}
  resources:
    {{- toYaml $download.resources | nindent 4 }}
  securityContext:
    {{- include "quire.containerSecurityContext" (dict "root" .root "spec" .pool) | nindent 4 }}
  volumeMounts:
    {{- $own := "- {name: tmp, mountPath: /tmp}\n- {name: models, mountPath: /models}" }}
    {{- include "quire.joined" (dict "own" $own "extra" .pool.extraVolumeMounts "key" "mountPath" "value" "extraVolumeMounts") | nindent 4 }}
{{- end -}}
