//! Makes clients and servers of the kubelet's APIs for devices, and of what the kubelet asks an engine (CRI), of their
//! methods; the messages are `src/api.rs`.

use tonic_build::manual::{Builder, Method, Service};

const CODEC: &str = "tonic_prost::ProstCodec";

fn method(
    name: &str,
    route: &str,
    input: &str,
    output: &str,
) -> tonic_build::manual::MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{input}"))
        .output_type(format!("crate::api::{output}"))
        .codec_path(CODEC)
}

fn main() {
    let registration = Service::builder()
        .name("Registration")
        .package("v1beta1")
        .method(method("register", "Register", "RegisterRequest", "Empty").build())
        .build();
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(
            method(
                "get_device_plugin_options",
                "GetDevicePluginOptions",
                "Empty",
                "DevicePluginOptions",
            )
            .build(),
        )
        .method(
            method("list_and_watch", "ListAndWatch", "Empty", "ListAndWatchResponse")
                .server_streaming()
                .build(),
        )
        .method(
            method(
                "get_preferred_allocation",
                "GetPreferredAllocation",
                "PreferredAllocationRequest",
                "PreferredAllocationResponse",
            )
            .build(),
        )
        .method(method("allocate", "Allocate", "AllocateRequest", "AllocateResponse").build())
        .method(
            method(
                "pre_start_container",
                "PreStartContainer",
                "PreStartContainerRequest",
                "PreStartContainerResponse",
            )
            .build(),
        )
        .build();
    let resources = Service::builder()
        .name("PodResourcesLister")
        .package("v1")
        .method(
            method("list", "List", "ListPodResourcesRequest", "ListPodResourcesResponse").build(),
        )
        .build();
    // One API under two names: v1 since Kubernetes 1.23, v1alpha2 until 1.25.
    let [engine, older_engine] = ["runtime.v1", "runtime.v1alpha2"].map(|package| {
        Service::builder()
            .name("RuntimeService")
            .package(package)
            .method(method("status", "Status", "StatusRequest", "StatusResponse").build())
            .build()
    });
    Builder::new().compile(&[registration, plugin, resources, engine, older_engine]);
}
