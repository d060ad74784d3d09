//! Any config.json is refused or edited; an edit comes out as meant and is made once.
#![no_main]

use std::path::PathBuf;

use cgpu_inject::bundle::{Bind, Bundle, DeviceNode, Edits, HookCall, HookStage, Withheld};
use libfuzzer_sys::fuzz_target;

fn edits() -> Edits {
    let (path, other) = ("/dev/nvidia0".to_owned(), "/dev/nvidia1".to_owned());
    Edits {
        env: vec![("NVIDIA_VISIBLE_DEVICES".into(), "GPU-a".into())],
        devices: vec![DeviceNode::new(path, 195, 0)],
        binds: vec![Bind { source: "/sim/nvidiactl".into(), destination: "/dev/nvidiactl".into() }],
        withheld: vec![Withheld { source: other.clone(), path: other, major: 195, minor: 1 }],
        hooks: vec![HookCall {
            stage: HookStage::Poststop,
            path: "/usr/bin/cgpu-hook".into(),
            args: vec!["cgpu-hook".into(), "poststop".into()],
            env: vec!["PATH=/usr/bin".into()],
            timeout_s: Some(10),
        }],
        masked: vec!["/proc/cgpu_km".into()],
        ..Edits::default()
    }
}

fuzz_target!(|data: &[u8]| {
    let load = |bytes: &[u8]| Bundle::from_bytes(bytes, PathBuf::new(), "config.json".into());
    let Ok(mut bundle) = load(data) else { return };
    let _ = (bundle.env(), bundle.annotations(), bundle.is_privileged());
    if bundle.apply(&edits()).is_err() {
        return;
    }
    let text = bundle.to_text();
    let mut again = load(text.as_bytes()).expect("what we wrote can be read");
    assert!(!again.apply(&edits()).expect("what was edited can be"), "{text}");
});
