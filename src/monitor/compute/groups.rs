//! Forgets channel groups and channels that are gone.

use crate::monitor::compute::slices::Slices;
use crate::monitor::driver::Presence;
use crate::monitor::journal::Record;

impl Slices {
    /// Forgets the channel groups and channels that the driver frees together with this object.
    pub(crate) fn forget_freed(&self, client: u32, handle: u32) {
        let mut books = self.state.books();
        let groups = books.groups.freed(client, handle);
        let channels = books.channels.freed(client, handle, &groups);
        for (client, handle) in channels.into_iter().chain(groups) {
            books.write(Record::Ungroup { client, handle });
            self.shares.wake();
        }
    }

    /// Forgets the channel groups and channels of a GPU that the driver doesn't have any more.
    pub(crate) fn forget_gone_groups(&self, gpu: usize) {
        let own = self.driver.own_client();
        let Some(own) = own.filter(|own| own.can_tell()) else { return };
        let (known, channels) = {
            let books = self.state.books();
            (books.groups.on(gpu), books.outside_groups(gpu))
        };
        // A channel may still be in the making, as long as its client is there.
        for (client, handle) in channels {
            if own.presence(client, handle) == Presence::NoClient {
                self.state.books().write(Record::Ungroup { client, handle });
            }
        }
        for ((client, handle), group) in known {
            let is_gone = match own.presence(client, handle) {
                Presence::There => false,
                Presence::NoClient => true,
                // A group whose making was continued may still be in the making.
                Presence::NoObject => group.certain,
            };
            let mut books = self.state.books();
            // Another thread may have made a new group of that name.
            if is_gone && books.groups.named((client, handle)) == Some(group) {
                books.write(Record::Ungroup { client, handle });
            }
        }
    }
}
