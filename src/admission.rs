//! The steps that runtime, hooks and `cgpu` share: from a bundle's request to a
//! registered container with its isolation on, and back.
//!
//! Owns their order, so that nothing is promised twice and nothing leaks: a plan is
//! made before the lock is taken; under the lock stale containers are collected, the
//! plan admitted, the record written; isolation goes on while there is a record, and
//! off before it goes. Must not know command lines or how errors are shown.

mod error;
mod gpus;
mod lost;
pub mod marks;

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tracing::{info, warn};

pub use error::AdmissionError;
pub use lost::{Collected, Condition, Orphan, UNSTARTED_S, deletion};

use crate::backend::{self, Isolation, Launch, Recruit, Tenant, Way};
use crate::bundle::{self, Bundle, Edits, HookCall};
use crate::config::{self, Config, ConfigError, Inject, InventorySource};
use crate::events::{Cause, Event, Kind as EventKind, Teller, plain};
use crate::failpoint::failpoint;
use crate::inject::{self, Injection, Missing, Mode, Nodes, Purpose};
use crate::inventory::{self, Inventory};
use crate::names;
use crate::plan::{self, Change, ChangeError, Kind, Plan, PlannedGpu, Refusal};
use crate::process::{self, ProcessId};
use crate::registry::{Holder, Key, Locked, Look, Record, Registry, RegistryError, short_id};
use crate::report;
use crate::request::{self, Request, Rules};

/// The most characters of a name in a message.
const LONGEST_NAME: usize = 60;

/// What becomes of a record that couldn't be ended; after the reason.
pub const UNDONE: &str = "a container that has failed or ended is still registered: the next create \
    tries again, and `cgpu gc` does now";

/// What the log has of a privileged container with a quota.
pub const PRIVILEGED: &str = "this container is privileged: it can reach past any isolation; start \
    it without --privileged where its quota has to hold";

/// How long a container that was killed takes to be gone.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// This host's configuration and what belongs to it.
#[derive(Debug, Clone)]
pub struct Host {
    /// The configuration.
    pub config: Config,
    /// The file it came from, by absolute path.
    pub config_path: Option<PathBuf>,
    /// How containers come behind their isolation.
    pub way: Way,
}

impl Host {
    /// The host as the configuration that `flag` or `CGPU_CONFIG` names has it.
    ///
    /// # Errors
    ///
    /// Where that can't be used.
    pub fn load(flag: Option<&OsStr>) -> Result<Self, ConfigError> {
        let variable = std::env::var_os(config::PATH_VARIABLE);
        let loaded = config::load(flag, variable.as_deref())?;
        Ok(Host { config: loaded.config, config_path: loaded.path, way: Way::Bundle })
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
        }
    }

    /// Its GPUs for a container of `request`, by the cache; where that is outgrown, `cgpu gpus
    /// --refresh` is run.
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
        let found = inventory::refreshed(&self.inventory_settings(), &cgpu, &config_args, limit);
        found.map_err(|source| match request.wants_driver_by() {
            Some(setting) => AdmissionError::NoGpus { setting: setting.clone(), source },
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

    /// Its registry for those who only look: nothing is made or changed.
    ///
    /// # Errors
    ///
    /// Where the state directory can't be read or trusted.
    pub fn look_at_registry(&self) -> Result<Registry, RegistryError> {
        let boot_id = process::boot_id(Path::new("/proc"));
        Registry::look(&self.config.state_dir, boot_id)
    }

    /// What `bundle` asks for.
    ///
    /// # Errors
    ///
    /// Where that can't be meant.
    pub fn request(&self, bundle: &Bundle) -> Result<Request, AdmissionError> {
        let annotations = bundle.annotations()?;
        let mut request = request::read(&bundle.env()?, annotations, self.config.trust())?;
        let accepts = self.config.admission.accept_nvidia_visible_devices_envvar_when_unprivileged;
        // GPUs that somebody else has brought are there whatever we accept.
        if !accepts && !bundle.is_privileged() && !inject::is_brought(bundle) {
            request.forget_named_by_variables();
        }
        Ok(request)
    }

    /// What `request` comes to on `inventory`, and with which backend.
    ///
    /// # Errors
    ///
    /// Where it can't be met whatever the others hold, or nothing here can enforce it.
    pub fn plan(&self, request: &Request, inventory: &Inventory) -> Result<Plan, AdmissionError> {
        let mut plan = plan::resolve(request, inventory, Kind::None, &self.config.rules())?;
        if plan.gpus.iter().any(|gpu| gpu.memory_limit_bytes.is_some()) {
            let (kind, _) = backend::choose(&self.config.isolation);
            self.isolation(kind).usable()?;
            plan.backend = kind;
        }
        Ok(plan)
    }

    /// The device nodes of `plan`, and those of MIG that it or `bundle` takes: where NVIDIA's runtime
    /// makes the container, these are its matter.
    ///
    /// # Errors
    ///
    /// Where one of them isn't there.
    pub fn nodes(
        &self,
        plan: &Plan,
        inventory: &Inventory,
        bundle: &Bundle,
    ) -> Result<Nodes, AdmissionError> {
        let from_file = self.config.inventory.source == InventorySource::File;
        let missing = match plan.backend {
            Kind::None if from_file => Missing::Presume,
            _ => Missing::Refuse,
        };
        let driver = &self.config.driver;
        let mut nodes = inject::nodes(plan, inventory, &driver.root, missing)?;
        if driver.inject != Inject::NvidiaRuntime {
            let trusts_env = self.config.admission.trust_env;
            let roots = (driver.root.as_path(), driver.proc_root.as_path());
            let of_mig = inject::capabilities::nodes(plan, bundle, trusts_env, roots)?;
            nodes.devices.extend(of_mig.devices);
            nodes.binds.extend(of_mig.binds);
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
        Ok(inject::injection(&self.config, plan, inventory, bundle, purpose)?)
    }

    /// Whether a container of `request`, which names GPUs, may be started as if it named none: who
    /// isn't root can give out nothing, and no rule says that it must be held.
    #[must_use]
    pub fn may_leave_alone(&self, request: &Request) -> bool {
        let Rules { exclusive, require_quota, .. } = self.config.rules();
        !request.has_quota() && !exclusive && !require_quota && require_root().is_err()
    }

    /// Decides by which means the driver's files come into the container of `plan`: one with a quota
    /// gets them as `[driver] inject` says, one without as `whole` does. `has_nvidia` says whether
    /// NVIDIA's runtime can make it.
    pub fn decide_injection(&mut self, plan: &Plan, has_nvidia: impl FnOnce(&Config) -> bool) {
        if plan.is_whole() {
            let driver = &self.config.driver;
            let inject = driver.whole.inject(driver.inject, || has_nvidia(&self.config));
            self.config.driver.inject = inject;
        }
    }

    /// What the plan of `record` changes in `bundle`.
    ///
    /// # Errors
    ///
    /// Where the bundle can't have what isolation needs there.
    pub fn edits(
        &self,
        record: &Record,
        bundle: &Bundle,
        nodes: Nodes,
        driver: Edits,
        hooks: Vec<HookCall>,
    ) -> Result<Edits, AdmissionError> {
        let plan = &record.plan;
        let uuids: Vec<&str> = plan.gpus.iter().map(PlannedGpu::given_uuid).collect();
        // Who switched a quota off, or wants no GPU, keeps the word that was given, where that alone
        // says which GPUs.
        let keeps =
            uuids.is_empty() || (plan.unenforced && self.request(bundle)?.is_nvidias_alone());
        let told = !keeps;
        let visible = (request::name::NVIDIA_VISIBLE_DEVICES.to_owned(), uuids.join(","));
        let visible = told.then_some(visible);
        // Nodes of GPUs are ours to give: what isolation knows of the container are these.
        let more = driver.devices.into_iter().filter(|more| {
            nodes.devices.iter().all(|node| node.path != more.path)
                && nodes.binds.iter().all(|bind| bind.destination != more.path)
        });
        let mut devices: Vec<_> = nodes.devices.iter().cloned().chain(more).collect();
        let (mut binds, mut withheld) = (nodes.binds, nodes.withheld);
        if plan.backend != Kind::None {
            let modeset = inject::modeset(&self.config.driver.root);
            let number = (modeset.major, modeset.minor);
            devices.retain(|node| node.path != modeset.path && (node.major, node.minor) != number);
            binds.retain(|bind| bind.destination != modeset.path);
            withheld.push(modeset);
            withheld.extend(inject::graphics(Path::new("/sys")));
        }
        let env = driver.env.into_iter().chain(visible);
        let mut edits = Edits {
            env: env.chain(self.variables(plan, &bundle.env()?)).collect(),
            devices,
            binds,
            withheld,
            // What else the engine or its user gives it is theirs to give, and not what an earlier
            // create of ours gave.
            keeps_other_gpus: plan.is_whole()
                && !self.config.admission.exclusive
                && !bundle.hooks().is_some_and(marks::are_ours),
            hooks,
            // However the driver comes now, what an earlier create of this bundle mounted of it
            // may be no longer there.
            mounts_from: Some(inject::tree::home(&self.config.state_dir).display().to_string()),
            ..driver
        };
        self.isolation(plan.backend).edit(tenant(record), bundle.seccomp(), &mut edits)?;
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
        let given = self.isolation(plan.backend).variables(plan).into_iter();
        let given = given.filter(|(name, _)| !is_set(name));
        given.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// The backend of that kind on this host.
    #[must_use]
    pub fn isolation(&self, kind: Kind) -> Box<dyn Isolation> {
        backend::isolation(kind, &self.config, self.way)
    }

    /// Starts whom a [`launch`](Self::launch) for `request` will need, if all goes well until then:
    /// what's to be done before is done meanwhile. Where nobody can be started, a launch says so.
    #[must_use]
    pub fn recruit(&self, request: &Request) -> Option<Recruit> {
        let (kind, _) = backend::choose(&self.config.isolation);
        let isolation = request.has_quota().then(|| self.isolation(kind))?;
        isolation.recruit().ok().flatten()
    }

    /// Starts what has to be there before the runtime makes the container of `record`.
    ///
    /// # Errors
    ///
    /// Where it can't be started; the record is still to be released.
    pub fn launch(&self, record: &Record, how: Launch<'_>) -> Result<(), AdmissionError> {
        Ok(self.isolation(record.plan.backend).launch(tenant(record), how)?)
    }

    /// Brings this process behind the isolation of the container of `record`.
    ///
    /// # Errors
    ///
    /// Where it can't: then it must not become a runtime.
    pub fn enter(&self, record: &Record) -> Result<(), AdmissionError> {
        Ok(self.isolation(record.plan.backend).enter(tenant(record))?)
    }

    /// The record of `key`, without waiting for the lock.
    ///
    /// # Errors
    ///
    /// Where it can't be read, or who could have written it isn't root.
    pub fn registered(&self, key: &Key) -> Result<Option<Record>, AdmissionError> {
        Ok(self.look_at_registry()?.find(key)?)
    }

    /// Whether `plan` would be admitted now for the bundle in `dir`; changes nothing.
    ///
    /// # Errors
    ///
    /// Where it would not.
    pub fn would_admit(&self, plan: &Plan, dir: &Path) -> Result<(), AdmissionError> {
        let registry = self.look_at_registry()?;
        let living = registry.living()?;
        let others = living.iter().filter(|record| record.bundle != dir);
        let holdings: Vec<_> = others.map(Record::holding).collect();
        plan::admit(plan, &holdings, &self.limits(&registry)?)
            .map_err(|refusal| named(refusal, &registry))
    }

    /// Registers a container under `key`: nothing that it was promised can be promised
    /// again. The event of it, and so the one line that the log has of a create, says what the
    /// container gets, by whom, its `name`, and its driver `files`, where they come by us.
    ///
    /// # Errors
    ///
    /// Where others hold too much, or the key is in use; then nothing is registered.
    pub fn reserve(
        &self,
        key: Key,
        bundle: &Path,
        plan: Plan,
        holder: Holder,
        (name, files): (Option<&str>, Option<Mode>),
    ) -> Result<Record, AdmissionError> {
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, Look::Quick)?;
        if let Some(old) = locked.find(&key)? {
            self.give_up(&registry, &mut locked, &old, bundle, &holder)?;
        }
        let limits = self.limits(&registry)?;
        if plan::admit(&plan, locked.holdings(), &limits).is_err() {
            // Before a refusal, the closer look: a pid may have been used again.
            self.collect_locked(&mut locked, Look::Close)?;
            plan::admit(&plan, locked.holdings(), &limits)
                .map_err(|refusal| named(refusal, &registry))?;
        }
        let short_id = short_id(&key, |name| locked.has_short_id(name));
        let record = Record {
            bundle: bundle.to_owned(),
            short_id,
            boot_id: registry.boot_id().to_owned(),
            holder,
            plan,
            key,
        };
        locked.put(&record)?;
        self.share_out(&locked, &record.plan.gpus);
        failpoint("reserved");
        for gpu in plan::unheld(&record.plan, locked.holdings_but(&record.key)) {
            let id = &record.key.id;
            warn!(
                id,
                gpu,
                "this GPU is one container's as a whole, and others have quotas on it: nothing \
                 keeps the one from what was promised to the others; give them different GPUs, or \
                 set admission.exclusive"
            );
        }
        self.tell_of(&record, name, files);
        Ok(record)
    }

    /// Who tells of this host's containers.
    #[must_use]
    pub fn teller(&self) -> Teller {
        Teller::of_host(&self.config.state_dir)
    }

    /// The event of a create.
    fn tell_of(&self, record: &Record, name: Option<&str>, files: Option<Mode>) {
        let Record { key: Key { id, root }, short_id, plan, .. } = record;
        // Why a whole container has no backend needs no word.
        let (kind, why) = backend::choose(&self.config.isolation);
        let chosen = (kind == plan.backend && !plan.is_whole()).then_some(why);
        // Another container's has the id's first characters.
        let is_others = !id.starts_with(short_id.trim_end_matches('_'));
        self.teller().tell(Event {
            chosen: chosen.map(str::to_owned),
            driver_files: files.map(|files| files.name().to_owned()),
            short_id: is_others.then(|| short_id.clone()),
            not_held: self.shares_not_held(plan),
            ..Event::new(EventKind::Created).of(id, name, root).having(plan)
        });
    }

    /// The event of a create that is refused for `error`, whose container is called `name`.
    pub fn tell_of_refusal(
        &self,
        key: &Key,
        name: Option<&str>,
        (error, cause): (&dyn Error, Cause),
    ) {
        // The directory is made, or seen not to be ours; who isn't root can write nothing there.
        if require_root().is_err() || self.registry().is_err() {
            return;
        }
        let reason = report::sentence(error);
        let reason = reason.strip_prefix("cgpu: ").unwrap_or(&reason);
        let event = Event::new(EventKind::Refused).of(&key.id, name, &key.root);
        self.teller().tell(Event { cause: Some(cause), ..event.because(reason) });
    }

    /// Makes room for a container of `bundle` that `heir` will hold, whose key is that of `old`.
    fn give_up(
        &self,
        registry: &Registry,
        locked: &mut Locked<'_>,
        old: &Record,
        bundle: &Path,
        heir: &Holder,
    ) -> Result<(), AdmissionError> {
        let process = old.holder.process();
        let by = match process {
            Some(process) if Some(process) == heir.process() => None,
            Some(process) => Some(format!("has process {}", process.pid)),
            // Of the same bundle: it's made again.
            None if old.bundle == bundle => None,
            None => Some(format!("has the bundle {}", old.bundle.display())),
        };
        match by {
            Some(by) if !registry.is_stale(old) => {
                let Key { id, root } = old.key.clone();
                Err(RegistryError::InUse { id, root, by }.into())
            }
            _ => self.end(locked, old, Some("its container is made anew")),
        }
    }

    /// Turns isolation on for the container under `key`, whose first process is `init`.
    /// Says whether this container is registered: what one of the same key left, who ended
    /// without a word, is another's, with other GPUs perhaps.
    ///
    /// # Errors
    ///
    /// Where isolation isn't on; then the container is no longer registered, and must
    /// not start.
    pub fn activate(
        &self,
        key: &Key,
        bundle: &Path,
        init: Option<ProcessId>,
    ) -> Result<bool, AdmissionError> {
        let registry = self.registry()?;
        // Until the record says that isolation is on: whoever collects meanwhile would end
        // what is just being made, and the rest of it would belong to nobody.
        let mut locked = registry.lock()?;
        let Some(reserved) = locked.find(key)? else { return Ok(false) };
        let holder = Holder::Active { init };
        if reserved.holder == holder {
            return Ok(true);
        }
        if matches!(reserved.holder, Holder::Active { .. }) || registry.is_stale(&reserved) {
            return Ok(false);
        }
        let record = Record { holder, bundle: bundle.to_owned(), ..reserved };
        if let Err(error) = self.isolate(&mut locked, &record) {
            if let Err(more) =
                self.end(&mut locked, &record, Some("its isolation can't be turned on"))
            {
                let error: &dyn Error = &more;
                warn!(id = record.key.id, error, "{UNDONE}");
            }
            return Err(error);
        }
        Ok(true)
    }

    /// Isolation first: a record that says active is never in the wrong, and until then
    /// it is the runtime's, whose end ends whatever was made.
    fn isolate(&self, locked: &mut Locked<'_>, record: &Record) -> Result<(), AdmissionError> {
        self.isolation(record.plan.backend).activate(tenant(record))?;
        failpoint("hook-isolated");
        locked.put(record)?;
        failpoint("hook-activated");
        Ok(())
    }

    /// Gives the record of `from` the key `to`, as of which it was reserved, now that its bundle is
    /// known.
    ///
    /// # Errors
    ///
    /// Where the registry can't be used.
    pub fn rename(&self, from: &Key, to: &Key, bundle: &Path) -> Result<(), AdmissionError> {
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        if let Some(record) = locked.find(from)? {
            if let Some(before) = locked.find(to)? {
                self.end(&mut locked, &before, Some("its container is made anew"))?;
            }
            // Never two records of one short id, nor the quota twice. If we end in between,
            // the create has failed, and nothing is left of it to be collected.
            locked.remove(from)?;
            let record = Record { key: to.clone(), ..record };
            locked.put(&record)?;
            let name = names::of(&Record { bundle: bundle.to_owned(), ..record });
            let event = Event::new(EventKind::Named).of(&to.id, name.as_deref(), &to.root);
            self.teller().tell(Event { former_id: Some(from.id.clone()), ..event });
        }
        Ok(())
    }

    /// The record of the container `id` with that bundle, whoever registered it.
    ///
    /// # Errors
    ///
    /// Where the registry can't be used.
    pub fn find_by_bundle(
        &self,
        bundle: &Path,
        id: &str,
    ) -> Result<Option<Record>, AdmissionError> {
        let registry = self.registry()?;
        let locked = registry.lock()?;
        Ok(locked.find_by_bundle(bundle, id)?)
    }

    /// Ends the isolation and the registration of the container under `key`, if there is
    /// one.
    ///
    /// # Errors
    ///
    /// Where something is left; the record then stays, and is collected later.
    pub fn release(&self, key: &Key) -> Result<bool, AdmissionError> {
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        let Some(record) = locked.find(key)? else { return Ok(false) };
        self.end(&mut locked, &record, None)?;
        Ok(true)
    }

    /// Changes the container that `word` means ([`names::chosen`]); its plan after that.
    ///
    /// # Errors
    ///
    /// Where there is no such container, `change` can't be meant for it, others hold too
    /// much, or the backend refuses; then it has what it had.
    pub fn set(
        &self,
        word: &str,
        change: impl FnOnce(&Plan) -> Result<Change, ChangeError>,
    ) -> Result<Plan, AdmissionError> {
        self.set_one(|registry| names::chosen(word, registry.records()?), change)
    }

    /// The same of the container whose key that is.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    pub fn set_of(&self, key: &Key, change: Change) -> Result<Plan, AdmissionError> {
        let gone = || RegistryError::Unknown { id: key.id.clone() };
        self.set_one(|registry| registry.find(key)?.ok_or_else(gone), |_| Ok(change))
    }

    fn set_one(
        &self,
        choose: impl FnOnce(&Registry) -> Result<Record, RegistryError>,
        change: impl FnOnce(&Plan) -> Result<Change, ChangeError>,
    ) -> Result<Plan, AdmissionError> {
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, Look::Close)?;
        let before = choose(&registry)?;
        let change = change(&before.plan)?;
        let limits = self.limits(&registry)?;
        let plan = before.plan.after(change, limits.max_weight(&before.plan))?;
        // Who asks for no more weight than it has is kept from nothing by the weights of others.
        let limits =
            if plan.weight <= before.plan.weight { limits.with_any_weight() } else { limits };
        plan::admit(&plan, locked.holdings_but(&before.key), &limits)
            .map_err(|refusal| named(refusal, &registry))?;
        // While it changes it holds the larger of both: whatever happens in between, no
        // more is promised than can be kept.
        let between = before.plan.covering(&plan);
        locked.put(&Record { plan: between, ..before.clone() })?;
        let after = Record { plan, ..before.clone() };
        let isolation = self.isolation(after.plan.backend);
        if let Err(error) = isolation.set(tenant(&before), change) {
            locked.put(&before)?;
            return Err(error.into());
        }
        locked.put(&after)?;
        self.share_out(&locked, &after.plan.gpus);
        self.tell_of_change(&before, &after, change);
        Ok(after.plan)
    }

    /// The event of a change.
    fn tell_of_change(&self, before: &Record, after: &Record, change: Change) {
        let kind = match change {
            Change::MemoryLimit { .. } => EventKind::Resized,
            Change::Weight(_) | Change::HighPriority(_) => EventKind::Changed,
        };
        let name = names::of(after);
        let event = Event::new(kind).of(&after.key.id, name.as_deref(), &after.key.root);
        self.teller().tell(match change {
            Change::MemoryLimit { gpu_index, bytes } => {
                let gpu = before.plan.gpus.iter().find(|gpu| gpu.index == gpu_index);
                Event {
                    gpu: Some(gpu_index),
                    gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
                    former_quota_bytes: gpu.and_then(|gpu| gpu.memory_limit_bytes),
                    quota_bytes: Some(bytes),
                    ..event
                }
            }
            Change::Weight(weight) => Event { weight: Some(weight), ..event },
            Change::HighPriority(high) => Event { high_priority: Some(high), ..event },
        });
    }

    /// As [`release`](Self::release), for the hook of a container that has ended: waits
    /// for its process, and leaves alone what another one holds by now. runc frees the id
    /// before it calls the hooks, so that the next container of that id may be there
    /// already. `caller` is the runtime that calls the hook: where the create failed, it
    /// still holds the reservation.
    ///
    /// # Errors
    ///
    /// Where something is left, as under [`release`](Self::release).
    pub fn release_ended(&self, key: &Key, caller: i32) -> Result<bool, AdmissionError> {
        let registry = self.registry()?;
        let deadline = Instant::now() + END_PATIENCE;
        loop {
            let mut locked = registry.lock()?;
            let Some(record) = locked.find(key)? else { return Ok(false) };
            if registry.is_stale_but_for(&record, caller) || record.holder.process().is_none() {
                self.end(&mut locked, &record, None)?;
                return Ok(true);
            }
            drop(locked);
            if Instant::now() >= deadline {
                // A container of this id is there again.
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends what nothing keeps alive any more, and what is left of monitors whose container has no
    /// record; says what that was.
    ///
    /// # Errors
    ///
    /// Where the registry can't be used.
    pub fn collect(&self) -> Result<Collected, AdmissionError> {
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        let records = self.collect_locked(&mut locked, Look::Close)?;
        let mut orphans = lost::orphans(&self.config.state_dir, |name| locked.has_short_id(name))?;
        orphans.retain(|orphan| {
            let id = &orphan.short_id;
            if orphan.keeper.is_some() {
                return true;
            }
            match self.isolation(Kind::Gate).deactivate(id) {
                Ok(()) => info!(id, "removed: what was left of a monitor without a record"),
                Err(error) => {
                    let error: &dyn Error = &error;
                    warn!(id, error, "what is left of a monitor without a record can't be removed");
                    return false;
                }
            }
            true
        });
        Ok(Collected { records, orphans })
    }

    fn collect_locked(
        &self,
        locked: &mut Locked<'_>,
        look: Look,
    ) -> Result<Vec<Record>, AdmissionError> {
        // Where there is no room to write it down, it is looked up again next time.
        if let Err(error) = locked.settle() {
            let error: &dyn Error = &error;
            warn!(error, "a record can't be brought up to date: the next create tries again");
        }
        if look == Look::Close {
            locked.forget_missing()?;
        }
        let mut collected = Vec::new();
        for record in locked.stale(look)? {
            match self.end(locked, &record, Some("collected: its container is gone")) {
                Ok(()) => collected.push(record),
                // It stays registered, holds its memory, and is tried again next time.
                Err(error) => {
                    let error: &dyn Error = &error;
                    warn!(id = record.key.id, error, "{UNDONE}");
                }
            }
        }
        Ok(collected)
    }

    /// Ends isolation and registration, and tells so; `why` where that isn't the usual end.
    fn end(
        &self,
        locked: &mut Locked<'_>,
        record: &Record,
        why: Option<&str>,
    ) -> Result<(), AdmissionError> {
        self.isolation(record.plan.backend).deactivate(&record.short_id)?;
        failpoint("hook-deactivated");
        locked.remove(&record.key)?;
        self.share_out(locked, &record.plan.gpus);
        let Key { id, root } = &record.key;
        let event = Event::new(EventKind::Removed).of(id, names::of(record).as_deref(), root);
        self.teller().tell(match why {
            Some(why) => event.because(why),
            None => event,
        });
        Ok(())
    }
}

/// The refusal of `refusal`, with the names of those who hold what was asked for: read only where
/// there is one.
fn named(refusal: Refusal, registry: &Registry) -> AdmissionError {
    let living = registry.living().unwrap_or_default();
    let mut files = names::Files::default();
    let mut name_of = |id: &str| {
        let record = living.iter().find(|record| record.key.id == id)?;
        Some(plain(&files.name(record)?, LONGEST_NAME))
    };
    refusal.with_names(&mut name_of).into()
}

fn tenant(record: &Record) -> Tenant<'_> {
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

/// The absolute path of one of our programs: they are installed beside each other.
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
