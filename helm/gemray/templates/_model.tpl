{{/* pvc, hostPath or emptyDir: where the model lies in the end. */}}
{{- define "gemray.modelHome" -}}
{{- $volume := .Values.model.volume -}}
{{- if ne $volume.type "download" -}}
{{ $volume.type }}
{{- else -}}
{{ get (dict "pod" "emptyDir" "node" "hostPath" "claim" "pvc") $volume.download.keep }}
{{- end -}}
{{- end -}}

{{/* Call with (dict "root" $ "write" true|false): only what downloads may write. */}}
{{- define "gemray.modelMount" -}}
{{- $volume := .root.Values.model.volume -}}
- name: model
  mountPath: {{ $volume.mountPath }}
  {{- if not .write }}
  readOnly: true
  {{- end }}
  {{- if and (eq (include "gemray.modelHome" .root) "pvc") $volume.pvc.subPath }}
  subPath: {{ $volume.pvc.subPath }}
  {{- end }}
{{- end -}}

{{- define "gemray.modelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- $home := include "gemray.modelHome" . -}}
- name: model
  {{- if eq $home "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $volume.pvc.claimName }}
    {{- if ne $volume.type "download" }}
    readOnly: true
    {{- end }}
  {{- else if eq $home "hostPath" }}
  hostPath:
    path: {{ $volume.hostPath.path }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ $volume.download.size }}
  {{- end }}
{{- end -}}

{{/*
Init containers that download. Call with (dict "root" $ "weights" true|false): a driver needs the tokenizer and the
configuration only. On a volume that others share, one pod downloads while the others wait at its lock; the mark that it
leaves names repository and revision, so the next start downloads nothing.
*/}}
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
    {{- if ne $download.keep "pod" }}
    - /bin/bash
    - -euo
    - pipefail
    - -c
    - |
      mkdir -p "$MODEL_DIRECTORY"
      exec 9>"$MODEL_DIRECTORY/.gemray-lock"
      flock 9
      mark="$MODEL_DIRECTORY/.gemray-$(echo "$*" | sha256sum | cut -c 1-16)"
      if [[ ! -e "$mark" ]]; then
        "$@"
        touch "$mark"
      fi
    - download
    {{- end }}
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
    - {name: MODEL_DIRECTORY, value: {{ .path | quote }}}
    {{- with $download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: token}
    {{- end }}
  {{- with $download.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.securityContext.container }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "gemray.modelMount" (dict "root" $root "write" true) | nindent 4 }}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}
