//! Which file of the driver is for what, and where files other than libraries lie. Pure.
//!
//! Libraries are known by their stem, the name before `.so`. One that isn't listed goes to every
//! container: a new driver may have split it off from one that all need, as it did with
//! `libnvidia-nvvm` (470) and `libnvidia-gpucomp` (545). Sources: the driver's README ("Installed
//! Components"), and what NVIDIA's own container tools hand out.

use thiserror::Error;

use super::driver::Capability::{self, Compute, Display, Graphics, Ngx, Utility, Video};

/// The variable by which a container says what of the driver it wants.
pub const VARIABLE: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// What a container has that says nothing, as NVIDIA's toolkit has it.
pub const DEFAULT: &[Capability] = &[Compute, Utility];

/// A name in the variable that means nothing.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{VARIABLE}={value}: {name:?} is no capability of the driver; use a list of compute, compat32, \
     graphics, utility, video, display and ngx, or all"
)]
pub struct UnknownCapability {
    value: String,
    name: String,
}

/// What a container asks for that has this value of [`VARIABLE`], sorted.
///
/// # Errors
///
/// Where the value names something that doesn't exist.
pub fn capabilities(value: Option<&str>) -> Result<Vec<Capability>, UnknownCapability> {
    let mut wanted = Vec::new();
    let value = value.unwrap_or_default();
    for name in value.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match Capability::ALL.iter().find(|capability| capability.name() == name) {
            Some(capability) => wanted.push(*capability),
            None if name == "all" => wanted.extend(Capability::ALL),
            None => {
                let short = |text: &str| text.chars().take(64).collect();
                return Err(UnknownCapability { value: short(value), name: short(name) });
            }
        }
    }
    if wanted.is_empty() {
        wanted.extend(DEFAULT);
    }
    wanted.sort_unstable();
    wanted.dedup();
    Ok(wanted)
}

/// Which capabilities get the libraries that begin so.
const LIBRARIES: &[(&str, &[Capability])] = &[
    ("libnvidia-ml", &[Utility]),
    ("libnvidia-cfg", &[Utility]),
    ("libnvidia-nscq", &[Utility]),
    ("libnvidia-sandboxutils", &[Utility]),
    ("libcuda", &[Compute]),
    ("libcudadebugger", &[Compute]),
    ("libnvidia-opencl", &[Compute]),
    ("libnvidia-ptxjitcompiler", &[Compute]),
    ("libnvidia-fatbinaryloader", &[Compute]),
    ("libnvidia-compiler", &[Compute]),
    ("libnvidia-nvvm", &[Compute]),
    ("libnvidia-nvvm70", &[Compute]),
    ("libnvidia-tileiras", &[Compute]),
    ("libnvidia-pkcs11", &[Compute]),
    ("libnvidia-pkcs11-openssl3", &[Compute]),
    ("libnvidia-gpucomp", &[Compute, Graphics, Display]),
    ("libnvidia-allocator", &[Compute, Graphics, Display]),
    ("libnvcuvid", &[Video]),
    ("libnvidia-encode", &[Video]),
    ("libnvidia-opticalflow", &[Video]),
    ("libvdpau_nvidia", &[Video]),
    ("libGLX_nvidia", &[Graphics, Display]),
    ("libEGL_nvidia", &[Graphics, Display]),
    ("libGLESv1_CM_nvidia", &[Graphics, Display]),
    ("libGLESv2_nvidia", &[Graphics, Display]),
    ("libnvidia-eglcore", &[Graphics, Display]),
    ("libnvidia-glcore", &[Graphics, Display]),
    ("libnvidia-glsi", &[Graphics, Display]),
    ("libnvidia-glvkspirv", &[Graphics, Display]),
    ("libnvidia-tls", &[Graphics, Display]),
    ("libnvidia-cbl", &[Graphics]),
    ("libnvidia-fbc", &[Graphics, Display]),
    ("libnvidia-ifr", &[Graphics, Display]),
    ("libnvidia-rtcore", &[Graphics]),
    ("libnvoptix", &[Graphics]),
    ("libnvidia-vulkan-producer", &[Graphics]),
    ("libnvidia-vksc-core", &[Graphics]),
    ("libnvidia-present", &[Graphics]),
    ("libnvidia-egl-gbm", &[Graphics, Display]),
    ("libnvidia-egl-wayland", &[Graphics, Display]),
    ("libnvidia-egl-wayland2", &[Graphics, Display]),
    ("libnvidia-egl-xcb", &[Graphics, Display]),
    ("libnvidia-egl-xlib", &[Graphics, Display]),
    ("libnvidia-gtk2", &[Display]),
    ("libnvidia-gtk3", &[Display]),
    ("libnvidia-wayland-client", &[Display]),
    ("libnvidia-wfb", &[Display]),
    ("libglxserver_nvidia", &[Display]),
    ("libnvidia-ngx", &[Ngx]),
];

/// Libraries of the driver that have versions of their own.
pub(super) const OWN_VERSION: &[&str] = &[
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
    "libnvidia-nvvm70",
];

/// Links to a library of the driver that aren't named after it.
pub(super) const OTHER_NAMES: &[&str] = &["libGLX_indirect"];

/// Which capabilities get the library of that stem.
pub(super) fn library(stem: &str) -> &'static [Capability] {
    LIBRARIES
        .iter()
        .find(|(name, _)| *name == stem)
        .map_or(Capability::ALL, |(_, capabilities)| capabilities)
}

pub(super) const PROGRAMS: &[(&str, &[Capability])] = &[
    ("nvidia-smi", &[Utility]),
    ("nvidia-debugdump", &[Utility]),
    ("nvidia-persistenced", &[Utility]),
    ("nvidia-cuda-mps-control", &[Compute]),
    ("nvidia-cuda-mps-server", &[Compute]),
    ("nvidia-xconfig", &[Display]),
    ("nvidia-ngx-updater", &[Ngx]),
];

/// A file at a place of its own.
pub(super) struct Datum {
    /// Where it may be on the host, in the order in which it is looked for; `{version}` and
    /// `{machine}` stand for the driver's and the processor's.
    pub places: &'static [&'static str],
    /// Where it goes in a container; empty for where it was found.
    pub path: &'static str,
    /// Which capabilities get it.
    pub capabilities: &'static [Capability],
}

/// What lies below `share` or `etc` of whichever directory the distribution chose.
macro_rules! shared {
    ($to:literal, $path:literal, $capabilities:expr) => {
        Datum {
            places: &[
                concat!("usr/share/", $path),
                concat!("etc/", $path),
                concat!("usr/local/share/", $path),
                concat!("usr/local/nvidia/", $path),
                $path,
            ],
            path: concat!($to, "/", $path),
            capabilities: $capabilities,
        }
    };
}

/// Files other than libraries and programs.
pub(super) const DATA: &[Datum] = &[
    // Where nothing keeps the GPUs initialised, the first process that opens one loads it, and
    // the kernel may look below that process's root (`request_firmware`, before Linux 4.18).
    Datum {
        places: &[
            "lib/firmware/updates/nvidia/{version}",
            "lib/firmware/nvidia/{version}",
            "usr/lib/firmware/nvidia/{version}",
            "firmware/nvidia/{version}",
        ],
        path: "/lib/firmware/nvidia/{version}",
        capabilities: &[Compute, Utility, Graphics, Video],
    },
    shared!("/etc", "OpenCL/vendors/nvidia.icd", &[Compute]),
    shared!("/usr/share", "nvidia/nvoptix.bin", &[Graphics]),
    shared!("/usr/share", "nvidia/nvidia-application-profiles-{version}-rc", &[Graphics, Display]),
    shared!(
        "/usr/share",
        "nvidia/nvidia-application-profiles-{version}-key-documentation",
        &[Graphics, Display]
    ),
    shared!("/usr/share", "glvnd/egl_vendor.d/10_nvidia.json", &[Graphics, Display]),
    shared!("/usr/share", "egl/egl_external_platform.d/15_nvidia_gbm.json", &[Graphics, Display]),
    shared!(
        "/usr/share",
        "egl/egl_external_platform.d/10_nvidia_wayland.json",
        &[Graphics, Display]
    ),
    shared!("/usr/share", "egl/egl_external_platform.d/20_nvidia_xcb.json", &[Graphics, Display]),
    shared!("/usr/share", "egl/egl_external_platform.d/20_nvidia_xlib.json", &[Graphics, Display]),
    shared!("/etc", "vulkan/icd.d/nvidia_icd.json", &[Graphics]),
    shared!("/etc", "vulkan/icd.d/nvidia_icd.{machine}.json", &[Graphics]),
    shared!("/etc", "vulkan/implicit_layer.d/nvidia_layers.json", &[Graphics]),
    shared!("/etc", "vulkansc/icd.d/nvidia_icd_vksc.json", &[Graphics]),
    shared!("/usr/share", "X11/xorg.conf.d/10-nvidia.conf", &[Display]),
    shared!("/usr/share", "X11/xorg.conf.d/nvidia-drm-outputclass.conf", &[Display]),
    Datum {
        places: &[
            "usr/lib/xorg/modules/drivers/nvidia_drv.so",
            "usr/lib64/xorg/modules/drivers/nvidia_drv.so",
        ],
        path: "",
        capabilities: &[Display],
    },
    Datum {
        places: &[
            "usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{version}",
            "usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so.{version}",
        ],
        path: "",
        capabilities: &[Display],
    },
];

/// Sockets of daemons that make a GPU faster to open, or reach others by NVLink. The MPS
/// daemon's directory isn't among them: its server allocates for its clients, past their quotas.
pub(super) const SOCKETS: &[(&str, &[Capability])] = &[
    ("nvidia-persistenced/socket", &[Compute, Utility, Graphics, Video]),
    ("nvidia-fabricmanager/socket", &[Compute]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_parse_as_in_nvidias_toolkit() {
        for (value, wanted) in [
            (None, DEFAULT),
            (Some(""), DEFAULT),
            (Some(" , "), DEFAULT),
            (Some("utility"), &[Utility][..]),
            (Some("video, compute,video"), &[Compute, Video]),
            (Some("all"), Capability::ALL),
            (Some("compute,all"), Capability::ALL),
        ] {
            assert_eq!(capabilities(value).unwrap(), wanted, "{value:?}");
        }
        assert_eq!(
            capabilities(Some("compute,cuda")).unwrap_err().to_string(),
            "NVIDIA_DRIVER_CAPABILITIES=compute,cuda: \"cuda\" is no capability of the driver; use \
             a list of compute, compat32, graphics, utility, video, display and ngx, or all"
        );
        let long = "x".repeat(100_000);
        assert!(capabilities(Some(&long)).unwrap_err().to_string().len() < 400);
    }

    /// A library that is in no table is given to every container.
    #[test]
    fn unlisted_library_has_every_capability() {
        assert_eq!(library("libcuda"), [Compute]);
        assert_eq!(library("libnvidia-new-in-900"), Capability::ALL);
        for (at, (name, _)) in LIBRARIES.iter().enumerate() {
            assert!(!LIBRARIES[..at].iter().any(|(other, _)| other == name), "{name} twice");
        }
    }
}
