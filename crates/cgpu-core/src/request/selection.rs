//! Which GPUs a container names: [`Selection`], retained word for word until a plan needs it.
//!
//! Knows how GPUs are named, by CDI's names of devices too, and docker's grammar of `--gpus`. Must
//! not know which GPUs there are. A container without a quota must start whatever its selections
//! say, so nothing here is refused before [`Selection::names`] is asked for.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use super::RequestError;
use super::brought_gpus::{BroughtName, cdi_gpu};
use super::setting::Setting;

/// A choice of GPUs, as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// What was said.
    pub(crate) setting: Setting,
    /// The same by names of GPUs, if it was said by CDI's names of devices or in docker's grammar.
    plain: Option<String>,
    /// How many, if that is what it says.
    count: Option<u32>,
    /// Whether it is in docker's grammar.
    is_dockers: bool,
}

/// What a [`Selection`] says before its names are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All GPUs.
    All,
    /// No GPU.
    Nothing,
    /// So many, whichever.
    Count(u32),
    /// Those it lists, well or badly.
    List,
}

/// A name of a GPU or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuName<'a> {
    /// ASCII digits.
    Index(&'a str),
    /// `GPU-` and at least one character of the UUID.
    Uuid(&'a str),
    /// A MIG device: `MIG-…` or `gpu:device`.
    Mig(&'a str),
}

impl Selection {
    pub(super) fn new(setting: Setting) -> Self {
        let is_cdi = setting.value.contains('=');
        let plain = is_cdi.then(|| by_gpus(&setting.value)).flatten();
        Selection { setting, plain, count: None, is_dockers: false }
    }

    /// A choice in docker's grammar of `--gpus`: `all`, `none`, a number (how many), `count=2`, or
    /// `device=0,2`, in quotation marks or not.
    pub(super) fn in_dockers_grammar(setting: Setting) -> Self {
        let text = setting.text().unwrap_or_default().trim_matches('"');
        let names = text.strip_prefix("device=").filter(|names| !names.is_empty());
        let number = text.strip_prefix("count=").unwrap_or(text);
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        // For 0 it can't be determined whether no GPU is meant, or the first.
        let count = number.parse().ok().filter(|&count| is_number && count > 0);
        let plain = match text {
            "all" | "none" | "void" => Some(text.to_owned()),
            _ if number == "all" => Some(number.to_owned()),
            _ => names.map(str::to_owned),
        };
        Selection { setting, plain, count, is_dockers: true }
    }

    /// Whether it says the same as `other`, word for word.
    pub(super) fn is_same(&self, other: &Selection) -> bool {
        let texts = (self.text().map(str::trim), other.text().map(str::trim));
        self.extent() == other.extent() && (self.count.is_some() || texts.0 == texts.1)
    }

    fn text(&self) -> Result<&str, RequestError> {
        self.plain.as_deref().map_or_else(|| self.setting.text(), Ok)
    }

    /// How far it reaches; any other text is a list.
    pub(crate) fn extent(&self) -> Extent {
        if let Some(count) = self.count {
            return Extent::Count(count);
        }
        match self.text() {
            Ok("all") => Extent::All,
            Ok("none" | "void" | "") => Extent::Nothing,
            _ => Extent::List,
        }
    }

    /// The names of a list, in its order.
    ///
    /// # Errors
    ///
    /// Where an item is empty or names nothing that could be a GPU.
    pub(crate) fn names(&self) -> Result<Vec<GpuName<'_>>, RequestError> {
        if self.is_dockers && self.plain.is_none() {
            self.setting.text()?;
            return Err(RequestError::BadGpus { setting: self.setting.clone() });
        }
        let bad = |item: &str| RequestError::BadGpuName {
            setting: self.setting.clone(),
            item: item.to_owned(),
        };
        let items = self.text()?.split(',').map(str::trim);
        items.map(|item| GpuName::parse(item).ok_or_else(|| bad(item))).collect()
    }

    /// Whether it is a list of MIG devices and nothing else.
    pub(super) fn is_mig_only(&self) -> bool {
        self.extent() == Extent::List
            && self.names().is_ok_and(|names| names.iter().all(|n| matches!(n, GpuName::Mig(_))))
    }
}

/// A list of CDI's names as a list of GPUs; `None` if one of them is no GPU of NVIDIA's.
fn by_gpus(value: &str) -> Option<String> {
    let mut names = Vec::new();
    for item in value.split(',') {
        match cdi_gpu(item.trim())? {
            BroughtName::All => return Some("all".to_owned()),
            BroughtName::Named(name) => names.push(name),
            BroughtName::Minor(_) => return None,
        }
    }
    Some(names.join(","))
}

impl<'a> GpuName<'a> {
    /// What a name of a GPU says; `None` if it could be no GPU's.
    pub(crate) fn parse(item: &'a str) -> Option<Self> {
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let begins = |prefix: &str| {
            item.get(..prefix.len()).is_some_and(|head| head.eq_ignore_ascii_case(prefix))
                && item.len() > prefix.len()
        };
        if item.contains(char::is_whitespace) {
            None
        } else if digits(item) {
            Some(GpuName::Index(item))
        } else if begins("GPU-") {
            Some(GpuName::Uuid(item))
        } else if begins("MIG-")
            || item.split_once(':').is_some_and(|(gpu, device)| digits(gpu) && digits(device))
        {
            Some(GpuName::Mig(item))
        } else {
            None
        }
    }

    /// The name as it was written.
    pub(crate) fn as_str(self) -> &'a str {
        match self {
            GpuName::Index(text) | GpuName::Uuid(text) | GpuName::Mig(text) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(value: &str) -> Selection {
        Selection::new(Setting { name: "NVIDIA_VISIBLE_DEVICES".into(), value: value.to_owned() })
    }

    #[test]
    fn dockers_grammar_names_gpus_or_says_how_many() {
        use GpuName::{Index, Mig, Uuid};
        let dockers = |value: &str| {
            let setting = Setting { name: "CGPU_GPUS".into(), value: value.to_owned() };
            Selection::in_dockers_grammar(setting)
        };
        for (value, extent) in [
            ("all", Extent::All),
            ("count=all", Extent::All),
            ("none", Extent::Nothing),
            ("", Extent::Nothing),
            ("1", Extent::Count(1)),
            (" 02 ", Extent::Count(2)),
            ("count=4", Extent::Count(4)),
            ("device=0", Extent::List),
        ] {
            assert_eq!(dockers(value).extent(), extent, "{value:?}");
        }
        let named = [Index("0"), Uuid("GPU-a"), Mig("1:0")];
        assert_eq!(dockers("\"device=0,GPU-a,1:0\"").names().unwrap(), named);
        for value in ["0", "-1", "0,2", "GPU-a", "device=", "devices=0", "count=", "99999999999"] {
            let setting = Setting { name: "CGPU_GPUS".into(), value: value.to_owned() };
            let refused = RequestError::BadGpus { setting };
            assert_eq!(dockers(value).names(), Err(refused), "{value:?}");
        }
        assert!(dockers("1").is_same(&dockers("count=1")));
        assert!(!dockers("1").is_same(&dockers("2")));
        assert!(dockers("device=0,1").is_same(&selection("0,1")));
    }

    #[test]
    fn cdi_device_names_parse_as_gpu_names() {
        use GpuName::{Index, Mig, Uuid};
        let named = selection("nvidia.com/gpu=0, nvidia.com/gpu=GPU-a,nvidia.com/gpu=0:1");
        assert_eq!(named.names().unwrap(), [Index("0"), Uuid("GPU-a"), Mig("0:1")]);
        assert_eq!(selection("nvidia.com/gpu=0,nvidia.com/gpu=all").extent(), Extent::All);
        assert!(selection("nvidia.com/gpu=0,nvidia.com/gds=all").names().is_err());
    }

    #[test]
    fn selection_knows_all_and_nothing_before_parsing_names() {
        for (value, extent) in [
            ("all", Extent::All),
            (" all ", Extent::All),
            ("none", Extent::Nothing),
            ("void", Extent::Nothing),
            ("", Extent::Nothing),
            ("  ", Extent::Nothing),
            ("0", Extent::List),
            ("0,all", Extent::List),
            ("\u{fffd}", Extent::List),
            ("void\n", Extent::List),
        ] {
            assert_eq!(selection(value).extent(), extent, "{value:?}");
        }
    }

    #[test]
    fn reads_indices_uuids_prefixes_and_mig_devices() {
        use GpuName::{Index, Mig, Uuid};
        let selection = selection(" 0 , GPU-c,gpu-C09,MIG-5c1b,MIG-GPU-c09/1/0 ,0:1,007");
        let names = selection.names().unwrap();
        assert_eq!(
            names,
            [
                Index("0"),
                Uuid("GPU-c"),
                Uuid("gpu-C09"),
                Mig("MIG-5c1b"),
                Mig("MIG-GPU-c09/1/0"),
                Mig("0:1"),
                Index("007"),
            ]
        );
    }

    #[test]
    fn refuses_what_could_be_no_gpu() {
        for (value, item) in [
            ("0,", ""),
            (",", ""),
            ("0,,1", ""),
            ("0 1", "0 1"),
            ("GPU-a b", "GPU-a b"),
            ("GPU-", "GPU-"),
            ("MIG-", "MIG-"),
            ("0:", "0:"),
            (":1", ":1"),
            ("-1", "-1"),
            ("0x1", "0x1"),
            ("٣", "٣"),
            ("0,all", "all"),
            ("ALL", "ALL"),
            ("GPUé", "GPUé"),
            ("vendor.com/gpu=0", "vendor.com/gpu=0"),
        ] {
            let selection = selection(value);
            let expected = RequestError::BadGpuName {
                setting: selection.setting.clone(),
                item: item.to_owned(),
            };
            assert_eq!(selection.names(), Err(expected), "{value:?}");
        }
    }
}
