{{/* The template of a pod that serves OpenAI's HTTP API: a client of the drivers, without Ray and GPUs. */}}
{{- define "gemray.openaiPod" -}}
{{- $openai := .Values.openai -}}
metadata:
  labels:
    {{- include "gemray.selector" . | nindent 4 }}
    app.kubernetes.io/component: openai
    {{- with $openai.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $openai.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "gemray.podCommon" (dict "root" . "part" $openai) | trim | nindent 2 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # It lets answers finish for 30 s.
  terminationGracePeriodSeconds: {{ add .Values.server.preStopSeconds 40 }}
  containers:
    - name: openai
      image: {{ include "gemray.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - openai
        - --address={{ include "gemray.fullname" . }}:{{ .Values.service.port }}
        - --host=0.0.0.0
        - --port={{ $openai.port }}
        {{- if $openai.timeoutSeconds }}
        - --timeout={{ $openai.timeoutSeconds }}
        {{- end }}
        {{- if $openai.tlsSecret }}
        - --http-tls-cert-file=/etc/gemray/http-tls/tls.crt
        - --http-tls-key-file=/etc/gemray/http-tls/tls.key
        {{- end }}
        {{- if .Values.tls.secretName }}
        # The certificate must name the Service.
        - --tls-ca-file=/etc/gemray/tls/ca.crt
        {{- else if .Values.apiToken.secretName }}
        # Callers' tokens, which the drivers ask for, stay within the cluster.
        - --plaintext-token
        {{- end }}
        {{- if .Values.tls.clientAuth }}
        - --tls-cert-file=/etc/gemray/tls/tls.crt
        - --tls-key-file=/etc/gemray/tls/tls.key
        {{- end }}
        {{- range $openai.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      {{- with $openai.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: {{ $openai.port }}}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ .Values.server.preStopSeconds | quote }}]}}
      # Whether the gateway runs, not whether the drivers serve: when they do not, it waits for them and then says 503,
      # which is more than a Service without a pod can say.
      {{- range list "startupProbe" "readinessProbe" "livenessProbe" }}
      {{ . }}:
        httpGet: {path: /live, port: http, scheme: {{ ternary "HTTPS" "HTTP" (not (empty $openai.tlsSecret)) }}}
        periodSeconds: {{ ternary 2 10 (eq . "startupProbe") }}
        timeoutSeconds: 5
        failureThreshold: {{ ternary 60 3 (eq . "startupProbe") }}
      {{- end }}
      resources:
        {{- toYaml $openai.resources | nindent 8 }}
      securityContext:
        {{- toYaml (merge (deepCopy (default dict .Values.securityContext.container)) (dict "readOnlyRootFilesystem" true)) | nindent 8 }}
      volumeMounts:
        {{- include "gemray.ownMounts" (dict "part" $openai) | nindent 8 }}
        {{- if .Values.tls.secretName }}
        - {name: tls, mountPath: /etc/gemray/tls, readOnly: true}
        {{- end }}
        {{- if $openai.tlsSecret }}
        - {name: http-tls, mountPath: /etc/gemray/http-tls, readOnly: true}
        {{- end }}
  volumes:
    {{- include "gemray.ownVolumes" (dict "part" $openai) | nindent 4 }}
    {{- if .Values.tls.secretName }}
    - name: tls
      secret:
        secretName: {{ .Values.tls.secretName | quote }}
        {{- if not .Values.tls.clientAuth }}
        # The drivers' key is theirs.
        items: [{key: ca.crt, path: ca.crt}]
        {{- end }}
    {{- end }}
    {{- with $openai.tlsSecret }}
    - name: http-tls
      secret: {secretName: {{ . | quote }}}
    {{- end }}
{{- end -}}
