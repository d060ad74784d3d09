//! Settings that nearly mean something: [`find`].
//!
//! A misspelt quota means no quota, so its author has to hear of it. Knows names and how far apart
//! they are. Must not know what a setting asks for. Names of schedulers, of Kubernetes' services and
//! of other vendors are no near misses, for none is that near.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::quota::Source;
use super::setting::{Quoted, Setting};
use super::setting_names::{
    DISABLE, MEM_CONTAINER, MEM_DEV, MEM_UNIT, MEMORY, NAMES, NEUTRAL, NVIDIA_MEMORY_LIMIT,
    NVIDIA_MEMORY_REQUEST, Name,
};

/// The most edits between a near miss and the name that was probably meant.
const MOST_EDITS: usize = 2;

/// What a name begins with that is compared by edits.
const PREFIXES: [&str; 5] =
    ["ALIYUN_COM_GPU", "CGPU_", "aliyun.com/gpu", "aliyun.com/cgpu", "cgpu/"];

/// The most near misses of one container that are reported.
const MOST_REPORTED: usize = 8;

/// A setting that nearly means something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NearMiss {
    /// A name that is ours but for its case, or for blanks around it.
    Spelling {
        /// The name in the bundle.
        found: String,
        /// Ours.
        meant: &'static str,
    },
    /// A GPU's total memory without the memory of the container.
    TotalAlone {
        /// The name of the total.
        total: &'static str,
        /// The name that is missing.
        memory: &'static str,
    },
    /// NVIDIA's reservation without its limit, and no other quota.
    RequestAlone {
        /// The reservation.
        request: Setting,
    },
    /// A name of ours without a value: an unset variable of a shell or of compose, say.
    Empty {
        /// The name.
        name: &'static str,
    },
    /// A name that begins as ours do and is two edits or fewer from one of them.
    Similar {
        /// The name in the bundle.
        found: String,
        /// Ours.
        meant: &'static str,
    },
    /// A setting that names GPUs in a pod's container that Kubernetes has given none.
    Ungranted {
        /// The setting.
        setting: Setting,
    },
    /// A setting next to what Kubernetes has given.
    Overruled {
        /// The setting.
        setting: Setting,
        /// The resource that the container was given.
        resource: String,
    },
}

impl NearMiss {
    /// Whether the profile `strict` refuses it.
    #[must_use]
    pub fn is_refused_by_strict(&self) -> bool {
        matches!(self, NearMiss::Spelling { .. } | NearMiss::TotalAlone { .. })
    }
}

impl fmt::Display for NearMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NearMiss::Spelling { found, meant } | NearMiss::Similar { found, meant } => {
                write!(f, "{} means nothing; did you mean {meant}?", Quoted(found))
            }
            NearMiss::TotalAlone { total, memory } => {
                write!(f, "{total} is set without {memory}, so no quota is asked for")
            }
            NearMiss::RequestAlone { request } => {
                write!(
                    f,
                    "{request} keeps memory free and limits nothing, so no quota is asked for; set \
                     CGPU_MEMORY or {NVIDIA_MEMORY_LIMIT}"
                )
            }
            NearMiss::Ungranted { setting } => {
                write!(
                    f,
                    "{setting} gives no GPU: Kubernetes has given this container none, and this node gives \
                     none else (kubernetes.ungranted = \"none\"); ask for aliyun.com/gpu-mem or \
                     aliyun.com/gpu-whole in its limits"
                )
            }
            NearMiss::Overruled { setting, resource } => {
                write!(
                    f,
                    "{setting} counts for nothing: Kubernetes has given this container its GPUs \
                     ({resource}); take it out of the pod or its image"
                )
            }
            NearMiss::Empty { name } => {
                write!(f, "{name} is set to nothing, which counts as not set; give it a value")
            }
        }
    }
}

/// The near misses among the settings of one source, in their order.
pub(super) fn find<'a>(
    source: Source,
    settings: impl Iterator<Item = (&'a str, &'a str)>,
    get: impl Fn(Name) -> Option<Setting>,
) -> Vec<NearMiss> {
    let is_set = |name| {
        get(name).is_some_and(|setting: Setting| setting.text().is_ok_and(|text| !text.is_empty()))
    };
    // The device plugin takes an image's settings away so: a total next to a unit, and neutral
    // names.
    let is_taken_away = |near: &NearMiss| {
        let is = |name: Name| *near == NearMiss::Empty { name: source.name(name) };
        (is(MEM_DEV) && is_set(MEM_UNIT))
            || (NEUTRAL.into_iter().any(is) && (is_set(MEM_CONTAINER) || is_set(DISABLE)))
    };
    let mut found: Vec<NearMiss> = Vec::new();
    let (mut request, mut has_limit) = (None, false);
    for (name, value) in settings {
        if name == NVIDIA_MEMORY_REQUEST && !value.trim().is_empty() {
            request = Some(Setting { name: name.to_owned().into(), value: value.to_owned() });
        }
        has_limit |= name == NVIDIA_MEMORY_LIMIT;
        let near = near(source, name, value);
        if let Some(near) = near.filter(|near| !found.contains(near) && !is_taken_away(near)) {
            found.push(near);
        }
    }
    if is_set(MEM_DEV) && get(MEM_CONTAINER).is_none() {
        let (total, memory) = (source.name(MEM_DEV), source.name(MEM_CONTAINER));
        found.push(NearMiss::TotalAlone { total, memory });
    }
    let has_quota = has_limit || is_set(MEMORY) || is_set(MEM_CONTAINER);
    if let Some(request) = request.filter(|_| source == Source::Env && !has_quota) {
        found.push(NearMiss::RequestAlone { request });
    }
    found.truncate(MOST_REPORTED);
    found
}

fn near(source: Source, name: &str, value: &str) -> Option<NearMiss> {
    let trimmed = name.trim();
    // This excludes nearly all names that are no near miss.
    if !trimmed.starts_with(['A', 'a', 'C', 'c']) {
        return None;
    }
    let ours = || NAMES.iter().map(|name| source.name(*name));
    if let Some(meant) = ours().find(|ours| ours.eq_ignore_ascii_case(trimmed)) {
        return match (meant == name, value.trim().is_empty()) {
            (true, true) => Some(NearMiss::Empty { name: meant }),
            (true, false) => None,
            (false, _) => Some(NearMiss::Spelling { found: name.to_owned(), meant }),
        };
    }
    if !PREFIXES.iter().any(|prefix| trimmed.starts_with(prefix)) {
        return None;
    }
    let meant = ours().find(|ours| {
        ours.len().abs_diff(trimmed.len()) <= MOST_EDITS
            && strsim::levenshtein(ours, trimmed) <= MOST_EDITS
    })?;
    Some(NearMiss::Similar { found: name.to_owned(), meant })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(env: &[&str]) -> Vec<String> {
        let settings = env.iter().filter_map(|item| item.split_once('='));
        let get = |name: Name| {
            let value = env.iter().find_map(|item| {
                item.strip_prefix(name.variable).and_then(|rest| rest.strip_prefix('='))
            })?;
            Some(Setting { name: name.variable.into(), value: value.to_owned() })
        };
        find(Source::Env, settings, get).iter().map(NearMiss::to_string).collect()
    }

    #[test]
    fn case_and_blanks_are_near_misses() {
        for (item, shown) in [
            ("ALIYUN_COM_GPU_MEM_CONTAINER =3", "\"ALIYUN_COM_GPU_MEM_CONTAINER \""),
            (" ALIYUN_COM_GPU_MEM_CONTAINER=3", "\" ALIYUN_COM_GPU_MEM_CONTAINER\""),
            ("aliyun_com_gpu_mem_container=3", "aliyun_com_gpu_mem_container"),
            ("Aliyun_Com_Gpu_Mem_Container\t=3", "\"Aliyun_Com_Gpu_Mem_Container\\t\""),
        ] {
            let expected =
                format!("{shown} means nothing; did you mean ALIYUN_COM_GPU_MEM_CONTAINER?");
            assert_eq!(of(&[item]), [expected]);
        }
    }

    #[test]
    fn two_edits_are_near_and_three_are_not() {
        for (item, meant) in [
            ("ALIYUN_COM_GPU_MEM_CONTAINERS=3", Some("ALIYUN_COM_GPU_MEM_CONTAINER")),
            ("ALIYUN_COM_GPU_MEM_CONTAIN=3", Some("ALIYUN_COM_GPU_MEM_CONTAINER")),
            ("ALIYUN_COM_GPU_MEMCONTAINER=3", Some("ALIYUN_COM_GPU_MEM_CONTAINER")),
            ("CGPU_DISABLED=true", Some("CGPU_DISABLE")),
            ("CGPU_DIABLE=true", Some("CGPU_DISABLE")),
            ("CGPU_MEM0RY=4GiB", Some("CGPU_MEMORY")),
            ("CGPU_GPU=1", Some("CGPU_GPUS")),
            ("CGPU_MEM=4GiB", None),
            ("ALIYUN_COM_GPU_HIGH_PRIORITY=1", None),
            ("XLIYUN_COM_GPU_MEM_CONTAINER=3", None),
        ] {
            let expected = meant.map(|meant| {
                let found = item.split('=').next().unwrap();
                format!("{found} means nothing; did you mean {meant}?")
            });
            assert_eq!(of(&[item]), Vec::from_iter(expected), "{item}");
        }
    }

    /// Names of schedulers, services and other vendors mean nothing.
    #[test]
    fn names_of_other_tools_are_no_near_misses() {
        let found = of(&[
            "ALIYUN_COM_GPU_MEM_IDX=0",
            "ALIYUN_COM_GPU_MEM_POD=3",
            "ALIYUN_COM_GPU_MEM_ASSIGNED=true",
            "ALIYUN_COM_GPU_MEM_ASSUME_TIME=1",
            "CGPU_COUNT=1",
            "CGPU0_PRIORITY=1",
            "CGPU_SERVICE_HOST=10.0.0.1",
            "CGPU_SERVICE_PORT=80",
            "CGPU_PORT=tcp://10.0.0.1:80",
            "CGPU_PORT_80_TCP_ADDR=10.0.0.1",
            "CGPU_CONFIG=/etc/cgpu/config.toml",
            "CUDA_VISIBLE_DEVICES=",
            "PATH=/bin",
            "=",
            "A=",
        ]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn empty_value_and_lone_total_are_near_misses() {
        assert_eq!(
            of(&["ALIYUN_COM_GPU_MEM_CONTAINER=", "ALIYUN_COM_GPU_MEM_DEV=15"]),
            ["ALIYUN_COM_GPU_MEM_CONTAINER is set to nothing, which counts as not set; \
              give it a value"]
        );
        assert_eq!(
            of(&["ALIYUN_COM_GPU_MEM_DEV=15"]),
            ["ALIYUN_COM_GPU_MEM_DEV is set without ALIYUN_COM_GPU_MEM_CONTAINER, \
              so no quota is asked for"]
        );
        for env in [
            ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15", "A="],
            [
                "ALIYUN_COM_GPU_MEM_CONTAINER=3",
                "ALIYUN_COM_GPU_MEM_DEV=",
                "ALIYUN_COM_GPU_MEM_UNIT=MiB",
            ],
            ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "CGPU_MEMORY=", "CGPU_GPUS="],
        ] {
            assert_eq!(of(&env), [""; 0]);
        }
        let alone = "NVIDIA_GPU_MEMORY_REQUEST=512 keeps memory free and limits nothing, so no quota is \
                     asked for; set CGPU_MEMORY or NVIDIA_GPU_MEMORY_LIMIT";
        assert_eq!(of(&["NVIDIA_GPU_MEMORY_REQUEST=512"]), [alone]);
        assert_eq!(of(&["NVIDIA_GPU_MEMORY_REQUEST=512", "CGPU_MEMORY=1GiB"]), [""; 0]);
        let both = ["NVIDIA_GPU_MEMORY_REQUEST=512", "NVIDIA_GPU_MEMORY_LIMIT=512"];
        assert_eq!(of(&both), [""; 0]);
        let empty = "CGPU_MEMORY is set to nothing, which counts as not set; give it a value";
        assert_eq!(of(&["CGPU_MEMORY="]), [empty]);
    }

    /// A flood of near misses is cut off, and they are shown without control characters.
    #[test]
    fn near_misses_are_bounded_and_escaped() {
        let many: Vec<String> =
            (0..100).map(|n| format!("ALIYUN_COM_GPU_MEM_DE{}=1", char::from(b' ' + n))).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(of(&many).len(), MOST_REPORTED);
        let evil = "CGPU_DISABLE\u{1b}=1";
        assert!(of(&[evil]).iter().all(|text| !text.contains(char::is_control)));
    }
}
