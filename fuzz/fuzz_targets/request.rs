//! No variable or annotation breaks the reader, or the decision by it.
#![no_main]

use cgpu_host::config::Config;
use cgpu_core::request::{Brought, EntryPoint, Profile, Reaches, Rules, BundleFacts, decide, setting_names};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let names = setting_names::NAMES;
    // The first byte of each line says which variable or annotation the rest is.
    let (mut env, mut annotations) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let Some(first) = line.bytes().next().filter(u8::is_ascii) else { continue };
        let (which, value) = (usize::from(first), &line[1..]);
        match which % 2 {
            0 => match names.get(which / 2 % (names.len() + 2)) {
                Some(name) => env.push(format!("{}={value}", name.variable)),
                None if which % 4 == 0 => {
                    env.push(format!("{}={value}", setting_names::NVIDIA_VISIBLE_DEVICES))
                }
                None => env.push(value.to_owned()),
            },
            _ => annotations.push((names[which / 2 % names.len()].annotation, value)),
        }
    }
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    let brought = Brought::default();
    let said = BundleFacts {
        env: &env,
        annotations: &annotations,
        id: Some("0"),
        brought: &brought,
        is_privileged: false,
        reaches: &Reaches::default,
        entry: EntryPoint::Runtime,
        grant: None,
    };
    let config = Config::default();
    for strict in [false, true] {
        let rules = Rules {
            profile: if strict { Profile::Strict } else { Profile::Open },
            whole: !strict,
            whole_beside_quota: !strict,
            exclusive: strict,
            require_quota: strict,
            refuses_privileged: strict,
            ..config.rules()
        };
        let _ = decide(&said, &rules);
    }
});
