{{/*
A worker group: one replica for each gang. Call with (dict "root" $ "name" NAME "ranks" RANKS_PER_POD "hosts" PODS).
*/}}
{{- define "gemray.workerGroup" -}}
{{- $root := .root -}}
{{- $ranks := .ranks -}}
{{- $cuda := eq $root.Values.gang.device "cuda" -}}
- groupName: {{ .name }}
  # One replica is one gang: a pod that holds all its ranks, or numOfHosts pods when they cannot share one. The number
  # is the autoscaler's where there is one: an upgrade must not set it back.
  {{- $drivers := int (include "gemray.drivers" $root) }}
  {{- if not (include "gemray.scales" $root) }}
  replicas: {{ mul $drivers $root.Values.server.replicas }}
  {{- end }}
  minReplicas: {{ mul $drivers (int (include "gemray.leastReplicas" $root)) }}
  maxReplicas: {{ mul (ternary $root.Values.autoscaling.maxReplicas $drivers $root.Values.autoscaling.enabled) (int (include "gemray.mostReplicas" $root)) }}
  numOfHosts: {{ .hosts }}
  rayStartParams:
    object-store-memory: {{ include "gemray.bytes" $root.Values.ray.objectStoreMemory | quote }}
    # A slot for each rank, whatever the CPU limit is.
    num-cpus: {{ $ranks | quote }}
    {{- if $cuda }}
    num-gpus: {{ $ranks | quote }}
    {{- end }}
  template:
    metadata:
      {{- include "gemray.podMetadata" (dict "root" $root "part" $root.Values.worker "component" "worker") | nindent 6 }}
    spec:
      {{- include "gemray.podCommon" (dict "root" $root "part" $root.Values.worker) | trim | nindent 6 }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add $root.Values.server.terminationGracePeriodSeconds 15 }}
      {{- with $root.Values.worker.runtimeClassName }}
      runtimeClassName: {{ . | quote }}
      {{- end }}
      {{- $pins := and $root.Values.network.rdma.resource (eq $root.Values.network.rdma.memlock "node") }}
      {{- $downloads := eq $root.Values.model.volume.type "download" }}
      {{- if or $pins $downloads }}
      initContainers:
        {{- if $pins }}
        {{- include "gemray.memlockCheck" $root | nindent 8 }}
        {{- end }}
        {{- if $downloads }}
        {{- include "gemray.modelDownload" (dict "root" $root "weights" true) | nindent 8 }}
        {{- end }}
      {{- end }}
      containers:
        - name: ray-worker
          image: {{ include "gemray.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          env:
            {{- include "gemray.env" (dict "root" $root "part" $root.Values.worker) | nindent 12 }}
            {{- if ne $root.Values.tritonCache.type "none" }}
            - {name: TRITON_CACHE_DIR, value: /var/cache/triton}
            {{- end }}
          # An upgrade takes the workers away while drivers still drain: ranks end with their driver, so wait for them.
          lifecycle:
            preStop:
              exec:
                command: [/bin/bash, -c, "while grep -qs 'Rank[W]orker' /proc/[0-9]*/cmdline; do sleep 1; done"]
          resources:
            requests:
              {{- toYaml $root.Values.worker.resources.requests | nindent 14 }}
              {{- if $cuda }}
              {{ $root.Values.gang.gpuResource }}: {{ $ranks }}
              {{- end }}
              {{- with $root.Values.network.rdma.resource }}
              {{ . }}: {{ $root.Values.network.rdma.count }}
              {{- end }}
            limits:
              {{- toYaml $root.Values.worker.resources.limits | nindent 14 }}
              {{- if $cuda }}
              {{ $root.Values.gang.gpuResource }}: {{ $ranks }}
              {{- end }}
              {{- with $root.Values.network.rdma.resource }}
              {{ . }}: {{ $root.Values.network.rdma.count }}
              {{- end }}
          {{- $security := deepCopy (default dict $root.Values.securityContext.container) }}
          {{- if and $root.Values.network.rdma.resource (eq $root.Values.network.rdma.memlock "root") }}
          {{- /* The capability has an effect for root alone: Kubernetes gives other users no ambient capabilities. */}}
          {{- $capabilities := merge (dict "add" (list "IPC_LOCK")) (default dict $security.capabilities) }}
          {{- $security = merge (dict "runAsUser" 0 "runAsNonRoot" false "capabilities" $capabilities) $security }}
          {{- end }}
          {{- with $security }}
          securityContext:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            {{- include "gemray.modelMount" (dict "root" $root "write" false) | nindent 12 }}
            - {name: shared-mem, mountPath: /dev/shm}
            {{- if ne $root.Values.tritonCache.type "none" }}
            - {name: triton-cache, mountPath: /var/cache/triton}
            {{- end }}
            {{- include "gemray.ownMounts" (dict "part" $root.Values.worker) | nindent 12 }}
      volumes:
        {{- include "gemray.modelVolume" $root | nindent 8 }}
        # The operator's own /dev/shm has no size; NCCL and Ray share this one.
        - name: shared-mem
          emptyDir:
            medium: Memory
            sizeLimit: {{ $root.Values.shm.worker }}
        {{- with $root.Values.tritonCache }}
        {{- if eq .type "emptyDir" }}
        - name: triton-cache
          emptyDir: {sizeLimit: {{ .size }}}
        {{- else if eq .type "hostPath" }}
        - name: triton-cache
          hostPath: {path: {{ .hostPath.path | quote }}, type: Directory}
        {{- else if eq .type "pvc" }}
        - name: triton-cache
          persistentVolumeClaim: {claimName: {{ .pvc.claimName | quote }}}
        {{- end }}
        {{- end }}
        {{- include "gemray.ownVolumes" (dict "part" $root.Values.worker) | nindent 8 }}
{{- end -}}

{{/* An init container that says why RDMA would not work, where NCCL only fails in the middle of a start. */}}
{{- define "gemray.memlockCheck" -}}
- name: check-memlock
  image: {{ include "gemray.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - /bin/bash
    - -c
    - |
      limit=$(ulimit -l)
      [[ "$limit" == unlimited ]] && exit 0
      echo "this node lets a container lock $limit KiB of memory, and RDMA pins more: start its container runtime with" \
        "LimitMEMLOCK=infinity, or set network.rdma.memlock to root" >&2
      exit 1
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: 100m, memory: 32Mi}
  {{- with .Values.securityContext.container }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
