//! What a container finds at a path before anything of ours is mounted: its image, and over it what
//! its bundle mounts.
//!
//! Decides whether the real runtime can make a mount point there. The image and the mounted files are
//! hostile: a link is read and followed here, within the container's own tree, and never by the kernel
//! on the host; nothing is written.

use std::fs;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, StatVfsMountFlags, statvfs};

use super::mounts::{MountPoint, Obstacle};
use super::root::Root;
use crate::bundle::{Mounted, plain};

/// Most links on the way to a path, as the kernel has it (`MAXSYMLINKS`).
const LINKS_MAX: usize = 40;

/// What is at a path.
#[derive(Debug)]
enum Kind {
    Directory,
    File,
    Link(PathBuf),
    Nothing,
}

/// Files that the container has at a path and below.
#[derive(Debug)]
struct Layer {
    /// Where, without links.
    at: PathBuf,
    source: String,
    files: Files,
    is_read_only: bool,
}

#[derive(Debug)]
enum Files {
    /// Those of a directory.
    Below(Root),
    /// A file alone.
    File,
    /// What a file system has by itself, and not from the host: nothing that matters here.
    Unknown,
}

/// What a container has at its paths.
#[derive(Debug)]
pub struct Layers {
    /// In the order of mounts: the image first.
    layers: Vec<Layer>,
}

impl Layers {
    /// Those of the image at `rootfs` with `mounts` of its bundle, but for those from below `ours` on the host.
    #[must_use]
    pub fn new<'a>(image: Root, mounts: impl Iterator<Item = Mounted<'a>>, ours: &Path) -> Self {
        let is_read_only = is_on_read_only(image.path());
        let source = image.path().display().to_string();
        let (at, files) = (PathBuf::from("/"), Files::Below(image));
        let mut layers = Layers { layers: vec![Layer { at, source, files, is_read_only }] };
        for mount in mounts.filter(|mount| !Path::new(mount.source).starts_with(ours)) {
            layers.add(&mount);
        }
        layers
    }

    fn add(&mut self, mount: &Mounted<'_>) {
        let Ok((at, _)) = self.resolve(&plain(mount.destination)) else { return };
        let source = Path::new(mount.source);
        let files = match fs::metadata(source) {
            Ok(meta) if mount.is_bind && meta.is_dir() => Root::open(source).ok().map(Files::Below),
            Ok(_) if mount.is_bind => Some(Files::File),
            _ => None,
        };
        self.layers.push(Layer {
            at,
            source: mount.source.to_owned(),
            is_read_only: mount.is_read_only || (mount.is_bind && is_on_read_only(source)),
            files: files.unwrap_or(Files::Unknown),
        });
    }

    /// Why nothing can be mounted at `destination`; `None` if it can.
    #[must_use]
    pub fn obstacle(&self, destination: &str, point: MountPoint<'_>) -> Option<Obstacle> {
        let wants_directory = match point {
            MountPoint::Directory => true,
            MountPoint::Like(source) => Path::new(source).is_dir(),
        };
        let (path, kind) = match self.resolve(destination) {
            Ok(found) => found,
            Err(obstacle) => return Some(obstacle),
        };
        let text = |path: &Path| path.display().to_string();
        match (kind, wants_directory) {
            (Kind::Directory, true) | (Kind::File, false) => None,
            (Kind::Directory, false) => {
                Some(Obstacle::OtherKind { path: text(&path), found: "a directory" })
            }
            (Kind::File | Kind::Link(_), _) => {
                Some(Obstacle::OtherKind { path: text(&path), found: "a file" })
            }
            (Kind::Nothing, _) => {
                let is_there = |path: &&Path| !matches!(self.kind(path), Kind::Nothing);
                let parent = path.ancestors().find(is_there).unwrap_or(Path::new("/"));
                let layer = self.layer_of(parent);
                layer.is_read_only.then(|| Obstacle::ReadOnly {
                    at: text(&layer.at),
                    source: layer.source.clone(),
                })
            }
        }
    }

    /// Where `path` leads, and what is there, as the real runtime finds it: links are followed within the
    /// container, and what isn't there is taken as it is written.
    fn resolve(&self, path: &str) -> Result<(PathBuf, Kind), Obstacle> {
        let mut pending: Vec<PathBuf> = vec![PathBuf::from(path)];
        let (mut place, mut kind) = (PathBuf::from("/"), Kind::Directory);
        let mut links = 0;
        while let Some(rest) = pending.pop() {
            let mut parts = rest.components();
            let Some(part) = parts.next() else { continue };
            pending.push(parts.as_path().to_owned());
            let next = match part {
                Component::RootDir => PathBuf::from("/"),
                Component::ParentDir => place.parent().unwrap_or(Path::new("/")).to_owned(),
                Component::CurDir | Component::Prefix(_) => continue,
                Component::Normal(_) if matches!(kind, Kind::File) => {
                    let path = place.display().to_string();
                    return Err(Obstacle::OtherKind { path, found: "a file" });
                }
                Component::Normal(name) => place.join(name),
            };
            match self.kind(&next) {
                Kind::Link(_) if links == LINKS_MAX => {
                    return Err(Obstacle::LinkLoop { path: path.to_owned() });
                }
                // From the directory in which the link is.
                Kind::Link(target) => {
                    links += 1;
                    pending.push(target);
                }
                found => (place, kind) = (next, found),
            }
        }
        Ok((place, kind))
    }

    /// The layer that a path without links is of: what is mounted last hides what was there.
    fn layer_of(&self, path: &Path) -> &Layer {
        let mut layers = self.layers.iter().rev();
        layers.find(|layer| path.starts_with(&layer.at)).unwrap_or(&self.layers[0])
    }

    /// What is at a path that has no link before its end.
    fn kind(&self, path: &Path) -> Kind {
        let layer = self.layer_of(path);
        let below = path.strip_prefix(&layer.at).unwrap_or(path);
        match &layer.files {
            _ if below == Path::new("") => match &layer.files {
                Files::File => Kind::File,
                Files::Below(_) | Files::Unknown => Kind::Directory,
            },
            Files::File | Files::Unknown => Kind::Nothing,
            Files::Below(root) => match root.entry(below) {
                None => Kind::Nothing,
                Some((FileType::Directory, _)) => Kind::Directory,
                Some((_, Some(target))) => Kind::Link(target),
                Some(_) => Kind::File,
            },
        }
    }
}

/// Whether `path` on the host lies on what is mounted read-only.
fn is_on_read_only(path: &Path) -> bool {
    statvfs(path).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const A_FILE: MountPoint<'static> = MountPoint::Like("/proc/self/exe");

    /// A directory with these directories (`name/`), files, and links (`name -> target`).
    fn tree(entries: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in entries {
            let (name, target) = entry.split_once(" -> ").unwrap_or((entry, ""));
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match (target, name.ends_with('/')) {
                ("", true) => fs::create_dir_all(path).unwrap(),
                ("", false) => fs::write(path, "").unwrap(),
                (target, _) => symlink(target, path).unwrap(),
            }
        }
        dir
    }

    struct Container {
        image: tempfile::TempDir,
        mounts: Vec<(&'static str, tempfile::TempDir, bool)>,
    }

    impl Container {
        fn new(image: &[&str]) -> Self {
            Container { image: tree(image), mounts: Vec::new() }
        }

        fn mount(mut self, at: &'static str, entries: &[&str], is_read_only: bool) -> Self {
            self.mounts.push((at, tree(entries), is_read_only));
            self
        }

        fn obstacle(&self, path: &str, point: MountPoint<'_>) -> Option<Obstacle> {
            let sources: Vec<_> =
                self.mounts.iter().map(|(_, dir, _)| dir.path().display().to_string()).collect();
            let mounts = self.mounts.iter().zip(&sources).map(|((at, _, is_read_only), source)| {
                let is_read_only = *is_read_only;
                Mounted { destination: at, source, is_bind: true, is_read_only }
            });
            let image = Root::open(self.image.path()).unwrap();
            Layers::new(image, mounts, Path::new("/ours")).obstacle(path, point)
        }

        /// Where the mount is that is in the way.
        fn read_only_at(&self, path: &str) -> Option<String> {
            match self.obstacle(path, MountPoint::Directory) {
                Some(Obstacle::ReadOnly { at, .. }) => Some(at),
                None => None,
                other => panic!("{path}: {other:?}"),
            }
        }
    }

    /// A mount point counts as missing if the read-only mount above it lacks it.
    #[test]
    fn mount_point_is_missing_below_read_only_mount() {
        let container = Container::new(&["usr/local/", "lib -> usr/lib", "opt/"])
            .mount("/usr", &["lib/there/", "local/", "opt -> /opt"], true)
            .mount("/usr/lib/x", &[], false)
            .mount("/srv", &[], false);
        let at = |path| container.read_only_at(path);
        assert_eq!(at("/usr/local/nvidia"), Some("/usr".into()));
        assert_eq!(at("/usr/lib/there"), None, "it is there");
        assert_eq!(at("/lib/there"), None);
        assert_eq!(at("/lib/firmware/nvidia"), Some("/usr".into()), "by a link of the image");
        assert_eq!(at("/usr/lib/x/below"), None, "a later mount lies over it");
        assert_eq!(at("/usr/opt/nvidia"), None, "by a link of the mount");
        assert_eq!(at("/usr/lib/../../opt/x"), None);
        assert_eq!(at("/srv/x/y"), None);
        assert_eq!(at("/nvidia"), None);
    }

    #[test]
    fn what_is_mounted_last_counts() {
        let container =
            Container::new(&[]).mount("/usr/local", &[], true).mount("/usr", &["local/"], false);
        assert_eq!(container.read_only_at("/usr/local/nvidia"), None);
        let container = Container::new(&["var/run -> /run"]).mount("/var/run", &[], true);
        assert_eq!(container.read_only_at("/run/x"), Some("/run".into()));
    }

    /// Another kind of file, or a loop of links, is an obstacle to a mount.
    #[test]
    fn other_file_kind_and_link_loop_are_obstacles() {
        let container = Container::new(&[
            "usr/bin/nvidia-smi/",
            "usr/local/nvidia",
            "etc/OpenCL -> /etc/OpenCL",
            "a -> b/x",
            "b -> a",
            "far -> ../../../../usr/bin",
        ]);
        let other = |path: &str, found| Some(Obstacle::OtherKind { path: path.into(), found });
        let circle = |path: &str| Some(Obstacle::LinkLoop { path: path.into() });
        for (path, point, expected) in [
            ("/usr/bin/nvidia-smi", A_FILE, other("/usr/bin/nvidia-smi", "a directory")),
            ("/usr/bin/nvidia-smi", MountPoint::Directory, None),
            ("/far/nvidia-smi", A_FILE, other("/usr/bin/nvidia-smi", "a directory")),
            ("/usr/local/nvidia", MountPoint::Directory, other("/usr/local/nvidia", "a file")),
            ("/usr/local/nvidia/bin", A_FILE, other("/usr/local/nvidia", "a file")),
            ("/usr/local/nvidia", A_FILE, None),
            ("/etc/OpenCL/vendors/x.icd", A_FILE, circle("/etc/OpenCL/vendors/x.icd")),
            ("/a", A_FILE, circle("/a")),
        ] {
            assert_eq!(container.obstacle(path, point), expected, "{path}");
        }
    }

    #[test]
    fn image_links_are_not_followed_on_the_host() {
        let outside = tree(&["directory/", "file"]);
        let link = |name: &str| format!("{name} -> {}/{name}", outside.path().display());
        let container = Container::new(&[&link("directory"), &link("file")]);
        // Both lead to what the container doesn't have, and it could be made in its own tree.
        for point in [MountPoint::Directory, A_FILE] {
            assert_eq!(container.obstacle("/directory", point), None);
            assert_eq!(container.obstacle("/file", point), None);
        }
    }
}
