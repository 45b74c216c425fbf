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
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gemray.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "gemray.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "gemray.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "gemray.rayHead" -}}
{{ include "gemray.fullname" . }}-head-svc.{{ .Release.Namespace }}.svc:6379
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

{{/* Whether one pod holds a whole gang. */}}
{{- define "gemray.strategy" -}}
{{- if and (eq (include "gemray.podsPerGang" .) "1") (not (include "gemray.drafterApart" .)) }}strict_pack{{ else }}pack{{ end -}}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "gemray.validate" -}}
{{- $v := .Values -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.volume.mountPath)) (printf "%s/" $v.model.path)) -}}
{{- fail (printf "model.path %q is not under model.volume.mountPath %q, so no pod would see the model" $v.model.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if and (eq $v.model.volume.type "download") (eq (trimSuffix "/" $v.model.path) (trimSuffix "/" $v.model.volume.mountPath)) -}}
{{- fail "model.path must be a directory below model.volume.mountPath when the model is downloaded" -}}
{{- end -}}
{{- if $v.drafter.path -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.volume.mountPath)) $v.drafter.path) -}}
{{- fail (printf "drafter.path %q is not under model.volume.mountPath %q, so no pod would see it" $v.drafter.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if and (eq $v.model.volume.type "download") (not $v.drafter.repository) -}}
{{- fail "drafter.repository must say where to download the drafter from" -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.clientAuth (not $v.tls.secretName) -}}
{{- fail "tls.clientAuth needs tls.secretName: client certificates are part of TLS" -}}
{{- end -}}
{{- end -}}

{{/* Environment of every container that runs Ray. */}}
{{- define "gemray.env" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- /* Ranks of a pod must all see every card: symmetric memory refuses two ranks that both say "device 0". */}}
- {name: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, value: "1"}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- with .Values.network.interface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* The operator sets these in the pods of the RayCluster; every other pod that talks to Ray needs the same. */}}
{{- define "gemray.rayAuthEnv" -}}
- {name: RAY_AUTH_MODE, value: {{ .Values.ray.auth.mode }}}
{{- if eq .Values.ray.auth.mode "token" }}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (include "gemray.fullname" .) .Values.ray.auth.existingSecret }}
      key: auth_token
{{- end }}
{{- end -}}

{{- define "gemray.modelMount" -}}
- name: model
  mountPath: {{ .Values.model.volume.mountPath }}
  {{- if ne .Values.model.volume.type "download" }}
  readOnly: true
  {{- end }}
  {{- if and (eq .Values.model.volume.type "pvc") .Values.model.volume.pvc.subPath }}
  subPath: {{ .Values.model.volume.pvc.subPath }}
  {{- end }}
{{- end -}}

{{- define "gemray.modelVolume" -}}
{{- $volume := .Values.model.volume -}}
- name: model
  {{- if eq $volume.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $volume.pvc.claimName }}
    readOnly: true
  {{- else if eq $volume.type "hostPath" }}
  hostPath:
    path: {{ $volume.hostPath.path }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ $volume.download.size }}
  {{- end }}
{{- end -}}

{{/* Call with (dict "root" $ "weights" true|false): the driver needs the tokenizer and configuration only. */}}
{{- define "gemray.modelDownload" -}}
{{- $root := .root -}}
{{- $weights := .weights -}}
{{- $download := $root.Values.model.volume.download -}}
{{- $wanted := list (dict "name" "model" "repository" $download.repository "revision" $download.revision "path" $root.Values.model.path) -}}
{{- with $root.Values.drafter -}}
{{- if .path -}}
{{- $wanted = append $wanted (dict "name" "drafter" "repository" .repository "revision" .revision "path" .path) -}}
{{- end -}}
{{- end -}}
{{- range $wanted }}
- name: download-{{ .name }}
  image: {{ include "gemray.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ .repository | quote }}
    - --revision
    - {{ .revision | quote }}
    - --local-dir
    - {{ .path | quote }}
    {{- if not $weights }}
    - --exclude
    - "*.safetensors"
    {{- end }}
  env:
    - {name: HF_HOME, value: /tmp/hf}
    # The image is offline otherwise.
    - {name: HF_HUB_OFFLINE, value: "0"}
    {{- with $download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: token}
    {{- end }}
  {{- with $root.Values.securityContext.container }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "gemray.modelMount" $root | nindent 4 }}
{{- end }}
{{- end -}}

{{/* Parts of a pod spec that every pod shares. Call with (dict "root" $ "part" .Values.worker). */}}
{{- define "gemray.podCommon" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
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
  secret: {secretName: {{ . }}}
{{- end }}
{{- if .Values.apiToken.secretName }}
- name: api-token
  secret:
    secretName: {{ .Values.apiToken.secretName }}
    items: [{key: {{ .Values.apiToken.key }}, path: token}]
{{- end }}
{{- end -}}
