//! `cgpu gpus`: the GPUs of this host, as a table or as an inventory file.

use std::io::Write;

use anyhow::Result;

use crate::nvml::{probe, refresh};
use cgpu_core::gpu::{Gpu, GpuState, Inventory};
use cgpu_core::units::bytes_to_mib;
use cgpu_host::inventory::{Settings, cached};

use super::Format;
use super::table::{aligned, or_dash, printable};

const HEADER: [&str; 7] = ["INDEX", "UUID", "MINOR", "BUS ID", "MEMORY (MiB)", "STATE", "NAME"];

/// The column of numbers people compare.
const MEMORY_COLUMN: usize = 4;

/// Prints the GPUs to `out`: the cached ones, or the driver's where `refresh_cache` asks
/// for them (then they are cached) or nothing is cached (then they aren't).
///
/// # Errors
///
/// Where the GPUs can't be learnt, cached or printed.
pub fn run(
    settings: &Settings,
    format: Format,
    refresh_cache: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let inventory = if refresh_cache {
        refresh(settings)?
    } else {
        match cached(settings)? {
            Some(inventory) => inventory,
            None => probe(settings)?,
        }
    };
    match format {
        Format::Text => out.write_all(table(&inventory).as_bytes())?,
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, inventory.gpus())?;
            writeln!(out)?;
        }
    }
    Ok(out.flush()?)
}

/// The GPUs as an aligned table, MIG devices below their GPU.
fn table(inventory: &Inventory) -> String {
    let mut rows = vec![HEADER.map(str::to_owned)];
    for gpu in inventory.gpus() {
        rows.push(gpu_row(gpu));
        rows.extend(mig_rows(gpu));
    }
    aligned(&rows, &[MEMORY_COLUMN])
}

fn gpu_row(gpu: &Gpu) -> [String; HEADER.len()] {
    let state = match gpu.state {
        GpuState::Lost => "lost",
        GpuState::Ok if gpu.mig_enabled => "mig",
        GpuState::Ok => "ok",
    };
    [
        gpu.index.to_string(),
        printable(&gpu.uuid),
        gpu.minor.to_string(),
        or_dash(printable(&gpu.bus_id)),
        bytes_to_mib(gpu.memory_bytes).to_string(),
        state.to_owned(),
        printable(&gpu.name),
    ]
}

/// The MIG devices of `gpu`, numbered as containers ask for them: `GPU:DEVICE`.
fn mig_rows(gpu: &Gpu) -> impl Iterator<Item = [String; HEADER.len()]> {
    gpu.mig_devices.iter().map(|mig| {
        [
            format!("{}:{}", gpu.index, mig.index),
            printable(&mig.uuid),
            "-".to_owned(),
            "-".to_owned(),
            mig.memory_mib.to_string(),
            "-".to_owned(),
            "MIG device".to_owned(),
        ]
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use cgpu_host::inventory::Source;

    const GPUS: &str = r#"[
        {"index":0,"uuid":"GPU-c09d11f5-9a2e-4f0c-b6a1-1f8a40a3e4d2","minor":1,
         "bus_id":"0000:00:07.0","name":"Tesla V100-SXM2-16GB","memory_mib":16130},
        {"index":1,"uuid":"GPU-a","minor":0,"bus_id":"0000:00:08.0","name":"A100 \u001b[31m80GB\n\u202e",
         "memory_mib":81920,"mig_enabled":true,
         "mig_devices":[{"index":2,"uuid":"MIG-5","memory_mib":9728}]},
        {"index":2,"uuid":"GPU-unknown-index-2","memory_mib":0,"state":"lost"}
    ]"#;

    fn printed(format: Format) -> String {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("gpus.json");
        fs::write(&path, GPUS).unwrap();
        let settings = Settings { source: Source::File(path), ..Settings::default() };
        let mut out = Vec::new();
        run(&settings, format, false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// The table of GPUs is aligned, and no control character of a driver's string reaches the
    /// terminal.
    #[test]
    fn gpu_table_is_aligned_and_escapes_driver_strings() {
        let expected = "\
INDEX  UUID                                      MINOR  BUS ID        MEMORY (MiB)  STATE  NAME
0      GPU-c09d11f5-9a2e-4f0c-b6a1-1f8a40a3e4d2  1      0000:00:07.0         16130  ok     Tesla V100-SXM2-16GB
1      GPU-a                                     0      0000:00:08.0         81920  mig    A100 \\u{1b}[31m80GB\\n\\u{202e}
1:2    MIG-5                                     -      -                     9728  -      MIG device
2      GPU-unknown-index-2                       2      -                        0  lost
";
        assert_eq!(printed(Format::Text), expected);
    }

    #[test]
    fn the_json_is_an_inventory_file() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("gpus.json");
        let json = printed(Format::Json);
        fs::write(&path, &json).unwrap();
        let settings = Settings { source: Source::File(path), ..Settings::default() };
        let mut out = Vec::new();
        run(&settings, Format::Json, true, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), json);
        assert!(json.starts_with("[\n  {\n    \"index\": 0,\n") && json.ends_with("]\n"));
    }
}
