{{/* Ports, times and certificates of the drivers. */}}
{{- define "gemray.validateServer" -}}
{{- $v := .Values -}}
{{- $server := $v.server -}}
{{- $ports := dict "server.port" $server.port "metrics.port" $v.metrics.port -}}
{{- range $name, $port := $ports -}}
{{- $port := int $port -}}
{{- if or (eq $port 52365) (and (ge $port 10002) (le $port 19999)) -}}
{{- fail (printf "%s %d is a port that Ray takes in the same pod: use another than 52365 and 10002 to 19999" $name $port) -}}
{{- end -}}
{{- end -}}
{{- if eq (int $server.port) (int $v.metrics.port) -}}
{{- fail (printf "server.port and metrics.port are both %v: one container cannot listen twice on a port" $server.port) -}}
{{- end -}}
{{- if eq (int $v.service.port) (int $v.metrics.port) -}}
{{- fail (printf "service.port and metrics.port are both %v: they are two ports of one Service" $v.service.port) -}}
{{- end -}}
{{- $rest := sub (int $server.terminationGracePeriodSeconds) 10 -}}
{{- if gt (int $server.preStopSeconds) (int $rest) -}}
{{- fail (printf "server.preStopSeconds %v does not fit server.terminationGracePeriodSeconds %v: 10 of these are kept for the end of the driver, so at most %v are left for it and for running requests" $server.preStopSeconds $server.terminationGracePeriodSeconds (max 0 $rest)) -}}
{{- end -}}
{{- if gt (int $server.terminationGracePeriodSeconds) (int $server.startTimeoutSeconds) -}}
{{- fail (printf "server.startTimeoutSeconds %v is less than server.terminationGracePeriodSeconds %v: in an upgrade a new driver waits that long for the GPUs of one that drains" $server.startTimeoutSeconds $server.terminationGracePeriodSeconds) -}}
{{- end -}}
{{- with $v.probes.startup -}}
{{- $allowed := mul (int .periodSeconds) (int .failureThreshold) -}}
{{- if lt (int $allowed) (int $server.startTimeoutSeconds) -}}
{{- fail (printf "probes.startup allows %v s (periodSeconds %v times failureThreshold %v), less than server.startTimeoutSeconds %v: the kubelet would end a driver that still waits for its gang" $allowed .periodSeconds .failureThreshold $server.startTimeoutSeconds) -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.clientAuth (not $v.tls.secretName) -}}
{{- fail "tls.clientAuth needs tls.secretName: client certificates are part of TLS" -}}
{{- end -}}
{{- if and $v.tls.secretName (not $v.tls.serverName) -}}
{{- fail "tls.serverName must be a DNS name in tls.crt: the probes check the certificate against it" -}}
{{- end -}}
{{- end -}}

{{/* Flags that the chart sets: a second one would contradict what the pods are made for. */}}
{{- define "gemray.validateFlags" -}}
{{- $v := .Values -}}
{{- $own := dict
  "--config" "a file that no pod has"
  "--model" "model.path"
  "--tp" "gang.tensorParallelSize"
  "--device" "gang.device"
  "--strategy" "gang.multiHost"
  "--dtype" "server.dtype"
  "--host" "the Service"
  "--port" "server.port"
  "--address" "ray.existingCluster"
  "--metrics-port" "metrics.port"
  "--drafter" "drafter.path and drafter.second.path"
  "--method" "drafter.method"
  "--drafter-placement" "drafter.placement"
  "--draft-tokens" "drafter.draftTokens"
  "--max-model-len" "server.maxModelLen"
  "--numerics" "server.numerics"
  "--kv-memory" "server.kvMemory"
  "--gpu-memory-utilization" "server.gpuMemoryUtilization"
  "--kv-dtype" "server.kvDtype"
  "--replicas" "server.replicas"
  "--min-replicas" "server.minReplicas"
  "--max-replicas" "server.maxReplicas"
  "--placement-deadline-s" "server.startTimeoutSeconds"
  "--drain-deadline-s" "server.terminationGracePeriodSeconds"
  "--max-connection-age-s" "server.maxConnectionAgeSeconds"
  "--log-format" "server.logFormat"
  "--otlp-traces-endpoint" "server.otlpTracesEndpoint"
  "--tls-cert-file" "tls.secretName"
  "--tls-key-file" "tls.secretName"
  "--tls-client-ca-file" "tls.clientAuth"
  "--auth-token-file" "apiToken.secretName" -}}
{{- include "gemray.refuseFlags" (dict "values" "server.extraArgs" "given" $v.server.extraArgs "own" $own) -}}
{{- include "gemray.validateDeadlines" . -}}
{{- $gateway := dict
  "--address" "service.port"
  "--host" "the Service"
  "--port" "openai.port"
  "--timeout" "openai.timeoutSeconds"
  "--http-tls-cert-file" "openai.tlsSecret"
  "--http-tls-key-file" "openai.tlsSecret"
  "--plaintext-token" "apiToken.secretName"
  "--tls" "tls.secretName"
  "--tls-ca-file" "tls.secretName"
  "--tls-cert-file" "tls.clientAuth"
  "--tls-key-file" "tls.clientAuth" -}}
{{- include "gemray.refuseFlags" (dict "values" "openai.extraArgs" "given" $v.openai.extraArgs "own" $gateway) -}}
{{- end -}}

{{/* Flags that say how a driver ends, which the kubelet cuts short at the end of the grace period. */}}
{{- define "gemray.validateDeadlines" -}}
{{- $server := .Values.server -}}
{{- $grace := sub (int $server.terminationGracePeriodSeconds) (int $server.preStopSeconds) -}}
{{- $most := dict "--drain-notice-s" (sub $grace 10) "--stop-deadline-s" $grace -}}
{{- $flag := "" -}}
{{- range $server.extraArgs -}}
{{- /* --flag=value, or the value in the word after it. */}}
{{- $value := ternary . (regexReplaceAll "^[^=]*=?" . "") (ne $flag "") -}}
{{- $flag = default (splitList "=" . | first) $flag -}}
{{- if and (hasKey $most $flag) (regexMatch "^[0-9]+([.][0-9]*)?$" $value) -}}
{{- if gt (float64 $value) (float64 (get $most $flag)) -}}
{{- fail (printf "server.extraArgs has %s %s, but server.terminationGracePeriodSeconds %v leaves at most %v for it" $flag $value $server.terminationGracePeriodSeconds (get $most $flag)) -}}
{{- end -}}
{{- end -}}
{{- $flag = ternary $flag "" (and (hasKey $most $flag) (not $value)) -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "values" NAME "given" LIST "own" (dict FLAG VALUE)). */}}
{{- define "gemray.refuseFlags" -}}
{{- $seen := dict -}}
{{- range .given -}}
{{- $flag := splitList "=" . | first -}}
{{- if hasKey $.own $flag -}}
{{- fail (printf "%s has %s, which follows from %s: set that instead" $.values $flag (get $.own $flag)) -}}
{{- end -}}
{{- if hasPrefix "--" $flag -}}
{{- if hasKey $seen $flag -}}
{{- fail (printf "%s has %s twice" $.values $flag) -}}
{{- end -}}
{{- $_ := set $seen $flag true -}}
{{- end -}}
{{- end -}}
{{- end -}}
