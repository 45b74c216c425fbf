{{/* What a quantity such as 256Mi, 0.5G, 500m or 268435456 amounts to, as a decimal number. */}}
{{- define "gemray.amount" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}{{- $text = printf "%f" . -}}{{- end -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $scale := get (dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0) $unit -}}
{{- printf "%f" (mulf (float64 (trimSuffix $unit $text)) $scale) -}}
{{- end -}}

{{/* The same in whole bytes. */}}
{{- define "gemray.bytes" -}}
{{- include "gemray.amount" . | float64 | int64 -}}
{{- end -}}

{{/* Amounts of memory and disks, and that they fit into one another. */}}
{{- define "gemray.validateQuantities" -}}
{{- $v := .Values -}}
{{- range $name, $quantity := dict "shm.worker" $v.shm.worker "shm.driver" $v.shm.driver "ray.objectStoreMemory" $v.ray.objectStoreMemory "model.volume.download.size" $v.model.volume.download.size "tritonCache.size" $v.tritonCache.size -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(e[+][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$" (toString $quantity)) -}}
{{- fail (printf "%s %q is not an amount of bytes: write it as 12Gi, 500M or 1073741824" $name (toString $quantity)) -}}
{{- end -}}
{{- if eq (int64 (include "gemray.bytes" $quantity)) 0 -}}
{{- fail (printf "%s %v is nothing: give it more than 0 bytes, such as 1Gi" $name $quantity) -}}
{{- end -}}
{{- end -}}
{{- if lt (int64 (include "gemray.bytes" $v.ray.objectStoreMemory)) 78643200 -}}
{{- fail (printf "ray.objectStoreMemory %v is less than the 75Mi that Ray starts with" $v.ray.objectStoreMemory) -}}
{{- end -}}
{{- if not (regexMatch "^(auto|[0-9]+([.][0-9]+)? ?[KMGT]i?B?)?$" (toString $v.server.kvMemory)) -}}
{{- fail (printf "server.kvMemory %q has no unit: write it as 40Gi, 40GiB or 500M, or auto" (toString $v.server.kvMemory)) -}}
{{- end -}}
{{- if regexMatch "^[0.]+ ?[KMGT]" (toString $v.server.kvMemory) -}}
{{- fail (printf "server.kvMemory %s holds no token: give it more than 0 bytes, or auto" $v.server.kvMemory) -}}
{{- end -}}
{{- if and $v.server.gpuMemoryUtilization (not (has (toString $v.server.kvMemory) (list "" "auto"))) -}}
{{- fail (printf "server.gpuMemoryUtilization %v has no effect on server.kvMemory %v, which states a size: set that to auto" $v.server.gpuMemoryUtilization $v.server.kvMemory) -}}
{{- end -}}
{{- range $name, $resources := dict "head.resources" $v.head.resources "worker.resources" $v.worker.resources "driver.resources" $v.driver.resources "openai.resources" $v.openai.resources "model.volume.download.resources" $v.model.volume.download.resources -}}
{{- range $kind, $amounts := $resources -}}
{{- range $resource, $amount := $amounts -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(e[+][0-9]+)?(Ki|Mi|Gi|Ti|m|k|M|G|T)?$" (toString $amount)) -}}
{{- fail (printf "%s.%s.%s %q is not a quantity of Kubernetes: write it as 2, 500m or 4Gi" $name $kind $resource (toString $amount)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $resource, $amount := get (default dict $resources) "requests" -}}
{{- $limit := get $resources.limits $resource -}}
{{- if and (ne (toString $limit) "") (gt (include "gemray.amount" $amount | float64) (include "gemray.amount" $limit | float64)) -}}
{{- fail (printf "%s.requests.%s %v is more than its limit %v: Kubernetes refuses such a pod" $name $resource $amount $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $part := list "worker" "driver" -}}
{{- $shm := get $v.shm $part -}}
{{- $memory := get (get $v $part).resources.limits "memory" -}}
{{- if and (ne (toString $memory) "") (gt (include "gemray.amount" $shm | float64) (include "gemray.amount" $memory | float64)) -}}
{{- fail (printf "shm.%s %v is more than %s.resources.limits.memory %v, which it counts against" $part $shm $part $memory) -}}
{{- end -}}
{{- if gt (include "gemray.amount" $v.ray.objectStoreMemory | float64) (include "gemray.amount" $shm | float64) -}}
{{- fail (printf "ray.objectStoreMemory %v is more than shm.%s %v, which it is a part of" $v.ray.objectStoreMemory $part $shm) -}}
{{- end -}}
{{- end -}}
{{- $memory := $v.worker.resources.limits.memory -}}
{{- if and (eq $v.gang.device "cpu") (ne (toString $memory) "") (not (has (toString $v.server.kvMemory) (list "" "auto"))) -}}
{{- $ranks := min (int $v.gang.tensorParallelSize) (int $v.gang.maxGpusPerPod) -}}
{{- $each := toString $v.server.kvMemory | replace " " "" | trimSuffix "B" | replace "K" "k" | replace "ki" "Ki" -}}
{{- if gt (mulf $ranks (include "gemray.amount" $each | float64)) (include "gemray.amount" $memory | float64) -}}
{{- fail (printf "server.kvMemory %v for each of the %d rank(s) in a pod is more than worker.resources.limits.memory %v, where the KV pages of CPUs lie" $v.server.kvMemory $ranks $memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
