{{/*
A worker group: one replica for each gang. Call with (dict "root" $ "name" NAME "ranks" RANKS_PER_POD "hosts" PODS).
*/}}
{{- define "gemray.workerGroup" -}}
{{- $root := .root -}}
{{- $ranks := .ranks -}}
{{- $cuda := eq $root.Values.gang.device "cuda" -}}
- groupName: {{ .name }}
  # One replica is one gang: a pod that holds all its ranks, or numOfHosts pods when they cannot share one.
  replicas: {{ $root.Values.gang.replicas }}
  minReplicas: {{ $root.Values.gang.replicas }}
  maxReplicas: {{ $root.Values.gang.replicas }}
  numOfHosts: {{ .hosts }}
  rayStartParams:
    object-store-memory: {{ $root.Values.ray.objectStoreMemory | int64 | quote }}
    # A slot for each rank, whatever the CPU limit is.
    num-cpus: {{ $ranks | quote }}
    {{- if $cuda }}
    num-gpus: {{ $ranks | quote }}
    {{- end }}
  template:
    metadata:
      labels:
        {{- include "gemray.labels" $root | nindent 8 }}
        app.kubernetes.io/component: worker
      {{- with $root.Values.worker.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "gemray.podCommon" (dict "root" $root "part" $root.Values.worker) | trim | nindent 6 }}
      {{- with $root.Values.worker.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- if eq $root.Values.model.volume.type "download" }}
      initContainers:
        {{- include "gemray.modelDownload" (dict "root" $root "weights" true) | nindent 8 }}
      {{- end }}
      containers:
        - name: ray-worker
          image: {{ include "gemray.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          env:
            {{- include "gemray.env" $root | nindent 12 }}
            {{- with $root.Values.worker.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          resources:
            requests:
              {{- toYaml $root.Values.worker.resources.requests | nindent 14 }}
              {{- if $cuda }}
              {{ $root.Values.gang.gpuResource }}: {{ $ranks }}
              {{- end }}
            limits:
              {{- toYaml $root.Values.worker.resources.limits | nindent 14 }}
              {{- if $cuda }}
              {{ $root.Values.gang.gpuResource }}: {{ $ranks }}
              {{- end }}
          {{- with $root.Values.securityContext.container }}
          securityContext:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            {{- include "gemray.modelMount" $root | nindent 12 }}
            - {name: shared-mem, mountPath: /dev/shm}
      volumes:
        {{- include "gemray.modelVolume" $root | nindent 8 }}
        # The operator's own /dev/shm has no size; NCCL and Ray share this one.
        - name: shared-mem
          emptyDir:
            medium: Memory
            sizeLimit: {{ $root.Values.shm.worker }}
{{- end -}}
