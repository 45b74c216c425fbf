{{/* The RayCluster's specification; a digest of what replaces pods is part of the cluster's name. */}}
{{- define "gemray.rayClusterSpec" -}}
rayVersion: {{ .Values.ray.version | quote }}
authOptions:
  mode: {{ .Values.ray.auth.mode }}
  {{- with .Values.ray.auth.existingSecret }}
  secretName: {{ . | quote }}
  {{- end }}
# What changes a pod makes a cluster of another name. What is left holds for pods that are made from now on: to replace
# the others would take the workers away from under drivers that serve.
upgradeStrategy:
  type: None
{{- with .Values.ray.gcsFaultTolerance }}
{{- if .enabled }}
gcsFaultToleranceOptions:
  backend: redis
  redisAddress: {{ .redisAddress | quote }}
  {{- if .passwordSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ .passwordSecret | quote }}, key: {{ .passwordKey | quote }}}
  {{- end }}
{{- end }}
{{- end }}
{{- if include "gemray.scales" . }}
# A driver that finds no room for a gang asks for a gang's worth of slots, and the autoscaler adds a worker that has them.
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.autoscaling.idleTimeoutSeconds }}
  resources:
    requests: {cpu: 500m, memory: 512Mi}
    limits: {cpu: 500m, memory: 512Mi}
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    # No work on the head: it only keeps the cluster's state.
    num-cpus: "0"
    dashboard-host: 0.0.0.0
    object-store-memory: {{ include "gemray.bytes" .Values.ray.objectStoreMemory | quote }}
  template:
    metadata:
      {{- include "gemray.podMetadata" (dict "root" . "part" .Values.head "component" "head") | nindent 6 }}
    spec:
      {{- include "gemray.podCommon" (dict "root" . "part" .Values.head) | trim | nindent 6 }}
      # The autoscaler, a sidecar of the head, is all that talks to Kubernetes.
      automountServiceAccountToken: {{ eq (include "gemray.scales" .) "true" }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add .Values.server.terminationGracePeriodSeconds 30 }}
      containers:
        - name: ray-head
          image: {{ include "gemray.image" . | quote }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          ports:
            - {name: gcs-server, containerPort: 6379}
            - {name: dashboard, containerPort: 8265}
            - {name: client, containerPort: 10001}
          env:
            {{- include "gemray.env" (dict "root" . "part" .Values.head) | nindent 12 }}
          # An upgrade takes the head away while drivers still drain: wait until no other pod is connected (port 6379 is
          # 18EB; state 01 is established).
          lifecycle:
            preStop:
              exec:
                command:
                  - /bin/bash
                  - -c
                  - >-
                    while awk '$2 ~ /:18EB$/ && $4 == "01" {split($2, here, ":"); split($3, there, ":");
                    if (here[1] != there[1]) found = 1} END {exit !found}' /proc/net/tcp /proc/net/tcp6 2>/dev/null;
                    do sleep 1; done
          resources:
            {{- toYaml .Values.head.resources | nindent 12 }}
          {{- with .Values.securityContext.container }}
          securityContext:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            {{- include "gemray.ownMounts" (dict "part" .Values.head) | nindent 12 }}
      volumes:
        {{- include "gemray.ownVolumes" (dict "part" .Values.head) | nindent 8 }}
workerGroupSpecs:
  {{- include "gemray.workerGroup" (dict "root" . "name" "gang" "ranks" (int (include "gemray.ranksPerPod" .)) "hosts" (int (include "gemray.podsPerGang" .))) | nindent 2 }}
  {{- if include "gemray.drafterApart" . }}
  {{- include "gemray.workerGroup" (dict "root" . "name" "drafter" "ranks" 1 "hosts" 1) | nindent 2 }}
  {{- end }}
{{- end -}}
