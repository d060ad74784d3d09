//! `cgpu inspect`: what creating a bundle's container would do, without doing it.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::Format;
use super::table::{aligned, printable};
use crate::nvml;
use cgpu::admission::Admission;
use cgpu::host;
use cgpu::host::Host;
use cgpu::runtime::{nvidia, real};
use cgpu_core::plan::Plan;
use cgpu_core::request::{EntryPoint, Request, Verdict};
use cgpu_core::units::bytes_to_mib;
use cgpu_host::inventory;
use cgpu_inject::bundle::Bundle;
use cgpu_inject::{Injection, Mode, Purpose};

/// Prints the plan for the bundle in `dir`, or why there is none.
///
/// # Errors
///
/// Where the create would be refused, with its reason.
pub fn run(mut host: Host, dir: &Path, format: Format, out: &mut dyn Write) -> Result<()> {
    let bundle = Bundle::load(dir, Path::new("config.json"))?;
    let decision = host.decide(&bundle, None, EntryPoint::Runtime)?;
    let mut warnings: Vec<String> = decision.near_misses.iter().map(ToString::to_string).collect();
    let (plan, reason) = match &decision.verdict {
        Verdict::NotOurs(reason) => (None, Some(reason.clone())),
        Verdict::Ours(request) => (Some(planned(&mut host, request, &bundle)?), None),
    };
    if let Some((plan, _)) = &plan {
        warnings.extend(plan.warnings());
    }
    match (format, &plan, &reason) {
        (Format::Json, ..) => {
            let plan = plan.as_ref().map(|(plan, _)| plan);
            let all = json!({"plan": plan, "reason": reason, "warnings": warnings});
            serde_json::to_writer_pretty(&mut *out, &all)?;
            writeln!(out)?;
        }
        (Format::Text, Some((plan, injection)), _) => {
            let held = Admission::of(&host).shares_not_held(plan).is_none();
            out.write_all(text(plan, held).as_bytes())?;
            let why = printable(&injection.why);
            writeln!(out, "driver files: {} ({why})", injection.mode.name())?;
        }
        (Format::Text, None, reason) => {
            writeln!(out, "not in effect: {}", reason.as_deref().unwrap_or_default())?;
        }
    }
    if format == Format::Text {
        for warning in &warnings {
            writeln!(out, "warning: {}", printable(warning))?;
        }
    }
    Ok(out.flush()?)
}

/// What creating the container of `bundle` would result in, and how the driver's files would come.
fn planned(host: &mut Host, request: &Request, bundle: &Bundle) -> Result<(Plan, Injection)> {
    host::require_root()?;
    // Unlike a container creation it leaves no cache behind.
    let settings = host.inventory_settings();
    let inventory = match inventory::cached(&settings)? {
        Some(inventory) => inventory,
        None => nvml::probe(&settings)?.reserving(settings.reserve_mib),
    };
    let proposal = host.plan(request, &inventory)?;
    let plan = Admission::of(host).would_admit(&proposal, bundle.dir())?;
    if request.is_as_brought() {
        return Ok((plan, Injection::as_brought()));
    }
    host.decide_injection(plan.is_whole(), |config| {
        let path = std::env::var_os("PATH");
        let real = real::find(&config.runtime.candidates, path.as_deref());
        real.is_ok_and(|real| nvidia::makes(&config.driver, &real))
    });
    host.nodes(&plan, &inventory, bundle, Purpose::Inspect)?;
    let injection = host.injection(&plan, &inventory, bundle, Purpose::Inspect)?;
    if injection.mode == Mode::NvidiaRuntime {
        nvidia::runtime(&host.config.driver)?;
    }
    Ok((plan, injection))
}

fn text(plan: &Plan, held: bool) -> String {
    let mut rows = vec![["GPU", "UUID", "LIMIT (MiB)", "TOTAL (MiB)"].map(str::to_owned)];
    for gpu in &plan.gpus {
        let limit = gpu.memory_limit_bytes.map(|bytes| bytes_to_mib(bytes).to_string());
        rows.push([
            gpu.given_index(),
            printable(gpu.given_uuid()),
            limit.unwrap_or_else(|| "whole".to_owned()),
            bytes_to_mib(gpu.memory_total_bytes).to_string(),
        ]);
    }
    let priority = if plan.high_priority { "high" } else { "normal" };
    let held = if held { "" } else { " (not held on these GPUs)" };
    format!(
        "backend {} (enforces {}), weight {}, priority {priority}{held}\n{}",
        plan.backend,
        plan.backend.holds(),
        plan.weight,
        aligned(&rows, &[2, 3])
    )
}
