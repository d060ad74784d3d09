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
    method_of("api", name, route, [input, output])
}

/// The same, with messages of that module.
fn method_of(
    module: &str,
    name: &str,
    route: &str,
    [input, output]: [&str; 2],
) -> tonic_build::manual::MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::{module}::{input}"))
        .output_type(format!("crate::{module}::{output}"))
        .codec_path(CODEC)
}

/// What a driver of Dynamic Resource Allocation serves.
fn dra() -> [Service; 3] {
    let of = |name, route, messages| method_of("dra", name, route, messages);
    let registration = Service::builder()
        .name("Registration")
        .package("pluginregistration")
        .method(of("get_info", "GetInfo", ["InfoRequest", "PluginInfo"]).build())
        .method(
            of(
                "notify_registration_status",
                "NotifyRegistrationStatus",
                ["RegistrationStatus", "RegistrationStatusResponse"],
            )
            .build(),
        )
        .build();
    let plugin = Service::builder()
        .name("DRAPlugin")
        .package("k8s.io.kubelet.pkg.apis.dra.v1")
        .method(
            of(
                "node_prepare_resources",
                "NodePrepareResources",
                ["NodePrepareResourcesRequest", "NodePrepareResourcesResponse"],
            )
            .build(),
        )
        .method(
            of(
                "node_unprepare_resources",
                "NodeUnprepareResources",
                ["NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"],
            )
            .build(),
        )
        .build();
    let health = Service::builder()
        .name("DRAResourceHealth")
        .package("v1alpha1")
        .method(
            of(
                "node_watch_resources",
                "NodeWatchResources",
                ["NodeWatchResourcesRequest", "NodeWatchResourcesResponse"],
            )
            .server_streaming()
            .build(),
        )
        .build();
    [registration, plugin, health]
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
            .method(method("version", "Version", "VersionRequest", "VersionResponse").build())
            .build()
    });
    let [dra_registration, dra_plugin, dra_health] = dra();
    let devices = [registration, plugin, resources, engine, older_engine];
    Builder::new().compile(&devices);
    Builder::new().compile(&[dra_registration, dra_plugin, dra_health]);
}
