//! What the facts of engines, hooks and NVIDIA's toolkit mean.
//!
//! Owns the commands that configure an engine for cgpu. An engine without cgpu is worth a
//! note, one that is configured with a program that isn't there an error.

use std::path::{Path, PathBuf};

use super::super::facts::{
    Engine, EngineFile, EngineKind, Flaw, Handler, HookFile, Own, Toolkit as Tools,
};
use cgpu_core::plan::Kind;

use super::{Engines, Error, Finding, Fine, Note, Toolkit, Warning, listed};

/// Hook files, and what would enforce a quota.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hooks<'a> {
    pub(super) files: &'a [HookFile],
    pub(super) backend: Kind,
}

pub(super) fn judge(engines: &[Engine], hooks: Hooks<'_>, own: &Own) -> Vec<Finding> {
    // What isn't installed yet is named as it will be.
    let runtime = match own.missing.contains(&"cgpu-runtime") {
        true => "/usr/bin/cgpu-runtime".to_owned(),
        false => own.directory.join("cgpu-runtime").display().to_string(),
    };
    let mut findings: Vec<Finding> =
        engines.iter().flat_map(|engine| one(engine, &runtime)).collect();
    findings.extend(judge_hooks(hooks));
    if findings.is_empty() {
        let what = "none of docker, containerd, CRI-O and podman is installed".to_owned();
        findings.push(
            Finding::new(Engines, "none", Note, what)
                .remedy("install one; hooks/README.md says how CI systems do without"),
        );
    }
    findings
}

/// As `cgpu setup` calls it.
fn word(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Crio => "crio",
        kind => kind.name(),
    }
}

/// What is to be said of an engine; nothing where it is neither there nor configured.
fn one(engine: &Engine, runtime: &str) -> Vec<Finding> {
    let name = engine.kind.name();
    let row = |severity, what| Finding::new(Engines, name, severity, what);
    let mut findings = Vec::new();
    for file in &engine.files {
        let path = file.path.display().to_string();
        match &file.handlers {
            Err(why) => findings.push(
                row(Warning, format!("{path} can't be read: {why}"))
                    .of(path)
                    .remedy(format!("correct it; {name} itself may not start with it")),
            ),
            Ok(handlers) => findings
                .extend(handlers.iter().map(|handler| configured(engine.kind, handler, &path))),
        }
    }
    let known = !findings.is_empty();
    if let Some(program) = engine.program.as_ref().filter(|_| !known) {
        let what = format!("installed, and knows no runtime {}", short(runtime));
        let found = row(Note, what).of(program.display().to_string());
        findings.push(found.remedy(introduction(engine.kind, runtime)));
    }
    if let Some(path) = engine.cri_disabled_by.as_ref().filter(|_| !findings.is_empty()) {
        let path = path.display().to_string();
        let what = format!(
            "{path} names cri in disabled_plugins: Kubernetes can't use this containerd, ctr and \
             nerdctl can"
        );
        // docker's package ships it so, for hosts where docker alone uses it.
        let severity = if known { Warning } else { Note };
        findings.push(
            row(severity, what)
                .of(path)
                .remedy("take cri out of it and restart containerd, if this node is Kubernetes'"),
        );
    }
    findings
}

fn short(program: impl AsRef<Path>) -> String {
    program.as_ref().file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn configured(kind: EngineKind, handler: &Handler, path: &str) -> Finding {
    let row =
        |severity, what| Finding::new(Engines, kind.name(), severity, what).of(path.to_owned());
    let (runtime, program) = (&handler.name, handler.program.display());
    let engine = word(kind);
    if !handler.executable {
        let what = format!("runtime {runtime} of {path} is {program}, which can't be executed");
        return row(Error, what).remedy(format!(
            "install cgpu there, or `cgpu setup {}` for where it is, or correct the path",
            word(kind)
        ));
    }
    match &handler.flaw {
        Some(Flaw::OtherVersion { file, section }) => {
            let what = format!(
                "runtime {runtime} stands in a section of version {section}, and {path} is of \
                 version {file}: containerd doesn't see it"
            );
            row(Warning, what)
                .remedy(format!("`cgpu setup {engine}`, or put it under {}", section_of(*file)))
        }
        Some(Flaw::Overruled { by }) => {
            let what = format!(
                "runtime {runtime} of {path} isn't cgpu's: as the engine reads its files, it runs {by}"
            );
            row(Error, what).remedy(format!(
                "`cgpu setup {engine} --restart`; containers of this runtime have no quota until then"
            ))
        }
        Some(Flaw::TwoSpellings { key }) => {
            let what = format!(
                "runtime {runtime} of {path} has {key} in two spellings, of which releases of \
                 containerd take different ones"
            );
            row(Error, what).remedy(format!("`cgpu setup {engine} --restart`, which leaves one"))
        }
        Some(Flaw::OtherCgroups { systemd }) => {
            let what = format!(
                "runtime {runtime} of {path} has SystemdCgroup = {}, and the runtime of other pods \
                 has {systemd}: the kubelet looks for cgroups where they aren't",
                !systemd
            );
            row(Warning, what).remedy(format!(
                "`cgpu setup {engine} --restart`, or SystemdCgroup = {systemd} in its options"
            ))
        }
        Some(Flaw::OtherSnapshotter { name }) => {
            let others =
                name.as_ref().map_or("the default one".to_owned(), |name| format!("{name:?}"));
            let what = format!(
                "runtime {runtime} of {path} has another snapshotter than the runtime of other \
                 pods, which has {others}: images may be unpacked for that one alone"
            );
            row(Warning, what).remedy(format!("`cgpu setup {engine} --restart`"))
        }
        Some(Flaw::NoAnnotations) => {
            let what = format!(
                "runtime {runtime} is {program} ({path}); not all annotations of pods reach it"
            );
            row(Note, what)
                .remedy("pod_annotations = [\"aliyun.com/*\", \"cgpu/*\"], where pods ask by them")
        }
        None => {
            let lower = handler.lower.as_ref().map(|lower| format!(", over {}", lower.display()));
            let lower = lower.unwrap_or_default();
            row(Fine, format!("runtime {runtime} is {program}{lower} ({path})"))
        }
    }
}

/// Where containerd's CRI has its runtimes, by the version of the file.
fn section_of(version: i64) -> &'static str {
    match version {
        ..=1 => "plugins.cri.containerd.runtimes, or begin the file with version = 2",
        2 => "plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes",
        _ => "plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes",
    }
}

/// How an engine is configured for cgpu.
fn introduction(kind: EngineKind, runtime: &str) -> String {
    match kind {
        EngineKind::Docker => "`cgpu setup docker`, for `--runtime=cgpu`; with `--default` every \
                               container is made by it"
            .to_owned(),
        EngineKind::Podman => format!(
            "`cgpu setup podman`, for `--runtime=cgpu`; or nothing: `podman --runtime {runtime} run`"
        ),
        _ => format!("`cgpu setup {}`, for Kubernetes; with `--default` for every pod", word(kind)),
    }
}

fn judge_hooks(Hooks { files, backend }: Hooks<'_>) -> Vec<Finding> {
    let row = |severity, what| Finding::new(Engines, "hooks", severity, what);
    let mut findings = Vec::new();
    let mut stages = Vec::new();
    let mut good = Vec::new();
    for file in files {
        let path = file.path.display().to_string();
        match &file.hook {
            Err(why) => findings.push(
                row(Warning, format!("{path} can't be read: {why}"))
                    .of(path)
                    .remedy("correct it: engines refuse all containers for it"),
            ),
            Ok(hook) if !hook.executable => findings.push(
                row(
                    Error,
                    format!("{path} calls {}, which can't be executed", hook.program.display()),
                )
                .of(path)
                .remedy("`make install`, or remove the file: no container starts with it"),
            ),
            Ok(hook) => {
                stages.extend(hook.stages.iter().map(String::as_str));
                good.push(path);
            }
        }
    }
    let has = |stage: &str| stages.contains(&stage);
    if has("precreate") && has("createRuntime") {
        let what = format!("two sets of hooks do the same work: {}", listed(&good));
        findings.push(row(Warning, what).remedy("keep one set; see hooks/README.md"));
    } else if has("createRuntime") != has("poststop") && !has("precreate") {
        let what = format!("half of a set of hooks: {}", listed(&good));
        findings.push(
            row(Warning, what).remedy("install createRuntime and poststop; see hooks/README.md"),
        );
    } else if has("precreate") && backend == Kind::Gate {
        let what = format!("{} gives whole GPUs, and refuses quotas under the gate", listed(&good));
        findings.push(row(Note, what).remedy(
            "`cgpu setup podman`, and `podman --runtime cgpu`, or runtime = \"cgpu\" under [engine] in \
             containers.conf",
        ));
    } else if !good.is_empty() {
        findings.push(row(Fine, listed(&good)));
    }
    findings
}

/// Engines with cgpu that give no container what the host's CDI specifications have.
pub(super) fn without_cdi(
    engines: &[Engine],
    claims: Option<&Path>,
    specifications: &[PathBuf],
) -> Vec<Finding> {
    let (severity, consequence) = match (claims, specifications.first()) {
        (Some(claims), _) => {
            let words = format!(
                "cgpu's DRA driver has run here ({}): it doesn't register with the kubelet before, and no pod with a claim starts",
                claims.display()
            );
            (Warning, words)
        }
        (None, Some(specification)) => {
            let words = format!(
                "there is {}: who names GPUs so, as DRA drivers do and NVIDIA's device plugin can, gives none",
                specification.display()
            );
            (Note, words)
        }
        (None, None) => return Vec::new(),
    };
    let knows_us = |file: &EngineFile| file.handlers.as_ref().is_ok_and(|all| !all.is_empty());
    let deaf = engines.iter().filter(|engine| {
        engine.gives_cdi_devices == Some(false) && engine.files.iter().any(knows_us)
    });
    let found = deaf.map(|engine| {
        let what = format!("gives pods no devices by CDI (enable_cdi), and {consequence}");
        Finding::new(Engines, engine.kind.name(), severity, what).remedy(
            "enable_cdi = true under [plugins.\"io.containerd.grpc.v1.cri\"] and a restart, where that is used",
        )
    });
    found.collect()
}

/// NVIDIA's toolkit: there or not, both are well.
pub(super) fn toolkit(tools: &Tools) -> Finding {
    let row = |what| Finding::new(Toolkit, "nvidia", Fine, what);
    let programs: Vec<String> = tools.programs.iter().map(short).collect();
    let cdi: Vec<String> = tools.cdi.iter().map(|path| path.display().to_string()).collect();
    match (programs.is_empty(), cdi.is_empty()) {
        (true, true) => row("not installed, and no CDI specification".to_owned()),
        (true, false) => row(format!("not installed; CDI: {}", listed(&cdi))),
        (false, true) => row(format!("{}; no CDI specification", listed(&programs))),
        (false, false) => row(format!("{}; CDI: {}", listed(&programs), listed(&cdi))),
    }
}
