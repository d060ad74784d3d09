//! No specification breaks its reader, or the lookup of a GPU in it; what we write of it says the
//! same.
#![no_main]

use cgpu_inject::cdi::parser::{Form, kind, parse};
use cgpu_inject::cdi::{HostFacts, Specifications, Wanted, yaml};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for form in [Form::Yaml, Form::Json] {
        let _ = kind(data, form);
        let Ok(spec) = parse(data, form) else { continue };
        let text = serde_json::to_string(&spec).expect("a specification is plain data");
        assert_eq!(parse(text.as_bytes(), Form::Json).expect("what we wrote can be read"), spec);
        // A name of more than 1,024 characters is no name to YAML.
        let text = yaml::document(&spec).expect("a specification is plain data");
        if let Ok(again) = parse(text.as_bytes(), Form::Yaml) {
            assert_eq!(again, spec);
        }
        let specifications = Specifications::of("/cdi.yaml".into(), spec);
        let host = HostFacts { root: "/nowhere".into(), driver: "535.247.01".parse().ok() };
        let gpu = Wanted { index: 0, uuid: "GPU-a".to_owned(), minor: 0, mig: None };
        let _ = (specifications.edits_for(&[gpu], &host), specifications.devices(&host));
    }
});
