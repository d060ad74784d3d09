//! This host: its configuration, and what a bundle's request resolves to, a plan and edits of the bundle.
//!
//! Must not know how a record lives, which is [`admission`](crate::admission)'s.

#[cfg(test)]
mod promise;
mod reach;
mod rootless;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::geteuid;
use tracing::warn;

use crate::admission::bundle_marks;
use crate::admission::error::AdmissionError;
use crate::backend::{self, Isolation, Tenant};
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::{self, Kind, Plan, PlannedGpu, Proposal};
use cgpu_core::request::brought_gpus::DriNode;
use cgpu_core::request::claim::{self, ClaimError, ShareName};
use cgpu_core::request::grant::{PodContainer, TOKEN};
use cgpu_core::request::{
    self, Brought, BroughtName, BundleFacts, Decision, DefaultMemory, EntryPoint, Grant, Quoted,
    Request, Rules, Ungranted,
};
use cgpu_host::config::{self, Config, ConfigError, Inject, InventorySource};
use cgpu_host::grants::{Claims, GrantError, Grants};
use cgpu_host::inventory;
use cgpu_host::process;
use cgpu_host::registry::{Record, Registry, RegistryError};
use cgpu_inject::bundle::{self, Bundle, Edits, HookCall};
use cgpu_inject::node_creation::{HostNodes, device_root};
use cgpu_inject::{self as inject, Injection, Missing, Nodes, Purpose};

/// This host's configuration and what belongs to it.
#[derive(Debug, Clone)]
pub struct Host {
    pub config: Config,
    /// The file it came from, by absolute path.
    pub config_path: Option<PathBuf>,
    /// The backend of containers that are made from now on.
    pub backend: Kind,
    /// Why that one, in a sentence for the log.
    pub why_backend: &'static str,
}

impl Host {
    /// The host with that configuration, from that file; its backend is chosen here.
    #[must_use]
    pub fn new(config: Config, config_path: Option<PathBuf>) -> Self {
        let (backend, why_backend) = backend::choose(&config.isolation);
        Host { config, config_path, backend, why_backend }
    }

    /// The same host with its backend chosen again, for a program that runs on: the vendor's module may
    /// have been loaded meanwhile.
    #[must_use]
    pub fn chosen_again(&self) -> Self {
        Host::new(self.config.clone(), self.config_path.clone())
    }

    /// The host as the configuration that `flag` or `CGPU_CONFIG` names has it.
    ///
    /// # Errors
    ///
    /// Where that can't be used.
    pub fn load(flag: Option<&OsStr>) -> Result<Self, ConfigError> {
        let variable = std::env::var_os(config::PATH_VARIABLE);
        let loaded = config::load(flag, variable.as_deref())?;
        Ok(Host::new(loaded.config, loaded.path))
    }

    /// Where its GPUs are learnt of.
    #[must_use]
    pub fn inventory_settings(&self) -> inventory::Settings {
        inventory::Settings {
            source: match self.config.inventory.source {
                InventorySource::Auto => inventory::Source::Auto,
                InventorySource::File => {
                    inventory::Source::File(self.config.inventory.path.clone())
                }
            },
            driver_root: self.config.driver.root.clone(),
            state_dir: self.config.state_dir.clone(),
            proc_root: self.config.driver.proc_root.clone(),
            reserve_mib: self.config.admission.reserve_mib(),
        }
    }

    /// Its GPUs for a container of `request`, by the cache; where that is outgrown, `cgpu gpus
    /// --refresh` is run, and `cgpu gpus` for a user who can't read the cache.
    ///
    /// # Errors
    ///
    /// Where there is no driver, or the child does not do it in time.
    pub fn inventory(&self, request: &Request) -> Result<Inventory, AdmissionError> {
        let config_args = match &self.config_path {
            Some(path) => vec!["--config".into(), path.clone().into_os_string()],
            None => Vec::new(),
        };
        let limit = Duration::from_secs(self.config.inventory.refresh_timeout_s);
        // Looked for only where it is needed: the cache may do.
        let cgpu = own_program("cgpu").unwrap_or_else(|_| "cgpu".into());
        let settings = self.inventory_settings();
        let found = match require_root() {
            Ok(()) => inventory::refreshed(&settings, &cgpu, &config_args, limit),
            Err(_) => inventory::listed(&settings, &cgpu, &config_args, limit),
        };
        found.map_err(|source| match request.wants_driver_by() {
            Some(setting) => AdmissionError::NoGpus { setting: setting.to_string(), source },
            None => source.into(),
        })
    }

    /// Its registry.
    ///
    /// # Errors
    ///
    /// Where the state directory can't be used.
    pub fn registry(&self) -> Result<Registry, RegistryError> {
        let boot_id = process::boot_id(Path::new("/proc"));
        Registry::open(&self.config.state_dir, boot_id)
    }

    /// Its registry for readers: nothing is made or changed.
    ///
    /// # Errors
    ///
    /// Where the state directory can't be read or trusted.
    pub fn check_registry(&self) -> Result<Registry, RegistryError> {
        let boot_id = process::boot_id(Path::new("/proc"));
        Registry::open_read_only(&self.config.state_dir, boot_id)
    }

    /// The rules by which this host decides on requests.
    #[must_use]
    pub fn request_rules(&self) -> Rules<'_> {
        let rules = self.config.rules();
        let default_memory = match self.default_memory_set() {
            Ok(None) => rules.default_memory,
            Ok(Some(mib)) => DefaultMemory::of_mib(mib),
            Err(_) => DefaultMemory::Unreadable,
        };
        Rules { is_gate: self.backend == Kind::Gate, default_memory, ..rules }
    }

    /// What a container gets of each GPU that names GPUs and asks for no quota, in MiB; 0 is the GPU as a whole.
    ///
    /// # Errors
    ///
    /// Where it can't be read what was set.
    pub fn default_memory_mib(&self) -> Result<u64, RegistryError> {
        let set = self.default_memory_set()?;
        Ok(set.unwrap_or_else(|| self.config.admission.default_memory_mib()))
    }

    /// The same, if it was set of the host. A caller that may not read the registry gives out no more than any user
    /// has.
    fn default_memory_set(&self) -> Result<Option<u64>, RegistryError> {
        if Registry::is_host_unset(&self.config.state_dir) {
            return Ok(None);
        }
        match self.check_registry() {
            Ok(registry) => Ok(registry.host_settings()?.default_memory_mib),
            Err(_) => Ok(None),
        }
    }

    /// What becomes of `bundle`, whose container will have the id `id` if that is known.
    ///
    /// # Errors
    ///
    /// If it asks for what can't be meant, or for what this host refuses.
    pub fn decide(
        &self,
        bundle: &Bundle,
        id: Option<&str>,
        entry: EntryPoint,
    ) -> Result<Decision, AdmissionError> {
        let brought = self.brought(bundle);
        let (env, annotations) = (bundle.env()?, bundle.annotations()?);
        let container = PodContainer::of(&annotations);
        // What only root can read no other can have been given.
        let found = match geteuid().is_root() {
            true => self.granted(&env, container.as_ref()),
            false => Ok(None),
        };
        let (grant, unreadable) = match found {
            Ok(grant) => (grant, None),
            // Who names no GPU and no grant is no concern of theirs.
            Err(error) if token(&env).is_none() && !names_share(&env) => (None, Some(error)),
            Err(error) => return Err(error.into()),
        };
        let said = BundleFacts {
            env: &env,
            annotations: &annotations,
            id,
            brought: &brought,
            is_privileged: bundle.is_privileged(),
            reaches: &|| reach::find(bundle, &self.config, self.config_path.as_deref()),
            entry,
            grant: grant.as_ref(),
        };
        let mut rules = self.request_rules();
        let is_exempt =
            |container: &PodContainer| self.config.kubernetes.exempt.contains(&container.namespace);
        if container.as_ref().is_some_and(is_exempt) {
            rules.ungranted = Ungranted::AsAsked;
            rules.refuses_privileged = false;
        }
        let decision = request::decide(&said, &rules)?;
        match unreadable.filter(|_| decision.request().is_some()) {
            Some(error) => Err(error.into()),
            None => Ok(decision),
        }
    }

    /// What Kubernetes has given a container with this environment: by claims, or by the device plugin.
    fn granted(
        &self,
        env: &[&str],
        container: Option<&PodContainer>,
    ) -> Result<Option<Grant>, GrantError> {
        let grant = self.grants().find(token(env), container);
        if !names_share(env) {
            return grant;
        }
        let container = container.ok_or(GrantError::NoPod)?;
        let claims = Claims::at(&self.config.kubernetes.grants).named(env)?;
        let by_claims = claim::merged(env, &claims, &container.namespace, &container.uid)?;
        match (by_claims, grant?) {
            (Some(by_claims), Some(grant)) => {
                Err(ClaimError::TwoWays { claim: by_claims.resource, resource: grant.resource }
                    .into())
            }
            (by_claims, grant) => Ok(by_claims.or(grant)),
        }
    }

    /// Makes the container of `bundle` the holder of what Kubernetes has given it, if it has.
    ///
    /// # Errors
    ///
    /// If its token is unknown or another container's, or the record can't be written.
    pub fn take_grant(&self, bundle: &Bundle) -> Result<(), AdmissionError> {
        let (env, annotations) = (bundle.env()?, bundle.annotations()?);
        // Who comes without a token holds its grant already.
        match token(&env).and_then(|token| Some((token, PodContainer::of(&annotations)?))) {
            Some((token, container)) => Ok(self.grants().take(token, &container)?),
            None => Ok(()),
        }
    }

    /// What Kubernetes has given containers of this host.
    #[must_use]
    pub fn grants(&self) -> Grants {
        Grants::at(&self.config.kubernetes.grants)
    }

    /// What others brought into `bundle` or will bring, with what this host knows of it.
    fn brought(&self, bundle: &Bundle) -> Brought {
        let mut brought = bundle.brought();
        if bundle.hooks().is_some_and(bundle_marks::are_ours) {
            // These nodes are what an earlier create of ours gave.
            brought.forget_nodes();
        }
        if !brought.mig_nodes.is_empty() {
            let proc_root = &self.config.driver.proc_root;
            brought.mig = inject::capabilities::instances(&brought.mig_nodes, proc_root);
        }
        if brought.graphics.is_none() {
            brought.graphics = nvidias_graphics(&brought.dri);
        }
        if self.config.runtime.is_nvidias() {
            brought.nvidia_hook = true;
            let by = || "NVIDIA's runtime, which is the real runtime".to_owned();
            brought.driver_files.get_or_insert_with(by);
        }
        brought
    }

    /// Whether NVIDIA's runtime makes containers with quotas here, and changes their bundles after us.
    #[must_use]
    pub fn may_get_more(&self) -> bool {
        self.config.driver.inject == Inject::NvidiaRuntime || self.config.runtime.is_nvidias()
    }

    /// Sees that NVIDIA's runtime has put nothing into `bundle`, whose container has a quota, past what the
    /// plan of `record` gives.
    ///
    /// # Errors
    ///
    /// If there is something.
    pub fn refuse_more(&self, record: &Record, bundle: &Bundle) -> Result<(), AdmissionError> {
        let plan = &record.plan;
        // Whole, or shared without isolation: nothing is reserved that more could break.
        if plan.backend == Kind::None {
            return Ok(());
        }
        let brought = bundle.brought();
        let is_given = |name: &BroughtName| match name {
            BroughtName::Minor(minor) => plan.gpus.iter().any(|gpu| gpu.minor == *minor),
            // Taken out before it saw them.
            BroughtName::Named(_) | BroughtName::All => true,
        };
        let more = brought.gpus.iter().find(|one| !is_given(&one.gpu)).map(|one| one.by.clone());
        let more = more.or_else(|| brought.graphics.clone());
        match more.or_else(|| nvidias_graphics(&brought.dri)) {
            Some(node) => Err(AdmissionError::MoreByNvidia { node }),
            None => Ok(()),
        }
    }

    /// What `request` resolves to on `inventory`, and with which backend; which GPUs that are is said when it is
    /// registered, if the request leaves it open.
    ///
    /// # Errors
    ///
    /// Where it can't be met whatever the others hold, or nothing here can enforce it.
    pub fn plan(
        &self,
        request: &Request,
        inventory: &Inventory,
    ) -> Result<Proposal, AdmissionError> {
        let proposal =
            plan::resolve(request, inventory, Kind::None, self.config.admission.max_inst)?;
        if proposal.is_whole() {
            return Ok(proposal);
        }
        self.isolation(self.backend).usable()?;
        Ok(proposal.by(self.backend))
    }

    /// The device nodes of `plan`, and how the driver's files come into the container of `bundle`. One that
    /// stays as it was `brought` gets neither from us.
    ///
    /// # Errors
    ///
    /// Where a node isn't there, or the files can't come as the configuration says.
    pub fn driver_of(
        &self,
        plan: &Plan,
        inventory: &Inventory,
        bundle: &Bundle,
        as_brought: bool,
    ) -> Result<(Nodes, Injection), AdmissionError> {
        if as_brought {
            return Ok((Nodes::default(), Injection::as_brought()));
        }
        let nodes = self.nodes(plan, inventory, bundle, Purpose::Create)?;
        inject::link_by_number(&nodes, Path::new("/dev"));
        Ok((nodes, self.injection(plan, inventory, bundle, Purpose::Create)?))
    }

    /// The driver's nodes of this host.
    #[must_use]
    pub fn driver_nodes(&self) -> HostNodes {
        let driver = &self.config.driver;
        let root = device_root(&driver.dev_root, &driver.root, Path::new("/"));
        HostNodes { dev: root.join("dev"), proc_root: driver.proc_root.clone() }
    }

    /// The device nodes of `plan`, and those of MIG that it or `bundle` takes: where NVIDIA's runtime
    /// makes the container, these are its matter. A creation makes those that the host lacks.
    ///
    /// # Errors
    ///
    /// If one of them isn't there, and can't be made.
    pub fn nodes(
        &self,
        plan: &Plan,
        inventory: &Inventory,
        bundle: &Bundle,
        purpose: Purpose,
    ) -> Result<Nodes, AdmissionError> {
        let from_file = self.config.inventory.source == InventorySource::File;
        let missing = match plan.backend {
            Kind::None if from_file => Missing::Presume,
            _ if purpose != Purpose::Create => Missing::Foresee,
            _ => Missing::Make,
        };
        let driver = &self.config.driver;
        let host_nodes = self.driver_nodes();
        let mut nodes = inject::nodes(plan, inventory, &host_nodes, missing)?;
        if driver.inject != Inject::NvidiaRuntime {
            let trusts_env = self.config.admission.trust_env;
            let of_mig = inject::capabilities::nodes(plan, bundle, trusts_env, &host_nodes)?;
            nodes.devices.extend(of_mig.devices);
            nodes.binds.extend(of_mig.binds);
        }
        if bundle.has_user_namespace() {
            nodes.bind_devices(&host_nodes.dev);
        }
        Ok(nodes)
    }

    /// How the driver's files come into the container of `bundle`.
    ///
    /// # Errors
    ///
    /// Where they can't, and the configuration says how they must.
    pub fn injection(
        &self,
        plan: &Plan,
        inventory: &Inventory,
        bundle: &Bundle,
        purpose: Purpose,
    ) -> Result<Injection, AdmissionError> {
        if purpose == Purpose::Create {
            // The driver's files are mounted in the state directory: it must be ours.
            self.registry()?;
        }
        let brought = self.brought(bundle);
        Ok(inject::injection(&self.config, (plan, inventory), (bundle, &brought), purpose)?)
    }

    /// Decides by which means the driver's files come into a container: one with a quota
    /// gets them as `[driver] inject` says, one whose GPUs are its as a whole as `whole` does. `has_nvidia`
    /// says whether NVIDIA's runtime can make it.
    pub fn decide_injection(&mut self, is_whole: bool, has_nvidia: impl FnOnce(&Config) -> bool) {
        if is_whole {
            let driver = &self.config.driver;
            let inject = driver.whole.inject(driver.inject, || has_nvidia(&self.config));
            self.config.driver.inject = inject;
        }
    }

    /// What the plan of `record`, made from `request`, changes in `bundle`.
    ///
    /// # Errors
    ///
    /// Where the bundle can't have what isolation needs there.
    pub fn edits(
        &self,
        (record, request): (&Record, &Request),
        bundle: &Bundle,
        nodes: Nodes,
        driver: Edits,
        hooks: Vec<HookCall>,
    ) -> Result<Edits, AdmissionError> {
        let plan = &record.plan;
        if request.is_as_brought() {
            return Ok(Edits { hooks, ..Edits::default() });
        }
        let uuids: Vec<&str> = plan.gpus.iter().map(PlannedGpu::given_uuid).collect();
        // A container whose quota is switched off, or that wants no GPU, keeps the word that was given,
        // if that alone says which GPUs.
        let keeps = uuids.is_empty() || (request.is_disabled() && request.is_nvidias_alone());
        let reported = !keeps;
        let visible = (request::setting_names::NVIDIA_VISIBLE_DEVICES.to_owned(), uuids.join(","));
        let visible = reported.then_some(visible);
        // Nodes of GPUs are ours to give: what isolation knows of the container are these.
        let more = driver.devices.into_iter().filter(|more| {
            nodes.devices.iter().all(|node| node.path != more.path)
                && nodes.binds.iter().all(|bind| bind.destination != more.path)
        });
        let mut devices: Vec<_> = nodes.devices.iter().cloned().chain(more).collect();
        let (mut binds, mut allowed, mut withheld) = (nodes.binds, nodes.allowed, nodes.withheld);
        if plan.backend != Kind::None {
            let modeset = inject::modeset(&self.driver_nodes().dev);
            let number = (modeset.major, modeset.minor);
            devices.retain(|node| node.path != modeset.path && (node.major, node.minor) != number);
            binds.retain(|bind| bind.destination != modeset.path);
            allowed.retain(|node| node.path != modeset.path);
            withheld.push(modeset);
            withheld.extend(inject::graphics(Path::new("/sys")));
        }
        let env = driver.env.into_iter().chain(visible);
        let mut edits = Edits {
            env: env.chain(self.variables(plan, &bundle.env()?)).collect(),
            devices,
            binds,
            allowed,
            withheld,
            // What else the engine or its user gives it is theirs to give, and not what an earlier
            // create of ours gave.
            keeps_other_gpus: plan.is_whole()
                && !self.config.admission.exclusive
                && !bundle.hooks().is_some_and(bundle_marks::are_ours),
            // A second hook must not act on what we hold.
            renamed_env: match plan.backend {
                Kind::None => Vec::new(),
                Kind::Gate | Kind::Km => request::setting_names::SET_ASIDE.to_vec(),
            },
            hooks,
            // However the driver comes now, what an earlier create of this bundle mounted of it
            // may be no longer there.
            mounts_from: Some(inject::tree::home(&self.config.state_dir).display().to_string()),
            ..driver
        };
        self.isolation(plan.backend).edit(bundle.seccomp(), &mut edits)?;
        let leads = |path: &str| bundle::leads_to_mps(Path::new(path));
        let mps = bundle.mounted().find(|(to, from)| leads(to) || leads(from));
        if let Some((path, _)) = mps.filter(|_| edits.without_mps) {
            let id = &record.key.id;
            warn!(
                id,
                path,
                "not mounted: the MPS server allocates for its clients, past quotas; run its \
                 clients in a container without a quota"
            );
        }
        Ok(edits)
    }

    /// Variables that isolation gives a process that has `env`.
    #[must_use]
    pub fn variables(&self, plan: &Plan, env: &[&str]) -> Vec<(String, String)> {
        let is_set = |name: &str| env.iter().any(|item| item.split('=').next() == Some(name));
        let given = backend::variables(plan).iter().filter(|(name, _)| !is_set(name));
        given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// The backend of that kind on this host.
    #[must_use]
    pub fn isolation(&self, kind: Kind) -> Box<dyn Isolation> {
        backend::isolation(kind, &self.config)
    }
}

/// Which of these nodes of the kernel's graphics is an NVIDIA GPU's, as a message has it.
fn nvidias_graphics(nodes: &[DriNode]) -> Option<String> {
    if nodes.is_empty() {
        return None;
    }
    let nvidias = inject::graphics(Path::new("/sys"));
    let is_nvidias = |dri: &&DriNode| {
        nvidias.iter().any(|node| match dri.minor {
            Some(minor) => minor == node.minor,
            None => Path::new(&node.path).starts_with(&dri.path),
        })
    };
    nodes.iter().find(is_nvidias).map(|dri| format!("node {}", Quoted(&dri.path)))
}

/// A record, as backends know it.
pub(crate) fn tenant(record: &Record) -> Tenant<'_> {
    Tenant { id: &record.key.id, short_id: &record.short_id, plan: &record.plan }
}

/// Sees that we are the host's root: neither another user, nor root of a user namespace
/// that an engine without privileges made.
///
/// # Errors
///
/// Where we are not.
pub fn require_root() -> Result<(), AdmissionError> {
    let whole = std::fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
    if geteuid().is_root() && whole { Ok(()) } else { Err(AdmissionError::Rootless) }
}

/// The absolute path of one of our programs: they are installed next to each other.
///
/// # Errors
///
/// Where it isn't there.
pub fn own_program(program: &'static str) -> Result<PathBuf, AdmissionError> {
    let own = std::env::current_exe().unwrap_or_default();
    let path = own.with_file_name(program);
    match path.is_absolute() && path.is_file() {
        true => Ok(path),
        false => Err(AdmissionError::Incomplete { program, own }),
    }
}

/// The last value of the variable that names a grant.
fn token<'a>(env: &[&'a str]) -> Option<&'a str> {
    let named = env.iter().filter_map(|item| item.split_once('='));
    named.filter(|(name, _)| *name == TOKEN).map(|(_, value)| value).next_back()
}

/// Whether a variable names a share of a claim.
fn names_share(env: &[&str]) -> bool {
    env.iter().any(|item| ShareName::of(item).is_some())
}

/// Whether the container of `bundle` may be started without a configuration that can be read: no
/// setting of it asks for anything.
pub(crate) fn names_nothing(bundle: &Bundle, id: Option<&str>) -> bool {
    let host = Host::new(config::Config::default(), None);
    let is_ours = bundle.hooks().is_some_and(bundle_marks::are_ours);
    let decision = host.decide(bundle, id, EntryPoint::Runtime);
    let asks =
        |decision: Decision| decision.request().is_some_and(|one| !one.may_be_unregistered());
    !is_ours && decision.is_ok_and(|decision| !asks(decision))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cgpu-metrics` and others run on for weeks, and the vendor's module may be loaded meanwhile.
    #[test]
    fn rechosen_host_sees_a_module_loaded_since() {
        let root = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.isolation.km_root = root.path().to_owned();
        let host = Host::new(config, None);
        assert_eq!(host.backend, Kind::Gate);
        std::fs::write(root.path().join("inst_ctl"), "").unwrap();
        assert_eq!((host.backend, host.chosen_again().backend), (Kind::Gate, Kind::Km));
    }
}
