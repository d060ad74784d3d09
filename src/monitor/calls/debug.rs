//! What a debugger reads or writes of memory, part by part.
//!
//! Core dumps and debuggers access megabytes at once, of which a worker keeps no copy. Each part is a
//! call to the driver of its own, on a copy of that part; what was read goes to the caller at once, while
//! it waits. A call that is made again reads or writes the same.

use nix::errno::Errno;

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::serve::{Case, Over};
use crate::rm::control::Direction;
use crate::rm::control::debug::Access;
use crate::rm::{Command, Layout};

impl Case<'_> {
    pub(crate) fn access(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        access: &Access,
        params: u64,
    ) -> Result<Reply, Over> {
        // No answer is kept of it.
        self.scratch.input.clear();
        for part in access.parts() {
            self.scratch.list.reset(part.bytes);
            if access.direction == Direction::In {
                self.read_piece(part.address, (0, part.bytes))?;
            }
            self.still_waits()?;
            let copy = self.scratch.list.address();
            for patch in part.patches(copy) {
                let _ = patch.apply(&mut self.scratch.params);
            }
            let made = self.make_control(command, layout, params);
            for patch in access.patches() {
                let _ = patch.apply(&mut self.scratch.params);
            }
            if !made? {
                break;
            }
            if access.direction == Direction::Out {
                self.still_waits()?;
                let written = self.target()?.write(&[Some((part.address, &self.scratch.list))]);
                written.map_err(|errno: Errno| Reply::Errno(errno as i32))?;
            }
        }
        Ok(self.executed(None))
    }
}
