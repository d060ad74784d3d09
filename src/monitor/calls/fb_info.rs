//! Calls that show how much memory there is: they show the quota.
//!
//! What the driver says of the GPU as a whole never goes out where the container's share
//! isn't known; then nothing is there to be seen.

use crate::ledger::Usage;
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::alloc::ToMake;
use crate::monitor::calls::serve::{Case, Over};
use crate::rm::call::Object;
use crate::rm::number::{NV_ERR_INVALID_PARAM_STRUCT, NV_OK};
use crate::rm::{Answer, Command, Layout, Meaning, fbinfo};

impl Case<'_> {
    /// `NV_ESC_RM_ALLOC_MEMORY` of a class that shows how much memory there is.
    pub(crate) fn allocate_memory(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        object: Object,
    ) -> Result<Reply, Over> {
        let mut lane = self.begin_on_lane()?;
        let gpu = self.gpu_on(&lane, object.client, object.parent);
        let address = self.field(layout, Meaning::Params).unwrap_or(0);
        let descriptor = self.field(layout, Meaning::Descriptor).unwrap_or(0);
        self.patch(layout, Meaning::Params, 0);
        self.patch(layout, Meaning::Descriptor, u64::from(u32::MAX));
        let making = ToMake { object, handle: layout, head: layout };
        let made = self.charged(&mut lane, command, making, None, |_| None);
        self.patch(layout, Meaning::Params, address);
        self.patch(layout, Meaning::Descriptor, descriptor);
        let made = made?;
        let shown = gpu.and_then(|gpu| self.books().ledger.usage(gpu));
        if let (Some(_), Some(limit)) = (made, self.field(layout, Meaning::Limit)) {
            let most = shown.map_or(0, |usage| usage.limit_bytes.saturating_sub(1));
            self.patch(layout, Meaning::Limit, limit.min(most));
        }
        Ok(self.executed(made))
    }

    /// Totals of a `NVOS32`, as the container is to see them.
    pub(crate) fn show_usage(
        &mut self,
        head: &'static Layout,
        part: Option<&'static Layout>,
        gpu: Option<usize>,
    ) {
        let usage = gpu.and_then(|gpu| self.books().ledger.usage(gpu));
        let (total, free) = usage.map_or((0, 0), |usage| (usage.limit_bytes, usage.free_bytes()));
        // Whatever the driver left there, the GPU's own figures don't go out.
        for layout in [Some(head), part].into_iter().flatten() {
            let largest = self.field(layout, Meaning::LargestFree).unwrap_or(0).min(free);
            self.patch(layout, Meaning::TotalMemory, total);
            self.patch(layout, Meaning::FreeMemory, free);
            self.patch(layout, Meaning::LargestFree, largest);
        }
    }

    /// `NV2080_CTRL_CMD_FB_GET_INFO`, in either form.
    pub(crate) fn show_memory(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        (client, object): (u32, u32),
        control: u32,
        (address, size): (u64, u32),
    ) -> Result<Reply, Over> {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let params = fbinfo::layout(&self.parts.state.release, control, size);
        let Some(params) = params else {
            let answer = Answer::Status(NV_ERR_INVALID_PARAM_STRUCT);
            return Err(self.answer(answer, Some(layout)));
        };
        self.read_params(address, size)?;
        let list = fbinfo::list(&self.parts.state.release, control, &self.scratch.params);
        let list = list.map_err(|refusal| self.refused(&refusal, Some(layout)))?;
        if let fbinfo::List::Elsewhere { address, entries } = list {
            self.scratch.list.reset_list(entries * fbinfo::ENTRY_BYTES);
            self.read_piece(address, (0, self.scratch.list.len()))?;
            let ours = self.scratch.list.address();
            if let Some(patch) = params.patch(Meaning::List, ours) {
                let _ = patch.apply(&mut self.scratch.params);
            }
        }
        self.still_waits()?;
        let ours = self.scratch.params.address();
        self.patch(layout, Meaning::Params, ours);
        let called = self.call(command);
        self.patch(layout, Meaning::Params, address);
        called?;
        if self.status(layout) == NV_OK {
            self.show_quota((client, object), list);
            self.write_back(1, address, Copy::Params);
        }
        if let fbinfo::List::Elsewhere { address, .. } = list {
            if let Some(patch) = params.patch(Meaning::List, address) {
                let _ = patch.apply(&mut self.scratch.params);
            }
            self.write_back(2, address, Copy::Piece(0, self.scratch.list.len()));
        }
        Ok(self.executed(None))
    }

    /// Puts the quota in the place of the GPU's memory.
    fn show_quota(&mut self, (client, object): (u32, u32), list: fbinfo::List) {
        let usage = self.gpu(client, object).and_then(|gpu| self.books().ledger.usage(gpu));
        let shown = fbinfo::Shown {
            total_bytes: usage.map_or(0, |usage| usage.limit_bytes),
            free_bytes: usage.map_or(0, Usage::free_bytes),
        };
        let (bytes, offset, entries) = match list {
            fbinfo::List::Inline { offset, entries } => (&mut self.scratch.params, offset, entries),
            fbinfo::List::Elsewhere { entries, .. } => (&mut self.scratch.list, 0, entries),
        };
        let patches: Vec<_> = fbinfo::patches(bytes, offset, entries, shown).collect();
        for patch in patches {
            let _ = patch.apply(bytes);
        }
    }
}
