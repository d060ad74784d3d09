//! Which GPUs a container names: [`Selection`], kept word for word until a plan needs it.
//!
//! Knows how GPUs are named, by CDI's names of devices too. Must not know which GPUs there are. A container without a
//! quota must start whatever its selections say, so nothing here is refused before
//! [`Selection::names`] is asked for.

use super::RequestError;
use super::brought::{BroughtName, cdi_gpu};
use super::setting::Setting;

/// A choice of GPUs, as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// What was said.
    pub(crate) setting: Setting,
    /// The same by names of GPUs, if it was said by CDI's names of devices.
    plain: Option<String>,
}

/// What a [`Selection`] says before its names are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All GPUs.
    All,
    /// No GPU.
    Nothing,
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
        Selection { setting, plain }
    }

    fn text(&self) -> Result<&str, RequestError> {
        self.plain.as_deref().map_or_else(|| self.setting.text(), Ok)
    }

    /// How far it reaches; any other text is a list.
    pub(crate) fn extent(&self) -> Extent {
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
    fn names_of_cdi_are_read_as_names_of_gpus() {
        use GpuName::{Index, Mig, Uuid};
        let named = selection("nvidia.com/gpu=0, nvidia.com/gpu=GPU-a,nvidia.com/gpu=0:1");
        assert_eq!(named.names().unwrap(), [Index("0"), Uuid("GPU-a"), Mig("0:1")]);
        assert_eq!(selection("nvidia.com/gpu=0,nvidia.com/gpu=all").extent(), Extent::All);
        assert!(selection("nvidia.com/gpu=0,nvidia.com/gds=all").names().is_err());
    }

    #[test]
    fn knows_all_and_nothing_before_any_name_is_read() {
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
