//! Texts, edits and what they add, for the tests of each engine.

use super::*;

pub(crate) const PROGRAM: &str = "/usr/bin/cgpu-runtime";

pub(crate) const V1: Format = Format::Containerd { version: 1, reading: Reading::One };

pub(crate) const V2: Format = Format::Containerd { version: 2, reading: Reading::One };

pub(crate) const V3: Format =
    Format::Containerd { version: 3, reading: Reading::Two { older: false } };

pub(crate) const ADD: ChangeRequest<'_> =
    ChangeRequest::Add { program: PROGRAM, default: false, model: "", merged: false };

pub(crate) const DEFAULT: ChangeRequest<'_> =
    ChangeRequest::Add { program: PROGRAM, default: true, model: "", merged: false };

/// As Debian ships it.
pub(crate) const DEBIAN: &str = r#"version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"#;

/// As an administrator has it: comments, another default, an inline table.
pub(crate) const OWN: &str = r#"# Ours, ticket 12
version = 3 # see the wiki

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = 'crun' # not runc

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun]
runtime_type = 'io.containerd.runc.v2'
options = { BinaryName = "/usr/bin/crun" }

# the end
"#;

pub(crate) const DAEMON: &str = "{\n\t\"log-driver\": \"local\",\n\t\"default-runtime\": \"crun\",\n\t\"runtimes\": {\n\t\t\"crun\": {\"path\": \"/usr/bin/crun\", \"runtimeArgs\": []}\n\t},\n\t\"debug\": 1e0\n}\n";

pub(crate) fn add(format: Format, text: &str, requested: ChangeRequest<'_>) -> String {
    edit(format, text, requested).unwrap()
}

pub(crate) fn remove(format: Format, text: &str, former: Option<&str>) -> String {
    edit(format, text, ChangeRequest::Remove { former }).unwrap()
}

/// Lines that `new` has and `old` hasn't; nothing of `old` may be lost.
#[track_caller]
pub(crate) fn added<'a>(old: &str, new: &'a str) -> Vec<&'a str> {
    let mut rest = old.lines().peekable();
    let mut more = Vec::new();
    for line in new.lines() {
        match rest.next_if_eq(&line) {
            Some(_) => {}
            None => more.push(line),
        }
    }
    assert_eq!(rest.next(), None, "lost of {old}\nin {new}");
    more
}
