//! The steps that runtime, hooks and `cgpu` share: from a bundle's request to a
//! registered container with its isolation on, and back.
//!
//! Owns their order, so that nothing is reserved twice and nothing leaks: a proposal is
//! made before the lock is taken; under the lock stale containers are collected, the
//! proposal's GPUs chosen, if that is still open, the plan admitted, the record written; the driver's nodes
//! and files are found for that plan; isolation goes on while there is a record, and
//! off before it goes. Must not know command lines or how errors are shown.

pub mod bundle_marks;
mod container_history;
pub mod error;
mod gpu_settings;
mod orphans;

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::{info, warn};

pub use error::AdmissionError;
pub use orphans::{Collected, Condition, Orphan, UNSTARTED_S, deletion};

use crate::backend::{Launch, Launcher, Leftover};
use crate::container_names;
use crate::host::{Host, require_root, tenant};
use cgpu_core::plan::{self, Change, ChangeError, Holding, Kind, Plan, Proposal, Refusal};
use cgpu_core::request::Decision;
use cgpu_host::events::{Cause, Event, EventSink, Kind as EventKind, plain};
use cgpu_host::failpoint::failpoint;
use cgpu_host::process::ProcessId;
use cgpu_host::registry::{
    Holder, Key, Locked, Record, Registry, RegistryError, StaleCheck, short_id,
};
use cgpu_host::report;
use cgpu_inject::Mode;
use cgpu_inject::bundle::Bundle;
use cgpu_monitor::gate::own_cgroup;

/// The most characters of a name in a message.
const LONGEST_NAME: usize = 60;

/// What becomes of a record that couldn't be ended; after the reason.
pub const UNDONE: &str = "a container that has failed or ended is still registered: the next create \
    tries again, and `cgpu gc` does now";

/// Why a quota is released that was reserved after its container's end: no program has a way to its memory any more, or
/// the monitor was ended.
const NO_MONITOR: &str = "the monitor of what it left has ended";

/// How long a container that was killed takes to be gone, and its monitor to search what it has left.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// How long all monitors together may take to search what gone containers have left, whose records are collected.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(1);

/// What of a host is reserved, and by whom: the records of its registry, changed under its lock.
#[derive(Debug, Clone, Copy)]
pub struct Admission<'a> {
    host: &'a Host,
}

impl<'a> Admission<'a> {
    #[must_use]
    pub fn of(host: &'a Host) -> Self {
        Admission { host }
    }
}

impl Admission<'_> {
    /// Starts what has to be there before the runtime makes the container of `record`; `begun` is what
    /// the host's backend has begun of that.
    ///
    /// # Errors
    ///
    /// Where it can't be started; the record is still to be released.
    pub fn launch(
        &self,
        record: &Record,
        how: Launch<'_>,
        begun: Option<Launcher>,
    ) -> Result<(), AdmissionError> {
        let kind = record.plan.backend;
        let begun = begun.filter(|_| kind == self.host.backend);
        let launch = begun.unwrap_or_else(|| self.host.isolation(kind).begin_launch());
        Ok(launch(tenant(record), how)?)
    }

    /// Brings this process behind the isolation of the container of `record`.
    ///
    /// # Errors
    ///
    /// Where it can't: then it must not become a runtime.
    pub fn enter(&self, record: &Record) -> Result<(), AdmissionError> {
        Ok(self.host.isolation(record.plan.backend).enter(tenant(record))?)
    }

    /// The record of `key`, without waiting for the lock.
    ///
    /// # Errors
    ///
    /// If it can't be read, or a user other than root could have written it.
    pub fn registered(&self, key: &Key) -> Result<Option<Record>, AdmissionError> {
        Ok(self.host.check_registry()?.find(key)?)
    }

    /// The plan that `proposal` would resolve to now for the bundle in `dir`; changes nothing.
    ///
    /// # Errors
    ///
    /// Where it would not be admitted.
    pub fn would_admit(&self, proposal: &Proposal, dir: &Path) -> Result<Plan, AdmissionError> {
        let registry = self.host.check_registry()?;
        let living = registry.living()?;
        let others = living.iter().filter(|record| record.bundle != dir || record.is_leaked());
        let holdings: Vec<_> = others.map(Record::holding).collect();
        let placed = proposal.place(
            &holdings,
            &self.limits(&registry)?,
            self.host.config.admission.placement,
        );
        placed.map_err(|refusal| named(refusal, &registry))
    }

    /// Registers a container under `key`: its GPUs are chosen, if the request left that open, and nothing that
    /// is reserved for it can be reserved again. It isn't reported yet ([`report_creation`](Self::report_creation)).
    ///
    /// # Errors
    ///
    /// If others hold too much, or the key is in use; then nothing is registered.
    pub fn reserve(
        &self,
        key: Key,
        bundle: &Path,
        proposal: &Proposal,
        holder: Holder,
    ) -> Result<Record, AdmissionError> {
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, StaleCheck::Quick)?;
        if let Some(old) = locked.find(&key)? {
            self.give_up(&registry, &mut locked, &old, bundle, &holder)?;
        }
        self.require_unused(&mut locked, proposal.shares(), &key)?;
        let limits = self.limits(&registry)?;
        let placement = self.host.config.admission.placement;
        let plan = match proposal.place(locked.holdings(), &limits, placement) {
            Ok(plan) => plan,
            Err(_) => {
                // Before a refusal, the closer check: a pid may have been used again.
                self.collect_locked(&mut locked, StaleCheck::Close)?;
                let placed = proposal.place(locked.holdings(), &limits, placement);
                placed.map_err(|refusal| named(refusal, &registry))?
            }
        };
        let is_given = |uuid: &str| plan.gpus.iter().any(|gpu| gpu.given_uuid() == uuid);
        let is_neighbour = |of: &Holding| of.gpus.iter().any(|(uuid, _)| is_given(uuid));
        let closed = self.closed(&locked, is_neighbour)?;
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
        drop(locked);
        self.handle_closed(closed);
        Ok(record)
    }

    /// Sees that no other container uses one of these shares of claims than the one of `key`.
    fn require_unused(
        &self,
        locked: &mut Locked<'_>,
        shares: &[String],
        key: &Key,
    ) -> Result<(), AdmissionError> {
        // Few containers have claims: they aren't in the index.
        if shares.is_empty() {
            return Ok(());
        }
        let mut check = StaleCheck::Quick;
        loop {
            let mut others = locked.registry().records()?.into_iter();
            let in_use = others.find_map(|other| {
                let is_other = other.key != *key && !other.is_leaked();
                let used = &other.plan.caveats.shares;
                let share = used.iter().find(|share| is_other && shares.contains(share))?.clone();
                Some((share, other))
            });
            match in_use {
                None => return Ok(()),
                Some((share, other)) if check == StaleCheck::Close => {
                    let name = container_names::of(&other);
                    let by = name.map_or(other.key.id, |name| plain(&name, LONGEST_NAME));
                    return Err(AdmissionError::ShareInUse { share, by });
                }
                // Before a refusal, the closer check: a pid may have been used again.
                Some(_) => {
                    self.collect_locked(locked, StaleCheck::Close)?;
                    check = StaleCheck::Close;
                }
            }
        }
    }

    /// The sink of the events of this host's containers.
    #[must_use]
    pub fn sink(&self) -> EventSink {
        EventSink::of_host(&self.host.config.state_dir)
    }

    /// The event of a container creation, and so the one line that the log has of it: what the container of
    /// `record` gets, by whom, its `name`, and its driver `files`, if they come by us.
    pub fn report_creation(&self, record: &Record, name: Option<&str>, files: Option<Mode>) {
        let Record { key: Key { id, root }, short_id, plan, .. } = record;
        // Why a whole container has no backend needs no word.
        let is_chosen = plan.backend == self.host.backend && !plan.is_whole();
        // Another container's has the id's first characters.
        let is_others = !id.starts_with(short_id.trim_end_matches('_'));
        let sink = self.sink();
        sink.report(Event {
            chosen: is_chosen.then(|| self.host.why_backend.to_owned()),
            driver_files: files.map(|files| files.name().to_owned()),
            short_id: is_others.then(|| short_id.clone()),
            not_held: self.shares_not_held(plan),
            ..Event::new(EventKind::Created).of(id, name, root).having(plan)
        });
        for warning in plan.warnings() {
            sink.report(Event::new(EventKind::Warned).of(id, name, root).because(&warning));
        }
    }

    /// The events of a bundle's settings that nearly mean something.
    pub fn report_near_misses(&self, key: &Key, bundle: &Bundle, decision: &Decision) {
        if decision.near_misses.is_empty()
            || require_root().is_err()
            || self.host.registry().is_err()
        {
            return;
        }
        cgpu_host::log::init(&self.host.config.log);
        let name = container_names::of_bundle(&key.id, bundle);
        for near in &decision.near_misses {
            let event = Event::new(EventKind::Warned).of(&key.id, name.as_deref(), &key.root);
            self.sink().report(event.because(&near.to_string()));
        }
    }

    /// The event of a container creation that is refused for `error`, whose container is called `name`.
    pub fn report_refusal(
        &self,
        key: &Key,
        name: Option<&str>,
        (error, cause): (&dyn Error, Cause),
    ) {
        // The directory is made, or seen not to be ours; a user other than root can write nothing there.
        if require_root().is_err() || self.host.registry().is_err() {
            return;
        }
        let reason = report::sentence(error);
        let reason = reason.strip_prefix("cgpu: ").unwrap_or(&reason);
        let event = Event::new(EventKind::Refused).of(&key.id, name, &key.root);
        self.sink().report(Event { cause: Some(cause), ..event.because(reason) });
    }

    /// Frees the key of `old` for a container of `bundle` that `successor` will hold.
    fn give_up(
        &self,
        registry: &Registry,
        locked: &mut Locked<'_>,
        old: &Record,
        bundle: &Path,
        successor: &Holder,
    ) -> Result<(), AdmissionError> {
        let process = old.holder.process();
        let by = match process {
            Some(process) if Some(process) == successor.process() => None,
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
            _ => {
                match self.host.isolation(old.plan.backend).leftover(&old.short_id, COLLECT_TIMEOUT)
                {
                    Leftover::WatchedBy(monitor) => self.keep_leaked(locked, old, monitor),
                    Leftover::Nothing | Leftover::Unknown => {
                        self.end(locked, old, Some("its container is recreated"))
                    }
                }
            }
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
        let registry = self.host.registry()?;
        // Until the record says that isolation is on: a collector would meanwhile end what is
        // just being made, and the rest of it would have no owner.
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
        self.host.isolation(record.plan.backend).activate(tenant(record))?;
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
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        if let Some(record) = locked.find(from)? {
            if let Some(before) = locked.find(to)? {
                self.end(&mut locked, &before, Some("its container is recreated"))?;
            }
            // Never two records of one short id, nor the quota twice. If we end in between,
            // the create has failed, and nothing is left of it to be collected.
            locked.remove(from)?;
            let record = Record { key: to.clone(), ..record };
            locked.put(&record)?;
            let name = container_names::of(&Record { bundle: bundle.to_owned(), ..record });
            let event = Event::new(EventKind::Named).of(&to.id, name.as_deref(), &to.root);
            self.sink().report(Event { former_id: Some(from.id.clone()), ..event });
        }
        Ok(())
    }

    /// The record of the container `id` with that bundle, whichever program registered it.
    ///
    /// # Errors
    ///
    /// Where the registry can't be used.
    pub fn find_by_bundle(
        &self,
        bundle: &Path,
        id: &str,
    ) -> Result<Option<Record>, AdmissionError> {
        let registry = self.host.registry()?;
        let locked = registry.lock()?;
        Ok(locked.find_by_bundle(bundle, id)?)
    }

    /// Ends the isolation and the registration of the container under `key`, if there is
    /// one. Where a program of the host has a way to its memory, the quota stays reserved.
    ///
    /// # Errors
    ///
    /// Where something is left; the record then stays, and is collected later.
    pub fn release(&self, key: &Key) -> Result<bool, AdmissionError> {
        let registry = self.host.registry()?;
        let leftover = self.leftover(&registry, key, None)?;
        let mut locked = registry.lock()?;
        let Some(record) = locked.find(key)? else { return Ok(false) };
        self.end_or_keep(&mut locked, &record, &leftover)?;
        Ok(true)
    }

    /// As [`release_unmade`](Self::release_unmade), of a reservation that was not reported.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn withdraw(&self, key: &Key) -> Result<(), AdmissionError> {
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        match locked.find(key)? {
            Some(record) => self.unregister(&mut locked, &record),
            None => Ok(()),
        }
    }

    /// As [`release`](Self::release), of a container that isn't made: it can have left nothing.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn release_unmade(&self, key: &Key) -> Result<bool, AdmissionError> {
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        let Some(record) = locked.find(key)? else { return Ok(false) };
        self.end(&mut locked, &record, None)?;
        Ok(true)
    }

    /// What is left of the container under `key`, and its short id: asked before the registry is locked, since its
    /// monitor may take its time. `caller` is the runtime whose hook asks, if one does.
    fn leftover(
        &self,
        registry: &Registry,
        key: &Key,
        caller: Option<i32>,
    ) -> Result<Option<(String, Leftover)>, AdmissionError> {
        let record = registry.find(key)?;
        Ok(record.map(|Record { short_id, plan, holder, .. }| {
            // The runtime that makes a container (`run`, or a failed container creation) is behind its filter itself,
            // so that the monitor sees no end before the hook's.
            let is_creator = holder.process().is_some_and(|by| Some(by.pid) == caller);
            let timeout = if is_creator { Duration::ZERO } else { END_TIMEOUT };
            let leftover = self.host.isolation(plan.backend).leftover(&short_id, timeout);
            (short_id, leftover)
        }))
    }

    /// Ends a container that has ended, or keeps its quota reserved; `leftover` is what was found left of the one with
    /// that short id.
    fn end_or_keep(
        &self,
        locked: &mut Locked<'_>,
        record: &Record,
        leftover: &Option<(String, Leftover)>,
    ) -> Result<(), AdmissionError> {
        match leftover {
            Some((short_id, Leftover::WatchedBy(monitor))) if *short_id == record.short_id => {
                self.keep_leaked(locked, record, *monitor)
            }
            _ => self.end(locked, record, None),
        }
    }

    /// Keeps the quota of a container that has ended reserved as long as its monitor lives, under a key of its own:
    /// its engine may use the id again.
    fn keep_leaked(
        &self,
        locked: &mut Locked<'_>,
        record: &Record,
        monitor: ProcessId,
    ) -> Result<(), AdmissionError> {
        if record.is_leaked() {
            return Ok(());
        }
        let key = record.key.leaked(&record.short_id);
        let holder = Holder::Leaked { monitor };
        // If we end in between, the record before it is found stale, and this is done again.
        locked.put(&Record { key, holder, ..record.clone() })?;
        locked.remove(&record.key)?;
        self.share_out(locked, &record.plan.gpus);
        Ok(())
    }

    /// Changes the container that `word` means ([`container_names::chosen`]); its plan after that.
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
        self.set_one(
            |registry| {
                let mut records = registry.records()?;
                records.retain(|record| !record.is_leaked());
                container_names::chosen(word, records)
            },
            change,
        )
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
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, StaleCheck::Close)?;
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
        // more is reserved than can be had.
        let between = before.plan.covering(&plan);
        locked.put(&Record { plan: between, ..before.clone() })?;
        let after = Record { plan, ..before.clone() };
        let isolation = self.host.isolation(after.plan.backend);
        if let Err(error) = isolation.set(tenant(&before), change) {
            locked.put(&before)?;
            return Err(error.into());
        }
        locked.put(&after)?;
        self.share_out(&locked, &after.plan.gpus);
        // A monitor itself reports a quota that it was given.
        let is_reported =
            matches!(change, Change::MemoryLimit { .. }) && after.plan.backend == Kind::Gate;
        if !is_reported {
            self.report_change(&before, &after, change);
        }
        Ok(after.plan)
    }

    /// The event of a change.
    fn report_change(&self, before: &Record, after: &Record, change: Change) {
        let kind = match change {
            Change::MemoryLimit { .. } => EventKind::Resized,
            Change::Weight(_) | Change::HighPriority(_) => EventKind::Changed,
        };
        let name = container_names::of(after);
        let event = Event::new(kind).of(&after.key.id, name.as_deref(), &after.key.root);
        self.sink().report(match change {
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
        let registry = self.host.registry()?;
        // A monitor that has seen the last way to the memory of its container end becomes this hook.
        if let Some(own) = ProcessId::own() {
            let mut locked = registry.lock()?;
            if let Some(leaked) = locked.find_leaked(own)? {
                self.end(&mut locked, &leaked, Some(NO_MONITOR))?;
                return Ok(true);
            }
        }
        let leftover = self.leftover(&registry, key, Some(caller))?;
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            let mut locked = registry.lock()?;
            let Some(record) = locked.find(key)? else { return Ok(false) };
            if registry.is_stale_but_for(&record, caller) || record.holder.process().is_none() {
                self.end_or_keep(&mut locked, &record, &leftover)?;
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
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        let records = self.collect_locked(&mut locked, StaleCheck::Close)?;
        let closed = self.closed(&locked, |_| true)?;
        let mut orphans =
            orphans::orphans(&self.host.config.state_dir, |name| locked.has_short_id(name))?;
        orphans.retain(|orphan| {
            let id = &orphan.short_id;
            if orphan.monitor.is_some() {
                return true;
            }
            match self.host.isolation(Kind::Gate).deactivate(id) {
                Ok(()) => info!(id, "removed: what was left of a monitor without a record"),
                Err(error) => {
                    let error: &dyn Error = &error;
                    warn!(id, error, "what is left of a monitor without a record can't be removed");
                    return false;
                }
            }
            true
        });
        own_cgroup::remove_unused(|name| locked.has_short_id(name));
        drop(locked);
        self.handle_closed(closed);
        Ok(Collected { records, orphans })
    }

    fn collect_locked(
        &self,
        locked: &mut Locked<'_>,
        check: StaleCheck,
    ) -> Result<Vec<Record>, AdmissionError> {
        // If no space is left to write it down, it is determined again next time.
        if let Err(error) = locked.settle() {
            let error: &dyn Error = &error;
            warn!(error, "a record can't be brought up to date: the next create tries again");
        }
        if check == StaleCheck::Close {
            locked.forget_missing()?;
        }
        let mut collected = Vec::new();
        let asked = Instant::now();
        for record in locked.stale(check)? {
            let timeout = match check {
                StaleCheck::Quick => Duration::ZERO,
                StaleCheck::Close => COLLECT_TIMEOUT.saturating_sub(asked.elapsed()),
            };
            let leftover =
                self.host.isolation(record.plan.backend).leftover(&record.short_id, timeout);
            let ended = match leftover {
                Leftover::WatchedBy(monitor) => match self.keep_leaked(locked, &record, monitor) {
                    Ok(()) => continue,
                    retained => retained,
                },
                // Its monitor lives, and a container creation doesn't wait for it: it will be collected, or exits
                // by itself.
                Leftover::Unknown if check == StaleCheck::Quick => continue,
                Leftover::Nothing | Leftover::Unknown => {
                    self.end(locked, &record, Some("collected: its container is gone"))
                }
            };
            match ended {
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

    /// Ends isolation and registration.
    fn unregister(&self, locked: &mut Locked<'_>, record: &Record) -> Result<(), AdmissionError> {
        self.host.isolation(record.plan.backend).deactivate(&record.short_id)?;
        failpoint("hook-deactivated");
        locked.remove(&record.key)?;
        self.share_out(locked, &record.plan.gpus);
        Ok(())
    }

    /// Ends isolation and registration, and reports it; `why` if that isn't the usual end.
    fn end(
        &self,
        locked: &mut Locked<'_>,
        record: &Record,
        why: Option<&str>,
    ) -> Result<(), AdmissionError> {
        self.unregister(locked, record)?;
        let root = &record.key.root;
        let name = container_names::of(record);
        let event = Event::new(EventKind::Removed).of(record.container_id(), name.as_deref(), root);
        self.sink().report(match why {
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
    let mut files = container_names::Files::default();
    let mut name_of = |id: &str| {
        let record = living.iter().find(|record| record.key.id == id)?;
        Some(plain(&files.name(record)?, LONGEST_NAME))
    };
    refusal.with_names(&mut name_of).into()
}
