//! The search for a driver on this host.
//!
//! Owns where distributions put it and how its version is found; what its files are for is the
//! [`catalogue`]'s. Looks below `driver.root` as if that were `/`, executes nothing, and loads
//! nothing: a library's own name is read from its ELF header.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use elf::ElfStream;
use elf::abi;
use elf::endian::AnyEndian;
use rustix::fs::FileType;
use thiserror::Error;

use super::catalogue::{self, Datum};
use super::driver::{Capability, Driver, DriverFile, Use, Width};
use super::root::{Root, RootFile};
use nvrm::Version;

/// The largest cache of the dynamic linker that is read, in bytes.
const LINKER_CACHE_BYTES: u64 = 64 << 20;

/// The libraries by which a driver is known; each of its kind has one of them.
const LANDMARKS: [&str; 2] = ["libcuda", "libnvidia-ml"];

/// The processor in names of packages and files.
#[cfg(target_arch = "aarch64")]
const MACHINE: &str = "aarch64";
#[cfg(not(target_arch = "aarch64"))]
const MACHINE: &str = "x86_64";

/// Its ELF machine, and that of the programs of 32 bits that it runs.
#[cfg(target_arch = "aarch64")]
const MACHINES: (u16, u16) = (abi::EM_AARCH64, abi::EM_ARM);
#[cfg(not(target_arch = "aarch64"))]
const MACHINES: (u16, u16) = (abi::EM_X86_64, abi::EM_386);

/// Where libraries are; `{machine}` stands for the processor. The first of a name is taken.
const LIBRARIES: &[&str] = &[
    // Debian, whose links are made by update-alternatives.
    "usr/lib/{machine}-linux-gnu/nvidia/current",
    // Debian and Ubuntu; NVIDIA's own installer there.
    "usr/lib/{machine}-linux-gnu",
    "lib/{machine}-linux-gnu",
    // RHEL, Fedora, SUSE; NVIDIA's own installer there.
    "usr/lib64",
    "usr/lib64/nvidia",
    "lib64",
    // Arch, Alpine's way, and 32 bits on RHEL and SUSE.
    "usr/lib",
    "usr/lib/nvidia",
    "lib",
    // Google's container-optimised system; as a root it has them at its top.
    "home/kubernetes/bin/nvidia/lib64",
    "usr/local/nvidia/lib64",
    // Bottlerocket, Talos, Flatcar, NixOS.
    "{machine}-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia",
    "{machine}-bottlerocket-linux-gnu/sys-root/usr/lib",
    "usr/lib/nvidia/tesla",
    "usr/local/glibc/usr/lib",
    "opt/nvidia/current/usr/lib64",
    "opt/nvidia/current/usr/lib",
    "run/opengl-driver/lib",
    // 32 bits on Debian, Ubuntu and Arch.
    "usr/lib/i386-linux-gnu/nvidia/current",
    "usr/lib/i386-linux-gnu",
    "usr/lib32",
    "run/opengl-driver-32/lib",
];

/// Directories of some libraries below the others.
const BELOW: &[&str] = &["vdpau"];

/// Where programs are.
const PROGRAMS: &[&str] = &[
    "usr/bin",
    "bin",
    "usr/sbin",
    "usr/local/bin",
    "home/kubernetes/bin/nvidia/bin",
    "usr/local/nvidia/bin",
    "usr/libexec/nvidia/tesla/bin",
    "opt/bin",
    "opt/nvidia/current/usr/bin",
    "run/current-system/sw/bin",
];

/// Why there is no driver to be had.
#[derive(Debug, Error)]
pub enum FindError {
    /// `driver.root` isn't there.
    #[error("cannot open driver.root {}: {source}; correct the configuration", root.display())]
    NoRoot {
        /// What was configured.
        root: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// No library of a driver anywhere.
    #[error(
        "no driver libraries below {}: neither libcuda.so.VERSION nor libnvidia-ml.so.VERSION in \
         the dynamic linker's cache or the usual directories; install the driver's user-space \
         packages (on Debian: nvidia-smi and libcuda1), or set driver.root to where they are",
        root.display()
    )]
    Nothing {
        /// Where it was looked.
        root: PathBuf,
    },
    /// Libraries of another version than the kernel's module.
    #[error(
        "the driver's kernel module is {kernel}, its libraries below {} are {}; neither works with \
         the other: reboot, or load the module again, after an update of the driver",
        root.display(),
        found.iter().map(String::as_str).collect::<Vec<_>>().join(" and ")
    )]
    Differs {
        /// Where it was looked.
        root: PathBuf,
        /// The module's version.
        kernel: String,
        /// The versions that are there.
        found: BTreeSet<String>,
    },
}

/// The driver below `root`, of the version of the kernel's module where that is known.
///
/// # Errors
///
/// Where there is none, or only of other versions.
pub fn driver(root: &Root, kernel: Option<&str>) -> Result<Driver, FindError> {
    let shelves = shelves(root);
    let version = version(root, &shelves, kernel)?;
    let mut files: BTreeMap<(u32, u32, u64), DriverFile> = BTreeMap::new();
    for shelf in &shelves {
        for name in &shelf.names {
            if !belongs(name, &version) {
                continue;
            }
            let Some(file) = shelf.lookup(root, name) else { continue };
            let Some(library) = library(root, name, &file) else { continue };
            // Where a link leads may be no directory that was searched.
            if let Some(parent) = Path::new(&library.path).parent() {
                root.watch(parent.strip_prefix("/").unwrap_or(parent));
            }
            files.entry(file.identity).or_insert(library);
        }
    }
    name_links(root, &shelves, &mut files);
    for (name, capabilities) in catalogue::PROGRAMS {
        let found = PROGRAMS.iter().find_map(|dir| {
            root.watch(Path::new(dir).join(name)).filter(|file| file.kind == FileType::RegularFile)
        });
        if let Some(file) = found {
            let path = format!("/usr/bin/{name}");
            if let Some(program) = described(root, &file, Some(path), Use::Program, capabilities) {
                files.entry(file.identity).or_insert(program);
            }
        }
    }
    for datum in catalogue::DATA {
        if let Some((file, datum)) = place(root, datum, &version) {
            files.entry(file.identity).or_insert(datum);
        }
    }
    let mut files: Vec<_> = files.into_values().collect();
    files.sort_unstable();
    Ok(Driver { version, files })
}

/// Which driver's libraries would be taken below `root`, and one of them: those of the kernel's
/// module where they are there, else as [`driver`] chooses without one.
#[must_use]
pub fn installed(root: &Root, kernel: Option<&str>) -> Option<(String, PathBuf)> {
    let shelves = shelves(root);
    let version =
        version(root, &shelves, kernel).or_else(|_| version(root, &shelves, None)).ok()?;
    let landmark = shelves.iter().find_map(|shelf| {
        let is = |name: &&String| {
            LANDMARKS.contains(&stem(name)) && version_in(name) == Some(version.as_str())
        };
        shelf.names.iter().find(is).map(|name| shelf.path.join(name))
    })?;
    Some((version, Path::new("/").join(landmark)))
}

/// The sockets that are there now; daemons come and go, so they are looked for each time.
#[must_use]
pub fn sockets(root: &Root) -> Vec<DriverFile> {
    let mut sockets = Vec::new();
    for (name, capabilities) in catalogue::SOCKETS {
        let found =
            ["run", "var/run"].iter().find_map(|dir| root.lookup(Path::new(dir).join(name)));
        if let Some(file) = found.filter(|file| file.kind == FileType::Socket) {
            let path = format!("/run/{name}");
            sockets.extend(described(root, &file, Some(path), Use::Socket, capabilities));
        }
    }
    sockets
}

/// A directory with libraries.
struct Shelf {
    path: PathBuf,
    /// What is in it and looks like a library.
    names: Vec<String>,
}

impl Shelf {
    fn lookup(&self, root: &Root, name: &str) -> Option<RootFile> {
        root.lookup(self.path.join(name))
    }
}

/// Every directory that may hold libraries of the driver, each once.
fn shelves(root: &Root) -> Vec<Shelf> {
    let usual = LIBRARIES.iter().map(|dir| PathBuf::from(dir.replace("{machine}", MACHINE)));
    let mut shelves = Vec::new();
    let mut seen = BTreeSet::new();
    for path in cached_directories(root).into_iter().chain(usual) {
        for path in BELOW.iter().map(|below| path.join(below)).chain([path.clone()]) {
            let Some(dir) = root.watch(&path) else { continue };
            if dir.kind != FileType::Directory || !seen.insert(dir.identity) {
                continue;
            }
            let mut names: Vec<String> = dir
                .names()
                .into_iter()
                .filter_map(|name| name.into_string().ok())
                .filter(|name| name.starts_with("lib") && name.contains(".so"))
                .collect();
            names.sort_unstable();
            shelves.push(Shelf { path, names });
        }
    }
    shelves
}

/// The directories in which the dynamic linker of `root` has the driver.
fn cached_directories(root: &Root) -> BTreeSet<PathBuf> {
    let cache = Path::new("etc/ld.so.cache");
    root.watch(cache);
    let bytes = root.read(cache, LINKER_CACHE_BYTES).unwrap_or_default();
    let entries = ld_so_cache::parsers::parse_ld_cache(&bytes)
        .ok()
        .and_then(|cache| cache.get_entries().ok())
        .unwrap_or_default();
    entries
        .iter()
        .filter(|entry| LANDMARKS.contains(&stem(&entry.library_name)))
        .filter_map(|entry| Path::new(&entry.library_path).parent())
        .map(|dir| dir.strip_prefix("/").unwrap_or(dir).to_owned())
        .collect()
}

/// `libcuda` of `libcuda.so.1`.
fn stem(name: &str) -> &str {
    name.split_once(".so").map_or(name, |(stem, _)| stem)
}

/// What follows `.so.`, where that can be a driver's version: `535.247.01`, not `1`.
fn version_in(name: &str) -> Option<&str> {
    let (_, version) = name.split_once(".so.")?;
    let parts: Vec<&str> = version.split('.').collect();
    let number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    ((2..=4).contains(&parts.len()) && parts.iter().all(number)).then_some(version)
}

/// Whether a library of that name belongs to the driver of that version.
fn belongs(name: &str, version: &str) -> bool {
    match catalogue::OWN_VERSION.contains(&stem(name)) {
        true => version_in(name).is_some(),
        false => version_in(name) == Some(version),
    }
}

/// The driver's version: the kernel's, else the one that the dynamic linker would take, else
/// the newest that is there.
fn version(root: &Root, shelves: &[Shelf], kernel: Option<&str>) -> Result<String, FindError> {
    let landmarks = || {
        shelves.iter().flat_map(|shelf| {
            let named = shelf.names.iter().filter(|name| LANDMARKS.contains(&stem(name)));
            named.map(move |name| (shelf, name))
        })
    };
    let found: BTreeSet<String> =
        landmarks().filter_map(|(_, name)| version_in(name)).map(str::to_owned).collect();
    if let Some(kernel) = kernel {
        return match found.iter().find(|version| same(version, kernel)) {
            Some(version) => Ok(version.clone()),
            None if found.is_empty() => Err(FindError::Nothing { root: root.path().to_owned() }),
            None => Err(FindError::Differs {
                root: root.path().to_owned(),
                kernel: kernel.to_owned(),
                found,
            }),
        };
    }
    let linked =
        landmarks().filter(|(_, name)| name.ends_with(".so.1")).find_map(|(shelf, name)| {
            let target = root.place_of(&shelf.lookup(root, name)?)?;
            version_in(target.file_name()?.to_str()?).map(str::to_owned)
        });
    let newest = || {
        let numbers = |version: &String| {
            version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>()
        };
        found.iter().max_by_key(|version| numbers(version)).cloned()
    };
    linked.or_else(newest).ok_or(FindError::Nothing { root: root.path().to_owned() })
}

/// Whether two texts are one version, however many digits they have.
fn same(one: &str, other: &str) -> bool {
    let parsed = |text: &str| text.parse::<Version>().ok();
    one == other || parsed(one).is_some_and(|version| Some(version) == parsed(other))
}

/// The library of that name, for the processor's own programs or those of 32 bits.
fn library(root: &Root, name: &str, file: &RootFile) -> Option<DriverFile> {
    let (machine, soname) = about(file.open()?)?;
    let width = match machine {
        own if own == MACHINES.0 => Width::Native,
        other if other == MACHINES.1 => Width::Compat32,
        _ => return None,
    };
    // Programs are linked against a name without version, and some look for it.
    let mut names = vec![format!("{}.so", stem(name))];
    names.extend(soname.filter(|soname| is_plain(soname)));
    let capabilities = match width {
        Width::Native => catalogue::library(stem(name)),
        Width::Compat32 => &[Capability::Compat32],
    };
    let mut library = described(root, file, None, Use::Library { names, width }, capabilities)?;
    library.tidy_names();
    Some(library)
}

/// The ELF machine of a library, and the name by which others ask for it.
fn about(file: File) -> Option<(u16, Option<String>)> {
    let mut library = ElfStream::<AnyEndian, _>::open_stream(file).ok()?;
    let machine = library.ehdr.e_machine;
    let offset = library
        .dynamic()
        .ok()
        .flatten()
        .and_then(|table| table.iter().find(|entry| entry.d_tag == abi::DT_SONAME))
        .and_then(|entry| usize::try_from(entry.d_val()).ok());
    let header = library.section_header_by_name(".dynstr").ok().flatten().copied();
    let soname = offset.zip(header).and_then(|(offset, header)| {
        let names = library.section_data_as_strtab(&header).ok()?;
        names.get(offset).ok().map(str::to_owned)
    });
    Some((machine, soname))
}

/// Whether a name is one of a file, and no path.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains('/') && name != "." && name != ".."
}

/// Gives the libraries the names by which links of the host lead to them.
fn name_links(root: &Root, shelves: &[Shelf], files: &mut BTreeMap<(u32, u32, u64), DriverFile>) {
    let stems: BTreeSet<String> = files
        .values()
        .filter_map(|file| Path::new(&file.path).file_name()?.to_str())
        .map(|name| stem(name).to_owned())
        .collect();
    for shelf in shelves {
        for name in &shelf.names {
            let stem = stem(name);
            if !stems.contains(stem) && !catalogue::OTHER_NAMES.contains(&stem) {
                continue;
            }
            let Some(found) = shelf.lookup(root, name) else { continue };
            if let Some(file) = files.get_mut(&found.identity) {
                if let Use::Library { names, .. } = &mut file.used_as {
                    names.push(name.clone());
                }
                file.tidy_names();
            }
        }
    }
}

/// A file at a place of its own, where it is.
fn place(root: &Root, datum: &Datum, version: &str) -> Option<(RootFile, DriverFile)> {
    let filled = |text: &str| text.replace("{version}", version).replace("{machine}", MACHINE);
    let file = datum.places.iter().find_map(|place| root.watch(filled(place)))?;
    let path = match datum.path {
        "" => None,
        path => Some(filled(path)),
    };
    let described = described(root, &file, path, Use::Data, datum.capabilities)?;
    Some((file, described))
}

/// A file that programs expect at `path`, or where it is.
fn described(
    root: &Root,
    file: &RootFile,
    path: Option<String>,
    used_as: Use,
    capabilities: &[Capability],
) -> Option<DriverFile> {
    let place = root.place_of(file)?;
    let path = match path {
        Some(path) => path,
        None => place.to_str()?.to_owned(),
    };
    let source = root.path().join(place.strip_prefix("/").unwrap_or(&place));
    let source = source.to_string_lossy().into_owned();
    Some(DriverFile { source, path, used_as, capabilities: capabilities.to_vec() })
}

impl DriverFile {
    /// Leaves each name once, and not the file's own.
    fn tidy_names(&mut self) {
        let own = Path::new(&self.path).file_name().map(ToOwned::to_owned);
        if let Use::Library { names, .. } = &mut self.used_as {
            names.retain(|name| own.as_deref() != Some(name.as_ref()));
            names.sort_unstable();
            names.dedup();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver that would be used is reported, whichever directory it lies in.
    #[test]
    fn driver_to_use_is_reported_from_any_directory() {
        let dir = tempfile::tempdir().unwrap();
        let root = || Root::open(dir.path()).unwrap();
        let add = |path: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
        };
        for no_driver in [
            "usr/lib64/libcuda.so.1",
            "usr/lib64/libcuda.so",
            "usr/lib64/libcuda.so.535.161.08.bak",
            "usr/lib64/libcudart.so.12.4.99",
        ] {
            add(no_driver);
            assert_eq!(installed(&root(), None), None, "{no_driver}");
        }
        let reported = |version: &str, path: &str| Some((version.to_owned(), PathBuf::from(path)));
        add("usr/lib64/libcuda.so.535.161.08");
        let old = reported("535.161.08", "/usr/lib64/libcuda.so.535.161.08");
        assert_eq!(installed(&root(), None), old);
        add("usr/lib/libnvidia-ml.so.550.54.14");
        assert_eq!(
            installed(&root(), None),
            reported("550.54.14", "/usr/lib/libnvidia-ml.so.550.54.14"),
            "the newest"
        );
        assert_eq!(installed(&root(), Some("535.161.08")), old, "the kernel's");
        assert_eq!(installed(&root(), Some("999.1")).unwrap().0, "550.54.14");
        add("usr/lib64/libcuda.so.560.1.2");
        let short = reported("560.1.2", "/usr/lib64/libcuda.so.560.1.2");
        assert_eq!(installed(&root(), Some("560.01.02")), short, "the same in other digits");
    }

    #[test]
    fn a_version_has_two_numbers_or_more() {
        for (name, version) in [
            ("libcuda.so.535.247.01", Some("535.247.01")),
            ("libcuda.so.390.157", Some("390.157")),
            ("libcuda.so.1", None),
            ("libcuda.so", None),
            ("libcuda.so.1.x", None),
            ("libcuda.so.535..1", None),
            ("libnvidia-egl-gbm.so.1.1.0", Some("1.1.0")),
        ] {
            assert_eq!(version_in(name), version, "{name}");
        }
        assert!(belongs("libnvidia-egl-gbm.so.1.1.0", "535.247.01"));
        assert!(!belongs("libcuda.so.1.1.0", "535.247.01"));
    }
}
