//! Whether a record is still needed. Pure: the world is asked by [`Facts`].
//!
//! Other processes go on during a check: the runtime writes its state and exits, another process hands
//! a record on to the container's process. So each fact is true of one moment only, and what matters is
//! the order of the questions. A record that is held by the runtime, and after it by the process that
//! the runtime's state names, is finished only if the runtime had exited *before* the state named
//! no process: the runtime writes its state first, and exits then.

use std::path::Path;

use super::record::{Holder, Record};
use crate::process::ProcessId;

/// Whom a runtime's own state of a container names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum First {
    /// A process that lives.
    Alive(ProcessId),
    /// There is no state, or its process has exited.
    NoProcess,
    /// It can't be read: a container may live by it.
    Unknown,
}

/// What can be asked of the world; an answer is true of the moment in which it is given.
pub(super) trait Facts {
    /// Whether that very process is there; one that can't be checked is.
    fn is_alive(&mut self, process: ProcessId) -> bool;

    /// The process that the runtime's state names.
    fn first(&mut self, state_file: &Path) -> First;

    /// Whether that many seconds have passed since the boot.
    fn is_past(&mut self, boot_s: u64) -> bool;

    /// Whether a bundle is there; one that can't be checked is.
    fn has_bundle(&mut self, bundle: &Path) -> bool;
}

/// `record` with the container's process as its holder, where the runtime's state names one.
pub(super) fn seen(record: Record, facts: &mut impl Facts) -> Record {
    let Holder::Launched { state_file, .. } = &record.holder else { return record };
    match facts.first(state_file) {
        First::Alive(init) => Record { holder: Holder::Active { init: Some(init) }, ..record },
        First::NoProcess | First::Unknown => record,
    }
}

/// Whether nothing keeps `record` alive any more, in the boot of that id.
pub(super) fn has_ended(record: &Record, boot_id: &str, facts: &mut impl Facts) -> bool {
    if is_of_another_boot(record, boot_id) {
        return true;
    }
    match &record.holder {
        Holder::Reserved { by: process }
        | Holder::Leaked { monitor: process }
        | Holder::Active { init: Some(process) } => !facts.is_alive(*process),
        // In this order: see above.
        Holder::Launched { by, state_file } => {
            !facts.is_alive(*by) && facts.first(state_file) == First::NoProcess
        }
        Holder::Announced { until_boot_s, by } => {
            facts.is_past(*until_boot_s) || by.is_some_and(|by| !facts.is_alive(by))
        }
        Holder::Active { init: None } => !facts.has_bundle(&record.bundle),
    }
}

/// Whether the processes of `record` are of another boot than that of `boot_id`. If the kernel
/// reports no id, or reported none when the record was made, that can't be determined: `false`.
pub(super) fn is_of_another_boot(record: &Record, boot_id: &str) -> bool {
    !boot_id.is_empty() && !record.boot_id.is_empty() && record.boot_id != boot_id
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::registry::Key;
    use cgpu_core::plan::{Kind, Plan};

    const BY: ProcessId = ProcessId { pid: 10, start_ticks: 1 };
    const INIT: ProcessId = ProcessId { pid: 11, start_ticks: 2 };

    fn record(holder: Holder) -> Record {
        Record {
            key: Key { root: "/r".into(), id: "a".into() },
            bundle: "/b".into(),
            short_id: "a___________".into(),
            boot_id: "boot".into(),
            holder,
            plan: Plan {
                backend: Kind::Gate,
                gpus: vec![],
                weight: 1,
                high_priority: false,
                caveats: cgpu_core::plan::Caveats::default(),
            },
        }
    }

    fn launched() -> Record {
        record(Holder::Launched { by: BY, state_file: "/r/a/state.json".into() })
    }

    /// A step of the processes that make, use and end a container. A step that can't be taken in the state
    /// of the world is none.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// The runtime starts the container's process.
        Starts,
        /// It writes its state: from now on the container is there.
        Writes,
        /// The launcher ends: after its work, or killed before.
        LauncherEnds,
        /// A process that has the lock writes down which process the state names.
        Settles,
        /// The container's process ends.
        InitEnds,
        /// `runc delete` removes the state.
        Deletes,
    }

    #[derive(Debug, Clone)]
    struct World {
        record: Record,
        launcher: bool,
        started: bool,
        init: bool,
        state: bool,
    }

    impl World {
        fn new() -> Self {
            World { record: launched(), launcher: true, started: false, init: false, state: false }
        }

        fn take(&mut self, step: Step) {
            match step {
                Step::Starts if self.launcher && !self.started => {
                    (self.started, self.init) = (true, true);
                }
                Step::Writes if self.launcher && self.started => self.state = true,
                Step::LauncherEnds => {
                    self.launcher = false;
                    // A container's process whose runtime has written no state waits for it, and
                    // ends with it.
                    self.init &= self.state;
                }
                Step::Settles if !self.launcher => {
                    let mut now = Now(self);
                    let seen = seen(now.0.record.clone(), &mut now);
                    self.record = seen;
                }
                Step::InitEnds => self.init = false,
                Step::Deletes if !self.init => self.state = false,
                _ => {}
            }
        }

        /// Whether a container is there, or can still come: nothing of it may be collected.
        fn lives(&self) -> bool {
            self.init || (self.launcher && !self.started)
        }
    }

    /// The world while nothing happens.
    struct Now<'a>(&'a mut World);

    impl Facts for Now<'_> {
        fn is_alive(&mut self, process: ProcessId) -> bool {
            match process {
                BY => self.0.launcher,
                INIT => self.0.init,
                _ => false,
            }
        }

        fn first(&mut self, _: &Path) -> First {
            match self.0.state && self.0.init {
                true => First::Alive(INIT),
                false => First::NoProcess,
            }
        }

        fn is_past(&mut self, _: u64) -> bool {
            false
        }

        fn has_bundle(&mut self, _: &Path) -> bool {
            true
        }
    }

    /// The world that goes on before each question.
    struct Meanwhile<'a> {
        world: &'a mut World,
        steps: std::slice::Iter<'a, Vec<Step>>,
    }

    impl Meanwhile<'_> {
        fn go_on(&mut self) -> Now<'_> {
            for step in self.steps.next().into_iter().flatten() {
                self.world.take(*step);
            }
            Now(self.world)
        }
    }

    impl Facts for Meanwhile<'_> {
        fn is_alive(&mut self, process: ProcessId) -> bool {
            self.go_on().is_alive(process)
        }

        fn first(&mut self, state_file: &Path) -> First {
            self.go_on().first(state_file)
        }

        fn is_past(&mut self, boot_s: u64) -> bool {
            self.go_on().is_past(boot_s)
        }

        fn has_bundle(&mut self, bundle: &Path) -> bool {
            self.go_on().has_bundle(bundle)
        }
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop::sample::select(vec![
            Step::Starts,
            Step::Writes,
            Step::LauncherEnds,
            Step::Settles,
            Step::InitEnds,
            Step::Deletes,
        ]);
        proptest::collection::vec(step, 0..5)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        /// However a container creation, the launcher's exit, other readers and the container's end come
        /// between the questions: a container that is reported as finished is finished. The collector has the
        /// lock, so no process settles meanwhile; a reader has not, and reads the record once more.
        #[test]
        fn no_interleaving_reports_a_live_container_as_finished(
            before in steps(),
            meanwhile in proptest::collection::vec(steps(), 4),
            locked: bool,
        ) {
            let mut world = World::new();
            before.iter().for_each(|step| world.take(*step));
            let mut meanwhile = meanwhile;
            if locked {
                for steps in &mut meanwhile {
                    steps.retain(|step| !matches!(step, Step::Settles));
                }
            }
            let read = world.record.clone();
            let mut facts = Meanwhile { world: &mut world, steps: meanwhile.iter() };
            let seen = seen(read.clone(), &mut facts);
            let over = has_ended(&seen, "boot", &mut facts);
            if over {
                prop_assert!(!world.lives(), "{world:?}");
            }
        }

        /// And a finished container is reported as finished when everything is at rest: nothing is retained for ever.
        #[test]
        fn finished_container_is_reported_as_finished(before in steps()) {
            let mut world = World::new();
            before.iter().for_each(|step| world.take(*step));
            let seen = seen(world.record.clone(), &mut Now(&mut world));
            let over = has_ended(&seen, "boot", &mut Now(&mut world));
            // A launcher that lives has yet to say that its container has ended.
            if !world.launcher {
                prop_assert_eq!(over, !world.lives(), "{:?}", world);
            }
        }
    }

    #[test]
    fn state_is_read_again_after_launcher_exits() {
        let mut world = World::new();
        world.take(Step::Starts);
        // Nothing happens until the state was read; then the container is made, and its launcher
        // ends before it is asked for.
        let meanwhile = [vec![], vec![Step::Writes, Step::LauncherEnds]];
        let mut facts = Meanwhile { world: &mut world, steps: meanwhile.iter() };
        let seen = seen(launched(), &mut facts);
        assert_eq!(seen, launched(), "there was no state yet");
        assert!(!has_ended(&seen, "boot", &mut facts));
    }

    #[test]
    fn unreadable_state_retains_its_record() {
        struct Blind;
        impl Facts for Blind {
            fn is_alive(&mut self, _: ProcessId) -> bool {
                false
            }
            fn first(&mut self, _: &Path) -> First {
                First::Unknown
            }
            fn is_past(&mut self, _: u64) -> bool {
                false
            }
            fn has_bundle(&mut self, _: &Path) -> bool {
                true
            }
        }
        assert!(!has_ended(&launched(), "boot", &mut Blind));
        assert!(has_ended(&launched(), "another", &mut Blind), "nothing of an earlier boot lives");
        assert!(
            !has_ended(&launched(), "", &mut Blind),
            "a kernel that reports no boot proves nothing"
        );
    }
}
