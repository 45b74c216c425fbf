{{/* What a pod may name once: variables, volumes, paths; and labels that others rely on. */}}
{{- define "gemray.validatePods" -}}
{{- range $part := list "head" "worker" "driver" "openai" -}}
{{- range $label, $_ := (get $.Values $part).labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "gemray/" $label) (hasPrefix "ray.io/" $label) -}}
{{- fail (printf "%s.labels must not set %s: Services, policies and the KubeRay operator find pods by labels of app.kubernetes.io/, gemray/ and ray.io/" $part $label) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := (get $.Values $part).annotations -}}
{{- if or (hasPrefix "gemray/" $name) (hasPrefix "ray.io/" $name) -}}
{{- fail (printf "%s.annotations must not set %s: those of gemray/ and ray.io/ are the chart's and the KubeRay operator's" $part $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "gemray.validatePod" (dict "values" "driver" "pod" (include "gemray.driverPod" . | fromYaml)) -}}
{{- if .Values.openai.enabled -}}
{{- include "gemray.validatePod" (dict "values" "openai" "pod" (include "gemray.openaiPod" . | fromYaml)) -}}
{{- end -}}
{{- if not .Values.ray.existingCluster -}}
{{- $cluster := include "gemray.rayClusterSpec" . | fromYaml -}}
{{- include "gemray.validatePod" (dict "values" "head" "pod" $cluster.headGroupSpec.template) -}}
{{- range $cluster.workerGroupSpecs -}}
{{- include "gemray.validatePod" (dict "values" "worker" "pod" .template) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "values" "worker" "pod" TEMPLATE): what is there twice came from these values. */}}
{{- define "gemray.validatePod" -}}
{{- $values := .values -}}
{{- if .pod.Error -}}
{{- fail (printf "the pods of %s are no YAML: %s" $values .pod.Error) -}}
{{- end -}}
{{- $volumes := dict -}}
{{- range .pod.spec.volumes -}}
{{- if hasKey $volumes .name -}}
{{- fail (printf "%s.extraVolumes has the name %q twice, or the chart has a volume of that name: choose another" $values .name) -}}
{{- end -}}
{{- $_ := set $volumes .name true -}}
{{- end -}}
{{- range .pod.spec.containers -}}
{{- $names := dict -}}
{{- range .env -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%s.env sets %s twice, or the chart sets it already: a container has a variable once" $values .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- $paths := dict -}}
{{- range .volumeMounts -}}
{{- $path := clean .mountPath -}}
{{- if hasKey $paths $path -}}
{{- fail (printf "%s.extraVolumeMounts has the path %s twice, or the chart mounts a volume there: choose another" $values .mountPath) -}}
{{- end -}}
{{- if not (hasKey $volumes .name) -}}
{{- fail (printf "%s.extraVolumeMounts mounts %q, which is no volume of the pod: name one of %s.extraVolumes" $values .name $values) -}}
{{- end -}}
{{- $_ := set $paths $path true -}}
{{- end -}}
{{- end -}}
{{- end -}}
