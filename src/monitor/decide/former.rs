//! Decides on calls that may have been made before: by a worker that ended before it answered, or for a thread that did
//! not get the answer and makes the call again.

use crate::rm::number::{
    NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND, NV_OK,
};

/// How often a call was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Earlier {
    /// A worker before was about to ask the driver for the call, or had asked.
    pub(crate) asked_before: bool,
    /// The thread makes its last call again, which was answered.
    pub(crate) repeats: bool,
}

/// What has become of an object that a call was to free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Freed {
    /// The status that the caller is told.
    pub(crate) status: u32,
    /// Whether this call freed the object, now or when it was made before.
    pub(crate) is_done: bool,
}

/// What a call has freed to which the driver says `status`. `is_client`: whether the object is the client itself. Then
/// `is_no_client` is asked, since the status doesn't tell: on a file that isn't the client's, the driver says the same
/// of any client.
pub(crate) fn freed(
    status: u32,
    is_client: bool,
    earlier: Earlier,
    is_no_client: impl FnOnce() -> bool,
) -> Freed {
    let is_gone = match status {
        NV_ERR_OBJECT_NOT_FOUND => true,
        NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => is_client,
        _ => false,
    };
    // The worker before ended before it took the object out of the books.
    let by_former = earlier.asked_before && is_gone && (!is_client || is_no_client());
    let told = by_former || earlier.repeats && is_gone;
    Freed { status: if told { NV_OK } else { status }, is_done: status == NV_OK || by_former }
}

/// Whether the worker before had the driver free the range at `base`, which the driver doesn't know: the books have the
/// range `known` with this length, or no range lies there any more. `length` is in bytes; `None` where the call has
/// none. `is_in_range` asks the driver about `base`.
pub(crate) fn was_range_freed(
    known: Option<(u64, u64)>,
    (base, length): (u64, Option<u64>),
    is_in_range: impl FnOnce() -> Option<bool>,
) -> bool {
    match known.filter(|(first, _)| *first == base) {
        Some((_, bytes)) => length.is_none_or(|length| length == bytes),
        None => is_in_range() == Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Earlier = Earlier { asked_before: false, repeats: false };
    const AFTER_A_WORKER: Earlier = Earlier { asked_before: true, repeats: false };
    const AGAIN: Earlier = Earlier { asked_before: false, repeats: true };

    #[test]
    fn an_object_is_freed_once_and_its_free_succeeds_however_often_it_is_made() {
        let free = |status, earlier| freed(status, false, earlier, || panic!("no client's"));
        let done = Freed { status: NV_OK, is_done: true };
        for earlier in [FIRST, AFTER_A_WORKER, AGAIN] {
            assert_eq!(free(NV_OK, earlier), done);
        }
        let gone = NV_ERR_OBJECT_NOT_FOUND;
        assert_eq!(free(gone, FIRST), Freed { status: gone, is_done: false });
        assert_eq!(free(gone, AFTER_A_WORKER), done);
        // The books know it from the first time.
        assert_eq!(free(gone, AGAIN), Freed { status: NV_OK, is_done: false });
        let other = NV_ERR_INVALID_CLIENT;
        assert_eq!(free(other, AFTER_A_WORKER), Freed { status: other, is_done: false });
    }

    #[test]
    fn a_client_is_freed_where_the_driver_has_no_such_client() {
        for status in [NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE] {
            let free = |is_no_client| freed(status, true, AFTER_A_WORKER, || is_no_client);
            assert_eq!(free(true), Freed { status: NV_OK, is_done: true });
            assert_eq!(free(false), Freed { status, is_done: false });
        }
    }

    #[test]
    fn a_range_that_is_gone_was_freed_by_the_same_call() {
        let asks = || panic!("the books know it");
        assert!(was_range_freed(Some((10, 5)), (10, Some(5)), asks));
        assert!(was_range_freed(Some((10, 5)), (10, None), asks));
        assert!(!was_range_freed(Some((10, 5)), (10, Some(6)), asks));
        for (known, told, was) in
            [(None, Some(false), true), (Some((8, 9)), Some(true), false), (None, None, false)]
        {
            assert_eq!(was_range_freed(known, (10, Some(5)), || told), was);
        }
    }
}
