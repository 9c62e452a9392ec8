{{/* Every name begins with the release's: my-exp-trainer-0. */}}
{{- define "stretto.labels" -}}
app.kubernetes.io/name: stretto
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* What Kubernetes would refuse, or what would not work, and no schema can say. */}}
{{- define "stretto.check" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,37}[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "release name %q: give one of at most 39 lower-case letters, digits and dashes, a letter first; pods and services have longer names that begin with it" .Release.Name) }}
{{- end }}
{{- if and .Values.config (not .Values.storage.enabled) }}
{{- fail "storage.enabled = false: a run needs one directory that all its pods see; existingClaim names a claim of your own" }}
{{- end }}
{{- if ge (int .Values.inference.preStopSeconds) (int .Values.inference.terminationGracePeriodSeconds) }}
{{- fail "inference.preStopSeconds is a part of inference.terminationGracePeriodSeconds, and must be less" }}
{{- end }}
{{- end }}

{{- define "stretto.domain" -}}
{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{- define "stretto.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* GPUs of one pod; in: values of a role. */}}
{{- define "stretto.gpus" -}}
{{ ternary (int .gpu.count) 0 .gpu.enabled }}
{{- end }}

{{/* Whether vllm-router runs in a pod of its own: with several engines, if it has something to run. */}}
{{- define "stretto.isRouted" -}}
{{- $several := and .Values.inference.enabled (gt (int .Values.inference.replicas) 1) }}
{{- $runs := or .Values.config .Values.router.command }}
{{- if and .Values.router.enabled $runs $several (not .Values.llmd.enabled) }}true{{ end }}
{{- end }}

{{/* Whether a role has pods; in: dict root, role. */}}
{{- define "stretto.isThere" -}}
{{- if eq .role "router" }}{{ include "stretto.isRouted" .root }}{{ else if (index .root.Values .role).enabled }}true{{ end }}
{{- end }}

{{/* The pods of the release, as `stretto pod` reads them. */}}
{{- define "stretto.pods" -}}
{{- $pods := dict }}
{{- range $role := list "orchestrator" "trainer" "inference" "router" }}
{{- if include "stretto.isThere" (dict "root" $ "role" $role) }}
{{- $name := printf "%s-%s" $.Release.Name $role }}
{{- $values := index $.Values $role }}
{{- $service := printf "%s-headless.%s" $name (include "stretto.domain" $) }}
{{- $gpus := int (include "stretto.gpus" $values) }}
{{- $_ := set $pods $role (dict "name" $name "service" $service "replicas" (int $values.replicas) "gpus" $gpus "ports" (omit $values.service "enabled" "type")) }}
{{- end }}
{{- end }}
{{- if include "stretto.isRouted" . }}
{{- $_ := set $pods "routerHost" (printf "%s-router.%s" .Release.Name (include "stretto.domain" .)) }}
{{- end }}
{{- toJson $pods }}
{{- end }}

{{/* Addresses for commands of one's own: every engine; where rollouts go. One address, or a JSON list. */}}
{{- define "stretto.adminUrls" -}}
{{- $urls := list }}
{{- range $i := until (int .Values.inference.replicas) }}
{{- $host := printf "%s-inference-%d.%s-inference-headless.%s" $.Release.Name $i $.Release.Name (include "stretto.domain" $) }}
{{- $urls = append $urls (printf "http://%s:%d/v1" $host (int $.Values.inference.service.port)) }}
{{- end }}
{{- if eq (len $urls) 1 }}{{ first $urls }}{{ else }}{{ toJson $urls }}{{ end }}
{{- end }}

{{- define "stretto.inferenceUrl" -}}
{{- if .Values.llmd.enabled -}}
http://{{ .Release.Name }}-epp.{{ include "stretto.domain" . }}:8080/v1
{{- else if include "stretto.isRouted" . -}}
http://{{ .Release.Name }}-router.{{ include "stretto.domain" . }}:{{ .Values.router.service.port }}/v1
{{- else }}{{ include "stretto.adminUrls" . }}{{ end }}
{{- end }}

{{- define "stretto.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-shared-data" .Release.Name) }}
{{- end }}

{{/* Whether llm-d's sidecar stands before the engine of a pod; in: dict root, role. */}}
{{- define "stretto.hasSidecar" -}}
{{- if and (eq .role "inference") .root.Values.llmd.enabled (gt (int .root.Values.llmd.numPrefill) 0) }}true{{ end }}
{{- end }}

{{/* What the container runs, as YAML; in: dict root, role, values. */}}
{{- define "stretto.command" -}}
{{- $autoStart := .values.autoStart }}
{{- if kindIs "invalid" $autoStart }}{{ $autoStart = not (empty .root.Values.config) }}{{ end }}
{{- if not $autoStart -}}
command: ["sleep", "infinity"]
{{- else if .values.command -}}
command: ["/bin/bash", "-c"]
args:
  - {{ .values.command | quote }}
{{- else if .root.Values.config -}}
{{- $outputs := .root.Values.outputDir | default (printf "%s/outputs" .root.Values.storage.mountPath) }}
{{- $words := list "stretto" "pod" .role "@" "/config/run.toml" "--output-dir" $outputs }}
{{- range $i, $count := .root.Values.orchestrator.envWorkers }}
{{- $words = concat $words (list (printf "--orchestrator.env.%d.num-workers" $i) (toString $count)) }}
{{- end }}
{{- if .root.Values.llmd.enabled }}
{{- $words = concat $words (list "--inference.router.type" "llm-d" "--inference.router.address" (trimSuffix "/v1" (include "stretto.inferenceUrl" .root))) }}
{{- end }}
{{- if include "stretto.hasSidecar" . }}
{{- $words = concat $words (list "--inference.server.host" "0.0.0.0") }}{{/* the sidecar asks localhost */}}
{{- end }}
command: {{ concat $words .root.Values.args | toJson }}
{{- else -}}
{{- fail (printf "%s.autoStart = true: nothing to start; give config (--set-file config=rl.toml) or %s.command" .role .role) }}
{{- end }}
{{- end }}

{{/* Whether the container is `stretto pod`, which answers probes; in: dict root, role, values. */}}
{{- define "stretto.isPod" -}}
{{- if contains "\"stretto\",\"pod\"" (include "stretto.command" .) }}true{{ end }}
{{- end }}
