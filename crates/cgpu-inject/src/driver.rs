//! A driver as it lies on a host: its files, what each is for, and by which names it is looked
//! for.
//!
//! Owns the words that the search ([`super::driver_search`]), the bundle's edits and CDI files share. Pure.

use serde::{Deserialize, Serialize};

/// What of the driver a container may ask for, by the names that `NVIDIA_DRIVER_CAPABILITIES` has
/// for them (NVIDIA Container Toolkit, "Docker specialized configurations").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Capability {
    /// CUDA and OpenCL.
    Compute,
    /// Libraries and programs of 32 bits next to those of 64.
    Compat32,
    /// OpenGL and Vulkan.
    Graphics,
    /// `nvidia-smi` and NVML.
    Utility,
    /// The video codec.
    Video,
    /// X11.
    Display,
    /// Deep-learning image processing.
    Ngx,
}

impl Capability {
    /// All of them, as `all` means.
    pub const ALL: &[Capability] = &[
        Capability::Compute,
        Capability::Compat32,
        Capability::Graphics,
        Capability::Utility,
        Capability::Video,
        Capability::Display,
        Capability::Ngx,
    ];

    /// Its name in `NVIDIA_DRIVER_CAPABILITIES`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Capability::Compute => "compute",
            Capability::Compat32 => "compat32",
            Capability::Graphics => "graphics",
            Capability::Utility => "utility",
            Capability::Video => "video",
            Capability::Display => "display",
            Capability::Ngx => "ngx",
        }
    }
}

/// The word size of a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Width {
    /// The machine's own.
    Native,
    /// i386 on x86-64, or armhf on aarch64.
    Compat32,
}

/// How a file comes into a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Use {
    /// The dynamic linker looks for it by these names, its soname first; some are links that
    /// programs are linked against.
    Library {
        /// Names in addition to the file's own.
        names: Vec<String>,
        width: Width,
    },
    Program,
    /// A file or a directory at a place of its own.
    Data,
    /// A socket of a daemon.
    Socket,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DriverFile {
    /// Where it is on the host, without links.
    pub source: String,
    /// Where programs expect it, and so its place in a container; without the driver's root.
    pub path: String,
    /// How it comes there.
    pub used_as: Use,
    /// Which containers get it: those that asked for any of these.
    pub capabilities: Vec<Capability>,
}

/// A driver as it lies on a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Driver {
    /// Its version, as the names of its libraries have it: `535.247.01`.
    pub version: String,
    /// Its files, sorted.
    pub files: Vec<DriverFile>,
}

impl Driver {
    /// The files of containers with these capabilities.
    pub fn files_for(&self, wanted: &[Capability]) -> impl Iterator<Item = &DriverFile> {
        self.files
            .iter()
            .filter(|file| file.capabilities.iter().any(|given| wanted.contains(given)))
    }
}
