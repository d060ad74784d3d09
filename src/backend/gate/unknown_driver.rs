//! A driver that is newer than all that the tables know: whether a monitor can see what it has.
//!
//! It's asked once for each version and boot, before the first monitor serves; one that answered is
//! remembered in a file. A driver that the tables know isn't asked, and costs a container creation nothing.

use std::fs;

use super::{Gate, GateError};
use cgpu_host::atomic_file::replace;
use cgpu_host::config::UnknownDriver;
use cgpu_host::process::boot_id;
use cgpu_monitor::daemon::examine;
use cgpu_monitor::gate::settings::Settings;
use nvrm::Release;
use nvrm::release::Standing;

/// The file in the state's directory that names the driver that answered, and the boot.
const ANSWERED: &str = "driver-answered";

impl Gate {
    /// Sees that a driver which isn't known answers what audits will ask it.
    ///
    /// # Errors
    ///
    /// Where it doesn't, unless the configuration has it served all the same.
    pub(super) fn see_that_it_answers(
        &self,
        release: &Release,
        settings: &Settings,
    ) -> Result<(), GateError> {
        let Standing::Newer { checked } = release.standing() else { return Ok(()) };
        let path = self.state_dir.join(ANSWERED);
        let answered = format!("{} {}\n", release.version(), boot_id(&self.proc_root));
        if fs::read_to_string(&path).is_ok_and(|text| text == answered) {
            return Ok(());
        }
        let Err(unanswered) = examine(&settings.nodes, release, &settings.gpus) else {
            // Where it can't be remembered the next create asks again.
            let _ = replace(&path, answered.as_bytes(), 0o600);
            return Ok(());
        };
        let version = release.version();
        match self.unknown_driver {
            UnknownDriver::Refuse => Err(GateError::Unknown { version, checked, unanswered }),
            UnknownDriver::Serve => {
                tracing::warn!(
                    id = settings.id,
                    "NO QUOTA IS SEEN TO: driver {version} is newer than the last that this version \
                     knows ({checked}), and a monitor can't see what containers hold: {unanswered}"
                );
                Ok(())
            }
        }
    }
}
