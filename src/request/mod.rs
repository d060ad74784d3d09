//! What a container asks for, read from its variables and annotations: [`Request`].
//!
//! Knows variables, lists, units and the trust policy. Must not know files or the GPUs
//! of the host: which GPU a name means is `plan`'s matter. Each trusted source is read
//! on its own, the variables of `process.env` under the names that users of Alibaba
//! Cloud cGPU know, the annotations under these ([`name::NAMES`]):
//! `aliyun.com/gpu-mem-container`, `aliyun.com/gpu-mem-dev`, `aliyun.com/gpu-mem-unit`,
//! `aliyun.com/gpu-visible-devices`, `aliyun.com/gpu-schd-weight`,
//! `aliyun.com/gpu-high-prio`, `aliyun.com/cgpu-disable`. Where both ask for a quota,
//! both are kept and the smaller holds on each GPU.

mod error;
pub mod name;
mod quota;
mod selection;
mod setting;

pub use error::RequestError;
pub use setting::Setting;

pub(crate) use quota::{Measure, Quota, Source};
pub(crate) use selection::{Extent, GpuName, Selection};
pub(crate) use setting::Quoted;

use name::{NVIDIA_VISIBLE_DEVICES, Name, VISIBLE_DEVICES};
use quota::{Ask, Off};

/// How the device plugin's value begins where the scheduler found no GPU.
const NO_GPU_FOUND: &str = "no-gpu-has-";

/// The annotations by which containerd and CRI-O mark a pod's sandbox (the "pause"
/// container). It carries the pod's annotations and uses no GPU.
const SANDBOX: [&str; 2] =
    ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];

/// Who may ask for GPUs: the configuration's `trust_env` and `trust_annotations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    /// `process.env` counts (image and user's variables can't be told apart there).
    pub env: bool,
    /// The bundle's annotations count.
    pub annotations: bool,
}

/// What the configuration's `[admission]` says of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Containers without a quota get the GPUs that they name, as a whole.
    pub whole: bool,
    /// Variables beside a quota may name GPUs that are had as a whole.
    pub whole_beside_quota: bool,
    /// GPUs held as a whole and shared ones exclude each other.
    pub exclusive: bool,
    /// GPUs without a quota are refused.
    pub require_quota: bool,
    /// Most containers on a GPU, and the sum of their weights; 1 ..= 25.
    pub max_inst: u32,
}

/// What a container asks for, of the sources that are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// At most one of each source.
    pub(crate) quotas: Vec<Quota>,
    /// Why the trusted sources without a quota have none.
    off: Vec<Off>,
    /// The GPUs it names.
    pub(crate) selections: Selections,
    trust: Trust,
}

/// The GPUs a container names, each source's word kept apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selections {
    /// `ALIYUN_COM_GPU_VISIBLE_DEVICES`; empty counts as absent.
    pub(crate) aliyun: Option<Selection>,
    /// `NVIDIA_VISIBLE_DEVICES`; empty is no GPU.
    pub(crate) nvidia: Option<Selection>,
    /// The annotation; empty counts as absent.
    pub(crate) annotation: Option<Selection>,
}

/// Reads what a container asks for from `env` (`NAME=value`; of a name given twice the
/// last counts, as in runc) and `annotations`, as far as `trust` goes.
///
/// # Errors
///
/// Where a quota is asked for that can't be meant, or the scheduler reports through the
/// variables that it found no GPU.
pub fn read<'a>(
    env: &[impl AsRef<str>],
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    trust: Trust,
) -> Result<Request, RequestError> {
    let annotations: Vec<_> = annotations.into_iter().collect();
    let sandbox = SANDBOX
        .iter()
        .find_map(|name| annotation(&annotations, name))
        .filter(|kind| kind.value == "sandbox");
    // Only the pod's annotations: the same word in an image that podman or CRI-O takes
    // annotations from must not take variables out of the rules.
    let annotated = trust.annotations && sandbox.is_none();
    let in_env = |name| variable(env, name).filter(|_| trust.env);
    let in_annotations = |name| annotation(&annotations, name).filter(|_| annotated);

    let nvidia = in_env(NVIDIA_VISIBLE_DEVICES);
    if let Some(setting) = &nvidia
        && setting.value.trim_start().starts_with(NO_GPU_FOUND)
    {
        return Err(RequestError::NoGpuFound { setting: setting.clone() });
    }

    let mut quotas = Vec::new();
    let mut off = Vec::new();
    let mut sort = |ask| match ask {
        Ask::Quota(quota) => quotas.push(quota),
        Ask::Off(reason) => off.push(reason),
    };
    if trust.env {
        sort(quota::read(Source::Env, |name: Name| in_env(name.variable))?);
    }
    if let Some(sandbox) = sandbox {
        sort(Ask::Off(Off::Sandbox(sandbox)));
    } else if trust.annotations {
        sort(quota::read(Source::Annotations, |name: Name| in_annotations(name.annotation))?);
    }

    let selection = |setting| Selection { setting };
    let unless_empty = |setting: &Setting| setting.text() != Ok("");
    let selections = Selections {
        aliyun: in_env(VISIBLE_DEVICES.variable).filter(unless_empty).map(selection),
        nvidia: nvidia.map(selection),
        annotation: in_annotations(VISIBLE_DEVICES.annotation).filter(unless_empty).map(selection),
    };
    Ok(Request { quotas, off, selections, trust })
}

/// What the last item of that name says; one without `=` unsets the name.
fn variable(env: &[impl AsRef<str>], name: &'static str) -> Option<Setting> {
    let mut items = env.iter().map(|item| item.as_ref());
    let last = items.rfind(|item| item.split('=').next() == Some(name))?;
    let (_, value) = last.split_once('=')?;
    Some(Setting { name, value: value.to_owned() })
}

fn annotation(annotations: &[(&str, &str)], name: &'static str) -> Option<Setting> {
    let (_, value) = annotations.iter().rfind(|(key, _)| *key == name)?;
    Some(Setting { name, value: (*value).to_owned() })
}

impl Request {
    /// Why there will be no plan, or `None` where `plan::resolve` makes one or refuses.
    ///
    /// Decided without the host's GPUs, so that a container that asks for nothing costs
    /// nothing and can't fail. A quota is only then off for want of a GPU where no
    /// variable gets the container one from others. Under `whole`, `exclusive` or
    /// `require_quota` a container that names more than MIG devices is always planned or
    /// refused; under `whole` also one that says `none`: it gets the driver's files.
    #[must_use]
    pub fn not_in_effect(&self, rules: &Rules) -> Option<String> {
        let must_be_held = rules.exclusive || rules.require_quota;
        let whole_gpus_matter = rules.whole || must_be_held;
        let naming = self.selections.naming_variable().is_some();
        if self.quotas.is_empty() && rules.whole && !must_be_held {
            // Nothing has to be refused, so that who says no GPU has none, and what NVIDIA's
            // toolkit alone understands is left to it.
            let words = [self.selections.nothing(), self.selections.of_nvidias_toolkit()];
            let (nothing, foreign) = (words[0].filter(|_| naming), words[1]);
            if let Some(nothing) = nothing {
                return Some(format!("{} selects no GPU", nothing.setting));
            }
            if let Some(foreign) = foreign {
                return Some(format!("{} is for NVIDIA's toolkit", foreign.setting));
            }
        }
        let held = (whole_gpus_matter && naming)
            || (rules.whole && (self.selections.is_by_annotation() || self.wants_files_alone()));
        if !self.quotas.is_empty() {
            let nothing = self.selections.nothing().filter(|_| !naming)?;
            Some(format!("{} selects no GPU", nothing.setting))
        } else if let Some(mig) = self.selections.only_mig().filter(|_| held && !rules.whole) {
            Some(format!(
                "{} names MIG devices, and MIG devices have memory of their own",
                mig.setting
            ))
        } else if held {
            None
        } else if whole_gpus_matter && self.trust.env {
            Some(format!("{}, and no variable names a GPU", self.why_no_quota()))
        } else {
            Some(self.why_no_quota())
        }
    }

    /// Takes out the GPUs that variables name, where it has no quota: an image may have set them. A
    /// variable that says no GPU stays.
    pub fn forget_named_by_variables(&mut self) {
        let names = |selection: &Selection| selection.extent() != Extent::Nothing;
        if self.quotas.is_empty() && self.selections.variables().all(names) {
            (self.selections.aliyun, self.selections.nvidia) = (None, None);
        }
    }

    /// Whether NVIDIA's variable alone says which GPUs: a program that reads it finds its own word.
    #[must_use]
    pub fn is_nvidias_alone(&self) -> bool {
        let Selections { aliyun, nvidia, annotation } = &self.selections;
        aliyun.is_none() && annotation.is_none() && nvidia.is_some()
    }

    /// Whether it has no quota and says `none`: NVIDIA's word for the driver's files and no GPU.
    #[must_use]
    pub fn wants_files_alone(&self) -> bool {
        let is_none = |selection: &Selection| selection.setting.text() == Ok("none");
        self.quotas.is_empty()
            && self.selections.naming_variable().is_none()
            && self.selections.nvidia.as_ref().is_some_and(is_none)
    }

    /// Whether somebody has switched a quota off (`CGPU_DISABLE`), so that the variables stay as
    /// they were given.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.quotas.is_empty() && self.off.iter().any(|off| matches!(off, Off::Disabled(_)))
    }

    /// What asks for GPUs, or for the driver's files alone, where there is no quota.
    #[must_use]
    pub fn wants_driver_by(&self) -> Option<&Setting> {
        let files_alone = self.selections.nvidia.as_ref().filter(|_| self.wants_files_alone());
        let selection = self.selections.naming().or(files_alone);
        selection.filter(|_| self.quotas.is_empty()).map(|selection| &selection.setting)
    }

    /// Whether it asks for a part of a GPU, which somebody has to enforce.
    #[must_use]
    pub fn has_quota(&self) -> bool {
        !self.quotas.is_empty()
    }

    /// Why no source has a quota: what is set tells more than what isn't.
    fn why_no_quota(&self) -> String {
        let set = self.off.iter().filter(|off| !matches!(off, Off::NotSet(_)));
        let reasons: Vec<String> = set.map(Off::to_string).collect();
        if !reasons.is_empty() {
            return reasons.join(" and ");
        }
        match (self.off.first(), self.trust.env) {
            (Some(off), true) => off.to_string(),
            (Some(off), false) => format!("{off} (trust_env is false)"),
            (None, _) => "neither variables nor annotations are trusted \
                          (trust_env and trust_annotations are false)"
                .to_owned(),
        }
    }
}

impl Selections {
    /// The variable that decides where it speaks for itself.
    fn deciding_variable(&self) -> Option<&Selection> {
        self.aliyun.as_ref().or(self.nvidia.as_ref())
    }

    /// A variable by which the container gets GPUs, from us or from others.
    pub(crate) fn naming_variable(&self) -> Option<&Selection> {
        self.variables().find(|selection| selection.extent() != Extent::Nothing)
    }

    /// What names GPUs: a variable, or, where none does, the annotation.
    pub(crate) fn naming(&self) -> Option<&Selection> {
        let annotation = self.annotation.as_ref().filter(|_| self.is_by_annotation());
        self.naming_variable().or(annotation)
    }

    /// NVIDIA's variable, where it says what its toolkit alone understands: a CDI device
    /// (`nvidia.com/gpu=0`), or that GPUs come as mounts (`/var/run/nvidia-container-devices`).
    fn of_nvidias_toolkit(&self) -> Option<&Selection> {
        // `MIG-GPU-…/1/0` is a MIG device.
        let is_mig = |item: &str| item.trim().get(..4).is_some_and(|head| head == "MIG-");
        let foreign = |item: &str| item.contains('=') || (item.contains('/') && !is_mig(item));
        self.nvidia.as_ref().filter(|nvidia| nvidia.setting.value.split(',').any(foreign))
    }

    /// Whether the annotation names GPUs, and no variable says otherwise.
    fn is_by_annotation(&self) -> bool {
        let naming = |selection: &Selection| selection.extent() != Extent::Nothing;
        self.annotation.as_ref().is_some_and(naming) && self.variables().all(naming)
    }

    /// A variable that lists GPUs one by one; NVIDIA's first, whose list is the longer.
    pub(crate) fn listing_variable(&self) -> Option<&Selection> {
        let listing = |selection: &&Selection| selection.extent() == Extent::List;
        self.nvidia.as_ref().filter(listing).or(self.aliyun.as_ref().filter(listing))
    }

    /// The selection by which no GPU is left: the variables' word, or, where they list
    /// none, the annotation's.
    pub(crate) fn nothing(&self) -> Option<&Selection> {
        let nothing = |selection: &&Selection| selection.extent() == Extent::Nothing;
        let annotation = self.annotation.as_ref().filter(|_| self.listing_variable().is_none());
        self.deciding_variable().filter(nothing).or(annotation.filter(nothing))
    }

    /// A variable that names MIG devices, where no variable names anything else.
    fn only_mig(&self) -> Option<&Selection> {
        let mut naming = self.variables().filter(|s| s.extent() != Extent::Nothing);
        if naming.clone().all(Selection::is_mig_only) { naming.next() } else { None }
    }

    /// Whether nothing but MIG devices is named, by whomever.
    pub(crate) fn is_mig_only(&self) -> bool {
        let naming = |selection: &&Selection| selection.extent() != Extent::Nothing;
        self.variables().chain(&self.annotation).filter(naming).all(Selection::is_mig_only)
    }

    fn variables(&self) -> impl Iterator<Item = &Selection> + Clone {
        [&self.aliyun, &self.nvidia].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::name::NAMES;
    use super::*;

    const BOTH: Trust = Trust { env: true, annotations: true };
    const PLAIN: Rules = Rules {
        whole: false,
        whole_beside_quota: true,
        exclusive: false,
        require_quota: false,
        max_inst: 20,
    };
    const EXCLUSIVE: Rules = Rules { exclusive: true, ..PLAIN };
    const STRICT: Rules = Rules { require_quota: true, ..PLAIN };

    const MEM: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
    const DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";

    /// What the variables `env` ask for, each as `NAME=value`.
    fn from_env(env: &[&str]) -> Result<Request, RequestError> {
        read(env, [], BOTH)
    }

    /// What a memory list asks for of a GPU of 15.
    fn from_memory(memory: &str) -> Result<Request, RequestError> {
        from_env(&[&format!("{MEM}={memory}"), "ALIYUN_COM_GPU_MEM_DEV=15"])
    }

    /// What variables ask for beside a quota of 3 of 15.
    fn beside_quota(env: &[&str]) -> Result<Request, RequestError> {
        let mut all = vec!["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        all.extend(env);
        from_env(&all)
    }

    fn sentence(result: Result<Request, RequestError>) -> String {
        result.expect_err("this request should be refused").to_string()
    }

    fn reason(request: &Request) -> String {
        request.not_in_effect(&PLAIN).expect("this request should not be in effect")
    }

    fn only_quota(request: &Request) -> &Quota {
        match &request.quotas[..] {
            [quota] => quota,
            quotas => panic!("one quota expected, not {quotas:?}"),
        }
    }

    #[test]
    fn a_pods_annotations_ask_for_nothing_in_its_sandbox() {
        for (name, kind, off) in [
            ("io.kubernetes.cri.container-type", "sandbox", true),
            ("io.kubernetes.cri-o.ContainerType", "sandbox", true),
            ("io.kubernetes.cri.container-type", "container", false),
        ] {
            let annotations = [
                (name, kind),
                ("aliyun.com/gpu-mem-container", "6"),
                ("aliyun.com/gpu-visible-devices", "0"),
            ];
            for trust in [BOTH, Trust { env: false, annotations: true }] {
                let request = read(&["PATH=/bin"], annotations, trust).unwrap();
                for rules in [PLAIN, EXCLUSIVE, STRICT] {
                    let reason = request.not_in_effect(&rules);
                    assert_eq!(reason.is_some(), off, "{name} {kind}: {reason:?}");
                }
            }
        }
    }

    #[test]
    fn calling_itself_a_sandbox_takes_no_container_out_of_the_rules() {
        let annotations = [("io.kubernetes.cri.container-type", "sandbox")];
        let request = read(&["NVIDIA_VISIBLE_DEVICES=all"], annotations, BOTH).unwrap();
        assert_eq!(request.not_in_effect(&EXCLUSIVE), None);
        assert_eq!(request.not_in_effect(&STRICT), None);
        let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        let request = read(&quota, annotations, BOTH).unwrap();
        assert_eq!(only_quota(&request).amounts, [3]);
        assert_eq!(request.not_in_effect(&PLAIN), None);
    }

    #[test]
    fn reads_the_memory_lists_of_the_interface() {
        for (memory, amounts) in [
            ("3", vec![3]),
            ("3,1", vec![3, 1]),
            ("3,4,5,6", vec![3, 4, 5, 6]),
            (" 3 ,  1 ", vec![3, 1]),
            ("003", vec![3]),
        ] {
            let request = from_memory(memory).unwrap();
            assert_eq!(only_quota(&request).amounts, amounts, "{memory:?}");
            assert_eq!(only_quota(&request).measure, Measure::Parts(15));
            assert_eq!(request.not_in_effect(&PLAIN), None);
        }
    }

    #[test]
    fn an_absent_empty_or_zero_memory_switches_cgpu_off() {
        let unset = from_env(&["PATH=/bin", "ALIYUN_COM_GPU_MEM_DEV=15"]).unwrap();
        assert_eq!(reason(&unset), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
        for (memory, expected) in [
            ("", "ALIYUN_COM_GPU_MEM_CONTAINER is empty"),
            ("  ", "ALIYUN_COM_GPU_MEM_CONTAINER is empty"),
            ("0", "ALIYUN_COM_GPU_MEM_CONTAINER=0"),
            ("00", "ALIYUN_COM_GPU_MEM_CONTAINER=00"),
            ("1,0,0", "ALIYUN_COM_GPU_MEM_CONTAINER=1,0,0 contains a zero"),
            ("0,16", "ALIYUN_COM_GPU_MEM_CONTAINER=0,16 contains a zero"),
        ] {
            assert_eq!(reason(&from_memory(memory).unwrap()), expected);
        }
    }

    #[test]
    fn refuses_a_malformed_memory_list_even_beside_a_zero() {
        for (memory, item) in [
            ("-1", "-1"),
            ("3.5", "3.5"),
            ("+3", "+3"),
            ("3,,4", "\"\""),
            ("3,", "\"\""),
            (",", "\"\""),
            ("3 4", "\"3 4\""),
            ("99999999999999999999", "99999999999999999999"),
            ("0x3", "0x3"),
            ("３", "\"\\u{ff13}\""),
            ("٣", "\"\\u{663}\""),
            ("0,x", "x"),
            ("x,0", "x"),
        ] {
            let setting = Setting { name: MEM, value: memory.to_owned() };
            assert_eq!(
                sentence(from_memory(memory)),
                format!(
                    "{setting}: {item} is no whole number below 2^64; \
                     write digits only, or a comma list of such numbers, one for each GPU"
                )
            );
        }
    }

    #[test]
    fn refuses_text_that_is_none() {
        for (value, quoted) in
            [("3\n", "3\\n"), ("\u{fffd}", "\\u{fffd}"), ("\x1b[0m", "\\u{1b}[0m")]
        {
            assert_eq!(
                sentence(from_memory(value)),
                format!(
                    "ALIYUN_COM_GPU_MEM_CONTAINER=\"{quoted}\" is no text: \
                     it has control characters, or bytes that are not UTF-8; \
                     write it anew in plain characters"
                )
            );
        }
    }

    #[test]
    fn refuses_a_total_that_is_no_whole_number_from_1() {
        for total in ["0", "15,15", "15GiB", "-15", "99999999999999999999", "x"] {
            let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", &format!("{DEV}={total}")];
            assert_eq!(
                sentence(from_env(&env)),
                format!(
                    "ALIYUN_COM_GPU_MEM_DEV={total} is not one whole number from 1; write the \
                     memory of each GPU, digits only, in the unit of ALIYUN_COM_GPU_MEM_CONTAINER"
                )
            );
        }
    }

    #[test]
    fn refuses_more_than_the_whole_gpu() {
        assert_eq!(
            sentence(from_memory("3,16")),
            "ALIYUN_COM_GPU_MEM_CONTAINER=3,16 asks for 16, more than the whole GPU \
             (ALIYUN_COM_GPU_MEM_DEV=15); lower the one or correct the other"
        );
        assert!(from_memory("15").is_ok());
    }

    #[test]
    fn memory_without_a_total_is_in_gib_or_in_the_unit_that_is_given() {
        let measure = |env: &[&str]| only_quota(&from_env(env).unwrap()).measure;
        let gib = Measure::UnitBytes(1 << 30);
        assert_eq!(measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3"]), gib);
        assert_eq!(measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV= "]), gib);
        for (unit, bytes) in [
            ("", 1 << 30),
            ("GiB", 1 << 30),
            ("GB", 1 << 30),
            ("g", 1 << 30),
            ("Gi", 1 << 30),
            ("MiB", 1 << 20),
            ("mb", 1 << 20),
            ("M", 1 << 20),
            ("MI", 1 << 20),
            (" 128MiB ", 128 << 20),
            ("128mib", 128 << 20),
            ("18446744073709551615MiB", u128::from(u64::MAX) << 20),
        ] {
            let unit = format!("ALIYUN_COM_GPU_MEM_UNIT={unit}");
            let found = measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", &unit]);
            assert_eq!(found, Measure::UnitBytes(bytes), "{unit}");
        }
    }

    #[test]
    fn an_unknown_unit_is_refused_only_where_it_is_needed() {
        for unit in ["TiB", "0MiB", "-1MiB", "1.5MiB", "128", "128GiB"] {
            let unit = format!("ALIYUN_COM_GPU_MEM_UNIT={unit}");
            assert_eq!(
                sentence(from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", &unit])),
                format!(
                    "{unit} is no known unit; write GiB, MiB or a number of MiB as 128MiB, \
                     or set ALIYUN_COM_GPU_MEM_DEV"
                )
            );
            assert_eq!(only_quota(&beside_quota(&[&unit]).unwrap()).measure, Measure::Parts(15));
        }
        assert!(beside_quota(&["ALIYUN_COM_GPU_MEM_UNIT=\u{fffd}"]).is_ok());
    }

    #[test]
    fn a_weight_is_a_whole_number_from_1_and_unset_by_default() {
        let weight = |env: &[&str]| {
            let request = beside_quota(env).unwrap();
            only_quota(&request).weight.as_ref().map(|weight| weight.value)
        };
        assert_eq!(weight(&[]), None);
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT= "]), None);
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT=1"]), Some(1));
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT= 20 "]), Some(20));
        for value in ["0", "-1", "1.5", "1,2", "99999999999999999999", "heavy"] {
            let setting = format!("ALIYUN_COM_GPU_SCHD_WEIGHT={value}");
            assert_eq!(
                sentence(beside_quota(&[&setting])),
                format!(
                    "{setting} is no whole number from 1; write the compute weight, digits only"
                )
            );
        }
    }

    #[test]
    fn a_high_priority_is_0_or_1() {
        let high = |env: &[&str]| only_quota(&beside_quota(env).unwrap()).high_priority;
        assert!(!high(&[]));
        assert!(!high(&["ALIYUN_COM_GPU_HIGH_PRIO="]));
        assert!(!high(&["ALIYUN_COM_GPU_HIGH_PRIO=0"]));
        assert!(high(&["ALIYUN_COM_GPU_HIGH_PRIO=1"]));
        assert_eq!(
            sentence(beside_quota(&["ALIYUN_COM_GPU_HIGH_PRIO=yes"])),
            "ALIYUN_COM_GPU_HIGH_PRIO=yes is neither 0 nor 1; write 1 for high priority"
        );
    }

    #[test]
    fn cgpu_disable_is_true_or_1_in_any_case() {
        for value in ["true", "TRUE", "True", "1", " 1 "] {
            let setting = Setting { name: "CGPU_DISABLE", value: value.to_owned() };
            let request = beside_quota(&[&format!("CGPU_DISABLE={value}")]).unwrap();
            assert_eq!(reason(&request), setting.to_string());
        }
        for value in ["false", "False", "0", "", " "] {
            let request = beside_quota(&[&format!("CGPU_DISABLE={value}")]).unwrap();
            assert_eq!(request.not_in_effect(&PLAIN), None);
        }
        assert_eq!(
            sentence(beside_quota(&["CGPU_DISABLE=yes"])),
            "CGPU_DISABLE=yes is neither yes nor no; write true or 1, false or 0"
        );
    }

    #[test]
    fn where_a_source_is_off_nothing_else_of_its_quota_is_looked_at() {
        let junk = [
            "ALIYUN_COM_GPU_MEM_DEV=x",
            "ALIYUN_COM_GPU_MEM_UNIT=x",
            "ALIYUN_COM_GPU_SCHD_WEIGHT=x",
            "ALIYUN_COM_GPU_HIGH_PRIO=x",
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=\u{fffd}",
            "NVIDIA_VISIBLE_DEVICES=\x07,,",
        ];
        for off in [
            &["PATH=/bin"][..],
            &["ALIYUN_COM_GPU_MEM_CONTAINER="],
            &["ALIYUN_COM_GPU_MEM_CONTAINER=1,0"],
            &["CGPU_DISABLE=true", "ALIYUN_COM_GPU_MEM_CONTAINER=x"],
        ] {
            let request = from_env(&[off, &junk[..]].concat()).unwrap();
            assert!(request.not_in_effect(&PLAIN).is_some(), "{off:?}");
        }
    }

    #[test]
    fn the_schedulers_failure_is_reported_in_its_own_words_whatever_else_is_said() {
        let failed = "NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run";
        let expected = "the scheduler found no GPU for this container: \
                        NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run; free GPU memory on this \
                        node or ask for less (ALIYUN_COM_GPU_MEM_CONTAINER)";
        assert_eq!(sentence(from_env(&[failed, "ALIYUN_COM_GPU_MEM_IDX=-1"])), expected);
        assert_eq!(sentence(from_env(&[failed, "CGPU_DISABLE=true"])), expected);
        assert_eq!(sentence(beside_quota(&[failed])), expected);

        let untrusted = Trust { env: false, annotations: true };
        assert!(read(&[failed], [], untrusted).is_ok());
    }

    #[test]
    fn names_match_exactly_and_no_prefix() {
        let request = from_env(&[
            "CGPU0_PRIORITY=1",
            "CGPU_COUNT=x",
            "CGPU_DISABLE_ALL=true",
            "ALIYUN_COM_GPU_MEM_CONTAINER_2=x",
            "XALIYUN_COM_GPU_MEM_CONTAINER=x",
            "aliyun_com_gpu_mem_container=x",
            "ALIYUN_COM_GPU_MEM_IDX=-1",
            "ALIYUN_COM_GPU_MEM_POD=x",
            "ALIYUN_COM_GPU_MEM_ASSIGNED=x",
            "=",
            "",
        ])
        .unwrap();
        assert_eq!(reason(&request), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
    }

    #[test]
    fn of_a_variable_given_twice_the_last_counts() {
        let request =
            from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=x", "ALIYUN_COM_GPU_MEM_CONTAINER=4"]);
        assert_eq!(only_quota(&request.unwrap()).amounts, [4]);
        let request = from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=4", "ALIYUN_COM_GPU_MEM_CONTAINER"]);
        assert_eq!(reason(&request.unwrap()), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
        let request = from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER", "ALIYUN_COM_GPU_MEM_CONTAINER=4"]);
        assert_eq!(only_quota(&request.unwrap()).amounts, [4]);
    }

    #[test]
    fn an_annotation_says_what_its_variable_says() {
        let annotations = [
            ("aliyun.com/gpu-mem-container", "512,256"),
            ("aliyun.com/gpu-mem-unit", "MiB"),
            ("aliyun.com/gpu-visible-devices", "1,0"),
            ("aliyun.com/gpu-schd-weight", "2"),
            ("aliyun.com/gpu-high-prio", "1"),
            ("aliyun.com/cgpu-disable", "false"),
        ];
        let request = read(&[""; 0], annotations, BOTH).unwrap();
        let quota = only_quota(&request);
        assert_eq!(quota.source, Source::Annotations);
        assert_eq!(quota.amounts, [512, 256]);
        assert_eq!(quota.measure, Measure::UnitBytes(1 << 20));
        assert_eq!(quota.weight.as_ref().map(|weight| weight.value), Some(2));
        assert!(quota.high_priority);
        assert!(request.selections.annotation.is_some());

        let refused = |name, value| {
            let annotations = [("aliyun.com/gpu-mem-container", "3"), (name, value)];
            sentence(read(&[""; 0], annotations, BOTH))
        };
        assert_eq!(
            refused("aliyun.com/gpu-mem-dev", "2"),
            "aliyun.com/gpu-mem-container=3 asks for 3, more than the whole GPU \
             (aliyun.com/gpu-mem-dev=2); lower the one or correct the other"
        );
        assert_eq!(
            refused("aliyun.com/gpu-mem-unit", "TiB"),
            "aliyun.com/gpu-mem-unit=TiB is no known unit; write GiB, MiB or a number of MiB \
             as 128MiB, or set aliyun.com/gpu-mem-dev"
        );
    }

    #[test]
    fn only_trusted_sources_are_read() {
        let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=x", "NVIDIA_VISIBLE_DEVICES=0"];
        let annotations =
            [("aliyun.com/gpu-mem-container", "y"), ("aliyun.com/gpu-visible-devices", "0")];
        let reads = |env_trusted, annotations_trusted| {
            read(&env, annotations, Trust { env: env_trusted, annotations: annotations_trusted })
        };
        assert!(sentence(reads(true, false)).starts_with("ALIYUN_COM_GPU_MEM_CONTAINER=x"));
        assert!(sentence(reads(false, true)).starts_with("aliyun.com/gpu-mem-container=y"));

        let neither = reads(false, false).unwrap();
        assert_eq!(
            reason(&neither),
            "neither variables nor annotations are trusted \
             (trust_env and trust_annotations are false)"
        );
        assert!(neither.not_in_effect(&STRICT).is_some());
        assert!(neither.not_in_effect(&EXCLUSIVE).is_some());

        let annotations_only = Trust { env: false, annotations: true };
        assert_eq!(
            reason(&read(&env, [], annotations_only).unwrap()),
            "aliyun.com/gpu-mem-container is not set (trust_env is false)"
        );
    }

    #[test]
    fn a_source_that_is_off_leaves_the_others_quota() {
        let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        for annotation in
            [("aliyun.com/cgpu-disable", "true"), ("aliyun.com/gpu-mem-container", "0"), ("x", "y")]
        {
            let request = read(&quota, [annotation], BOTH).unwrap();
            assert_eq!(only_quota(&request).source, Source::Env);
            assert_eq!(request.not_in_effect(&PLAIN), None);
        }
        let quota = [("aliyun.com/gpu-mem-container", "3")];
        for variable in ["CGPU_DISABLE=true", "ALIYUN_COM_GPU_MEM_CONTAINER=0", "PATH=/"] {
            let request = read(&[variable], quota, BOTH).unwrap();
            assert_eq!(only_quota(&request).source, Source::Annotations);
            assert_eq!(request.not_in_effect(&PLAIN), None);
        }
        let request =
            read(&["CGPU_DISABLE=1"], [("aliyun.com/gpu-mem-container", "0")], BOTH).unwrap();
        assert_eq!(reason(&request), "CGPU_DISABLE=1 and aliyun.com/gpu-mem-container=0");
    }

    #[test]
    fn a_quota_without_a_gpu_is_not_in_effect() {
        let selecting = |env: &[&str], annotation: &str| {
            let mut all = vec!["ALIYUN_COM_GPU_MEM_CONTAINER=3"];
            all.extend(env);
            let annotations = [("aliyun.com/gpu-visible-devices", annotation)];
            read(&all, annotations, BOTH).unwrap().not_in_effect(&PLAIN)
        };
        for (env, annotation, expected) in [
            (&["NVIDIA_VISIBLE_DEVICES=none"][..], "", Some("NVIDIA_VISIBLE_DEVICES=none")),
            (&["NVIDIA_VISIBLE_DEVICES=void"], "", Some("NVIDIA_VISIBLE_DEVICES=void")),
            (&["NVIDIA_VISIBLE_DEVICES="], "", Some("NVIDIA_VISIBLE_DEVICES=\"\"")),
            (&["NVIDIA_VISIBLE_DEVICES=void"], "0", Some("NVIDIA_VISIBLE_DEVICES=void")),
            (
                &["ALIYUN_COM_GPU_VISIBLE_DEVICES=none"],
                "",
                Some("ALIYUN_COM_GPU_VISIBLE_DEVICES=none"),
            ),
            (&[], "none", Some("aliyun.com/gpu-visible-devices=none")),
            // These would get their GPUs from NVIDIA's toolkit, without a quota.
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"], "", None),
            (&["NVIDIA_VISIBLE_DEVICES=all"], "void", None),
            (&["NVIDIA_VISIBLE_DEVICES=0"], "void", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void"], "", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES= ", "NVIDIA_VISIBLE_DEVICES=0"], "", None),
            (&["NVIDIA_VISIBLE_DEVICES=all"], "", None),
            (&[], " ", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=\n", "NVIDIA_VISIBLE_DEVICES=void"], "", None),
        ] {
            let expected = expected.map(|setting| format!("{setting} selects no GPU"));
            assert_eq!(selecting(env, annotation), expected, "{env:?} {annotation:?}");
        }
    }

    #[test]
    fn gpus_without_a_quota_matter_only_where_the_rules_say_so() {
        for (env, held) in [
            (&["NVIDIA_VISIBLE_DEVICES=all"][..], true),
            (&["NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["NVIDIA_VISIBLE_DEVICES=\u{fffd}"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=0"], true),
            (&["CGPU_DISABLE=true", "NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["NVIDIA_VISIBLE_DEVICES=0,MIG-1"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=MIG-1", "NVIDIA_VISIBLE_DEVICES=all"], true),
            (&["NVIDIA_VISIBLE_DEVICES=MIG-1,0:1"], false),
            (&["NVIDIA_VISIBLE_DEVICES=void"], false),
            (&["NVIDIA_VISIBLE_DEVICES="], false),
            (&["NVIDIA_VISIBLE_DEVICES"], false),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES="], false),
            (&["ALIYUN_COM_GPU_MEM_CONTAINER=0"], false),
        ] {
            let request = from_env(env).unwrap();
            assert!(request.not_in_effect(&PLAIN).is_some(), "{env:?}");
            assert_eq!(request.not_in_effect(&EXCLUSIVE).is_none(), held, "{env:?}");
            assert_eq!(request.not_in_effect(&STRICT).is_none(), held, "{env:?}");
        }
        let mig = from_env(&["NVIDIA_VISIBLE_DEVICES=MIG-1"]).unwrap();
        assert_eq!(
            mig.not_in_effect(&EXCLUSIVE).unwrap(),
            "NVIDIA_VISIBLE_DEVICES=MIG-1 names MIG devices, \
             and MIG devices have memory of their own"
        );
        let none = from_env(&["PATH=/"]).unwrap();
        assert_eq!(
            none.not_in_effect(&STRICT).unwrap(),
            "ALIYUN_COM_GPU_MEM_CONTAINER is not set, and no variable names a GPU"
        );
    }

    #[test]
    fn selecting_no_gpu_is_no_way_around_a_required_quota() {
        let request =
            beside_quota(&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"]);
        assert_eq!(request.unwrap().not_in_effect(&STRICT), None);
    }

    /// Text that is often nearly right.
    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            "[0-9, ]{0,12}",
            "(0|1|3|15|true|false|all|none|void|GPU-a|MIG-1|128MiB|GiB|\u{fffd}|\n){0,3}",
        ]
    }

    proptest! {
        #[test]
        fn read_and_its_refusals_never_panic(
            env in proptest::collection::vec((0..NAMES.len() + 2, value()), 0..12),
            annotations in proptest::collection::vec((0..NAMES.len() + 1, value()), 0..12),
            env_trusted: bool,
            annotations_trusted: bool,
        ) {
            let env: Vec<String> = env
                .into_iter()
                .map(|(at, value)| match NAMES.get(at) {
                    Some(name) => format!("{}={value}", name.variable),
                    None if at == NAMES.len() => format!("{NVIDIA_VISIBLE_DEVICES}={value}"),
                    None => value,
                })
                .collect();
            let annotations = annotations
                .iter()
                .map(|(at, value)| (NAMES.get(*at).map_or("", |n| n.annotation), value.as_str()));
            let trust = Trust { env: env_trusted, annotations: annotations_trusted };
            let text = match read(&env, annotations, trust) {
                Ok(request) => [PLAIN, EXCLUSIVE, STRICT]
                    .iter()
                    .filter_map(|rules| request.not_in_effect(rules))
                    .collect(),
                Err(error) => error.to_string(),
            };
            prop_assert!(!text.contains(char::is_control));
            prop_assert!(text.len() < 6000);
        }
    }
}
