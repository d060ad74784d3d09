//! What a program made in the driver, as far as it can be scheduled: channel groups, their channels,
//! and what leads to them.
//!
//! Pure: takes the calls that succeeded, returns what there is now. Handles are known only if the driver's
//! answer was seen, so that one that it chose is as good as one that it was given.

use std::collections::{BTreeMap, BTreeSet};

#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Call, Command, Meaning, Release};

/// Bytes of `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS` (nvos.h).
pub const GROUP_PARAMS_BYTES: usize = 20;

/// Where its `engineType` is.
const GROUP_ENGINE: usize = 12;

/// `NV2080_ENGINE_TYPE_GRAPHICS` (cl2080_notification.h), which also computes.
const ENGINE_GRAPHICS: u32 = 1;

/// What the lowest byte of a channel's class is, from `GF100_CHANNEL_GPFIFO` on (cl906f.h to clca6f.h).
const CHANNEL_CLASS: u32 = 0x6f;

/// A process, and its descriptor of `nvidiactl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Its number.
    pub process: i32,
    /// The descriptor that the client was made on.
    pub descriptor: i32,
}

/// What a call that succeeded did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Did {
    /// An object was made.
    Made(nvrm::call::Alloc),
    /// An object was freed, with all below it.
    Freed(nvrm::call::Object),
}

/// A channel group, and what it takes to schedule it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub client: u32,
    pub handle: u32,
    /// The engine that it asked for: `NV2080_ENGINE_TYPE_*`; 0 lets the driver choose.
    pub engine: u32,
    pub channels: Vec<u32>,
    /// A subdevice of its GPU in its client.
    pub subdevice: Option<u32>,
}

#[derive(Debug)]
struct Object {
    parent: u32,
    class: u32,
    engine: u32,
}

#[derive(Debug)]
struct Client {
    origin: Origin,
    objects: BTreeMap<u32, Object>,
}

/// All that is there, by client.
#[derive(Debug, Default)]
pub struct Objects {
    clients: BTreeMap<u32, Client>,
}

fn is_channel(class: u32) -> bool {
    class > 0xff && class & 0xff == CHANNEL_CLASS
}

/// What a call did, by its struct as the driver left it; nothing where it failed, or did neither.
#[must_use]
pub fn did(release: &Release, command: Command, after: &[u8]) -> Option<Did> {
    let decoded = nvrm::decode(release, command, after).ok()?;
    let status = decoded.layout?.view(after)?.u32(Meaning::Status)?;
    match decoded.call {
        Call::Alloc(alloc) if status == NV_OK => Some(Did::Made(alloc)),
        Call::Free(object) if status == NV_OK => Some(Did::Freed(object)),
        _ => None,
    }
}

/// The engine that a group's parameters ask for.
#[must_use]
pub fn engine_of(params: &[u8]) -> u32 {
    let field = params.get(GROUP_ENGINE..).and_then(|rest| rest.first_chunk());
    field.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

impl Objects {
    /// Enters what a call did; `engine` is that of a group.
    pub fn enter(&mut self, origin: Origin, did: Did, engine: u32) {
        match did {
            Did::Made(alloc) => match alloc.class {
                NV01_ROOT | NV01_ROOT_NON_PRIV | NV01_ROOT_CLIENT => {
                    let client = Client { origin, objects: BTreeMap::new() };
                    self.clients.insert(alloc.object.handle, client);
                }
                class => {
                    let nvrm::call::Object { client, parent, handle } = alloc.object;
                    if let Some(client) = self.clients.get_mut(&client) {
                        client.objects.insert(handle, Object { parent, class, engine });
                    }
                }
            },
            Did::Freed(object) if object.handle == object.client => {
                self.clients.remove(&object.client);
            }
            Did::Freed(object) => {
                if let Some(client) = self.clients.get_mut(&object.client) {
                    client.free(object.handle);
                }
            }
        }
    }

    /// Who made a client.
    #[must_use]
    pub fn origin(&self, client: u32) -> Option<Origin> {
        self.clients.get(&client).map(|client| client.origin)
    }

    /// The groups that have a channel.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = Vec::new();
        for (handle, client) in &self.clients {
            for (group, object) in &client.objects {
                let channels = client.channels_of(*group);
                if object.class == KEPLER_CHANNEL_GROUP_A && !channels.is_empty() {
                    groups.push(Group {
                        client: *handle,
                        handle: *group,
                        engine: object.engine,
                        channels,
                        subdevice: client.subdevice_of(*group),
                    });
                }
            }
        }
        groups
    }

    /// How many channels have no group, and so no slice.
    #[must_use]
    pub fn loose_channels(&self) -> usize {
        let objects = self.clients.values().flat_map(|client| {
            client.objects.values().filter(|object| {
                let parent = client.objects.get(&object.parent);
                is_channel(object.class)
                    && parent.is_none_or(|parent| parent.class != KEPLER_CHANNEL_GROUP_A)
            })
        });
        objects.count()
    }
}

impl Client {
    fn free(&mut self, handle: u32) {
        let mut doomed = BTreeSet::from([handle]);
        loop {
            let below = self.objects.iter().filter(|(_, object)| doomed.contains(&object.parent));
            let more: Vec<u32> = below
                .map(|(handle, _)| *handle)
                .filter(|handle| !doomed.contains(handle))
                .collect();
            if more.is_empty() {
                break;
            }
            doomed.extend(more);
        }
        self.objects.retain(|handle, _| !doomed.contains(handle));
    }

    fn channels_of(&self, group: u32) -> Vec<u32> {
        let below = self.objects.iter().filter(|(_, object)| object.parent == group);
        below.filter(|(_, object)| is_channel(object.class)).map(|(handle, _)| *handle).collect()
    }

    fn subdevice_of(&self, group: u32) -> Option<u32> {
        // No deeper than there are objects, whatever they say of their parents.
        let mut device = group;
        for _ in 0..=self.objects.len() {
            let object = self.objects.get(&device)?;
            if object.class == NV01_DEVICE_0 {
                break;
            }
            device = object.parent;
        }
        let below = |object: &Object| object.class == NV20_SUBDEVICE_0 && object.parent == device;
        self.objects.iter().find(|(_, object)| below(object)).map(|(handle, _)| *handle)
    }
}

/// Those of a program's groups whose runlist its kernels wait in: the graphics engine's, or all where
/// none says that it is one of those.
#[must_use]
pub fn computing(groups: &[Group]) -> Vec<&Group> {
    let chosen: Vec<&Group> =
        groups.iter().filter(|group| group.engine == ENGINE_GRAPHICS).collect();
    if chosen.is_empty() { groups.iter().collect() } else { chosen }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvrm::call::{Alloc, Object as Named};
    use nvrm::class::class_use;

    const ORIGIN: Origin = Origin { process: 7, descriptor: 3 };
    const CLIENT: u32 = 0xc1d0_0001;

    fn made(parent: u32, handle: u32, class: u32) -> Did {
        let object = Named { client: CLIENT, parent, handle };
        let does = class_use(class).does;
        Did::Made(Alloc { object, class, does, params: 0, params_size: None, rights: 0 })
    }

    fn freed(handle: u32) -> Did {
        Did::Freed(Named { client: CLIENT, parent: 0, handle })
    }

    /// Two GPUs; on the second a group that computes with two channels, one that copies, an empty one,
    /// and a channel of its own.
    fn objects() -> Objects {
        let mut objects = Objects::default();
        let calls = [
            (made(0, CLIENT, NV01_ROOT_CLIENT), 0),
            (made(CLIENT, 1, NV01_DEVICE_0), 0),
            (made(1, 2, NV20_SUBDEVICE_0), 0),
            (made(CLIENT, 3, NV01_DEVICE_0), 0),
            (made(3, 4, NV20_SUBDEVICE_0), 0),
            (made(3, 10, KEPLER_CHANNEL_GROUP_A), ENGINE_GRAPHICS),
            (made(10, 11, 0xc56f), 0),
            (made(10, 12, 0xca6f), 0),
            (made(11, 13, 0xc6c0), 0),
            (made(3, 20, KEPLER_CHANNEL_GROUP_A), 9),
            (made(20, 21, 0xc56f), 0),
            (made(3, 30, KEPLER_CHANNEL_GROUP_A), 9),
            (made(3, 40, 0xc56f), 0),
        ];
        for (did, engine) in calls {
            objects.enter(ORIGIN, did, engine);
        }
        objects
    }

    #[test]
    fn group_has_its_channels_and_gpu_subdevice() {
        let objects = objects();
        let groups = objects.groups();
        let found: Vec<(u32, &[u32])> =
            groups.iter().map(|group| (group.handle, group.channels.as_slice())).collect();
        assert_eq!(found, [(10, [11, 12].as_slice()), (20, &[21])]);
        assert!(groups.iter().all(|group| group.subdevice == Some(4) && group.client == CLIENT));
        assert_eq!(objects.loose_channels(), 1);
        assert_eq!(objects.origin(CLIENT), Some(ORIGIN));
        assert_eq!(objects.origin(1), None);
    }

    /// Kernels wait in the runlist of the graphics engine if a group names that engine.
    #[test]
    fn kernels_wait_in_graphics_runlist_if_named() {
        let mut groups = objects().groups();
        let handles = |groups: &[Group]| -> Vec<u32> {
            computing(groups).into_iter().map(|group| group.handle).collect()
        };
        assert_eq!(handles(&groups), [10]);
        groups[0].engine = 0;
        assert_eq!(handles(&groups), [10, 20]);
        let mut params = [0; GROUP_PARAMS_BYTES];
        params[GROUP_ENGINE] = 9;
        assert_eq!((engine_of(&params), engine_of(&params[..12])), (9, 0));
    }

    #[test]
    fn what_is_freed_takes_what_is_below_it() {
        for (handle, left) in [(11, vec![10, 20]), (10, vec![20]), (3, vec![]), (CLIENT, vec![])] {
            let mut objects = objects();
            objects.enter(ORIGIN, freed(handle), 0);
            let groups: Vec<u32> = objects.groups().iter().map(|group| group.handle).collect();
            assert_eq!(groups, left, "{handle:#x}");
        }
    }

    #[test]
    fn only_what_succeeded_did_anything_in_either_size() {
        let release = Release::of("535.161.08".parse().unwrap()).unwrap();
        // NVOS21 and NVOS64: bytes, and where the status is.
        for (bytes, request, status) in [(32, 0xc020_462b, 28), (48, 0xc030_462b, 40)] {
            let mut after = vec![0; bytes];
            for (at, value) in [(0, CLIENT), (4, 3), (8, 0xcaf0_0000), (12, 0xc56f)] {
                after[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
            }
            let command = Command::of_ioctl(request);
            let Some(Did::Made(alloc)) = did(&release, command, &after) else { panic!("{bytes}") };
            assert_eq!((alloc.object.handle, alloc.class), (0xcaf0_0000, 0xc56f));
            after[status] = 0x51;
            assert_eq!(did(&release, command, &after), None);
            assert_eq!(did(&release, command, &after[1..]), None);
        }
        let free = Command::of_ioctl(0xc010_4629);
        assert!(matches!(did(&release, free, &[0; 16]), Some(Did::Freed(_))));
    }
}
