//! No `NVIDIA_REQUIRE_*` of an image breaks its reader, and no refusal is long.
#![no_main]

use cgpu_inject::requirements::{Facts, check};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let variables = || text.lines().filter_map(|line| line.split_once('='));
    let named = text.lines().map(|line| ("NVIDIA_REQUIRE_CUDA", line));
    let driver = "535.161.08".parse().map(Facts::of_driver);
    for facts in driver.into_iter().chain([Facts::default()]) {
        for env in [variables().collect::<Vec<_>>(), named.clone().collect()] {
            if let Err(error) = check(env.into_iter(), &facts) {
                assert!(error.to_string().len() < 2000);
            }
        }
    }
});
