{{- define "cgpu.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "cgpu.labels" -}}
app.kubernetes.io/name: cgpu
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The version of the scheduler's configuration that this cluster takes. */ -}}
{{- define "cgpu.schedulerConfig" -}}
{{- if semverCompare ">=1.25.0-0" .Capabilities.KubeVersion.Version -}}
kubescheduler.config.k8s.io/v1
{{- else if semverCompare ">=1.22.0-0" .Capabilities.KubeVersion.Version -}}
kubescheduler.config.k8s.io/v1beta2
{{- else -}}
kubescheduler.config.k8s.io/v1beta1
{{- end -}}
{{- end }}

{{- define "cgpu.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end -}}
{{- end }}

{{- /* The release of Kubernetes without what a distribution adds to it. */ -}}
{{- define "cgpu.kubernetes" -}}
{{- with semver .Capabilities.KubeVersion.Version -}}
v{{ .Major }}.{{ .Minor }}.{{ .Patch }}
{{- end -}}
{{- end }}

{{/* The options that say whose containers cgpu makes. */}}
{{- define "cgpu.runtimeClasses" -}}
{{- range .Values.runtimeClass.ours }}
- --runtime-class={{ . }}
{{- end }}
{{- if not .Values.node.setup.default }}
- --not-default-runtime
{{- end }}
{{- end }}

{{/* The engine's CRI socket. */}}
{{- define "cgpu.engineSocket" -}}
{{- $sockets := dict "containerd" "/run/containerd/containerd.sock" "k3s" "/run/k3s/containerd/containerd.sock" "rke2" "/run/k3s/containerd/containerd.sock" "microk8s" "/var/snap/microk8s/common/run/containerd.sock" "k0s" "/run/k0s/containerd.sock" "crio" "/run/crio/crio.sock" -}}
{{- .Values.node.setup.socket | default (get $sockets .Values.node.setup.engine) -}}
{{- end }}

{{/* The options by which the engine is asked whether it has the runtime cgpu. */}}
{{- define "cgpu.engine" -}}
- --engine={{ .Values.node.setup.engine }}
- --engine-socket={{ include "cgpu.engineSocket" . | trim }}
{{- if not .Values.node.setup.default }}
- --not-default-runtime
{{- end }}
{{- end }}
