//! The userland of an image, as far as its dynamic linkers say where they look for libraries.
//!
//! Looks and decides; the image is hostile, so that all it can bring about is a choice among
//! places that are written here.
//!
//! Of musl nothing is asked: it can't load the driver, which is made for glibc. Its list of
//! directories (`/etc/ld-musl-*.path`) stands for those that it has by itself, and what stays of a
//! file that was mounted there is an empty one: an image that is committed would find no library.

use std::path::Path;

use elf::ElfStream;
use elf::endian::AnyEndian;
use rustix::fs::FileType;

use super::driver::Width;
use super::root::Root;

/// The largest dynamic linker that is read, in bytes; glibc's has a quarter of a MiB.
const LINKER_BYTES: u64 = 4 << 20;

/// Where a library must be for a dynamic linker of the image to find it by its name alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shelf {
    /// A directory of libraries goes below this system directory, by this name: glibc looks there
    /// for libraries of this processor first.
    Directory {
        /// The system directory.
        system: &'static str,
        /// The name.
        below: &'static str,
    },
    /// Each library goes here by each of its names.
    Files(&'static str),
}

/// How libraries of one word size are found in an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linker {
    pub width: Width,
    /// Where libraries go.
    pub shelf: Shelf,
}

/// A dynamic linker of glibc: its file and the system directories that it may have been built
/// with, the one of its libraries last looked at first.
struct Glibc {
    file: &'static str,
    width: Width,
    directories: &'static [&'static str],
    /// The subdirectory of a system directory for libraries of this processor, from glibc 2.33.
    hwcaps: Option<&'static str>,
}

#[cfg(target_arch = "aarch64")]
const GLIBC: &[Glibc] = &[
    Glibc {
        file: "lib/ld-linux-aarch64.so.1",
        width: Width::Native,
        directories: &["/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"],
        hwcaps: None,
    },
    Glibc {
        file: "lib/ld-linux-armhf.so.3",
        width: Width::Compat32,
        directories: &["/usr/lib/arm-linux-gnueabihf", "/usr/lib"],
        hwcaps: None,
    },
];
#[cfg(not(target_arch = "aarch64"))]
const GLIBC: &[Glibc] = &[
    Glibc {
        file: "lib64/ld-linux-x86-64.so.2",
        width: Width::Native,
        directories: &["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"],
        // `sysdeps/x86_64/dl-hwcaps_subdirs.c`: what every server since 2009 has.
        hwcaps: Some("glibc-hwcaps/x86-64-v2"),
    },
    Glibc {
        file: "lib/ld-linux.so.2",
        width: Width::Compat32,
        directories: &["/usr/lib/i386-linux-gnu", "/usr/lib"],
        hwcaps: None,
    },
];

/// The subdirectory that glibc before 2.33 looks into (`elf/dl-hwcaps.c`, `_dl_important_hwcaps`);
/// 2.37 no longer does.
const LEGACY: &str = "tls";

/// What a linker that knows the newer subdirectories has in it: an option about them.
const KNOWS_HWCAPS: &[u8] = b"--glibc-hwcaps-mask";

/// Whether this processor has what the subdirectory of [`GLIBC`] is named after.
#[cfg(not(target_arch = "x86_64"))]
fn has_hwcaps() -> bool {
    false
}
/// Asks once: the standard library's macro asks for all that there is, and in a virtual machine
/// every question leaves it.
#[cfg(target_arch = "x86_64")]
fn has_hwcaps() -> bool {
    // SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT (Intel SDM, volume 2, CPUID, leaf 1).
    const V2: u32 = 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 23;
    core::arch::x86_64::__cpuid(1).ecx & V2 == V2
}

/// The dynamic linkers of an image, and where each looks.
#[must_use]
pub fn linkers(image: &Root) -> Vec<Linker> {
    let found = GLIBC.iter().filter_map(|glibc| {
        let (directory, knows_hwcaps) = constants(image, glibc.file, |data| says(data, glibc))??;
        let shelf = shelf(image, glibc, directory, knows_hwcaps);
        Some(Linker { width: glibc.width, shelf })
    });
    found.collect()
}

/// Which system directory a linker with these constants looks into, and whether it knows
/// subdirectories by processor.
fn says(data: &[u8], glibc: &Glibc) -> Option<(&'static str, bool)> {
    let mut directory: Option<usize> = None;
    let mut knows_hwcaps = false;
    for text in data.split(|byte| *byte == 0).filter(|text| text.len() > 1) {
        if text == KNOWS_HWCAPS {
            knows_hwcaps = true;
        } else if let [b'/', .., b'/'] = text {
            // They are in it with a `/` at their ends (`system_dirs` in `elf/dl-load.c`).
            let mut better = glibc.directories.iter().take(directory.unwrap_or(usize::MAX));
            let found = better.position(|dir| text.strip_suffix(b"/") == Some(dir.as_bytes()));
            directory = found.or(directory);
        }
        if knows_hwcaps && directory == Some(0) {
            break;
        }
    }
    Some((glibc.directories.get(directory?)?, knows_hwcaps))
}

/// What `lookup` finds in the constants of a program, its strings among them: a tenth of it; all of
/// it where it doesn't say where they are. `None` where there is no program.
fn constants<T>(image: &Root, path: &str, lookup: impl Fn(&[u8]) -> T) -> Option<T> {
    let found = image.lookup(path).filter(|found| found.size <= LINKER_BYTES)?;
    let section = || {
        let mut program = ElfStream::<AnyEndian, _>::open_stream(found.open()?).ok()?;
        let header = *program.section_header_by_name(".rodata").ok()??;
        program.section_data(&header).ok().map(|(data, _)| lookup(data))
    };
    section().or_else(|| image.read(path, LINKER_BYTES).map(|data| lookup(&data)))
}

/// Where a linker of glibc with that system directory finds libraries.
fn shelf(image: &Root, glibc: &Glibc, directory: &'static str, knows_hwcaps: bool) -> Shelf {
    let below = match (knows_hwcaps, glibc.hwcaps) {
        (true, Some(name)) if has_hwcaps() => Some(name),
        (false, _) => Some(LEGACY),
        (true, _) => None,
    };
    match below {
        // What the image has there must not be hidden.
        Some(below) if is_vacant(image, &format!("{directory}/{below}")) => {
            Shelf::Directory { system: directory, below }
        }
        _ => Shelf::Files(directory),
    }
}

/// Whether nothing is at `path`, or an empty directory.
fn is_vacant(image: &Root, path: &str) -> bool {
    match image.lookup(Path::new(path)) {
        None => true,
        Some(there) => there.kind == FileType::Directory && there.names().is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn image(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, bytes) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    fn shelves(image: &tempfile::TempDir) -> Vec<Shelf> {
        linkers(&Root::open(image.path()).unwrap()).into_iter().map(|found| found.shelf).collect()
    }

    #[cfg(target_arch = "x86_64")]
    const LINKER: &str = "lib64/ld-linux-x86-64.so.2";

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn linker_itself_names_its_search_directories() {
        let new: &[u8] =
            b"x\0/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/usr/lib/\0--glibc-hwcaps-mask\0";
        let red: &[u8] = b"\0/lib64/\0/usr/lib64/\0--glibc-hwcaps-mask\0";
        let old: &[u8] = b"\0/lib64/\0/usr/lib64/\0";
        let arch: &[u8] = b"\0/usr/lib/\0--glibc-hwcaps-mask\0";
        let hwcaps = "glibc-hwcaps/x86-64-v2";
        for (program, system, below) in [
            (new, "/usr/lib/x86_64-linux-gnu", hwcaps),
            (red, "/usr/lib64", hwcaps),
            (old, "/usr/lib64", "tls"),
            (arch, "/usr/lib", hwcaps),
        ] {
            let shelf = Shelf::Directory { system, below };
            assert_eq!(shelves(&image(&[(LINKER, program)])), [shelf]);
        }
        assert_eq!(shelves(&image(&[(LINKER, b"/usr/lib64")])), [], "that is no linker");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn what_an_image_has_is_not_hidden() {
        let linker: &[u8] = b"\0/usr/lib64/\0--glibc-hwcaps-mask\0";
        let own = "usr/lib64/glibc-hwcaps/x86-64-v2/libz.so.1";
        let image = image(&[(LINKER, linker), (own, b"")]);
        assert_eq!(shelves(&image), [Shelf::Files("/usr/lib64")]);
        fs::remove_file(image.path().join(own)).unwrap();
        let shelf = Shelf::Directory { system: "/usr/lib64", below: "glibc-hwcaps/x86-64-v2" };
        assert_eq!(shelves(&image), [shelf]);
    }

    /// An image can't make cgpu read files elsewhere, by a link, or wait, by a FIFO.
    #[test]
    fn image_cannot_redirect_or_block_the_linker_check() {
        let image = image(&[]);
        let at = |name: &str| image.path().join(name);
        for dir in ["lib", "lib64"] {
            fs::create_dir(at(dir)).unwrap();
        }
        symlink("/proc/self/exe", at(GLIBC[1].file)).unwrap();
        nix::unistd::mkfifo(&at(GLIBC[0].file), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(shelves(&image), []);
    }
}
