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
