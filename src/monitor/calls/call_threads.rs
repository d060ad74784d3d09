//! Whether the threads are there that calls need. They are started in
//! [`threads`](crate::monitor::calls::threads).

/// Which of them are there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallThreads {
    /// Nobody has called yet: none.
    #[default]
    Unneeded,
    /// So many of those that look after what calls make; the rest is to be started.
    Lacking(usize),
    /// All.
    Started,
}
