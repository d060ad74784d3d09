//! Controls: made on copies of their parameters, whatever these point at included.
//!
//! The driver follows addresses in the memory of whoever calls it, which is ours. So none
//! that the caller chose is left in what it's given: see [`control`](crate::rm::control).

use nix::errno::Errno;

use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::serve::{Case, Over};
use crate::rm::control::debug::Access;
use crate::rm::control::{
    Direction, Known, MAX_PARAMS_BYTES, Pieces, check, clients, points_into, processes,
};
use crate::rm::number::{
    NV_ERR_INSUFFICIENT_PERMISSIONS, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_PARAM_STRUCT, NV_OK,
};
use crate::rm::{Answer, Call, Command, Layout, Meaning};

/// Bytes of parameters of which an answer is kept for a caller that was interrupted: what
/// is larger tells something, and can be asked again.
const ONCE_BYTES: usize = 4096;

impl Case<'_> {
    pub(crate) fn control(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        call: &Call,
    ) -> Result<Reply, Over> {
        let Call::Control { client, object, command: control, params, params_size, flags } = *call
        else {
            return Err(Reply::Errno(Errno::EINVAL as i32));
        };
        let known = check(&self.parts.state.release, control, flags);
        let known = known.map_err(|refusal| self.refused(&refusal, Some(layout)))?;
        if let Known::Pretended(_) = known {
            return Err(self.pretended(layout));
        }
        if known == Known::Memory {
            let params = (params, params_size);
            return self.show_memory(command, layout, (client, object), control, params);
        }
        let size = usize::try_from(params_size).unwrap_or(usize::MAX);
        if size > MAX_PARAMS_BYTES {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)));
        }
        // Where there are none the driver says what it says to their size.
        if params != 0 {
            self.read_params(params, size)?;
        }
        if !clients::are_all(client, control, &self.scratch.params) {
            self.log(&format!("control {control:#x} of a client that isn't the caller's"));
            let denied = Answer::Status(NV_ERR_INSUFFICIENT_PERMISSIONS);
            return Err(self.answer(denied, Some(layout)));
        }
        if let Some(access) = Access::of(control, &self.scratch.params) {
            return self.access(command, layout, &access, params);
        }
        match known {
            Known::Nested => self.nested(command, layout, control, params),
            Known::Processes => self.processes(command, layout, control, params),
            Known::Exports(does) => {
                let place = (command, layout);
                self.export_or_import(place, does, client, params)
            }
            Known::Opaque if points_into(&self.scratch.params, &self.parts.state.own_ranges) => {
                Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)))
            }
            // Those are dealt with by now.
            Known::Memory | Known::Pretended(_) | Known::Refused(_) => {
                Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)))
            }
            Known::Flat | Known::Opaque => {
                self.settle()?;
                let asked = self.scratch.params.first_chunk().copied();
                if self.steers((client, object), control, layout)? {
                    return Err(self.pretended(layout));
                }
                let done = self.make_control(command, layout, params)?;
                self.steered((client, object), control, asked, done);
                self.give_back(params, done);
                Ok(self.executed(None))
            }
        }
    }

    /// All is read: whether the caller still waits, and was answered already.
    pub(crate) fn settle(&mut self) -> Result<(), Over> {
        if self.scratch.params.len() <= ONCE_BYTES {
            return self.begin();
        }
        self.scratch.input.clear();
        self.still_waits()
    }

    /// Makes it on the parameters that we have, and tells whether it was done.
    pub(crate) fn make_control(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        params: u64,
    ) -> Result<bool, Over> {
        // Where the caller has none, the driver gets none.
        let ours = if params == 0 { 0 } else { self.scratch.params.address() };
        self.patch(layout, Meaning::Params, ours);
        let called = self.call(command);
        self.patch(layout, Meaning::Params, params);
        called?;
        Ok(self.status(layout) == NV_OK)
    }

    /// The parameters go back. Of a control that failed too, where it says something in them;
    /// where it doesn't, the driver writes nothing.
    pub(crate) fn give_back(&mut self, params: u64, done: bool) {
        if params != 0 && (done || *self.scratch.params_read() != *self.scratch.params) {
            self.write_back(1, params, Copy::Params);
        }
    }

    fn nested(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        control: u32,
        params: u64,
    ) -> Result<Reply, Over> {
        let pieces = Pieces::of(control, &self.scratch.params);
        let pieces = pieces.map_err(|answer| self.answer(answer, Some(layout)))?;
        // Even of nothing there is an address.
        self.scratch.list.reset_list(pieces.bytes().max(8));
        for piece in pieces.iter().filter(|piece| piece.direction != Direction::Out) {
            self.read_piece(piece.address, (piece.at, piece.bytes))?;
        }
        self.settle()?;
        let base = self.scratch.list.address();
        for patch in pieces.to_copies(base) {
            let _ = patch.apply(&mut self.scratch.params);
        }
        let made = self.make_control(command, layout, params);
        for patch in pieces.back() {
            let _ = patch.apply(&mut self.scratch.params);
        }
        let done = made?;
        self.give_back(params, done);
        if done {
            for (place, piece) in pieces.iter().enumerate() {
                if piece.direction != Direction::In {
                    self.write_back(2 + place, piece.address, Copy::Piece(piece.at, piece.bytes));
                }
            }
        }
        Ok(self.executed(None))
    }

    /// What tells of processes tells of the container's, as the caller numbers them.
    fn processes(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        control: u32,
        params: u64,
    ) -> Result<Reply, Over> {
        if !processes::is_size(control, self.scratch.params.len()) {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT), Some(layout)));
        }
        let ours = self.books().processes.clone();
        let target = self.target()?;
        let numbers = self.parts.callers.pid_maps.of(target.tid, target.process, &ours);
        self.still_waits()?;
        let scratch = &mut *self.scratch;
        scratch.list.reset(scratch.params.len());
        scratch.list.copy_from_slice(&scratch.params);
        processes::ask(control, &mut self.scratch.params, |pid| numbers.ours(pid));
        if self.make_control(command, layout, params)? {
            let scratch = &mut *self.scratch;
            processes::show(control, &mut scratch.params, &scratch.list, |pid| numbers.theirs(pid));
            self.write_back(1, params, Copy::Params);
        }
        Ok(self.executed(None))
    }
}
