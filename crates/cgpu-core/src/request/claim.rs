//! What a claim of Kubernetes' Dynamic Resource Allocation gives a container: [`Claim`], a record that one of the
//! container's variables names for each request of the claim.
//!
//! The DRA driver writes the record where only root can, and the variable into the claim's CDI file. A container may use
//! several requests of several claims: [`merged`] makes one [`Grant`] of them. Pure. Must not know where records lie:
//! `cgpu_host::grants` does.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Grant;
use super::grant::{FORMAT, GrantedGpu, is_token};
use super::setting_names::NVIDIA_VISIBLE_DEVICES;

/// What the names of the variables begin with that name shares. The rest is the token's beginning: CDI lets the later of
/// two variables of one name win.
pub const PREFIX: &str = "CGPU_GRANT_";

/// Digits of the token in a variable's name.
const NAME_DIGITS: usize = 16;

/// What a claim's CDI file sets `NVIDIA_VISIBLE_DEVICES` to: no GPU, for runtimes that aren't cgpu's.
pub const VOID: &str = "void";

/// The form of records that is written. Others are refused.
pub const CLAIM_FORMAT: u32 = 1;

/// A GPU, or a part of it, that was allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedGpu {
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// The memory that the claim consumes of it, in bytes.
    pub bytes: u64,
    /// Whether that is all of its memory: no other claim has any of it, and no quota is enforced.
    pub whole: bool,
    /// The pool of the device by which the API server counts it.
    pub pool: String,
    /// That device, in its pool.
    pub device: String,
    /// Which allocation of the device it is, where a device has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
}

/// What one request of a claim was given: the part that a container uses, with every GPU of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The request's name in the claim; of a list of alternatives, that of the list.
    pub request: String,
    /// 32 hexadecimal digits that can't be guessed.
    pub token: String,
    /// Several, if the request asks for a count.
    pub gpus: Vec<ClaimedGpu>,
    /// The weight in sharing compute; 1 if nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// A claim that is prepared on this node. Field by field what is on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// [`CLAIM_FORMAT`].
    pub format: u32,
    /// A claim's pods are of its namespace.
    pub namespace: String,
    /// For messages.
    pub name: String,
    /// Another claim of the same name has another one.
    pub uid: String,
    /// The UIDs of the pods that it is reserved for.
    pub pods: Vec<String>,
    /// Whether it was made for a pod, by a template: it is never reserved for another one.
    #[serde(default)]
    pub of_one_pod: bool,
    /// One for each request that has GPUs of cgpu's.
    pub shares: Vec<Share>,
}

impl Claim {
    /// Its share of that request.
    #[must_use]
    pub fn share(&self, request: &str) -> Option<&Share> {
        self.shares.iter().find(|share| share.request == request)
    }

    /// Its name in messages.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The variable that names one of its shares.
    #[must_use]
    pub fn variable(&self, share: &Share) -> (String, String) {
        (share.variable(), format!("{}.{}", self.uid, share.token))
    }
}

impl Share {
    fn variable(&self) -> String {
        let digits = self.token.get(..NAME_DIGITS).unwrap_or(&self.token);
        format!("{PREFIX}{}", digits.to_ascii_uppercase())
    }
}

/// Which share a variable names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareName<'a> {
    /// The variable's name.
    variable: &'a str,
    /// The claim's UID, as it is written there: any text without `/`.
    pub claim: &'a str,
    token: &'a str,
}

impl<'a> ShareName<'a> {
    /// The share that the item `NAME=value` of `process.env` names; `None` if its name isn't one of these variables, or
    /// it is empty, as an image may have it.
    ///
    /// # Errors
    ///
    /// If the value names none.
    pub fn of(item: &'a str) -> Option<Result<Self, ClaimError>> {
        let (variable, value) = item.split_once('=')?;
        if !variable.starts_with(PREFIX) || value.is_empty() {
            return None;
        }
        let parts = value.split_once('.').filter(|(claim, token)| {
            let is_uid = (1..=63).contains(&claim.len())
                && claim.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            is_uid && is_token(token)
        });
        let unnamed = || ClaimError::NoName { variable: variable.chars().take(64).collect() };
        Some(parts.map(|(claim, token)| ShareName { variable, claim, token }).ok_or_else(unnamed))
    }

    /// The share of `claim` that it names.
    fn in_claim<'c>(&self, claim: &'c Claim) -> Option<&'c Share> {
        claim
            .shares
            .iter()
            .find(|share| share.token == self.token && share.variable() == self.variable)
    }
}

/// Why a container doesn't get what its variables name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ClaimError {
    /// A value of another form.
    #[error(
        "{variable} is no name of a claim's share; it is set by cgpu's DRA driver alone: take it out of the pod or its image"
    )]
    NoName {
        /// The variable.
        variable: String,
    },
    /// A name without a record.
    #[error(
        "{variable} names no claim that is prepared on this node; take the variable out of the pod if it sets it itself, else \
         delete the pod, so that its controller makes another"
    )]
    NoRecord {
        /// The variable.
        variable: String,
    },
    /// A claim of another namespace's, or that isn't reserved for the pod.
    #[error("{variable} names a claim that isn't this pod's; take the variable out of the pod")]
    Foreign {
        /// The variable.
        variable: String,
    },
    /// A claim next to what the device plugin gave.
    #[error(
        "this container has GPUs both by the claim {claim} and by {resource}; let it ask by one of both"
    )]
    TwoWays {
        /// The claim.
        claim: String,
        /// The resource of the device plugin.
        resource: String,
    },
}

/// One grant of all shares that a container's variables name: the same GPU twice is the sum of its memory. `claims` are
/// the claims of this node that they name by UID. `None` if no variable names one.
///
/// # Errors
///
/// If one of them names nothing, or what isn't the pod's in `namespace` with the UID `pod`.
pub fn merged(
    env: &[&str],
    claims: &BTreeMap<String, Claim>,
    namespace: &str,
    pod: &str,
) -> Result<Option<Grant>, ClaimError> {
    let mut used: Vec<(&Claim, &Share)> = Vec::new();
    for item in env {
        let Some(name) = ShareName::of(item) else { continue };
        let name = name?;
        let variable = || name.variable.chars().take(64).collect();
        let claim =
            claims.get(name.claim).ok_or_else(|| ClaimError::NoRecord { variable: variable() })?;
        let share =
            name.in_claim(claim).ok_or_else(|| ClaimError::NoRecord { variable: variable() })?;
        if claim.namespace != namespace || !claim.pods.iter().any(|uid| uid == pod) {
            return Err(ClaimError::Foreign { variable: variable() });
        }
        // The kubelet may name a CDI device twice.
        if !used.iter().any(|(_, other)| other.token == share.token) {
            used.push((claim, share));
        }
    }
    let Some((first, _)) = used.first() else { return Ok(None) };
    let mut gpus: Vec<ClaimedGpu> = Vec::new();
    for gpu in used.iter().flat_map(|(_, share)| &share.gpus) {
        match gpus.iter_mut().find(|known| known.uuid == gpu.uuid) {
            Some(known) => {
                known.bytes = known.bytes.saturating_add(gpu.bytes);
                known.whole |= gpu.whole;
            }
            None => gpus.push(gpu.clone()),
        }
    }
    // Next to a quota on another GPU, all of a GPU's memory is a quota too.
    let is_unlimited = gpus.iter().all(|gpu| gpu.whole);
    let granted = |gpu: &ClaimedGpu| GrantedGpu {
        uuid: gpu.uuid.clone(),
        bytes: Some(gpu.bytes).filter(|_| !is_unlimited),
    };
    let weights = used.iter().filter_map(|(_, share)| share.weight);
    // By which images ask other runtimes for every GPU.
    let void = (NVIDIA_VISIBLE_DEVICES.to_owned(), VOID.to_owned());
    let variables = used.iter().map(|(claim, share)| claim.variable(share)).chain([void]);
    let others = used.len() - 1;
    let resource = match others {
        0 => format!("claim {}", first.title()),
        _ => format!("claim {} and {others} more", first.title()),
    };
    Ok(Some(Grant {
        format: FORMAT,
        token: String::new(),
        resource,
        devices: Vec::new(),
        gpus: gpus.iter().map(granted).collect(),
        weight: weights.reduce(u32::saturating_add),
        unenforced: false,
        candidates: Vec::new(),
        holder: None,
        variables: variables.collect(),
        shares: used.iter().map(|(claim, share)| named(claim, share)).collect(),
    }))
}

/// How a share is called in records of containers: two containers never have the same one at once.
fn named(claim: &Claim, share: &Share) -> String {
    format!("{}/{}", claim.uid, share.request)
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;
    use crate::units::MIB;

    const POD: &str = "0b6e";

    fn gpu(uuid: &str, mib: u64, whole: bool) -> ClaimedGpu {
        ClaimedGpu {
            uuid: uuid.to_owned(),
            bytes: mib * MIB,
            whole,
            pool: "node".to_owned(),
            device: uuid.to_lowercase(),
            share_id: None,
        }
    }

    fn claim(uid: &str, shares: &[(&str, char, &[ClaimedGpu], Option<u32>)]) -> Claim {
        let share =
            |(request, token, gpus, weight): &(&str, char, &[ClaimedGpu], Option<u32>)| Share {
                request: (*request).to_owned(),
                token: token.to_string().repeat(32),
                gpus: gpus.to_vec(),
                weight: *weight,
            };
        Claim {
            format: CLAIM_FORMAT,
            namespace: "team".to_owned(),
            name: format!("claim-{uid}"),
            uid: uid.to_owned(),
            pods: vec![POD.to_owned()],
            of_one_pod: true,
            shares: shares.iter().map(share).collect(),
        }
    }

    fn by_uid(claims: &[Claim]) -> BTreeMap<String, Claim> {
        claims.iter().map(|claim| (claim.uid.clone(), claim.clone())).collect()
    }

    /// The items of a container's environment that name all shares of `claims`.
    fn env(claims: &[Claim]) -> Vec<String> {
        let of = |claim: &Claim| {
            let items = claim.shares.iter().map(|share| claim.variable(share));
            items.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        claims.iter().flat_map(of).collect()
    }

    fn grant(env: &[String], claims: &[Claim]) -> Result<Option<Grant>, ClaimError> {
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        merged(&env, &by_uid(claims), "team", POD)
    }

    fn amounts(grant: &Grant) -> Vec<(&str, Option<u64>)> {
        let mib = |gpu: &GrantedGpu| gpu.bytes.map(|bytes| bytes / MIB);
        grant.gpus.iter().map(|gpu| (&*gpu.uuid, mib(gpu))).collect()
    }

    #[test]
    fn shares_of_one_gpu_add_up() {
        let one = claim("u1", &[("a", '1', &[gpu("GPU-a", 100, false)], Some(2))]);
        let other = claim(
            "u2",
            &[
                ("a", '2', &[gpu("GPU-a", 20, false), gpu("GPU-b", 30, false)], None),
                ("b", '3', &[gpu("GPU-b", 4, false)], Some(3)),
            ],
        );
        let claims = [one, other];
        let mut all = env(&claims);
        let found = grant(&all, &claims).unwrap().unwrap();
        assert_eq!(amounts(&found), [("GPU-a", Some(120)), ("GPU-b", Some(34))]);
        assert_eq!(
            (found.weight, found.resource.as_str()),
            (Some(5), "claim team/claim-u1 and 2 more")
        );
        assert_eq!(found.shares, ["u1/a", "u2/a", "u2/b"]);
        // The kubelet names a device again after its restart.
        all.push(all[0].clone());
        assert_eq!(grant(&all, &claims).unwrap().unwrap(), found);
        let one = grant(&all[2..3], &claims).unwrap().unwrap();
        assert_eq!(amounts(&one), [("GPU-b", Some(4))]);
    }

    #[test]
    fn whole_gpus_are_unlimited_next_to_no_quota() {
        let whole = claim("u1", &[("a", '1', &[gpu("GPU-a", 15000, true)], None)]);
        let part = claim("u2", &[("a", '2', &[gpu("GPU-b", 1000, false)], None)]);
        let alone = grant(&env(std::slice::from_ref(&whole)), std::slice::from_ref(&whole))
            .unwrap()
            .unwrap();
        assert_eq!(amounts(&alone), [("GPU-a", None)]);
        let claims = [whole, part];
        let both = grant(&env(&claims), &claims).unwrap().unwrap();
        assert_eq!(amounts(&both), [("GPU-a", Some(15000)), ("GPU-b", Some(1000))]);
    }

    #[test]
    fn foreign_and_forged_shares_are_refused() {
        let claims = [claim("u1", &[("a", '1', &[gpu("GPU-a", 100, false)], None)])];
        let all = env(&claims);
        let text: Vec<&str> = all.iter().map(String::as_str).collect();
        let foreign = |namespace, pod| merged(&text, &by_uid(&claims), namespace, pod).unwrap_err();
        for error in [foreign("other", POD), foreign("team", "ffff")] {
            assert!(matches!(error, ClaimError::Foreign { .. }), "{error}");
        }
        let token = "1".repeat(32);
        for item in [
            format!("CGPU_GRANT_1111111111111111=u2.{token}"),
            format!("CGPU_GRANT_1111111111111111=u1.{}", "2".repeat(32)),
            // Under another name the same share would be counted twice.
            format!("CGPU_GRANT_2=u1.{token}"),
        ] {
            let error = grant(&[item], &claims).unwrap_err();
            assert!(matches!(error, ClaimError::NoRecord { .. }), "{error}");
        }
        for value in
            ["u1", "../../etc/passwd.1", "u1.1", "u1/../u2.11111111111111111111111111111111"]
        {
            let error = grant(&[format!("CGPU_GRANT_1={value}")], &claims).unwrap_err();
            assert!(matches!(error, ClaimError::NoName { .. }), "{value}: {error}");
        }
        let nothing = ["CGPU_GRANT_1=", "CGPU_GRANT=u1", "PATH=/bin"].map(str::to_owned);
        assert_eq!(grant(&nothing, &claims).unwrap(), None);
    }

    proptest! {
        /// Whatever shares a container uses, its memory on each GPU is theirs together.
        #[test]
        fn a_grant_is_the_sum_of_its_shares(
            parts in proptest::collection::vec((0_usize..4, 0_usize..3, 1_u64..5000), 1..12),
        ) {
            let uuids = ["GPU-a", "GPU-b", "GPU-c"];
            let mut claims: Vec<Claim> = (0..4).map(|at| claim(&format!("u{at}"), &[])).collect();
            for (at, (of, on, mib)) in parts.iter().enumerate() {
                claims[*of].shares.push(Share {
                    request: format!("r{at}"),
                    token: format!("{at:032x}").chars().rev().collect(),
                    gpus: vec![gpu(uuids[*on], *mib, false)],
                    weight: None,
                });
            }
            let found = grant(&env(&claims), &claims).unwrap().unwrap();
            for (on, uuid) in uuids.iter().enumerate() {
                let sum: u64 = parts.iter().filter(|part| part.1 == on).map(|part| part.2).sum();
                let given = found.gpus.iter().find(|gpu| gpu.uuid == *uuid);
                prop_assert_eq!(given.map_or(0, |gpu| gpu.bytes.unwrap() / MIB), sum);
            }
        }

        #[test]
        fn no_variable_breaks_it(items in proptest::collection::vec("(CGPU_GRANT_)?[ -~]{0,60}", 0..6)) {
            let claims = [claim("u1", &[("a", '1', &[gpu("GPU-a", 100, false)], None)])];
            let _ = grant(&items, &claims);
        }
    }
}
