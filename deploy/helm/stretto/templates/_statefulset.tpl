{{/* One role: its StatefulSet and the headless service that gives every pod a name; in: dict root, role. */}}
{{- define "stretto.statefulset" -}}
{{- $values := index .root.Values .role }}
{{- $name := printf "%s-%s" .root.Release.Name .role }}
{{- $gpus := int (include "stretto.gpus" $values) }}
{{- $context := dict "root" .root "role" .role "values" $values }}
{{- $isPod := include "stretto.isPod" $context }}
{{- $grouped := and (eq .role "trainer") (gt (int $values.replicas) 1) -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-headless
  labels:
    {{- include "stretto.labels" .root | nindent 4 }}
    role: {{ .role }}
spec:
  clusterIP: None
  # Pods find one another before they are ready: that is what makes them ready.
  publishNotReadyAddresses: true
  selector:
    {{- include "stretto.labels" .root | nindent 4 }}
    role: {{ .role }}
  ports:
    - {name: http, port: {{ $values.service.port }}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "stretto.labels" .root | nindent 4 }}
    role: {{ .role }}
spec:
  serviceName: {{ $name }}-headless
  replicas: {{ $values.replicas }}
  podManagementPolicy: Parallel
  updateStrategy:
    type: {{ $values.updateStrategy | default (ternary "OnDelete" "RollingUpdate" $grouped) }}
  selector:
    matchLabels:
      {{- include "stretto.labels" .root | nindent 6 }}
      role: {{ .role }}
  template:
    metadata:
      labels:
        {{- include "stretto.labels" .root | nindent 8 }}
        role: {{ .role }}
      annotations:
        checksum/config: {{ .root.Values.config | sha256sum }}
        {{- with .root.Values.secrets.runSecret }}
        checksum/run-secret: {{ sha256sum . | trunc 8 | quote }}{{/* enough to see a change, too little to try secrets */}}
        {{- end }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      # As process 1 a sleep, or a shell, would ignore SIGTERM until the grace period is over.
      shareProcessNamespace: true
      terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
      securityContext:
        {{- toYaml .root.Values.podSecurityContext | nindent 8 }}
      {{- with .root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $values.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or $values.nodeAffinity $values.podAffinity $values.podAntiAffinity }}
      affinity:
        {{- range $kind := list "nodeAffinity" "podAffinity" "podAntiAffinity" }}
        {{- with index $values $kind }}
        {{ $kind }}:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- end }}
      {{- end }}
      {{- $llmd := .root.Values.llmd }}
      {{- $hasSidecar := include "stretto.hasSidecar" $context }}
      {{- if $hasSidecar }}
      initContainers:
        - name: routing-sidecar
          image: {{ $llmd.sidecarImage }}
          restartPolicy: Always
          args:
            - --port={{ $values.service.port }}
            - --vllm-port={{ $llmd.enginePort }}
            - --connector=nixlv2
            - --secure-proxy=false
          ports:
            - {name: http, containerPort: {{ $values.service.port }}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "stretto.image" .root | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          {{- include "stretto.command" $context | nindent 10 }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_NAMESPACE
              valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            - name: STATEFUL_REPLICAS
              value: {{ $values.replicas | quote }}
            - name: HEADLESS_SERVICE
              value: {{ printf "%s-headless.%s" $name (include "stretto.domain" .root) }}
            - name: INFERENCE_URL
              value: {{ include "stretto.inferenceUrl" .root | quote }}
            - name: ADMIN_INFERENCE_URLS
              value: {{ include "stretto.adminUrls" .root | quote }}
            - name: STRETTO_PODS
              value: {{ include "stretto.pods" .root | quote }}
            - name: STRETTO_RUN_SECRET
              valueFrom: {secretKeyRef: {name: {{ .root.Release.Name }}-run-secret, key: secret}}
            {{- if and (not $isPod) (has .role (list "orchestrator" "inference")) }}
            # With a key an engine that is started by hand listens at the pod's address; the orchestrator sends it.
            - name: VLLM_API_KEY
              valueFrom: {secretKeyRef: {name: {{ .root.Release.Name }}-run-secret, key: secret}}
            {{- end }}
            - name: PYTHONUNBUFFERED
              value: "1"
            {{- with $values.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- if .root.Values.secrets.enabled }}
          envFrom:
            - secretRef: {name: {{ .root.Values.secrets.name }}}
          {{- end }}
          ports:
            - {{ ternary (printf "{name: engine, containerPort: %d}" (int $llmd.enginePort)) (printf "{name: http, containerPort: %d}" (int $values.service.port)) (eq $hasSidecar "true") }}
            {{- if eq .role "trainer" }}
            - {name: rendezvous, containerPort: {{ $values.service.rendezvousPort }}}
            - {name: nccl, containerPort: {{ $values.service.ncclPort }}}
            {{- end }}
            {{- if $isPod }}
            - {name: probe, containerPort: 8081}
            {{- end }}
          {{- if .root.Values.probes.enabled }}
          {{- if $isPod }}
          startupProbe:
            httpGet: {path: /live, port: probe}
            {{- toYaml .root.Values.probes.startup | nindent 12 }}
          readinessProbe:
            httpGet: {path: /ready, port: probe}
            {{- toYaml .root.Values.probes.readiness | nindent 12 }}
          livenessProbe:
            httpGet: {path: /live, port: probe}
            {{- toYaml .root.Values.probes.liveness | nindent 12 }}
          {{- else if and (eq .role "inference") $values.command (not (eq (toString $values.autoStart) "false")) }}
          readinessProbe:
            httpGet: {path: /health, port: http}
            {{- toYaml .root.Values.probes.readiness | nindent 12 }}
          {{- end }}
          {{- end }}
          {{- if $values.preStopSeconds }}
          lifecycle:
            preStop: {exec: {command: ["sleep", {{ $values.preStopSeconds | quote }}]}}
          {{- end }}
          securityContext:
            {{- toYaml .root.Values.containerSecurityContext | nindent 12 }}
          {{- $resources := deepCopy $values.resources }}
          {{- if $gpus }}
          {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $gpus) ($resources.limits | default dict)) }}
          {{- end }}
          resources:
            {{- toYaml $resources | nindent 12 }}
          volumeMounts:
            - {name: shm, mountPath: /dev/shm}
            {{- if .root.Values.storage.enabled }}
            - {name: data, mountPath: {{ .root.Values.storage.mountPath }}}
            {{- end }}
            {{- if .root.Values.config }}
            - {name: config, mountPath: /config, readOnly: true}
            {{- end }}
      volumes:
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.shmSize }}}
        {{- if .root.Values.storage.enabled }}
        - name: data
          persistentVolumeClaim: {claimName: {{ include "stretto.claim" .root }}}
        {{- end }}
        {{- if .root.Values.config }}
        - name: config
          configMap: {name: {{ .root.Release.Name }}-config}
        {{- end }}
{{- end }}
