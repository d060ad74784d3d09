//! `NV_ESC_RM_VID_HEAP_CONTROL`: memory is allocated, freed and told of by one number.

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::alloc::ToMake;
use crate::monitor::calls::serve::{Case, Over};
use crate::rm::call::{Object, VidHeap};
use crate::rm::memory::{self, Use, class_use};
use crate::rm::number::NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED;
use crate::rm::{Command, Layout, Meaning};

impl Case<'_> {
    pub(crate) fn heap(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        client: u32,
        parent: u32,
        function: VidHeap,
    ) -> Result<Reply, Over> {
        match function {
            VidHeap::Free { handle } => return self.free(command, layout, client, handle),
            VidHeap::Alloc { handle, class, size_bytes, layout: part } => {
                let object = Object { client, parent, handle };
                return self.heap_allocate(command, (layout, part), object, class, size_bytes);
            }
            _ => {}
        }
        self.still_waits()?;
        self.call(command)?;
        let part = if let VidHeap::Info { layout } = function { Some(layout) } else { None };
        let gpu = self.gpu(client, parent);
        self.show_usage(layout, part, gpu);
        Ok(self.executed(None))
    }

    fn heap_allocate(
        &mut self,
        command: &Command,
        (layout, part): (&'static Layout, &'static Layout),
        object: Object,
        class: u32,
        size_bytes: u64,
    ) -> Result<Reply, Over> {
        let mut lane = self.begin_on_lane()?;
        self.books().shares(object.client, self.target()?.process);
        let gpu = self.gpu_on(&lane, object.client, object.parent);
        let takes = class_use(class).does == Use::Takes;
        if takes && gpu.is_none() {
            return Err(self.on_no_gpu(object, layout));
        }
        let flags = self.field(part, Meaning::Flags).unwrap_or(0);
        let provided = flags | u64::from(NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED);
        self.patch(part, Meaning::Flags, provided);
        let making = ToMake { object, handle: part, head: layout };
        let charge = gpu.filter(|_| takes).map(|gpu| (gpu, size_bytes));
        let made = self.charged(&mut lane, command, making, charge, |case| {
            memory::given_bytes(part, &case.scratch.bytes)
        });
        self.patch(part, Meaning::Flags, flags);
        let made = made?;
        self.show_usage(layout, None, gpu);
        Ok(self.executed(made))
    }
}
