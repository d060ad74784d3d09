//! What is to be done to this node's slices, so that they list its devices: [`step`]. Pure.

use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::devices::amount;

/// Whose slices they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    /// The driver.
    pub(super) driver: String,
    /// The node, which is the pool, too.
    pub(super) node: String,
    /// The node's UID: its slices go with it.
    pub(super) node_uid: String,
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Nothing: the slice is as it should be.
    Nothing,
    Create(Box<ResourceSlice>),
    /// Puts this in the place of the one of its name and resource version.
    Replace(Box<ResourceSlice>),
    /// Removes one that is of no use: the pool is one slice.
    Delete(String),
}

/// What is to be done, so that `slices`, which are this driver's of this node, become one with `devices`. `written` is
/// what the API server made of these devices when they were last written, if they were: what it drops is not written
/// again.
#[must_use]
pub(super) fn step(
    owner: &Owner,
    slices: &[ResourceSlice],
    devices: &[Device],
    written: Option<&Written>,
) -> Step {
    let generation =
        slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
    let mut own: Vec<&ResourceSlice> = slices.iter().collect();
    // The newest stays.
    own.sort_by_key(|slice| -slice.spec.pool.generation);
    if let Some(surplus) = own.get(1) {
        return Step::Delete(surplus.metadata.name.clone().unwrap_or_default());
    }
    let Some(slice) = own.first() else {
        return Step::Create(Box::new(slice_of(owner, devices, generation + 1)));
    };
    let listed = slice.spec.devices.as_deref().unwrap_or_default();
    let is_as_written =
        written.is_some_and(|written| written.wanted == devices && alike(&written.stored, listed));
    let pool = &slice.spec.pool;
    let is_pool = pool.name == owner.node && pool.resource_slice_count == 1;
    if is_pool && (is_as_written || alike(devices, listed)) {
        return Step::Nothing;
    }
    let mut next = slice_of(owner, devices, generation + 1);
    next.metadata.name.clone_from(&slice.metadata.name);
    next.metadata.resource_version.clone_from(&slice.metadata.resource_version);
    Step::Replace(Box::new(next))
}

/// What was written last, and what the API server made of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Written {
    pub(super) wanted: Vec<Device>,
    pub(super) stored: Vec<Device>,
}

impl Written {
    /// The fields that the API server dropped, because a feature of it is off: their names.
    #[must_use]
    pub(super) fn dropped(&self) -> Vec<&'static str> {
        let pairs = || {
            self.wanted.iter().filter_map(|wanted| {
                let stored = self.stored.iter().find(|stored| stored.name == wanted.name)?;
                Some((wanted, stored))
            })
        };
        let policies = |device: &Device| {
            let capacities = device.capacity.iter().flat_map(|capacity| capacity.values());
            capacities.filter(|capacity| capacity.request_policy.is_some()).count()
        };
        let mut dropped = Vec::new();
        if pairs().any(|(wanted, stored)| {
            wanted.allow_multiple_allocations == Some(true)
                && stored.allow_multiple_allocations != Some(true)
        }) {
            dropped.push("allowMultipleAllocations");
        }
        if pairs().any(|(wanted, stored)| policies(stored) < policies(wanted)) {
            dropped.push("requestPolicy");
        }
        let is_tainted =
            |device: &Device| device.taints.as_ref().is_some_and(|taints| !taints.is_empty());
        if pairs().any(|(wanted, stored)| is_tainted(wanted) && !is_tainted(stored)) {
            dropped.push("taints");
        }
        dropped
    }
}

fn slice_of(owner: &Owner, devices: &[Device], generation: i64) -> ResourceSlice {
    let Owner { driver, node, node_uid } = owner;
    let node_reference = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.clone(),
        uid: node_uid.clone(),
        controller: Some(true),
        ..OwnerReference::default()
    };
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(format!("{node}-{driver}")),
            owner_references: Some(vec![node_reference]),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: driver.clone(),
            node_name: Some(node.clone()),
            pool: ResourcePool { name: node.clone(), generation, resource_slice_count: 1 },
            devices: Some(devices.to_vec()),
            ..ResourceSliceSpec::default()
        },
    }
}

/// Whether they are the same devices, whenever their taints were added and however their amounts are written: the API server
/// makes 15Gi of 15360Mi.
fn alike(one: &[Device], other: &[Device]) -> bool {
    let number = |quantity: &mut Quantity| {
        if let Some(amount) = amount(quantity) {
            *quantity = Quantity(amount.to_string());
        }
    };
    let plain = |devices: &[Device]| -> Vec<Device> {
        let mut devices = devices.to_vec();
        for capacity in devices.iter_mut().filter_map(|device| device.capacity.as_mut()).flatten() {
            number(&mut capacity.1.value);
            let Some(policy) = &mut capacity.1.request_policy else { continue };
            policy.default.iter_mut().for_each(number);
            for range in policy.valid_range.iter_mut() {
                number(&mut range.min);
                range.max.iter_mut().chain(range.step.iter_mut()).for_each(number);
            }
        }
        for taint in devices.iter_mut().filter_map(|device| device.taints.as_mut()).flatten() {
            taint.time_added = None;
        }
        devices
    };
    plain(one) == plain(other)
}

#[cfg(test)]
mod tests {
    use super::super::devices::NodeGpu;
    use super::super::devices::devices;
    use super::super::devices::tests::{DRIVER, node_gpu};
    use super::*;

    fn owner() -> Owner {
        Owner { driver: DRIVER.to_owned(), node: "n1".to_owned(), node_uid: "u".to_owned() }
    }

    fn wanted(broken: bool) -> Vec<Device> {
        let gpu = NodeGpu { xid: broken.then_some(79), ..node_gpu(0, "aaa", 16_000) };
        devices(&[gpu], DRIVER, None, true)
    }

    /// An API server that keeps what `keep` leaves.
    struct Server {
        slices: Vec<ResourceSlice>,
        keep: fn(&mut Device),
        writes: usize,
    }

    impl Server {
        fn new(keep: fn(&mut Device)) -> Self {
            Server { slices: Vec::new(), keep, writes: 0 }
        }

        /// Steps until nothing is left to do.
        fn settle(&mut self, wanted: &[Device], mut written: Option<Written>) -> Option<Written> {
            for _ in 0..10 {
                let mut slice = match step(&owner(), &self.slices, wanted, written.as_ref()) {
                    Step::Nothing => return written,
                    Step::Delete(name) => {
                        let before = self.slices.len();
                        self.slices.retain(|slice| slice.metadata.name.as_ref() != Some(&name));
                        assert!(self.slices.len() < before, "{name}");
                        continue;
                    }
                    Step::Create(slice) | Step::Replace(slice) => *slice,
                };
                self.writes += 1;
                slice.spec.devices.iter_mut().flatten().for_each(self.keep);
                let stored = slice.spec.devices.clone().unwrap();
                self.slices.retain(|other| other.metadata.name != slice.metadata.name);
                self.slices.push(slice);
                written = Some(Written { wanted: wanted.to_vec(), stored });
            }
            panic!("it is never as it should be");
        }

        fn generation(&self) -> i64 {
            assert_eq!(self.slices.len(), 1);
            self.slices[0].spec.pool.generation
        }
    }

    #[test]
    fn a_change_is_one_write_of_next_generation() {
        let mut server = Server::new(|_| ());
        let written = server.settle(&wanted(false), None);
        assert_eq!((server.generation(), server.writes), (1, 1));
        // A driver that was restarted finds its slice.
        server.settle(&wanted(false), None);
        assert_eq!(server.writes, 1);
        let written = server.settle(&wanted(true), written);
        assert_eq!((server.generation(), server.writes), (2, 2));
        assert_eq!(written.unwrap().dropped(), [""; 0]);
        // Somebody else's hand: a slice removed, another pool's left.
        server.slices.clear();
        server.settle(&wanted(true), None);
        let mut other = server.slices[0].clone();
        other.metadata.name = Some("of-old".to_owned());
        other.spec.pool.generation = 0;
        server.slices.push(other);
        server.settle(&wanted(true), None);
        assert_eq!(server.slices[0].metadata.name.as_deref(), Some("n1-gpu.cgpu.io"));
        assert_eq!(server.generation(), 1);
    }

    #[test]
    fn dropped_fields_are_known_and_written_once() {
        let mut server = Server::new(|device| {
            device.allow_multiple_allocations = None;
            device.taints = None;
            for capacity in device.capacity.iter_mut().flat_map(|all| all.values_mut()) {
                capacity.request_policy = None;
            }
        });
        let written = server.settle(&wanted(true), None).unwrap();
        assert_eq!(server.writes, 1);
        assert_eq!(written.dropped(), ["allowMultipleAllocations", "requestPolicy", "taints"]);
        server.settle(&wanted(true), Some(written));
        assert_eq!(server.writes, 1);
    }

    #[test]
    fn amounts_are_the_same_however_written() {
        let mut server = Server::new(|device| {
            let capacity = device.capacity.as_mut().unwrap();
            let memory = capacity.get_mut("memory").unwrap();
            assert_eq!(amount(&memory.value), Some(16_000 << 20));
            memory.value = Quantity("16777216000".to_owned());
            let policy = memory.request_policy.as_mut().unwrap();
            policy.default = Some(Quantity("16384000Ki".to_owned()));
        });
        server.settle(&wanted(false), None);
        server.settle(&wanted(false), None);
        assert_eq!(server.writes, 1);
    }

    #[test]
    fn times_of_taints_are_the_api_servers() {
        let mut server = Server::new(|device| {
            for taint in device.taints.iter_mut().flatten() {
                let text = "\"2026-11-28T00:00:00Z\"";
                taint.time_added = Some(serde_json::from_str(text).unwrap());
            }
        });
        server.settle(&wanted(true), None);
        server.settle(&wanted(true), None);
        assert_eq!(server.writes, 1);
    }
}
