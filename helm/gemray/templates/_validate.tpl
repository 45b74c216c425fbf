{{/* What the schema cannot say, or says only in patterns. */}}
{{- define "gemray.validate" -}}
{{- $v := .Values -}}
{{- $gang := $v.gang -}}
{{- if and (gt (int $gang.tensorParallelSize) (int $gang.maxGpusPerPod)) (not $gang.multiHost) -}}
{{- fail (printf "gang.tensorParallelSize %v is more than gang.maxGpusPerPod %v: set gang.multiHost to let a gang span pods, or maxGpusPerPod to the GPUs of a node" $gang.tensorParallelSize $gang.maxGpusPerPod) -}}
{{- end -}}
{{- if and (eq $gang.device "cpu") (eq $v.server.dtype "bfloat16") -}}
{{- fail "server.dtype bfloat16 does not fit gang.device cpu: CPUs compute it more slowly than float32; use auto, float32 or float64" -}}
{{- end -}}
{{- range $name, $quantity := dict "shm.worker" $v.shm.worker "shm.driver" $v.shm.driver "ray.objectStoreMemory" $v.ray.objectStoreMemory "model.volume.download.size" $v.model.volume.download.size "tritonCache.size" $v.tritonCache.size -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(e[+][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$" (toString $quantity)) -}}
{{- fail (printf "%s %q is not an amount of bytes: write it as 12Gi, 500M or 1073741824" $name (toString $quantity)) -}}
{{- end -}}
{{- end -}}
{{- if lt (int64 (include "gemray.bytes" $v.ray.objectStoreMemory)) 78643200 -}}
{{- fail (printf "ray.objectStoreMemory %v is less than the 75Mi that Ray starts with" $v.ray.objectStoreMemory) -}}
{{- end -}}
{{- if not (regexMatch "^([0-9]+([.][0-9]+)? ?[KMGT]i?B?)?$" (toString $v.server.kvMemory)) -}}
{{- fail (printf "server.kvMemory %q has no unit: write it as 40Gi, 40GiB or 500M" (toString $v.server.kvMemory)) -}}
{{- end -}}
{{- $mount := printf "%s/" (trimSuffix "/" $v.model.volume.mountPath) -}}
{{- if not (hasPrefix $mount (printf "%s/" $v.model.path)) -}}
{{- fail (printf "model.path %q is not under model.volume.mountPath %q, so no pod would see the model" $v.model.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- $download := eq $v.model.volume.type "download" -}}
{{- $home := include "gemray.modelHome" . -}}
{{- if and (eq $home "pvc") (not $v.model.volume.pvc.claimName) -}}
{{- fail "model.volume.pvc.claimName must name the PersistentVolumeClaim that holds the model" -}}
{{- end -}}
{{- if and (eq $home "hostPath") (not (hasPrefix "/" $v.model.volume.hostPath.path)) -}}
{{- fail (printf "model.volume.hostPath.path %q must be an absolute path that every node has" $v.model.volume.hostPath.path) -}}
{{- end -}}
{{- if and $download (not (regexMatch "^[^/ ]+/[^/ ]+$" $v.model.volume.download.repository)) -}}
{{- fail (printf "model.volume.download.repository %q must say OWNER/NAME on the Hugging Face hub" $v.model.volume.download.repository) -}}
{{- end -}}
{{- if and $download (eq (trimSuffix "/" $v.model.path) (trimSuffix "/" $v.model.volume.mountPath)) -}}
{{- fail "model.path must be a directory below model.volume.mountPath when the model is downloaded" -}}
{{- end -}}
{{- if $v.drafter.path -}}
{{- if not (hasPrefix $mount $v.drafter.path) -}}
{{- fail (printf "drafter.path %q is not under model.volume.mountPath %q, so no pod would see it" $v.drafter.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if and $download (not $v.drafter.repository) -}}
{{- fail "drafter.repository must say where to download the drafter from" -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.clientAuth (not $v.tls.secretName) -}}
{{- fail "tls.clientAuth needs tls.secretName: client certificates are part of TLS" -}}
{{- end -}}
{{- if and $v.tls.secretName (not $v.tls.serverName) -}}
{{- fail "tls.serverName must be a DNS name in tls.crt: the probes check the certificate against it" -}}
{{- end -}}
{{- with $v.ray.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.redisAddress must be HOST:PORT of a Redis that outlives the head" -}}
{{- end -}}
{{- if and .enabled $v.ray.existingCluster -}}
{{- fail "ray.gcsFaultTolerance is a property of ray.existingCluster itself: set it there" -}}
{{- end -}}
{{- end -}}
{{- with $v.server -}}
{{- if gt (int .minReplicas) (int .replicas) -}}
{{- fail (printf "server.minReplicas %v is more than server.replicas %v" .minReplicas .replicas) -}}
{{- end -}}
{{- if and .maxReplicas (lt (int .maxReplicas) (int .replicas)) -}}
{{- fail (printf "server.maxReplicas %v is less than server.replicas %v" .maxReplicas .replicas) -}}
{{- end -}}
{{- end -}}
{{- if and (include "gemray.scales" .) (or (ne (include "gemray.podsPerGang" .) "1") (include "gemray.drafterApart" .)) -}}
{{- fail "autoscaling, and server.maxReplicas above minReplicas, need gangs of one pod: Ray adds workers pod by pod and would start half a gang" -}}
{{- end -}}
{{- with $v.autoscaling -}}
{{- if .enabled -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %v is more than autoscaling.maxReplicas %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and (eq .kind "keda") (not .prometheusAddress) -}}
{{- fail "autoscaling.prometheusAddress must be the URL of the Prometheus that KEDA asks" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.network.nccl -}}
{{- if or (hasPrefix "NCCL_" $name) (not (regexMatch "^[A-Z0-9_]+$" $name)) -}}
{{- fail (printf "network.nccl.%s must be the name of a variable of NCCL without its prefix NCCL_, such as IB_HCA" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs must name the Gateway that the GRPCRoute belongs to" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.host must be the host name that clients call" -}}
{{- end -}}
{{- if eq $v.tritonCache.type "pvc" -}}
{{- if not $v.tritonCache.pvc.claimName -}}
{{- fail "tritonCache.pvc.claimName must name a PersistentVolumeClaim" -}}
{{- end -}}
{{- else if eq $v.tritonCache.type "hostPath" -}}
{{- if not (hasPrefix "/" $v.tritonCache.hostPath.path) -}}
{{- fail "tritonCache.hostPath.path must be an absolute path that the user of the pods may write" -}}
{{- end -}}
{{- end -}}
{{- end -}}
