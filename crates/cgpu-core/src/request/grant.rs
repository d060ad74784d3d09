//! What Kubernetes has given a container: [`Grant`], a record that one of the container's variables names.
//!
//! The device plugin's answer to the kubelet is variables, and the author of a pod or an image can write the same ones.
//! So the plugin also writes a record that only root can write, and the runtime takes GPUs, memory and weight from the
//! record alone. Pure. Must not know where records lie: `grants` does.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::setting_names::{
    DISABLE, GPUS, MEMORY, NAMES, NVIDIA_MEMORY_LIMIT, NVIDIA_MEMORY_REQUEST,
    NVIDIA_VISIBLE_DEVICES, WEIGHT,
};
use super::{Rules, Setting};

pub use super::cri::PodContainer;
use crate::units::MIB;

/// The variable that names a container's grant.
pub const TOKEN: &str = "CGPU_GRANT";

/// The form of records that is written. Others are refused.
pub const FORMAT: u32 = 1;

/// Hexadecimal digits of a token: 128 bits.
const TOKEN_DIGITS: usize = 32;

/// The most settings of one container that are reported as overruled.
const MOST_REPORTED: usize = 8;

/// A GPU of a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedGpu {
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// The container's memory on it, in bytes; its use of the GPU is unlimited, if nothing.
    pub bytes: Option<u64>,
}

/// What a container was given. Field by field what is on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// [`FORMAT`].
    pub format: u32,
    /// The value of [`TOKEN`]: 32 hexadecimal digits.
    pub token: String,
    /// The resource that the pod asks for, as `aliyun.com/gpu-mem`.
    pub resource: String,
    /// The devices by which the kubelet counts it.
    pub devices: Vec<String>,
    /// Its GPUs.
    pub gpus: Vec<GrantedGpu>,
    /// Its weight in sharing compute; 1 if nothing.
    pub weight: Option<u32>,
    /// Whether nothing is to hold it to its memory.
    pub unenforced: bool,
    /// Who can be meant, the likeliest first: the kubelet doesn't say. Empty if the API server couldn't be asked.
    pub candidates: Vec<PodContainer>,
    /// Whose it is, once a container was made by it.
    pub holder: Option<PodContainer>,
    /// The variables of the answer to the kubelet. One that has another value in the bundle was set by the pod or
    /// its image.
    pub variables: BTreeMap<String, String>,
    /// The shares of claims that it is the sum of, as `claim's UID/request`; none of a device plugin's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<String>,
}

/// Whether `text` can be a token.
#[must_use]
pub fn is_token(text: &str) -> bool {
    text.len() == TOKEN_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl Grant {
    /// Whether `container` may become the holder.
    #[must_use]
    pub fn may_be_of(&self, container: &PodContainer) -> bool {
        match &self.holder {
            Some(holder) => holder == container,
            None => self.candidates.is_empty() || self.candidates.contains(container),
        }
    }

    /// Whether a memory quota is to be enforced.
    fn is_held(&self) -> bool {
        !self.unenforced && self.gpus.iter().all(|gpu| gpu.bytes.is_some())
    }

    /// What the grant says, as annotations of a pod would.
    pub(super) fn annotations(&self) -> Vec<(&'static str, String)> {
        let list = |item: &dyn Fn(&GrantedGpu) -> String| {
            self.gpus.iter().map(item).collect::<Vec<_>>().join(",")
        };
        let mut said = vec![(GPUS.annotation, format!("device={}", list(&|gpu| gpu.uuid.clone())))];
        if self.gpus.iter().all(|gpu| gpu.bytes.is_some()) {
            let mib = |gpu: &GrantedGpu| format!("{}MiB", gpu.bytes.unwrap_or_default() / MIB);
            said.push((MEMORY.annotation, list(&mib)));
        }
        said.extend(self.weight.map(|weight| (WEIGHT.annotation, weight.to_string())));
        said.extend(self.unenforced.then(|| (DISABLE.annotation, "true".to_owned())));
        said
    }

    /// The host's rules for a container with this grant: what Kubernetes gave needs no trust in the container.
    pub(super) fn rules<'a>(&self, rules: &Rules<'a>) -> Rules<'a> {
        let trust = super::Trust { env: false, annotations: true };
        let rules = Rules { trust, resource_variables: &[], ..*rules };
        match self.is_held() {
            true => rules,
            false => Rules {
                profile: super::Profile::Open,
                whole: true,
                whole_beside_quota: true,
                require_quota: false,
                default_memory: super::DefaultMemory::Whole,
                ..rules
            },
        }
    }

    /// Settings of a bundle that would ask for something else than the grant.
    pub(super) fn overruled(
        &self,
        env: &[&str],
        annotations: &[(&str, &str)],
        rules: &Rules<'_>,
    ) -> Vec<Setting> {
        let others = [NVIDIA_VISIBLE_DEVICES, NVIDIA_MEMORY_LIMIT, NVIDIA_MEMORY_REQUEST];
        let asks = |name: &str| {
            NAMES.iter().any(|ours| ours.variable == name)
                || others.contains(&name)
                || rules.is_resource_variable(name)
        };
        let is_answer = |name: &str, value: &str| {
            self.variables.get(name).map_or(value.is_empty(), |said| said == value)
        };
        let variables = env.iter().filter_map(|item| item.split_once('='));
        let variables = variables.filter(|(name, value)| asks(name) && !is_answer(name, value));
        let words = annotations.iter().copied();
        let words = words.filter(|(name, _)| NAMES.iter().any(|ours| ours.annotation == *name));
        let setting = |(name, value): (&str, &str)| Setting {
            name: name.to_owned().into(),
            value: value.to_owned(),
        };
        variables.chain(words).map(setting).take(MOST_REPORTED).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::{MARKS, RULES, decided_by};
    use super::super::{Profile, Rules};
    use super::*;

    fn container(name: &str) -> PodContainer {
        PodContainer {
            namespace: "default".to_owned(),
            pod: "web-0".to_owned(),
            uid: "0b6e".to_owned(),
            container: name.to_owned(),
        }
    }

    fn grant(mib: Option<u64>, unenforced: bool) -> Grant {
        let gpu =
            |uuid: &str| GrantedGpu { uuid: uuid.to_owned(), bytes: mib.map(|mib| mib * MIB) };
        let variables = [("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"), ("CGPU_DISABLE", "false")];
        Grant {
            format: FORMAT,
            token: "0123456789abcdef0123456789abcdef".to_owned(),
            resource: "aliyun.com/gpu-mem".to_owned(),
            devices: vec!["aaa-0".to_owned()],
            gpus: vec![gpu("GPU-a"), gpu("GPU-b")],
            weight: Some(3),
            unenforced,
            candidates: vec![container("main")],
            holder: None,
            variables: variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            shares: Vec::new(),
        }
    }

    #[test]
    fn the_engine_s_marks_tell_the_container() {
        assert_eq!(PodContainer::of(&MARKS), Some(container("main")));
        let crio = [
            ("io.kubernetes.cri-o.ContainerType", "container"),
            ("io.kubernetes.cri-o.SandboxID", "77"),
            ("io.kubernetes.pod.name", "web-0"),
            ("io.kubernetes.pod.namespace", "default"),
            ("io.kubernetes.pod.uid", "0b6e"),
            ("io.kubernetes.container.name", "main"),
        ];
        assert_eq!(PodContainer::of(&crio), Some(container("main")));
        for missing in 0..MARKS.len() {
            let mut marks = MARKS.to_vec();
            marks.remove(missing);
            assert_eq!(PodContainer::of(&marks), None, "{missing}");
        }
    }

    #[test]
    fn grant_serves_any_candidate_until_one_holds_it() {
        let mut grant = grant(Some(4096), false);
        assert!(grant.may_be_of(&container("main")) && !grant.may_be_of(&container("side")));
        grant.candidates.push(container("side"));
        assert!(grant.may_be_of(&container("side")));
        grant.holder = Some(container("main"));
        assert!(grant.may_be_of(&container("main")) && !grant.may_be_of(&container("side")));
        grant.holder = None;
        grant.candidates.clear();
        assert!(grant.may_be_of(&container("anybody")), "the API server wasn't asked");
    }

    #[test]
    fn tokens_are_128_bits_in_hexadecimal() {
        assert!(is_token("0123456789abcdef0123456789abcdef"));
        for text in
            ["", "0123", "0123456789ABCDEF0123456789abcdef", "../../../etc/passwd/../../../../"]
        {
            assert!(!is_token(text), "{text}");
        }
    }

    #[test]
    fn pod_settings_next_to_a_grant_are_reported() {
        let grant = grant(Some(4096), false);
        let env = [
            "NVIDIA_VISIBLE_DEVICES=all",
            "CGPU_DISABLE=true",
            "CGPU_MEMORY=",
            "NVIDIA_GPU_MEMORY_LIMIT=9000",
            "PATH=/bin",
        ];
        let mut annotations = MARKS.to_vec();
        annotations.push(("cgpu/memory", "15GiB"));
        let decision = decided_by(&grant, &env, &annotations, &RULES).unwrap();
        let reported: Vec<String> = decision.near_misses.iter().map(ToString::to_string).collect();
        let rest = "counts for nothing: Kubernetes has given this container its GPUs \
                    (aliyun.com/gpu-mem); take it out of the pod or its image";
        let settings = [
            "NVIDIA_VISIBLE_DEVICES=all",
            "CGPU_DISABLE=true",
            "NVIDIA_GPU_MEMORY_LIMIT=9000",
            "cgpu/memory=15GiB",
        ];
        assert_eq!(reported, settings.map(|setting| format!("{setting} {rest}")));
        let own = ["NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b", "CGPU_DISABLE=false", "CGPU_MEMORY="];
        let decision = decided_by(&grant, &own, &MARKS, &RULES).unwrap();
        assert_eq!(decision.near_misses, []);
    }

    /// Values that ask for more, for less and for nothing.
    fn value() -> impl Strategy<Value = String> {
        let fixed = [
            "",
            "all",
            "none",
            "void",
            "0",
            "1",
            "true",
            "false",
            "high",
            "device=0",
            "15GiB",
            "100%",
            "GPU-c",
            "no-gpu-has-9MiB-to-run",
            "9,9",
            "x",
        ];
        prop_oneof![proptest::sample::select(fixed.to_vec()).prop_map(str::to_owned), "[ -~]{0,12}"]
    }

    proptest! {
        /// Whatever a pod's author writes into variables, annotations and images, under either profile.
        #[test]
        fn pod_settings_never_change_the_pods_grant(
            variables in proptest::collection::vec((0..NAMES.len() + 4, value()), 0..8),
            annotations in proptest::collection::vec((0..NAMES.len(), value()), 0..8),
            mib in proptest::option::of(1_u64..9000),
            unenforced: bool,
            is_strict: bool,
            require_quota: bool,
        ) {
            let profile = if is_strict { Profile::Strict } else { Profile::Open };
            let resources = ["DOCKER_RESOURCE_*".to_owned()];
            let rules = Rules { profile, require_quota, resource_variables: &resources, ..RULES };
            let grant = grant(mib, unenforced);
            let others =
                [NVIDIA_VISIBLE_DEVICES, NVIDIA_MEMORY_LIMIT, NVIDIA_MEMORY_REQUEST, "DOCKER_RESOURCE_GPU"];
            let name = |at: usize| NAMES.get(at).map_or_else(|| others[at - NAMES.len()], |name| name.variable);
            let env: Vec<String> =
                variables.iter().map(|(at, value)| format!("{}={value}", name(*at))).collect();
            let env: Vec<&str> = env.iter().map(String::as_str).collect();
            let mut said = MARKS.to_vec();
            said.extend(annotations.iter().map(|(at, value)| (NAMES[*at].annotation, value.as_str())));
            let with = decided_by(&grant, &env, &said, &rules).map(|decision| decision.verdict);
            let without = decided_by(&grant, &[], &MARKS, &rules).map(|decision| decision.verdict);
            prop_assert!(without.is_ok(), "{without:?}");
            prop_assert_eq!(with, without);
        }
    }
}
