{{/* The template of a driver's pod. */}}
{{- define "gemray.driverPod" -}}
metadata:
  {{- include "gemray.podMetadata" (dict "root" . "part" .Values.driver "component" "driver") | nindent 2 }}
spec:
  {{- include "gemray.podCommon" (dict "root" . "part" .Values.driver) | trim | nindent 2 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.server.terminationGracePeriodSeconds }}
  {{- if eq .Values.model.volume.type "download" }}
  initContainers:
    {{- include "gemray.modelDownload" (dict "root" . "weights" false) | nindent 4 }}
  {{- end }}
  containers:
    - name: driver
      image: {{ include "gemray.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      # A Ray driver needs a raylet on its own host: this pod joins the cluster as a node without resources.
      command:
        - /bin/bash
        - -euo
        - pipefail
        - -c
        - |
          deadline=$((SECONDS + START_TIMEOUT_SECONDS))
          until ray health-check --address "$RAY_HEAD" >/dev/null 2>&1; do
            if ((SECONDS > deadline)); then
              echo "no answer from the Ray head at $RAY_HEAD within $START_TIMEOUT_SECONDS s" >&2
              exit 1
            fi
            sleep 2
          done
          ray start --address="$RAY_HEAD" --node-ip-address="$POD_IP" --num-cpus=0 --num-gpus=0 \
            --object-store-memory="$RAY_OBJECT_STORE_MEMORY"
          exec "$@"
        - driver
      args:
        - gemray
        - serve
        - {{ include "gemray.modelPath" . | printf "--model=%s" | quote }}
        - --tp={{ .Values.gang.tensorParallelSize }}
        # Never guessed: this pod may be up before any of the gang's.
        - --device={{ .Values.gang.device }}
        - --strategy={{ include "gemray.strategy" . }}
        - --dtype={{ .Values.server.dtype }}
        - --host=0.0.0.0
        - --port={{ .Values.server.port }}
        - --address={{ include "gemray.rayHead" . }}
        - --metrics-port={{ .Values.metrics.port }}
        {{- with .Values.drafter }}
        {{- if .path }}
        - {{ include "gemray.drafterPath" (dict "root" $ "drafter" .) | printf "--drafter=%s" | quote }}
        {{- if .second.path }}
        - {{ include "gemray.drafterPath" (dict "root" $ "drafter" .second) | printf "--drafter=%s" | quote }}
        {{- end }}
        - --method={{ .method }}
        - --drafter-placement={{ .placement }}
        - --draft-tokens={{ if kindIs "string" .draftTokens }}{{ .draftTokens }}{{ else }}{{ int64 .draftTokens }}{{ end }}
        {{- end }}
        {{- end }}
        {{- if .Values.server.maxModelLen }}
        - --max-model-len={{ .Values.server.maxModelLen | int64 }}
        {{- end }}
        {{- if ne .Values.server.numerics "fast" }}
        - --numerics={{ .Values.server.numerics }}
        {{- end }}
        {{- with .Values.server.kvMemory }}
        - --kv-memory={{ . }}
        {{- end }}
        {{- with .Values.server.gpuMemoryUtilization }}
        - --gpu-memory-utilization={{ . }}
        {{- end }}
        {{- if ne .Values.server.kvDtype "auto" }}
        - --kv-dtype={{ .Values.server.kvDtype }}
        {{- end }}
        {{- if or (gt (int .Values.server.replicas) 1) (ne (include "gemray.leastReplicas" .) (include "gemray.mostReplicas" .)) }}
        - --replicas={{ .Values.server.replicas }}
        - --min-replicas={{ include "gemray.leastReplicas" . }}
        - --max-replicas={{ include "gemray.mostReplicas" . }}
        {{- end }}
        - --placement-deadline-s={{ .Values.server.startTimeoutSeconds }}
        - --drain-deadline-s={{ sub (int .Values.server.terminationGracePeriodSeconds) (add (int .Values.server.preStopSeconds) 10) }}
        {{- with .Values.server.maxConnectionAgeSeconds }}
        - --max-connection-age-s={{ . }}
        {{- end }}
        {{- if ne .Values.server.logFormat "text" }}
        - --log-format={{ .Values.server.logFormat }}
        {{- end }}
        {{- with .Values.server.otlpTracesEndpoint }}
        - {{ printf "--otlp-traces-endpoint=%s" . | quote }}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - --tls-cert-file=/etc/gemray/tls/tls.crt
        - --tls-key-file=/etc/gemray/tls/tls.key
        {{- end }}
        {{- if .Values.tls.clientAuth }}
        - --tls-client-ca-file=/etc/gemray/tls/ca.crt
        {{- end }}
        {{- if .Values.apiToken.secretName }}
        - --auth-token-file=/etc/gemray/token/token
        {{- end }}
        {{- range .Values.server.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "gemray.env" (dict "root" . "part" .Values.driver) | nindent 8 }}
        {{- include "gemray.rayAuthEnv" . | nindent 8 }}
        - {name: RAY_HEAD, value: {{ include "gemray.rayHead" . | quote }}}
        - {name: RAY_OBJECT_STORE_MEMORY, value: {{ include "gemray.bytes" .Values.ray.objectStoreMemory | quote }}}
        - {name: START_TIMEOUT_SECONDS, value: {{ .Values.server.startTimeoutSeconds | quote }}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
      ports:
        - {name: grpc, containerPort: {{ .Values.server.port }}}
        - {name: metrics, containerPort: {{ .Values.metrics.port }}}
      # It goes on serving until no node sends it new connections, and is told to drain then.
      lifecycle:
        preStop: {exec: {command: [sleep, {{ .Values.server.preStopSeconds | quote }}]}}
      startupProbe:
        {{- include "gemray.probe" (dict "root" . "service" "gemray.v1.GenerationService" "times" .Values.probes.startup) | nindent 8 }}
      readinessProbe:
        {{- include "gemray.probe" (dict "root" . "service" "gemray.v1.GenerationService" "times" .Values.probes.readiness) | nindent 8 }}
      livenessProbe:
        {{- include "gemray.probe" (dict "root" . "service" "gemray.liveness" "times" .Values.probes.liveness) | nindent 8 }}
      resources:
        {{- toYaml .Values.driver.resources | nindent 8 }}
      {{- with .Values.securityContext.container }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "gemray.modelMount" (dict "root" . "write" false) | nindent 8 }}
        - {name: shared-mem, mountPath: /dev/shm}
        {{- include "gemray.ownMounts" (dict "part" .Values.driver) | nindent 8 }}
        {{- include "gemray.secretMounts" . | nindent 8 }}
  volumes:
    {{- include "gemray.modelVolume" . | nindent 4 }}
    - name: shared-mem
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.shm.driver }}
    {{- include "gemray.ownVolumes" (dict "part" .Values.driver) | nindent 4 }}
    {{- include "gemray.secretVolumes" . | nindent 4 }}
{{- end -}}
