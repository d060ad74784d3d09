//! The numbers, the owner and the mode of the driver's device nodes, as the kernel states them. Pure.
//!
//! Must not know where nodes are: it reads the texts of `/proc/devices` and
//! `/proc/driver/nvidia/params`, as nvidia-modprobe does (`modprobe-utils/nvidia-modprobe-utils.c`).

use std::fmt;

/// A kernel module of the driver that has device nodes of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Module {
    /// `nvidia`: `nvidiactl` and `nvidiaN`.
    Nvidia,
    /// `nvidia-uvm`, without which no CUDA program runs.
    Uvm,
}

impl Module {
    /// The name by which `modprobe` knows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Module::Nvidia => "nvidia",
            Module::Uvm => "nvidia-uvm",
        }
    }

    /// Its names in `/proc/devices`: `nvidia` was `nvidia-frontend` before 550.
    fn registered_names(self) -> &'static [&'static str] {
        match self {
            Module::Nvidia => &["nvidia", "nvidia-frontend", "nvidiactl"],
            Module::Uvm => &["nvidia-uvm"],
        }
    }

    /// Its major number in the text of `/proc/devices`; `None` if it isn't loaded.
    #[must_use]
    pub fn major(self, proc_devices: &str) -> Option<u64> {
        self.major_in(&character_majors(proc_devices))
    }

    /// Its major number among [`character_majors`].
    #[must_use]
    pub fn major_in(self, majors: &[(String, u64)]) -> Option<u64> {
        let names = self.registered_names().iter();
        let mut found = names.filter_map(|name| majors.iter().find(|(there, _)| there == name));
        found.next().map(|(_, major)| *major)
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The module and the minor number of the node that is called `name` in `/dev`; `None` for a node that
/// no container needs.
#[must_use]
pub fn identity(name: &str) -> Option<(Module, u64)> {
    match name {
        "nvidiactl" => Some((Module::Nvidia, 255)),
        "nvidia-uvm" => Some((Module::Uvm, 0)),
        "nvidia-uvm-tools" => Some((Module::Uvm, 1)),
        _ => {
            let digits = name.strip_prefix("nvidia")?;
            // As the kernel writes a number: `+1` and `01` are no node of the driver's.
            let minor: u64 = digits.parse().ok()?;
            (digits == minor.to_string() && minor < 254).then_some((Module::Nvidia, minor))
        }
    }
}

/// The majors of character devices in the text of `/proc/devices`, by name.
#[must_use]
pub fn character_majors(proc_devices: &str) -> Vec<(String, u64)> {
    let lines = proc_devices.lines().skip_while(|line| !line.starts_with("Character")).skip(1);
    lines
        .take_while(|line| !line.starts_with("Block"))
        .filter_map(|line| {
            let (number, name) = line.trim().split_once(' ')?;
            Some((name.trim().to_owned(), number.parse().ok()?))
        })
        .collect()
}

/// How nodes are to be made, by the parameters of the module `nvidia`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRights {
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
    /// `NVreg_ModifyDeviceFiles` isn't 0: programs of the driver may make nodes.
    pub may_make: bool,
}

impl Default for NodeRights {
    fn default() -> Self {
        NodeRights { uid: 0, gid: 0, mode: 0o666, may_make: true }
    }
}

impl NodeRights {
    /// Those in the text of `/proc/driver/nvidia/params`; a parameter that isn't there has its default.
    #[must_use]
    pub fn parse(params: &str) -> Self {
        let value = |key: &str| -> Option<u32> {
            params.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == key).then(|| value.trim().parse().ok())?
            })
        };
        let default = NodeRights::default();
        NodeRights {
            uid: value("DeviceFileUID").unwrap_or(default.uid),
            gid: value("DeviceFileGID").unwrap_or(default.gid),
            mode: value("DeviceFileMode").unwrap_or(default.mode) & 0o777,
            may_make: value("ModifyDeviceFiles") != Some(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majors_are_the_character_devices() {
        let text = "Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n4 /dev/vc/0\nx y\n\n\
                    Block devices:\n  7 loop\n509 nvidia-uvm\n";
        assert_eq!(character_majors(text).len(), 4);
        assert_eq!(Module::Uvm.major(text), Some(511));
        assert_eq!(Module::Nvidia.major(text), Some(195));
        assert_eq!(character_majors("195 nvidia\n"), []);
        let old = "Character devices:\n195 nvidia-frontend\n\nBlock devices:\n509 nvidia-uvm\n";
        assert_eq!(Module::Nvidia.major(old), Some(195));
        assert_eq!(Module::Uvm.major(old), None, "that one is a block device");
        let new = "Character devices:\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n";
        assert_eq!(Module::Nvidia.major(new), Some(195));
    }

    #[test]
    fn only_nodes_that_containers_need_have_numbers() {
        for (name, expected) in [
            ("nvidiactl", Some((Module::Nvidia, 255))),
            ("nvidia0", Some((Module::Nvidia, 0))),
            ("nvidia15", Some((Module::Nvidia, 15))),
            ("nvidia253", Some((Module::Nvidia, 253))),
            ("nvidia-uvm", Some((Module::Uvm, 0))),
            ("nvidia-uvm-tools", Some((Module::Uvm, 1))),
            ("nvidia254", None),
            ("nvidia01", None),
            ("nvidia+1", None),
            ("nvidia", None),
            ("nvidia-modeset", None),
            ("../nvidia0", None),
        ] {
            assert_eq!(identity(name), expected, "{name}");
        }
    }

    #[test]
    fn parameters_of_the_module_say_whose_nodes_are() {
        let text = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 7\n\
                    DeviceFileGID: 44\nDeviceFileMode: 432\n";
        let rights = NodeRights { uid: 7, gid: 44, mode: 0o660, may_make: true };
        assert_eq!(NodeRights::parse(text), rights);
        assert_eq!(NodeRights::parse(""), NodeRights::default());
        assert_eq!(NodeRights::parse("DeviceFileMode: x\n"), NodeRights::default());
        assert!(!NodeRights::parse("ModifyDeviceFiles: 0\n").may_make);
        assert_eq!(NodeRights::parse("DeviceFileMode: 2541\n").mode, 0o755, "no setuid bit");
    }
}
