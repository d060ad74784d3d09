//! Whatever a bundle has of GPUs: if it asks for a quota it gets one, or is refused, or has no GPU.
#![no_main]

use std::path::PathBuf;

use cgpu_inject::bundle::Bundle;
use cgpu_host::config::Config;
use cgpu_core::request::{EntryPoint, Reaches, BundleFacts, Verdict, decide};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(bundle) = Bundle::from_bytes(data, PathBuf::new(), "config.json".into()) else { return };
    let brought = bundle.brought();
    let (Ok(mut env), Ok(annotations)) = (bundle.env(), bundle.annotations()) else { return };
    env.extend([
        "ALIYUN_COM_GPU_MEM_CONTAINER=3",
        "ALIYUN_COM_GPU_MEM_DEV=15",
        "ALIYUN_COM_GPU_MEM_UNIT=",
        "CGPU_DISABLE=false",
    ]);
    let said = BundleFacts {
        env: &env,
        annotations: &annotations,
        id: None,
        brought: &brought,
        is_privileged: bundle.is_privileged(),
        reaches: &Reaches::default,
        entry: EntryPoint::Runtime,
        grant: None,
    };
    let config = Config::default();
    match decide(&said, &config.rules()).map(|decision| decision.verdict) {
        Ok(Verdict::Ours(request)) => assert!(request.has_quota(), "{request:?}"),
        Ok(Verdict::NotOurs(reason)) => {
            let is_bare = brought.gpus.is_empty() && brought.allowed.is_empty();
            let is_bare = is_bare && brought.graphics.is_none();
            assert!(is_bare && brought.everything.is_none(), "{reason}: {brought:?}");
        }
        Err(_) => {}
    }
});
