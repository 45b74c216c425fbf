{{/* What the schema cannot say, or says only in patterns. */}}
{{- define "gemray.validate" -}}
{{- include "gemray.validateNames" . -}}
{{- include "gemray.validateGang" . -}}
{{- include "gemray.validateModel" . -}}
{{- include "gemray.validateQuantities" . -}}
{{- include "gemray.validateServer" . -}}
{{- include "gemray.validateFlags" . -}}
{{- include "gemray.validateScaling" . -}}
{{- include "gemray.validateNetwork" . -}}
{{- include "gemray.validatePods" . -}}
{{- end -}}

{{- define "gemray.validateNames" -}}
{{- $name := include "gemray.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%q cannot be the name of a Service: it must begin with a letter and hold lower-case letters, digits and '-' alone; set fullnameOverride" $name) -}}
{{- end -}}
{{- $image := .Values.image -}}
{{- if contains ":" (base $image.repository) -}}
{{- fail (printf "image.repository %q ends with a tag: put that into image.tag" $image.repository) -}}
{{- end -}}
{{- end -}}

{{- define "gemray.validateGang" -}}
{{- $v := .Values -}}
{{- $gang := $v.gang -}}
{{- if and (gt (int $gang.tensorParallelSize) (int $gang.maxGpusPerPod)) (not $gang.multiHost) -}}
{{- fail (printf "gang.tensorParallelSize %v is more than gang.maxGpusPerPod %v: set gang.multiHost to let a gang span pods, or maxGpusPerPod to the GPUs of a node" $gang.tensorParallelSize $gang.maxGpusPerPod) -}}
{{- end -}}
{{- if and (eq $gang.device "cpu") (eq $v.server.dtype "bfloat16") -}}
{{- fail "server.dtype bfloat16 does not fit gang.device cpu: CPUs compute it more slowly than float32; use auto, float32 or float64" -}}
{{- end -}}
{{- with $v.ray.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.redisAddress must be HOST:PORT of a Redis that outlives the head" -}}
{{- end -}}
{{- $port := regexFind "[0-9]+$" .redisAddress | int -}}
{{- if and .redisAddress (or (not (regexMatch "^(rediss?://)?([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$" .redisAddress)) (lt $port 1) (gt $port 65535)) -}}
{{- fail (printf "ray.gcsFaultTolerance.redisAddress %q is not HOST:PORT, such as redis.databases.svc:6379" .redisAddress) -}}
{{- end -}}
{{- if and .enabled $v.ray.existingCluster -}}
{{- fail "ray.gcsFaultTolerance is a property of ray.existingCluster itself: set it there" -}}
{{- end -}}
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

{{- define "gemray.validateModel" -}}
{{- $v := .Values -}}
{{- $mount := printf "%s/" (clean $v.model.volume.mountPath | trimSuffix "/") -}}
{{- if eq $mount "/" -}}
{{- fail (printf "model.volume.mountPath %q is the root of the pods' file system: mount the volume below it" $v.model.volume.mountPath) -}}
{{- end -}}
{{- $model := clean $v.model.path -}}
{{- if not (hasPrefix $mount (printf "%s/" $model)) -}}
{{- fail (printf "model.path %q is not under model.volume.mountPath %q, so no pod would see the model" $v.model.path $v.model.volume.mountPath) -}}
{{- end -}}
{{- $download := eq $v.model.volume.type "download" -}}
{{- $home := include "gemray.modelHome" . -}}
{{- if and (eq $home "pvc") (not $v.model.volume.pvc.claimName) -}}
{{- fail "model.volume.pvc.claimName must name the PersistentVolumeClaim that holds the model" -}}
{{- end -}}
{{- with $v.model.volume.pvc.subPath -}}
{{- if or (not (regexMatch "^[^/\\s][^\\s]*$" .)) (has ".." (splitList "/" .)) -}}
{{- fail (printf "model.volume.pvc.subPath %q must be a directory within the claim, such as models/gemma: no / before it, no .. and no spaces in it" .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $home "hostPath") (not (hasPrefix "/" $v.model.volume.hostPath.path)) -}}
{{- fail (printf "model.volume.hostPath.path %q must be an absolute path that every node has" $v.model.volume.hostPath.path) -}}
{{- end -}}
{{- if and $download (not (regexMatch "^[^/ ]+/[^/ ]+$" $v.model.volume.download.repository)) -}}
{{- fail (printf "model.volume.download.repository %q must say OWNER/NAME on the Hugging Face hub" $v.model.volume.download.repository) -}}
{{- end -}}
{{- if and $download (eq (printf "%s/" $model) $mount) -}}
{{- fail "model.path must be a directory below model.volume.mountPath when the model is downloaded" -}}
{{- end -}}
{{- range $name, $drafter := dict "drafter" $v.drafter "drafter.second" $v.drafter.second -}}
{{- if .path -}}
{{- if not (hasPrefix $mount (clean .path)) -}}
{{- fail (printf "%s.path %q is not under model.volume.mountPath %q, so no pod would see it" $name .path $v.model.volume.mountPath) -}}
{{- end -}}
{{- if eq (clean .path) $model -}}
{{- fail (printf "%s.path %q is model.path as well: a drafter is a checkpoint of its own" $name .path) -}}
{{- end -}}
{{- if and $download (not .repository) -}}
{{- fail (printf "%s.repository must say where to download the drafter from" $name) -}}
{{- end -}}
{{- if and $download (eq (printf "%s@%s" .repository .revision) (printf "%s@%s" $v.model.volume.download.repository $v.model.volume.download.revision)) -}}
{{- fail (printf "%s.repository %q at revision %q is what model.volume.download brings as well: a drafter is a checkpoint of its own" $name .repository .revision) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $v.drafter.second.path -}}
{{- $second := $v.drafter.second -}}
{{- if not $v.drafter.path -}}
{{- fail (printf "drafter.second.path %q needs drafter.path: a drafter alone is the first" .) -}}
{{- end -}}
{{- if eq (clean .) (clean $v.drafter.path) -}}
{{- fail (printf "drafter.second.path %q is drafter.path as well: the second is of the other kind" .) -}}
{{- end -}}
{{- if and $download (eq (printf "%s@%s" $second.repository $second.revision) (printf "%s@%s" $v.drafter.repository $v.drafter.revision)) -}}
{{- fail (printf "drafter.second.repository %q at revision %q is what drafter.repository names as well: the second is of the other kind" $second.repository $second.revision) -}}
{{- end -}}
{{- if has $v.drafter.method (list "mtp" "dflash") -}}
{{- fail (printf "drafter.method %s does not fit drafter.second.path: with two drafters it is auto or none, and requests may name one" $v.drafter.method) -}}
{{- end -}}
{{- if eq $v.drafter.placement "dedicated" -}}
{{- fail "drafter.placement dedicated does not fit drafter.second.path: two drafters run inside the model's ranks" -}}
{{- end -}}
{{- end -}}
{{- if and (not $v.drafter.path) (has $v.drafter.method (list "mtp" "dflash")) -}}
{{- fail (printf "drafter.method %s needs drafter.path: there is no drafter to use it; without one set auto or none" $v.drafter.method) -}}
{{- end -}}
{{- if eq $v.drafter.placement "dedicated" -}}
{{- if not $v.drafter.path -}}
{{- fail "drafter.placement dedicated needs drafter.path: there is no drafter to give a GPU to" -}}
{{- end -}}
{{- if not (has $v.drafter.method (list "auto" "dflash")) -}}
{{- fail (printf "drafter.placement dedicated does not fit drafter.method %s: only a DFlash drafter can have a GPU of its own" $v.drafter.method) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gemray.validateScaling" -}}
{{- $v := .Values -}}
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
{{- end -}}

{{- define "gemray.validateNetwork" -}}
{{- $v := .Values -}}
{{- range $name, $_ := $v.network.nccl -}}
{{- if or (hasPrefix "NCCL_" $name) (not (regexMatch "^[A-Z0-9_]+$" $name)) -}}
{{- fail (printf "network.nccl.%s must be the name of a variable of NCCL without its prefix NCCL_, such as IB_HCA" $name) -}}
{{- end -}}
{{- end -}}
{{- with $v.network.rdma.resource -}}
{{- if eq $v.gang.device "cpu" -}}
{{- fail (printf "network.rdma.resource %s does not fit gang.device cpu: RDMA connects GPUs, through NCCL" .) -}}
{{- end -}}
{{- if or (has . (list $v.gang.gpuResource "nvidia.com/gpu")) (not (contains "/" .)) -}}
{{- fail (printf "network.rdma.resource %s is no RDMA device: name what the RDMA device plugin offers, such as rdma/hca_shared_devices_a" .) -}}
{{- end -}}
{{- end -}}
{{- if and (has $v.service.appProtocol (list "https" "HTTPS" "grpcs" "tls")) (not $v.tls.secretName) -}}
{{- fail (printf "service.appProtocol %s needs tls.secretName: without it the drivers speak plain HTTP/2" $v.service.appProtocol) -}}
{{- end -}}
{{- if and $v.worker.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.nodeCIDRs) -}}
{{- fail "worker.hostNetwork needs networkPolicy.nodeCIDRs, the addresses of the nodes, such as [10.0.0.0/16]: from these such workers call the head and the drivers, whom networkPolicy closes to everyone else" -}}
{{- end -}}
{{- if and $v.service.headless (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.headless does not fit service.type %s: a Service without a virtual IP is a ClusterIP" $v.service.type) -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs must name the Gateway that the GRPCRoute belongs to" -}}
{{- end -}}
{{- with $v.gateway.backendTLS -}}
{{- if and $v.gateway.enabled $v.tls.secretName (eq (empty .caConfigMap) (not .systemCAs)) -}}
{{- fail "gateway.backendTLS must say whom the Gateway trusts behind tls.secretName: either caConfigMap, a ConfigMap with the key ca.crt, or systemCAs" -}}
{{- end -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.host must be the host name that clients call" -}}
{{- end -}}
{{- with $v.openai -}}
{{- if and .ingress.enabled (not .enabled) -}}
{{- fail "openai.ingress needs openai.enabled: there is no gateway to lead to" -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.host) -}}
{{- fail "openai.ingress.host must be the host name that clients call" -}}
{{- end -}}
{{- if and .ingress.enabled $v.ingress.enabled (eq .ingress.host $v.ingress.host) -}}
{{- fail (printf "openai.ingress.host %s is ingress.host as well: gRPC and HTTP need host names of their own" .ingress.host) -}}
{{- end -}}
{{- end -}}
{{- end -}}
