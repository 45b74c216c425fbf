{{/* The pods of this release that are nodes of Ray. */}}
{{- define "gemray.rayPods" -}}
matchLabels:
  {{- include "gemray.selector" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [driver, head, worker]}
{{- end -}}

{{/*
The rule for one port: open to `peers`, or to everyone without any. Where there are some, the pods of this release whose
components `own` names may call as well. Call with (dict "root" $ "port" NAME "peers" LIST "own" LIST).
*/}}
{{- define "gemray.clientRule" -}}
- ports: [{port: {{ .port }}, protocol: TCP}]
  {{- with .peers }}
  from:
    {{- toYaml . | nindent 4 }}
    {{- with $.own }}
    - podSelector:
        matchLabels:
          {{- include "gemray.selector" $.root | nindent 10 }}
        matchExpressions:
          - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " . }}]}
    {{- end }}
  {{- end }}
{{- end -}}
