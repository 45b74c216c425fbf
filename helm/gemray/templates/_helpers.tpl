{{/* Names. KubeRay appends "-head-svc" and hashes to the RayCluster's name, so it stays short. */}}
{{- define "gemray.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ray pods must not carry app.kubernetes.io/name: the operator selects the head by its own value of it. */}}
{{- define "gemray.selector" -}}
app.kubernetes.io/part-of: gemray
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "gemray.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "gemray.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "gemray.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/*
The RayCluster. Its name ends with a digest of what its pods are: whatever must replace one makes another cluster, and
the drivers, which belong to one cluster, come and go with it. So a new driver never meets old workers.
*/}}
{{- define "gemray.rayCluster" -}}
{{- if .Values.ray.existingCluster -}}
{{ .Values.ray.existingCluster }}
{{- else -}}
{{ include "gemray.fullname" . }}-{{ include "gemray.rayClusterDigest" . }}
{{- end -}}
{{- end -}}

{{/* The same for a cluster that only differs in what may change in place: numbers of pods, and what holds at their end. */}}
{{- define "gemray.rayClusterDigest" -}}
{{- $spec := omit (include "gemray.rayClusterSpec" . | fromYaml) "upgradeStrategy" "autoscalerOptions" -}}
{{- range $group := prepend $spec.workerGroupSpecs $spec.headGroupSpec -}}
{{- range list "replicas" "minReplicas" "maxReplicas" -}}
{{- $_ := unset $group . -}}
{{- end -}}
{{- $_ := unset $group.template.spec "terminationGracePeriodSeconds" -}}
{{- range $group.template.spec.containers -}}
{{- $_ := unset . "lifecycle" -}}
{{- end -}}
{{- end -}}
{{- $spec | toJson | sha256sum | trunc 8 -}}
{{- end -}}

{{/* Drivers belong to one RayCluster, so that an upgrade ends all that serve from the old one together with it. */}}
{{- define "gemray.driver" -}}
{{ include "gemray.fullname" . }}-driver{{ if not .Values.ray.existingCluster }}-{{ include "gemray.rayClusterDigest" . }}{{ end }}
{{- end -}}

{{- define "gemray.driverSelector" -}}
{{ include "gemray.selector" . }}
app.kubernetes.io/component: driver
{{- if not .Values.ray.existingCluster }}
gemray/cluster: {{ include "gemray.rayCluster" . | quote }}
{{- end }}
{{- end -}}

{{- define "gemray.rayHead" -}}
{{ include "gemray.rayCluster" . }}-head-svc.{{ .Release.Namespace }}.svc:6379
{{- end -}}

{{/* What a gang serves, in every pod's template: a change of it replaces drivers and workers together. */}}
{{- define "gemray.serves" -}}
{{- /* A second drafter counts where there is one, so that charts before and after that had none agree. */}}
{{- $drafter := ternary .Values.drafter (omit .Values.drafter "second") (ne .Values.drafter.second.path "") -}}
gemray/serves: {{ list (include "gemray.image" .) .Values.model $drafter .Values.gang.tensorParallelSize .Values.gang.device | toJson | sha256sum | trunc 16 | quote }}
{{- end -}}

{{/* "true" when the drafter has a rank of its own. */}}
{{- define "gemray.dedicated" -}}
{{- if and .Values.drafter.path (eq .Values.drafter.placement "dedicated") }}true{{ end -}}
{{- end -}}

{{/* "true" when that rank finds no room in the pod of the others. */}}
{{- define "gemray.drafterApart" -}}
{{- if and (include "gemray.dedicated" .) (ge (int .Values.gang.tensorParallelSize) (int .Values.gang.maxGpusPerPod)) }}true{{ end -}}
{{- end -}}

{{/* Ranks in one pod, and pods of target ranks in one gang. */}}
{{- define "gemray.ranksPerPod" -}}
{{- $target := min (int .Values.gang.tensorParallelSize) (int .Values.gang.maxGpusPerPod) -}}
{{- if and (include "gemray.dedicated" .) (not (include "gemray.drafterApart" .)) -}}
{{- add $target 1 -}}
{{- else -}}
{{- $target -}}
{{- end -}}
{{- end -}}
{{- define "gemray.podsPerGang" -}}
{{- max 1 (div (int .Values.gang.tensorParallelSize) (int .Values.gang.maxGpusPerPod)) -}}
{{- end -}}

{{/* Gangs behind one driver: at start, and in any case. */}}
{{- define "gemray.leastReplicas" -}}
{{- default .Values.server.replicas .Values.server.minReplicas | int -}}
{{- end -}}
{{- define "gemray.mostReplicas" -}}
{{- default .Values.server.replicas .Values.server.maxReplicas | int -}}
{{- end -}}

{{/* Drivers: those that there are in any case. */}}
{{- define "gemray.drivers" -}}
{{- ternary .Values.autoscaling.minReplicas .Values.gang.replicas .Values.autoscaling.enabled | int -}}
{{- end -}}

{{/* "true" when the number of gangs follows the load, so that Ray's autoscaler has to add workers. */}}
{{- define "gemray.scales" -}}
{{- if or .Values.autoscaling.enabled (ne (include "gemray.leastReplicas" .) (include "gemray.mostReplicas" .)) }}true{{ end -}}
{{- end -}}

{{/* Whether one pod holds a whole gang. */}}
{{- define "gemray.strategy" -}}
{{- if and (eq (include "gemray.podsPerGang" .) "1") (not (include "gemray.drafterApart" .)) }}strict_pack{{ else }}pack{{ end -}}
{{- end -}}

{{/* Environment of every container that runs Ray. Call with (dict "root" $ "part" .Values.worker). */}}
{{- define "gemray.env" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- /* Ranks of a pod must all see every card: symmetric memory refuses two ranks that both say "device 0". */}}
- {name: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, value: "1"}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- with .root.Values.network.interface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .root.Values.network.nccl }}
- {name: NCCL_{{ $name }}, value: {{ ternary ($value | int64 | toString) ($value | toString) (kindIs "float64" $value) | quote }}}
{{- end }}
{{- if .root.Values.ray.gcsFaultTolerance.enabled }}
{{- /* How long a node waits for a head that restarts; the operator sets it in the pods of the RayCluster. */}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
{{- end }}
{{- with .part.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The operator sets these in the pods of the RayCluster; every other pod that talks to Ray needs the same. */}}
{{- define "gemray.rayAuthEnv" -}}
- {name: RAY_AUTH_MODE, value: {{ .Values.ray.auth.mode }}}
{{- if eq .Values.ray.auth.mode "token" }}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (include "gemray.rayCluster" .) .Values.ray.auth.existingSecret | quote }}
      key: auth_token
{{- end }}
{{- end -}}

{{/* Parts of a pod spec that every pod shares. Call with (dict "root" $ "part" .Values.worker). */}}
{{- define "gemray.podCommon" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.securityContext.pod }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .part.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end -}}

{{/* Labels and annotations of a pod. Call with (dict "root" $ "part" .Values.worker "component" "worker"). */}}
{{- define "gemray.podMetadata" -}}
labels:
  {{- /* Not those of the chart's version: a new chart alone is no reason to load a model again. */}}
  {{- if eq .component "driver" }}
  {{- include "gemray.driverSelector" .root | nindent 2 }}
  {{- else }}
  {{- include "gemray.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- end }}
  {{- with .part.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- include "gemray.serves" .root | nindent 2 }}
  {{- with .part.annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What a read-only root file system leaves to write: Ray's session, caches, and the user's own mounts and volumes. */}}
{{- define "gemray.ownMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/gemray}
{{- with .part.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- define "gemray.ownVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- with .part.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* TLS files and bearer tokens, where they are used. */}}
{{- define "gemray.secretMounts" -}}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/gemray/tls, readOnly: true}
{{- end }}
{{- if .Values.apiToken.secretName }}
- {name: api-token, mountPath: /etc/gemray/token, readOnly: true}
{{- end }}
{{- end -}}

{{- define "gemray.secretVolumes" -}}
{{- with .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- if .Values.apiToken.secretName }}
- name: api-token
  secret:
    secretName: {{ .Values.apiToken.secretName | quote }}
    items: [{key: {{ .Values.apiToken.key | quote }}, path: token}]
{{- end }}
{{- end -}}
