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
  mountPath: {{ $volume.mountPath | quote }}
  {{- if not .write }}
  readOnly: true
  {{- end }}
  {{- if and (eq (include "gemray.modelHome" .root) "pvc") $volume.pvc.subPath }}
  subPath: {{ $volume.pvc.subPath | quote }}
  {{- end }}
{{- end -}}

{{- define "gemray.modelVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- $home := include "gemray.modelHome" . -}}
- name: model
  {{- if eq $home "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $volume.pvc.claimName | quote }}
    {{- if ne $volume.type "download" }}
    readOnly: true
    {{- end }}
  {{- else if eq $home "hostPath" }}
  hostPath:
    path: {{ $volume.hostPath.path | quote }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ $volume.download.size }}
  {{- end }}
{{- end -}}

{{/*
Where a pod finds a checkpoint. Call with (dict "root" $ "path" PATH "repository" REPOSITORY "revision" REVISION). What is
kept longer than a pod lies in a directory of its repository and revision: pods of another revision, which an upgrade or a
rollback runs beside these, neither take it for theirs nor write into it. The last part of the path stays, which is the
model's name.
*/}}
{{- define "gemray.checkpointPath" -}}
{{- $volume := .root.Values.model.volume -}}
{{- $path := clean .path -}}
{{- if and (eq $volume.type "download") (ne $volume.download.keep "pod") -}}
{{- $slug := regexReplaceAll "[^A-Za-z0-9.-]+" .repository "-" | trunc 60 -}}
{{- $hash := printf "%s@%s" .repository .revision | sha256sum | trunc 12 -}}
{{ printf "%s/%s-%s/%s" (dir $path) $slug $hash (base $path) }}
{{- else -}}
{{ $path }}
{{- end -}}
{{- end -}}

{{- define "gemray.modelPath" -}}
{{- $download := .Values.model.volume.download -}}
{{- include "gemray.checkpointPath" (dict "root" . "path" .Values.model.path "repository" $download.repository "revision" $download.revision) -}}
{{- end -}}

{{/* Call with (dict "root" $ "drafter" DRAFTER): `drafter` or `drafter.second` of the values. */}}
{{- define "gemray.drafterPath" -}}
{{- with .drafter -}}
{{- include "gemray.checkpointPath" (dict "root" $.root "path" .path "repository" .repository "revision" .revision) -}}
{{- end -}}
{{- end -}}

{{/*
Init containers that download. Call with (dict "root" $ "weights" true|false): a driver needs the tokenizer and the
configuration only. On a volume that others share, one pod downloads while the others wait at its lock; the mark that it
leaves last, in the directory of this repository and revision, says that the next start needs to download nothing.
*/}}
{{- define "gemray.modelDownload" -}}
{{- $root := .root -}}
{{- $weights := .weights -}}
{{- $download := $root.Values.model.volume.download -}}
{{- $wanted := list (dict "name" "model" "repository" $download.repository "revision" $download.revision "path" (include "gemray.modelPath" $root)) -}}
{{- range $name, $drafter := dict "drafter" $root.Values.drafter "second-drafter" $root.Values.drafter.second -}}
{{- if .path -}}
{{- $wanted = append $wanted (dict "name" $name "repository" .repository "revision" .revision "path" (include "gemray.drafterPath" (dict "root" $root "drafter" .))) -}}
{{- end -}}
{{- end -}}
{{- range $wanted }}
- name: download-{{ .name }}
  image: {{ include "gemray.image" $root | quote }}
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
      {{- /* What has the weights has all the rest: a driver must not fetch that anew from a branch that has moved. */}}
      if [[ ! -e "$MODEL_DIRECTORY/.gemray-complete" && ! -e "$MODEL_DIRECTORY/$MARK" ]]; then
        "$@"
        sync -f "$MODEL_DIRECTORY"
        touch "$MODEL_DIRECTORY/$MARK"
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
    {{- if ne $download.keep "pod" }}
    - {name: MODEL_DIRECTORY, value: {{ .path | quote }}}
    - {name: MARK, value: {{ ternary ".gemray-complete" ".gemray-without-weights" $weights }}}
    {{- end }}
    {{- with $download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . | quote }}, key: token}
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
