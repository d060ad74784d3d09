//! Which device of which file a GPU is: [`choose`].
//!
//! Owns precedence (a later directory's device takes the place of an earlier one's; two of one
//! directory are a conflict, if a container wants that device) and names. A UUID names a GPU for
//! good; an index is what the GPU had when the file was written. So whatever its name, a device is
//! a GPU's only if its nodes are of that GPU and no other, and `all` is no GPU's. Must not know
//! files. Pure.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::Wanted;
use super::dirs::{Content, KIND, Source};
use super::node_kind::{Nature, nature};
use super::spec::{Device, Specification};

/// The device that stands for all others of its file.
const ALL: &str = "all";

/// Most names that a refusal lists.
const NAMES_MAX: usize = 12;

/// Why a GPU isn't found.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ChoiceError {
    /// No device is that GPU's.
    #[error("no CDI device {KIND} is {wanted} (there are {known})")]
    Missing {
        /// The GPU.
        wanted: String,
        /// The devices that there are.
        known: String,
        /// The files that they are in.
        files: Vec<PathBuf>,
    },
    /// The device of its name is another GPU's by now.
    #[error(
        "CDI device {KIND}={device} of {} has {nodes}, and {wanted} is /dev/nvidia{minor}",
        file.display()
    )]
    Another {
        /// The GPU.
        wanted: String,
        minor: u32,
        device: String,
        file: PathBuf,
        /// Its nodes.
        nodes: String,
    },
    /// Two files say what the device is.
    #[error(
        "CDI device {KIND}={device} is defined by {} and by {}; remove one of them",
        first.display(),
        second.display()
    )]
    Conflict {
        device: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
}

/// A device and where it is from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) file: &'a Path,
    pub(super) spec: &'a Specification,
    pub(super) device: &'a Device,
    pub(super) precedence: usize,
}

/// What a name stands for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) place: Place<'a>,
    /// Another file of the same precedence that defines it, too.
    pub(super) also: Option<&'a Path>,
}

/// The devices that there are, by name.
#[derive(Debug, Default)]
pub(super) struct Devices<'a>(BTreeMap<&'a str, Entry<'a>>);

/// A file's part in what a container gets.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) file: &'a Path,
    pub(super) spec: &'a Specification,
    pub(super) devices: Vec<&'a Device>,
}

/// Every device of `sources`, whether or not it counts.
pub(super) fn places<'a>(sources: &'a [Source]) -> impl Iterator<Item = Place<'a>> {
    sources.iter().flat_map(|source| {
        let spec = match &source.content {
            Content::Specification(spec) => Some(&**spec),
            Content::Unusable(_) => None,
        };
        spec.into_iter().flat_map(move |spec| {
            let (file, precedence) = (source.file.as_path(), source.precedence);
            spec.devices.iter().map(move |device| Place { file, spec, device, precedence })
        })
    })
}

impl<'a> Devices<'a> {
    /// Those of `sources`, which stand in the order of their precedence.
    pub(super) fn of(sources: &'a [Source]) -> Self {
        let mut devices = Self::default();
        for place in places(sources) {
            match devices.0.entry(&place.device.name) {
                Slot::Vacant(slot) => drop(slot.insert(Entry { place, also: None })),
                Slot::Occupied(mut slot) if slot.get().place.precedence < place.precedence => {
                    slot.insert(Entry { place, also: None });
                }
                Slot::Occupied(mut slot) => slot.get_mut().also = Some(place.file),
            }
        }
        devices
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What `name` stands for.
    pub(super) fn get(&self, name: &str) -> Option<&Entry<'a>> {
        self.0.get(name)
    }

    /// The device that is `wanted`.
    fn find(&self, wanted: &Wanted) -> Result<Place<'a>, ChoiceError> {
        let uuid = wanted.mig.as_ref().map_or(&wanted.uuid, |mig| &mig.uuid);
        let by_uuid =
            self.0.values().find(|entry| entry.place.device.name.eq_ignore_ascii_case(uuid));
        if let Some(entry) = by_uuid {
            return entry.agreed()?.must_be(wanted);
        }
        let index = wanted.index;
        let names = match &wanted.mig {
            None => [index.to_string(), format!("gpu{index}")],
            Some(mig) => [format!("{index}:{}", mig.index), format!("mig{index}:{}", mig.index)],
        };
        let mut another = None;
        for entry in names.iter().filter_map(|name| self.get(name)) {
            match entry.place.must_be(wanted) {
                Ok(place) => return entry.agreed().map(|_| place),
                Err(error) => another = another.or(Some(error)),
            }
        }
        // A MIG device is distinguished from its neighbours on the same GPU by its name only.
        if wanted.mig.is_none()
            && let Some(entry) = self.0.values().find(|entry| entry.place.is(wanted))
        {
            return entry.agreed();
        }
        Err(another.unwrap_or_else(|| self.missing(wanted)))
    }

    fn missing(&self, wanted: &Wanted) -> ChoiceError {
        let mut names: Vec<&str> = self.0.keys().copied().take(NAMES_MAX).collect();
        if self.0.len() > NAMES_MAX {
            names.push("…");
        }
        let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let mut files: Vec<PathBuf> =
            self.0.values().map(|entry| entry.place.file.to_owned()).collect();
        files.sort_unstable();
        files.dedup();
        ChoiceError::Missing { wanted: wanted.to_string(), known, files }
    }
}

impl<'a> Entry<'a> {
    /// The device, where the files agree on which.
    fn agreed(&self) -> Result<Place<'a>, ChoiceError> {
        match self.also {
            None => Ok(self.place),
            Some(second) => Err(ChoiceError::Conflict {
                device: self.place.device.name.clone(),
                first: self.place.file.to_owned(),
                second: second.to_owned(),
            }),
        }
    }
}

impl<'a> Place<'a> {
    /// Whether its nodes are of `wanted`, and it isn't the device that is all of them.
    fn is(&self, wanted: &Wanted) -> bool {
        let natures = || self.natures();
        let own = Nature::Gpu([i64::from(wanted.minor)].into());
        let instance = natures().any(|nature| nature == Nature::Instance);
        self.device.name != ALL
            && instance == wanted.mig.is_some()
            && natures().any(|nature| nature == own)
            && natures().all(|nature| nature == own || !matches!(nature, Nature::Gpu(_)))
    }

    fn natures(&self) -> impl Iterator<Item = Nature> {
        self.device.container_edits.device_nodes.iter().map(|node| nature(node, None))
    }

    /// Itself, where it is `wanted`.
    fn must_be(&self, wanted: &Wanted) -> Result<Place<'a>, ChoiceError> {
        if self.is(wanted) {
            return Ok(*self);
        }
        let nodes = &self.device.container_edits.device_nodes;
        let nodes: Vec<_> = nodes.iter().map(|node| node.source()).take(NAMES_MAX).collect();
        Err(ChoiceError::Another {
            wanted: wanted.to_string(),
            minor: wanted.minor,
            device: self.device.name.clone(),
            file: self.file.to_owned(),
            nodes: if nodes.is_empty() { "no node".to_owned() } else { nodes.join(", ") },
        })
    }
}

/// The devices that are `wanted`, by file, in the order in which they are wanted.
///
/// # Errors
///
/// Where one isn't there, is another's, or is defined twice.
pub(super) fn choose<'a>(
    devices: &Devices<'a>,
    wanted: &[Wanted],
) -> Result<Vec<Part<'a>>, ChoiceError> {
    let mut parts: Vec<Part<'a>> = Vec::new();
    for wanted in wanted {
        let Place { file, spec, device, .. } = devices.find(wanted)?;
        match parts.iter_mut().find(|part| part.file == file) {
            Some(part) => part.devices.push(device),
            None => parts.push(Part { file, spec, devices: vec![device] }),
        }
    }
    Ok(parts)
}

/// What is for every device: the part of the file that has precedence, by name where several do.
pub(super) fn common<'a>(devices: &Devices<'a>) -> Vec<Part<'a>> {
    let places = || devices.0.values().map(|entry| entry.place);
    let highest = places().map(|place| place.precedence).max();
    let first = places().filter(|place| Some(place.precedence) == highest).min_by_key(|p| p.file);
    first
        .map(|Place { file, spec, .. }| Part { file, spec, devices: Vec::new() })
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::WantedMig;
    use crate::cdi::fixture::{MINIMAL, sources, text};

    fn wanted(index: u32, uuid: &str, minor: u32) -> Wanted {
        Wanted { index, uuid: uuid.to_owned(), minor, mig: None }
    }

    fn chosen(files: &[(usize, &str, &str)], wanted: &[Wanted]) -> Result<Vec<String>, String> {
        let sources = sources(files);
        let devices = Devices::of(&sources);
        let parts = choose(&devices, wanted).map_err(|error| error.to_string())?;
        let name = |part: &Part<'_>, device: &Device| {
            format!("{}={}", part.file.file_name().unwrap().display(), device.name)
        };
        Ok(parts.iter().flat_map(|part| part.devices.iter().map(|it| name(part, it))).collect())
    }

    const UUID_2: &str = "GPU-5c1f1a0e-3b7d-4e0a-9f7c-0000a0000002";

    #[test]
    fn gpu_matches_by_uuid_then_index_then_node() {
        let eight = text("eight-gpus.yaml");
        let files = [(0, "eight.yaml", eight.as_str())];
        let one = |index, uuid, minor| chosen(&files, &[wanted(index, uuid, minor)]);
        assert_eq!(one(5, UUID_2, 1).unwrap(), [format!("eight.yaml={UUID_2}")]);
        let upper = UUID_2.to_uppercase();
        assert_eq!(one(5, &upper, 1).unwrap(), [format!("eight.yaml={UUID_2}")]);
        assert_eq!(one(0, "GPU-new", 3).unwrap(), ["eight.yaml=0"]);
        // The file was written when it had index 1.
        assert_eq!(one(0, "GPU-new", 2).unwrap(), ["eight.yaml=1"]);
        let typed = MINIMAL.replace("\"0\"", "gpu0");
        assert_eq!(chosen(&[(0, "a", &typed)], &[wanted(0, "GPU-x", 0)]).unwrap(), ["a=gpu0"]);
        let renamed = MINIMAL.replace("\"0\"", "first");
        assert_eq!(chosen(&[(0, "a", &renamed)], &[wanted(0, "GPU-x", 0)]).unwrap(), ["a=first"]);
    }

    /// An index that is another GPU by now is not followed.
    #[test]
    fn index_of_another_gpu_is_not_followed() {
        let text = text("index-of-another.yaml");
        let both = [wanted(0, "GPU-a", 0), wanted(1, "GPU-b", 1)];
        assert_eq!(chosen(&[(0, "a", &text)], &both).unwrap(), ["a=1", "a=0"]);
        assert_eq!(
            chosen(&[(0, "a", MINIMAL)], &[wanted(0, "GPU-x", 1)]).unwrap_err(),
            "CDI device nvidia.com/gpu=0 of /cdi/0/a has /dev/nvidia0, and GPU 0 (GPU-x) is \
             /dev/nvidia1"
        );
    }

    #[test]
    fn uuid_with_node_of_another_gpu_is_refused() {
        let stale = MINIMAL.replace("\"0\"", "GPU-a");
        let error = chosen(&[(0, "a", &stale)], &[wanted(0, "GPU-a", 2)]).unwrap_err();
        assert!(error.starts_with("CDI device nvidia.com/gpu=GPU-a of /cdi/0/a has"), "{error}");
        // By any of what is said of it.
        for node in
            ["{path: /dev/nvidia2, hostPath: /dev/nvidia3}", "{path: /dev/nvidia2, major: 195}"]
        {
            let text = stale.replace("{path: /dev/nvidia0}", node);
            assert!(chosen(&[(0, "a", &text)], &[wanted(0, "GPU-a", 2)]).is_err(), "{node}");
        }
    }

    /// The device `all` is no single GPU's, and neither is one that has more GPUs than one.
    #[test]
    fn multi_gpu_cdi_device_matches_no_gpu() {
        let all = MINIMAL.replace("\"0\"", "all");
        let error = chosen(&[(0, "a", &all)], &[wanted(0, "GPU-x", 0)]).unwrap_err();
        assert_eq!(error, "no CDI device nvidia.com/gpu is GPU 0 (GPU-x) (there are all)");
        let both = MINIMAL
            .replace("[{path: /dev/nvidia0}]", "[{path: /dev/nvidia0}, {path: /dev/nvidia1}]");
        assert!(chosen(&[(0, "a", &both)], &[wanted(0, "GPU-x", 0)]).is_err());
    }

    /// MIG devices are found by UUID or position, and never in place of their GPU.
    #[test]
    fn mig_device_matches_by_uuid_or_position() {
        let text = text("mig.yaml");
        let files = [(0, "a", text.as_str())];
        let mig = |index, uuid: &str, minor| Wanted {
            mig: Some(WantedMig { index, uuid: uuid.to_owned() }),
            ..wanted(0, "GPU-x", minor)
        };
        let uuid = "MIG-0b2c7c04-6f0c-5d5b-8b0c-000000000002";
        assert_eq!(chosen(&files, &[mig(7, uuid, 0)]).unwrap(), [format!("a={uuid}")]);
        assert_eq!(chosen(&files, &[mig(0, "MIG-y", 0)]).unwrap(), ["a=0:0"]);
        assert!(chosen(&files, &[mig(0, "MIG-y", 1)]).is_err(), "it is of another GPU");
        assert!(chosen(&files, &[mig(2, "MIG-y", 0)]).is_err(), "there is none");
        assert!(chosen(&files, &[wanted(0, "GPU-x", 0)]).is_err(), "only parts of it are there");
        assert_eq!(chosen(&files, &[wanted(1, "GPU-x", 1)]).unwrap(), ["a=1"]);
    }

    /// A later directory has precedence, and a conflict is an error only for a container that wants
    /// the device.
    #[test]
    fn later_directory_precedes_and_used_conflict_is_refused() {
        let (one, again) = (text("one-gpu.yaml"), text("conflicting.yaml"));
        let gpu = [wanted(0, "GPU-x", 0)];
        let later = [(0, "a", one.as_str()), (1, "b", again.as_str())];
        assert_eq!(chosen(&later, &gpu).unwrap(), ["b=0"]);
        let conflict = [(0, "a", one.as_str()), (0, "b", again.as_str())];
        assert_eq!(
            chosen(&conflict, &gpu).unwrap_err(),
            "CDI device nvidia.com/gpu=0 is defined by /cdi/0/a and by /cdi/0/b; remove one of them"
        );
        let third = MINIMAL.replace("\"0\"", "GPU-x");
        let besides = [conflict[0], conflict[1], (0, "c", third.as_str())];
        assert_eq!(chosen(&besides, &gpu).unwrap(), ["c=GPU-x"]);
        let settled = [conflict[0], conflict[1], (1, "c", MINIMAL)];
        assert_eq!(chosen(&settled, &gpu).unwrap(), ["c=0"]);
    }
}
