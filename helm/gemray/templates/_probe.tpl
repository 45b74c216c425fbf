{{/*
One probe of the driver. Call with (dict "root" $ "service" NAME "times" .Values.probes.X).
The kubelet's gRPC probe speaks plain HTTP/2 only, so with TLS a small client in the container asks instead.
*/}}
{{- define "gemray.probe" -}}
{{- if .root.Values.tls.secretName -}}
exec:
  command:
    - python
    - -m
    - gemray_cluster.check.health_probe
    - --address=127.0.0.1:{{ .root.Values.server.port }}
    - --service={{ .service }}
    - --timeout={{ .times.timeoutSeconds }}
    - --tls-dir=/etc/gemray/tls
    - --tls-name={{ .root.Values.tls.serverName }}
{{- else -}}
grpc:
  port: {{ .root.Values.server.port }}
  service: {{ .service }}
{{- end }}
periodSeconds: {{ .times.periodSeconds }}
timeoutSeconds: {{ .times.timeoutSeconds }}
failureThreshold: {{ .times.failureThreshold }}
{{- end -}}
