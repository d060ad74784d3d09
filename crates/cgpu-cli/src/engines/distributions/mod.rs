//! The distributions of Kubernetes that bring a containerd: k3s, RKE2, MicroK8s and k0s.

pub mod template;
