//! Reads a call to `nvidiactl` or `nvidiaN`, unwraps it, and has it judged by its bytes.
//!
//! That is done before anybody looks whose descriptor it is, which some calls don't need:
//! see [`Pass::asks_no_descriptor`](crate::monitor::calls::policy::Pass::asks_no_descriptor). What is read is the caller's if it still waits.

use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::policy::{self, Passed, Verdict};
use crate::monitor::calls::read_escape::{ReadEscape, Unread};
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::worker::log_limit::News;
use crate::rm::number::{NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE};
use crate::rm::{self, Answer, Call, Command, refuse};

/// What the driver says of an object that is made already, and of one that is exported. What it says
/// of a free, many calls are told.
const DONE_ALREADY: [u32; 2] = [NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE];

impl Case<'_> {
    /// Reads an escape and what it wraps, and judges it by that alone.
    pub(crate) fn read_escape(
        &mut self,
        request: u64,
        argument: u64,
    ) -> Result<ReadEscape, Unread> {
        let release = &self.parts.state.release;
        let mut command = Command::of_ioctl(request);
        let mut address = argument;
        self.read_struct(address, command.size()).map_err(Unread::Memory)?;
        let mut decoded =
            rm::decode(release, command, &self.scratch.bytes).map_err(Unread::Refused)?;
        let mut wrapped = false;
        if let Call::Wrapped { command: inner, address: at } = decoded.call {
            (command, address, wrapped) = (inner, at, true);
            self.read_struct(address, command.size()).map_err(Unread::Memory)?;
            decoded = rm::decode(release, command, &self.scratch.bytes).map_err(Unread::Refused)?;
        }
        let verdict = policy::judge(release, &decoded.call);
        Ok(ReadEscape { command, address, decoded, verdict, wrapped })
    }

    /// Deals with one whose descriptor is the driver's.
    pub(crate) fn resource_manager(
        &mut self,
        escape: Result<ReadEscape, Unread>,
    ) -> Result<Reply, Over> {
        let escape = escape.map_err(|unread| match unread {
            Unread::Memory(over) => over,
            Unread::Refused(refusal) => self.refused(&refusal, None),
        })?;
        let ReadEscape { command, address, decoded, verdict, wrapped } = escape;
        self.write_back(0, address, Copy::Struct);
        self.said = decoded.layout.map(|head| (head, &DONE_ALREADY[..]));
        match verdict {
            // Nothing is done, and whether it still waits is asked before it's told.
            Verdict::Refuse(answer) => {
                self.log_once(&decoded.call);
                Err(self.answer(answer, decoded.layout))
            }
            // What continues is unwrapped anew by the driver, and could be any call by then, also
            // a control. Nobody wraps what fits a request.
            Verdict::Continue(_) if wrapped => {
                Err(self.answer(Answer::Errno(refuse::EINVAL), None))
            }
            Verdict::Continue(pass) => {
                self.still_waits()?;
                if let (Passed::Client, Call::Alloc(alloc)) = (pass.kind, &decoded.call) {
                    self.books().unlearn_all(alloc.object.handle);
                }
                if let Call::Alloc(alloc) = &decoded.call {
                    self.passes_channel(alloc, decoded.layout)?;
                }
                Ok(self.continued(pass))
            }
            Verdict::Execute => self.execute(&command, &decoded),
        }
    }

    /// The log says once of each control and each class that it was refused, and of what isn't known
    /// what a report needs.
    fn log_once(&self, call: &Call) {
        let Some(refusal) = policy::refusal(&self.parts.state.release, call) else { return };
        let (news, size) = match *call {
            Call::Control { command, params_size, .. } => {
                (News::Control(command), Some(params_size))
            }
            Call::Alloc(alloc) => (News::Class(alloc.class), alloc.params_size),
            Call::AllocMemory { class, .. } | Call::AllocObject { class, .. } => {
                (News::Class(class), None)
            }
            _ => return,
        };
        if !self.parts.state.log.limit.allows_news(news) {
            return;
        }
        let size = size.map_or_else(|| "no size".to_owned(), |size| format!("{size} bytes"));
        match refusal.is_unknown() {
            true => self.write_log(&format!("{refusal} ({size}, by {})", self.program())),
            false => self.write_log(&refusal.to_string()),
        }
    }

    /// The name of the caller's program, which is of its own choice.
    fn program(&self) -> String {
        let pid = self.target.as_ref().map_or(self.tid(), |target| target.pid);
        let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        match self.is_valid() && !name.is_empty() {
            true => String::from_utf8_lossy(&name).trim_end().escape_debug().to_string(),
            false => "a program that is gone".to_owned(),
        }
    }
}
