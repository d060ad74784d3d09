//! No variable or annotation breaks the reader.
#![no_main]

use cgpu::request::{Rules, Trust, name, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let names = name::NAMES;
    // The first byte of each line says which variable or annotation the rest is.
    let (mut env, mut annotations) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let Some(first) = line.bytes().next().filter(u8::is_ascii) else { continue };
        let (which, value) = (usize::from(first), &line[1..]);
        match which % 2 {
            0 => match names.get(which / 2 % (names.len() + 1)) {
                Some(name) => env.push(format!("{}={value}", name.variable)),
                None => env.push(format!("{}={value}", name::NVIDIA_VISIBLE_DEVICES)),
            },
            _ => annotations.push((names[which / 2 % names.len()].annotation, value)),
        }
    }
    let trust = Trust { env: true, annotations: true };
    if let Ok(request) = read(&env, annotations, trust) {
        for exclusive in [false, true] {
            let whole = !exclusive;
            let rules = Rules {
                whole,
                whole_beside_quota: whole,
                exclusive,
                require_quota: exclusive,
                max_inst: 20,
            };
            let _ = request.not_in_effect(&rules);
        }
    }
});
