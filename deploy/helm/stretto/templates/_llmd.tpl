{{/* How the endpoint picker chooses: prefixes and load; with numPrefill, one engine for the prompt and one for the reply. */}}
{{- define "stretto.eppConfig" -}}
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: prefix-cache-scorer
  - type: queue-scorer
  - type: kv-cache-utilization-scorer
  - type: max-score-picker
{{- $prefill := int .Values.llmd.numPrefill }}
{{- $all := until (int .Values.inference.replicas) }}
{{- if $prefill }}
{{- range $side, $ordinals := dict "prefill" (slice $all 0 $prefill) "decode" (slice $all $prefill) }}
  - type: by-label
    name: {{ $side }}-pods
    parameters:
      label: apps.kubernetes.io/pod-index
      validValues: [{{ range $i, $ordinal := $ordinals }}{{ if $i }}, {{ end }}{{ $ordinal | quote }}{{ end }}]
{{- end }}
  - type: prefill-header-handler
  - type: pd-profile-handler
    parameters: {threshold: 0}
{{- else }}
  - type: single-profile-handler
{{- end }}
schedulingProfiles:
{{- range $side := ternary (list "prefill" "decode") (list "default") (gt $prefill 0) }}
  - name: {{ $side }}
    plugins:
      {{- if $prefill }}
      - pluginRef: {{ $side }}-pods
      {{- end }}
      - {pluginRef: prefix-cache-scorer, weight: 3}
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: kv-cache-utilization-scorer, weight: 2}
      - pluginRef: max-score-picker
{{- end }}
{{- end }}

{{/* Envoy asks the picker about each request and sends it to the pod that the picker names. */}}
{{- define "stretto.envoyConfig" -}}
admin:
  address: {socket_address: {address: 0.0.0.0, port_value: 9901}}
static_resources:
  listeners:
    - name: http
      address: {socket_address: {address: 0.0.0.0, port_value: 8080}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: http
                route_config:
                  virtual_hosts:
                    - name: engines
                      domains: ["*"]
                      routes:
                        - match: {prefix: /}
                          route: {cluster: engines, timeout: 7200s}
                http_filters:
                  - name: envoy.filters.http.ext_proc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service:
                        envoy_grpc: {cluster_name: picker}
                        timeout: 10s
                      message_timeout: 60s
                      processing_mode:
                        request_header_mode: SEND
                        response_header_mode: SEND
                        request_body_mode: FULL_DUPLEX_STREAMED
                        response_body_mode: FULL_DUPLEX_STREAMED
                        request_trailer_mode: SEND
                        response_trailer_mode: SEND
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: engines
      type: ORIGINAL_DST
      lb_policy: CLUSTER_PROVIDED
      connect_timeout: 10s
      original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
    - name: picker
      type: STATIC
      connect_timeout: 10s
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {http2_protocol_options: {}}
      load_assignment:
        cluster_name: picker
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9002}}}
{{- end }}
